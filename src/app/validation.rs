//! The JSON Schemas of `schemas/`, embedded in the binary and compiled when a service first starts, and what a
//! violation looks like.
//!
//! The setting `VALIDATION` decides with which of two errors a bad body is refused.

use crate::{
    config::{self, Schema},
    error::{Error, HAS_NUL, Violation},
};
use jsonschema::{
    EmailOptions, Keyword, ValidationError, Validator, error::ValidationErrorKind, paths::Location,
};
use serde_json::{Map, Value};
use std::{mem, sync::OnceLock};

// The files of `schemas/`: by variant, basic and strict, where there are two.
const CREATE: [&str; 2] = [
    include_str!("../../schemas/create-user.basic.json"),
    include_str!("../../schemas/create-user.strict.json"),
];
const PATCH: [&str; 2] = [
    include_str!("../../schemas/patch-user.basic.json"),
    include_str!("../../schemas/patch-user.strict.json"),
];
const LOGIN: &str = include_str!("../../schemas/authenticate.json");
/// What the others but that refer to.
const USER: &str = include_str!("../../schemas/user.json");

// By file and variant; compiled when the first service of the process that has it starts, and shared by all of them.
static COMPILED: [[OnceLock<Validator>; 2]; 3] = [const { [const { OnceLock::new() }; 2] }; 3];

/// A schema of bodies by the name of its file in `schemas/`; for a basic one, that of the configured variant. `None`
/// where bodies are held against no such file.
pub fn file(name: &str, schema: Schema) -> Option<Value> {
    let variant = usize::from(schema == Schema::Strict);
    let text = match name {
        "create-user.basic.json" => CREATE[variant],
        "patch-user.basic.json" => PATCH[variant],
        "authenticate.json" => LOGIN,
        _ => return None,
    };
    let mut file = parse(text);
    // It becomes part of another document, which says which dialect they are in.
    file.as_object_mut()?.remove("$schema");
    Some(file)
}

/// A schema of this crate's. One that refers to that of a user gets its rules, which its own add to: so the rules of a
/// field are in one place, and violations have one order.
fn parse(file: &str) -> Value {
    let read = |file| serde_json::from_str(file).expect("a schema of this crate is JSON");
    let mut schema: Value = read(file);
    if schema.as_object_mut().is_some_and(|schema| schema.remove("allOf").is_some()) {
        let own = mem::replace(&mut schema, read(USER));
        merge(&mut schema, own);
    }
    schema
}

/// Adds rules to a schema, or replaces them.
fn merge(schema: &mut Value, rules: Value) {
    match (schema, rules) {
        (Value::Object(schema), Value::Object(rules)) => {
            rules.into_iter().for_each(|(key, rule)| merge(schema.entry(key).or_insert(Value::Null), rule));
        }
        (schema, rules) => *schema = rules,
    }
}

/// A schema of this crate's, compiled.
fn compile(file: &str) -> Validator {
    let schema = parse(file);
    let options = jsonschema::options()
        // As the schemas say, but for the draft: what they use means the same in this one, whose own schema, which is
        // compiled first and kept, is one file instead of eight.
        .with_draft(jsonschema::Draft::Draft4)
        .should_validate_formats(true)
        // An address without a dot in its domain is refused.
        .with_email_options(EmailOptions::default().with_required_tld())
        .with_keyword("pattern", without_nul);
    options.build(&schema).expect("a schema of this crate is one")
}

/// The pattern of `schemas/`, the only one there.
const WITHOUT_NUL: &str = r"^[^\u0000]*$";

/// Texts without NUL, without the cost of a regular expression's engine.
struct WithoutNul;

impl<'i> Keyword<'i> for WithoutNul {
    fn validate(&self, instance: &'i Value) -> Result<(), ValidationError<'i>> {
        match self.is_valid(instance) {
            true => Ok(()),
            false => Err(ValidationError::custom(HAS_NUL)),
        }
    }

    fn is_valid(&self, instance: &'i Value) -> bool {
        instance.as_str().is_none_or(|text| !text.contains('\0'))
    }
}

fn without_nul<'a>(
    _: &'a Map<String, Value>,
    pattern: &'a Value,
    _: Location,
) -> Result<Box<dyn for<'i> Keyword<'i>>, ValidationError<'a>> {
    match pattern.as_str() {
        Some(WITHOUT_NUL) => Ok(Box::new(WithoutNul)),
        _ => Err(ValidationError::custom("a pattern that is not implemented")),
    }
}

/// Which schemas the bodies of POST /users and of PATCH are held against, and the variant of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Validation {
    create: &'static Validator,
    patch: &'static Validator,
    authenticate: &'static Validator,
    mode: config::Validation,
}

