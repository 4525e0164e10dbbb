//! How often a password may be guessed: wrong passwords of one peer for one account, in a minute.
//!
//! Counts only in the memory of this process, and at most [`MAX_PAIRS`] pairs of a peer and an account. When all are used,
//! the peer with the most of them is refused further accounts, and any other peer takes the place of that peer's oldest
//! pair. Knows nothing of passwords or of the database: an account that does not exist is counted like any other.

use crate::{db::Failure, error::Error, http::PeerKey};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque, hash_map::RandomState};
use std::time::{Duration, Instant};
use std::{hash::BuildHasher, sync::Arc};

/// The time that a wrong password counts for.
const MINUTE: Duration = Duration::from_secs(60);

/// Pairs that are remembered: some 4 MiB with ten wrong passwords each.
const MAX_PAIRS: usize = 16 << 10;

/// Wrong passwords of the last minute, and passwords that are being checked.
#[derive(Debug)]
pub struct Throttle {
    /// The most wrong passwords of one peer for one account in a minute; 0 for any number.
    limit: usize,
    /// Seeded at random for each process, so that no client can choose accounts that count as one.
    hasher: RandomState,
    attempts: Mutex<Attempts>,
}

/// A password that is being checked. It does not count any more once this is dropped, unless it was
/// [wrong](Attempt::wrong).
#[derive(Debug)]
pub struct Attempt(Option<(Arc<Throttle>, Pair)>);

/// A peer and the hash of an account.
type Pair = (PeerKey, u64);

#[derive(Debug, Default)]
struct Attempts {
    /// The time that has passed on command: the clock is ahead by it.
    advanced: Duration,
    pairs: HashMap<Pair, Count>,
}

#[derive(Debug, Default)]
struct Count {
    /// Passwords that are being checked.
    undecided: usize,
    /// When each wrong password was sent, the oldest first.
    wrong: VecDeque<Instant>,
}

impl Throttle {
    /// Returns a throttle of `limit` wrong passwords a minute; 0 for any number.
    pub fn new(limit: u32) -> Arc<Throttle> {
        let limit = limit as usize;
        Arc::new(Throttle { limit, hasher: RandomState::new(), attempts: Mutex::default() })
    }

    /// Returns [`Error::TooManyAttempts`] if a peer (`None`: any client without an address, as on a Unix socket) has sent the
    /// most wrong passwords for an account, an e-mail address in whatever case.
    pub fn refuse_exhausted(&self, email: &str, peer: PeerKey) -> Result<(), Error> {
        let mut attempts = self.attempts.lock();
        let now = attempts.now();
        match attempts.pairs.get_mut(&self.pair(email, peer)) {
            Some(count) if self.limit > 0 => count.refuse(self.limit, now),
            _ => Ok(()),
        }
    }

    /// Counts a password that is about to be checked. Errors: that of [`Throttle::refuse_exhausted`]; and
    /// [`Failure::Contended`] if the undecided passwords may take all that is left of the limit, so that this one has to wait
    /// for them.
    pub fn admit(self: &Arc<Self>, email: &str, peer: PeerKey) -> Result<Attempt, Failure> {
        if self.limit == 0 {
            return Ok(Attempt(None));
        }
        let pair = self.pair(email, peer);
        let mut attempts = self.attempts.lock();
        let now = attempts.now();
        if !attempts.pairs.contains_key(&pair) {
            attempts.make_room(peer, now)?;
        }
        let count = attempts.pairs.entry(pair).or_default();
        count.refuse(self.limit, now)?;
        if count.undecided + count.wrong.len() >= self.limit {
            return Err(Failure::Contended);
        }
        count.undecided += 1;
        Ok(Attempt(Some((Arc::clone(self), pair))))
    }

    /// Lets time pass: wrong passwords that are older than a minute then do not count any more.
    #[cfg(any(test, feature = "testing"))]
    pub fn advance(&self, time: Duration) {
        self.attempts.lock().advanced += time;
    }

    fn pair(&self, email: &str, peer: PeerKey) -> Pair {
        (peer, self.hasher.hash_one(email.to_ascii_lowercase()))
    }
}

