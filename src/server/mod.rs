//! The server: starts the stages (tiny_http, the frontend, the workers), connects them, and stops them in order.

mod lanes;
mod relay;
mod system;
mod workers;

use crate::app::{self, App, Verdict};
use crate::config::{Config, Limits};
use crate::frontend::{AnswerWithoutWorker, ClientName, Frontend, Listener, SharedResources};
pub use crate::frontend::{resolve_addresses, shown_address};
use crate::http::{Request, RequestId};
use crate::{db::target::DbTarget, error::StartError};
use lanes::Capacity;
use std::time::{Duration, Instant};
use std::{io, net::SocketAddr, sync::Arc, thread};
pub use system::check_system;
use workers::Workers;
pub use workers::{Fault, HarnessHandler, Intercept, Treatment};

/// The time that workers get at a stop once `STOP_TIMEOUT` is used up: by then they are stuck, or almost done.
const MAX_LAST_WORK_TIME: Duration = Duration::from_millis(300);

/// A running service: a port, some threads, a pool of connections. Stops when it is dropped.
pub struct Server {
    pub(crate) app: Arc<App>,
    base_url: String,
    addr: Option<SocketAddr>,
    /// `None` once the server has stopped.
    frontend: Option<Frontend>,
    workers: Workers,
    drain_delay: Duration,
    stop_timeout: Duration,
}

/// The address of a server that is yet to start: it is bound, and not listened on. For a program that starts a
/// database first, and wants to know before that whether the address is free.
pub struct BoundServer {
    listener: Listener,
    /// Chooses the requests that are made to fail, and the requests to the test harness, in a service for tests.
    pub(crate) intercept: Option<Intercept>,
}

impl BoundServer {
    /// Binds the address of these settings. Blocks for as long as looking a host name up takes.
    ///
    /// # Errors
    /// [`StartError::Config`] and [`StartError::Listen`].
    pub fn bind(config: &Config) -> Result<BoundServer, StartError> {
        config.check()?;
        // Fails for a database address that cannot be used before anything is bound.
        DbTarget::new(config)?;
        let listener = if config.sockets.is_empty() {
            Listener::bind(&config.host, config.port)
        } else {
            Listener::from_fds(config.sockets.iter().map(|socket| socket.try_clone()))
        };
        Ok(BoundServer { listener: listener?, intercept: None })
    }

