//! What a command needs next: the lane that it is queued in, and what it may have to wait for there.

use std::time::Duration;

/// A kind of statement, or a hash. Commands of one lane form batches, and wait for no other lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// Reads of one user, by its id or its address: one query for all of a kind.
    Find,
    /// Pages: one query for several.
    List,
    /// Creates: one statement and one commit for all.
    Create,
    /// Changes of users, passwords aside: one statement and one commit for all updates, one for all deletes.
    Change,
    /// A write that is never batched: of passwords, of addresses, or on conditions of several states.
    Single,
    /// A password to hash or to check, and the look-up before: a core for its time, and no session meanwhile.
    Hash,
}

impl Lane {
    /// Their labels for figures, in the order of their numbers.
    pub const LABELS: [&str; 6] = ["find", "list", "create", "change", "single", "hash"];

    /// Each of them, in the order of their numbers (`lane as usize`).
    pub const ALL: [Lane; 6] = [Lane::Find, Lane::List, Lane::Create, Lane::Change, Lane::Single, Lane::Hash];

    /// Whether its statements change users that there are.
    pub fn changes_rows(self) -> bool {
        matches!(self, Lane::Change | Lane::Single)
    }
}

/// What a command needs next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Where it is queued.
    pub lane: Lane,
    /// The user that the request changes: changes of one user are made in the order of their arrival.
    pub row: Option<i64>,
    /// Users that a list has, at most.
    pub users: usize,
}

impl Needs {
    /// Nothing but its lane.
    pub const fn of(lane: Lane) -> Needs {
        Needs { lane, row: None, users: 0 }
    }

    /// The same, of a request that changes this user.
    pub const fn row(lane: Lane, user: i64) -> Needs {
        Needs { row: Some(user), ..Needs::of(lane) }
    }
}

/// How long a command waits that met a lock, before it is executed again; `retries`: how often it was already.
pub(crate) fn retry_pause(retries: usize) -> Duration {
    Duration::from_millis(10 << retries.min(3))
}
