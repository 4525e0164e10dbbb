//! The queue for hashes, bounded by time.

use super::{Item, Peer, turns::RoundRobin};
use crate::app::Account;
use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

/// A command that would wait longer than this for a hash is refused at once.
const HASH_WAIT: Duration = Duration::from_secs(2);

/// Commands that wait for a hash. Peers take turns, and so do the accounts of one peer: a peer that guesses at
/// passwords holds up no other peer's login.
pub(super) struct HashQueue<T> {
    peers: RoundRobin<Peer, RoundRobin<u64, VecDeque<Item<T>>>>,
    pub queued: usize,
    /// Admitted and not done, by peer; those before their look-up, and those in flight, included.
    admitted: HashMap<Peer, Admitted>,
    pub all_admitted: usize,
    /// For those without an account: a number each.
    anonymous: u64,
    /// How long one hash takes, in the mean of the last ones.
    takes: Duration,
}

/// What a peer has in the queue, or on the way to it.
#[derive(Default)]
struct Admitted {
    all: usize,
    accounts: HashMap<u64, usize>,
    anonymous: usize,
}

impl<T> Default for HashQueue<T> {
    fn default() -> Self {
        HashQueue {
            peers: RoundRobin::default(),
            queued: 0,
            admitted: HashMap::new(),
            all_admitted: 0,
            anonymous: 0,
            // The work of OWASP's parameters on a core of 2023; learned from the first hash on.
            takes: Duration::from_millis(20),
        }
    }
}

impl<T> HashQueue<T> {
    /// Whether one more would be hashed in time: in its turn among the accounts of its peer, and in that one's among
    /// the peers.
    pub fn admit(&mut self, peer: Peer, Account(account): Account, at_once: usize) -> bool {
        let own = self.admitted.get(&peer);
        let of_peer = own.map_or(0, |own| own.before(account));
        let others = self.all_admitted - own.map_or(0, |own| own.all);
        let other_peers = self.admitted.len() - usize::from(own.is_some());
        let before = of_peer + others.min(other_peers * (of_peer + 1));
        let wait = self.takes * u32::try_from(before).unwrap_or(u32::MAX) / at_once as u32;
        if wait > HASH_WAIT {
            return false;
        }
        self.all_admitted += 1;
        let own = self.admitted.entry(peer).or_default();
        own.all += 1;
        match account {
            Some(account) => *own.accounts.entry(account).or_default() += 1,
            None => own.anonymous += 1,
        }
        true
    }

    pub fn leave(&mut self, peer: Peer, Account(account): Account) {
        let own = self.admitted.get_mut(&peer).expect("it was admitted");
        self.all_admitted -= 1;
        own.all -= 1;
        match account {
            None => own.anonymous -= 1,
            Some(account) => {
                let count = own.accounts.get_mut(&account).expect("it was admitted");
                *count -= 1;
                if *count == 0 {
                    own.accounts.remove(&account);
                }
            }
        }
        if own.all == 0 {
            self.admitted.remove(&peer);
        }
    }

    pub fn push(&mut self, item: Item<T>) {
        let Account(account) = item.needs.hash.unwrap_or(Account::NEW);
        let account = account.unwrap_or_else(|| {
            self.anonymous += 1;
            // Accounts have the upper half of the numbers.
            self.anonymous & (u64::MAX >> 1)
        });
        self.peers.queue(item.peer).queue(account).push_back(item);
        self.queued += 1;
    }

    pub fn pop(&mut self) -> Option<Item<T>> {
        let next = self.peers.take(0, |accounts| {
            let item = accounts.take(0, |queue| (queue.pop_front(), !queue.is_empty()));
            (item.flatten(), !accounts.is_empty())
        });
        let item = next.flatten();
        self.queued -= usize::from(item.is_some());
        item
    }

    pub fn take_unless(&mut self, awaited: &mut impl FnMut(&T) -> bool) -> Vec<Item<T>> {
        let (kept, dropped): (Vec<_>, Vec<_>) =
            std::iter::from_fn(|| self.pop()).partition(|item| awaited(&item.work));
        kept.into_iter().for_each(|item| self.push(item));
        dropped
    }

    pub fn learn(&mut self, took: Duration) {
        self.takes = (self.takes * 7 + took) / 8;
    }
}

impl Admitted {
    /// How many of them are hashed before one more of this account, in its turn.
    fn before(&self, account: Option<u64>) -> usize {
        let same = account.and_then(|account| self.accounts.get(&account)).copied().unwrap_or(0);
        let accounts = self.accounts.len() + self.anonymous;
        self.all.min(accounts * (same + 1))
    }
}
