//! The user record, what creates and changes one, and the guard of mass assignment.
//!
//! Knows neither SQL nor HTTP; values come as JSON objects and leave as JSON.

use crate::{
    config::Secret,
    error::{Error, HAS_NUL, Violation},
    users::{password::PasswordHash, relation::Relation, revision::Revision},
};
use serde::{Serialize, Serializer, ser::SerializeStruct};
use serde_json::{Map, Value};
use std::fmt;

/// The fields that a body may set.
pub const FILLABLE: [&str; 3] = ["name", "email", "password"];

/// Characters of the longest name, as the column has it.
pub const NAME_MAX: usize = 1000;

/// Characters of the longest e-mail address, as the column has it.
pub const EMAIL_MAX: usize = 254;

/// Characters of the shortest password, as the create schemas have it.
pub const PASSWORD_MIN: usize = 8;

/// A stored user. As JSON: the fields of its [`UserRef`].
#[derive(Debug)]
pub struct User {
    /// The identifier; positive.
    pub id: i64,
    /// The name, as given.
    pub name: String,
    /// The address, as given; unique whatever its case.
    pub email: String,
    /// When the record was created.
    pub created_at: Timestamp,
    /// When anything of it last changed.
    pub updated_at: Timestamp,
    /// Moves with every change, the password's included.
    pub version: i64,
    /// What the user proves itself with. No read or list fetches it.
    #[doc(hidden)]
    pub credential: Relation<Credential>,
}

/// What is answered of a stored user. As JSON: `id` (a string), `name`, `email`, `createdAt`, `updatedAt`, and nothing else.
#[derive(Debug, Clone, Copy)]
pub struct UserRef<'a> {
    /// The identifier.
    pub id: i64,
    /// The name.
    pub name: &'a str,
    /// The address.
    pub email: &'a str,
    /// When the record was created.
    pub created_at: Timestamp,
    /// When anything of it last changed.
    pub updated_at: Timestamp,
}

impl User {
    /// What is answered of it.
    pub fn as_row(&self) -> UserRef<'_> {
        let User { id, name, email, created_at, updated_at, .. } = self;
        UserRef { id: *id, name, email, created_at: *created_at, updated_at: *updated_at }
    }
}

impl<'a> UserRef<'a> {
    /// The names of the fields, in answers, exports and imports.
    pub const FIELDS: [&'static str; 5] = ["id", "name", "email", "createdAt", "updatedAt"];

    /// Bytes of it as JSON with neither name nor address, with the longest identifier, and of the comma behind it.
    pub(crate) const EMPTY: usize = 134;

    /// Their values, in the same order.
    pub fn values(&self) -> [FieldValue<'a>; 5] {
        let UserRef { id, name, email, created_at, updated_at } = *self;
        [
            FieldValue::Id(id),
            FieldValue::Text(name),
            FieldValue::Text(email),
            FieldValue::Time(created_at),
            FieldValue::Time(updated_at),
        ]
    }

    /// A user of these values, which are all that it has.
    pub fn new(id: i64, values: Values<'a>, created_at: Timestamp, updated_at: Timestamp) -> UserRef<'a> {
        let Values { name, email } = values;
        UserRef {
            id,
            name: name.unwrap_or_default(),
            email: email.unwrap_or_default(),
            created_at,
            updated_at,
        }
    }

    /// The user that it is.
    pub fn into_user(self, version: i64, credential: Relation<Credential>) -> User {
        let UserRef { id, name, email, created_at, updated_at } = self;
        let (name, email) = (name.to_owned(), email.to_owned());
        User { id, name, email, created_at, updated_at, version, credential }
    }
}

/// The value of a field that is answered.
#[derive(Debug, Clone, Copy)]
pub enum FieldValue<'a> {
    /// A string of digits.
    Id(i64),
    /// A string.
    Text(&'a str),
    /// A string as RFC 3339 has it.
    Time(Timestamp),
}

impl Serialize for User {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_row().serialize(serializer)
    }
}

impl Serialize for UserRef<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("User", UserRef::FIELDS.len())?;
        for (name, value) in UserRef::FIELDS.into_iter().zip(self.values()) {
            fields.serialize_field(name, &value)?;
        }
        fields.end()
    }
}

impl Serialize for FieldValue<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            FieldValue::Id(id) => serializer.serialize_str(itoa::Buffer::new().format(*id)),
            FieldValue::Text(text) => serializer.serialize_str(text),
            FieldValue::Time(time) => time.serialize(serializer),
        }
    }
}

/// The secret half of a user, in a table of its own.
#[derive(Debug)]
pub struct Credential {
    /// The hash of the password.
    pub password_hash: PasswordHash,
}

