//! How often a password may be guessed: attempts of one peer at one account, in a minute.
//!
//! Counts only in the memory of this process, and at most [`PAIRS`] pairs of a peer and an account. When all are used,
//! the peer with the most of them is refused further accounts, and any other peer takes the place of that peer's oldest
//! pair. Knows nothing of passwords or of the database: an account that does not exist is counted like any other.

use crate::{config::PeerKey, error::Error};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap, hash_map::RandomState};
use std::time::{Duration, Instant};
use std::{hash::BuildHasher, sync::Arc};

/// The time that attempts are counted for, from the first one on.
const MINUTE: Duration = Duration::from_secs(60);

/// Pairs that are remembered: some 2 MiB. An attempt whose password was not hashed is forgotten, and fewer passwords can be
/// hashed in a minute.
const PAIRS: usize = 16 << 10;

/// Wrong passwords of the last minute.
#[derive(Debug)]
pub struct Throttle {
    /// The most wrong attempts of one peer at one account in a minute; 0 for any number.
    limit: u32,
    /// Seeded at random for each process, so that no client can choose pairs that count as one.
    hasher: RandomState,
    attempts: Mutex<Attempts>,
}

/// An attempt that was admitted. It does not count any more once this is dropped, unless it was
/// [wrong](Attempt::wrong).
#[derive(Debug)]
pub struct Attempt(Option<(Arc<Throttle>, u64)>);

/// The hash of a peer and an account.
type Pair = u64;

#[derive(Debug, Default)]
struct Attempts {
    /// The time that has passed on command: the clock is ahead by it.
    advanced: Duration,
    counts: HashMap<Pair, Count>,
    /// The pairs of each peer, the oldest first.
    by_peer: HashMap<PeerKey, BTreeSet<(Instant, Pair)>>,
}

#[derive(Debug, Clone, Copy)]
struct Count {
    attempts: u32,
    since: Instant,
    peer: PeerKey,
}

impl Throttle {
    /// Returns a throttle of `limit` wrong attempts a minute; 0 for any number.
    pub fn new(limit: u32) -> Arc<Throttle> {
        Arc::new(Throttle { limit, hasher: RandomState::new(), attempts: Mutex::default() })
    }

    /// Counts an attempt of a peer (`None`: any client without an address, as on a Unix socket) at an account, an
    /// e-mail address in whatever case. [`Error::TooManyAttempts`] beyond the limit.
    pub fn admit(self: &Arc<Self>, email: &str, peer: PeerKey, now: Instant) -> Result<Attempt, Error> {
        if self.limit == 0 {
            return Ok(Attempt(None));
        }
        let pair = self.hasher.hash_one((email.to_ascii_lowercase(), peer));
        let mut attempts = self.attempts.lock();
        let now = now + attempts.advanced;
        let refused = |since: Instant| {
            let left = (since + MINUTE).saturating_duration_since(now);
            Err(Error::TooManyAttempts(left.as_secs() + 1))
        };
        if attempts.counts.get(&pair).is_some_and(|count| now >= count.since + MINUTE) {
            attempts.remove(pair);
        }
        match attempts.counts.get_mut(&pair) {
            Some(count) if count.attempts >= self.limit => return refused(count.since),
            Some(count) => count.attempts += 1,
            None => {
                if let Err(oldest) = attempts.make_room(peer, now) {
                    return refused(oldest);
                }
                attempts.counts.insert(pair, Count { attempts: 1, since: now, peer });
                attempts.by_peer.entry(peer).or_default().insert((now, pair));
            }
        }
        Ok(Attempt(Some((Arc::clone(self), pair))))
    }

    /// Lets time pass: attempts that are older than a minute then do not count any more.
    #[cfg(any(test, feature = "testing"))]
    pub fn advance(&self, time: Duration) {
        self.attempts.lock().advanced += time;
    }
}

impl Attempt {
    /// Lets the attempt count for its minute, as the password was wrong.
    pub fn wrong(&mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Some((throttle, pair)) = &self.0 else { return };
        let mut attempts = throttle.attempts.lock();
        match attempts.counts.get_mut(pair) {
            Some(count) if count.attempts > 1 => count.attempts -= 1,
            _ => attempts.remove(*pair),
        }
    }
}

impl Attempts {
    fn remove(&mut self, pair: Pair) {
        if let Some(Count { since, peer, .. }) = self.counts.remove(&pair)
            && let Some(own) = self.by_peer.get_mut(&peer)
        {
            own.remove(&(since, pair));
            if own.is_empty() {
                self.by_peer.remove(&peer);
            }
        }
    }

