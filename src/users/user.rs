//! The user record, and the bodies that create or change a user. A body with a field that clients may not set is
//! refused (mass assignment).
//!
//! This module knows neither SQL nor HTTP: it reads and writes JSON values.

use crate::error::{Error, NUL_MESSAGE, Violation};
use crate::secret::Secret;
use crate::users::{password::PasswordHash, relation::Relation, revision::Revision, timestamp};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use time::OffsetDateTime;

/// The most characters of a name. The column in the database has the same limit.
pub const MAX_NAME_CHARS: usize = 1000;

/// The most characters of an e-mail address. The column in the database has the same limit.
pub const MAX_EMAIL_CHARS: usize = 254;

/// The fewest characters of a password. The schemas of a create have the same limit.
pub const MIN_PASSWORD_CHARS: usize = 8;

/// Bytes of memory that a usual user takes in a page.
pub const USUAL_USER_BYTES: usize = 1 << 10;

/// Bytes of the longest JSON of a user: each character of the texts may take six bytes (`\u0001`), and all else takes
/// 134 bytes. The test `fields::the_largest_user` fails if this number leaves a field out.
pub const MAX_USER_BYTES: usize = 6 * (MAX_NAME_CHARS + MAX_EMAIL_CHARS) + 134;

/// Names of a user's fields in answers, exports and imports.
pub const USER_FIELDS: [&str; 5] = ["id", "name", "email", "createdAt", "updatedAt"];

/// A stored user. Its JSON has `id`, as a string, `name`, `email`, `createdAt` and `updatedAt`, and nothing else. `T`
/// is the type of texts: an export borrows the texts from a row.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct User<T = String> {
    /// The identifier; positive.
    #[serde(serialize_with = "serialize_id")]
    pub id: i64,
    /// The name, as given.
    pub name: T,
    /// The address, as given. No two users have addresses that differ in the case of letters alone.
    pub email: T,
    /// Time at which the record was created.
    #[serde(serialize_with = "timestamp::serialize")]
    pub created_at: OffsetDateTime,
    /// Time of the last change of the record or its password.
    #[serde(serialize_with = "timestamp::serialize")]
    pub updated_at: OffsetDateTime,
    /// A number that every change of the record or of its password replaces with a new one.
    #[serde(skip)]
    pub version: i64,
    /// The user's credential, which only a login loads.
    #[serde(skip)]
    pub(crate) credential: Relation<Credential>,
}

impl User {
    /// Returns the revision of the record, from which its `ETag` is made.
    pub(crate) fn revision(&self) -> Revision {
        Revision { version: self.version, updated_at: self.updated_at }
    }
}

fn serialize_id<S: Serializer>(id: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(itoa::Buffer::new().format(*id))
}

/// Parses an id. Returns `None` if the text is not the canonical decimal of a positive bigint, so that each user has
/// one path.
pub fn parse_id(text: &str) -> Option<i64> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| canonical)
}

/// The secret part of a user. Credentials have a table of their own, so that no read of users can return a hash.
#[derive(Debug, Clone)]
pub struct Credential {
    /// The hash of the password.
    pub password_hash: PasswordHash,
}

/// Fields of a user to create.
#[derive(Debug)]
pub struct NewUser {
    /// The name.
    pub name: String,
    /// The address.
    pub email: String,
    /// The password.
    pub password: Option<Secret>,
}

/// The changes of a PUT or a PATCH; `None` leaves a field as it is.
#[derive(Debug, Default)]
pub struct UserChanges {
    /// A new name.
    pub name: Option<String>,
    /// A new address.
    pub email: Option<String>,
    /// A new password; `Some(None)` removes the password.
    pub password: Option<Option<Secret>>,
}

impl NewUser {
    /// Parses a body that the create schema has accepted.
    pub fn from_body(body: Map<String, Value>) -> Result<NewUser, Error> {
        let new = UserChanges::from_body(body)?.into_new_user();
        new.ok_or_else(|| Error::Internal("the create schema let a body through".into()))
    }
}

impl UserChanges {
    /// Returns a new user with these fields. Returns `None` if the name or the address is missing.
    pub fn into_new_user(self) -> Option<NewUser> {
        Some(NewUser { name: self.name?, email: self.email?, password: self.password.flatten() })
    }

    /// Parses the body of a PUT or a PATCH. Refuses every field but name, email and password (mass assignment). Then
    /// refuses values that their columns cannot hold, addresses with control characters, and passwords that are too
    /// short.
    pub fn from_body(body: Map<String, Value>) -> Result<UserChanges, Error> {
        UserChanges::parse(body, false)
    }

