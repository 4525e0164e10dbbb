//! Argon2id: hash, verify, and how many do so at once.

use crate::{config::Secret, error::Error};
use argon2::{Argon2, PasswordHasher, PasswordVerifier, password_hash::phc::PasswordHash as Phc};
use std::{
    fmt,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

/// A hash keeps a core busy: one for every two cores at once leaves the others to reads.
const CORES_PER_HASH: usize = 2;

/// A PHC string (`$argon2id$v=19$m=19456,t=2,p=1$…`). Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash(String);

impl PasswordHash {
    /// A hash as it was stored.
    pub fn from_phc(text: String) -> PasswordHash {
        PasswordHash(text)
    }

    /// The PHC string, to be stored.
    pub fn as_phc(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordHash(…)")
    }
}

/// Where hashes wait for their turn: each takes some ten milliseconds of a core, and 19 MiB.
pub struct Turns {
    free: Mutex<usize>,
    freed: Condvar,
}

impl Default for Turns {
    fn default() -> Turns {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Turns { free: Mutex::new((cores / CORES_PER_HASH).max(1)), freed: Condvar::new() }
    }
}

impl Turns {
    /// Does the work of one hash. Blocks until it has its turn, and for the work.
    pub fn take<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Turn<'a>(&'a Turns);
        impl Drop for Turn<'_> {
            fn drop(&mut self) {
                *self.0.free() += 1;
                self.0.freed.notify_one();
            }
        }
        let waited = self.freed.wait_while(self.free(), |free| *free == 0);
        *waited.unwrap_or_else(PoisonError::into_inner) -= 1;
        let _turn = Turn(self);
        work()
    }

    fn free(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hashes with a fresh salt, by OWASP's parameters, which are the crate's defaults: m=19456 KiB, t=2, p=1.
/// Blocks for the work of one hash. Errors only when the system has no randomness or memory.
pub fn hash(password: &Secret) -> Result<PasswordHash, Error> {
    let hash: Phc = Argon2::default()
        .hash_password(password.expose().as_bytes())
        .map_err(|error| Error::Internal(format!("hashing a password: {error}")))?;
    Ok(PasswordHash(hash.to_string()))
}

/// Whether the password is the one that was hashed. Without a hash it is not, after the same work, so that
/// the time tells nobody which users exist or have a password. Nor is an empty one, whatever was hashed. Blocks for the
/// work of one hash.
pub fn verify(password: &Secret, hash: Option<&PasswordHash>) -> bool {
    /// A hash of nothing that anybody knows, with the parameters of [`hash`].
    const NOBODY: &str = "$argon2id$v=19$m=19456,t=2,p=1$bm9ib2R5IGtub3dzIGl0$\
                          AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    let text = hash.map_or(NOBODY, PasswordHash::as_phc);
    let matches = Phc::new(text).is_ok_and(|hash| {
        let password = password.expose().as_bytes();
        Argon2::default().verify_password(password, &hash).is_ok()
    });
    matches && hash.is_some() && !password.expose().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let hashed = hash(&"correct horse".into()).unwrap();
        assert!(hashed.as_phc().starts_with("$argon2id$v=19$m=19456,t=2,p=1$"));
        assert!(verify(&"correct horse".into(), Some(&hashed)));
        assert!(!verify(&"correct horsf".into(), Some(&hashed)));
        assert!(!verify(&"".into(), None));
        assert!(!verify(&"".into(), Some(&hash(&"".into()).unwrap())));
        assert_ne!(hash(&"correct horse".into()).unwrap(), hashed, "salted");
        assert_eq!(format!("{hashed:?}"), "PasswordHash(…)");
    }

    #[test]
    fn a_damaged_hash_matches_nothing() {
        assert!(!verify(&"x".into(), Some(&PasswordHash::from_phc("x".into()))));
    }

    #[test]
    fn nobody_costs_as_much_as_somebody() {
        // Were the constant malformed, unknown users would be answered at once.
        let nobody = "$argon2id$v=19$m=19456,t=2,p=1$bm9ib2R5IGtub3dzIGl0$\
                      AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        let params = argon2::Params::try_from(&Phc::new(nobody).unwrap()).unwrap();
        assert_eq!((params.m_cost(), params.t_cost(), params.p_cost()), (19456, 2, 1));
    }
}
