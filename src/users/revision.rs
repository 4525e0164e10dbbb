//! Which state a record is in, and changes that depend on it.

use time::OffsetDateTime;

/// The state of a record; no two that it ever had are equal, whoever has changed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Revision {
    /// Number that every change of the record draws anew.
    pub version: i64,
    /// Time of the last change.
    pub updated_at: OffsetDateTime,
}

/// Revisions that a request names; `None` names each.
pub type Revisions = Option<Vec<Revision>>;

/// The states in which a record may be changed or removed, or in which a client reads it. By default: all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// Allowed revisions (`If-Match`).
    pub only: Revisions,
    /// Revisions that are not allowed (`If-None-Match`): a client that reads has them already.
    pub except: Revisions,
}

impl Default for Condition {
    fn default() -> Condition {
        Condition { only: None, except: Some(Vec::new()) }
    }
}

impl Condition {
    /// Returns true if every revision meets the condition.
    pub fn is_empty(&self) -> bool {
        *self == Condition::default()
    }

    /// Returns true if the condition allows every revision, or one at most. Only such conditions can be batched.
    pub fn is_simple(&self) -> bool {
        self.only.as_ref().is_none_or(|only| only.len() <= 1)
            && self.except.as_ref().is_some_and(Vec::is_empty)
    }

    /// Returns true if the revision is one of the allowed ones, whether it is excepted or not.
    pub fn allows(&self, revision: Revision) -> bool {
        names(&self.only, revision)
    }

    /// Returns true if the revision meets the condition.
    pub fn holds(&self, revision: Revision) -> bool {
        self.allows(revision) && !names(&self.except, revision)
    }
}

fn names(revisions: &Revisions, revision: Revision) -> bool {
    revisions.as_ref().is_none_or(|named| named.contains(&revision))
}
