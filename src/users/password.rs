//! Hashes passwords by Argon2id, and verifies passwords. Verifies hashes of other programs, too: the first login
//! replaces a hash of another program with one of ours.

pub use super::hash_formats::looks_like_hash;

use super::email::to_nfc;
use super::hash_formats::{ParsedHash, rewrite_imported_hash};
use crate::error::Error;
use crate::secret::Secret;
use argon2::{Algorithm, Argon2, Params, PasswordHasher, Version, password_hash::phc::PasswordHash as Phc};
use serde_json::Value;
use std::iter;
use unicode_normalization::is_nfc;

/// The most bytes of a hash. The column in the database has the same limit.
const MAX_HASH_BYTES: usize = 512;

/// The hash of a password: a PHC string (`$argon2id$v=19$m=19456,t=2,p=1$…`), or a hash in another program's format. No
/// log and no error shows the hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PasswordHash(Secret);

impl PasswordHash {
    /// Wraps a hash that the database has stored.
    pub fn from_stored(text: String) -> PasswordHash {
        PasswordHash(text.into())
    }

    /// Parses a hash that another program has made. Fails if the format is unknown, or if verifying costs too much. The
    /// error follows the name of a field in a message, and quotes no part of the hash.
    pub fn parse_imported(value: Value) -> Result<PasswordHash, String> {
        let text = rewrite_imported_hash(&value)?;
        if text.len() > MAX_HASH_BYTES {
            return Err(format!("is longer than {MAX_HASH_BYTES} bytes"));
        }
        ParsedHash::parse(&text)?;
        Ok(PasswordHash(text.into()))
    }

    /// Returns the hash as the text that the database stores.
    pub fn as_text(&self) -> &str {
        self.0.expose()
    }
}

/// The outcome of verifying a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PasswordMatch {
    /// The password does not match the hash.
    None,
    /// The password matches, and the caller should keep the hash.
    CurrentHash,
    /// The password matches, but the caller should replace the hash, because a new hash would be stronger.
    OutdatedHash,
}

/// Hashes passwords at one cost, and verifies passwords.
#[derive(Clone, Debug)]
pub struct Hasher {
    argon2: Argon2<'static>,
    /// A hash that no password matches, at the hasher's cost. The password of an unknown user is compared with this
    /// hash, so that the answer takes as long as for a known user.
    dummy_hash: PasswordHash,
}

impl Hasher {
    /// Creates a hasher with these parameters of Argon2id.
    pub fn new(params: Params) -> Hasher {
        let (memory, passes, lanes) = (params.m_cost(), params.t_cost(), params.p_cost());
        let dummy = format!(
            "$argon2id$v=19$m={memory},t={passes},p={lanes}$bm9ib2R5IGtub3dzIGl0$\
             AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
        );
        Hasher {
            argon2: Argon2::new(Algorithm::Argon2id, Version::V0x13, params),
            dummy_hash: PasswordHash(dummy.into()),
        }
    }

    /// Returns whether a new hash should replace this hash: its function is not Argon2id, guessing its password costs
    /// less, or its password is not in NFC. Keeps a hash whose function has read only a part of the password, because
    /// the unread part may be mistyped.
    fn is_outdated(&self, parsed: &ParsedHash, password: &str) -> bool {
        let params = self.argon2.params();
        let filled_kib = u64::from(params.m_cost()) * u64::from(params.t_cost());
        let is_current = parsed.argon2_filled_kib.is_some_and(|kib| kib >= filled_kib) && is_nfc(password);
        !is_current && !(parsed.ignores_part_of)(password)
    }

    /// Returns how much memory verifying a password with this hash takes; for `None`, how much making a hash takes.
    pub fn memory_bytes(&self, hash: Option<&PasswordHash>) -> usize {
        ParsedHash::parse(hash.unwrap_or(&self.dummy_hash).as_text())
            .map_or(0, |hash| hash.memory_bytes as usize)
    }

