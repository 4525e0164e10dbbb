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

/// The most that verifying one form of a password may take: anybody who knows the address of the user can cause it. A
/// password has two forms if it is not in NFC, which makes 1.4 s of a core.
const MAX_COST: Cost = Cost { memory: 129 << 10, nanoseconds: 700_000_000 };

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
/// A round of PBKDF2.
const PBKDF2_SHA1: u64 = 200;
const PBKDF2_SHA256: u64 = 380;
const PBKDF2_SHA512: u64 = 500;
/// A round of bcrypt.
const BCRYPT: u64 = 60_000;
/// A round of MD5 over [`MAX_OTHER_PASSWORD`].
const PHPASS: u64 = 7_500;

/// The problem of a hash that costs more than [`MAX_COST`].
const EXPENSIVE: &str = "costs more to verify than 129 MiB of memory, or 1.5 s of a core for any password";

/// The problem of a hash in a format that is not verified.
const UNKNOWN: &str = "is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash";

/// The problem of a hash whose parameters another program has named, or counted, in its own way.
const OTHER_FORM: &str =
    "is of a form that is not read: its parameters have other names or meanings than in PHC strings";

/// The problem of a hash in PHC form that the crates do not verify, although it is whole.
const OTHER_LENGTHS: &str =
    "has a salt of fewer than 8 or more than 48 bytes, or an output of fewer than 10 or more than 64";

/// Names that may precede a hash in braces, if the hash names its format, too.
const SCHEMES: [&str; 6] = ["bcrypt", "argon2", "argon2i", "argon2id", "crypt", "blf-crypt"];

/// Returns whether a text has the form of hashes: what may be a digest behind a name in braces, or behind two `$`.
pub fn is_hash(text: &str) -> bool {
    /// Characters of the shortest digest, which crypt(3) makes by DES.
    const MIN_DIGEST: usize = 13;
    let text = text.trim();
    let is_of_digest = |sign: char| sign.is_ascii_alphanumeric() || "./+=_-".contains(sign);
    let digest = text.len() - text.trim_end_matches(is_of_digest).len();
    digest >= MIN_DIGEST && (braced(text).is_some() || text.matches('$').count() > 1)
}

/// The memory and the time to verify one form of a password.
#[derive(Clone, Copy)]
struct Cost {
    /// KiB that are allocated.
    memory: u64,
    nanoseconds: u64,
}

/// A parsed hash.
pub(super) struct HashFormat<'a> {
    /// Returns whether the hash is one of this password. Blocks for the work.
    pub matches: Box<dyn Fn(&str) -> bool + 'a>,
    cost: Cost,
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
        let problem = || match text {
            _ if has_other_parameters(kind, text) => OTHER_FORM,
            _ if has_other_lengths(text) => OTHER_LENGTHS,
            _ => "is a damaged hash",
        };
        let format = format.ok_or_else(problem)?;
        let Cost { memory, nanoseconds } = format.cost;
        let is_cheap = memory <= MAX_COST.memory && nanoseconds <= MAX_COST.nanoseconds;
        is_cheap.then_some(format).ok_or(EXPENSIVE)
    }

    /// Returns the bytes of memory that verifying takes.
    pub fn memory(&self) -> usize {
        (self.cost.memory as usize) << 10
    }

    /// Returns whether a password may match, and is short enough for [`MAX_COST`].
    pub fn reads(&self, password: &str) -> bool {
        self.argon2.is_some() || password.len() <= MAX_OTHER_PASSWORD
    }

    /// A hash of a function other than Argon2id that reads all of a password, and takes `nanoseconds` for each of its
    /// `rounds`.
    fn new(rounds: u64, nanoseconds: u64, matches: impl Fn(&str) -> bool + 'a) -> HashFormat<'a> {
        let cost = Cost { memory: 0, nanoseconds: rounds.saturating_mul(nanoseconds) };
        HashFormat { matches: Box::new(matches), cost, argon2: None, reads_partly: |_| false }
    }

    fn with_memory(self, memory: u64) -> HashFormat<'a> {
        HashFormat { cost: Cost { memory, ..self.cost }, ..self }
    }
}

/// Parses a hash in PHC form, with its salt and its output.
fn phc(text: &str) -> Option<(Phc, Salt, Output)> {
    let hash = Phc::new(text).ok()?;
    Some((hash.clone(), hash.salt?, hash.hash?))
}

/// Returns whether a hash in PHC form lacks a parameter of its kind, or has a logarithm that is too large to be one.
fn has_other_parameters(kind: &str, text: &str) -> bool {
    let names: &[&str] = match kind {
        "argon2id" => &["m", "t", "p"],
        "scrypt" => &["ln", "r", "p"],
        _ if kind.starts_with("pbkdf2") => &["i"],
        _ => &[],
    };
    Phc::new(text).is_ok_and(|hash| {
        let number = |name: &str| hash.params.get_decimal(name);
        names.iter().any(|name| number(name).is_none()) || number("ln").is_some_and(|log2| log2 >= u64::BITS)
    })
}

/// Returns whether the salt and the output of a hash in PHC form are whole, but not of the lengths that [`phc`] reads.
fn has_other_lengths(text: &str) -> bool {
    let mut lengths =
        text.rsplit('$').map(|part| Base64Unpadded::decode_vec(part).ok().map(|bytes| bytes.len()));
    let (output, salt) = (lengths.next().flatten(), lengths.next().flatten());
    output.zip(salt).is_some_and(|(output, salt)| !(10..=64).contains(&output) || !(8..=48).contains(&salt))
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
    Some(HashFormat { argon2: Some(filled), ..format.with_memory(memory) })
}