impl Validation {
    /// Validation by the settings `SCHEMA` and `VALIDATION`.
    pub fn new(schema: Schema, mode: config::Validation) -> Validation {
        let variant = usize::from(schema == Schema::Strict);
        let [create, patch, authenticate] = [(0, CREATE[variant]), (1, PATCH[variant]), (2, LOGIN)]
            .map(|(at, file)| COMPILED[at][variant].get_or_init(|| compile(file)));
        Validation { create, patch, authenticate, mode }
    }

    /// Checks the body of POST /users against the create schema.
    pub fn create(self, body: Map<String, Value>) -> Result<Map<String, Value>, Error> {
        self.check(body, self.create)
    }

    /// Checks the fields in the body of a PATCH against the create schema; a password may be removed.
    pub fn patch(self, body: Map<String, Value>) -> Result<Map<String, Value>, Error> {
        self.check(body, self.patch)
    }

    /// Checks the body of POST /users/authenticate.
    pub fn authenticate(self, body: Map<String, Value>) -> Result<Map<String, Value>, Error> {
        self.check(body, self.authenticate)
    }

    fn check(self, body: Map<String, Value>, schema: &Validator) -> Result<Map<String, Value>, Error> {
        let body = Value::Object(body);
        let body = match (schema.is_valid(&body), body) {
            (true, Value::Object(map)) => return Ok(map),
            (_, body) => body,
        };
        let mut violations: Vec<Violation> = schema.iter_errors(&body).map(violation).collect();
        // The library checks a keyword of ours after its own; clients get `pattern` before `format`, as ever.
        for at in 1..violations.len() {
            let (format, pattern) = (&violations[at - 1], &violations[at]);
            if (format.keyword == "format" && pattern.keyword == "pattern") && format.path == pattern.path {
                violations.swap(at - 1, at);
            }
        }
        Err(match self.mode {
            config::Validation::Declarative => Error::Invalid(violations),
            config::Validation::Parser => Error::Unprocessable(violations),
        })
    }
}

/// The body as a JSON object; duplicate keys: the last one counts.
pub fn object(body: &[u8]) -> Result<Map<String, Value>, Error> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::InvalidJson("the body must be a JSON object".to_owned())),
        Err(_) if body.is_empty() => Err(Error::InvalidJson("the body is empty".to_owned())),
        Err(_) if is_form(body) => {
            Err(Error::InvalidJson("this looks like a form; send JSON, as in {\"name\":\"Ada\"}".to_owned()))
        }
        Err(error) => Err(Error::InvalidJson(error.to_string())),
    }
}

/// Whether the body begins as a form does: `name=`.
fn is_form(body: &[u8]) -> bool {
    let name =
        body.iter().take_while(|byte| byte.is_ascii_alphanumeric() || b"-_.%+[]".contains(byte)).count();
    name > 0 && body.get(name) == Some(&b'=')
}

