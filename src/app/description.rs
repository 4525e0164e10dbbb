//! `GET /openapi.json`: the service described for machines; `GET /`: where to begin.
//!
//! The description is `schemas/openapi.json`, with the very schemas in it that bodies are held against.

use super::validation;
use crate::{
    config::{Config, Schema},
    http::Response,
};
use serde_json::Value;
use std::sync::LazyLock;

/// The answer of one service, made when it is first asked for.
pub(super) type Description = LazyLock<Response, Box<dyn FnOnce() -> Response + Send>>;

/// The answer of `/`: the paths to begin with.
pub(super) fn index(ui: bool) -> Response {
    let mut paths = serde_json::json!({"description": "/openapi.json", "users": "/users"});
    if ui {
        paths["ui"] = "/ui".into();
    }
    Response::json(200, &paths)
}

/// That of a service with these settings.
pub(super) fn of(config: &Config) -> Description {
    let (schema, max_per_page, needs_token) =
        (config.schema, config.max_per_page, config.api_token.is_some());
    LazyLock::new(Box::new(move || Response::json(200, &document(schema, max_per_page, needs_token))))
}

fn document(schema: Schema, max_per_page: u32, needs_token: bool) -> Value {
    const TEXT: &str = include_str!("../../schemas/openapi.json");
    let mut document: Value = serde_json::from_str(TEXT).expect("a file of this crate is JSON");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document["components"]["parameters"]["perPage"]["schema"]["maximum"] = max_per_page.into();
    if needs_token {
        // It describes both ways; here there is one.
        document["security"] = serde_json::json!([{ "token": [] }]);
    }
    let schemas = document["components"]["schemas"].as_object_mut();
    for entry in schemas.expect("it has schemas").values_mut() {
        let name = entry["$ref"].as_str();
        let Some(mut file) = name.and_then(|name| validation::file(name, schema)) else {
            continue;
        };
        // Tools that generate clients would take it for the name, instead of the one that it has here.
        file.as_object_mut().expect("a schema").remove("title");
        // In one schema the older keyword says the same, and more tools know it.
        if entry["unevaluatedProperties"] == false {
            file["additionalProperties"] = false.into();
        }
        *entry = file;
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_that_bodies_are_held_against() {
        for (schema, required) in [(Schema::Basic, 2), (Schema::Strict, 3)] {
            let config = Config { schema, max_per_page: 77, ..Config::default() };
            let document = of(&config).value();
            let schemas = &document["components"]["schemas"];
            assert_eq!(schemas["NewUser"]["required"].as_array().unwrap().len(), required);
            assert_eq!(schemas["NewUser"]["additionalProperties"], false);
            assert!(schemas.as_object().unwrap().values().all(|schema| schema["title"].is_null()));
            assert_eq!(schemas["Authenticate"]["required"].as_array().unwrap().len(), 2);
            assert_eq!(document["components"]["parameters"]["perPage"]["schema"]["maximum"], 77);
            assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        }
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn check(value: &Value, document: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(target)) = map.get("$ref") {
                        let pointer = target.strip_prefix('#').expect("within the document");
                        assert!(document.pointer(pointer).is_some(), "{target}");
                    }
                    map.values().for_each(|value| check(value, document));
                }
                Value::Array(list) => list.iter().for_each(|value| check(value, document)),
                _ => {}
            }
        }
        let document = of(&Config::default()).value();
        check(&document, &document);
    }
}
