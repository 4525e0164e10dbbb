//! Validates bodies against the JSON Schemas of `schemas/`, which are embedded in the binary, and describes violations
//! for answers.
//!
//! The setting `VALIDATION` decides with which of two errors an invalid body is refused.

use crate::config::{self, Schema};
use crate::error::{Error, NUL_MESSAGE, Violation};
use crate::users::email;
use jsonschema::{ValidationError, Validator, error::ValidationErrorKind};
use serde_json::{Map, Value};

/// The pattern in the schemas that forbids NUL in a text. Its violation has a message of its own, because a client
/// would not understand the pattern.
const NO_NUL_PATTERN: &str = r"^[^\x00]*$";

/// The file names by which the description of the service (`openapi.json`) refers to the schemas of bodies.
const SCHEMA_FILE_NAMES: [&str; 3] = ["create-user.basic.json", "patch-user.basic.json", "authenticate.json"];

/// Returns the schema of a body in this variant. `name` is one of `SCHEMA_FILE_NAMES`, whatever the variant; for
/// another name, returns `None`.
pub fn find_schema(name: &str, variant: Schema) -> Option<Value> {
    let text = match (name, variant) {
        ("create-user.basic.json", Schema::Basic) => include_str!("../../schemas/create-user.basic.json"),
        ("create-user.basic.json", Schema::Strict) => include_str!("../../schemas/create-user.strict.json"),
        ("patch-user.basic.json", Schema::Basic) => include_str!("../../schemas/patch-user.basic.json"),
        ("patch-user.basic.json", Schema::Strict) => include_str!("../../schemas/patch-user.strict.json"),
        ("authenticate.json", _) => include_str!("../../schemas/authenticate.json"),
        _ => return None,
    };
    Some(serde_json::from_str(text).expect("a schema of this crate is JSON"))
}

/// The schemas that bodies are validated against.
#[derive(Debug)]
pub struct BodySchemas {
    /// The setting `SCHEMA`, which decides against which schemas bodies are validated.
    pub variant: Schema,
    /// The schema of the body of POST /users.
    pub create: BodySchema,
    /// The schema of the body of a PATCH: as for a create, but no field is required, and the password may be null,
    /// which removes the password.
    pub patch: BodySchema,
    /// The schema of the body of POST /users/authenticate.
    pub authenticate: BodySchema,
}

/// The compiled schema of one kind of body.
#[derive(Debug)]
pub struct BodySchema {
    validator: Validator,
    /// True if the file of the schema has `format: email`. The validator does not check this format:
    /// [`email::validate_email`] is called instead.
    has_email_format: bool,
    /// The setting `VALIDATION`, which decides with which error an invalid body is refused.
    mode: config::Validation,
}

impl BodySchemas {
    /// Compiles the schemas that the settings `SCHEMA` and `VALIDATION` select.
    pub fn new(variant: Schema, mode: config::Validation) -> BodySchemas {
        let compile =
            |name| BodySchema::new(find_schema(name, variant).expect("a body has this schema"), mode);
        let [create, patch, authenticate] = SCHEMA_FILE_NAMES.map(compile);
        BodySchemas { variant, create, patch, authenticate }
    }
}

impl BodySchema {
    fn new(mut schema: Value, mode: config::Validation) -> BodySchema {
        let email = schema.pointer_mut("/properties/email").and_then(Value::as_object_mut);
        let has_email_format = email.is_some_and(|email| email.remove("format").is_some());
        // Compiles the schema by the draft of JSON Schema that it names: draft 7, whose meta-schema takes less memory
        // than those of later drafts. Does not add our rule for addresses to the validator, because rustc would compile
        // the generic `jsonschema::options` once more.
        let validator = jsonschema::validator_for(&schema).expect("a schema of this crate is valid");
        BodySchema { validator, has_email_format, mode }
    }