impl Attempt {
    /// Lets the attempt count for a minute, as the password was wrong.
    pub fn wrong(self) {
        if let Some((throttle, pair)) = &self.0 {
            let mut attempts = throttle.attempts.lock();
            let now = attempts.now();
            attempts.pairs.entry(*pair).or_default().wrong.push_back(now);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Some((throttle, pair)) = &self.0 else { return };
        let mut attempts = throttle.attempts.lock();
        if let Some(count) = attempts.pairs.get_mut(pair) {
            count.undecided -= 1;
            if count.undecided == 0 && count.wrong.is_empty() {
                attempts.pairs.remove(pair);
            }
        }
    }
}

impl Attempts {
    fn now(&self) -> Instant {
        Instant::now() + self.advanced
    }

    /// Makes space in a full table for a pair of `peer`. Removes all pairs without a wrong password in the last minute.
    /// If there are none, removes the oldest pair of the peer that has the most pairs, or refuses `peer` if it has the
    /// most. Keeps pairs whose password is being checked.
    fn make_room(&mut self, peer: PeerKey, now: Instant) -> Result<(), Error> {
        if self.pairs.len() < MAX_PAIRS {
            return Ok(());
        }
        self.pairs.retain(|_, count| {
            count.undecided > 0 || count.wrong.back().is_some_and(|at| now < *at + MINUTE)
        });
        if self.pairs.len() < MAX_PAIRS {
            return Ok(());
        }
        let mut counts: HashMap<PeerKey, usize> = HashMap::new();
        self.pairs.keys().for_each(|(peer, _)| *counts.entry(*peer).or_default() += 1);
        let Some((most, _)) = counts.iter().max_by_key(|(of, count)| (**count, **of == peer)) else {
            return Ok(());
        };
        let decided = self.pairs.iter().filter(|((of, _), count)| of == most && count.undecided == 0);
        let oldest = decided.filter_map(|(pair, count)| Some((*count.wrong.back()?, *pair))).min();
        match oldest {
            Some((since, _)) if *most == peer => Err(too_many(since, now)),
            Some((_, pair)) => {
                self.pairs.remove(&pair);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Count {
    /// Forgets wrong passwords that are older than a minute. [`Error::TooManyAttempts`] if as many as the limit are left.
    fn refuse(&mut self, limit: usize, now: Instant) -> Result<(), Error> {
        while self.wrong.front().is_some_and(|at| now >= *at + MINUTE) {
            self.wrong.pop_front();
        }
        match self.wrong.front() {
            Some(oldest) if self.wrong.len() >= limit => Err(too_many(*oldest, now)),
            _ => Ok(()),
        }
    }
}

/// Returns the refusal that lasts until a wrong password is a minute old.
fn too_many(oldest: Instant, now: Instant) -> Error {
    let left = (oldest + MINUTE).saturating_duration_since(now);
    Error::TooManyAttempts(left.as_secs() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use std::{iter, thread};

    const A: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)));
    const B: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)));
    const ADA: &str = "ada@example.com";

    /// Sends a wrong password; an error if it is not checked.
    fn guess(throttle: &Arc<Throttle>, email: &str, peer: PeerKey) -> Result<(), Error> {
        throttle.admit(email, peer).map(Attempt::wrong).map_err(Failure::into_error)
    }

    fn advance(throttle: &Throttle, seconds: u64) {
        throttle.advance(Duration::from_secs(seconds));
    }

    #[test]
    fn wrong_passwords_are_counted_by_peer_and_account() {
        let throttle = Throttle::new(3);
        for email in [ADA, "ADA@example.com", "ada@EXAMPLE.com"] {
            throttle.refuse_exhausted(email, A).unwrap();
            guess(&throttle, email, A).unwrap();
        }
        advance(&throttle, 20);
        for refused in [guess(&throttle, ADA, A), throttle.refuse_exhausted(ADA, A)].map(Result::unwrap_err) {
            assert!(matches!(refused, Error::TooManyAttempts(40 | 41)), "{refused:?}");
        }
        // Passwords of another peer, or for another account, are counted apart.
        guess(&throttle, ADA, B).unwrap();
        guess(&throttle, ADA, None).unwrap();
        guess(&throttle, "bob@example.com", A).unwrap();
        // The case of ASCII letters alone is ignored: these are four accounts.
        for email in ["é@example.com", "É@example.com", "\u{130}@example.com", "i\u{307}@example.com"] {
            for _ in 0..3 {
                guess(&throttle, email, A).unwrap();
            }
            guess(&throttle, &email.replace("example", "EXAMPLE"), A).unwrap_err();
        }
        // Refused ones do not count.
        advance(&throttle, 40);
        guess(&throttle, ADA, A).unwrap();
    }