/// What a user is created from.
#[derive(Debug)]
pub struct NewUser {
    /// The name.
    pub name: String,
    /// The address.
    pub email: String,
    /// The password.
    pub password: Option<Secret>,
}

/// What a PUT or a PATCH changes; `None` leaves the field as it is.
#[derive(Debug, Default)]
pub struct UserChanges {
    /// A new name.
    pub name: Option<String>,
    /// A new address.
    pub email: Option<String>,
    /// `Some(None)` removes the password.
    pub password: Option<Option<Secret>>,
}

/// The values that a request gives a user's record, which has no password in it; `None` where it gives none.
#[derive(Debug, Clone, Copy, Default)]
pub struct Values<'a> {
    /// The name.
    pub name: Option<&'a str>,
    /// The address.
    pub email: Option<&'a str>,
}

impl<'a> Values<'a> {
    /// Those that each user has.
    pub fn new(name: &'a str, email: &'a str) -> Values<'a> {
        Values { name: Some(name), email: Some(email) }
    }
}

impl NewUser {
    /// What its record is made of.
    pub fn values(&self) -> Values<'_> {
        Values { name: Some(&self.name), email: Some(&self.email) }
    }
}

impl UserChanges {
    /// The user that these make, where they suffice for one.
    pub fn into_new(self) -> Option<NewUser> {
        Some(NewUser { name: self.name?, email: self.email?, password: self.password.flatten() })
    }

    /// What is new in the record.
    pub fn values(&self) -> Values<'_> {
        Values { name: self.name.as_deref(), email: self.email.as_deref() }
    }
}

impl User {
    /// The state of the record, of which its `ETag` is made.
    #[doc(hidden)]
    pub fn revision(&self) -> Revision {
        Revision { version: self.version, updated_at: self.updated_at }
    }
}

/// Refuses fields that may not be mass assigned, known or unknown, by name.
pub fn guard(body: &Map<String, Value>) -> Result<(), Error> {
    let foreign = body.keys().filter(|key| !FILLABLE.contains(&key.as_str()));
    let foreign: Vec<String> = foreign.cloned().collect();
    if foreign.is_empty() { Ok(()) } else { Err(Error::MassAssignment(foreign)) }
}

impl NewUser {
    /// From a body that the create schema and [`guard`] have passed.
    pub fn from_body(mut body: Map<String, Value>) -> Result<NewUser, Error> {
        guard(&body)?;
        let mut text = |key| match body.remove(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        };
        match (text("name"), text("email")) {
            (Some(name), Some(email)) => {
                Ok(NewUser { name, email, password: text("password").map(Secret::from) })
            }
            _ => Err(Error::Internal("the create schema let a body through".into())),
        }
    }
}

impl UserChanges {
    /// From the body of a PUT or a PATCH: the guard, then each value must be one that its column can hold, and a password one that
    /// a user could be created with.
    pub fn from_body(body: Map<String, Value>) -> Result<UserChanges, Error> {
        guard(&body)?;
        let mut changes = UserChanges::default();
        let mut violations = Vec::new();
        for (key, value) in body {
            let text = match value {
                Value::Null if key == "password" => {
                    changes.password = Some(None);
                    continue;
                }
                Value::String(text) => text,
                _ => {
                    violations.push(violation(&key, "type", "must be a string"));
                    continue;
                }
            };
            if text.contains('\0') {
                violations.push(violation(&key, "pattern", HAS_NUL));
            } else if let Some(most) = longest(&key)
                && text.chars().count() > most
            {
                let message = format!("must be at most {most} characters");
                violations.push(violation(&key, "maxLength", &message));
            } else if key == "password" && text.chars().count() < PASSWORD_MIN {
                let message = format!("must be at least {PASSWORD_MIN} characters");
                violations.push(violation(&key, "minLength", &message));
            } else {
                match key.as_str() {
                    "name" => changes.name = Some(text),
                    "email" => changes.email = Some(text),
                    _ => changes.password = Some(Some(text.into())),
                }
            }
        }
        if violations.is_empty() { Ok(changes) } else { Err(Error::Unprocessable(violations)) }
    }
}

/// Characters of the longest value of a field.
fn longest(key: &str) -> Option<usize> {
    match key {
        "name" => Some(NAME_MAX),
        "email" => Some(EMAIL_MAX),
        _ => None,
    }
}

fn violation(key: &str, keyword: &str, message: &str) -> Violation {
    Violation { path: format!("/{key}"), keyword: keyword.to_owned(), message: message.to_owned() }
}

