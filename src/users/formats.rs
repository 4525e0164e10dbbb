//! Hashes of passwords in the formats of other programs: what it costs to verify one, and whether it is one of a password.

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

/// KiB of memory, and nanoseconds of a core, that verifying one form of a password may take at most: anybody who knows the
/// address of the user can cause it. A password has two forms if it is not in NFC, which makes 1.4 s of a core.
const MAX_MEMORY: u64 = 129 << 10;
const MAX_NANOSECONDS: u64 = 700_000_000;

/// Bytes of the longest password that a hash matches, unless it is one of Argon2id: phpass hashes all of them in each
/// round.
const MAX_OTHER_PASSWORD: usize = 4096;

// The nanoseconds of a core that makes a hash of ours in 20 ms, and has no instructions for SHA.
/// Argon2id fills 1 KiB once, with any number of lanes.
const ARGON2: u64 = 2_000;
/// scrypt fills 1 KiB and reads it again.
const SCRYPT: u64 = 3_600;
/// scrypt derives and hashes 1 KiB of its blocks.
const SCRYPT_BLOCKS: u64 = 26_000;
/// The cost of a round of PBKDF2.
const PBKDF2_SHA1: u64 = 200;
const PBKDF2_SHA256: u64 = 380;
const PBKDF2_SHA512: u64 = 500;
/// The cost of a round of bcrypt.
const BCRYPT: u64 = 60_000;
/// The cost of a round of MD5 over a password of [`MAX_OTHER_PASSWORD`] bytes.
const PHPASS: u64 = 7_500;

/// The problem of a hash that costs more than [`MAX_MEMORY`] or [`MAX_NANOSECONDS`].
const EXPENSIVE: &str = "costs more to verify than 129 MiB of memory, or 1.5 s of a core for any password";

/// The problem of a hash in a format that is not verified.
const UNKNOWN: &str = "is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash";

/// The problem of a hash that is not whole, or that the crates do not verify.
const UNREAD: &str = "is a damaged hash, or of a form that is not read: with parameters of other names or meanings than in \
                      PHC strings, a salt of fewer than 8 or more than 48 bytes, or an output of fewer than 10 or more \
                      than 64";

/// Texts that other programs write, in either case, before a hash that names its format, too.
const PREFIXES: &str =
    "{bcrypt} {argon2} {argon2@SpringSecurity_v5_8} {argon2i} {argon2id} {crypt} {blf-crypt} argon2 bcrypt$";

/// Returns whether a text has the form of hashes: what may be a digest behind a name in braces, or behind two `$`.
pub fn is_hash(text: &str) -> bool {
    /// Characters of the shortest digest, which crypt(3) makes by DES.
    const MIN_DIGEST: usize = 13;
    let text = text.trim();
    let is_of_digest = |sign: char| sign.is_ascii_alphanumeric() || "./+=_-".contains(sign);
    let digest = text.len() - text.trim_end_matches(is_of_digest).len();
    let is_braced = text.starts_with('{') && text.contains('}');
    digest >= MIN_DIGEST && (is_braced || text.matches('$').count() > 1)
}

/// A parsed hash.
pub(super) struct HashFormat<'a> {
    /// Returns whether the hash is one of this password. Blocks for the work.
    pub matches: Box<dyn Fn(&str) -> bool + 'a>,
    /// KiB of memory that verifying the hash allocates.
    memory: u64,
    nanoseconds: u64,
    /// The memory times how often it is filled, if the hash is one of Argon2id.
    pub argon2: Option<u64>,
    /// Returns whether the hash, if it matches this password, may be one of a part of it.
    pub reads_partly: fn(&str) -> bool,
}