    /// Returns the body if its fields are valid. Otherwise fails with the error that the setting `VALIDATION` demands.
    pub fn validate(&self, body: Map<String, Value>) -> Result<Map<String, Value>, Error> {
        let address = body.get("email").and_then(Value::as_str).filter(|_| self.has_email_format);
        let problem = address.and_then(|address| email::validate_email(address).err());
        let body = Value::Object(body);
        let body = match (problem.is_none() && self.validator.is_valid(&body), body) {
            (true, Value::Object(map)) => return Ok(map),
            (_, body) => body,
        };
        let mut violations: Vec<Violation> = self.validator.iter_errors(&body).map(to_violation).collect();
        if let Some(message) = problem {
            // Inserts the violation of the address where the validator would have put a violation: behind those of
            // missing fields, and before those of fields with later names.
            let is_before = |found: &&Violation| found.keyword == "required" || found.path == "/email";
            let of_address = violations.iter().take_while(is_before).count();
            let (path, keyword) = ("/email".to_owned(), "format".to_owned());
            violations.insert(of_address, Violation { path, keyword, message });
        }
        Err(match self.mode {
            config::Validation::Declarative => Error::InvalidBody(violations),
            config::Validation::Parser => Error::Unprocessable(violations),
        })
    }
}

/// Parses the body as a JSON object. Skips a byte order mark. If a key occurs twice, its last value counts.
pub fn parse_object(body: &[u8]) -> Result<Map<String, Value>, Error> {
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    let problem = match serde_json::from_slice(body) {
        Ok(Value::Object(map)) => return Ok(map),
        Ok(_) => "another kind of JSON".to_owned(),
        Err(error) => error.to_string(),
    };
    let message = describe_common_mistake(body).map(str::to_owned);
    Err(Error::InvalidJson(message.unwrap_or_else(|| describe_non_object(body, &problem))))
}

/// Returns the message about a body that is not a JSON object, for a body without a common mistake. Shows only the
/// first character of the body, because the body may contain a password.
fn describe_non_object(body: &[u8], problem: &str) -> String {
    let first = String::from_utf8_lossy(body).trim_ascii_start().chars().next().unwrap_or_default();
    if first == '{' {
        return format!("the body is not valid JSON: {problem}");
    }
    format!(
        "the body is not a JSON object: it begins with {first:?} ({problem}); a file arrives as it is: curl -d @user.json"
    )
}

/// Returns the message about a common mistake in a body: what the mistake is, and how to correct the body. `None` if
/// the body shows no common mistake.
fn describe_common_mistake(body: &[u8]) -> Option<&'static str> {
    Some(match body.trim_ascii_start() {
        [] => "the body is empty",
        [0x1f, 0x8b, ..] => "the body is compressed with gzip; send plain JSON",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] | [0, ..] | [_, 0, ..] => "the body is UTF-16; send it as UTF-8",
        [b'\'', ..] => {
            "the body begins with a single quote, which cmd.exe passes on; use double quotes there"
        }
        text if looks_like_form(text) => "this looks like a form; send JSON, as in {\"name\":\"Ada\"}",
        text if str::from_utf8(text).is_err() => "the body is not UTF-8",
        _ => return None,
    })
}

/// Returns true if the body begins like the body of a form: with a name and `=`.
fn looks_like_form(body: &[u8]) -> bool {
    let name =
        body.iter().take_while(|byte| byte.is_ascii_alphanumeric() || b"-_.%+[]".contains(byte)).count();
    name > 0 && body.get(name) == Some(&b'=')
}