/// A moment: microseconds since 1970-01-01T00:00:00Z. As text: RFC 3339 in UTC with microseconds and `Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The moment so many microseconds after 1970-01-01T00:00:00Z, or `None` outside the years 1 to 9999,
    /// which RFC 3339 cannot write.
    pub fn from_unix_micros(micros: i64) -> Option<Timestamp> {
        const YEAR_1: i64 = -62_135_596_800_000_000;
        const YEAR_10000: i64 = 253_402_300_800_000_000;
        (YEAR_1..YEAR_10000).contains(&micros).then_some(Timestamp(micros))
    }

    /// Microseconds since 1970-01-01T00:00:00Z.
    pub fn unix_micros(self) -> i64 {
        self.0
    }

    /// A moment as RFC 3339 writes it, or PostgreSQL: an offset of hours alone, a space instead of the `T`. What is
    /// behind the microseconds is cut off. `None` for other texts, those without an offset included.
    pub fn parse(text: &str) -> Option<Timestamp> {
        let text = text.as_bytes();
        let number = |at: usize, digits: usize| {
            let digits = text.get(at..at + digits)?;
            let is_number = digits.iter().all(u8::is_ascii_digit);
            is_number.then(|| digits.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
        };
        let is = |at: usize, one_of: &[u8]| text.get(at).is_some_and(|byte| one_of.contains(byte));
        let punctuated = is(4, b"-") && is(7, b"-") && is(10, b"Tt ") && is(13, b":") && is(16, b":");
        let [year, month, day] = [number(0, 4)?, number(5, 2)?, number(8, 2)?];
        let [hour, minute, second] = [number(11, 2)?, number(14, 2)?, number(17, 2)?];
        let days = day_of(year, month, day);
        let exists = date_of(days) == (year, month, day);
        // The last minute of some years has a second more.
        if !exists || !punctuated || hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        let (mut at, mut micros) = (19, 0);
        if is(at, b".") {
            let digits = text[at + 1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            let known = digits.min(6);
            micros = number(at + 1, known).filter(|_| digits > 0)? * 10_i64.pow(6 - known as u32);
            at += 1 + digits;
        }
        let offset = match &text[at..] {
            [b'Z' | b'z'] => 0,
            [sign @ (b'+' | b'-'), rest @ ..] => {
                let minutes = match rest.len() {
                    2 => 0,
                    4 => number(at + 3, 2)?,
                    5 if rest[2] == b':' => number(at + 4, 2)?,
                    _ => return None,
                };
                let hours = number(at + 1, 2).filter(|hours| *hours < 24 && minutes < 60)?;
                (hours * 60 + minutes) * if *sign == b'-' { -60 } else { 60 }
            }
            _ => return None,
        };
        let seconds = days * 86_400 + hour * 3600 + minute * 60 + second - offset;
        Timestamp::from_unix_micros(seconds * 1_000_000 + micros)
    }

    /// As text.
    pub(crate) fn to_rfc3339(self) -> [u8; 27] {
        let seconds = self.0.div_euclid(1_000_000);
        let ((year, month, day), second) = (date_of(seconds.div_euclid(86_400)), seconds.rem_euclid(86_400));
        let mut text = *b"0000-00-00T00:00:00.000000Z";
        put(&mut text[0..4], year);
        put(&mut text[5..7], month);
        put(&mut text[8..10], day);
        put(&mut text[11..13], second / 3600);
        put(&mut text[14..16], second / 60 % 60);
        put(&mut text[17..19], second % 60);
        put(&mut text[20..26], self.0.rem_euclid(1_000_000));
        text
    }
}

/// Year, month and day of a day since 1970-01-01, in the Gregorian calendar. As Howard Hinnant computes it ("chrono-compatible
/// low-level date algorithms"): years begin in March, so that a leap day is a year's last, and 400 of them have 146,097 days.
fn date_of(day: i64) -> (i64, i64, i64) {
    let (era, day) = ((day + 719_468).div_euclid(146_097), (day + 719_468).rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (era * 400 + year + i64::from(month <= 2), month, day)
}

/// The reverse. What is no date becomes the day of another one.
fn day_of(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
    let day = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year * 365 + year / 4 - year / 100 + day - 719_468
}

/// Decimal digits of fixed width.
fn put(digits: &mut [u8], mut number: i64) {
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(str::from_utf8(&self.to_rfc3339()).expect("ASCII"))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(str::from_utf8(&self.to_rfc3339()).expect("ASCII"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            _ => panic!("an object was meant"),
        }
    }

    #[test]
    fn days_and_dates() {
        assert_eq!(date_of(0), (1970, 1, 1));
        let mut expected = (1, 1, 1);
        // From 0001-01-01 to 9999-12-31.
        for day in -719_162..=2_932_896 {
            assert_eq!(date_of(day), expected, "{day}");
            let (year, month, of_month) = expected;
            assert_eq!(day_of(year, month, of_month), day);
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + i64::from(leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            expected = match (month, of_month == length) {
                (_, false) => (year, month, of_month + 1),
                (12, true) => (year + 1, 1, 1),
                (_, true) => (year, month + 1, 1),
            };
        }
        assert_eq!(expected, (10_000, 1, 1));
    }

    #[test]
    fn timestamps() {
        let rows = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1, "1970-01-01T00:00:00.000001Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (951_782_400_000_000, "2000-02-29T00:00:00.000000Z"),
            (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z"),
            (-62_135_596_800_000_000, "0001-01-01T00:00:00.000000Z"),
        ];
        for (micros, text) in rows {
            assert_eq!(Timestamp::from_unix_micros(micros).unwrap().to_string(), text);
        }
        for micros in [i64::MIN, i64::MAX, 253_402_300_800_000_000] {
            assert_eq!(Timestamp::from_unix_micros(micros), None);
        }
    }

    #[test]
    fn timestamps_from_text() {
        let rows = [
            ("2020-02-29T23:59:59.123456Z", "2020-02-29T23:59:59.123456Z"),
            ("2020-02-29t23:59:59z", "2020-02-29T23:59:59.000000Z"),
            ("2020-02-29 23:59:59.5+00", "2020-02-29T23:59:59.500000Z"),
            ("2020-03-01T01:29:59.1234567+01:30", "2020-02-29T23:59:59.123456Z"),
            ("2020-02-29T23:59:59-0030", "2020-03-01T00:29:59.000000Z"),
            ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00.000000Z"),
            ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00.000000Z"),
            ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z"),
        ];
        for (text, expected) in rows {
            let found = Timestamp::parse(text).map(|time| time.to_string());
            assert_eq!(found.as_deref(), Some(expected), "{text}");
        }
        let wrong = [
            "",
            "2020-02-29",
            "2020-02-29T23:59:59",
            "2020-02-30T23:59:59Z",
            "2019-02-29T23:59:59Z",
            "2020-13-01T00:00:00Z",
            "2020-00-01T00:00:00Z",
            "2020-01-01T24:00:00Z",
            "2020-01-01T00:60:00Z",
            "2020-01-01T00:00:61Z",
            "2020-01-01T00:00:00.Z",
            "2020-01-01T00:00:00+1",
            "2020-01-01T00:00:00+24:00",
            "2020-01-01T00:00:00+01:60",
            "2020-01-01T00:00:00Zx",
            "2020-01-01T00:00:00+01:0x",
            "now",
            "infinity",
            "0000-12-31T00:00:00Z",
            "0001-01-01T00:00:00+01:00",
            "9999-12-31T23:59:59-01:00",
            "+2020-01-01T00:00:00Z",
            "2020-01-01T00:00:0éZ",
            "1577836800",
        ];
        for text in wrong {
            assert_eq!(Timestamp::parse(text), None, "{text}");
        }
    }

    #[test]
    fn changes() {
        let changes = UserChanges::from_body(object(json!({"name": "", "password": null})));
        let changes = changes.unwrap();
        assert_eq!(changes.name.as_deref(), Some(""));
        assert!(changes.email.is_none() && changes.password == Some(None));
        let rows = [
            (json!({"name": 1}), "/name", "type"),
            (json!({"name": null}), "/name", "type"),
            (json!({"name": "é".repeat(1001)}), "/name", "maxLength"),
            (json!({"email": "a\0b"}), "/email", "pattern"),
            (json!({"email": "x".repeat(255)}), "/email", "maxLength"),
            (json!({"password": ["secret"]}), "/password", "type"),
            (json!({"password": ""}), "/password", "minLength"),
            (json!({"password": "ééééééé"}), "/password", "minLength"),
            (json!({"password": "secret\0secret"}), "/password", "pattern"),
        ];
        for (body, path, keyword) in rows {
            match UserChanges::from_body(object(body)) {
                Err(Error::Unprocessable(violations)) => {
                    assert_eq!(violations[0].path, path);
                    assert_eq!(violations[0].keyword, keyword);
                    assert!(!violations[0].message.contains("secret"));
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(UserChanges::from_body(object(json!({"name": "🔑".repeat(1000)}))).is_ok());
        assert!(UserChanges::from_body(object(json!({"email": "é".repeat(254)}))).is_ok());
        assert!(UserChanges::from_body(object(json!({"password": "éééééééé"}))).is_ok());
        assert!(matches!(
            UserChanges::from_body(object(json!({"name": 1, "isAdmin": true}))),
            Err(Error::MassAssignment(fields)) if fields == ["isAdmin"]
        ));
    }
}