impl<'a> HashFormat<'a> {
    /// Parses a hash, and refuses one that costs too much. The error follows a field's name in a line; it quotes nothing.
    pub fn parse(text: &'a str) -> Result<HashFormat<'a>, &'static str> {
        let (kind, rest) = text.strip_prefix('$').and_then(|text| text.split_once('$')).unwrap_or_default();
        let format = match kind {
            "argon2id" => argon2(text),
            "scrypt" => scrypt(text),
            "pbkdf2" | "pbkdf2-sha1" => pbkdf2::<Sha1>(text, PBKDF2_SHA1),
            "pbkdf2-sha256" => pbkdf2::<Sha256>(text, PBKDF2_SHA256),
            "pbkdf2-sha512" => pbkdf2::<Sha512>(text, PBKDF2_SHA512),
            "2a" | "2b" | "2y" => bcrypt(text),
            "wp" => bcrypt(&text["$wp".len()..]).map(of_wordpress),
            "P" | "H" => phpass(rest),
            _ => return Err(UNKNOWN),
        };
        let format = format.ok_or(UNREAD)?;
        let is_cheap = format.memory <= MAX_MEMORY && format.nanoseconds <= MAX_NANOSECONDS;
        is_cheap.then_some(format).ok_or(EXPENSIVE)
    }

    /// Returns the bytes of memory that verifying takes.
    pub fn memory(&self) -> usize {
        (self.memory as usize) << 10
    }

    /// Returns whether a password may match, and is short enough for [`MAX_NANOSECONDS`].
    pub fn reads(&self, password: &str) -> bool {
        self.argon2.is_some() || password.len() <= MAX_OTHER_PASSWORD
    }

    /// A hash of a function other than Argon2id that reads all of a password, and takes `nanoseconds` for each of its
    /// `rounds`.
    fn new(rounds: u64, nanoseconds: u64, matches: impl Fn(&str) -> bool + 'a) -> HashFormat<'a> {
        let nanoseconds = rounds.saturating_mul(nanoseconds);
        HashFormat {
            matches: Box::new(matches),
            memory: 0,
            nanoseconds,
            argon2: None,
            reads_partly: |_| false,
        }
    }
}

/// Parses a hash in PHC form, with its salt and its output.
fn phc(text: &str) -> Option<(Phc, Salt, Output)> {
    let hash = Phc::new(text).ok()?;
    Some((hash.clone(), hash.salt?, hash.hash?))
}

fn argon2<'a>(text: &str) -> Option<HashFormat<'a>> {
    let (hash, ..) = phc(text)?;
    Version::try_from(hash.version?).ok()?;
    let params = argon2::Params::try_from(&hash).ok()?;
    let memory = u64::from(params.m_cost());
    let filled = memory * u64::from(params.t_cost());
    let format = HashFormat::new(filled, ARGON2, move |password| {
        Argon2::default().verify_password(password.as_bytes(), &hash).is_ok()
    });
    Some(HashFormat { argon2: Some(filled), memory, ..format })
}

/// Parses a hash with parameters as in `ln=16,r=8,p=1`.
fn scrypt<'a>(text: &str) -> Option<HashFormat<'a>> {
    let (hash, ..) = phc(text)?;
    // Limits `r` and `p`: the crate multiplies both without a check for overflow.
    let is_small = |name| hash.params.get_decimal(name).is_some_and(|number| number <= 1 << 10);
    let params = (is_small("r") && is_small("p")).then(|| scrypt::Params::try_from(&hash).ok())??;
    let (n, r, p) = (params.n(), u64::from(params.r()), u64::from(params.p()));
    let nanoseconds = n.saturating_mul(SCRYPT).saturating_add(SCRYPT_BLOCKS);
    let format = HashFormat::new((r * p).div_ceil(8), nanoseconds, move |password| {
        Scrypt::new().verify_password(password.as_bytes(), &hash).is_ok()
    });
    // The table, the blocks of all passes, and one block.
    Some(HashFormat { memory: n.saturating_add(p + 1).saturating_mul(r).div_ceil(8), ..format })
}

/// Parses a hash with parameters as in `i=29000`. Each block of the output, as long as a digest, takes all rounds.
fn pbkdf2<'a, D: EagerHash>(text: &str, nanoseconds: u64) -> Option<HashFormat<'a>> {
    let (hash, salt, output) = phc(text)?;
    let rounds = hash.params.get_decimal("i").filter(|rounds| *rounds > 0)?;
    let blocks = output.len().div_ceil(<D as Digest>::output_size()) as u64;
    Some(HashFormat::new(blocks * u64::from(rounds), nanoseconds, move |password| {
        let mut found = vec![0; output.len()];
        pbkdf2_hmac::<D>(password.as_bytes(), &salt, rounds, &mut found);
        found.ct_eq(output.as_bytes()).into()
    }))
}

/// Bcrypt reads 72 bytes of a password, the NUL at its end among them, and repeats what is shorter.
fn bcrypt(text: &str) -> Option<HashFormat<'_>> {
    const MAX_READ_BYTES: usize = 71;
    let cost = text.parse::<HashParts>().ok().map(|parts| parts.get_cost()).filter(|cost| *cost >= 4)?;
    let rounds = 1_u64.checked_shl(cost).unwrap_or(u64::MAX);
    let format =
        HashFormat::new(rounds, BCRYPT, move |password| bcrypt::verify(password, text).unwrap_or(false));
    let reads_partly = |password: &str| password.len() > MAX_READ_BYTES || password.contains('\0');
    Some(HashFormat { reads_partly, ..format })
}

