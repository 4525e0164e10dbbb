//! Conversion of the text of a variable to the value of a field, and the texts that a variable may have.

use super::{AllowedOrigins, ConfigError, Database, Schema, Secret, TrustedProxies, Ui, Validation};
use std::{path::PathBuf, time::Duration};

/// Texts that a variable may have.
#[derive(Debug)]
pub(super) enum Bounds {
    /// Any text that the type of the field can hold.
    Any,
    /// A whole number, both ends included.
    Whole(u64, u64),
    /// A number of seconds, both ends included.
    Seconds(f64, f64),
    /// One of these words.
    Words(&'static [&'static str]),
    /// On for exactly this text, off for any other.
    Exactly(&'static str),
    /// Tokens of printable ASCII, separated by white space; at least one.
    Token,
}

impl Bounds {
    /// Checks a text that is not empty. Returns it as a field reads it. Numbers have ASCII digits alone: no sign, no exponent,
    /// no space.
    pub fn read(&self, text: String) -> Result<String, String> {
        let has_only = |more: &str| text.chars().all(|c| c.is_ascii_digit() || more.contains(c));
        let (fits, wanted) = match *self {
            Bounds::Any => return Ok(text),
            Bounds::Exactly(on) => return Ok((text == on).to_string()),
            Bounds::Whole(min, max) => {
                let fits = has_only("") && text.parse().is_ok_and(|number| (min..=max).contains(&number));
                (fits, format!("a whole number from {min} to {max}"))
            }
            Bounds::Seconds(min, max) => {
                let fits = has_only(".") && text.parse().is_ok_and(|number| (min..=max).contains(&number));
                (fits, format!("a number of seconds from {min} to {max}"))
            }
            Bounds::Words(words) => (words.contains(&&*text), format!("one of {}", words.join(", "))),
            Bounds::Token => {
                let is_token = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
                let fits = !text.trim().is_empty() && text.bytes().all(is_token);
                return if fits { Ok(text) } else { Err("must be printable ASCII".to_owned()) };
            }
        };
        if fits { Ok(text) } else { Err(format!("must be {wanted}, not {text:?}")) }
    }
}

pub(super) fn problem(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}

/// Parses the entries of a list, which commas or spaces separate.
pub(super) fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    text.split([',', ' ']).filter(|entry| !entry.is_empty()).map(parse).collect()
}

/// A type of a field that is read from a variable and shown as one. Errors are printed behind the variable's name, and
/// never have a secret's text.
pub(super) trait Value {
    /// Reads the text of a variable, which is not empty and within its bounds.
    fn set(&mut self, text: &str) -> Result<(), String>;

    /// Returns the value as a variable has it; empty for none. `None` for a secret, which is never shown.
    fn text(&self) -> Option<String> {
        None
    }
}

/// Types that are parsed from their text.
macro_rules! parsed {
    ($($type:ty),+) => {$(
        impl Value for $type {
            fn set(&mut self, text: &str) -> Result<(), String> {
                *self = text.parse().map_err(|problem| format!("{problem}"))?;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )+};
}

parsed!(u16, u32, usize, bool, String, Schema, Ui, Validation, TrustedProxies, AllowedOrigins);

impl Value for Duration {
    fn set(&mut self, text: &str) -> Result<(), String> {
        let seconds = text.parse().unwrap_or(f64::NAN);
        *self = Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.as_secs_f64().to_string())
    }
}

impl Value for Option<PathBuf> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        *self = Some(text.into());
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.as_ref().map_or_else(String::new, |path| path.display().to_string()))
    }
}

/// Names of hosts, separated by commas or spaces; `*` stands for any.
impl Value for Vec<String> {
    fn set(&mut self, text: &str) -> Result<(), String> {
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        *self = list(text, |name| match name == "*" || name.bytes().all(is_name) {
            true => Ok(name.to_owned()),
            false => Err(format!("{name:?} is not a host name")),
        })?;
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.join(","))
    }
}

/// Types that hold a secret.
macro_rules! secret {
    ($($type:ty, $made:expr);+) => {$(
        impl Value for $type {
            fn set(&mut self, text: &str) -> Result<(), String> {
                *self = $made(text.into());
                Ok(())
            }
        }
    )+};
}

secret!(Secret, Secret; Option<Secret>, Some; Database, Database::Url);
