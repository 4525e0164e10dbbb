//! Revisions of a record, and conditions that name revisions (`If-Match`, `If-None-Match`).

use time::OffsetDateTime;

/// A revision of a record. Every change, also a change by SQL, makes a revision that the record has never had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Revision {
    /// A number that every change of the record replaces with a new one.
    pub version: i64,
    /// The time of the last change.
    pub updated_at: OffsetDateTime,
}

/// Revisions that a request names; `None` for `*`, which names every revision.
pub type Revisions = Option<Vec<Revision>>;

/// The precondition of a request, which is executed only if the record is at an allowed revision. The default allows
/// every revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The allowed revisions (`If-Match`).
    pub if_match: Revisions,
    /// The revisions that are not allowed (`If-None-Match`), because the client already has them.
    pub if_none_match: Revisions,
}

impl Default for Condition {
    fn default() -> Condition {
        Condition { if_match: None, if_none_match: Some(Vec::new()) }
    }
}

impl Condition {
    /// Returns whether every revision meets the condition.
    pub fn is_always_met(&self) -> bool {
        *self == Condition::default()
    }

    /// Returns whether a batch may have a change with this condition: the condition allows every revision, or at most
    /// one.
    pub fn fits_batch(&self) -> bool {
        self.if_match.as_ref().is_none_or(|revisions| revisions.len() <= 1)
            && self.if_none_match.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns whether `If-Match` allows the revision. Does not look at `If-None-Match`.
    pub fn if_match_allows(&self, revision: Revision) -> bool {
        names_revision(&self.if_match, revision)
    }

    /// Returns whether the revision meets the whole condition.
    pub fn is_met_by(&self, revision: Revision) -> bool {
        self.if_match_allows(revision) && !names_revision(&self.if_none_match, revision)
    }
}

fn names_revision(revisions: &Revisions, revision: Revision) -> bool {
    revisions.as_ref().is_none_or(|named| named.contains(&revision))
}