    /// Parses a body as [`UserChanges::from_body`] does. If `allows_controls` is set, accepts control characters in the
    /// address, because an address that SQL has stored may have them.
    pub fn parse(mut body: Map<String, Value>, allows_controls: bool) -> Result<UserChanges, Error> {
        let mut violations = Vec::new();
        // Takes a field out of the body, and adds a violation if the field breaks its rule. Returns `None` if the body
        // lacks the field.
        let mut take = |field: &str, rule: Rule| {
            let checked = rule.validate(field, body.remove(field)?);
            checked.map_err(|violation| violations.push(violation)).ok()
        };
        // An address may not have control characters, because a line break in an address would end a header field of a
        // mail.
        let email = Rule { max_chars: MAX_EMAIL_CHARS, allows_controls, ..TEXT };
        let password = Rule { min_chars: MIN_PASSWORD_CHARS, allows_null: true, ..TEXT };
        let changes = UserChanges {
            name: take("name", Rule { max_chars: MAX_NAME_CHARS, ..TEXT }).flatten(),
            email: take("email", email).flatten(),
            password: take("password", password).map(|text| text.map(Secret::from)),
        };
        if !body.is_empty() {
            return Err(Error::MassAssignment(body.into_iter().map(|(field, _)| field).collect()));
        }
        violations.sort_by(|one, other| one.path.cmp(&other.path));
        if violations.is_empty() { Ok(changes) } else { Err(Error::Unprocessable(violations)) }
    }
}

/// The rule of a field: which values a body may set it to.
struct Rule {
    min_chars: usize,
    max_chars: usize,
    allows_null: bool,
    /// True if the value may have control characters.
    allows_controls: bool,
}

/// The rule of a field whose value is any text that PostgreSQL can store.
const TEXT: Rule = Rule { min_chars: 0, max_chars: usize::MAX, allows_null: false, allows_controls: true };

impl Rule {
    /// Returns the text of a value, or `None` for null. Fails if the value violates the rule.
    fn validate(&self, field: &str, value: Value) -> Result<Option<String>, Violation> {
        let violation = |keyword: &str, message: String| {
            Err(Violation { path: format!("/{field}"), keyword: keyword.to_owned(), message })
        };
        let text = match value {
            Value::String(text) => text,
            Value::Null if self.allows_null => return Ok(None),
            _ => return violation("type", "must be a string".to_owned()),
        };
        let Rule { min_chars: min, max_chars: max, allows_null: _, allows_controls } = self;
        match text.chars().count() {
            _ if text.contains('\0') => violation("pattern", NUL_MESSAGE.to_owned()),
            _ if !allows_controls && text.contains(char::is_control) => {
                violation("pattern", "must not contain control characters".to_owned())
            }
            chars if chars > *max => violation("maxLength", format!("must be at most {max} characters")),
            chars if chars < *min => violation("minLength", format!("must be at least {min} characters")),
            _ => Ok(Some(text)),
        }
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
    fn fields() {
        let time = OffsetDateTime::UNIX_EPOCH;
        let (name, email, credential) =
            ("n".to_owned(), "e".to_owned(), Relation::unloaded("credential", None));
        let user = User { id: 1, name, email, created_at: time, updated_at: time, version: 1, credential };
        let mut rest = serde_json::to_string(&user).unwrap();
        for name in USER_FIELDS {
            let (before, after) = rest.split_once(&format!("\"{name}\":\"")).unwrap();
            assert_eq!(before.matches(':').count(), 0, "{rest}");
            rest = after.split_once('"').unwrap().1.to_owned();
        }
        assert_eq!(rest, "}");
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
            (json!({"email": "x\r\nBcc: y@example.com"}), "/email", "pattern"),
            (json!({"email": "\u{1f}"}), "/email", "pattern"),
            (json!({"email": "\u{7f}"}), "/email", "pattern"),
            (json!({"email": "\u{9f}"}), "/email", "pattern"),
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
        let all = json!({"password": 1, "name": 1, "email": 1});
        match UserChanges::from_body(object(all)) {
            Err(Error::Unprocessable(violations)) => {
                let paths: Vec<_> = violations.iter().map(|violation| &*violation.path).collect();
                assert_eq!(paths, ["/email", "/name", "/password"]);
            }
            other => panic!("{other:?}"),
        }
        for email in ["", "not an address", "Ann <a@x.org>", "\u{a0}\u{200b}\u{2028}", "a@b@c"] {
            assert!(UserChanges::from_body(object(json!({ "email": email }))).is_ok(), "{email:?}");
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