fn to_violation(error: ValidationError<'_>) -> Violation {
    let path = error.instance_path().as_str();
    let (path, message) = match error.kind() {
        ValidationErrorKind::Required { property } => {
            let name = property.as_str().unwrap_or_default();
            (format!("{path}/{name}"), "is required".to_owned())
        }
        ValidationErrorKind::Pattern { pattern } if pattern == NO_NUL_PATTERN => {
            (path.to_owned(), NUL_MESSAGE.to_owned())
        }
        // Masks the value in the message, because the value may be a password.
        _ => (path.to_owned(), error.masked().to_string()),
    };
    Violation { path, keyword: error.kind().keyword().to_owned(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn violations(schema: Schema, body: Value) -> Vec<String> {
        let validation = BodySchemas::new(schema, config::Validation::Declarative);
        let body = parse_object(body.to_string().as_bytes()).unwrap();
        match validation.create.validate(body) {
            Ok(_) => vec![],
            Err(Error::InvalidBody(violations)) => {
                violations.into_iter().map(|v| format!("{} {}: {}", v.path, v.keyword, v.message)).collect()
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_two_schemas() {
        let both = json!({"name": "", "email": "a@b.co"});
        assert_eq!(violations(Schema::Basic, both.clone()), Vec::<String>::new());
        let strict = violations(Schema::Strict, both);
        assert_eq!(strict.len(), 2, "{strict:?}");
        assert!(strict.contains(&"/password required: is required".to_owned()), "{strict:?}");
        let passes = json!({"name": "n", "email": "a@b.co", "password": "12345678", "more": 1});
        assert_eq!(violations(Schema::Strict, passes), Vec::<String>::new());
        // Puts the violation first that clients show.
        let several = violations(Schema::Strict, json!({"email": "bad", "password": "short"}));
        let first: Vec<_> = several.iter().map(|line| line.split(':').next().unwrap()).collect();
        assert_eq!(first, ["/name required", "/email format", "/password minLength"]);
        let address = violations(Schema::Strict, json!({"name": 5, "email": "", "password": "long enough"}));
        let first: Vec<_> = address.iter().map(|line| line.split(':').next().unwrap()).collect();
        assert_eq!(first, ["/email format", "/name type"]);
    }

    #[test]
    fn a_patch_has_the_rules_of_a_create() {
        for variant in [Schema::Basic, Schema::Strict] {
            let [create, patch, _] = SCHEMA_FILE_NAMES.map(|name| find_schema(name, variant).unwrap());
            let mut expected = create.clone();
            expected["title"] = patch["title"].clone();
            expected["properties"]["password"]["type"] = json!(["string", "null"]);
            expected.as_object_mut().unwrap().remove("required").unwrap();
            assert_eq!(patch, expected);
        }
    }

    /// Checks that a PUT, which has no schema, refuses the values that the schemas refuse.
    #[test]
    fn bounds_of_fields_are_those_of_users() {
        use crate::users::user::{MAX_EMAIL_CHARS, MAX_NAME_CHARS, MIN_PASSWORD_CHARS, UserChanges};
        let email = |length: usize| format!("{}@example.com", "x".repeat(length - 12));
        let rows = [
            (json!({"name": "n".repeat(MAX_NAME_CHARS)}), true),
            (json!({"name": "n".repeat(MAX_NAME_CHARS + 1)}), false),
            (json!({"email": email(64 + 12)}), true),
            (json!({"email": email(MAX_EMAIL_CHARS + 1)}), false),
            (json!({"password": "p".repeat(MIN_PASSWORD_CHARS)}), true),
            (json!({"password": "p".repeat(MIN_PASSWORD_CHARS - 1)}), false),
        ];
        for (fields, accepted) in rows {
            let fields = fields.as_object().unwrap();
            let mut body = json!({"name": "n", "email": "a@example.com", "password": "long enough"});
            body.as_object_mut().unwrap().extend(fields.clone());
            for schema in [Schema::Basic, Schema::Strict] {
                let validation = BodySchemas::new(schema, config::Validation::Declarative);
                let created = validation.create.validate(body.as_object().unwrap().clone());
                let patched = validation.patch.validate(fields.clone());
                assert_eq!((created.is_ok(), patched.is_ok()), (accepted, accepted), "{fields:?}");
            }
            assert_eq!(UserChanges::from_body(fields.clone()).is_ok(), accepted, "{fields:?}");
        }
    }

    #[test]
    fn violations_have_an_order() {
        let email = format!("{}\u{0}", "l".repeat(255));
        let found = violations(Schema::Strict, json!({"name": "\u{0}", "email": email, "password": "\u{0}"}));
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

    /// Checks the keywords of the schemas: a keyword that their draft lacks would be ignored. The files are parts of
    /// the description, too, whose draft is later.
    #[test]
    fn schemas_have_keywords_of_their_draft_alone() {
        use jsonschema::Draft::{Draft7, Draft202012};
        const ANNOTATIONS: [&str; 3] = ["$comment", "description", "title"];
        fn check(schema: &Value) {
            for keyword in schema.as_object().expect("a schema").keys().map(String::as_str) {
                let is_known = [Draft7, Draft202012].iter().all(|draft| draft.is_known_keyword(keyword));
                assert!(is_known || ANNOTATIONS.contains(&keyword), "{keyword}");
            }
            Draft7.subresources_of(schema).for_each(check);
        }
        for (name, variant) in
            SCHEMA_FILE_NAMES.iter().flat_map(|name| [(name, Schema::Basic), (name, Schema::Strict)])
        {
            let schema = find_schema(name, variant).unwrap();
            assert_eq!(schema["$schema"], "http://json-schema.org/draft-07/schema#", "{name}");
            check(&schema);
        }
    }

    #[test]
    fn schemas_are_compiled_as_they_say() {
        let first = |fields: &Value, body: Value| {
            let mut schema = find_schema("authenticate.json", Schema::Basic).unwrap();
            schema["properties"] = fields.clone();
            let schema = BodySchema::new(schema, config::Validation::Declarative);
            let body = parse_object(body.to_string().as_bytes()).unwrap();
            match schema.validate(body) {
                Err(Error::InvalidBody(violations)) => violations.into_iter().next().unwrap(),
                other => panic!("{other:?}"),
            }
        };
        let fields = json!({
            "a": {"const": 1},
            "b": {"contains": {"const": 1}},
            "c": {"propertyNames": {"maxLength": 1}},
            "d": {"exclusiveMinimum": 1},
            "e": {"pattern": "^x+$"},
            "f": {"pattern": NO_NUL_PATTERN},
        });
        let rows = [
            (json!({"a": 2}), "/a const: 1 was expected"),
            (json!({"b": [2]}), "/b contains: None"),
            (json!({"c": {"long": 1}}), "/c propertyNames: "),
            (json!({"d": 1}), "/d exclusiveMinimum: value is less"),
            (json!({"e": "hunter2"}), "/e pattern: value does not match \"^x+$\""),
            (json!({"f": "\0"}), "/f pattern: must not contain NUL"),
        ];
        for (fields_given, expected) in rows {
            let mut body = json!({"email": "ada@example.com", "password": "p"});
            body.as_object_mut().unwrap().extend(fields_given.as_object().unwrap().clone());
            let Violation { path, keyword, message } = first(&fields, body);
            let found = format!("{path} {keyword}: {message}");
            assert!(found.starts_with(expected), "{found}");
        }
    }

    #[test]
    fn messages_never_repeat_a_password() {
        for password in [json!("hunter2"), json!("hunter2\u{0}hunter2"), json!(["hunter2"])] {
            let body = json!({"name": "n", "email": "a@b.co", "password": password});
            let found = violations(Schema::Basic, body);
            assert!(!found.is_empty());
            assert!(!found.concat().contains("hunter2"), "{found:?}");
        }
    }

    #[test]
    fn mistakes_that_are_often_made_are_told() {
        let message = |body: &str| match parse_object(body.as_bytes()) {
            Err(Error::InvalidJson(message)) => message,
            other => panic!("{other:?}"),
        };
        assert!(message("name=Ada&email=ada%40example.com").contains("looks like a form"));
        assert!(!message("=x").contains("form") && !message("{=").contains("form"));
        assert!(message("'{\"name\":\"Ada\"}'").contains("single quote"));
        assert_eq!(message("\u{feff}"), "the body is empty");
        let bytes = |body: &[u8]| parse_object(body).unwrap_err().answer().value()["message"].clone();
        for utf16 in [&b"\xff\xfe{\0}\0"[..], b"\xfe\xff\0{\0}", b"{\0}\0", b"\0{\0}"] {
            assert_eq!(bytes(utf16), "the body is UTF-16; send it as UTF-8");
        }
        assert_eq!(bytes(b"\x1f\x8b\x08\0"), "the body is compressed with gzip; send plain JSON");
        assert_eq!(bytes(b"{\"name\":\"J\xfcrgen\"}"), "the body is not UTF-8");
        let found = violations(Schema::Basic, json!({"name": "n", "email": "Ada <ada@example.com>"}));
        assert!(found[0].contains("display name"), "{found:?}");
    }

    #[test]
    fn bodies_that_are_no_objects() {
        for body in ["", " ", "{", "[]", "1", "null", "\"x\"", "{\"a\":1}x", "{'a':1}", "\u{feff}\u{feff}{}"]
        {
            assert!(matches!(parse_object(body.as_bytes()), Err(Error::InvalidJson(_))), "{body}");
        }
        assert!(parse_object(b"{\"name\":\"\xff\"}").is_err());
        assert!(parse_object("[".repeat(100_000).as_bytes()).is_err());
        assert!(parse_object("\u{feff}{}".as_bytes()).unwrap().is_empty());
        let last = parse_object(br#"{"name":"a","name":"b"}"#).unwrap();
        assert_eq!(last["name"], "b");
    }
}
