//! A server without a database: each request is answered 503. For a program to which a supervisor has passed a socket:
//! clients can connect before the database can be used, and would otherwise wait for an answer. Knows no route.

use super::{BoundServer, address, allowance};
use crate::{
    budget::Budget,
    config::{Config, Limits},
    db::open::Opening,
    error::Error,
    frontend::{Frontend, Resources, Served},
    metrics::Metrics,
    reason::Reason,
    start_error::StartError,
};
use std::{iter, os::unix::net::UnixStream, time::Duration};

/// Connections at once: each is answered as soon as its request is complete.
const MOST_CONNECTIONS: usize = 128;

/// How long clients may take that are in the middle of a request when this ends.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers each request 503 with `Retry-After`, until it is stopped or dropped.
pub struct RefusingServer {
    frontend: Frontend,
    /// No request is passed on.
    _unread: UnixStream,
}

impl RefusingServer {
    /// Listens on the socket of these settings, which stays open. Does not block.
    ///
    /// # Errors
    /// As of [`BoundServer::bind`].
    pub fn start(config: &Config) -> Result<RefusingServer, StartError> {
        let possible = allowance::check(config)?;
        let BoundServer(bound) = BoundServer::bind(config)?;
        let listener = bound.listen().map_err(|error| StartError::Listen(address(config), error))?;
        let limits = Limits {
            max_connections: possible.min(MOST_CONNECTIONS),
            stop_timeout: STOP_TIMEOUT,
            ..config.limits.clone()
        };
        let resources = Resources {
            budget: Budget::new(limits.memory_budget),
            on_idle: Box::new(|| ()),
            served: Served { fields: &[], at_once: &["*"] },
            answer_at_once: Box::new(|_, _| Some(Error::Busy(Reason::Broken).into_response(None))),
            recorder: Metrics::new(&[], iter::empty()).recorder(),
        };
        let open = || {
            let (private, unread) = UnixStream::pair()?;
            let (frontend, _) = Frontend::open(listener, limits, resources, private, || (), || ())?;
            Ok(RefusingServer { frontend, _unread: unread })
        };
        open().map_err(StartError::System)
    }

    /// Stops listening, and answers what has begun to arrive. Blocks for a second at the most.
    pub fn stop(self) {
        self.frontend.stop();
    }
}

/// Whether the database of these settings can be connected to, without a line in the log. Blocks for up to two seconds
/// for each of its addresses.
///
/// # Errors
/// [`StartError::Config`] and [`StartError::System`] as of a start, [`StartError::Database`] while it cannot.
pub fn reach(config: &Config) -> Result<(), StartError> {
    Opening::new(config)?.try_connect()
}
