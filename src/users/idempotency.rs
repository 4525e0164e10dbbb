//! Digests of idempotency keys, and of the bodies that clients send with a key.

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// Digest of an idempotency key. Only the digest is stored, so that a stolen table has no key that a client could send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyDigest(pub [u8; 32]);

/// Digest of the body of a create without its password. A repeated create must have an equal fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BodyFingerprint(pub [u8; 32]);

impl KeyDigest {
    /// Computes the digest of a key that a client has sent.
    pub fn new(text: &str) -> KeyDigest {
        KeyDigest(Sha256::digest(text.as_bytes()).into())
    }
}

impl BodyFingerprint {
    /// Computes the fingerprint of a body. Bodies that are equal JSON values have equal fingerprints.
    pub fn compute(body: &Map<String, Value>) -> BodyFingerprint {
        let mut digest = Sha256::new();
        for (field, value) in body {
            let value = if field == "password" { &Value::Null } else { value };
            // Ends each name and each value with a NUL, which JSON text never has: different bodies give different
            // texts.
            digest.update(format!("{field}\0{value}\0"));
        }
        BodyFingerprint(digest.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fingerprints() {
        let of = |body: Value| BodyFingerprint::compute(body.as_object().unwrap());
        let all = [
            json!({"name": "a", "email": "b"}),
            json!({"name": "b", "email": "a"}),
            json!({"name": "ab", "email": ""}),
            json!({"name": "", "email": "ab"}),
            json!({"name": "a"}),
            json!({"name": "a\u{0}", "email": "b"}),
            json!({"name": "a", "email": "b", "password": "c"}),
        ];
        for (i, one) in all.iter().enumerate() {
            for (j, other) in all.iter().enumerate() {
                assert_eq!(of(one.clone()) == of(other.clone()), i == j, "{one} {other}");
            }
        }
        // The fingerprint does not depend on the password.
        assert!(of(all[6].clone()) == of(json!({"email": "b", "name": "a", "password": "d"})));
    }
}