/// Parses a hash with parameters as in `ln=16,r=8,p=1`.
fn scrypt<'a>(text: &str) -> Option<HashFormat<'a>> {
    let (hash, ..) = phc(text)?;
    // The crate multiplies both without a check for overflow.
    let is_small = |name| hash.params.get_decimal(name).is_some_and(|number| number <= 1 << 10);
    let params = (is_small("r") && is_small("p")).then(|| scrypt::Params::try_from(&hash).ok())??;
    let (n, r, p) = (params.n(), u64::from(params.r()), u64::from(params.p()));
    let nanoseconds = n.saturating_mul(SCRYPT).saturating_add(SCRYPT_BLOCKS);
    let format = HashFormat::new((r * p).div_ceil(8), nanoseconds, move |password| {
        Scrypt::new().verify_password(password.as_bytes(), &hash).is_ok()
    });
    // The table, the blocks of all passes, and one block.
    Some(format.with_memory(n.saturating_add(p + 1).saturating_mul(r).div_ceil(8)))
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

/// Rewrites a hash as it is to be stored: without the prefixes of other programs, and in PHC form if it is one of
/// Keycloak's credentials or of a library of Python.
pub(super) fn canonical(value: Value) -> Result<String, &'static str> {
    let Value::String(text) = value else {
        return keycloak(&value)
            .ok_or("must be a string, or a credential of Keycloak with secretData and credentialData");
    };
    let text = text.trim();
    let hash = braced(text).filter(|(name, _)| is_scheme(name)).map_or(text, |(_, hash)| hash);
    let bare = ["argon2", "bcrypt$"].iter().find_map(|prefix| hash.strip_prefix(prefix));
    let bare = bare.filter(|bare| bare.starts_with('$')).unwrap_or(hash);
    Ok(of_python(hash).unwrap_or_else(|| bare.to_owned()))
}

/// Splits a text into a name in braces, with which it begins, and the rest.
fn braced(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix('{')?.split_once('}')
}

/// Returns whether a name in braces is one of [`SCHEMES`]. Spring writes `{argon2@SpringSecurity_v5_8}`.
fn is_scheme(name: &str) -> bool {
    let name = name.split('@').next().unwrap_or_default();
    SCHEMES.iter().any(|scheme| name.eq_ignore_ascii_case(scheme))
}

/// Rewrites a hash of Django, Werkzeug or passlib.
fn of_python(text: &str) -> Option<String> {
    let (method, rest) = text.split_once('$')?;
    let parts: Vec<&str> = method.split(':').chain(rest.split('$')).collect();
    let salted = |head: String, salt: &str, hash: &str| {
        let hash = if method.contains(':') { of_hex(hash) } else { hash.trim_end_matches('=').to_owned() };
        format!("{head}${}${hash}", Base64Unpadded::encode_string(salt.as_bytes()))
    };
    let scrypt = |n: &str, r: &str, p: &str| {
        // If the number is no power of two, the hash gets a logarithm that scrypt refuses.
        let log2 = n.parse().ok().filter(|n: &u64| n.is_power_of_two()).map_or(u64::BITS, u64::ilog2);
        format!("$scrypt$ln={log2},r={r},p={p}")
    };
    Some(match parts[..] {
        [kind, rounds, salt, hash] if let Some(digest) = kind.strip_prefix("pbkdf2_") => {
            salted(format!("$pbkdf2-{digest}$i={rounds}"), salt, hash)
        }
        ["pbkdf2", digest, rounds, salt, hash] => salted(format!("$pbkdf2-{digest}$i={rounds}"), salt, hash),
        ["scrypt", n, salt, r, p, hash] if method == "scrypt" => salted(scrypt(n, r, p), salt, hash),
        ["scrypt", n, r, p, salt, hash] => salted(scrypt(n, r, p), salt, hash),
        // passlib has a dot where base64 has a plus.
        ["", kind, rounds, salt, hash] if kind.starts_with("pbkdf2") && !rounds.contains('=') => {
            format!("${kind}$i={rounds}${salt}${hash}").replace('.', "+")
        }
        _ => return None,
    })
}

/// Returns the base64 of bytes in hexadecimal digits, or `?`, which is no base64, for another text.
fn of_hex(text: &str) -> String {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    bytes.map_or_else(|| "?".to_owned(), |bytes| Base64Unpadded::encode_string(&bytes))
}

/// An element of `credentials` in an export of Keycloak.
fn keycloak(credential: &Value) -> Option<String> {
    let part = |name| serde_json::from_str::<Value>(credential.get(name)?.as_str()?).ok();
    let (secret, data) = (part("secretData")?, part("credentialData")?);
    let base64 = |name: &str| Some(secret.get(name)?.as_str()?.trim_end_matches('='));
    let (salt, hash, rounds) = (base64("salt")?, base64("value")?, data.get("hashIterations")?);
    let more = |name: &str| data.pointer(&format!("/additionalParameters/{name}/0"))?.as_str();
    Some(match data.get("algorithm")?.as_str()? {
        "argon2" => {
            let version = if more("version")? == "1.0" { 16 } else { 19 };
            let (kind, memory, lanes) = (more("type")?, more("memory")?, more("parallelism")?);
            format!("$argon2{kind}$v={version}$m={memory},t={rounds},p={lanes}${salt}${hash}")
        }
        algorithm => format!("${algorithm}$i={rounds}${salt}${hash}"),
    })
}