    /// Makes a full table accept a pair of this peer: pairs older than a minute go, else the peer with the most pairs
    /// loses its oldest one. If this peer has the most itself, returns the time since which its oldest pair counts.
    fn make_room(&mut self, peer: PeerKey, now: Instant) -> Result<(), Instant> {
        if self.counts.len() < PAIRS {
            return Ok(());
        }
        let is_over = |(since, _): &&(Instant, Pair)| now >= *since + MINUTE;
        let over = self.by_peer.values().flat_map(|pairs| pairs.iter().take_while(is_over));
        let over: Vec<Pair> = over.map(|(_, pair)| *pair).collect();
        over.into_iter().for_each(|pair| self.remove(pair));
        let own = self.by_peer.get(&peer).map_or(0, BTreeSet::len);
        let most = self.by_peer.values().max_by_key(|pairs| pairs.len());
        match most.and_then(BTreeSet::first).copied() {
            _ if self.counts.len() < PAIRS => {}
            Some((since, _)) if most.is_some_and(|pairs| own == pairs.len()) => return Err(since),
            Some((_, pair)) => self.remove(pair),
            None => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    const A: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)));
    const B: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)));

    /// Sends a wrong password; an error if it is not admitted.
    fn guess(throttle: &Arc<Throttle>, email: &str, peer: Option<IpAddr>, now: Instant) -> Result<(), Error> {
        throttle.admit(email, peer, now).map(|mut attempt| attempt.wrong())
    }

    #[test]
    fn attempts_are_counted_by_peer_and_account() {
        let (throttle, start) = (Throttle::new(3), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for email in ["ada@example.com", "ADA@example.com", "ada@EXAMPLE.com"] {
            guess(&throttle, email, A, at(0)).unwrap();
        }
        let refused = guess(&throttle, "ada@example.com", A, at(20)).unwrap_err();
        assert!(matches!(refused, Error::TooManyAttempts(41)), "{refused:?}");
        // Attempts of another peer, or at another account, are counted apart.
        guess(&throttle, "ada@example.com", B, at(20)).unwrap();
        guess(&throttle, "ada@example.com", None, at(20)).unwrap();
        guess(&throttle, "bob@example.com", A, at(20)).unwrap();
        // The case of ASCII letters alone is ignored: these are four accounts.
        for email in ["é@example.com", "É@example.com", "\u{130}@example.com", "i\u{307}@example.com"] {
            for _ in 0..3 {
                guess(&throttle, email, A, at(20)).unwrap();
            }
            guess(&throttle, &email.replace("example", "EXAMPLE"), A, at(20)).unwrap_err();
        }
        // Refused attempts do not count, and the minute is the first attempt's.
        guess(&throttle, "ada@example.com", A, at(60)).unwrap();
    }

    #[test]
    fn what_was_not_wrong_does_not_count() {
        let (throttle, now) = (Throttle::new(1), Instant::now());
        for _ in 0..5 {
            drop(throttle.admit("ada@example.com", A, now).unwrap());
        }
        let undecided = throttle.admit("ada@example.com", A, now).unwrap();
        assert!(throttle.admit("ada@example.com", A, now).is_err(), "it counts until it is decided");
        drop(undecided);
        guess(&throttle, "ada@example.com", A, now).unwrap();
        assert!(throttle.admit("ada@example.com", A, now).is_err());
    }

    /// A peer that fills the table is refused new accounts, and no pair of others is forgotten for it.
    #[test]
    fn a_full_table_is_shared_by_peer() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        guess(&throttle, "victim@example.com", B, at(0)).unwrap();
        let admitted = (0..3 * PAIRS).filter(|n| guess(&throttle, &n.to_string(), A, at(1)).is_ok()).count();
        assert_eq!(admitted, PAIRS - 1);
        let refused = guess(&throttle, "one more", A, at(20)).unwrap_err();
        assert!(matches!(refused, Error::TooManyAttempts(42)), "{refused:?}");
        assert!(guess(&throttle, "victim@example.com", B, at(20)).is_err(), "it is remembered");
        assert!(guess(&throttle, "1000", A, at(20)).is_err(), "so is what the table is full of");
        // One that has fewer gets in, at the cost of the oldest pair of the first.
        guess(&throttle, "another", B, at(20)).unwrap();
        assert_eq!(throttle.attempts.lock().counts.len(), PAIRS);
        assert!(guess(&throttle, "another", B, at(20)).is_err());
        // After a minute there is room again, and nothing is left of what was.
        guess(&throttle, "one more", A, at(61)).unwrap();
        let attempts = throttle.attempts.lock();
        assert_eq!((attempts.counts.len(), attempts.by_peer.len()), (2, 2), "one more, and another");
    }

    /// An attempt that is refused before it is hashed is not remembered.
    #[test]
    fn attempts_that_were_not_hashed_take_no_room() {
        let (throttle, now) = (Throttle::new(1), Instant::now());
        guess(&throttle, "ada@example.com", A, now).unwrap();
        for n in 0..3 * PAIRS {
            drop(throttle.admit(&n.to_string(), A, now).unwrap());
        }
        assert_eq!(throttle.attempts.lock().counts.len(), 1);
        assert!(guess(&throttle, "ada@example.com", A, now).is_err());
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let throttle = Throttle::new(0);
        for _ in 0..100 {
            guess(&throttle, "ada@example.com", A, Instant::now()).unwrap();
        }
        assert!(throttle.attempts.lock().counts.is_empty());
    }
}
