//! The routes whose answers hold no user: health, metrics, the OpenAPI description, and the page for the browser.
//!
//! No function here blocks, because the frontend asks for the health on its only thread.

use super::App;
use crate::config::Schema;
use crate::db::probe::Readiness;
use crate::http::Response;
use crate::input::validation;
use crate::metrics::MetricsText;
use base64ct::{Base64, Encoding};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;
use std::sync::atomic::Ordering;

/// Answers `/livez`. Never blocks.
pub fn answer_livez(_: &App) -> Response {
    Response::json(200, &json!({"status": "ok"})).with("Cache-Control", "no-store")
}

/// Answers `/readyz`. Never blocks.
pub fn answer_readyz(app: &App) -> Response {
    let Readiness { problem, age, .. } = app.prober.readiness();
    let answer = match find_unready_reason(app, problem) {
        // Tells how long ago the database was found ready. That may be long ago if no client has asked meanwhile; a
        // client that needs a recent result asks again.
        None => Response::json(200, &json!({"status": "ready"})).with("Age", age.as_secs().to_string()),
        Some(reason) => Response::json(503, &UnreadyAnswer { status: "unready", reason }),
    };
    answer.with("Cache-Control", "no-store")
}

#[derive(Serialize)]
struct UnreadyAnswer {
    status: &'static str,
    reason: &'static str,
}

/// Returns the reason why clients should send the service no requests, if there is one. `database` is the reason that
/// the prober of the database has found.
fn find_unready_reason(app: &App, database: Option<&'static str>) -> Option<&'static str> {
    if app.stopping.load(Ordering::Relaxed) { Some("the service is stopping") } else { database }
}

/// Answers `/metrics` with all metrics, as Prometheus reads them. Takes less than a millisecond.
pub fn answer_metrics(app: &App) -> Response {
    let mut text = MetricsText::default();
    app.metrics.write(&mut text);
    let Readiness { problem, is_read_only, .. } = app.prober.readiness();
    let [ready, read_only] = [find_unready_reason(app, problem).is_none(), is_read_only].map(u8::from);
    text.add_gauge("userd_ready", "Whether /readyz says that the service is ready.", ready);
    text.add_gauge("userd_database_read_only", "Whether the database takes no changes.", read_only);
    let held = app.operations.budget.held_bytes();
    text.add_gauge("userd_memory_held_bytes", "Memory that is held for clients.", held);
    text.add_gauge("userd_memory_budget_bytes", "The most memory that may be.", app.operations.budget.limit);
    app.operations.pool.write_metrics(&mut text, app.metrics.lock_retries.load(Ordering::Relaxed));
    Response { status: 200, body: text.written.into(), ..Response::no_content() }
        .with("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        .with("Cache-Control", "no-store")
}

/// Answers `/`: the paths to begin with.
pub fn answer_index(app: &App) -> Response {
    let mut paths = json!({"description": "/openapi.json", "users": "/users"});
    if app.ui {
        paths["ui"] = "/ui".into();
    }
    Response::json(200, &paths)
}

/// Answers `/openapi.json`: the OpenAPI description of the service.
pub fn answer_description(app: &App) -> Response {
    let operations = &app.operations;
    let needs_token = app.access.tokens.is_some();
    let make = || make_description(operations.schemas.variant, operations.max_per_page, needs_token);
    app.openapi_answer.get_or_init(|| Response::json(200, &make())).clone()
}

/// Returns the OpenAPI description of a service with these settings: `schemas/openapi.json`, in which each reference to
/// a schema of bodies is replaced by the schema that bodies are validated against.
fn make_description(schema: Schema, max_per_page: u32, needs_token: bool) -> Value {
    const OPENAPI_JSON: &str = include_str!("../../schemas/openapi.json");
    let mut document: Value = serde_json::from_str(OPENAPI_JSON).expect("a file of this crate is JSON");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document["components"]["parameters"]["perPage"]["schema"]["maximum"] = max_per_page.into();
    document["components"]["parameters"]["ids"]["schema"]["maxItems"] = max_per_page.into();
    if needs_token {
        // Requires the token in the OpenAPI description: the file describes services with and without a token.
        document["security"] = json!([{ "token": [] }]);
    }
    let schemas = document["components"]["schemas"].as_object_mut();
    for entry in schemas.expect("it has schemas").values_mut() {
        let name = entry["$ref"].as_str();
        let Some(mut file) = name.and_then(|name| validation::find_schema(name, schema)) else { continue };
        // Removes `title`, so that tools that generate clients name the schema by its key in the OpenAPI description.
        // Removes `$schema`, because the OpenAPI description names the dialect of all its schemas.
        file.as_object_mut().expect("a schema").retain(|member, _| member != "title" && member != "$schema");
        // Says `additionalProperties` instead of `unevaluatedProperties`, as more tools know it. Both mean the same in
        // a schema that is not combined with another one.
        if entry["unevaluatedProperties"] == false {
            file["additionalProperties"] = false.into();
        }
        *entry = file;
    }
    document
}

/// The page for the browser: one script and one style, both inline.
const UI_PAGE: &str = include_str!("../../web/ui.html");

/// The Content-Security-Policy of the page. It admits this script, this style and requests to the service, no text as
/// markup, and only images within the page: an empty image keeps browsers from asking for an icon.
static CONTENT_SECURITY_POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(digest_element);
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; \
         img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
});

/// Answers `/ui`: the page, with the settings that it has to know.
pub fn answer_ui(app: &App) -> Response {
    let operations = &app.operations;
    let schema =
        validation::find_schema("create-user.basic.json", operations.schemas.variant).unwrap_or_default();
    let settings = json!({"maxPerPage": operations.max_per_page, "required": schema["required"]});
    let page = UI_PAGE.replacen("data-settings='{}'", &format!("data-settings='{settings}'"), 1);
    Response { status: 200, body: page.into(), ..Response::no_content() }
        .with("Content-Type", "text/html; charset=utf-8")
        .with("Content-Security-Policy", CONTENT_SECURITY_POLICY.as_str())
        .with("Cross-Origin-Opener-Policy", "same-origin")
        .with("Cross-Origin-Resource-Policy", "same-origin")
        .with("Referrer-Policy", "no-referrer")
}

/// Returns the digest of the text of the page's only element of this name.
fn digest_element(element: &str) -> String {
    let (_, rest) = UI_PAGE.split_once(&format!("<{element}>")).expect("the page has it");
    let (text, _) = rest.split_once(&format!("</{element}>")).expect("it ends");
    Base64::encode_string(&Sha256::digest(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_that_bodies_are_held_against() {
        for (schema, required) in [(Schema::Basic, 2), (Schema::Strict, 3)] {
            let document = make_description(schema, 77, false);
            let schemas = &document["components"]["schemas"];
            assert_eq!(schemas["UserToCreate"]["required"].as_array().unwrap().len(), required);
            assert_eq!(schemas["UserToCreate"]["additionalProperties"], false);
            assert!(schemas.as_object().unwrap().values().all(|schema| schema["title"].is_null()));
            assert_eq!(schemas["Authenticate"]["required"].as_array().unwrap().len(), 2);
            assert_eq!(document["components"]["parameters"]["perPage"]["schema"]["maximum"], 77);
            assert_eq!(document["components"]["parameters"]["ids"]["schema"]["maxItems"], 77);
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
        let document = make_description(Schema::Basic, 1000, false);
        check(&document, &document);
    }
}