fn violation(error: ValidationError<'_>) -> Violation {
    let path = error.instance_path().as_str();
    let (path, message) = match error.kind() {
        ValidationErrorKind::Required { property } => {
            let name = property.as_str().unwrap_or_default();
            (format!("{path}/{name}"), "is required".to_owned())
        }
        ValidationErrorKind::Custom { message, .. } => (path.to_owned(), message.clone()),
        ValidationErrorKind::Format { .. } => {
            let domain =
                error.instance().as_str().and_then(|text| text.rsplit_once('@')).map(|(_, domain)| domain);
            let message = match domain {
                Some(domain) if !domain.is_empty() && !domain.contains('.') => {
                    "value is not an e-mail address: the domain after the @ needs a dot"
                }
                _ => "value is not an e-mail address",
            };
            (path.to_owned(), message.to_owned())
        }
        // Masked, because the value may be a password.
        _ => (path.to_owned(), error.masked().to_string()),
    };
    Violation { path, keyword: error.kind().keyword().to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn judge(schema: Schema, body: Value) -> Vec<String> {
        let validation = Validation::new(schema, config::Validation::Declarative);
        let body = object(body.to_string().as_bytes()).unwrap();
        match validation.create(body) {
            Ok(_) => vec![],
            Err(Error::Invalid(violations)) => {
                violations.into_iter().map(|v| format!("{} {}: {}", v.path, v.keyword, v.message)).collect()
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn addresses() {
        let rows = [
            ("ada@example.com", true),
            ("a.b+c@sub.example.org", true),
            ("A@B.CO", true),
            ("missing@domain", false),
            ("no-at", false),
            ("@example.com", false),
            ("a@", false),
            ("a b@example.com", false),
            ("a@exam ple.com", false),
            ("", false),
            ("a@b@example.com", false),
            ("a\u{0}@example.com", false),
            ("a@example..com", false),
        ];
        for (email, valid) in rows {
            let found = judge(Schema::Basic, json!({"name": "n", "email": email}));
            assert_eq!(found.is_empty(), valid, "{email:?}: {found:?}");
        }
        let long = format!("{}@{}.example.com", "l".repeat(64), "d".repeat(200));
        assert!(!judge(Schema::Basic, json!({"name": "n", "email": long})).is_empty());
    }

    #[test]
    fn the_two_schemas() {
        let both = json!({"name": "", "email": "a@b.co"});
        assert_eq!(judge(Schema::Basic, both.clone()), Vec::<String>::new());
        let strict = judge(Schema::Strict, both);
        assert_eq!(strict.len(), 2, "{strict:?}");
        assert!(strict.contains(&"/password required: is required".to_owned()), "{strict:?}");
        let passes = json!({"name": "n", "email": "a@b.co", "password": "12345678", "more": 1});
        assert_eq!(judge(Schema::Strict, passes), Vec::<String>::new());
    }

    #[test]
    fn a_patch_has_the_rules_of_a_create() {
        for (create, patch) in CREATE.into_iter().zip(PATCH) {
            let (create, patch) = (parse(create), parse(patch));
            let mut expected = create.clone();
            expected["title"] = patch["title"].clone();
            expected["properties"]["password"]["type"] = json!(["string", "null"]);
            expected.as_object_mut().unwrap().remove("required").unwrap();
            assert_eq!(patch, expected);
        }
    }

    /// What the schemas refuse is what a PUT refuses, which knows no schema.
    #[test]
    fn bounds_of_fields_are_those_of_users() {
        use crate::users::user::{EMAIL_MAX, NAME_MAX, PASSWORD_MIN, UserChanges};
        let email = |length: usize| format!("{}@example.com", "x".repeat(length - 12));
        let rows = [
            (json!({"name": "n".repeat(NAME_MAX)}), true),
            (json!({"name": "n".repeat(NAME_MAX + 1)}), false),
            (json!({"email": email(64 + 12)}), true),
            (json!({"email": email(EMAIL_MAX + 1)}), false),
            (json!({"password": "p".repeat(PASSWORD_MIN)}), true),
            (json!({"password": "p".repeat(PASSWORD_MIN - 1)}), false),
        ];
        for (fields, accepted) in rows {
            let fields = fields.as_object().unwrap();
            let mut body = json!({"name": "n", "email": "a@example.com", "password": "long enough"});
            body.as_object_mut().unwrap().extend(fields.clone());
            for schema in [Schema::Basic, Schema::Strict] {
                let validation = Validation::new(schema, config::Validation::Declarative);
                let created = validation.create(body.as_object().unwrap().clone());
                let patched = validation.patch(fields.clone());
                assert_eq!((created.is_ok(), patched.is_ok()), (accepted, accepted), "{fields:?}");
            }
            assert_eq!(UserChanges::from_body(fields.clone()).is_ok(), accepted, "{fields:?}");
        }
    }

    #[test]
    fn violations_have_an_order() {
        let email = format!("{}\u{0}", "l".repeat(255));
        let found = judge(Schema::Strict, json!({"name": "\u{0}", "email": email, "password": "\u{0}"}));
        let keywords: Vec<_> = found.iter().map(|found| found.split(':').next().unwrap()).collect();
        let expected = [
            "/email maxLength",
            "/email pattern",
            "/email format",
            "/name pattern",
            "/password minLength",
            "/password pattern",
        ];
        assert_eq!(keywords, expected);
    }

    #[test]
    fn messages_never_repeat_a_password() {
        for password in [json!("hunter2"), json!("hunter2\u{0}hunter2"), json!(["hunter2"])] {
            let body = json!({"name": "n", "email": "a@b.co", "password": password});
            let found = judge(Schema::Basic, body);
            assert!(!found.is_empty());
            assert!(!found.concat().contains("hunter2"), "{found:?}");
        }
    }

    #[test]
    fn mistakes_that_are_often_made_are_told() {
        let message = |body: &str| match object(body.as_bytes()) {
            Err(Error::InvalidJson(message)) => message,
            other => panic!("{other:?}"),
        };
        assert!(message("name=Ada&email=ada%40example.com").contains("looks like a form"));
        assert!(!message("=x").contains("form") && !message("{=").contains("form"));
        let rows = [("ada@localhost", true), ("ada", false), ("ada@", false), ("ada@example..com", false)];
        for (email, dot) in rows {
            let found = judge(Schema::Basic, json!({"name": "n", "email": email}));
            assert_eq!(found[0].ends_with("needs a dot"), dot, "{email}: {found:?}");
        }
    }

    #[test]
    fn bodies_that_are_no_objects() {
        for body in ["", " ", "{", "[]", "1", "null", "\"x\"", "{\"a\":1}x", "{'a':1}", "\u{feff}{}"] {
            assert!(matches!(object(body.as_bytes()), Err(Error::InvalidJson(_))), "{body}");
        }
        assert!(object(b"{\"name\":\"\xff\"}").is_err());
        assert!(object("[".repeat(100_000).as_bytes()).is_err());
        let last = object(br#"{"name":"a","name":"b"}"#).unwrap();
        assert_eq!(last["name"], "b");
    }
}