/// Bcrypt of a digest of the password without the white space at its ends, as WordPress has it since 6.8.
fn of_wordpress(bcrypt: HashFormat<'_>) -> HashFormat<'_> {
    let matches = move |password: &str| {
        let mut mac = Hmac::<Sha384>::new_from_slice(b"wp-sha384").expect("a key of any length is one");
        mac.update(password.trim_matches([' ', '\t', '\n', '\r', '\0', '\x0b']).as_bytes());
        (bcrypt.matches)(&Base64::encode_string(&mac.finalize().into_bytes()))
    };
    let reads_partly = |password: &str| password.trim() != password || password.contains('\0');
    HashFormat { matches: Box::new(matches), reads_partly, ..bcrypt }
}

/// MD5 in many rounds, as WordPress had it before, and phpBB: one digit of rounds, eight of salt, 22 of hash.
fn phpass(text: &str) -> Option<HashFormat<'_>> {
    const DIGITS: &[u8] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let log2 = DIGITS[..=30].iter().position(|digit| Some(digit) == text.as_bytes().first())?;
    let rounds = 1_u64 << log2;
    let (salt, hash) = (text.get(1..9)?, Base64ShaCrypt::decode_vec(text.get(9..)?).ok()?);
    let hash: [u8; 16] = hash.try_into().ok()?;
    Some(HashFormat::new(rounds, PHPASS, move |password| {
        let mut found = Md5::digest(format!("{salt}{password}"));
        for _ in 0..rounds {
            found = Md5::new().chain_update(found).chain_update(password).finalize();
        }
        found.ct_eq(&hash).into()
    }))
}

/// Rewrites a hash as it is to be stored: without the prefixes of other programs, and in PHC form if it is Django's.
pub(super) fn canonical(value: &Value) -> Result<String, &'static str> {
    let text = value.as_str().ok_or("must be a string")?.trim();
    let without = |prefix: &str| {
        let (start, hash) = text.split_at_checked(prefix.len())?;
        (start.eq_ignore_ascii_case(prefix) && hash.starts_with('$')).then_some(hash)
    };
    let bare = || PREFIXES.split(' ').find_map(without).unwrap_or(text).to_owned();
    Ok(of_django(text).unwrap_or_else(bare))
}

/// Rewrites a hash as in `pbkdf2_sha256$870000$salt$hash`, whose salt is no base64.
fn of_django(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.strip_prefix("pbkdf2_")?.split('$').collect();
    let [digest, rounds, salt, hash] = parts[..] else { return None };
    let salt = Base64Unpadded::encode_string(salt.as_bytes());
    Some(format!("$pbkdf2-{digest}$i={rounds}${salt}${}", hash.trim_end_matches('=')))
}
