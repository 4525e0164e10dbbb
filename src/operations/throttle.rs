//! Limits how often a password may be guessed: counts the wrong passwords of each peer for each account in the last
//! minute.
//!
//! Counts in the memory of this process alone. Counts at most [`MAX_PAIRS`] pairs of a peer and an account, beside
//! pairs whose password is being verified. At this limit, a new pair replaces the oldest pair of the peer with the
//! most pairs; a new pair of that peer itself is refused. Knows nothing of passwords or of the database: an account
//! that does not exist is counted like any other account.

use crate::{db::Failure, error::Error, http::PeerKey};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque, hash_map::RandomState};
use std::time::{Duration, Instant};
use std::{hash::BuildHasher, sync::Arc};

/// The time for which a wrong password is counted.
const GUESS_WINDOW: Duration = Duration::from_secs(60);

/// The most pairs of a peer and an account that are counted: some 4 MiB if each pair has ten wrong passwords.
const MAX_PAIRS: usize = 16 << 10;

/// Counts the wrong passwords of each peer, and refuses further passwords at a limit.
#[derive(Debug)]
pub struct Throttle {
    /// The most wrong passwords of one peer for one account in a minute; 0 for no limit.
    max_guesses: usize,
    /// Hashes accounts with a random seed, so that no client can choose accounts that count as one.
    account_hasher: RandomState,
    attempts: Mutex<CountedAttempts>,
}

/// A password that is being verified. The password counts until this value is dropped, and for a minute if the password
/// was [wrong](Attempt::mark_wrong). `None` if there is no limit, so that nothing is counted.
#[derive(Debug)]
pub struct Attempt(Option<(Arc<Throttle>, PeerAndAccount)>);

/// A peer and the hash of an account.
type PeerAndAccount = (PeerKey, u64);

/// The wrong passwords of the last minute and the passwords that are being verified, of all peers.
#[derive(Debug, Default)]
struct CountedAttempts {
    /// Time by which a test has put the clock ahead.
    clock_lead: Duration,
    pairs: HashMap<PeerAndAccount, PairCount>,
}

/// The wrong passwords and the passwords that are being verified, of one peer for one account.
#[derive(Debug, Default)]
struct PairCount {
    /// The number of passwords that are being verified.
    pending_attempts: usize,
    /// The time of each wrong password, the oldest first.
    guess_times: VecDeque<Instant>,
}

impl Throttle {
    /// Returns a throttle that allows `max_guesses` wrong passwords a minute; 0 for any number.
    pub fn new(max_guesses: u32) -> Arc<Throttle> {
        let max_guesses = max_guesses as usize;
        Arc::new(Throttle { max_guesses, account_hasher: RandomState::new(), attempts: Mutex::default() })
    }

    /// Fails with [`Error::LockedOutForSeconds`] if a peer has sent `max_guesses` wrong passwords for an account in the
    /// last minute. An account is an e-mail address in whatever case. All clients without an IP address, as on a Unix
    /// socket, are the peer `None`.
    pub fn refuse_at_limit(&self, email: &str, peer: PeerKey) -> Result<(), Error> {
        let mut attempts = self.attempts.lock();
        let now = attempts.now();
        match attempts.pairs.get_mut(&self.pair_for(email, peer)) {
            Some(count) if self.max_guesses > 0 => count.refuse_excess(self.max_guesses, now),
            _ => Ok(()),
        }
    }

    /// Counts a password that is about to be verified. Fails as [`Throttle::refuse_at_limit`] does. Fails with
    /// [`Failure::Contended`] if the passwords that are being verified may use up the limit, so that this password has
    /// to wait for them.
    pub fn admit(self: &Arc<Self>, email: &str, peer: PeerKey) -> Result<Attempt, Failure> {
        if self.max_guesses == 0 {
            return Ok(Attempt(None));
        }
        let pair = self.pair_for(email, peer);
        let mut attempts = self.attempts.lock();
        let now = attempts.now();
        if !attempts.pairs.contains_key(&pair) {
            attempts.evict_if_full(peer, now)?;
        }
        let count = attempts.pairs.entry(pair).or_default();
        count.refuse_excess(self.max_guesses, now)?;
        if count.pending_attempts + count.guess_times.len() >= self.max_guesses {
            return Err(Failure::Contended);
        }
        count.pending_attempts += 1;
        Ok(Attempt(Some((Arc::clone(self), pair))))
    }

