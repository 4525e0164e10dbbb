//! How often a password may be guessed: attempts of one peer at one account, in a minute.
//!
//! Counts only in the memory of this process, and at most [`PAIRS`] pairs of a peer and an account. Knows nothing of
//! passwords or of the database: an account that does not exist is counted like any other.

use crate::error::Error;
use std::{
    collections::{HashMap, hash_map::RandomState},
    fmt,
    hash::BuildHasher,
    mem,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The time that attempts are counted for, from the first one on.
const MINUTE: Duration = Duration::from_secs(60);

/// Pairs that are remembered, in two generations: some 1.5 MiB. When clients send more pairs than that within a minute,
/// the oldest half is forgotten; the queue for hashes bounds how many passwords are checked at all.
const PAIRS: usize = 32 << 10;

/// The attempts of the last minute.
pub struct Throttle {
    /// In a minute, by one peer, at one account; 0 for any number.
    limit: u32,
    /// Seeded at random for each process, so that no client can choose pairs that count as one.
    hasher: RandomState,
    attempts: Mutex<Generations>,
}

/// An attempt that was admitted. It does not count any more once this is dropped, unless it was [wrong](Attempt::wrong).
pub struct Attempt(Option<(Arc<Throttle>, u64)>);

#[derive(Default)]
struct Generations {
    current: HashMap<u64, Count>,
    previous: HashMap<u64, Count>,
}

#[derive(Clone, Copy)]
struct Count {
    attempts: u32,
    since: Instant,
}

impl Throttle {
    /// At most `limit` wrong attempts a minute; 0 for any number.
    pub fn new(limit: u32) -> Arc<Throttle> {
        Arc::new(Throttle { limit, hasher: RandomState::new(), attempts: Mutex::default() })
    }

    /// Counts an attempt of a peer (`None`: any client without an address, as on a Unix socket) at an account, an
    /// e-mail address in whatever case. [`Error::TooManyAttempts`] beyond the limit.
    pub fn admit(
        self: &Arc<Self>,
        email: &str,
        peer: Option<IpAddr>,
        now: Instant,
    ) -> Result<Attempt, Error> {
        if self.limit == 0 {
            return Ok(Attempt(None));
        }
        let pair = self.hasher.hash_one((email.to_ascii_lowercase(), peer));
        let mut attempts = self.attempts();
        let count = attempts.count(pair, now);
        if count.attempts >= self.limit {
            let left = (count.since + MINUTE).saturating_duration_since(now);
            return Err(Error::TooManyAttempts { retry_after: left.as_secs() + 1 });
        }
        count.attempts += 1;
        Ok(Attempt(Some((Arc::clone(self), pair))))
    }

    fn attempts(&self) -> MutexGuard<'_, Generations> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attempt {
    /// The password was wrong: the attempt counts for its minute.
    pub fn wrong(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some((throttle, pair)) = &self.0 {
            let mut attempts = throttle.attempts();
            let count = attempts.count(*pair, Instant::now());
            count.attempts = count.attempts.saturating_sub(1);
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Attempt")
    }
}

impl Generations {
    /// The count of a pair, 0 where its minute is over.
    fn count(&mut self, pair: u64, now: Instant) -> &mut Count {
        if self.current.len() >= PAIRS / 2 && !self.current.contains_key(&pair) {
            self.previous = mem::take(&mut self.current);
        }
        let fresh = Count { attempts: 0, since: now };
        let earlier = self.previous.remove(&pair).unwrap_or(fresh);
        let count = self.current.entry(pair).or_insert(earlier);
        if now >= count.since + MINUTE {
            *count = fresh;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 1)));
    const B: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2)));

    /// A wrong password; whether it was admitted.
    fn guess(throttle: &Arc<Throttle>, email: &str, peer: Option<IpAddr>, now: Instant) -> Result<(), Error> {
        throttle.admit(email, peer, now).map(Attempt::wrong)
    }

    #[test]
    fn attempts_are_counted_by_peer_and_account() {
        let (throttle, start) = (Throttle::new(3), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for email in ["ada@example.com", "ADA@example.com", "ada@EXAMPLE.com"] {
            guess(&throttle, email, A, at(0)).unwrap();
        }
        let refused = guess(&throttle, "ada@example.com", A, at(20)).unwrap_err();
        assert!(matches!(refused, Error::TooManyAttempts { retry_after: 41 }), "{refused:?}");
        // Another peer, another account, and a peer without an address, are not.
        guess(&throttle, "ada@example.com", B, at(20)).unwrap();
        guess(&throttle, "ada@example.com", None, at(20)).unwrap();
        guess(&throttle, "bob@example.com", A, at(20)).unwrap();
        // Of ASCII letters alone the case is ignored: these are four accounts.
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

    #[test]
    fn memory_is_bounded() {
        let (throttle, now) = (Throttle::new(1), Instant::now());
        for n in 0..3 * PAIRS {
            guess(&throttle, &n.to_string(), A, now).unwrap();
        }
        let attempts = throttle.attempts();
        assert!(attempts.current.len() + attempts.previous.len() <= PAIRS);
        drop(attempts);
        assert!(guess(&throttle, &(3 * PAIRS - 1).to_string(), A, now).is_err(), "the latest are remembered");
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let throttle = Throttle::new(0);
        for _ in 0..100 {
            guess(&throttle, "ada@example.com", A, Instant::now()).unwrap();
        }
        assert!(throttle.attempts().current.is_empty());
    }
}
