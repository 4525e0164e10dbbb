//! Revisions of a record, and conditions that name revisions (`If-Match`, `If-None-Match`).

use time::OffsetDateTime;

/// A revision of a record. Every change, also one by SQL, makes a revision that the record has never had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Revision {
    /// Number that every change of the record draws anew.
    pub version: i64,
    /// Time of the last change.
    pub updated_at: OffsetDateTime,
}

/// Revisions that a request names; `None` for `*`, which names every revision.
pub type Revisions = Option<Vec<Revision>>;

/// A precondition of a request: the revisions of the record with which the request is executed. By default, every
/// revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// Allowed revisions (`If-Match`).
    pub only: Revisions,
    /// Revisions that are not allowed (`If-None-Match`), because the client that reads has them already.
    pub except: Revisions,
}

impl Default for Condition {
    fn default() -> Condition {
        Condition { only: None, except: Some(Vec::new()) }
    }
}

impl Condition {
    /// Returns whether every revision meets the condition.
    pub fn is_empty(&self) -> bool {
        *self == Condition::default()
    }

    /// Returns whether the condition allows every revision, or one at most. A batch takes only such conditions.
    pub fn fits_batch(&self) -> bool {
        self.only.as_ref().is_none_or(|only| only.len() <= 1)
            && self.except.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns whether `If-Match` allows the revision. Does not look at `If-None-Match`.
    pub fn allows(&self, revision: Revision) -> bool {
        names_revision(&self.only, revision)
    }

    /// Returns whether the revision meets the whole condition.
    pub fn holds(&self, revision: Revision) -> bool {
        self.allows(revision) && !names_revision(&self.except, revision)
    }
}

fn names_revision(revisions: &Revisions, revision: Revision) -> bool {
    revisions.as_ref().is_none_or(|named| named.contains(&revision))
}
