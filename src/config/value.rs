//! Conversion of the text of a variable to the value of a field, and the texts that a variable may have.

use super::{AllowedOrigins, ConfigError, Database, Schema, Secret, TrustedProxies, Ui, Validation};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

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
                // Kubernetes sets DB_PORT=tcp://10.0.0.1:5432 beside a service that is named `db`.
                let hint = if text.starts_with("tcp://") {
                    " (with enableServiceLinks: false, Kubernetes sets none)"
                } else {
                    ""
                };
                (fits, format!("a whole number from {min} to {max}{hint}"))
            }
            Bounds::Seconds(min, max) => {
                let fits = has_only(".") && text.parse().is_ok_and(|number| (min..=max).contains(&number));
                (fits, format!("a number of seconds from {min} to {max}"))
            }
            Bounds::Words(words) => (words.contains(&&*text), format!("one of {}", words.join(", "))),
            Bounds::Token => {
                let is_token = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
                let quoted = ['"', '\'']
                    .iter()
                    .find_map(|quote| text.trim().strip_prefix(*quote)?.strip_suffix(*quote));
                let fits = !text.trim().is_empty() && text.bytes().all(is_token) && quoted.is_none();
                return if fits {
                    Ok(text)
                } else {
                    Err("must be printable ASCII, without quotes around it".to_owned())
                };
            }
        };
        if fits { Ok(text) } else { Err(format!("must be {wanted}, not {text:?}")) }
    }
}

pub(super) fn problem(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}

/// Parses the entries of a list, which commas or white space separate.
pub(super) fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|entry| !entry.is_empty()).map(parse).collect()
}

/// A type of a field that is read from a variable and shown as one. Errors are printed behind the variable's name, and
/// never have a secret's text.
pub(super) trait Value {
    /// Reads the text of a variable, which is not empty and within its bounds.
    fn set(&mut self, text: &str) -> Result<(), String>;

    /// Returns the value as a variable has it; empty for none. `None` for a secret, which is never shown.
    fn text(&self) -> Option<String>;
}

/// Implements [`Value`] for types: the value that a text is read as, and the text that a value is shown as.
macro_rules! values {
    ($($($type:ty),+: |$text:ident| $read:expr, |$value:ident| $shown:expr;)+) => {$($(
        impl Value for $type {
            fn set(&mut self, $text: &str) -> Result<(), String> {
                *self = $read;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                let $value = self;
                $shown
            }
        }
    )+)+};
}

values! {
    u16, u32, usize, bool, String, Schema, Ui, Validation:
        |text| text.parse::<Self>().map_err(|problem| problem.to_string())?, |value| Some(value.to_string());
    Duration: |text| seconds(text)?, |time| Some(time.as_secs_f64().to_string());
    Option<PathBuf>:
        |text| Some(text.into()), |path| Some(path.as_deref().unwrap_or(Path::new("")).display().to_string());
    TrustedProxies: |text| text.parse()?, |proxies| Some(proxies.names().join(","));
    AllowedOrigins: |text| text.parse()?, |origins| Some(origins.0.join(","));
    Vec<String>: |text| list(text, host_name)?, |names| Some(names.join(","));
    Secret: |text| without_line_end(text).into(), |_secret| None;
    Option<Secret>: |text| Some(without_line_end(text).into()), |_secret| None;
    Database: |text| Database::Url(text.into()), |_secret| None;
}

/// Returns a secret without the line end that an editor or `echo` has put behind it. A password may end in spaces.
pub(super) fn without_line_end(text: &str) -> &str {
    text.trim_end_matches(['\r', '\n'])
}

fn seconds(text: &str) -> Result<Duration, String> {
    Duration::try_from_secs_f64(text.parse().unwrap_or(f64::NAN)).map_err(|error| error.to_string())
}

/// Returns the name of a host, or `*`, which stands for any.
fn host_name(name: &str) -> Result<String, String> {
    let is_name = name == "*" || name.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    is_name.then(|| name.to_owned()).ok_or_else(|| format!("{name:?} is not a host name"))
}
