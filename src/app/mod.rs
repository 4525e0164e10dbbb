//! The service without a socket: a [`Request`] in, a [`Response`] out.
//!
//! `routes` is the table of routes, `commands` has one file for each operation. A request is judged once (route,
//! access, validation); the result is an answer, or a `Command` that the caller queues and has executed in batches.
//! Knows users and the database behind them; no socket and no queue. Opening an [`App`] starts a thread that probes the
//! database.

mod access;
mod pages;
pub(crate) mod routes;

pub(crate) use routes::{is_answered_at_once, label};

use crate::budget::Budget;
use crate::config::{Config, Secret};
use crate::db::blocking::outside_of_runtimes;
use crate::db::{Pool, connect::Servers, migrate::Migrations, probe::Prober, users::Users};
use crate::error::{Error, StartError};
use crate::http::{Cors, Request, RequestId, Response};
use crate::input::validation::BodySchemas;
use crate::metrics::Metrics;
use crate::operations::{Command, Lane, retry_pause, throttle::Throttle};
use crate::users::password::{Hasher, PasswordHash};
use access::Access;
use parking_lot::Mutex;
use routes::Found;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use strum::VariantNames;

/// A request that was judged.
pub(crate) struct Judged {
    /// The label of its route in figures.
    pub label: &'static str,
    /// The callers that its token stands for, as the log has them; empty without a known token.
    pub token: &'static str,
    pub next: Next,
}

/// The next step of a judged request.
pub(crate) enum Next {
    Execute(Command),
    Answer(Response),
}

/// The service without a server: a function from a request to a response. Shared by reference between threads.
pub struct App {
    pub(crate) users: Users,
    pub(crate) schemas: BodySchemas,
    pub(crate) access: Access,
    pub(crate) throttle: Arc<Throttle>,
    pub(crate) max_per_page: u32,
    /// The page for the browser is served.
    pub(crate) ui: bool,
    pub(crate) prober: Prober,
    /// The answer of `/openapi.json`, made when it is first asked for.
    pub(crate) description: OnceLock<Response>,
    /// `/readyz` reports the service as unready.
    pub(crate) stopping: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) hasher: Hasher,
    pub(crate) request_timeout: Duration,
    /// The memory that is held for clients.
    pub(crate) budget: Budget,
    /// Bodies that may become many times as large when they are parsed take turns.
    pub(crate) parsing: Mutex<()>,
}

impl App {
    /// Opens the service without a server: connects to the database and migrates it. `host`, `port` and `workers` have no
    /// effect.
    ///
    /// Blocks for up to `db_connect_timeout`, and as long as the migrations take, those of another replica that migrates
    /// first included. May be called from within an async runtime, whose thread it blocks as well. After an error nothing is
    /// left running.
    pub fn open(config: &Config) -> Result<App, StartError> {
        App::open_at(config, false)
    }

    /// Opens the service of a server, which may listen on the loopback alone. Otherwise as [`App::open`].
    pub(crate) fn open_at(config: &Config, is_local: bool) -> Result<App, StartError> {
        outside_of_runtimes(|| {
            let servers = Servers::new(config)?;
            let migrations = Migrations::load(config.migrations_dir.as_deref())?;
            log::info!("connecting to {}", servers.target);
            migrations.bring_up(&servers, config.migrate, false)?;
            let prober = Prober::start(servers.clone(), migrations).map_err(StartError::System)?;
            let users = Users::new(Pool::new(servers, config), config.production);
            Ok(App {
                users,
                schemas: BodySchemas::new(config.schema, config.validation),
                access: Access::new(config),
                throttle: Throttle::new(config.auth_attempts),
                max_per_page: config.max_per_page,
                ui: config.serves_ui(is_local),
                prober,
                description: OnceLock::new(),
                stopping: AtomicBool::default(),
                metrics: Arc::new(Metrics::new(Lane::VARIANTS)),
                hasher: Hasher::new(config.password_hashing),
                request_timeout: config.limits.request_timeout,
                budget: Budget::new(config.limits.memory_budget),
                parsing: Mutex::default(),
            })
        })
    }

