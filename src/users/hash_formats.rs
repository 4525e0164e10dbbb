//! Parses password hashes, ours and those in the formats of other programs. A parsed hash knows what verifying costs,
//! and verifies a password.

use argon2::password_hash::phc::{Output, PasswordHash as Phc, Salt};
use argon2::{Argon2, PasswordVerifier, Version};
use base64ct::{Base64, Base64ShaCrypt, Base64Unpadded, Encoding};
use bcrypt::HashParts;
use hmac::{EagerHash, Hmac, KeyInit, Mac};
use md5::{Digest, Md5};
use pbkdf2::pbkdf2_hmac;
use scrypt::Scrypt;
use serde_json::Value;
use sha1::Sha1;
use sha2::{Sha256, Sha384, Sha512};
use subtle::ConstantTimeEq;

/// The most memory that verifying a password may take, because every client that knows the address of a user can cause
/// this work.
const MAX_VERIFYING_BYTES: u64 = 129 << 20;

/// The most processor time that verifying one form of a password may take. A password that is not in NFC has two forms,
/// so that a login takes up to 1.4 s.
const MAX_VERIFYING_NS: u64 = 700_000_000;

/// The most bytes of a password that is compared with a hash of another function than Argon2id. A longer password would
/// take too much time, because phpass hashes the whole password in each round.
const MAX_FOREIGN_PASSWORD_BYTES: usize = 4096;

// Each of the following constants is the time that a part of a hash function takes, in nanoseconds, on a core without
// instructions for SHA that makes one of our Argon2id hashes in 20 ms.
/// Time in which Argon2id fills 1 KiB once, whatever the number of lanes.
const ARGON2_NS_PER_KIB: u64 = 2_000;
/// Time in which scrypt fills 1 KiB of its table and reads it again.
const SCRYPT_NS_PER_TABLE_KIB: u64 = 3_600;
/// Time in which scrypt derives and hashes 1 KiB of its blocks.
const SCRYPT_NS_PER_BLOCK_KIB: u64 = 26_000;
/// Time of a round of PBKDF2 with SHA-1.
const PBKDF2_SHA1_ROUND_NS: u64 = 200;
/// Time of a round of PBKDF2 with SHA-256.
const PBKDF2_SHA256_ROUND_NS: u64 = 380;
/// Time of a round of PBKDF2 with SHA-512.
const PBKDF2_SHA512_ROUND_NS: u64 = 500;
/// Time of a round of bcrypt.
const BCRYPT_ROUND_NS: u64 = 60_000;
/// Time of a round of MD5 over a password of [`MAX_FOREIGN_PASSWORD_BYTES`].
const PHPASS_ROUND_NS: u64 = 7_500;

/// The message about a hash that costs more than [`MAX_VERIFYING_BYTES`] or [`MAX_VERIFYING_NS`].
const COSTLY_HASH: &str = "costs more to verify than 129 MiB of memory, or 1.5 s of a core for any password";

/// The message about a hash in a format that userd does not verify.
const UNKNOWN_FORMAT: &str = "is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash";

/// The message about a hash that is incomplete, or that the crates for its format refuse.
const DAMAGED_HASH: &str = "is a damaged hash, or of a form that is not read: with parameters of other names or meanings than in \
                      PHC strings, a salt of fewer than 8 or more than 48 bytes, or an output of fewer than 10 or more \
                      than 64";

/// Prefixes, in upper or lower case, that other programs write before a hash. Prefixes are removed, because the hash
/// behind a prefix names its format itself.
const FOREIGN_HASH_PREFIXES: &str =
    "{bcrypt} {argon2} {argon2@SpringSecurity_v5_8} {argon2i} {argon2id} {crypt} {blf-crypt} argon2 bcrypt$";

/// Returns whether a text looks like a hash: it ends in characters of a digest, behind a name in braces or behind two
/// `$`.
pub fn looks_like_hash(text: &str) -> bool {
    /// Length of the shortest digest, which crypt(3) makes by DES.
    const MIN_DIGEST_CHARS: usize = 13;
    let text = text.trim();
    let is_digest_char = |sign: char| sign.is_ascii_alphanumeric() || "./+=_-".contains(sign);
    let digest_chars = text.len() - text.trim_end_matches(is_digest_char).len();
    let is_braced = text.starts_with('{') && text.contains('}');
    digest_chars >= MIN_DIGEST_CHARS && (is_braced || text.matches('$').count() > 1)
}

/// A parsed hash, which can verify a password, and tells what verifying costs.
pub(super) struct ParsedHash<'a> {
    /// Returns whether a password matches the hash. Blocks for the work of the hash function.
    pub matches: Box<dyn Fn(&str) -> bool + 'a>,
    /// Bytes of memory that verifying a password takes.
    pub memory_bytes: u64,
    /// Nanoseconds of processor time that verifying a password takes.
    verifying_ns: u64,
    /// KiB of memory that Argon2id fills, added up over its passes; `None` if the hash is of another function.
    pub argon2_filled_kib: Option<u64>,
    /// Returns whether the hash function ignores a part of this password, so that another password matches, too.
    pub ignores_part_of: fn(&str) -> bool,
}

