//! The routes that answer by themselves, without a user: health, figures, the description for machines, the page for the
//! browser, OPTIONS.
//!
//! Never blocks, as the frontend asks for the health on its only thread.

use super::fields::ACCEPT_PATCH;
use super::routes::{self, Endpoint, Route, allow};
use super::{App, validation};
use crate::config::{Config, Schema};
use crate::db::probe::Prober;
use crate::error::Error;
use crate::http::{Method, Request, RequestId, Response, log_line};
use crate::metrics::Text;
use base64ct::{Base64, Encoding};
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The health that `/livez` and `/readyz` report, from what is known: the frontend asks on its only thread.
pub struct Health {
    prober: Prober,
    stopping: AtomicBool,
}

impl Health {
    /// Ready, until the prober or [`Health::stop`] says otherwise.
    pub fn new(prober: Prober) -> Health {
        Health { prober, stopping: AtomicBool::new(false) }
    }

    /// Reports the service as unready from now on.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Answers `/livez`. Never blocks.
    pub fn live(&self) -> Response {
        Response::json(200, &json!({"status": "ok"})).with("Cache-Control", "no-store")
    }

    /// Answers `/readyz`. Never blocks.
    pub fn ready(&self) -> Response {
        let (reason, age) = self.prober.readiness();
        let answer = match self.unready(reason) {
            // After a silence this may be old: a client that needs to know better asks once more.
            None => Response::json(200, &json!({"status": "ready"})).with("Age", age.as_secs().to_string()),
            Some(reason) => Response::json(503, &Unready { status: "unready", reason }),
        };
        answer.with("Cache-Control", "no-store")
    }

    /// Returns the reason why the service should get no requests, if there is one.
    fn unready(&self, database: Option<&'static str>) -> Option<&'static str> {
        if self.stopping.load(Ordering::Relaxed) { Some("the service is stopping") } else { database }
    }
}

#[derive(Serialize)]
struct Unready {
    status: &'static str,
    reason: &'static str,
}

/// Answers a request for the health of the service; `None` for any other.
pub(crate) fn answer_at_once(health: &Health, method: Method, path: &str) -> Option<Response> {
    match routes::find(method, path, true).map(|asked| asked.endpoint) {
        Ok(Endpoint::Live) => Some(health.live()),
        Ok(Endpoint::Ready) => Some(health.ready()),
        Ok(Endpoint::Options(routes)) => Some(options(routes)),
        Ok(_) => None,
        Err(error) => Some(error.answer()),
    }
}

/// Answers a request of a page. `id` is the request's, for the log.
pub(super) fn answer(app: &App, page: Endpoint, request: &Request, id: Option<&RequestId>) -> Response {
    match page {
        Endpoint::Live => app.health.live(),
        Endpoint::Ready => app.health.ready(),
        Endpoint::Description => Response::clone(&app.rules.description),
        Endpoint::Index => index(app.rules.ui),
        Endpoint::Ui => ui(),
        Endpoint::Options(routes) => {
            if let Some(origin) = request.header("origin")
                && !app.rules.access.cors(request).is_allowed()
            {
                // The browser sends no other request of a page of this origin.
                let origin: String = origin.chars().take(100).collect();
                let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                log_line(log::Level::Info, id, line);
            }
            options(routes)
        }
        Endpoint::Metrics => figures(app),
        command => Error::Internal(format!("{command:?} is no page")).into_response(id),
    }
}

/// Answers `/metrics` with all figures, as Prometheus reads them. Takes less than a millisecond.
fn figures(app: &App) -> Response {
    let mut text = Text::default();
    app.metrics.write(&mut text);
    let prober = &app.health.prober;
    let ready = u8::from(app.health.unready(prober.readiness().0).is_none());
    text.gauge("userd_ready", "Whether /readyz says that the service is ready.", ready);
    let read_only = u8::from(prober.is_read_only());
    text.gauge("userd_database_read_only", "Whether the database takes no changes.", read_only);
    text.gauge("userd_memory_held_bytes", "Memory that is held for clients.", app.budget.held());
    text.gauge("userd_memory_budget_bytes", "The most memory that may be.", app.budget.limit());
    app.users.pool.write_figures(&mut text, app.metrics.lock_retries.load(Ordering::Relaxed));
    Response { status: 200, body: text.end().into(), ..Response::no_content() }
        .with("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        .with("Cache-Control", "no-store")
}

/// Answers OPTIONS of these routes.
pub(super) fn options(routes: &'static [Route]) -> Response {
    let response = Response::no_content().with("Allow", allow(routes));
    match routes {
        [route] if route.serves(Method::Patch) => response.with("Accept-Patch", ACCEPT_PATCH),
        _ => response,
    }
}

/// The answer of `/openapi.json`, made when it is first asked for.
pub(super) type Description = LazyLock<Response, Box<dyn FnOnce() -> Response + Send>>;

/// The answer of `/`: the paths to begin with.
fn index(ui: bool) -> Response {
    let mut paths = json!({"description": "/openapi.json", "users": "/users"});
    if ui {
        paths["ui"] = "/ui".into();
    }
    Response::json(200, &paths)
}

/// Returns the description of a service with these settings: `schemas/openapi.json`, with the very schemas in it that
/// bodies are checked against.
pub(super) fn description(config: &Config) -> Description {
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
        // The file describes services with and without a token.
        document["security"] = json!([{ "token": [] }]);
    }
    let schemas = document["components"]["schemas"].as_object_mut();
    for entry in schemas.expect("it has schemas").values_mut() {
        let name = entry["$ref"].as_str();
        let Some(mut file) = name.and_then(|name| validation::file(name, schema)) else {
            continue;
        };
        // Tools that generate clients would take it for the name, instead of the one that it has here.
        file.as_object_mut().expect("a schema").remove("title");
        // For a schema that is not combined with others, the older keyword means the same, and more tools know it.
        if entry["unevaluatedProperties"] == false {
            file["additionalProperties"] = false.into();
        }
        *entry = file;
    }
    document
}

/// The page for the browser: one script and one style, both inline.
const PAGE: &str = include_str!("../../web/ui.html");

/// Admits that script and that style, and requests to the service itself; nothing else, and no text as markup. Images
/// within the page alone: an empty one keeps browsers from asking for an icon.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let [script, style] = ["script", "style"].map(|element| digest(inline(element)));
    format!(
        "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; \
         img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'"
    )
});

/// Answers `/ui`: the page.
fn ui() -> Response {
    Response { status: 200, body: PAGE.into(), ..Response::no_content() }
        .with("Content-Type", "text/html; charset=utf-8")
        .with("Content-Security-Policy", POLICY.as_str())
        .with("Cross-Origin-Opener-Policy", "same-origin")
        .with("Cross-Origin-Resource-Policy", "same-origin")
        .with("Referrer-Policy", "no-referrer")
}

fn digest(text: &str) -> String {
    Base64::encode_string(&Sha256::digest(text))
}

/// Returns the text of the page's only element of this name.
fn inline(element: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("<{element}>")).expect("the page has it");
    rest.split_once(&format!("</{element}>")).expect("it ends").0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schemas_that_bodies_are_held_against() {
        for (schema, required) in [(Schema::Basic, 2), (Schema::Strict, 3)] {
            let config = Config { schema, max_per_page: 77, ..Config::default() };
            let document = description(&config).value();
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
        let document = description(&Config::default()).value();
        check(&document, &document);
    }
}
