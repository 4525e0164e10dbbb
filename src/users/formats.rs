//! Hashes of passwords in the formats of other programs: what verifying one costs, and whether it is one of a password.

use argon2::{Argon2, Params, PasswordVerifier, Version, password_hash::phc::PasswordHash as Phc};
use base64ct::{Base64, Base64Unpadded, Encoding};
use hmac::{Hmac, KeyInit, Mac};
use md5::{Digest, Md5};
use pbkdf2::pbkdf2_hmac;
use serde_json::{Map, Value};
use sha1::Sha1;
use sha2::{Sha256, Sha384, Sha512};
use subtle::ConstantTimeEq;

/// Bounds on the cost of verifying one hash, which anybody who knows the address of its user can cause: some 1.5 s of a
/// core, and 128 MiB.
const MOST_MEMORY_KIB: u64 = 128 << 10;
const MOST_KIB_PASSES: u64 = 256 << 10;
const MOST_BCRYPT: u32 = 12;
const MOST_PBKDF2: u64 = 2_000_000;
const MOST_MD5: u64 = 1 << 20;

/// Bytes of the shortest hash that counts.
const SHORTEST: usize = 16;

/// A parsed hash.
pub(super) enum Format<'a> {
    /// Argon2id in PHC form.
    Argon2(Box<Phc>),
    /// Bcrypt's own form, and the logarithm of its rounds.
    Bcrypt(&'a str, u32),
    /// Bcrypt of a digest, as WordPress has it since 6.8.
    WordPress(&'a str, u32),
    /// MD5 in many rounds, as WordPress had it before, and phpBB.
    Phpass { rounds: u64, salt: &'a str, hash: &'a str },
    /// PBKDF2 in PHC form.
    Pbkdf2 { digest: Sha, rounds: u32, salt: Vec<u8>, hash: Vec<u8> },
    /// Scrypt in PHC form.
    Scrypt { params: scrypt::Params, salt: Vec<u8>, hash: Vec<u8> },
}

/// The digest of a PBKDF2.
#[derive(Clone, Copy)]
pub(super) enum Sha {
    One,
    Sha256,
    Sha512,
}

impl Sha {
    fn bytes(self) -> usize {
        match self {
            Sha::One => 20,
            Sha::Sha256 => 32,
            Sha::Sha512 => 64,
        }
    }
}

impl<'a> Format<'a> {
    /// Parses a hash. The error follows a field's name in a line; it quotes nothing.
    pub fn parse(text: &'a str) -> Result<Format<'a>, String> {
        let parts: Vec<&str> = text.split('$').collect();
        let (format, kind) = match parts[..] {
            ["", "argon2id", ..] => (argon2(text), "an Argon2id"),
            ["", "2a" | "2b" | "2y", cost, tail] => {
                (bcrypt(cost, tail).map(|cost| Format::Bcrypt(text, cost)), "a bcrypt")
            }
            ["", "2a" | "2b" | "2y", ..] => (None, "a bcrypt"),
            ["", "wp", "2y", cost, tail] => {
                (bcrypt(cost, tail).map(|cost| Format::WordPress(&text[3..], cost)), "a WordPress")
            }
            ["", "P" | "H", tail] => (phpass(tail), "a WordPress"),
            ["", kind, params, salt, hash] if kind.starts_with("pbkdf2") => {
                (pbkdf2(kind, params, salt, hash), "a PBKDF2")
            }
            ["", "scrypt", params, salt, hash] => (scrypt(params, salt, hash), "a scrypt"),
            _ => return Err("is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash".to_owned()),
        };
        format.ok_or_else(|| format!("is {kind} hash that is damaged"))
    }

    /// Returns an error, to follow a field's name, if verifying the hash costs more than it may.
    pub fn check_cost(&self) -> Result<(), String> {
        let memory = self.memory_kib();
        let passes = match self {
            Format::Argon2(hash) => Params::try_from(hash.as_ref()).map_or(1, |params| params.t_cost()),
            Format::Scrypt { params, .. } => params.p(),
            _ => 1,
        };
        let most = match self {
            Format::Argon2(_) | Format::Scrypt { .. } => {
                let is_within = memory <= MOST_MEMORY_KIB && memory * u64::from(passes) <= MOST_KIB_PASSES;
                (!is_within).then(|| format!("{MOST_MEMORY_KIB} KiB, or {MOST_KIB_PASSES} KiB times passes"))
            }
            Format::Bcrypt(_, cost) | Format::WordPress(_, cost) => {
                (*cost > MOST_BCRYPT).then(|| format!("bcrypt's {MOST_BCRYPT}"))
            }
            Format::Phpass { rounds, .. } => {
                (*rounds > MOST_MD5).then(|| format!("{MOST_MD5} rounds of MD5"))
            }
            Format::Pbkdf2 { .. } => {
                (self.pbkdf2_rounds() > MOST_PBKDF2).then(|| format!("{MOST_PBKDF2} rounds of PBKDF2"))
            }
        };
        most.map_or(Ok(()), |most| Err(format!("costs more to verify than {most}")))
    }

    /// Returns the memory that verifying takes, in KiB.
    pub fn memory_kib(&self) -> u64 {
        match self {
            Format::Argon2(hash) => {
                Params::try_from(hash.as_ref()).map_or(0, |params| params.m_cost().into())
            }
            Format::Scrypt { params, .. } => (u64::from(params.r()) << params.log_n()) / 8,
            _ => 0,
        }
    }

    /// Estimates the time that verifying takes, in microseconds of a core of 2023.
    pub fn micros(&self) -> u64 {
        match self {
            Format::Argon2(hash) => Params::try_from(hash.as_ref())
                .map_or(0, |params| u64::from(params.m_cost()) * u64::from(params.t_cost()) / 2),
            Format::Scrypt { params, .. } => self.memory_kib() * u64::from(params.p()) * 3,
            Format::Bcrypt(_, cost) | Format::WordPress(_, cost) => 60 << cost,
            Format::Phpass { rounds, .. } => rounds / 5,
            Format::Pbkdf2 { .. } => self.pbkdf2_rounds() * 2 / 3,
        }
    }

    /// Returns whether the hash is one of this password. Blocks for the work.
    pub fn matches(&self, password: &str) -> bool {
        match self {
            Format::Argon2(hash) => {
                Argon2::default().verify_password(password.as_bytes(), hash.as_ref()).is_ok()
            }
            // Bcrypt reads only the first 72 bytes of a password, both to hash it and to verify it.
            Format::Bcrypt(text, _) => bcrypt::verify(password, text).unwrap_or(false),
            Format::WordPress(text, _) => {
                let trimmed = password.trim_matches([' ', '\t', '\n', '\r', '\0', '\x0b']);
                let mut mac =
                    Hmac::<Sha384>::new_from_slice(b"wp-sha384").expect("a key of any length is one");
                mac.update(trimmed.as_bytes());
                let digest = Base64::encode_string(&mac.finalize().into_bytes());
                bcrypt::verify(digest, text).unwrap_or(false)
            }
            Format::Phpass { rounds, salt, hash } => {
                let mut found = Md5::digest([salt.as_bytes(), password.as_bytes()].concat());
                for _ in 0..*rounds {
                    found = Md5::new().chain_update(found).chain_update(password).finalize();
                }
                phpass_text(&found).as_bytes().ct_eq(hash.as_bytes()).into()
            }
            Format::Pbkdf2 { digest, rounds, salt, hash } => {
                let mut found = vec![0; hash.len()];
                let derive = match digest {
                    Sha::One => pbkdf2_hmac::<Sha1>,
                    Sha::Sha256 => pbkdf2_hmac::<Sha256>,
                    Sha::Sha512 => pbkdf2_hmac::<Sha512>,
                };
                derive(password.as_bytes(), salt, *rounds, &mut found);
                found.ct_eq(hash).into()
            }
            Format::Scrypt { params, salt, hash } => {
                let mut found = vec![0; hash.len()];
                let derived = scrypt::scrypt(password.as_bytes(), salt, params, &mut found);
                derived.is_ok() && bool::from(found.ct_eq(hash))
            }
        }
    }

    /// Returns whether what matches the hash may not be all of the password: bcrypt reads 72 bytes, the NUL at the end
    /// among them, and repeats what is shorter; WordPress takes white space off.
    pub fn may_be_partial(&self, password: &str) -> bool {
        const MOST_READ: usize = 71;
        match self {
            Format::Bcrypt(..) => password.len() > MOST_READ || password.contains('\0'),
            Format::WordPress(..) => password.trim() != password || password.contains('\0'),
            _ => false,
        }
    }

    /// Returns the rounds of a PBKDF2, for each block of its output.
    fn pbkdf2_rounds(&self) -> u64 {
        match self {
            Format::Pbkdf2 { digest, rounds, hash, .. } => {
                u64::from(*rounds) * hash.len().div_ceil(digest.bytes()) as u64
            }
            _ => 0,
        }
    }
}

fn argon2<'a>(text: &str) -> Option<Format<'a>> {
    let hash = Phc::new(text).ok()?;
    Params::try_from(&hash).ok()?;
    let is_whole = hash.version.is_some_and(|version| Version::try_from(version).is_ok())
        && hash.salt.is_some_and(|salt| salt.len() >= argon2::MIN_SALT_LEN)
        && hash.hash.is_some();
    is_whole.then(|| Format::Argon2(Box::new(hash)))
}

/// Returns bcrypt's cost: two digits, before 53 characters of its own base 64.
fn bcrypt(cost: &str, tail: &str) -> Option<u32> {
    let is_digit = |byte: u8| byte.is_ascii_alphanumeric() || b"./".contains(&byte);
    let is_whole = cost.len() == 2 && tail.len() == 53 && tail.bytes().all(is_digit);
    cost.parse().ok().filter(|cost| is_whole && *cost >= 4)
}

/// The digits of phpass, for 0 to 63.
const PHPASS: &[u8; 64] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// One digit of rounds, eight of salt, 22 of hash.
fn phpass(tail: &str) -> Option<Format<'_>> {
    let rounds = PHPASS.iter().position(|digit| Some(digit) == tail.as_bytes().first())?;
    let is_whole = tail.len() == 31 && tail.bytes().all(|byte| PHPASS.contains(&byte)) && rounds <= 30;
    is_whole.then(|| Format::Phpass { rounds: 1 << rounds, salt: &tail[1..9], hash: &tail[9..] })
}

/// Writes 16 bytes as phpass does: three bytes, the least significant first, are four digits.
fn phpass_text(bytes: &[u8]) -> String {
    let digits = bytes.chunks(3).flat_map(|three| {
        let value = three.iter().rev().fold(0_usize, |value, byte| value << 8 | usize::from(*byte));
        (0..=three.len()).map(move |at| char::from(PHPASS[value >> (6 * at) & 63]))
    });
    digits.collect()
}

/// `i=29000,l=32` or `29000`, as Python's passlib has it with dots for plus signs.
fn pbkdf2<'a>(kind: &str, params: &str, salt: &str, hash: &str) -> Option<Format<'a>> {
    let digest = match kind {
        "pbkdf2" | "pbkdf2-sha1" => Sha::One,
        "pbkdf2-sha256" => Sha::Sha256,
        "pbkdf2-sha512" => Sha::Sha512,
        _ => return None,
    };
    let rounds = params.split(',').find_map(|param| param.strip_prefix("i=")).unwrap_or(params);
    let rounds = rounds.parse().ok().filter(|rounds| *rounds > 0)?;
    let [salt, hash] = [salt, hash].map(|text| Base64Unpadded::decode_vec(&text.replace('.', "+")));
    let hash = hash.ok().filter(|hash| hash.len() >= SHORTEST)?;
    Some(Format::Pbkdf2 { digest, rounds, salt: salt.ok()?, hash })
}

/// `ln=16,r=8,p=1`.
fn scrypt<'a>(params: &str, salt: &str, hash: &str) -> Option<Format<'a>> {
    let param = |name| params.split(',').find_map(|param| param.strip_prefix(name)?.parse::<u32>().ok());
    let log_n = u8::try_from(param("ln=")?).ok().filter(|log_n| (1..=30).contains(log_n))?;
    let (r, p) = (param("r=").filter(|r| *r <= 1 << 10)?, param("p=").filter(|p| *p <= 1 << 10)?);
    let params = scrypt::Params::new(log_n, r, p).ok()?;
    let hash = Base64Unpadded::decode_vec(hash).ok().filter(|hash| hash.len() >= SHORTEST)?;
    Some(Format::Scrypt { params, salt: Base64Unpadded::decode_vec(salt).ok()?, hash })
}

/// Rewrites a hash as it is to be stored: without the prefixes of Django and Spring, and PBKDF2 of Django and Keycloak
/// in PHC form.
pub(super) fn canonical(value: Value) -> Result<String, String> {
    let text = match value {
        Value::String(text) => text,
        Value::Object(credential) => {
            return keycloak(&credential).ok_or_else(|| {
                "must be a string, or a credential of Keycloak with PBKDF2 or Argon2id".to_owned()
            });
        }
        _ => return Err("must be a string".to_owned()),
    };
    if let Some((digest, [rounds, salt, hash])) = django(&text) {
        let salt = Base64Unpadded::encode_string(salt.as_bytes());
        return Ok(format!("$pbkdf2-{digest}$i={rounds}${salt}${}", hash.trim_end_matches('=')));
    }
    let bare = ["{bcrypt}", "argon2", "bcrypt$"].iter().find_map(|prefix| text.strip_prefix(prefix));
    Ok(bare.filter(|bare| bare.starts_with('$')).map_or_else(|| text.clone(), str::to_owned))
}

/// `pbkdf2_sha256$600000$salt$hash`.
fn django(text: &str) -> Option<(&str, [&str; 3])> {
    let (digest, rest) = text.strip_prefix("pbkdf2_")?.split_once('$')?;
    let parts: Vec<&str> = rest.split('$').collect();
    Some((digest, parts.try_into().ok()?))
}

/// An element of `credentials` in an export of Keycloak.
fn keycloak(credential: &Map<String, Value>) -> Option<String> {
    let part = |name| serde_json::from_str::<Value>(credential.get(name)?.as_str()?).ok();
    let (secret, data) = (part("secretData")?, part("credentialData")?);
    let base64 = |name: &str| Some(secret.get(name)?.as_str()?.trim_end_matches('=').to_owned());
    let (salt, hash) = (base64("salt")?, base64("value")?);
    let rounds = data.get("hashIterations")?.as_u64()?;
    let more = |name: &str| data.pointer(&format!("/additionalParameters/{name}/0"))?.as_str();
    match data.get("algorithm")?.as_str()? {
        "argon2" if more("type")? == "id" => {
            let version = if more("version")? == "1.0" { 16 } else { 19 };
            let (memory, lanes) = (more("memory")?, more("parallelism")?);
            Some(format!("$argon2id$v={version}$m={memory},t={rounds},p={lanes}${salt}${hash}"))
        }
        algorithm if algorithm.starts_with("pbkdf2") => {
            Some(format!("${algorithm}$i={rounds}${salt}${hash}"))
        }
        _ => None,
    }
}