    /// Puts the clock ahead for a test.
    #[cfg(any(test, feature = "testing"))]
    pub fn advance_clock(&self, time: Duration) {
        self.attempts.lock().clock_lead += time;
    }

    fn pair_for(&self, email: &str, peer: PeerKey) -> PeerAndAccount {
        (peer, self.account_hasher.hash_one(email.to_ascii_lowercase()))
    }
}

impl Attempt {
    /// Counts the password for a minute, because the password was wrong.
    pub fn mark_wrong(self) {
        if let Some((throttle, pair)) = &self.0 {
            let mut attempts = throttle.attempts.lock();
            let now = attempts.now();
            attempts.pairs.entry(*pair).or_default().guess_times.push_back(now);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Some((throttle, pair)) = &self.0 else { return };
        let mut attempts = throttle.attempts.lock();
        if let Some(count) = attempts.pairs.get_mut(pair) {
            count.pending_attempts -= 1;
            if count.pending_attempts == 0 && count.guess_times.is_empty() {
                attempts.pairs.remove(pair);
            }
        }
    }
}

impl CountedAttempts {
    /// Returns the time by the clock, which a test may have put ahead.
    fn now(&self) -> Instant {
        Instant::now() + self.clock_lead
    }

    /// Makes a new pair of `peer` possible if [`MAX_PAIRS`] pairs are counted: forgets every pair without a wrong
    /// password in the last minute or, if there is none, the oldest pair of the peer with the most pairs. Fails if this
    /// peer is `peer` itself. Keeps each pair whose password is being verified.
    fn evict_if_full(&mut self, peer: PeerKey, now: Instant) -> Result<(), Error> {
        if self.pairs.len() < MAX_PAIRS {
            return Ok(());
        }
        self.pairs.retain(|_, count| {
            count.pending_attempts > 0 || count.guess_times.back().is_some_and(|at| now < *at + GUESS_WINDOW)
        });
        if self.pairs.len() < MAX_PAIRS {
            return Ok(());
        }
        let mut counts: HashMap<PeerKey, usize> = HashMap::new();
        self.pairs.keys().for_each(|(peer, _)| *counts.entry(*peer).or_default() += 1);
        let Some((most, _)) = counts.iter().max_by_key(|(holder, count)| (**count, **holder == peer)) else {
            return Ok(());
        };
        let idle = self.pairs.iter().filter(|((peer, _), count)| peer == most && count.pending_attempts == 0);
        let oldest = idle.filter_map(|(pair, count)| Some((*count.guess_times.back()?, *pair))).min();
        match oldest {
            Some((since, _)) if *most == peer => Err(lockout_error(since, now)),
            Some((_, pair)) => {
                self.pairs.remove(&pair);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl PairCount {
    /// Forgets wrong passwords that are older than a minute. Fails with [`Error::LockedOutForSeconds`] if at least
    /// `limit` wrong passwords are left.
    fn refuse_excess(&mut self, limit: usize, now: Instant) -> Result<(), Error> {
        while self.guess_times.front().is_some_and(|at| now >= *at + GUESS_WINDOW) {
            self.guess_times.pop_front();
        }
        match self.guess_times.front() {
            Some(oldest) if self.guess_times.len() >= limit => Err(lockout_error(*oldest, now)),
            _ => Ok(()),
        }
    }
}

/// Returns a refusal that lasts until the oldest wrong password is a minute old.
fn lockout_error(oldest: Instant, now: Instant) -> Error {
    let left = (oldest + GUESS_WINDOW).saturating_duration_since(now);
    Error::LockedOutForSeconds(left.as_secs() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use std::{iter, thread};

    const A: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1)));
    const B: PeerKey = Some(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2)));
    const ADA: &str = "ada@example.com";

    /// Sends a wrong password. Fails if the password is not verified.
    fn guess(throttle: &Arc<Throttle>, email: &str, peer: PeerKey) -> Result<(), Error> {
        throttle.admit(email, peer).map(Attempt::mark_wrong).map_err(Failure::into_error)
    }