    /// Answers a request. An error is an answer, too, and is logged if its answer does not tell the reason.
    ///
    /// Blocks for the database, up to `db_acquire_timeout` for a connection and `request_timeout` for each of its
    /// statements; and if the request has a password, for its turn to be hashed and for the hash. Checks no
    /// [`Limits`](crate::Limits), which a server refuses requests by.
    pub fn handle(&self, request: &Request) -> Response {
        let cors = self.access.cors(request);
        let mut response = self.answer(self.judge(request, &cors, None).next);
        cors.add_to(&mut response);
        response
    }

    /// Answers a judged request, executing its command on this thread.
    pub(crate) fn answer(&self, next: Next) -> Response {
        match next {
            Next::Execute(command) => outside_of_runtimes(|| self.execute_alone(command))
                .unwrap_or_else(|error| error.into_response(None)),
            Next::Answer(answer) => answer,
        }
    }

    /// Judges a request, in the order of path, method, access and the rest: makes a command of it, or the answer if that
    /// needs no database. `id` is the request's, if it has one. Blocks while another large body is parsed, and for nothing
    /// else.
    pub(crate) fn judge(&self, request: &Request, cors: &Cors, id: Option<&RequestId>) -> Judged {
        /// A JSON text of small members takes many times its length as a value.
        const PARSED_IN_TURN: usize = 8 << 10;
        let _turn = (request.body.len() > PARSED_IN_TURN).then(|| self.parsing.lock());
        let Found { label, mut asked } = routes::find(request.method, request.path(), self.ui);
        // Only after its preflight does a browser send the request whose refusal tells of the slash.
        if let (Err(Error::FurtherSlash(_)), true) = (&asked, cors.is_preflight(request)) {
            let meant = routes::without_further_slashes(request.path());
            asked = routes::find(request.method, &meant, self.ui).asked;
        }
        let token = self.access.token(request);
        let next = asked.and_then(|asked| self.parse(request, asked, cors, token, id));
        let next = next.unwrap_or_else(|error| Next::Answer(error.into_response(id)));
        Judged { label, token: token.map_or("", Into::into), next }
    }

    /// Has `/readyz` say from now on that the service stops.
    pub(crate) fn announce_stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Returns the deadline of a request that has just been read.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }

    /// Returns the users, for what HTTP does not offer.
    #[doc(hidden)]
    pub fn users(&self) -> &Users {
        &self.users
    }

    /// Returns how many passwords are hashed at once: one for every two cores, which leaves the others to reads, if the
    /// budget has memory for so many.
    pub(crate) fn hashers(&self) -> usize {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (cores / 2).min(self.budget.limit() / self.hasher.memory(None)).max(1)
    }

    /// Hashes a password, if there is one; see [`App::with_hash`].
    pub(crate) fn hash(&self, password: Option<&Secret>) -> Result<Option<PasswordHash>, Error> {
        password.map(|password| self.with_hash(None, |hasher| hasher.hash(password))?).transpose()
    }

    /// Runs `work`, which checks this hash, and may make a new one after that. Blocks for the memory of the larger one, up
    /// to `request_timeout`, then [`Error::Unavailable`]; and for the work.
    pub(crate) fn with_hash<T>(
        &self,
        hash: Option<&PasswordHash>,
        work: impl FnOnce(&Hasher) -> T,
    ) -> Result<T, Error> {
        let bytes = self.hasher.memory(hash).max(self.hasher.memory(None));
        match self.budget.reserve(bytes, self.deadline()) {
            Some(_held) => Ok(work(&self.hasher)),
            None => Err(Error::Unavailable("no memory became free for hashing a password".into())),
        }
    }

    /// Executes one command to its end. If it meets another session's lock, it is executed again until its time is up.
    fn execute_alone(&self, mut command: Command) -> Result<Response, Error> {
        let deadline = self.deadline();
        let mut retries = 0;
        loop {
            match self.execute(vec![(&mut command, deadline)]).remove(0) {
                Ok(Some(response)) => return Ok(response),
                Ok(None) => {}
                Err(Error::Contended) if Instant::now() + retry_pause(retries) < deadline => {
                    thread::sleep(retry_pause(retries));
                    retries += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
