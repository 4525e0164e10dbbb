//! `/livez` and `/readyz`: whether the process serves, and whether it should get requests.
//!
//! Answers from what is known, so that the frontend may ask it on its only thread. Knows no socket; the database is
//! asked elsewhere ([`Prober`]).

use super::routes::Probe;
use crate::{
    db::probe::{Prober, Readiness},
    http::Response,
};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state that the routes tell.
pub struct Health {
    prober: Prober,
    stopping: AtomicBool,
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

    /// The answer to one of the questions. Never blocks.
    pub fn answer(&self, probe: Probe) -> Response {
        let answer = match probe {
            Probe::Live => Response::json(200, &Body::of("ok")),
            Probe::Ready => self.ready(),
        };
        answer.with("Cache-Control", "no-store")
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
            Readiness::MissingTable => Some("a table is missing in the database"),
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
