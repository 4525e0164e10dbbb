//! The fields of one record, in whichever format.
//!
//! Knows their names and no rule for their values.

use crate::users::user::UserRef;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Value};
use std::{borrow::Cow, fmt};

/// The field of a hash, which exports have, too.
pub(super) const PASSWORD_HASH: &str = "passwordHash";

/// The fields that a record may have: those of a user, and what a password is given by.
const NAMES: [&str; 7] = {
    let [id, name, email, created_at, updated_at] = UserRef::FIELDS;
    [id, name, email, created_at, updated_at, "password", PASSWORD_HASH]
};

/// Whether a record may have the field.
pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// The fields of a record, of equal names the last one, and the names of those that it may not have.
#[derive(Debug, Default)]
pub(super) struct Fields {
    values: [Option<Value>; NAMES.len()],
    pub foreign: Vec<String>,
}

impl Fields {
    pub fn set(&mut self, name: &str, value: Value) {
        /// More names would make no better line.
        const MOST: usize = 20;
        match NAMES.iter().position(|known| *known == name) {
            Some(at) => self.values[at] = Some(value),
            None if self.foreign.len() < MOST => self.foreign.push(name.to_owned()),
            None => {}
        }
    }

    /// The value of a field, if it has one, null included.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        let at = NAMES.iter().position(|known| *known == name).expect("a name of a field");
        self.values[at].take()
    }
}

/// The fields of a line of JSON. Values that no field can have are read over, whatever they hold. The error is what the
/// line is refused for.
pub(super) fn parse_json(text: &[u8]) -> Result<Fields, String> {
    // Without its line feed, so that every error is on one line.
    let text = str::from_utf8(text.trim_ascii_end()).map_err(|_| "is not UTF-8".to_owned())?;
    serde_json::from_str(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => "is not a JSON object".to_owned(),
        _ => format!("is not JSON: {}", error.to_string().replace(" at line 1 column ", " at column ")),
    })
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some((Name(name), Shallow(value))) = members.next_entry()? {
                    fields.set(&name, value);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

/// The name of a field, borrowed where it has no escapes.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// A value, in which arrays and objects are empty.
struct Shallow(Value);

impl<'de> Deserialize<'de> for Shallow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shallow, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_str<E>(self, text: &str) -> Result<Value, E> {
                Ok(text.into())
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
                Ok(number.into())
            }

            fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
                Ok(number.into())
            }

            fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
                Ok(number.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Value::Array(Vec::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
                while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value::Object(Map::new()))
            }
        }
        deserializer.deserialize_any(One).map(Shallow)
    }
}
