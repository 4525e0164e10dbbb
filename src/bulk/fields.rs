//! The fields of one record, in whichever format.
//!
//! Knows their names and no rule for their values.

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, fmt};

/// A field of a record. [`Column::Foreign`] is one that may not be set.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(field_identifier, rename_all = "camelCase")]
pub(super) enum Column {
    Id,
    Name,
    Email,
    Password,
    PasswordHash,
    CreatedAt,
    UpdatedAt,
    Foreign(String),
}

impl Column {
    const KNOWN: [(&str, Column); 7] = [
        ("id", Column::Id),
        ("name", Column::Name),
        ("email", Column::Email),
        ("password", Column::Password),
        ("passwordHash", Column::PasswordHash),
        ("createdAt", Column::CreatedAt),
        ("updatedAt", Column::UpdatedAt),
    ];

    /// A field that a record may have.
    pub fn named(name: &str) -> Option<Column> {
        Column::KNOWN.iter().find(|(known, _)| *known == name).map(|(_, column)| column.clone())
    }
}

/// The value of a field, as far as it matters.
#[derive(Debug)]
pub(super) enum Field<'a> {
    Text(Cow<'a, str>),
    Null,
    /// A whole number, which only an id may be.
    Whole(u64),
    /// Another number, a boolean, an array or an object, which no field may be.
    Other,
}

/// The fields of a record; of equal names the last one.
#[derive(Debug, Default)]
pub(super) struct Fields<'a> {
    pub id: Option<Field<'a>>,
    pub name: Option<Field<'a>>,
    pub email: Option<Field<'a>>,
    pub password: Option<Field<'a>>,
    pub password_hash: Option<Field<'a>>,
    pub created_at: Option<Field<'a>>,
    pub updated_at: Option<Field<'a>>,
    pub foreign: Vec<String>,
}

impl<'a> Fields<'a> {
    pub fn set(&mut self, column: Column, field: Field<'a>) {
        /// More names would make no better line.
        const MOST: usize = 20;
        let place = match column {
            Column::Id => &mut self.id,
            Column::Name => &mut self.name,
            Column::Email => &mut self.email,
            Column::Password => &mut self.password,
            Column::PasswordHash => &mut self.password_hash,
            Column::CreatedAt => &mut self.created_at,
            Column::UpdatedAt => &mut self.updated_at,
            Column::Foreign(name) => {
                if self.foreign.len() < MOST {
                    self.foreign.push(name);
                }
                return;
            }
        };
        *place = Some(field);
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
                while let Some(column) = members.next_key()? {
                    fields.set(column, members.next_value()?);
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Members)
    }
}

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
                Ok(Field::Null)
            }

            fn visit_bool<E>(self, _: bool) -> Result<Field<'de>, E> {
                Ok(Field::Other)
            }

            fn visit_i64<E>(self, _: i64) -> Result<Field<'de>, E> {
                Ok(Field::Other)
            }

            fn visit_u64<E>(self, number: u64) -> Result<Field<'de>, E> {
                Ok(Field::Whole(number))
            }

            fn visit_f64<E>(self, _: f64) -> Result<Field<'de>, E> {
                Ok(Field::Other)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Field<'de>, A::Error> {
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Field::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Field<'de>, A::Error> {
                while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Field::Other)
            }
        }
        deserializer.deserialize_any(One)
    }
}
