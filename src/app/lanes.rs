//! What the next step of a request needs: the lane that it is queued in, and what it may have to wait for there.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

/// A kind of step. Steps of one lane form batches, and wait for no other lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    /// Reads of one user, by its id, its address or the key of its create: one query for all of a kind.
    Find,
    /// Pages: one query for several.
    List,
    /// Creates: one statement and one commit for all.
    Create,
    /// Changes of users, passwords aside: one statement and one commit for all updates, one for all deletes.
    Change,
    /// A write that is never batched: of passwords, of addresses, or on conditions of several states.
    Single,
    /// A password to hash or to check: a core for its time, and no session.
    Hash,
}

impl Lane {
    /// Their labels for figures, in the order of their numbers.
    pub const LABELS: [&str; 6] = ["find", "list", "create", "change", "single", "hash"];

    /// Each of them, in the order of their numbers (`lane as usize`).
    pub const ALL: [Lane; 6] = [Lane::Find, Lane::List, Lane::Create, Lane::Change, Lane::Single, Lane::Hash];

    /// Whether its statements change users: these may meet locks that reads do not.
    pub fn writes(self) -> bool {
        matches!(self, Lane::Create | Lane::Change | Lane::Single)
    }

    /// Whether its statements change users that there are.
    pub fn changes_rows(self) -> bool {
        matches!(self, Lane::Change | Lane::Single)
    }
}

/// What the next step of a request needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Where it is queued.
    pub lane: Lane,
    /// The user that the request changes: changes of one user are made in the order of their arrival.
    pub row: Option<i64>,
    /// Bytes of memory that the step takes beside those that the request holds, where they are many.
    pub memory: usize,
    /// Whose password is hashed or checked, in this step or a later one.
    pub hash: Option<Account>,
}

impl Needs {
    /// Nothing but its lane.
    pub const fn of(lane: Lane) -> Needs {
        Needs { lane, row: None, memory: 0, hash: None }
    }

    /// The same, of a request that changes this user.
    pub const fn row(lane: Lane, user: i64) -> Needs {
        Needs { row: Some(user), ..Needs::of(lane) }
    }
}

/// The account that a password is of: accounts take turns in the queue for hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Account(pub Option<u64>);

impl Account {
    /// One that no other request is about.
    pub const NEW: Account = Account(None);

    /// That of an e-mail address, in whatever case. Its number is in the upper half of all numbers.
    pub fn of(email: &str) -> Account {
        let mut hasher = DefaultHasher::new();
        email.to_ascii_lowercase().hash(&mut hasher);
        Account(Some(hasher.finish() | 1 << 63))
    }
}

/// How long a step that met a lock waits before it is executed again, where it was so often before.
pub(crate) fn retry_pause(retries: usize) -> Duration {
    const MILLISECONDS: [u64; 4] = [10, 20, 50, 100];
    Duration::from_millis(MILLISECONDS[retries.min(MILLISECONDS.len() - 1)])
}
