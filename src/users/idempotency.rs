//! Digests of idempotency keys, and of the bodies that have one.

use super::user::NewUser;
use sha2::{Digest, Sha256};

/// A key that a client has chosen for a create: its digest, as the key itself is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub [u8; 32]);

/// Digest of the body of a create, without its password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(pub [u8; 32]);

impl Key {
    /// Computes the digest of the key that the client has sent.
    pub fn new(text: &str) -> Key {
        Key(Sha256::digest(text.as_bytes()).into())
    }
}

impl Fingerprint {
    /// Computes the fingerprint of a parsed body. Bodies that are equal JSON values have equal fingerprints.
    pub fn of(new: &NewUser) -> Fingerprint {
        let NewUser { name, email, password } = new;
        // No text that is stored has a NUL.
        let text = format!("{name}\0{email}\0{}", password.is_some());
        Fingerprint(Sha256::digest(text).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints() {
        let new = |name: &str, email: &str, password: Option<&str>| NewUser {
            name: name.to_owned(),
            email: email.to_owned(),
            password: password.map(Into::into),
        };
        let all = [
            new("a", "b", None),
            new("b", "a", None),
            new("ab", "", None),
            new("", "ab", None),
            new("a", "b", Some("c")),
        ];
        for (i, one) in all.iter().enumerate() {
            for (j, other) in all.iter().enumerate() {
                assert_eq!(Fingerprint::of(one) == Fingerprint::of(other), i == j, "{one:?} {other:?}");
            }
        }
        // The fingerprint does not depend on the password.
        assert!(Fingerprint::of(&all[4]) == Fingerprint::of(&new("a", "b", Some("d"))));
    }
}
