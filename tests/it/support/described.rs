//! Holds answers against `schemas/openapi.json`: nothing is answered that it does not describe.

use super::Answer;
use jsonschema::Validator;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex},
};

/// The description, without the schemas of requests, which are files of their own. Those of answers are closed, and have times
/// in microseconds: the description lets later versions add members.
pub static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| {
    let mut document: Value =
        serde_json::from_str(include_str!("../../../schemas/openapi.json")).expect("it is JSON");
    let schemas = document["components"]["schemas"].as_object_mut().expect("it has schemas");
    schemas.retain(|_, schema| schema["$ref"].is_null());
    for schema in schemas.values_mut().filter(|schema| schema["properties"].is_object()) {
        schema["additionalProperties"] = false.into();
    }
    schemas["Timestamp"]["pattern"] = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$".into();
    document
});

/// Fields that HTTP itself describes, and those of every answer.
const OF_HTTP: [&str; 7] = [
    "Date",
    "Content-Type",
    "Content-Length",
    "Connection",
    "Keep-Alive",
    "X-Content-Type-Options",
    "Cache-Control",
];

/// Panics where the description does not have this answer to such a request.
pub fn check_described(method: &str, target: &str, answer: &Answer) {
    let is_page = target.split('?').next() == Some("/ui");
    // The page for people is not among what machines are told.
    if answer.status < 200 || (is_page && answer.status < 400) {
        return;
    }
    let status = answer.status.to_string();
    let what = || format!("the answer to {method} {target} is not described: {answer:?}");
    // A preflight is answered as that of the path without further slashes.
    let meant = target.trim_end_matches('/').replace("//", "/");
    let operation =
        operation(method, target).or_else(|| operation(method, &meant).filter(|_| status == "204"));
    let response = match (operation, answer.status) {
        (Some(operation), _) => resolve(&operation["responses"][&status]),
        // Every method of a path is described.
        (None, 405) => {
            assert!(answer.header("Allow").is_some(), "{}", what());
            let is_told = method == "HEAD" || answer.body == "{\"error\":\"Method not allowed\"}\n";
            assert!(is_told, "{}", what());
            return;
        }
        // A path or a method that is not served: one of the refusals that are described for another.
        (None, 400..) => resolve(&DESCRIPTION["paths"]["/users/{id}"]["put"]["responses"][&status]),
        (None, _) => &Value::Null,
    };
    assert!(!response.is_null(), "{}", what());
    check_headers(response, answer, &what);
    let content = response["content"].as_object().and_then(|types| types.iter().next());
    match content {
        None => assert_eq!(answer.body, "", "{}", what()),
        Some((media_type, content)) => {
            assert_eq!(answer.header("Content-Type"), Some(media_type.as_str()), "{}", what());
            if method != "HEAD" && media_type == "application/json" {
                let validator = validator(&content["schema"]);
                let errors: Vec<String> =
                    validator.iter_errors(&answer.json()).map(|error| error.to_string()).collect();
                assert!(errors.is_empty(), "{errors:?}: {}", what());
                check_text(content, &answer.json(), &what);
            }
        }
    }
}

/// The text of an error is one of the examples', and an answer has no member that the example lacks.
fn check_text(content: &Value, body: &Value, what: &dyn Fn() -> String) {
    if content["schema"]["$ref"] != "#/components/schemas/Problem" {
        return;
    }
    let examples = content["examples"].as_object().into_iter().flatten();
    let mut bodies = examples.map(|(_, example)| &example["value"]);
    let example = bodies.find(|example| example["error"] == body["error"]);
    let example = example.unwrap_or_else(|| panic!("no example has this text: {}", what()));
    let mut members = body.as_object().into_iter().flatten();
    assert!(members.all(|(name, _)| !example[name].is_null()), "the example lacks a member: {}", what());
}

fn check_headers(response: &'static Value, answer: &Answer, what: &dyn Fn() -> String) {
    let described = response["headers"].as_object();
    let of_name = |name: &str| {
        let mut described = described.into_iter().flatten();
        described.find(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, header)| resolve(header))
    };
    for (name, value) in &answer.headers {
        let of_http = OF_HTTP.iter().any(|field| field.eq_ignore_ascii_case(name));
        // CORS header fields, which only browsers read, need no description.
        let is_known = of_http || name == "Vary" || name.starts_with("Access-Control-");
        let schema = of_name(name).map(|header| validator(&header["schema"]));
        assert!(schema.map_or(is_known, |schema| schema.is_valid(&json!(value))), "{name}: {}", what());
    }
    for (name, header) in described.into_iter().flatten() {
        let required = resolve(header)["required"] == true;
        assert!(!required || answer.header(name).is_some(), "{name} is missing: {}", what());
    }
}

/// The operation of a request, if there is one.
fn operation(method: &str, target: &str) -> Option<&'static Value> {
    let path = target.split('?').next().unwrap_or_default();
    // An encoded slash does not divide a path.
    let path = percent_decode_str(&path.replace("%2F", "-")).decode_utf8_lossy().into_owned();
    let template = match path.as_str() {
        "/users" | "/users/authenticate" => path.as_str(),
        path => match path.strip_prefix("/users/") {
            Some(id) if !id.is_empty() && !id.contains('/') => "/users/{id}",
            Some(_) => return None,
            None => path,
        },
    };
    let method = match method {
        "GET" | "HEAD" | "POST" | "PUT" | "PATCH" | "DELETE" | "OPTIONS" => method.to_ascii_lowercase(),
        _ => return None,
    };
    DESCRIPTION["paths"].get(template)?.get(method)
}

/// Returns the value that a reference leads to, or the value itself if it is no reference.
pub fn resolve(value: &'static Value) -> &'static Value {
    match value["$ref"].as_str().and_then(|target| target.strip_prefix('#')) {
        Some(pointer) => DESCRIPTION.pointer(pointer).expect("a reference within the description"),
        None => value,
    }
}

/// Compiled once for each schema.
fn validator(schema: &Value) -> Arc<Validator> {
    static COMPILED: LazyLock<Mutex<HashMap<String, Arc<Validator>>>> = LazyLock::new(Mutex::default);
    let key = schema.to_string();
    if let Some(validator) = COMPILED.lock().unwrap().get(&key) {
        return validator.clone();
    }
    let mut whole = schema.clone();
    whole["components"] = DESCRIPTION["components"].clone();
    let validator = Arc::new(jsonschema::validator_for(&whole).expect("a schema"));
    COMPILED.lock().unwrap().insert(key, validator.clone());
    validator
}
