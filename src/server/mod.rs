//! The server: starts the stages of a request (the frontend, tiny_http, the workers), connects them, and stops them in
//! order.

mod lanes;
mod system_limits;
mod ticket_stream;
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
pub use system_limits::raise_limits_for_connections;
use workers::Workers;
pub use workers::{ControlHandler, Fault, InterceptHook, Interception};

/// The least time for which a stop waits for the workers, even if `STOP_TIMEOUT` is over: workers that still run then
/// are stuck, or almost done.
const MIN_STOP_WAIT: Duration = Duration::from_millis(300);

/// A running service: an address, some threads, and a pool of database connections. Dropping this value stops the
/// service.
pub struct Server {
    pub(crate) app: Arc<App>,
    base_url: String,
    addr: Option<SocketAddr>,
    /// The frontend; `None` once the server has stopped.
    frontend: Option<Frontend>,
    workers: Workers,
    /// How long `/readyz` announces a stop before the server accepts no more clients.
    drain_delay: Duration,
    /// The longest time that a stop waits for the requests in flight.
    stop_timeout: Duration,
}

/// A server whose address is bound, but which does not listen yet. A program that has to start a database binds the
/// address first, so that it fails before it starts the database if the address is in use.
pub struct BoundServer {
    listener: Listener,
    /// The function that chooses the requests to intercept in a service for tests; `None` in any other service.
    pub(crate) intercept: Option<InterceptHook>,
}

impl BoundServer {
    /// Binds the address that the settings name. Blocks while a host name is looked up.
    ///
    /// # Errors
    /// [`StartError::Config`] and [`StartError::Listen`].
    pub fn bind(config: &Config) -> Result<BoundServer, StartError> {
        config.check()?;
        // Fails here if the address of the database is wrong, before anything is bound.
        DbTarget::new(config)?;
        let listener = if config.sockets.is_empty() {
            Listener::bind(&config.host, config.port)
        } else {
            Listener::from_fds(config.sockets.iter().map(|socket| socket.try_clone()))
        };
        Ok(BoundServer { listener: listener?, intercept: None })
    }

    /// Starts the server as [`Server::start`] does, but on the address that is already bound: `host` and `port` of
    /// `config` have no effect.
    ///
    /// `on_broken` is called if a defect ends the thread that serves clients, or breaks the stream to tiny_http. The
    /// port is closed by then, and the process should be restarted. It is called once, on a thread of the server.
    pub fn start(
        self,
        config: Config,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<Server, StartError> {
        let limits = fit_max_connections(&config)?;
        let (listener, addr) = (&self.listener, self.listener.local_addr());
        let (base_url, accepts_remote_clients) = (listener.to_string(), listener.accepts_remote_clients());
        let app = Arc::new(App::open_for_server(&config, addr.is_some() && !accepts_remote_clients)?);
        listener.listen()?;
        let stages = self.start_threads(&config, limits, &app, on_broken);
        let (frontend, workers) = stages.map_err(StartError::System)?;
        if config.api_token.is_none() && accepts_remote_clients {
            log::warn!("other machines can connect, and no token is needed: set API_TOKEN");
        }
        if addr.is_some() && app.has_ui {
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

    /// Starts tiny_http, the frontend and the workers, and connects them to each other.
    fn start_threads(
        self,
        config: &Config,
        limits: Limits,
        app: &Arc<App>,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Frontend, Workers)> {
        let (http, stream) = ticket_stream::start_tiny_http()?;
        let resources = SharedResources {
            budget: app.operations.budget.clone(),
            answer_without_worker: make_health_check(app.clone()),
            metrics: app.metrics.clone(),
        };
        let (frontend, slots) = Frontend::start(self.listener, limits, resources, stream, on_broken)?;
        let capacity = Capacity {
            sessions: config.workers.min(config.db_pool_size as usize),
            hashers: app.operations.max_hashing_threads(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            max_retry_time: config.limits.statement_timeout(),
        };
        let workers = Workers::start(http, slots, app.clone(), capacity, self.intercept)?;
        let _ = app.metrics.write_other_metrics.set(workers.make_metrics_writer());
        Ok((frontend, workers))
    }
}

/// Returns the limits from the settings. Lowers `max_connections` to the number of connections for which the process
/// may open descriptors.
fn fit_max_connections(config: &Config) -> Result<Limits, StartError> {
    let (wanted, possible) = (config.limits.max_connections, raise_limits_for_connections(config)?);
    if possible < wanted {
        log::warn!(
            "the limit of open descriptors suffices for {possible} connections: raise it (ulimit -n; LimitNOFILE= \
             of a unit), or lower MAX_CONNECTIONS, now {wanted}"
        );
    }
    Ok(Limits { max_connections: possible, ..config.limits.clone() })
}

impl Server {
    /// Starts a server: binds its address, connects to the database, migrates the database, and only then listens.
    ///
    /// Blocks until the service answers: up to `db_connect_timeout` for the database, and as long as its
    /// migrations take. May be called from within an async runtime, whose thread it blocks as well.
    ///
    /// # Errors
    /// The text of each error is one line. After an error nothing is left running.
    pub fn start(config: Config) -> Result<Server, StartError> {
        BoundServer::bind(&config)?.start(config, || {})
    }

    /// Returns the URL of the server without a slash at its end, such as `http://127.0.0.1:41234`; on a Unix socket,
    /// `unix:/path`. If the server has several addresses, the URL has the first.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Returns the first TCP address of the server; `None` for a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// Returns the service of this server, which can also be called without a socket.
    pub fn app(&self) -> &App {
        &self.app
    }

    /// Stops the server: `/readyz` announces the stop for `drain_delay` (default: 0 s). Then the server accepts no more
    /// clients, answers the requests in flight, and frees the port.
    ///
    /// Blocks for `drain_delay`, then for at most `stop_timeout` (default: 10 s), but only for about a millisecond if
    /// no request is in flight. Dropping the server stops it without `drain_delay`.
    pub fn stop(self) {
        self.announce_stop();
    }

    /// Makes `/readyz` answer 503 from now on, and blocks for `drain_delay`, so that load balancers notice the stop.
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
        self.workers.stop(left.max(MIN_STOP_WAIT));
    }
}

/// Returns the function by which the frontend itself answers health checks (`/livez` and `/readyz`). The function
/// returns `None` for other requests, and for health checks with a body: workers answer those, because judging a body
/// may block.
fn make_health_check(app: Arc<App>) -> AnswerWithoutWorker {
    Box::new(move |request: &Request, id: &RequestId| {
        if !request.body.is_empty() || !app::is_health_path(request.path()) {
            return None;
        }
        let cors = app.access.cors_for(request);
        let route = app.find_route(request, &cors);
        let label = route.route_label;
        let Verdict::Answer(answer) = app.judge(request, route, &cors, Some(id)) else { return None };
        // Counts the answer with a duration of zero, because it takes only some microseconds.
        app.metrics.count_request(request.method, label, answer.status, Duration::ZERO);
        let (method, status) = (request.method.name(), answer.status);
        log::debug!(
            method = method, path = label, status = status, client:% = ClientName(request.peer), request_id:% = id;
            "{method} {label} {status} at once"
        );
        Some(answer)
    })
}
