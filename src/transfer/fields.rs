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
const NAMES: [&str; UserRef::FIELDS.len() + 2] = {
    let mut names = ["password"; UserRef::FIELDS.len() + 2];
    let mut at = 0;
    while at < UserRef::FIELDS.len() {
        names[at] = UserRef::FIELDS[at];
        at += 1;
    }
    names[at] = PASSWORD_HASH;
    names
};

/// Whether a record may have the field.
pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// The fields of a record, of equal names the last one, and the names of those that it may not have.
#[derive(Debug, Default)]
pub(super) struct Fields<'a> {
    values: [Option<Field<'a>>; NAMES.len()],
    pub foreign: Vec<String>,
}

/// The value of a field: a text, or anything else, of which arrays and objects are empty here.
#[derive(Debug)]
pub(super) enum Field<'a> {
    Text(Cow<'a, str>),
    Value(Value),
}

impl<'a> Fields<'a> {
    pub fn set(&mut self, name: &str, field: Field<'a>) {
        /// More names would make no better line.
        const MOST: usize = 20;
        match NAMES.iter().position(|known| *known == name) {
            Some(at) => self.values[at] = Some(field),
            None if self.foreign.len() < MOST => self.foreign.push(name.to_owned()),
            None => {}
        }
    }

    /// The value of a field, if it has one, null included.
    pub fn take(&mut self, name: &str) -> Option<Field<'a>> {
        let at = NAMES.iter().position(|known| *known == name).expect("a name of a field");
        self.values[at].take()
    }
}

/// The fields of a line of JSON. Values that no field can have are read over, whatever they hold. The error is what the
/// line is refused for.
pub(super) fn parse_json(text: &[u8]) -> Result<Fields<'_>, String> {
    // Without its line feed, so that every error is on one line.
    let text = str::from_utf8(text.trim_ascii_end()).map_err(|_| "is not UTF-8".to_owned())?;
    serde_json::from_str(text).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => "is not a JSON object".to_owned(),
        _ => format!("is not JSON: {}", error.to_string().replace(" at line 1 column ", " at column ")),
    })
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields<'a>, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Fields::default();
                while let Some(Name(name)) = members.next_key()? {
                    fields.set(&name, members.next_value()?);
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

impl<'de: 'a, 'a> Deserialize<'de> for Field<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Field<'a>, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Field<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Field<'de>, E> {
                Ok(Field::Text(text.into()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Field<'de>, E> {
                Ok(Field::Text(text.to_owned().into()))
            }

            fn visit_unit<E>(self) -> Result<Field<'de>, E> {
                Ok(Field::Value(Value::Null))
            }

            fn visit_bool<E>(self, value: bool) -> Result<Field<'de>, E> {
                Ok(Field::Value(value.into()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Field<'de>, E> {
                Ok(Field::Value(number.into()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Field<'de>, E> {
                Ok(Field::Value(number.into()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Field<'de>, E> {
                Ok(Field::Value(number.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Field<'de>, A::Error> {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Field::Value(Value::Array(Vec::new())))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Field<'de>, A::Error> {
                while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Field::Value(Value::Object(Map::new())))
            }
        }
        deserializer.deserialize_any(One)
    }
}
