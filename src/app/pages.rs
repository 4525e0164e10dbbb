//! The routes whose answers contain no user: health, metrics, the OpenAPI description, and the page for the browser.
//!
//! No function here blocks, because the frontend answers health checks on its only thread.

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

/// Answers `/livez` with 200: the process runs and answers requests.
pub fn answer_livez(_: &App) -> Response {
    Response::json(200, &json!({"status": "ok"})).with("Cache-Control", "no-store")
}

/// Answers `/readyz`: 200 if the database is usable and no stop has begun, otherwise 503 with the reason.
pub fn answer_readyz(app: &App) -> Response {
    let Readiness { problem, silence, .. } = app.prober.readiness();
    let answer = match find_unready_reason(app, problem) {
        // Adds `Age`, the time since the database was last found ready. Until the first health check the database is
        // probed only once a minute, so a client that needs a recent result sends a second health check.
        None => Response::json(200, &json!({"status": "ready"})).with("Age", silence.as_secs().to_string()),
        Some(reason) => Response::json(503, &UnreadyBody { status: "unready", reason }),
    };
    answer.with("Cache-Control", "no-store")
}

/// The body of an answer 503 to `/readyz`.
#[derive(Serialize)]
struct UnreadyBody {
    status: &'static str,
    reason: &'static str,
}

/// Returns the reason why clients should not send requests to the service, if there is one. `db_problem` is the
/// problem that the last probe of the database has found.
fn find_unready_reason(app: &App, db_problem: Option<&'static str>) -> Option<&'static str> {
    if app.is_stopping.load(Ordering::Relaxed) { Some("the service is stopping") } else { db_problem }
}

/// Answers `/metrics` with all metrics in the text format of Prometheus. Takes less than a millisecond.
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
    Response { status: 200, body: text.text.into(), ..Response::no_content() }
        .with("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        .with("Cache-Control", "no-store")
}

/// Answers `/` with the paths that a new client may begin with, such as `/users`.
pub fn answer_index(app: &App) -> Response {
    let mut paths = json!({"description": "/openapi.json", "users": "/users"});
    if app.has_ui {
        paths["ui"] = "/ui".into();
    }
    Response::json(200, &paths)
}

/// Answers `/openapi.json` with the OpenAPI description of the service.
pub fn answer_openapi(app: &App) -> Response {
    let operations = &app.operations;
    let needs_token = app.access.token_digests.is_some();
    let make = || make_openapi(operations.schemas.variant, operations.max_per_page, needs_token);
    app.openapi_answer.get_or_init(|| Response::json(200, &make())).clone()
}

/// Returns the OpenAPI description of a service with these settings: the file `schemas/openapi.json`, in which each
/// reference to the schema of a body is replaced by the schema that the service validates such bodies against.
fn make_openapi(schema: Schema, max_per_page: u32, needs_token: bool) -> Value {
    const OPENAPI_JSON: &str = include_str!("../../schemas/openapi.json");
    let mut document: Value = serde_json::from_str(OPENAPI_JSON).expect("a file of this crate is JSON");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document["components"]["parameters"]["perPage"]["schema"]["maximum"] = max_per_page.into();
    document["components"]["parameters"]["ids"]["schema"]["maxItems"] = max_per_page.into();
    if needs_token {
        // Requires a token. The file alone requires none, because it also describes services without a token.
        document["security"] = json!([{ "token": [] }]);
    }
    let schemas = document["components"]["schemas"].as_object_mut();
    for entry in schemas.expect("it has schemas").values_mut() {
        let name = entry["$ref"].as_str();
        let Some(mut file) = name.and_then(|name| validation::find_schema(name, schema)) else { continue };
        // Removes `title`, because generators of clients would use it as the schema's name instead of the schema's key.
        // Removes `$schema`, because the OpenAPI description says once which dialect of JSON Schema it uses.
        file.as_object_mut().expect("a schema").retain(|member, _| member != "title" && member != "$schema");
        // Writes `additionalProperties` instead of `unevaluatedProperties`, because more tools know it. Both have the
        // same meaning in a schema that is not combined with another one.
        if entry["unevaluatedProperties"] == false {
            file["additionalProperties"] = false.into();
        }
        *entry = file;
    }
    document
}

/// The HTML of the page for the browser, with its only script and its only style inline.
const UI_PAGE: &str = include_str!("../../web/ui.html");

/// The Content-Security-Policy of the page for the browser. It allows the page's own script and style, requests to the
/// service, and images inside the page: an empty image keeps browsers from requesting an icon. It forbids scripts to
/// turn text into HTML.
static CONTENT_SECURITY_POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(hash_page_element);
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; \
         img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
});

/// Answers `/ui` with the page for the browser, into which the settings are written that the page's script needs.
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

/// Returns the SHA-256 of the text in the page's only element `<name>`, in Base64, as the Content-Security-Policy has
/// it.
fn hash_page_element(name: &str) -> String {
    let (_, rest) = UI_PAGE.split_once(&format!("<{name}>")).expect("the page has it");
    let (text, _) = rest.split_once(&format!("</{name}>")).expect("it ends");
    Base64::encode_string(&Sha256::digest(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_that_bodies_are_held_against() {
        for (schema, required) in [(Schema::Basic, 2), (Schema::Strict, 3)] {
            let document = make_openapi(schema, 77, false);
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
        let document = make_openapi(Schema::Basic, 1000, false);
        check(&document, &document);
    }
}
