//! Hashes of passwords in the formats of other programs: the cost to verify one, and whether it is one of a password.

use argon2::{
    Argon2, PasswordVerifier, Version,
    password_hash::phc::{Decimal, PasswordHash as Phc},
};
use base64ct::{Base64, Base64ShaCrypt, Base64Unpadded, Encoding};
use bcrypt::HashParts;
use hmac::{Hmac, KeyInit, Mac};
use md5::{Digest, Md5};
use pbkdf2::pbkdf2_hmac;
use scrypt::Scrypt;
use serde_json::{Map, Value};
use sha1::Sha1;
use sha2::{Sha256, Sha384, Sha512};
use subtle::ConstantTimeEq;

/// Computes a PBKDF2 with some digest.
type Derive = fn(&[u8], &[u8], u32, &mut [u8]);

/// A parsed hash.
pub(super) enum Format<'a> {
    /// Argon2id in PHC form.
    Argon2(Box<Phc>, argon2::Params),
    /// Scrypt in PHC form.
    Scrypt(Box<Phc>, scrypt::Params),
    /// PBKDF2 in PHC form.
    Pbkdf2 { hash: Box<Phc>, derive: Derive, rounds: Decimal, blocks: usize },
    /// Bcrypt in its own form, of a password, or of the digest of one, as WordPress has it since 6.8.
    Bcrypt { hash: &'a str, cost: u32, of_digest: bool },
    /// MD5 in many rounds, as WordPress had it before, and phpBB.
    Phpass { rounds: u64, salt: &'a str, hash: Vec<u8> },
}

impl<'a> Format<'a> {
    /// Parses a hash. The error follows a field's name in a line; it quotes nothing.
    pub fn parse(text: &'a str) -> Result<Format<'a>, String> {
        let (kind, rest) = text.strip_prefix('$').and_then(|text| text.split_once('$')).unwrap_or_default();
        let (format, name) = match kind {
            "argon2id" => (argon2(text), "an Argon2id"),
            "scrypt" => (scrypt(text), "a scrypt"),
            "2a" | "2b" | "2y" => (bcrypt(text, false), "a bcrypt"),
            "wp" => (bcrypt(&text["$wp".len()..], true), "a WordPress"),
            "P" | "H" => (phpass(rest), "a WordPress"),
            kind if kind.starts_with("pbkdf2") => (pbkdf2(kind, text), "a PBKDF2"),
            _ => return Err("is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash".to_owned()),
        };
        format.ok_or_else(|| format!("is {name} hash that is damaged"))
    }

    /// Returns an error, to follow a field's name, if verifying the hash costs more than some 1.5 s of a core, or more
    /// than 128 MiB: anybody who knows the address of the user can cause it.
    pub fn check_cost(&self) -> Result<(), String> {
        let (memory, passes) = self.memory();
        let most = match self {
            _ if memory > 128 << 10 || memory.saturating_mul(passes) > 256 << 10 => {
                "131072 KiB, or 262144 KiB times passes"
            }
            Format::Bcrypt { cost: 13.., .. } => "bcrypt's 12",
            Format::Phpass { rounds, .. } if *rounds > 1 << 20 => "1048576 rounds of MD5",
            Format::Pbkdf2 { rounds, blocks, .. } if *rounds as usize * blocks > 2_000_000 => {
                "2000000 rounds of PBKDF2"
            }
            _ => return Ok(()),
        };
        Err(format!("costs more to verify than {most}"))
    }

    /// Returns the memory that verifying takes, in KiB, and how often it is filled.
    pub fn memory(&self) -> (u64, u64) {
        match self {
            Format::Argon2(_, params) => (params.m_cost().into(), params.t_cost().into()),
            Format::Scrypt(_, params) => (u64::from(params.r()) * params.n() / 8, params.p().into()),
            _ => (0, 0),
        }
    }

    /// Returns whether the hash is one of this password. Blocks for the work.
    pub fn matches(&self, password: &str) -> bool {
        match self {
            Format::Argon2(hash, _) => {
                Argon2::default().verify_password(password.as_bytes(), hash.as_ref()).is_ok()
            }
            Format::Scrypt(hash, _) => {
                Scrypt::new().verify_password(password.as_bytes(), hash.as_ref()).is_ok()
            }
            Format::Pbkdf2 { hash, derive, rounds, .. } => {
                let (Some(salt), Some(hash)) = (hash.salt, hash.hash) else { return false };
                let mut found = vec![0; hash.len()];
                derive(password.as_bytes(), &salt, *rounds, &mut found);
                found.ct_eq(hash.as_bytes()).into()
            }
            // Bcrypt reads only the first 72 bytes of a password, both to hash it and to verify it.
            Format::Bcrypt { hash, of_digest: false, .. } => bcrypt::verify(password, hash).unwrap_or(false),
            Format::Bcrypt { hash, .. } => {
                let trimmed = password.trim_matches([' ', '\t', '\n', '\r', '\0', '\x0b']);
                let mut mac =
                    Hmac::<Sha384>::new_from_slice(b"wp-sha384").expect("a key of any length is one");
                mac.update(trimmed.as_bytes());
                let digest = Base64::encode_string(&mac.finalize().into_bytes());
                bcrypt::verify(digest, hash).unwrap_or(false)
            }
            Format::Phpass { rounds, salt, hash } => {
                let mut found = Md5::digest([salt.as_bytes(), password.as_bytes()].concat());
                for _ in 0..*rounds {
                    found = Md5::new().chain_update(found).chain_update(password).finalize();
                }
                found.ct_eq(hash).into()
            }
        }
    }

    /// Returns whether what matches the hash may not be all of the password: bcrypt reads 72 bytes, the NUL at the end
    /// among them, and repeats what is shorter; WordPress takes white space off.
    pub fn may_be_partial(&self, password: &str) -> bool {
        const MOST_READ: usize = 71;
        match self {
            Format::Bcrypt { of_digest: false, .. } => password.len() > MOST_READ || password.contains('\0'),
            Format::Bcrypt { .. } => password.trim() != password || password.contains('\0'),
            _ => false,
        }
    }
}

/// Parses a hash in PHC form that has a salt and an output.
fn phc(text: &str) -> Option<Box<Phc>> {
    let hash = Phc::new(text).ok()?;
    (hash.salt.is_some() && hash.hash.is_some()).then(|| Box::new(hash))
}

fn argon2<'a>(text: &str) -> Option<Format<'a>> {
    let hash = phc(text)?;
    Version::try_from(hash.version?).ok()?;
    let params = argon2::Params::try_from(&*hash).ok()?;
    Some(Format::Argon2(hash, params))
}

/// `ln=16,r=8,p=1`.
fn scrypt<'a>(text: &str) -> Option<Format<'a>> {
    let hash = phc(text)?;
    // The crate multiplies them without a check.
    let is_small = |name| hash.params.get_decimal(name).is_some_and(|number| number <= 1 << 10);
    let params = (is_small("r") && is_small("p")).then(|| scrypt::Params::try_from(&*hash).ok())??;
    Some(Format::Scrypt(hash, params))
}

/// `i=29000`.
fn pbkdf2<'a>(kind: &str, text: &str) -> Option<Format<'a>> {
    let (derive, digest_bytes): (Derive, _) = match kind {
        "pbkdf2" | "pbkdf2-sha1" => (pbkdf2_hmac::<Sha1>, 20),
        "pbkdf2-sha256" => (pbkdf2_hmac::<Sha256>, 32),
        "pbkdf2-sha512" => (pbkdf2_hmac::<Sha512>, 64),
        _ => return None,
    };
    let hash = phc(text)?;
    let rounds = hash.params.get_decimal("i").filter(|rounds| *rounds > 0)?;
    // Each block of the output takes all rounds.
    let blocks = hash.hash?.len().div_ceil(digest_bytes);
    Some(Format::Pbkdf2 { hash, derive, rounds, blocks })
}

fn bcrypt(hash: &str, of_digest: bool) -> Option<Format<'_>> {
    let cost = hash.parse::<HashParts>().ok()?.get_cost();
    (cost >= 4).then_some(Format::Bcrypt { hash, cost, of_digest })
}

/// One digit of rounds, eight of salt, 22 of hash.
fn phpass(text: &str) -> Option<Format<'_>> {
    const DIGITS: &[u8] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let rounds = DIGITS.iter().position(|digit| Some(digit) == text.as_bytes().first())?;
    let (salt, hash) = (text.get(1..9)?, Base64ShaCrypt::decode_vec(text.get(9..)?).ok()?);
    (rounds <= 30 && hash.len() == 16).then(|| Format::Phpass { rounds: 1 << rounds, salt, hash })
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
    // `pbkdf2_sha256$600000$salt$hash`.
    if let [kind, rounds, salt, hash] = text.split('$').collect::<Vec<_>>()[..]
        && let Some(digest) = kind.strip_prefix("pbkdf2_")
    {
        let salt = Base64Unpadded::encode_string(salt.as_bytes());
        return Ok(format!("$pbkdf2-{digest}$i={rounds}${salt}${}", hash.trim_end_matches('=')));
    }
    let bare = ["{bcrypt}", "argon2", "bcrypt$"].iter().find_map(|prefix| text.strip_prefix(prefix));
    Ok(bare.filter(|bare| bare.starts_with('$')).unwrap_or(&text).to_owned())
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