    /// Starts the server on this address, whatever address `config` has now; otherwise as [`Server::start`].
    ///
    /// `on_broken` is called, once and on a thread of the server's, if a defect ends the thread that serves clients, or
    /// breaks the stream between the stages: the port is closed by then, and the process should be restarted.
    pub fn start(
        self,
        config: Config,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<Server, StartError> {
        let limits = possible_limits(&config)?;
        let (listener, addr) = (&self.listener, self.listener.local_addr());
        let (base_url, is_remote) = (listener.to_string(), listener.is_remote());
        let app = Arc::new(App::open_at(&config, addr.is_some() && !is_remote)?);
        listener.listen()?;
        let stages = self.start_stages(&config, limits, &app, on_broken);
        let (frontend, workers) = stages.map_err(StartError::System)?;
        if config.api_token.is_none() && is_remote {
            log::warn!("other machines can connect, and no token is needed: set API_TOKEN");
        }
        if addr.is_some() && app.ui {
            log::info!("a page for the browser (UI): {base_url}/ui");
        }
        Ok(Server {
            app,
            base_url,
            addr,
            frontend: Some(frontend),
            workers,
            drain_delay: config.limits.drain_delay,
            stop_timeout: config.limits.stop_timeout,
        })
    }

    /// Starts tiny_http, the frontend and the workers, and connects them.
    fn start_stages(
        self,
        config: &Config,
        limits: Limits,
        app: &Arc<App>,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Frontend, Workers)> {
        let (http, stream) = relay::start()?;
        let resources = SharedResources {
            budget: app.operations.budget.clone(),
            answer_without_worker: answer_without_worker(app.clone()),
            metrics: app.metrics.clone(),
        };
        let (frontend, slots) = Frontend::start(self.listener, limits, resources, stream, on_broken)?;
        let capacity = Capacity {
            sessions: config.workers.min(config.db_pool_size as usize),
            hashers: app.operations.max_hashers(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            retry_for: config.limits.statement_timeout(),
        };
        let workers = Workers::start(http, slots, app.clone(), capacity, self.intercept)?;
        let _ = app.metrics.write_other_metrics.set(workers.metrics_writer());
        Ok((frontend, workers))
    }
}

/// Returns the limits of these settings. Lowers `max_connections` to the number that the process has descriptors for.
fn possible_limits(config: &Config) -> Result<Limits, StartError> {
    let (wanted, possible) = (config.limits.max_connections, check_system(config)?);
    if possible < wanted {
        log::warn!(
            "the limit of open descriptors suffices for {possible} connections: raise it (ulimit -n; LimitNOFILE= \
             of a unit), or lower MAX_CONNECTIONS, now {wanted}"
        );
    }
    Ok(Limits { max_connections: possible, ..config.limits.clone() })
}

impl Server {
    /// Binds the address, connects to the database, migrates it, and only then listens.
    ///
    /// Blocks until the service answers: up to `db_connect_timeout` for the database, and as long as its
    /// migrations take. May be called from within an async runtime, whose thread it blocks as well.
    ///
    /// # Errors
    /// Each error is one line, and nothing is left running after it.
    pub fn start(config: Config) -> Result<Server, StartError> {
        BoundServer::bind(&config)?.start(config, || {})
    }

    /// Returns the address of the server, the first if it has several, without a slash at its end:
    /// `http://127.0.0.1:41234`, or `unix:/path`.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Returns the first TCP address of the server; `None` for a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// Returns the service, which answers requests without a socket.
    pub fn app(&self) -> &App {
        &self.app
    }

    /// Stops the server: `/readyz` reports the stop for `drain_delay` (0 s), then the server accepts no client,
    /// answers the requests in flight, and frees the port. Blocks for that delay and at most `stop_timeout` (10 s);
    /// for about a millisecond if no request is in flight. Dropping the server stops it without the delay.
    pub fn stop(self) {
        self.announce_stop();
    }

    /// Makes `/readyz` report for `drain_delay` that the service stops. Blocks for that time.
    pub(crate) fn announce_stop(&self) {
        self.app.announce_stop();
        thread::sleep(self.drain_delay);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.app.announce_stop();
        let deadline = Instant::now() + self.stop_timeout;
        drop(self.frontend.take());
        let left = deadline.saturating_duration_since(Instant::now());
        self.workers.stop(left.max(MAX_LAST_WORK_TIME));
    }
}

/// Returns the function by which the frontend answers `/livez` and `/readyz` without a worker. A worker answers a
/// request with a body, because judging a large body may block.
fn answer_without_worker(app: Arc<App>) -> AnswerWithoutWorker {
    Box::new(move |request: &Request, id: &RequestId| {
        if !request.body.is_empty() || !app::is_answered_at_once(request.path()) {
            return None;
        }
        let cors = app.access.cors(request);
        let asked = app.find_endpoint(request, &cors);
        let label = asked.metrics_label;
        let Verdict::Answer(answer) = app.judge(request, asked, &cors, Some(id)) else { return None };
        // Counts the answer with a time of zero, because such an answer takes only some microseconds.
        app.metrics.count_request(request.method, label, answer.status, Duration::ZERO);
        let (method, status) = (request.method.name(), answer.status);
        log::debug!(
            method = method, path = label, status = status, client:% = ClientName(request.peer), request_id:% = id;
            "{method} {label} {status} at once"
        );
        Some(answer)
    })
}