impl<'a> ParsedHash<'a> {
    /// Parses a hash. Refuses a hash that costs too much to verify. The error follows the name of a field in a message,
    /// and quotes no part of the hash.
    pub fn parse(text: &'a str) -> Result<ParsedHash<'a>, &'static str> {
        let (kind, rest) = text.strip_prefix('$').and_then(|text| text.split_once('$')).unwrap_or_default();
        let parsed = match kind {
            "argon2id" => parse_argon2(text),
            "scrypt" => parse_scrypt(text),
            "pbkdf2" | "pbkdf2-sha1" => parse_pbkdf2::<Sha1>(text, PBKDF2_SHA1_ROUND_NS),
            "pbkdf2-sha256" => parse_pbkdf2::<Sha256>(text, PBKDF2_SHA256_ROUND_NS),
            "pbkdf2-sha512" => parse_pbkdf2::<Sha512>(text, PBKDF2_SHA512_ROUND_NS),
            "2a" | "2b" | "2y" => parse_bcrypt(text),
            "wp" => parse_bcrypt(&text["$wp".len()..]).map(to_wordpress_hash),
            "P" | "H" => parse_phpass(rest),
            _ => return Err(UNKNOWN_FORMAT),
        };
        let parsed = parsed.ok_or(DAMAGED_HASH)?;
        let is_cheap = parsed.memory_bytes <= MAX_VERIFYING_BYTES && parsed.verifying_ns <= MAX_VERIFYING_NS;
        is_cheap.then_some(parsed).ok_or(COSTLY_HASH)
    }

    /// Returns whether the password is short enough to be verified within [`MAX_VERIFYING_NS`]. A longer password does
    /// not match.
    pub fn accepts_length(&self, password: &str) -> bool {
        self.argon2_filled_kib.is_some() || password.len() <= MAX_FOREIGN_PASSWORD_BYTES
    }

    /// Creates the parsed hash of a function, other than Argon2id, that reads all of a password and takes `round_ns`
    /// for each of its `rounds`.
    fn new(rounds: u64, round_ns: u64, matches: impl Fn(&str) -> bool + 'a) -> ParsedHash<'a> {
        ParsedHash {
            matches: Box::new(matches),
            memory_bytes: 0,
            verifying_ns: rounds.saturating_mul(round_ns),
            argon2_filled_kib: None,
            ignores_part_of: |_| false,
        }
    }
}

/// Parses a hash in PHC form, such as `$scrypt$ln=16,r=8,p=1$salt$output`. Returns the hash, its salt and its output.
fn parse_phc(text: &str) -> Option<(Phc, Salt, Output)> {
    let hash = Phc::new(text).ok()?;
    Some((hash.clone(), hash.salt?, hash.hash?))
}

/// Parses a hash by Argon2, with parameters as in `m=19456,t=2,p=1`.
fn parse_argon2<'a>(text: &str) -> Option<ParsedHash<'a>> {
    let (hash, ..) = parse_phc(text)?;
    Version::try_from(hash.version?).ok()?;
    let params = argon2::Params::try_from(&hash).ok()?;
    let memory_kib = u64::from(params.m_cost());
    let filled_kib = memory_kib * u64::from(params.t_cost());
    let parsed = ParsedHash::new(filled_kib, ARGON2_NS_PER_KIB, move |password| {
        Argon2::default().verify_password(password.as_bytes(), &hash).is_ok()
    });
    Some(ParsedHash { argon2_filled_kib: Some(filled_kib), memory_bytes: memory_kib << 10, ..parsed })
}

/// Parses a hash by scrypt, with parameters as in `ln=16,r=8,p=1`.
fn parse_scrypt<'a>(text: &str) -> Option<ParsedHash<'a>> {
    let (hash, ..) = parse_phc(text)?;
    // Limits `r` and `p`, because the crate `scrypt` multiplies them without a check for overflow.
    let is_small = |name| hash.params.get_decimal(name).is_some_and(|number| number <= 1 << 10);
    let params = (is_small("r") && is_small("p")).then(|| scrypt::Params::try_from(&hash).ok())??;
    let (n, r, p) = (params.n(), u64::from(params.r()), u64::from(params.p()));
    let nanoseconds = n.saturating_mul(SCRYPT_NS_PER_TABLE_KIB).saturating_add(SCRYPT_NS_PER_BLOCK_KIB);
    let parsed = ParsedHash::new((r * p).div_ceil(8), nanoseconds, move |password| {
        Scrypt::new().verify_password(password.as_bytes(), &hash).is_ok()
    });
    // scrypt allocates its table, the blocks of all passes, and one block more. A block has 128 * r bytes.
    Some(ParsedHash { memory_bytes: n.saturating_add(p + 1).saturating_mul(128 * r), ..parsed })
}

/// Parses a hash by PBKDF2, with a parameter as in `i=29000`. PBKDF2 executes all rounds for each block of the output;
/// a block is as long as a digest.
fn parse_pbkdf2<'a, D: EagerHash>(text: &str, round_ns: u64) -> Option<ParsedHash<'a>> {
    let (hash, salt, output) = parse_phc(text)?;
    let rounds = hash.params.get_decimal("i").filter(|rounds| *rounds > 0)?;
    let blocks = output.len().div_ceil(<D as Digest>::output_size()) as u64;
    Some(ParsedHash::new(blocks * u64::from(rounds), round_ns, move |password| {
        let mut computed = vec![0; output.len()];
        pbkdf2_hmac::<D>(password.as_bytes(), &salt, rounds, &mut computed);
        computed.ct_eq(output.as_bytes()).into()
    }))
}

/// Parses a bcrypt hash. bcrypt reads the first 72 bytes of a password and of the NUL behind the password.
fn parse_bcrypt(text: &str) -> Option<ParsedHash<'_>> {
    /// The most bytes of a password that bcrypt reads wholly, because one of the 72 bytes that bcrypt reads is a NUL
    /// behind the password.
    const MAX_BCRYPT_INPUT_BYTES: usize = 71;
    let cost = text.parse::<HashParts>().ok().map(|parts| parts.get_cost()).filter(|cost| *cost >= 4)?;
    let rounds = 1_u64.checked_shl(cost).unwrap_or(u64::MAX);
    let matches = move |password: &str| bcrypt::verify(password, text).unwrap_or(false);
    let parsed = ParsedHash::new(rounds, BCRYPT_ROUND_NS, matches);
    let ignores_part_of = |password: &str| password.len() > MAX_BCRYPT_INPUT_BYTES || password.contains('\0');
    Some(ParsedHash { ignores_part_of, ..parsed })
}