    /// Each wrong password counts for a minute of its own: no minute has more of them than the limit.
    #[test]
    fn no_minute_has_more_than_the_limit() {
        let throttle = Throttle::new(3);
        let (mut clock, mut checked) = (0, Vec::new());
        for n in 0..300 {
            if guess(&throttle, ADA, A).is_ok() {
                checked.push(clock);
            }
            // Now and then there is a pause.
            let pause = if n % 7 == 0 { 29 } else { 1 };
            advance(&throttle, pause);
            clock += pause;
        }
        assert!(checked.len() > 30, "{checked:?}");
        assert!(checked.windows(4).all(|four| four[3] - four[0] >= 60), "{checked:?}");
    }

    #[test]
    fn only_wrong_passwords_count() {
        let throttle = Throttle::new(2);
        for _ in 0..5 {
            drop(throttle.admit(ADA, A).unwrap());
        }
        let undecided: Vec<_> = iter::repeat_with(|| throttle.admit(ADA, A).unwrap()).take(2).collect();
        // The next one waits for them, and none is refused at once.
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Contended)));
        throttle.refuse_exhausted(ADA, A).unwrap();
        drop(undecided);
        guess(&throttle, ADA, A).unwrap();
        let undecided = throttle.admit(ADA, A).unwrap();
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Contended)));
        undecided.wrong();
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Error(Error::TooManyAttempts(60)))));
        // An account without a wrong password is forgotten.
        drop(throttle.admit("bob@example.com", A).unwrap());
        assert_eq!(throttle.attempts.lock().pairs.len(), 1);
    }

    /// However many threads guess.
    #[test]
    fn no_more_passwords_are_checked_at_once_than_the_limit() {
        let throttle = Throttle::new(5);
        // The number of passwords that are being checked or were wrong, and its maximum.
        let counts = Mutex::new((0, 0));
        thread::scope(|scope| {
            for n in 0..100 {
                let (throttle, counts) = (&throttle, &counts);
                scope.spawn(move || {
                    let attempt = loop {
                        match throttle.admit(ADA, A) {
                            Err(Failure::Contended) => thread::yield_now(),
                            decided => break decided,
                        }
                    };
                    let Ok(attempt) = attempt else { return };
                    let (now, most) = &mut *counts.lock();
                    *now += 1;
                    *most = (*most).max(*now);
                    if n % 2 == 0 {
                        attempt.wrong();
                    } else {
                        *now -= 1;
                    }
                });
            }
        });
        assert_eq!(*counts.lock(), (5, 5));
    }

    /// A peer that fills the table is refused new accounts, and no pair of another peer is forgotten for it.
    #[test]
    fn a_full_table_is_shared_by_peer() {
        let throttle = Throttle::new(1);
        guess(&throttle, "victim@example.com", B).unwrap();
        let admitted = (0..MAX_PAIRS + 100).filter(|n| guess(&throttle, &n.to_string(), A).is_ok()).count();
        assert_eq!(admitted, MAX_PAIRS - 1);
        advance(&throttle, 20);
        assert!(matches!(guess(&throttle, "one more", A), Err(Error::TooManyAttempts(..=41))));
        assert!(guess(&throttle, "victim@example.com", B).is_err(), "it is remembered");
        assert!(guess(&throttle, "1000", A).is_err(), "so is what the table is full of");
        // One that has fewer gets in, at the cost of the oldest pair of the first.
        guess(&throttle, "another", B).unwrap();
        assert_eq!(throttle.attempts.lock().pairs.len(), MAX_PAIRS);
        assert!(guess(&throttle, "another", B).is_err());
        // After a minute there is room again, and nothing is left of what was.
        advance(&throttle, 45);
        guess(&throttle, "one more", A).unwrap();
        assert_eq!(throttle.attempts.lock().pairs.len(), 2, "one more, and another");
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let throttle = Throttle::new(0);
        for _ in 0..100 {
            guess(&throttle, ADA, A).unwrap();
            throttle.refuse_exhausted(ADA, A).unwrap();
        }
        assert!(throttle.attempts.lock().pairs.is_empty());
    }
}