    fn advance(throttle: &Throttle, seconds: u64) {
        throttle.advance_clock(Duration::from_secs(seconds));
    }

    #[test]
    fn wrong_passwords_are_counted_by_peer_and_account() {
        let throttle = Throttle::new(3);
        for email in [ADA, "ADA@example.com", "ada@EXAMPLE.com"] {
            throttle.refuse_at_limit(email, A).unwrap();
            guess(&throttle, email, A).unwrap();
        }
        advance(&throttle, 20);
        for refused in [guess(&throttle, ADA, A), throttle.refuse_at_limit(ADA, A)].map(Result::unwrap_err) {
            assert!(matches!(refused, Error::LockedOutForSeconds(40 | 41)), "{refused:?}");
        }
        // Counts passwords of another peer, or for another account, apart.
        guess(&throttle, ADA, B).unwrap();
        guess(&throttle, ADA, None).unwrap();
        guess(&throttle, "bob@example.com", A).unwrap();
        // Ignores the case of ASCII letters alone: these are four accounts.
        for email in ["é@example.com", "É@example.com", "\u{130}@example.com", "i\u{307}@example.com"] {
            for _ in 0..3 {
                guess(&throttle, email, A).unwrap();
            }
            guess(&throttle, &email.replace("example", "EXAMPLE"), A).unwrap_err();
        }
        // Counts no password that was refused.
        advance(&throttle, 40);
        guess(&throttle, ADA, A).unwrap();
    }

    /// Checks that no minute has more wrong passwords than the limit: each counts for a minute of its own.
    #[test]
    fn no_minute_has_more_than_the_limit() {
        let throttle = Throttle::new(3);
        let (mut clock, mut checked) = (0, Vec::new());
        for n in 0..300 {
            if guess(&throttle, ADA, A).is_ok() {
                checked.push(clock);
            }
            // Pauses now and then.
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
        let unverified: Vec<_> = iter::repeat_with(|| throttle.admit(ADA, A).unwrap()).take(2).collect();
        // Lets the next password wait for the unverified ones, and refuses none at once.
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Contended)));
        throttle.refuse_at_limit(ADA, A).unwrap();
        drop(unverified);
        guess(&throttle, ADA, A).unwrap();
        let unverified = throttle.admit(ADA, A).unwrap();
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Contended)));
        unverified.mark_wrong();
        assert!(matches!(throttle.admit(ADA, A), Err(Failure::Error(Error::LockedOutForSeconds(60)))));
        // Forgets an account without a wrong password.
        drop(throttle.admit("bob@example.com", A).unwrap());
        assert_eq!(throttle.attempts.lock().pairs.len(), 1);
    }

    /// Checks the limit while many threads guess at once.
    #[test]
    fn no_more_passwords_are_checked_at_once_than_the_limit() {
        let throttle = Throttle::new(5);
        // The number of passwords that are being verified or were wrong, and its maximum.
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
                        attempt.mark_wrong();
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
        assert!(matches!(guess(&throttle, "one more", A), Err(Error::LockedOutForSeconds(..=41))));
        assert!(guess(&throttle, "victim@example.com", B).is_err(), "it is remembered");
        assert!(guess(&throttle, "1000", A).is_err(), "so is what the table is full of");
        // Admits a peer that has fewer pairs, in the place of the oldest pair of the first peer.
        guess(&throttle, "another", B).unwrap();
        assert_eq!(throttle.attempts.lock().pairs.len(), MAX_PAIRS);
        assert!(guess(&throttle, "another", B).is_err());
        // Has room again after a minute, when no earlier pair counts.
        advance(&throttle, 45);
        guess(&throttle, "one more", A).unwrap();
        assert_eq!(throttle.attempts.lock().pairs.len(), 2, "one more, and another");
    }

    #[test]
    fn without_a_limit_nothing_is_counted() {
        let throttle = Throttle::new(0);
        for _ in 0..100 {
            guess(&throttle, ADA, A).unwrap();
            throttle.refuse_at_limit(ADA, A).unwrap();
        }
        assert!(throttle.attempts.lock().pairs.is_empty());
    }
}
