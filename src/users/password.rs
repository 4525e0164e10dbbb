//! Argon2id: hash and verify. Hashes of bcrypt, from other programs, are verified as well.

use crate::{
    config::{PasswordHashing, Secret},
    error::Error,
};
use argon2::password_hash::phc::PasswordHash as Phc;
use argon2::{Algorithm, Argon2, Params, PasswordHasher, PasswordVerifier, Version};
use serde_json::Value;
use std::fmt;

/// The most that verifying an imported hash may cost: some 300 ms and 64 MiB. Whoever knows the address of a user can
/// have it verified.
const MOST: (u32, u32, u32) = (12, 64 << 10, 4);

/// Bytes of the longest hash, as the column has it.
const HASH_MAX: usize = 512;

/// A PHC string (`$argon2id$v=19$m=19456,t=2,p=1$…`), or bcrypt's own format (`$2b$12$…`). Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash(String);

impl PasswordHash {
    /// A hash as it was stored.
    pub fn from_phc(text: String) -> PasswordHash {
        PasswordHash(text)
    }

    /// A hash that another program made, if it is one that can be verified, at a bounded cost. The error is what
    /// follows the field's name in a line, and never a part of the hash.
    pub fn imported(value: Value) -> Result<PasswordHash, String> {
        let Value::String(text) = value else { return Err("must be a string".to_owned()) };
        let (bcrypt_cost, memory, passes) = MOST;
        if text.len() > HASH_MAX {
            return Err(format!("is longer than {HASH_MAX} bytes"));
        }
        if is_bcrypt(&text) {
            return match text.get(4..6).and_then(|cost| cost.parse::<u32>().ok()) {
                Some(cost) if cost > bcrypt_cost => {
                    Err(format!("costs more to verify than bcrypt's {bcrypt_cost}"))
                }
                Some(4..) if is_whole_bcrypt(text.as_bytes()) => Ok(PasswordHash(text)),
                _ => Err("is a bcrypt hash that is damaged".to_owned()),
            };
        }
        if !text.starts_with("$argon2id$") {
            return Err("is neither an Argon2id nor a bcrypt hash".to_owned());
        }
        let damaged = || "is an Argon2id hash that is damaged".to_owned();
        let hash = Phc::new(&text).map_err(|_| damaged())?;
        let params = Params::try_from(&hash).map_err(|_| damaged())?;
        let is_whole = hash.version.is_some_and(|version| Version::try_from(version).is_ok())
            && hash.salt.is_some_and(|salt| salt.len() >= argon2::MIN_SALT_LEN)
            && hash.hash.is_some();
        match is_whole {
            false => Err(damaged()),
            true if params.m_cost() > memory || params.t_cost() > passes => {
                Err(format!("costs more to verify than Argon2id's m={memory},t={passes}"))
            }
            true => Ok(PasswordHash(text)),
        }
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

fn is_bcrypt(text: &str) -> bool {
    ["$2a$", "$2b$", "$2y$"].iter().any(|version| text.starts_with(version))
}

/// What a hash of Argon2id costs.
fn params(text: &str) -> Option<Params> {
    Params::try_from(&Phc::new(text).ok()?).ok()
}

/// Version, cost, and 53 characters of bcrypt's own base 64.
fn is_whole_bcrypt(text: &[u8]) -> bool {
    let is_digit = |byte: &u8| byte.is_ascii_alphanumeric() || b"./".contains(byte);
    text.len() == 60 && text[6] == b'$' && text[7..].iter().all(is_digit)
}

/// Hashes and checks passwords at one cost.
#[derive(Clone, Debug)]
pub struct Hasher {
    argon2: Argon2<'static>,
    /// The hash of no password, at the same cost: what a password is checked against where a user has none.
    unknown: PasswordHash,
}

impl Hasher {
    /// A hasher of this cost.
    pub fn new(cost: PasswordHashing) -> Hasher {
        let (memory, passes, lanes) = cost.cost();
        let params = Params::new(memory, passes, lanes, None).expect("the costs are within Argon2's bounds");
        let unknown = format!(
            "$argon2id$v=19$m={memory},t={passes},p={lanes}$bm9ib2R5IGtub3dzIGl0$\
             AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
        );
        Hasher {
            argon2: Argon2::new(Algorithm::Argon2id, Version::V0x13, params),
            unknown: PasswordHash(unknown),
        }
    }

    /// Whether a hash is to be replaced by one of this hasher now that its password is known: one of bcrypt, unless
    /// that may have read less of the password than there is, or one of Argon2id that costs less to guess.
    pub fn is_outdated(&self, hash: &PasswordHash, password: &Secret) -> bool {
        /// Bcrypt reads 72 bytes, the NUL at the end among them, and repeats what is shorter.
        const MOST_READ: usize = 71;
        let text = hash.as_phc();
        if is_bcrypt(text) {
            let password = password.expose();
            return password.len() <= MOST_READ && !password.contains('\0');
        }
        let work = |params: &Params| u64::from(params.m_cost()) * u64::from(params.t_cost());
        params(text).is_some_and(|params| work(&params) < work(self.argon2.params()))
    }

    /// Bytes of memory that hashing takes, or checking a password against a hash.
    pub fn memory(&self, hash: Option<&PasswordHash>) -> usize {
        let stored = hash.and_then(|hash| params(hash.as_phc()));
        let params = stored.as_ref().unwrap_or(self.argon2.params());
        (params.m_cost() as usize) << 10
    }

    /// Hashes with a fresh salt. Blocks for the work of one hash. Errors only when the system has no randomness or
    /// memory.
    pub fn hash(&self, password: &Secret) -> Result<PasswordHash, Error> {
        let hash: Phc = self
            .argon2
            .hash_password(password.expose().as_bytes())
            .map_err(|error| Error::Internal(format!("hashing a password: {error}")))?;
        Ok(PasswordHash(hash.to_string()))
    }

    /// Whether the password is the one that was hashed, at whatever cost; never where it is empty. Without a hash it is
    /// not, after the work of this hasher's cost, so that the time does not tell which users exist or have a password;
    /// an imported hash takes its own time. Blocks for the work of one hash.
    pub fn verify(&self, password: &Secret, hash: Option<&PasswordHash>) -> bool {
        let text = hash.unwrap_or(&self.unknown).as_phc();
        let matches = match is_bcrypt(text) {
            // Of a longer password it takes the first 72 bytes, as it did when it was hashed.
            true => bcrypt::verify(password.expose(), text).unwrap_or(false),
            false => Phc::new(text)
                .is_ok_and(|hash| self.argon2.verify_password(password.expose().as_bytes(), &hash).is_ok()),
        };
        matches && hash.is_some() && !password.expose().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(hash: &PasswordHash) -> (u32, u32, u32) {
        let params = Params::try_from(&Phc::new(hash.as_phc()).unwrap()).unwrap();
        (params.m_cost(), params.t_cost(), params.p_cost())
    }

    #[test]
    fn round_trip() {
        let owasp = Hasher::new(PasswordHashing::Owasp);
        let least = Hasher::new(PasswordHashing::LeastCostForTests);
        for (hasher, other) in [(&owasp, &least), (&least, &owasp)] {
            let hashed = hasher.hash(&"correct horse".into()).unwrap();
            // The cost is the hash's own.
            assert!(hasher.verify(&"correct horse".into(), Some(&hashed)));
            assert!(other.verify(&"correct horse".into(), Some(&hashed)));
            assert!(!hasher.verify(&"correct horsf".into(), Some(&hashed)));
            assert!(!hasher.verify(&"".into(), None));
            assert!(!hasher.verify(&"".into(), Some(&hasher.hash(&"".into()).unwrap())));
            assert_ne!(hasher.hash(&"correct horse".into()).unwrap(), hashed, "salted");
            assert_eq!(format!("{hashed:?}"), "PasswordHash(…)");
        }
    }

    #[test]
    fn a_damaged_hash_matches_nothing() {
        let hasher = Hasher::new(PasswordHashing::LeastCostForTests);
        assert!(!hasher.verify(&"x".into(), Some(&PasswordHash::from_phc("x".into()))));
    }

    #[test]
    fn hashes_of_other_programs() {
        let argon =
            |head: &str| format!("$argon2id${head}$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
        // "correct horse", by crypt(3).
        let tail = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
        let good = [
            argon("v=19$m=65536,t=4,p=4"),
            argon("v=16$m=8,t=1,p=1"),
            format!("$2y{tail}"),
            format!("$2a{tail}"),
            format!("$2b{tail}"),
        ];
        for text in good {
            let hash = PasswordHash::imported(text.clone().into()).unwrap();
            let hasher = Hasher::new(PasswordHashing::LeastCostForTests);
            assert_eq!(hasher.verify(&"correct horse".into(), Some(&hash)), is_bcrypt(&text), "{text}");
            assert!(!hasher.verify(&"correct horsf".into(), Some(&hash)), "{text}");
            assert!(!hasher.verify(&"".into(), Some(&hash)), "{text}");
        }
        let bad = [
            (argon("v=19$m=65537,t=1,p=1"), "costs more"),
            (argon("v=19$m=65536,t=5,p=1"), "costs more"),
            (argon("v=19$m=4294967295,t=1,p=1"), "costs more"),
            (argon("m=65536,t=1,p=1"), "damaged"),
            (argon("v=18$m=65536,t=1,p=1"), "damaged"),
            (argon("v=19$m=7,t=1,p=1"), "damaged"),
            (argon("v=19$m=65536,t=1,p=1").replace("$c2FsdHNhbHQ", "$c2Fs"), "damaged"),
            ("$argon2id$v=19$m=65536,t=1,p=1".to_owned(), "damaged"),
            (argon("v=19$m=65536,t=1,p=1").replace("argon2id", "argon2i"), "neither"),
            (format!("$2x{tail}"), "neither"),
            (format!("$2b{}", tail.replace("$05", "$13")), "costs more"),
            (format!("$2b{}", tail.replace("$05", "$31")), "costs more"),
            (format!("$2b{}", tail.replace("$05", "$03")), "damaged"),
            (format!("$2b{}", tail.replace("$05", "$ab")), "damaged"),
            (format!("$2b{}", &tail[..tail.len() - 1]), "damaged"),
            (format!("$2b{tail}x"), "damaged"),
            (format!("$2b{}", tail.replace('H', "!")), "damaged"),
            ("$2b$05".to_owned(), "damaged"),
            (format!("$2b{tail}{}", "x".repeat(453)), "longer than 512"),
            (argon(&format!("v=19$m=8,t=1,p=1{}", "é".repeat(256))), "longer than 512"),
            ("5f4dcc3b5aa765d61d8327deb882cf99".to_owned(), "neither"),
            (String::new(), "neither"),
        ];
        for (text, expected) in bad {
            let problem = PasswordHash::imported(text.clone().into()).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }

    #[test]
    fn outdated_hashes() {
        let bcrypt = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2".to_owned();
        let argon = |cost: &str| {
            format!("$argon2id$v=19${cost}$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
        };
        let long = "x".repeat(72);
        let rows = [
            (bcrypt.clone(), "correct horse", true),
            (bcrypt.clone(), &long[1..], true),
            (bcrypt.clone(), &long, false),
            // 71 characters of two bytes.
            (bcrypt.clone(), &"\u{e9}".repeat(71), false),
            (bcrypt, "correct horse\0correct horse", false),
            (argon("m=8,t=1,p=1"), &long, true),
            (argon("m=19456,t=1,p=1"), "x", true),
            (argon("m=9727,t=4,p=1"), "x", true),
            (argon("m=19456,t=2,p=1"), "x", false),
            (argon("m=19456,t=2,p=4"), "x", false),
            (argon("m=47104,t=1,p=1"), "x", false),
            (argon("m=65536,t=4,p=1"), "x", false),
            ("damaged".to_owned(), "x", false),
        ];
        for (text, password, expected) in rows {
            let (hash, password) = (PasswordHash::from_phc(text.clone()), password.into());
            let found = Hasher::new(PasswordHashing::Owasp).is_outdated(&hash, &password);
            assert_eq!(found, expected, "{text} {password:?}");
            let least = Hasher::new(PasswordHashing::LeastCostForTests).is_outdated(&hash, &password);
            assert_eq!(least, expected && is_bcrypt(&text), "{text} {password:?}");
        }
    }

    #[test]
    fn unknown_users_cost_as_much_as_known_ones() {
        let rows =
            [(PasswordHashing::Owasp, (19_456, 2, 1)), (PasswordHashing::LeastCostForTests, (8, 1, 1))];
        for (setting, expected) in rows {
            let hasher = Hasher::new(setting);
            // Were the text malformed, unknown users would be answered at once.
            assert_eq!(cost(&hasher.unknown), expected);
            let hash = hasher.hash(&"x".into()).unwrap();
            assert_eq!(cost(&hash), expected);
            assert_eq!(hasher.memory(Some(&hash)), (expected.0 as usize) << 10);
            assert_eq!(hasher.memory(None), setting.memory());
        }
        assert_eq!(crate::Config::default().password_hashing, PasswordHashing::Owasp);
    }
}
