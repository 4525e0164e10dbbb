//! The queue for hashes, bounded by time.

use super::Item;
use crate::app::Account;
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

/// A command that would wait longer than this for a hash is refused at once.
const HASH_WAIT: Duration = Duration::from_secs(2);

/// Commands that wait for a hash. Accounts take turns, so that one that is guessed at holds up no other's login.
pub(super) struct HashQueue<T> {
    queues: HashMap<u64, VecDeque<Item<T>>>,
    /// Accounts with something queued, the next one first.
    turns: VecDeque<u64>,
    pub queued: usize,
    /// Admitted and not done, by account; those before their look-up, and those in flight, included.
    admitted: HashMap<u64, usize>,
    pub all_admitted: usize,
    anonymous_admitted: usize,
    /// For those without an account: a number each.
    anonymous: u64,
    /// How long one hash takes, in the mean of the last ones.
    takes: Duration,
}

impl<T> Default for HashQueue<T> {
    fn default() -> Self {
        HashQueue {
            queues: HashMap::new(),
            turns: VecDeque::new(),
            queued: 0,
            admitted: HashMap::new(),
            all_admitted: 0,
            anonymous_admitted: 0,
            anonymous: 0,
            // The work of OWASP's parameters on a core of 2023; learned from the first hash on.
            takes: Duration::from_millis(20),
        }
    }
}

impl<T> HashQueue<T> {
    /// Whether one more would be hashed in time: behind all that are admitted, or in its turn among the accounts.
    pub fn admit(&mut self, account: Account, at_once: usize) -> bool {
        let same = account.0.and_then(|account| self.admitted.get(&account)).copied().unwrap_or(0);
        let others = self.admitted.len() + self.anonymous_admitted;
        let before = self.all_admitted.min(others * (same + 1));
        let wait = self.takes * u32::try_from(before).unwrap_or(u32::MAX) / at_once as u32;
        if wait > HASH_WAIT {
            return false;
        }
        self.all_admitted += 1;
        match account.0 {
            Some(account) => *self.admitted.entry(account).or_default() += 1,
            None => self.anonymous_admitted += 1,
        }
        true
    }

    pub fn leave(&mut self, Account(account): Account) {
        self.all_admitted -= 1;
        self.anonymous_admitted -= usize::from(account.is_none());
        if let Some(account) = account
            && let Some(count) = self.admitted.get_mut(&account)
        {
            *count -= 1;
            if *count == 0 {
                self.admitted.remove(&account);
            }
        }
    }

    pub fn push(&mut self, item: Item<T>) {
        let account = item.needs.hash.and_then(|account| account.0).unwrap_or_else(|| {
            self.anonymous += 1;
            // Accounts have the upper half of the numbers.
            self.anonymous & (u64::MAX >> 1)
        });
        let queue = self.queues.entry(account).or_default();
        if queue.is_empty() {
            self.turns.push_back(account);
        }
        queue.push_back(item);
        self.queued += 1;
    }

    pub fn pop(&mut self) -> Option<Item<T>> {
        let account = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&account)?;
        let item = queue.pop_front();
        match queue.is_empty() {
            true => drop(self.queues.remove(&account)),
            false => self.turns.push_back(account),
        }
        self.queued -= usize::from(item.is_some());
        item
    }

    pub fn take_unless(&mut self, awaited: &mut impl FnMut(&T) -> bool) -> Vec<Item<T>> {
        let mut dropped = Vec::new();
        let all: Vec<Item<T>> = std::iter::from_fn(|| self.pop()).collect();
        for item in all {
            match awaited(&item.work) {
                true => self.push(item),
                false => dropped.push(item),
            }
        }
        dropped
    }

    pub fn learn(&mut self, took: Duration) {
        self.takes = (self.takes * 7 + took) / 8;
    }
}
