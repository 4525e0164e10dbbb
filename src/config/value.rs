//! Conversion of the text of a variable to the value of a field, and the values that a field may have.

use super::{AllowedOrigins, ConfigError, Database, Schema, Secret, TrustedProxies, Ui, Validation};
use std::{path::PathBuf, time::Duration};

/// Values that a field may have.
#[derive(Debug)]
pub(super) enum Bounds {
    /// Any that its type can hold.
    Any,
    /// A whole number, both ends included.
    Whole(u64, u64),
    /// A number of seconds, both ends included.
    Seconds(f64, f64),
    /// On for exactly this text, off for any other.
    Exactly(&'static str),
    /// Tokens of printable ASCII, separated by white space; at least one.
    Token,
}

impl Bounds {
    /// A time up to a day: the sum of a deadline and the present time stays far from overflow.
    pub const SECONDS: Bounds = Bounds::Seconds(0.001, 86_400.0);
}

/// A type of a field, which is read from a variable and shown as one. An error follows the variable's name in a line
/// and never has a secret's text.
pub(super) trait Value {
    /// Reads the text of a variable, which is not empty.
    fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String>;

    /// Returns the value as a variable has it; empty for none. `None` for a secret, which is never shown.
    fn text(&self) -> Option<String> {
        None
    }
}

pub(super) fn problem(variable: &'static str, problem: impl Into<String>) -> ConfigError {
    ConfigError { variable, problem: problem.into() }
}

/// Reads a number of ASCII digits alone: no sign, no exponent, no space.
fn whole(text: &str, bounds: &Bounds) -> Result<u64, String> {
    let (min, max) = match *bounds {
        Bounds::Whole(min, max) => (min, max),
        _ => (0, u64::MAX),
    };
    let number = text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()));
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| format!("must be a whole number from {min} to {max}, not {text:?}"))
}

macro_rules! number {
    ($type:ty) => {
        impl Value for $type {
            fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String> {
                let number = whole(text, bounds)?.try_into();
                *self = number.map_err(|_| format!("must be a smaller number, not {text:?}"))?;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    };
}

number!(u16);
number!(u32);
number!(usize);

impl Value for Duration {
    fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String> {
        let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number = text.parse().ok().filter(|_| plain).unwrap_or(f64::NAN);
        if let Bounds::Seconds(min, max) = *bounds
            && !(min..=max).contains(&number)
        {
            return Err(format!("must be a number of seconds from {min} to {max}, not {text:?}"));
        }
        *self = Duration::try_from_secs_f64(number).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.as_secs_f64().to_string())
    }
}

impl Value for Option<PathBuf> {
    fn set(&mut self, text: &str, _: &Bounds) -> Result<(), String> {
        *self = Some(PathBuf::from(text));
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.as_ref().map_or_else(String::new, |path| path.display().to_string()))
    }
}

impl Value for Secret {
    fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String> {
        let is_token = |byte: u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
        if matches!(bounds, Bounds::Token) && (text.trim().is_empty() || !text.bytes().all(is_token)) {
            return Err("must be printable ASCII".to_owned());
        }
        *self = text.into();
        Ok(())
    }
}

impl Value for Option<Secret> {
    fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String> {
        self.insert(Secret::default()).set(text, bounds)
    }
}

/// A connection string.
impl Value for Database {
    fn set(&mut self, text: &str, _: &Bounds) -> Result<(), String> {
        *self = Database::Url(text.into());
        Ok(())
    }
}

/// A type that is parsed from its text.
macro_rules! parsed {
    ($type:ty) => {
        impl Value for $type {
            fn set(&mut self, text: &str, _: &Bounds) -> Result<(), String> {
                *self = text.parse().map_err(|problem| format!("{problem}"))?;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    };
}

parsed!(String);
parsed!(TrustedProxies);
parsed!(AllowedOrigins);

/// Names of hosts, separated by commas or spaces; `*` stands for any.
impl Value for Vec<String> {
    fn set(&mut self, text: &str, _: &Bounds) -> Result<(), String> {
        let names = text.split([',', ' ']).filter(|name| !name.is_empty());
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let checked = names.map(|name| match name == "*" || name.bytes().all(is_name) {
            true => Ok(name.to_owned()),
            false => Err(format!("{name:?} is not a host name")),
        });
        *self = checked.collect::<Result<_, _>>()?;
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.join(","))
    }
}

/// Says which words are possible.
pub(super) fn must_be(text: &str, words: &[&str]) -> String {
    format!("must be one of {}, not {text:?}", words.join(", "))
}

/// Finds the name of a choice.
fn choose<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == text);
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    found.map(|(_, value)| *value).ok_or_else(|| must_be(text, &names))
}

/// A type with a few values, each with a name.
macro_rules! choice {
    ($type:ty, $choices:expr) => {
        impl Value for $type {
            fn set(&mut self, text: &str, _: &Bounds) -> Result<(), String> {
                *self = choose(text, &$choices)?;
                Ok(())
            }

            fn text(&self) -> Option<String> {
                $choices.iter().find(|(_, choice)| choice == self).map(|(name, _)| (*name).to_owned())
            }
        }
    };
}

choice!(Schema, [("basic", Schema::Basic), ("strict", Schema::Strict)]);
choice!(Ui, [("auto", Ui::Auto), ("true", Ui::On), ("false", Ui::Off)]);
choice!(Validation, [("declarative", Validation::Declarative), ("parser", Validation::Parser)]);

/// `true` or `false`; with [`Bounds::Exactly`], on for one text.
impl Value for bool {
    fn set(&mut self, text: &str, bounds: &Bounds) -> Result<(), String> {
        *self = match bounds {
            Bounds::Exactly(on) => text == *on,
            _ => choose(text, &[("true", true), ("false", false)])?,
        };
        Ok(())
    }

    fn text(&self) -> Option<String> {
        Some(self.to_string())
    }
}
