//! Wires the stages together and stops them in order.

mod cores;
mod scheduler;
mod workers;

use crate::{
    app::App,
    config::{Config, ConfigError},
    db::{
        LOCK_TIMEOUT, Pool, PoolLimits,
        blocking::outside_of_runtimes,
        migrate::Migrations,
        target::Target,
        tls::{self, Connector},
        users::Users,
        watchdog::{CONNECT_TIMEOUT, Connection, Watchdog},
    },
    frontend::{Bound, Frontend},
};
use cores::Cores;
use nix::{
    sys::socket::{Shutdown, shutdown},
    unistd::mkdtemp,
};
use scheduler::Capacity;
use std::{
    fmt, fs, io,
    net::SocketAddr,
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use workers::Workers;

/// How long workers may take at a stop when the frontend has used its time up: they are stuck, or almost done.
const LAST_WORK: Duration = Duration::from_millis(300);

/// A running service: a port, some threads, a pool of connections. Stops when it is dropped.
pub struct Server {
    app: Arc<App>,
    base_url: String,
    addr: Option<SocketAddr>,
    /// Behind a lock only to be `Sync`.
    stages: Mutex<Option<Stages>>,
    stop_timeout: Duration,
}

struct Stages {
    frontend: Frontend,
    workers: Workers,
    _private: PrivateSocket,
}

/// Why a server did not start. Each is one clear line, and nothing is left running.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// A setting that cannot be used.
    Config(ConfigError),
    /// No connection to the database within `db_connect_timeout`, or a refusal that a retry would not change.
    Database(String),
    /// No database to be thrown away: PostgreSQL's programs are missing, or its cluster does not start. Only
    /// of [`ScratchDatabase`](crate::ScratchDatabase) and what stands on it.
    Cluster(String),
    /// A migration that could not be applied; nothing of it was.
    Migration(String),
    /// The address cannot be listened on.
    Listen(String, io::Error),
    /// The system refused a thread or a socket of our own.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Config(error) => error.fmt(f),
            StartError::Database(line) => write!(f, "cannot connect to the database: {line}"),
            StartError::Cluster(line) => f.write_str(line),
            StartError::Migration(line) => write!(f, "cannot migrate the database: {line}"),
            StartError::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            StartError::System(error) => write!(f, "cannot start: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl From<ConfigError> for StartError {
    fn from(error: ConfigError) -> StartError {
        StartError::Config(error)
    }
}

/// The address of a server that is yet to start: taken, and not listened on. For a program that has to start a
/// database first, and wants to know before that whether the address can be had.
pub struct BoundServer(Bound);

impl BoundServer {
    /// Binds the address of these settings. Blocks for as long as looking a host name up takes.
    ///
    /// # Errors
    /// [`StartError::Config`] and [`StartError::Listen`].
    pub fn bind(config: &Config) -> Result<BoundServer, StartError> {
        config.check()?;
        let bound = match &config.socket {
            Some(socket) => socket.try_clone().and_then(Bound::from_fd),
            None => Bound::new(&config.host, config.port),
        };
        bound.map(BoundServer).map_err(|error| StartError::Listen(address(config), error))
    }

    /// Starts the server on this address, whatever address `config` has now; otherwise as [`Server::start_watched`].
    pub fn start(
        self,
        config: Config,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<Server, StartError> {
        let app = Arc::new(App::open(&config)?);
        let listener = self.0.listen().map_err(|error| StartError::Listen(address(&config), error))?;
        let (base_url, addr) = (listener.to_string(), listener.local_addr());
        let exposed = addr.is_some_and(|addr| !addr.ip().is_loopback());
        let stages = || {
            static SERVERS: AtomicU32 = AtomicU32::new(0);
            let thread = format!("http-{}", SERVERS.fetch_add(1, Ordering::Relaxed));
            let cores = Arc::new(Cores::new());
            let (private, http, stream) = PrivateSocket::connect(&thread)?;
            cores.add_threads_named(thread);
            let frontend_cores = cores.clone();
            let on_start = move || frontend_cores.add_this_thread();
            let (frontend, responder) =
                Frontend::open(listener, &config.limits, stream, on_start, on_broken)?;
            let capacity = Capacity {
                statements: config.workers.min(config.db_pool_size as usize),
                hashes: app.hashes_at_once(),
                retry_for: config.limits.request_timeout,
            };
            let workers = Workers::start(http, responder, app.clone(), cores, capacity)?;
            Ok((private, frontend, workers))
        };
        let (private, frontend, workers) = stages().map_err(StartError::System)?;
        if exposed && config.api_token.is_none() {
            log::warn!("{base_url} may be reached by others, and API_TOKEN is not set");
        }
        Ok(Server {
            app,
            base_url,
            addr,
            stages: Mutex::new(Some(Stages { frontend, workers, _private: private })),
            stop_timeout: config.limits.stop_timeout,
        })
    }
}

impl Server {
    /// Binds the address, connects to the database, migrates it, and only then listens.
    ///
    /// Blocks until the service answers: up to `db_connect_timeout` for the database, and as long as its
    /// migrations take. May be called from within an async runtime, whose thread it blocks as well.
    ///
    /// # Errors
    /// Each is one line, and nothing is left running after it.
    pub fn start(config: Config) -> Result<Server, StartError> {
        BoundServer::bind(&config)?.start(config, || {})
    }

    /// As [`Server::start`]; `on_broken` is called, once and on a thread of the server's, when the stream
    /// between its stages breaks and everything is answered 503 from then on. That takes a defect; a
    /// process should exit then and be restarted.
    pub fn start_watched(
        config: Config,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<Server, StartError> {
        BoundServer::bind(&config)?.start(config, on_broken)
    }

    /// Where it listens, without a slash at its end: `http://127.0.0.1:41234`, or `unix:/path`.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The TCP address it listens on; `None` for a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// The service itself, to be asked without a socket: with the same database and the same settings.
    pub fn app(&self) -> &App {
        &self.app
    }

    /// Stops: takes no new connections, answers the requests in flight, frees the port. Blocks for at most
    /// `stop_timeout` (10 s), without any in flight for about a millisecond. Dropping does the same.
    pub fn stop(mut self) {
        self.shut_down();
    }

    fn shut_down(&mut self) {
        let stages = self.stages.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(stages) = stages.take() {
            let deadline = Instant::now() + self.stop_timeout;
            stages.frontend.stop();
            let left = deadline.saturating_duration_since(Instant::now());
            stages.workers.stop(left.max(LAST_WORK));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// The listening end of the stream between frontend and tiny_http, kept to end tiny_http's accept thread.
struct PrivateSocket {
    listener: UnixListener,
    /// The directory of the socket's file. Where it is still there, it goes with this value.
    dir: Option<PathBuf>,
    /// tiny_http's `Drop` connects to the socket's path and then removes that file. As long as this descriptor is
    /// open, the path leads into a directory that is gone, where no process can make another file.
    _open: fs::File,
}

impl PrivateSocket {
    /// tiny_http, and the one stream that it will ever serve: over a socket in a directory that only this user can
    /// enter. Where there is a /proc, directory and file are removed before this returns.
    ///
    /// tiny_http's threads get the name `thread`: they inherit that of the thread that starts them.
    fn connect(thread: &str) -> io::Result<(PrivateSocket, tiny_http::Server, UnixStream)> {
        let temporary = std::env::temp_dir();
        // The path of a socket has a hundred bytes, and build tools have long temporary directories.
        let temporary = if temporary.as_os_str().len() > 64 { Path::new("/tmp") } else { &temporary };
        let failed = |error: io::Error| {
            let dir = temporary.display();
            io::Error::new(
                error.kind(),
                format!("cannot make a socket in {dir} (TMPDIR names another directory): {error}"),
            )
        };
        let dir =
            mkdtemp(&temporary.join(format!("userd-{}-XXXXXX", process::id()))).map_err(io::Error::from);
        let dir = dir.map_err(failed)?;
        let connect = || {
            let open = fs::File::open(&dir)?;
            let by_descriptor = Path::new("/proc/self/fd").join(open.as_raw_fd().to_string());
            let is_there = by_descriptor.is_dir();
            // The name is unique, even if the descriptor's number is reused.
            let name = dir.file_name().unwrap_or_default();
            let path = if is_there { by_descriptor.join(name) } else { dir.join(name) };
            let listener = UnixListener::bind(&path)?;
            let stream = UnixStream::connect(&path)?;
            let kept = (!is_there).then(|| dir.clone());
            let private = PrivateSocket { listener: listener.try_clone()?, dir: kept, _open: open };
            let start = || tiny_http::Server::from_listener(listener, None).map_err(io::Error::other);
            let http = thread::scope(|scope| {
                let starter = thread::Builder::new().name(thread.to_owned()).spawn_scoped(scope, start)?;
                starter.join().unwrap_or_else(|_| Err(io::Error::other("tiny_http panicked as it started")))
            })?;
            Ok((private, http, stream))
        };
        let connected = connect().map_err(failed);
        if !matches!(&connected, Ok((PrivateSocket { dir: Some(_), .. }, ..))) {
            fs::remove_dir_all(&dir)?;
        }
        connected
    }
}

impl Drop for PrivateSocket {
    fn drop(&mut self) {
        // tiny_http's own way, connecting to the path once more, finds the path gone.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        if let Some(dir) = &self.dir {
            // It may have been removed by tiny_http's `Drop`, in part.
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// The address of the settings, for an error about it.
fn address(config: &Config) -> String {
    match &config.socket {
        Some(_) => "the socket that was passed".to_owned(),
        None if config.host.starts_with("unix:") => config.host.clone(),
        None => format!("{}:{}", config.host, config.port),
    }
}

fn target(config: &Config) -> Result<Target, ConfigError> {
    use crate::{
        config::{Database, Secret},
        db::target::{Settings, TargetError},
    };
    let (variable, target) = match &config.database {
        Database::Url(url) => ("DATABASE_URL", Target::parse(url.expose(), config.os_user.as_deref())),
        Database::Parts { host, port, name, user, password, ssl } => (
            match (host.is_empty(), *ssl) {
                (true, _) => "DB_HOST",
                (false, true) => "DB_SSL",
                (false, false) => "DB_SSL_CA",
            },
            Target::from_settings(Settings {
                host,
                port: *port,
                name,
                user,
                password: password.expose(),
                ssl: *ssl,
                ssl_ca: config.db_ssl_ca.as_deref(),
            }),
        ),
    };
    let problem = |variable| move |error: TargetError| ConfigError { variable, problem: error.to_string() };
    let mut target = target.map_err(problem(variable))?;
    let password = config.pg_password.as_ref().map(Secret::expose);
    let found = target.find_password(password, config.pg_pass_file.as_deref());
    found.map_err(problem("PGPASSFILE"))?;
    if target.config.get_application_name().is_none() {
        target.config.application_name("userd");
    }
    if target.config.get_connect_timeout().is_none() {
        let timeout = CONNECT_TIMEOUT.min(config.db_connect_timeout);
        target.config.connect_timeout(timeout);
    }
    Ok(target)
}

impl App {
    /// The service without a server: connects to the database and migrates it. `host`, `port` and `workers`
    /// mean nothing here.
    ///
    /// Blocks for up to `db_connect_timeout`, as long as the migrations take, and up to ten minutes while another
    /// replica migrates; may be called from within
    /// an async runtime, whose thread it blocks as well. After an error nothing is left running.
    pub fn open(config: &Config) -> Result<App, StartError> {
        outside_of_runtimes(|| {
            config.check()?;
            let target = target(config)?;
            let tls = tls::connector(target.tls.as_ref())
                .map_err(|error| StartError::Database(error.to_string()))?;
            let migrations = Migrations::load(config.migrations_dir.as_deref())?;
            log::info!("connecting to {target}");
            let watchdog = Watchdog::start().map_err(StartError::System)?;
            let timeout = config.db_connect_timeout;
            // Migrations take as long as they take, whatever bounds the role has for the statements of a service.
            let set_up = match config.db_prepared {
                true => "set statement_timeout = 0; set lock_timeout = 0",
                false => "",
            };
            let connect = || connect(&watchdog, &target, &tls, set_up, timeout);
            let mut client = connect()?;
            if !migrations.are_applied(&mut client).map_err(StartError::Migration)? {
                migrations.apply(&mut client, &mut *connect()?).map_err(StartError::Migration)?;
            }
            drop(client);
            let limits = PoolLimits {
                size: config.db_pool_size,
                acquire_timeout: config.db_acquire_timeout,
                statement_timeout: config.limits.request_timeout,
                lock_timeout: LOCK_TIMEOUT,
                prepared: config.db_prepared,
            };
            let users = Users::new(Pool::new(&target, tls, watchdog, limits), config.production);
            let cleaner = users.start_cleaner().map_err(StartError::System)?;
            Ok(App::new(users, cleaner, config))
        })
    }
}

/// Tries until the time is up. A log line says why it waits: at first, when the reason changes, and every few seconds.
/// A refusal that a retry would not change ends it at once.
fn connect(
    watchdog: &Watchdog,
    target: &Target,
    tls: &Connector,
    set_up: &str,
    timeout: Duration,
) -> Result<Connection, StartError> {
    const PAUSE: Duration = Duration::from_millis(500);
    const LINES_APART: Duration = Duration::from_secs(5);
    let deadline = Instant::now() + timeout;
    let mut logged: Option<(Instant, String)> = None;
    loop {
        let error = match watchdog.connect(&target.config, tls, set_up) {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        let reason = error.to_string();
        if error.is_final() || Instant::now() + PAUSE > deadline {
            return Err(StartError::Database(reason));
        }
        let is_known = |(at, last): &(Instant, String)| *last == reason && at.elapsed() < LINES_APART;
        if !logged.as_ref().is_some_and(is_known) {
            log::warn!("cannot connect to the database yet: {reason}");
            logged = Some((Instant::now(), reason));
        }
        thread::sleep(PAUSE);
    }
}
