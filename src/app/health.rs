//! `/livez` and `/readyz`: whether the process serves, and whether it should get requests.
//!
//! Answers from what is known, so that the frontend may ask it on its only thread. Knows no socket; the database is
//! asked elsewhere ([`Prober`]).

use crate::{
    db::probe::{Prober, Readiness},
    error::Error,
    http::{Method, Response, percent_decode},
};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};

/// What both routes serve.
const ALLOW: &str = "GET, HEAD, OPTIONS";

/// The state that the routes tell.
pub struct Health {
    prober: Prober,
    stopping: AtomicBool,
}

/// The routes.
#[derive(Clone, Copy)]
enum Route {
    Live,
    Ready,
}

impl Health {
    /// Ready, until the prober or [`Health::stop`] says otherwise.
    pub fn new(prober: Prober) -> Health {
        Health { prober, stopping: AtomicBool::new(false) }
    }

    /// From now on the service is unready.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// The answer to a request for one of the routes; `None` for any other. Never blocks.
    pub fn answer(&self, method: Method, path: &str) -> Option<Response> {
        let route = Route::of(path)?;
        let answer = match (method, route) {
            (Method::Get | Method::Head, Route::Live) => Response::json(200, &Body::of("ok")),
            (Method::Get | Method::Head, Route::Ready) => self.ready(),
            (Method::Options, _) => return Some(Response::no_content().with("Allow", ALLOW)),
            _ => return Some(Response::from(&Error::MethodNotAllowed(ALLOW))),
        };
        Some(answer.with("Cache-Control", "no-store"))
    }

    /// Why the service should get no requests.
    pub fn unready(&self) -> Option<&'static str> {
        self.reason(self.prober.readiness().0)
    }

    /// Whether the database takes no changes: reads are served, and the service is ready.
    pub fn database_is_read_only(&self) -> bool {
        self.prober.is_read_only()
    }

    fn reason(&self, readiness: Readiness) -> Option<&'static str> {
        match readiness {
            _ if self.stopping.load(Ordering::Relaxed) => Some("the service is stopping"),
            Readiness::Ready => None,
            Readiness::Silent => Some("the database does not answer"),
            Readiness::OtherSchema => Some("the database's schema is not the one expected"),
        }
    }

    fn ready(&self) -> Response {
        let (readiness, age) = self.prober.readiness();
        match self.reason(readiness) {
            // After a silence this may be old: a client that needs to know better asks once more.
            None => Response::json(200, &Body::of("ready")).with("Age", age.as_secs().to_string()),
            reason => Response::json(503, &Body { status: "unready", reason }),
        }
    }
}

#[derive(Serialize)]
struct Body {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl Body {
    fn of(status: &'static str) -> Body {
        Body { status, reason: None }
    }
}

impl Route {
    fn of(path: &str) -> Option<Route> {
        let name = path.strip_prefix('/')?;
        let route = |name: &str| match name {
            "livez" => Some(Route::Live),
            "readyz" => Some(Route::Ready),
            _ => None,
        };
        match name.contains('%') {
            false => route(name),
            true => route(&percent_decode(name)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes() {
        let rows = [
            ("/livez", true),
            ("/readyz", true),
            ("/%6civez", true),
            ("/livez/", false),
            ("livez", false),
            ("/Livez", false),
            ("/users", false),
            ("/%", false),
            ("/", false),
            ("", false),
            ("*", false),
        ];
        for (path, expected) in rows {
            assert_eq!(Route::of(path).is_some(), expected, "{path}");
        }
    }
}
