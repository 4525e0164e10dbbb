//! The user record, and the bodies that create and change one, with the guard of mass assignment.
//!
//! Knows neither SQL nor HTTP; values come as JSON objects and leave as JSON.

use crate::error::{Error, HAS_NUL, Violation};
use crate::secret::Secret;
use crate::users::{password::PasswordHash, relation::Relation, revision::Revision, timestamp};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use time::OffsetDateTime;

/// The most characters of a name, as the column has it.
pub const MAX_NAME_CHARS: usize = 1000;

/// The most characters of an e-mail address, as the column has it.
pub const MAX_EMAIL: usize = 254;

/// Characters of the shortest password, as the create schemas have it.
pub const MIN_PASSWORD_CHARS: usize = 8;

/// Bytes of memory of a usual user in a page.
pub const USUAL_USER_BYTES: usize = 1 << 10;

/// Bytes of the longest JSON of a user: each character of the texts may take six bytes (`\u0001`), and all else takes
/// 134. The bound has no slack: `fields::the_largest_user` fails if it leaves a member out.
pub const MAX_USER_BYTES: usize = 6 * (MAX_NAME_CHARS + MAX_EMAIL) + 134;

/// Names of the fields that answers, exports and imports have of a user.
pub const FIELDS: [&str; 5] = ["id", "name", "email", "createdAt", "updatedAt"];

/// A stored user. The JSON has `id`, as a string, `name`, `email`, `createdAt` and `updatedAt`, and nothing else. The
/// texts are borrowed from the row if many users are read only to be written.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct User<T = String> {
    /// The identifier; positive.
    #[serde(serialize_with = "digits")]
    pub id: i64,
    /// The name, as given.
    pub name: T,
    /// The address, as given; unique whatever its case.
    pub email: T,
    /// Time at which the record was created.
    #[serde(serialize_with = "timestamp::serialize")]
    pub created_at: OffsetDateTime,
    /// Time of the last change of the record or its password.
    #[serde(serialize_with = "timestamp::serialize")]
    pub updated_at: OffsetDateTime,
    /// A number that every change draws anew, also that of the password.
    #[serde(skip)]
    pub version: i64,
    /// Credential of the user. No read or list fetches it.
    #[serde(skip)]
    pub(crate) credential: Relation<Credential>,
}

impl User {
    /// The state of the record, of which its `ETag` is made.
    pub(crate) fn revision(&self) -> Revision {
        Revision { version: self.version, updated_at: self.updated_at }
    }
}

fn digits<S: Serializer>(id: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(itoa::Buffer::new().format(*id))
}

/// Returns the id if the text is the canonical decimal of a positive bigint; no other text names a user.
pub fn parse_id(text: &str) -> Option<i64> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| canonical)
}

/// The secret half of a user, in a table of its own.
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

/// Changes of a PUT or a PATCH; `None` leaves the field as it is.
#[derive(Debug, Default)]
pub struct UserChanges {
    /// A new name.
    pub name: Option<String>,
    /// A new address.
    pub email: Option<String>,
    /// `Some(None)` removes the password.
    pub password: Option<Option<Secret>>,
}

impl NewUser {
    /// Reads a body that the create schema has passed.
    pub fn from_body(body: Map<String, Value>) -> Result<NewUser, Error> {
        let new = UserChanges::from_body(body)?.into_new();
        new.ok_or_else(|| Error::Internal("the create schema let a body through".into()))
    }
}

impl UserChanges {
    /// Returns the user that these changes make, if they have a name and an address.
    pub fn into_new(self) -> Option<NewUser> {
        Some(NewUser { name: self.name?, email: self.email?, password: self.password.flatten() })
    }

    /// Reads the body of a PUT or a PATCH. Refuses fields that may not be mass assigned, known or unknown; then values that
    /// their column cannot hold, addresses with control characters, and passwords that no user could be created with.
    pub fn from_body(body: Map<String, Value>) -> Result<UserChanges, Error> {
        UserChanges::read(body, false)
    }

    /// Reads a body as [`UserChanges::from_body`] does. If it `is_stored`, its address may have control characters, which
    /// only SQL stores.
    pub fn read(mut body: Map<String, Value>, is_stored: bool) -> Result<UserChanges, Error> {
        let mut violations = Vec::new();
        // Returns the text of a field that the body sets, or null.
        let mut take = |field: &str, rule: Rule| {
            let value = rule.check(body.remove(field)?);
            let violation = |(keyword, message): (&str, _)| {
                violations.push(Violation {
                    path: format!("/{field}"),
                    keyword: keyword.to_owned(),
                    message,
                });
            };
            value.map_err(violation).ok()
        };
        // Refuses control characters: a line break in an address would end a header field of a mail.
        let email = Rule { most: MAX_EMAIL, has_controls: is_stored, ..TEXT };
        let password = Rule { least: MIN_PASSWORD_CHARS, may_be_null: true, ..TEXT };
        let changes = UserChanges {
            name: take("name", Rule { most: MAX_NAME_CHARS, ..TEXT }).flatten(),
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

/// The rule of a field: which texts a body may set it to.
struct Rule {
    least: usize,
    most: usize,
    may_be_null: bool,
    /// True if control characters are allowed.
    has_controls: bool,
}

/// A field whose value is any text that PostgreSQL can store.
const TEXT: Rule = Rule { least: 0, most: usize::MAX, may_be_null: false, has_controls: true };

impl Rule {
    /// Returns the text; `None` for null. The error: the keyword of the rule that the value violates, and what it must be.
    fn check(&self, value: Value) -> Result<Option<String>, (&'static str, String)> {
        let text = match value {
            Value::String(text) => text,
            Value::Null if self.may_be_null => return Ok(None),
            _ => return Err(("type", "must be a string".to_owned())),
        };
        let Rule { least, most, may_be_null: _, has_controls } = self;
        match text.chars().count() {
            _ if text.contains('\0') => Err(("pattern", HAS_NUL.to_owned())),
            _ if !has_controls && text.contains(char::is_control) => {
                Err(("pattern", "must not contain control characters".to_owned()))
            }
            length if length > *most => Err(("maxLength", format!("must be at most {most} characters"))),
            length if length < *least => Err(("minLength", format!("must be at least {least} characters"))),
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
        for name in FIELDS {
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
