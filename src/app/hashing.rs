//! Passwords are hashed and checked in turns: each takes a core and much memory, so few are at once.

use crate::{
    budget::Budget,
    config::{PasswordHashing, Secret},
    error::Error,
    users::password::{Hasher, Match, PasswordHash},
};
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// A hash occupies a core: one hash for every two cores leaves the rest to reads.
const CORES_PER_HASH: usize = 2;

/// The one place where passwords are hashed for requests. Each function blocks until it is the caller's turn, for the
/// memory up to the time-out, then [`Error::Unavailable`], and for the work.
pub(crate) struct Hashing {
    hasher: Hasher,
    timeout: Duration,
    budget: Budget,
    /// How many hashes at once.
    pub count: usize,
    free: Mutex<usize>,
    freed: Condvar,
}

/// What a password is to a hash.
pub(crate) enum Verdict {
    Wrong,
    Right,
    /// It is right, and this is to be stored instead.
    Outdated(PasswordHash),
}

impl Hashing {
    /// One hash at once for every two cores, if the budget has memory for so many.
    pub fn new(cost: PasswordHashing, budget: &Budget, timeout: Duration) -> Hashing {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let count = (cores / CORES_PER_HASH).min(budget.limit() / cost.memory()).max(1);
        let (hasher, budget) = (Hasher::new(cost), budget.clone());
        Hashing { hasher, timeout, budget, count, free: Mutex::new(count), freed: Condvar::new() }
    }

    /// Hashes a password.
    pub fn hash(&self, password: &Secret) -> Result<PasswordHash, Error> {
        self.take(self.hasher.memory(None), || self.hasher.hash(password))?
    }

    /// Whether a password is the one that was hashed.
    pub fn verify(&self, password: &Secret, hash: Option<&PasswordHash>) -> Result<bool, Error> {
        self.take(self.hasher.memory(hash), || self.hasher.verify(password, hash))
    }

    /// The same; with a new hash, where that one is outdated.
    pub fn log_in(&self, password: &Secret, hash: Option<&PasswordHash>) -> Result<Verdict, Error> {
        // One after the other.
        let memory = self.hasher.memory(hash).max(self.hasher.memory(None));
        self.take(memory, || match self.hasher.check(password, hash) {
            Match::None => Verdict::Wrong,
            Match::Current => Verdict::Right,
            Match::Outdated => self.hasher.hash(password).map_or(Verdict::Right, Verdict::Outdated),
        })
    }

    /// Does the work of one hash, which takes so many bytes of memory.
    fn take<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> Result<T, Error> {
        struct Turn<'a>(&'a Hashing);
        impl Drop for Turn<'_> {
            fn drop(&mut self) {
                *self.0.free() += 1;
                self.0.freed.notify_one();
            }
        }
        let waited = self.freed.wait_while(self.free(), |free| *free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        let _turn = Turn(self);
        match self.budget.reserve_for_hash(bytes, Instant::now() + self.timeout) {
            Some(_held) => Ok(work()),
            None => Err(Error::Unavailable("no memory became free for hashing a password".into())),
        }
    }

    fn free(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