    /// Hashes a password with a new salt. Blocks for the work of one hash. Fails only if the system has no randomness
    /// or no memory.
    pub fn hash(&self, password: &Secret) -> Result<PasswordHash, Error> {
        let hash: Phc = self
            .argon2
            .hash_password(to_nfc(password.expose()).as_bytes())
            .map_err(|error| Error::Internal(format!("hashing a password: {error}")))?;
        Ok(PasswordHash(hash.to_string().into()))
    }

    /// Verifies a password. An empty password never matches.
    ///
    /// Without a hash, or with a hash that cannot be parsed, no password matches. The answer takes the time of a hash
    /// of ours, so that a client cannot tell by the time which users exist. An imported hash takes its own time.
    ///
    /// Blocks for the work of one hash, or of two for a password that is not in NFC, because another program may have
    /// hashed the password in the form that the client sent.
    pub fn verify(&self, password: &Secret, hash: Option<&PasswordHash>) -> PasswordMatch {
        let (normalized, sent) = (to_nfc(password.expose()), password.expose());
        let forms = || iter::once(&*normalized).chain((normalized != sent).then_some(sent));
        let known = hash.and_then(|hash| ParsedHash::parse(hash.as_text()).ok());
        let known = known.filter(|parsed| forms().any(|form| parsed.accepts_length(form)));
        let (parsed, may_match) = match known {
            Some(parsed) => (parsed, !sent.is_empty()),
            None => (ParsedHash::parse(self.dummy_hash.as_text()).expect("the hash is ours"), false),
        };
        let matched = forms().find(|form| parsed.accepts_length(form) && (parsed.matches)(form));
        match matched.filter(|_| may_match) {
            None => PasswordMatch::None,
            Some(form) if self.is_outdated(&parsed, form) => PasswordMatch::OutdatedHash,
            Some(_) => PasswordMatch::CurrentHash,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PasswordHashing;
    use base64ct::{Base64Unpadded, Encoding};
    use nix::time::{ClockId, clock_gettime};
    use std::time::Duration;

    const PASSWORD: &str = "correct horse";

    fn matches(hasher: &Hasher, password: &str, hash: Option<&PasswordHash>) -> bool {
        hasher.verify(&password.into(), hash) != PasswordMatch::None
    }

    fn cost(hash: &PasswordHash) -> (u32, u32, u32) {
        let params = Params::try_from(&Phc::new(hash.as_text()).unwrap()).unwrap();
        (params.m_cost(), params.t_cost(), params.p_cost())
    }

    #[test]
    fn round_trip() {
        let owasp = Hasher::new(PasswordHashing::Owasp.params());
        let least = Hasher::new(PasswordHashing::LeastCostForTests.params());
        for (hasher, other) in [(&owasp, &least), (&least, &owasp)] {
            let hashed = hasher.hash(&"correct horse".into()).unwrap();
            // A hasher verifies a hash at the cost of the hash, not at its own cost.
            assert!(matches(hasher, "correct horse", Some(&hashed)));
            assert!(matches(other, "correct horse", Some(&hashed)));
            assert!(!matches(hasher, "correct horsf", Some(&hashed)));
            assert!(!matches(hasher, "", None));
            assert!(!matches(hasher, "", Some(&hasher.hash(&"".into()).unwrap())));
            assert_ne!(hasher.hash(&"correct horse".into()).unwrap(), hashed, "salted");
            assert_eq!(format!("{hashed:?}"), "PasswordHash(…)");
        }
    }

    #[test]
    fn a_damaged_hash_matches_nothing() {
        let hasher = Hasher::new(PasswordHashing::LeastCostForTests.params());
        assert!(!matches(&hasher, "x", Some(&PasswordHash::from_stored("x".into()))));
    }

    #[test]
    fn hashes_of_other_programs() {
        let argon =
            |head: &str| format!("$argon2id${head}$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
        // The hash of "correct horse" by crypt(3).
        let tail = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
        let good = [
            argon("v=19$m=65536,t=4,p=4"),
            argon("v=16$m=8,t=1,p=1"),
            format!("$2y{tail}"),
            format!("$2a{tail}"),
            format!("$2b{tail}"),
        ];
        for text in good {
            let hash = PasswordHash::parse_imported(text.clone().into()).unwrap();
            let hasher = Hasher::new(PasswordHashing::LeastCostForTests.params());
            let is_real = !text.starts_with("$argon");
            assert_eq!(matches(&hasher, "correct horse", Some(&hash)), is_real, "{text}");
            assert!(!matches(&hasher, "correct horsf", Some(&hash)), "{text}");
            assert!(!matches(&hasher, "", Some(&hash)), "{text}");
        }
        let bad = [
            (argon("v=19$m=132097,t=1,p=1"), "costs more to verify than 129 MiB of memory, or 1.5 s"),
            (argon("v=19$m=65536,t=6,p=1"), "costs more"),
            (argon("v=19$m=131072,t=3,p=1"), "costs more"),
            ("$scrypt$ln=18,r=8,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(), "costs more"),
            ("$scrypt$ln=17,r=8,p=2$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(), "costs more"),
            ("$scrypt$ln=4,r=8,p=1$c2FsdHNhbHQ$AAAA".to_owned(), "or an output of fewer than 10"),
            (
                "$scrypt$ln=4,r=8,p=1$c2FsdA$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "a salt of fewer than 8 or more than 48 bytes",
            ),
            // A test vector of RFC 6070.
            ("$pbkdf2$i=4096$c2FsdA$SwB5AbdlSJq+rUnZJvch0GWkKcE".to_owned(), "a salt of fewer than 8"),
            (format!("$pbkdf2-sha256$i=9$c2FsdHNhbHQ${}", "A".repeat(90)), "or more than 64"),
            // Hashes by Django's scrypt, by Werkzeug and by passlib.
            ("scrypt$16384$saltsalt$8$1$AAAAAAAAAAAAAAAAAAAAAA==".to_owned(), "neither"),
            ("scrypt:32768:8:1$saltsalt$AAAAAAAAAAAAAAAAAAAAAA".to_owned(), "neither"),
            ("pbkdf2:sha256:1000$saltsalt$AAAAAAAAAAAAAAAAAAAAAA".to_owned(), "neither"),
            (
                "$pbkdf2-sha256$29000$saltsaltsalt$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "of a form that is not read",
            ),
            // Hashes by AdonisJS, by Ory Kratos, and by a program that has a parameter `rounds`.
            (
                "$scrypt$n=16384,r=8,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "of a form that is not read",
            ),
            (
                "$scrypt$ln=16384,r=8,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "of a form that is not read",
            ),
            (
                "$pbkdf2-sha512$rounds=1000$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "of a form that is not read",
            ),
            ("$pbkdf2-sha256$i=29000$saltsaltsalt$AAAA=".to_owned(), "damaged"),
            ("{SSHA}c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0".to_owned(), "neither"),
            ("{argon2}secret".to_owned(), "neither"),
            (
                "$scrypt$ln=64,r=8,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(),
                "of a form that is not read",
            ),
            ("$scrypt$ln=4,r=65536,p=65536$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned(), "damaged"),
            ("pbkdf2_sha256$1842106$saltsalt$AAAAAAAAAAAAAAAAAAAAAA==".to_owned(), "costs more"),
            // An output of two blocks of 20 bytes takes twice the rounds.
            ("$pbkdf2$i=1750001$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA".to_owned(), "costs more"),
            ("pbkdf2_sha256$0$saltsalt$AAAAAAAAAAAAAAAAAAAAAA==".to_owned(), "damaged"),
            ("pbkdf2_md5$1$saltsalt$AAAAAAAAAAAAAAAAAAAAAA==".to_owned(), "neither"),
            ("$P$FabcdefghRJFCMvnAbZH2hCiFPRxpk.".to_owned(), "costs more"),
            ("$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk".to_owned(), "damaged"),
            (format!("$wp$2y{}", tail.replace("$05", "$14")), "costs more"),
            (argon("v=19$m=4294967295,t=1,p=1"), "costs more"),
            (argon("v=19$m=8,t=4294967295,p=1"), "costs more"),
            (argon("m=65536,t=1,p=1"), "damaged"),
            (argon("v=18$m=65536,t=1,p=1"), "damaged"),
            (argon("v=19$m=7,t=1,p=1"), "damaged"),
            (argon("v=19$m=65536,t=1,p=1").replace("$c2FsdHNhbHQ", "$c2Fs"), "a salt of fewer than 8"),
            ("$argon2id$v=19$m=65536,t=1,p=1".to_owned(), "damaged"),
            (argon("v=19$m=65536,t=1,p=1").replace("argon2id", "argon2i"), "neither"),
            (format!("$2x{tail}"), "neither"),
            (format!("$2b{}", tail.replace("$05", "$14")), "costs more"),
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
            let problem = PasswordHash::parse_imported(text.clone().into()).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }

    /// Verifying a password may take 75 times as long as a hash of ours, which is some 1.5 s of a core.
    #[test]
    fn no_check_takes_longer_than_75_of_our_own() {
        fn took(work: impl FnOnce()) -> Duration {
            let clock = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
            let start = clock();
            work();
            clock() - start
        }
        const SALT: &str = "c2FsdHNhbHQ";
        let output = |bytes: usize| Base64Unpadded::encode_string(&vec![7; bytes]);
        let argon2 = |memory: u64, lanes: u64| {
            move |passes: u64| format!("$argon2id$v=19$m={memory},t={passes},p={lanes}${SALT}${}", output(64))
        };
        let scrypt =
            |ln: u64, r: u64| move |p: u64| format!("$scrypt$ln={ln},r={r},p={p}${SALT}${}", output(64));
        let pbkdf2 = |digest: &'static str, bytes: usize| {
            move |rounds: u64| format!("$pbkdf2{digest}$i={rounds}${SALT}${}", output(bytes))
        };
        let bcrypt = |kind: &'static str| {
            move |cost: u64| format!("{kind}${cost:02}$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2")
        };
        let phpass = |rounds: u64| {
            let digit = "./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ".chars().nth(rounds as usize);
            format!("$P${}abcdefghRJFCMvnAbZH2hCiFPRxpk.", digit.unwrap_or('!'))
        };
        // Each function makes a hash for a value of the one parameter that grows. All other parameters are at a bound.
        type Format<'a> = Box<dyn Fn(u64) -> String + 'a>;
        let formats: [(u64, Format<'_>); 16] = [
            (1, Box::new(argon2(8, 1))),
            (1, Box::new(argon2(19_456, 1))),
            (1, Box::new(argon2(131_072, 1))),
            (1, Box::new(argon2(131_072, 16_384))),
            (1, Box::new(scrypt(1, 1024))),
            (1, Box::new(scrypt(14, 8))),
            (1, Box::new(scrypt(17, 8))),
            (1, Box::new(|r| format!("$scrypt$ln=10,r={r},p=1${SALT}${}", output(64)))),
            (1, Box::new(|r| format!("$scrypt$ln=1,r={r},p=1024${SALT}${}", output(64)))),
            (1, Box::new(pbkdf2("", 10))),
            (1, Box::new(pbkdf2("", 64))),
            (1, Box::new(pbkdf2("-sha256", 32))),
            (1, Box::new(pbkdf2("-sha512", 64))),
            (4, Box::new(bcrypt("$2b"))),
            (4, Box::new(bcrypt("$wp$2y"))),
            (4, Box::new(phpass)),
        ];
        // Each password has a second form of equal length, because NFC turns U+0340 into U+0300.
        let passwords =
            [4_096, 65_000].map(|bytes| Secret::from(&*format!("\u{340}{}", "a".repeat(bytes - 2))));
        let hasher = Hasher::new(PasswordHashing::Owasp.params());
        let ours = (0..5).map(|_| took(|| drop(hasher.hash(&PASSWORD.into()).unwrap()))).min().unwrap();
        // A debug build executes a round of PBKDF2 some eight times slower, because the loop is compiled with this
        // crate.
        let is_slow = |hash: &str| cfg!(debug_assertions) && hash.starts_with("$pbkdf2");
        for (least, format) in formats {
            let is_accepted = |number: u64| PasswordHash::parse_imported(format(number).into()).is_ok();
            assert!(is_accepted(least), "{}", format(least));
            let mut refused = least + 1;
            while is_accepted(refused) {
                refused *= 2;
            }
            let mut accepted = least;
            while refused - accepted > 1 {
                let middle = accepted.midpoint(refused);
                *if is_accepted(middle) { &mut accepted } else { &mut refused } = middle;
            }
            let divisor = if is_slow(&format(accepted)) { 16 } else { 1 };
            let hash = PasswordHash::parse_imported(format(accepted / divisor).into()).unwrap();
            for password in &passwords {
                let check = || took(|| assert_eq!(hasher.verify(password, Some(&hash)), PasswordMatch::None));
                // Takes the fastest of three tries, because other processes share the caches.
                let fastest = (0..3).map(|_| check()).find(|&took| took <= 75 * ours);
                assert!(fastest.is_some(), "{}, {} bytes, {ours:?}", hash.as_text(), password.expose().len());
            }
        }
    }

    #[test]
    fn a_long_password_matches_argon2id_alone() {
        let hasher = Hasher::new(PasswordHashing::Owasp.params());
        let [read, long] = [4_096, 4_097].map(|bytes| Secret::from("x".repeat(bytes)));
        // Bcrypt reads only 72 bytes, so that a longer password would match, too.
        let bcrypt = bcrypt::hash_with_salt("x".repeat(72), 4, [7; 16]).unwrap().to_string();
        let bcrypt = PasswordHash::parse_imported(bcrypt.into()).unwrap();
        assert_eq!(
            [&read, &long].map(|password| matches(&hasher, password.expose(), Some(&bcrypt))),
            [true, false]
        );
        let longest = Secret::from("x".repeat(65_000));
        let ours = hasher.hash(&longest).unwrap();
        assert_eq!(hasher.verify(&longest, Some(&ours)), PasswordMatch::CurrentHash);
        assert_eq!(hasher.verify(&long, Some(&ours)), PasswordMatch::None);
    }

    /// Python's hashlib and perl's crypt made these hashes. The hash of "test12345" is from the documentation of
    /// phpass.
    #[test]
    fn formats_of_other_programs() {
        const BCRYPT: &str = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
        let of = |secret: &str| secret.to_owned();
        let least = Hasher::new(PasswordHashing::LeastCostForTests.params()).hash(&PASSWORD.into()).unwrap();
        let least = least.as_text();
        let rows: [(Value, &str, String); 15] = [
            (format!("{{BCRYPT}}$2b{BCRYPT}").into(), "$2b$", of(PASSWORD)),
            (format!("{{CRYPT}}$2y{BCRYPT}").into(), "$2y$", of(PASSWORD)),
            (format!("{{blf-crypt}}$2y{BCRYPT}").into(), "$2y$", of(PASSWORD)),
            (format!("{{ARGON2}}{least}").into(), "$argon2id$", of(PASSWORD)),
            (format!("{{argon2@SpringSecurity_v5_8}}{least}").into(), "$argon2id$", of(PASSWORD)),
            (
                "pbkdf2_sha256$1000$saltsaltsalt$F7o7+5VTVzFAO998X6s3AHrDsJVdMiIlgndIMe19NvY=".into(),
                "$pbkdf2-sha256$i=1000$",
                of(PASSWORD),
            ),
            (
                "pbkdf2_sha1$1000$saltsaltsalt$JfNU29qvQkW1UgahO6OQ0oP6O0I=".into(),
                "$pbkdf2-sha1$",
                of(PASSWORD),
            ),
            (
                "$pbkdf2-sha512$i=1000$c2FsdHNhbHRzYWx0$oSKce4SGrSKsJabCWZfpe2MmVOPtl4paOjoD1njLdjo3le9sMBwq0q7ivJFcrXSTMQ0HjlOn/J48J9WZe4uR0g"
                    .into(),
                "$pbkdf2-sha512$i=1000$",
                of(PASSWORD),
            ),
            (
                "$scrypt$ln=4,r=8,p=1$c2FsdHNhbHRzYWx0$E7/5hFKyIa/qZwRipZ2wJ8zG6C7W2+ArzZNltex+xis".into(),
                "$scrypt$",
                of(PASSWORD),
            ),
            ("$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk.".into(), "$P$", of(PASSWORD)),
            ("$P$9IQRaTwmfeRo7ud9Fh4E2PdI0S3r.L0".into(), "$P$", of("test12345")),
            (
                "$wp$2y$05$abcdefghijklmnopqrstuu9iY1gyjA3k6CGptWJJ9nIT22tG/wV8K".into(),
                "$wp$2y$",
                of(PASSWORD),
            ),
            (
                " {bcrypt}$2a$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2".into(),
                "$2a$",
                of(PASSWORD),
            ),
            (
                "bcrypt$$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2".into(),
                "$2b$",
                of(PASSWORD),
            ),
            (
                format!(
                    "argon2{}",
                    Hasher::new(PasswordHashing::LeastCostForTests.params()).hash(&PASSWORD.into()).unwrap().as_text()
                )
                .into(),
                "$argon2id$",
                of(PASSWORD),
            ),
        ];
        let hasher = Hasher::new(PasswordHashing::Owasp.params());
        for (value, stored, password) in rows {
            let hash = PasswordHash::parse_imported(value.clone()).unwrap();
            assert!(hash.as_text().starts_with(stored), "{value}");
            assert_eq!(
                hasher.verify(&password.as_str().into(), Some(&hash)),
                PasswordMatch::OutdatedHash,
                "{value}"
            );
            assert_eq!(hasher.verify(&"correct horsf".into(), Some(&hash)), PasswordMatch::None, "{value}");
            assert_eq!(hasher.verify(&"".into(), Some(&hash)), PasswordMatch::None, "{value}");
        }
        for value in [serde_json::json!({}), serde_json::json!(["x"]), 7.into()] {
            let problem = PasswordHash::parse_imported(value.clone()).unwrap_err();
            assert!(problem.starts_with("must be a string"), "{value}: {problem}");
        }
        // Accepts the default costs of Django and of OWASP, and the largest costs that are allowed.
        for cost in ["m=102400,t=2,p=8", "m=131072,t=2,p=1", "m=47104,t=1,p=1", "m=12288,t=3,p=1"] {
            let text = format!(
                "argon2$argon2id$v=19${cost}$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
            );
            assert!(PasswordHash::parse_imported(text.into()).is_ok(), "{cost}");
        }
        let text = "$scrypt$ln=17,r=8,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned();
        let hash = PasswordHash::parse_imported(text.into()).unwrap();
        // scrypt allocates a table of 128 MiB, a block for its pass, and one block more.
        assert_eq!(hasher.memory_bytes(Some(&hash)), (128 << 20) + 2 * (8 << 7));
        let text = "$scrypt$ln=1,r=1024,p=20$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA".to_owned();
        let hash = PasswordHash::parse_imported(text.into()).unwrap();
        assert_eq!(hasher.memory_bytes(Some(&hash)), (2 + 20 + 1) * (1024 << 7));
    }

    #[test]
    fn clear_passwords_are_no_hashes() {
        let bcrypt = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
        let hashes = [
            bcrypt,
            &bcrypt[..50],
            &bcrypt.replace("$05", "$31"),
            &format!("{{bcrypt}}{bcrypt}"),
            &format!(" {bcrypt}\n"),
            &format!("bcrypt_sha256${bcrypt}"),
            "{CRYPT}abJnggxhB/yWI",
            "3|$argon2id$v=19$m=65536,t=4,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
            "$apr1$saltsalt$1nyCYXUy4WCYP2DUwzuiY.",
            "sha1$saltsalt$5baa61e4c9b93f3f0682250b6cf8331b7ee68fd8",
            "md5$saltsalt$5f4dcc3b5aa765d61d8327deb882cf99",
            "$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk.",
            "pbkdf2_sha256$1000$saltsaltsalt$F7o7+5VTVzFAO998X6s3AHrDsJVdMiIlgndIMe19NvY=",
            "scrypt:16:8:1$saltsaltsaltsalt$ae44c8f5f02003bb610f3cd1f051d784",
            "$argon2i$v=19$m=65536,t=4,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
            "{SSHA}c2FsdHNhbHRzYWx0c2FsdHNhbHRzYWx0c2Fs",
            "{SHA512-CRYPT}$6$saltsalt$qFmFH.bQmmtXzyBY0s9v7Oicd2z4XSIecDzlB5KiA2",
            "$6$saltsalt$qFmFH.bQmmtXzyBY0s9v7Oicd2z4XSIecDzlB5KiA2/jctKu9YterLp8wwnSq.qc.eoxqOmSuNp2xS0ktL3nh/",
        ];
        assert!(hashes.iter().all(|text| looks_like_hash(text)), "{:?}", hashes.map(looks_like_hash));
        for text in [
            PASSWORD,
            "",
            "$P$ecret word",
            "$2b$secret",
            "{bcrypt}",
            "$argon2id$",
            "a:b:c$d$e",
            "$ecretpassword1",
        ] {
            assert!(!looks_like_hash(text), "{text}");
        }
    }

    #[test]
    fn one_password_in_two_forms_is_one() {
        let (composed, decomposed) = ("\u{e9}-password", "e\u{301}-password");
        let hasher = Hasher::new(PasswordHashing::Owasp.params());
        for sent in [composed, decomposed] {
            let hash = hasher.hash(&sent.into()).unwrap();
            for typed in [composed, decomposed] {
                assert_eq!(hasher.verify(&typed.into(), Some(&hash)), PasswordMatch::CurrentHash);
            }
            assert_eq!(hasher.verify(&"e-password".into(), Some(&hash)), PasswordMatch::None);
        }
        // Another program has hashed a password that is not in NFC as the client sent it.
        let text = "$pbkdf2-sha256$i=1000$c2FsdHNhbHRzYWx0$vl9Oh2k2Aq5ewnjPmIyJmRtjWsc7w5hq2m1xUOs8x1Q";
        let hash = PasswordHash::parse_imported(text.into()).unwrap();
        assert_eq!(hasher.verify(&decomposed.into(), Some(&hash)), PasswordMatch::OutdatedHash);
        assert_eq!(hasher.verify(&composed.into(), Some(&hash)), PasswordMatch::None);
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
            // 71 characters of two bytes each are longer than the 72 bytes that bcrypt reads.
            (bcrypt.clone(), &"\u{e9}".repeat(71), false),
            (bcrypt, "correct horse\0correct horse", false),
            (argon("m=8,t=1,p=1"), &long, true),
            (argon("m=19456,t=1,p=1"), "x", true),
            (argon("m=9727,t=4,p=1"), "x", true),
            (argon("m=19456,t=2,p=1"), "x", false),
            (argon("m=19456,t=2,p=4"), "x", false),
            (argon("m=47104,t=1,p=1"), "x", false),
            (argon("m=65536,t=4,p=1"), "x", false),
        ];
        for (text, password, expected) in rows {
            let format = ParsedHash::parse(&text).unwrap();
            let found = Hasher::new(PasswordHashing::Owasp.params()).is_outdated(&format, password);
            assert_eq!(found, expected, "{text} {password:?}");
            let least =
                Hasher::new(PasswordHashing::LeastCostForTests.params()).is_outdated(&format, password);
            assert_eq!(least, expected && text.starts_with("$2b$"), "{text} {password:?}");
        }
    }

    #[test]
    fn unknown_users_cost_as_much_as_known_ones() {
        let rows =
            [(PasswordHashing::Owasp, (19_456, 2, 1)), (PasswordHashing::LeastCostForTests, (8, 1, 1))];
        for (setting, expected) in rows {
            let hasher = Hasher::new(setting.params());
            // If this hash could not be parsed, a login of an unknown user would be answered at once.
            assert_eq!(cost(&hasher.dummy_hash), expected);
            let hash = hasher.hash(&"x".into()).unwrap();
            assert_eq!(cost(&hash), expected);
            assert_eq!(hasher.memory_bytes(Some(&hash)), (expected.0 as usize) << 10);
            assert_eq!(hasher.memory_bytes(None), (setting.params().m_cost() as usize) << 10);
        }
        assert_eq!(crate::Config::default().password_hashing, PasswordHashing::Owasp);
    }
}