/// Makes a bcrypt hash verify as WordPress does since 6.8: cuts white space off the password's ends, and passes a
/// digest of the rest to bcrypt.
fn to_wordpress_hash(bcrypt: ParsedHash<'_>) -> ParsedHash<'_> {
    let matches = move |password: &str| {
        let mut mac = Hmac::<Sha384>::new_from_slice(b"wp-sha384").expect("a key of any length is one");
        mac.update(password.trim_matches([' ', '\t', '\n', '\r', '\0', '\x0b']).as_bytes());
        (bcrypt.matches)(&Base64::encode_string(&mac.finalize().into_bytes()))
    };
    let ignores_part_of = |password: &str| password.trim() != password || password.contains('\0');
    ParsedHash { matches: Box::new(matches), ignores_part_of, ..bcrypt }
}

/// Parses a hash by phpass, which executes many rounds of MD5 (WordPress before 6.8, phpBB). The text has one character
/// for the number of rounds, eight of salt, and 22 of the hash.
fn parse_phpass(text: &str) -> Option<ParsedHash<'_>> {
    /// The digits by which crypt(3) writes the numbers from 0 to 63.
    const CRYPT_DIGITS: &[u8] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let log2 = CRYPT_DIGITS[..=30].iter().position(|digit| Some(digit) == text.as_bytes().first())?;
    let rounds = 1_u64 << log2;
    let (salt, hash) = (text.get(1..9)?, Base64ShaCrypt::decode_vec(text.get(9..)?).ok()?);
    let hash: [u8; 16] = hash.try_into().ok()?;
    Some(ParsedHash::new(rounds, PHPASS_ROUND_NS, move |password| {
        let mut computed = Md5::digest(format!("{salt}{password}"));
        for _ in 0..rounds {
            computed = Md5::new().chain_update(computed).chain_update(password).finalize();
        }
        computed.ct_eq(&hash).into()
    }))
}

/// Rewrites a hash in the form in which the database stores hashes: without the prefixes of other programs, and a hash
/// of Django's in PHC form.
pub(super) fn rewrite_imported_hash(value: &Value) -> Result<String, &'static str> {
    let text = value.as_str().ok_or("must be a string")?.trim();
    let strip = |prefix: &str| {
        let (start, hash) = text.split_at_checked(prefix.len())?;
        (start.eq_ignore_ascii_case(prefix) && hash.starts_with('$')).then_some(hash)
    };
    let bare = || FOREIGN_HASH_PREFIXES.split(' ').find_map(strip).unwrap_or(text).to_owned();
    Ok(rewrite_django_hash(text).unwrap_or_else(bare))
}

/// Rewrites a hash of Django's, as in `pbkdf2_sha256$870000$salt$hash`, in PHC form. Encodes the salt in base64,
/// because the salt is plain text in Django's form.
fn rewrite_django_hash(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.strip_prefix("pbkdf2_")?.split('$').collect();
    let [digest, rounds, salt, hash] = parts[..] else { return None };
    let salt = Base64Unpadded::encode_string(salt.as_bytes());
    Some(format!("$pbkdf2-{digest}$i={rounds}${salt}${}", hash.trim_end_matches('=')))
}
