//! How the field of a setting is read from a text, checked and shown: a function for each kind of value.
//!
//! Each takes the text of the variable, which is not empty, or `None` to check the value that the field has. Errors are
//! printed behind the variable's name, and never have a secret's text.

use crate::error::ConfigError;
use crate::secret::{Secret, without_line_end};
use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

/// The text of the variable that would set the value: empty for none, `***` for a secret. `None` if the configuration has
/// no such field, as a part of the database's address beside a connection string. The error is a problem.
pub(super) type Shown = Result<Option<String>, String>;

/// A value that `read` makes of a text, and `show` makes a text of.
pub(super) fn value<T>(
    field: &mut T,
    text: Option<&str>,
    read: impl Fn(&str) -> Result<T, String>,
    show: impl Fn(&T) -> String,
) -> Shown {
    if let Some(text) = text {
        *field = read(text)?;
    }
    Ok(Some(show(field)))
}

/// A whole number within bounds.
pub(super) fn whole<T>(field: &mut T, text: Option<&str>, bounds: RangeInclusive<T>) -> Shown
where
    T: FromStr + PartialOrd + Display + Copy,
{
    number(field, text, "a whole number", bounds)
}

/// A number of seconds from `min` to a day, with or without fractions: the sum of a deadline and the present time stays far
/// from overflow.
pub(super) fn seconds(field: &mut Duration, text: Option<&str>, min: f64) -> Shown {
    let mut time = field.as_secs_f64();
    let shown = number(&mut time, text, "a number of seconds", min..=86_400.0)?;
    *field = Duration::from_secs_f64(time);
    Ok(shown)
}

/// A number within bounds. Its text has ASCII digits and dots alone: no sign, no exponent, no space.
fn number<T>(field: &mut T, text: Option<&str>, kind: &str, bounds: RangeInclusive<T>) -> Shown
where
    T: FromStr + PartialOrd + Display + Copy,
{
    let is_plain = |text: &&str| text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number = text.map_or(Some(*field), |text| Some(text).filter(is_plain)?.parse().ok());
    *field = number.filter(|number| bounds.contains(number)).ok_or_else(|| {
        let text = text.map_or_else(|| field.to_string(), str::to_owned);
        // Refuses a URL as a port, with a hint: Kubernetes sets DB_PORT=tcp://10.0.0.1:5432 beside a service that
        // is named `db`.
        let links = text.starts_with("tcp://");
        let hint = if links { " (with enableServiceLinks: false, Kubernetes sets none)" } else { "" };
        format!("must be {kind} from {} to {}{hint}, not {text:?}", bounds.start(), bounds.end())
    })?;
    Ok(Some(field.to_string()))
}

/// One of these words.
pub(super) fn word<T: FromStr + Display>(field: &mut T, text: Option<&str>, words: &[&str]) -> Shown {
    let read = |text: &str| {
        let known = words.iter().find(|word| **word == text).and_then(|word| word.parse().ok());
        known.ok_or_else(|| format!("must be one of {}, not {text:?}", words.join(", ")))
    };
    value(field, text, read, T::to_string)
}

/// A switch: on if the variable has exactly this text, else off.
pub(super) fn exactly(field: &mut bool, text: Option<&str>, on: &str) -> Shown {
    value(field, text, |text| Ok(text == on), bool::to_string)
}

/// Any text, without a line end behind it.
pub(super) fn string(field: &mut String, text: Option<&str>) -> Shown {
    value(field, text, |text| Ok(without_line_end(text).to_owned()), String::clone)
}

/// A host, or the path of a socket. Refuses a connection string: the value is shown, and the string may have a
/// password.
pub(super) fn host(field: &mut String, text: Option<&str>) -> Shown {
    match text {
        Some(text) if text.starts_with(['"', '\'']) => Err("must not have quotes around it".to_owned()),
        Some(text) if text.contains(['@', '=']) && !text.starts_with('/') && !text.starts_with("unix:") => {
            Err("is not a host: a connection string goes into DATABASE_URL".to_owned())
        }
        _ => string(field, text),
    }
}

/// The path of a file or a directory.
pub(super) fn path(field: &mut Option<PathBuf>, text: Option<&str>) -> Shown {
    let show = |path: &Option<PathBuf>| path.clone().unwrap_or_default().display().to_string();
    value(field, text, |text| Ok(Some(text.into())), show)
}

/// A secret. It is never shown.
pub(super) fn secret<T: From<Secret>>(field: &mut T, text: Option<&str>) -> Shown {
    let Some(text) = text else { return Ok(Some(String::new())) };
    *field = Secret::from(without_line_end(text)).into();
    Ok(Some("***".to_owned()))
}

/// Tokens of printable ASCII, separated by white space; at least one.
pub(super) fn tokens(field: &mut Option<Secret>, text: Option<&str>) -> Shown {
    let is_quoted = |text: &str| ['"', '\''].iter().any(|q| text.starts_with(*q) && text.ends_with(*q));
    // Refuses the word `Bearer`: white space separates tokens, so it would be a token that everybody knows.
    let is_token = |token: &str| {
        token.bytes().all(|byte| byte.is_ascii_graphic()) && !token.eq_ignore_ascii_case("bearer")
    };
    let is_wrong =
        |text: &str| text.is_empty() || is_quoted(text) || !text.split_ascii_whitespace().all(is_token);
    if text.map(str::trim).is_some_and(is_wrong) {
        return Err("must be printable ASCII, without quotes around it or Bearer before it".to_owned());
    }
    secret(field, text)
}

/// Parses the entries of a list, which commas or white space separate.
pub(super) fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    let entries = text.split(|c: char| c == ',' || c.is_whitespace());
    entries.filter(|entry| !entry.is_empty()).map(parse).collect()
}

/// A list of texts, each of which `parse` checks.
pub(super) fn entries<T: AsRef<str>>(
    field: &mut Vec<T>,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Shown {
    let shown = |entries: &[T]| entries.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(",");
    let text = text.map_or_else(|| shown(field), str::to_owned);
    *field = list(&text, parse)?;
    Ok(Some(shown(field)))
}

/// Parses the name of a host, or `*` for any.
pub(super) fn host_name(entry: &str) -> Result<String, String> {
    if entry == "*" || is_host_name(entry) {
        return Ok(entry.to_owned());
    }
    Err(format!(
        "{entry:?} is no name of a host: write each name out in ASCII (xn--…), without scheme, port, path or wildcard, as in \
         users.example,www.example; an IPv6 address needs no entry"
    ))
}

/// Returns whether a client can name a host so: labels of letters, digits, `_` and inner hyphens, and maybe a final dot.
pub(super) fn is_host_name(name: &str) -> bool {
    name.strip_suffix('.').unwrap_or(name).split('.').all(|label| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

pub(super) fn problem(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}
