//! A function for each kind of setting. If the text of the setting is given, the function parses it into a field. If
//! the text is `None`, the function checks the value that the field has. In both cases it returns the field's value as
//! text. Its error is a line that is printed behind the variable's name, and never contains a secret.

use crate::error::ConfigError;
use crate::secret::{Secret, without_line_end};
use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

/// The value of a setting as text: empty for no value, `***` for a secret. `None` if the setting has no effect, such as
/// the database's host beside a connection string. The error says what is wrong with the value.
pub(super) type ShownValue = Result<Option<String>, String>;

/// Sets a field to the value that `parse` makes of `text`, if there is a text. Returns the text that `show` makes of
/// the field's value.
pub(super) fn set_and_show<T>(
    field: &mut T,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, String>,
    show: impl Fn(&T) -> String,
) -> ShownValue {
    if let Some(text) = text {
        *field = parse(text)?;
    }
    Ok(Some(show(field)))
}

/// Parses a whole number within the bounds into a field. Without a text, checks the number that the field has.
pub(super) fn set_whole_number<T>(field: &mut T, text: Option<&str>, bounds: RangeInclusive<T>) -> ShownValue
where
    T: FromStr + PartialOrd + Display + Copy,
{
    set_number(field, text, "a whole number", bounds)
}

/// Parses a number of seconds, which may have a fraction, into a field. Without a text, checks the time that the field
/// has. The number must be at least `min`, and at most a day, so that no deadline overflows.
pub(super) fn set_seconds(field: &mut Duration, text: Option<&str>, min: f64) -> ShownValue {
    let mut time = field.as_secs_f64();
    let shown = set_number(&mut time, text, "a number of seconds", min..=86_400.0)?;
    *field = Duration::from_secs_f64(time);
    Ok(shown)
}

/// Parses a number within the bounds into a field. Without a text, checks the number that the field has. The text may
/// only have digits and a dot: no sign, no exponent, no space. `kind` names the kind of number in an error.
fn set_number<T>(field: &mut T, text: Option<&str>, kind: &str, bounds: RangeInclusive<T>) -> ShownValue
where
    T: FromStr + PartialOrd + Display + Copy,
{
    let is_plain = |text: &&str| text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number = text.map_or(Some(*field), |text| Some(text).filter(is_plain)?.parse().ok());
    *field = number.filter(|number| bounds.contains(number)).ok_or_else(|| {
        let text = text.map_or_else(|| field.to_string(), str::to_owned);
        format!("must be {kind} from {} to {}, not {text:?}", bounds.start(), bounds.end())
    })?;
    Ok(Some(field.to_string()))
}

/// Parses `text`, if there is one, into a field. The text must be one of the words in `list`.
pub(super) fn set_word<T: FromStr + Display>(field: &mut T, text: Option<&str>, list: &[&str]) -> ShownValue {
    let parse = |text: &str| {
        let known = list.iter().find(|word| **word == text).and_then(|word| word.parse().ok());
        known.ok_or_else(|| format!("must be one of {}, not {text:?}", list.join(", ")))
    };
    set_and_show(field, text, parse, T::to_string)
}

/// Turns a switch on if `text` is `on_text`, and off if `text` is any other text. Without a text, the switch stays.
/// Returns an empty text if the switch is off.
pub(super) fn set_switch(field: &mut bool, text: Option<&str>, on_text: &str) -> ShownValue {
    *field = text.map_or(*field, |text| text == on_text);
    Ok(Some(if *field { on_text.to_owned() } else { String::new() }))
}

/// Sets a field to `text`, if there is one. Removes a line end, because the text of a file ends with one.
pub(super) fn set_string(field: &mut String, text: Option<&str>) -> ShownValue {
    set_and_show(field, text, |text| Ok(without_line_end(text).to_owned()), String::clone)
}

/// Sets a field to `text`, if there is one: the host of a database, or the directory of a socket. Refuses a port behind
/// the host.
pub(super) fn set_database_host(field: &mut String, text: Option<&str>) -> ShownValue {
    let port = text.filter(|text| !text.starts_with('/')).and_then(|text| text.split_once(':'));
    if port.is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit())) {
        return Err("must be a host alone: the port goes into DB_PORT".to_owned());
    }
    set_host(field, text)
}

