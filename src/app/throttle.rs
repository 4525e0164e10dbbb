//! How often a password may be guessed: attempts of one peer at one account, in a minute.
//!
//! Counts only in the memory of this process, and at most [`PAIRS`] pairs of a peer and an account. If a minute has more,
//! the oldest are forgotten: a guesser would have to pay for that many hashes to gain a few guesses. Knows nothing of
//! passwords or of the database: an account that does not exist is counted like any other.

use crate::error::Error;
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap, hash_map::RandomState};
use std::hash::BuildHasher;
use std::time::{Duration, Instant};
use std::{fmt, net::IpAddr, sync::Arc};

/// The time that attempts are counted for, from the first one on.
const MINUTE: Duration = Duration::from_secs(60);

/// Pairs that are remembered: some 1 MiB.
const PAIRS: usize = 16 << 10;

/// The attempts of the last minute.
pub struct Throttle {
    /// Attempts in a minute, by one peer, at one account; 0 for any number.
    limit: u32,
    /// Seeded at random for each process, so that no client can choose pairs that count as one.
    hasher: RandomState,
    attempts: Mutex<Attempts>,
}

/// An attempt that was admitted. It does not count any more once this is dropped, unless it was
/// [wrong](Attempt::wrong).
pub struct Attempt(Option<(Arc<Throttle>, Pair)>);

/// A digest of a peer and an account.
type Pair = u64;

#[derive(Default)]
struct Attempts {
    /// The time that has passed on command: the clock is ahead by it.
    advanced: Duration,
    /// The number of attempts, and the time of the first one.
    counts: HashMap<Pair, (u32, Instant)>,
    by_age: BTreeSet<(Instant, Pair)>,
}

impl Throttle {
    /// Returns a throttle of `limit` wrong attempts a minute; 0 for any number.
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
        let mut attempts = self.attempts.lock();
        let now = now + attempts.advanced;
        attempts.forget(now);
        let (count, since) = attempts.counts.get(&pair).copied().unwrap_or((0, now));
        if count >= self.limit {
            let left = (since + MINUTE).saturating_duration_since(now);
            return Err(Error::TooManyAttempts { retry_after: left.as_secs() + 1 });
        }
        attempts.counts.insert(pair, (count + 1, since));
        attempts.by_age.insert((since, pair));
        Ok(Attempt(Some((Arc::clone(self), pair))))
    }

    /// Lets time pass: attempts that are older than a minute then do not count any more.
    pub fn advance(&self, time: Duration) {
        self.attempts.lock().advanced += time;
    }
}

impl Attempt {
    /// Lets the attempt count for its minute, as the password was wrong.
    pub fn wrong(mut self) {
        self.0 = None;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if let Some((throttle, pair)) = &self.0 {
            throttle.attempts.lock().take_back(*pair);
        }
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Attempt")
    }
}

impl Attempts {
    /// Takes back an attempt that does not count after all.
    fn take_back(&mut self, pair: Pair) {
        match self.counts.get_mut(&pair) {
            Some((count, since)) if *count <= 1 => {
                self.by_age.remove(&(*since, pair));
                self.counts.remove(&pair);
            }
            Some((count, _)) => *count -= 1,
            None => {}
        }
    }

    /// Forgets pairs whose minute is over, and the oldest if there is no place for one more.
    fn forget(&mut self, now: Instant) {
        while let Some((since, pair)) = self.by_age.first().copied()
            && (now >= since + MINUTE || self.counts.len() >= PAIRS)
        {
            self.by_age.remove(&(since, pair));
            self.counts.remove(&pair);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 1)));
    const B: Option<IpAddr> = Some(IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 2)));

    /// Sends a wrong password; an error if it is not admitted.
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

    #[test]
    fn a_full_table_forgets_the_oldest() {
        let (throttle, start) = (Throttle::new(1), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        guess(&throttle, "first@example.com", B, at(0)).unwrap();
        for n in 0..2 * PAIRS {
            guess(&throttle, &n.to_string(), A, at(1)).unwrap();
        }
        assert!(guess(&throttle, "first@example.com", B, at(2)).is_ok(), "it is forgotten");
        assert!(guess(&throttle, "first@example.com", B, at(2)).is_err(), "it is remembered");
        let left = PAIRS - throttle.attempts.lock().counts.len();
        assert!(left <= 1, "{left}");
        guess(&throttle, "one more", A, at(61)).unwrap();
        assert_eq!(throttle.attempts.lock().counts.len(), 2, "the others' minute is over");
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
