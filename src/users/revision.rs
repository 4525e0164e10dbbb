//! Which state a record is in, and changes that depend on it.

use time::OffsetDateTime;

/// The state of a record; no two that it ever had are equal, whoever has changed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Revision {
    /// Number that every change of the record moves.
    pub version: i64,
    /// Time of the last change.
    pub updated_at: OffsetDateTime,
}

/// The states in which a record may be changed or removed. By default: all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Condition {
    /// Allowed revisions; `None` allows each.
    pub only: Option<Vec<Revision>>,
    /// Revisions that are not allowed.
    pub except: Vec<Revision>,
}

impl Condition {
    /// Returns true if every revision meets the condition.
    pub fn is_empty(&self) -> bool {
        self.only.is_none() && self.except.is_empty()
    }

    /// Returns true if the condition allows every revision, or one at most. Only such conditions can be batched.
    pub fn is_simple(&self) -> bool {
        self.only.as_ref().is_none_or(|only| only.len() <= 1) && self.except.is_empty()
    }

    /// Returns true if the revision meets the condition.
    pub fn holds(&self, revision: Revision) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(&revision)) && !self.except.contains(&revision)
    }
}