/// Returns an IPv6 address without the brackets around it, and every other text as it is.
pub fn without_brackets(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

/// Sets a field to `text`, if there is one: a host, or the path of a socket. Removes the brackets of an IPv6 address.
/// Refuses a connection string, because `userd config` prints the field and a connection string may have a password.
pub(super) fn set_host(field: &mut String, text: Option<&str>) -> ShownValue {
    match text {
        Some(text) if text.starts_with(['"', '\'']) => Err("must not have quotes around it".to_owned()),
        Some(text) if text.contains(['@', '=']) && !text.starts_with('/') && !text.starts_with("unix:") => {
            Err("is not a host: a connection string goes into DATABASE_URL".to_owned())
        }
        _ => set_string(field, text.map(without_brackets)),
    }
}

/// Sets a field to `text`, if there is one: the path of a file or a directory.
pub(super) fn set_path(field: &mut Option<PathBuf>, text: Option<&str>) -> ShownValue {
    let show = |path: &Option<PathBuf>| path.clone().unwrap_or_default().display().to_string();
    set_and_show(field, text, |text| Ok(Some(text.into())), show)
}

/// Sets a field to `text`, if there is one: a secret. The result does not show the secret.
pub(super) fn set_secret<T: From<Secret>>(field: &mut T, text: Option<&str>) -> ShownValue {
    let Some(text) = text else { return Ok(Some(String::new())) };
    *field = Secret::from(without_line_end(text)).into();
    Ok(Some("***".to_owned()))
}

/// Sets a field to `text`, if there is one: tokens in printable ASCII, separated by white space.
pub(super) fn set_tokens(field: &mut Option<Secret>, text: Option<&str>) -> ShownValue {
    let is_quoted = |text: &str| ['"', '\''].iter().any(|q| text.starts_with(*q) && text.ends_with(*q));
    // Refuses the word `Bearer`: a setting that was copied from a header field, `Bearer <token>`, would make the word
    // itself a second token.
    let is_token = |token: &str| {
        token.bytes().all(|byte| byte.is_ascii_graphic()) && !token.eq_ignore_ascii_case("bearer")
    };
    let is_wrong =
        |text: &str| text.is_empty() || is_quoted(text) || !text.split_ascii_whitespace().all(is_token);
    if text.map(str::trim).is_some_and(is_wrong) {
        return Err("must be printable ASCII, without quotes around it or Bearer before it".to_owned());
    }
    set_secret(field, text)
}

/// Parses a list with commas or white space between its entries.
pub(super) fn parse_list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    let entries = text.split(|c: char| c == ',' || c.is_whitespace());
    entries.filter(|entry| !entry.is_empty()).map(parse).collect()
}

/// Parses a list into a field. `parse` parses each entry, or refuses it. Without a text, the entries that the field has
/// must be such that `parse` takes them.
pub(super) fn set_list<T: AsRef<str>>(
    field: &mut Vec<T>,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> ShownValue {
    let shown = |entries: &[T]| entries.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(",");
    let text = text.map_or_else(|| shown(field), str::to_owned);
    *field = parse_list(&text, parse)?;
    Ok(Some(shown(field)))
}

/// Parses a host name, or `*` for any name.
pub(super) fn parse_host_name(entry: &str) -> Result<String, String> {
    if entry == "*" || is_host_name(entry) {
        return Ok(entry.to_owned());
    }
    Err(format!(
        "{entry:?} is no name of a host: write each name out in ASCII (xn--…), without scheme, port, path or wildcard, as in \
         users.example,www.example; an IPv6 address needs no entry"
    ))
}

/// Returns true if a text is a host name: labels of letters, digits, `_` and inner hyphens, separated by dots. A final
/// dot is allowed.
pub(super) fn is_host_name(name: &str) -> bool {
    name.strip_suffix('.').unwrap_or(name).split('.').all(|label| {
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
            && !label.starts_with('-')
            && !label.ends_with('-')
    })
}

/// Returns the error for a variable whose value is refused. `problem` says what is wrong with the value.
pub(super) fn refuse(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}
