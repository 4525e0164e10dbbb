//! The service without a socket: a [`Request`] in, a [`Response`] out.
//!
//! `routes` is the table of what is served, `commands` what becomes of a request. A request is judged once (route,
//! access, validation); the result is an answer, or a `Command` that the caller queues and has executed in batches.
//! Knows users and the database behind them; no socket and no queue. Opening an [`App`] starts a thread that probes the
//! database.

mod access;
mod commands;
mod content;
mod description;
mod hashing;
mod health;
mod idempotency;
mod lanes;
mod preconditions;
mod query;
mod routes;
mod throttle;
mod ui;
pub(crate) mod validation;

pub(crate) use commands::{Command, Progress, answer_at_once};
pub(crate) use health::Health;
pub(crate) use lanes::{Lane, Needs, retry_pause};
pub(crate) use routes::{at_once, fields, label};

use crate::{
    budget::Budget,
    config::Config,
    db::{
        Pool, blocking::outside_of_runtimes, migrate::Migrations, open::Opening, probe::Prober, users::Users,
    },
    error::{Error, StartError},
    http::{Request, RequestId, Response},
    metrics::{Metrics, Text},
};
use commands::{Judged, Rules};
use hashing::Hashing;
use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// The service without a server: a function from a request to a response. Shared by reference between threads.
pub struct App {
    users: Users,
    rules: Rules,
    /// Whether it lives, and is ready.
    pub(crate) health: Arc<Health>,
    /// What is counted.
    pub(crate) metrics: Arc<Metrics>,
    /// Where passwords are hashed.
    pub(crate) hashing: Hashing,
    request_timeout: Duration,
    /// The memory that is held for clients.
    pub(crate) budget: Budget,
    /// Bodies that may become many times as large when they are parsed take turns.
    parsing: Mutex<()>,
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
            let opening = Opening::new(config)?;
            let migrations = Migrations::load(config.migrations_dir.as_deref())?;
            log::info!("connecting to {}", opening.target);
            let schema = migrations.schema();
            opening.migrate(&migrations, config.migrate)?;
            let prober = Prober::start(opening.servers.clone(), schema, config.db_prepared)
                .map_err(StartError::System)?;
            let users = Users::new(Pool::new(opening.servers, config), config.production);
            let budget = Budget::new(config.limits.memory_budget);
            Ok(App {
                users,
                rules: Rules::new(config),
                health: Arc::new(Health::new(prober)),
                metrics: Arc::new(Metrics::new(&Lane::LABELS)),
                hashing: Hashing::new(config.password_hashing, &budget, config.limits.request_timeout),
                request_timeout: config.limits.request_timeout,
                budget,
                parsing: Mutex::default(),
            })
        })
    }

    /// Answers a request; what goes wrong is an answer too, and is logged where the client is not told.
    ///
    /// Blocks for the database, up to `db_acquire_timeout` for a connection and `request_timeout` for each of its
    /// statements, and where a password is involved until it may be hashed and for that work. What only
    /// a server can refuse (its [`Limits`](crate::Limits)) is not refused here.
    pub fn handle(&self, request: &Request) -> Response {
        let mut response = match self.judge(request, None) {
            Ok(command) => outside_of_runtimes(|| self.run(command)),
            Err(answer) => answer,
        };
        self.rules.access.cors(request).add_to(&mut response);
        response
    }

    /// Whether `/ui` is served from now on.
    pub(crate) fn serve_ui(&mut self, on: bool) {
        self.rules.ui = on;
    }

    /// What a request asks for, or its answer where that needs no database. `id` is the request's, where it has one.
    /// Blocks while another large body is parsed, and for nothing else.
    pub(crate) fn judge(&self, request: &Request, id: Option<&RequestId>) -> Result<Command, Response> {
        /// A JSON text of small members takes many times its length as a value.
        const LARGE: usize = 8 << 10;
        let _turn =
            (request.body.len() > LARGE).then(|| self.parsing.lock().unwrap_or_else(PoisonError::into_inner));
        match self.rules.judge(request, id) {
            Ok(Judged::Command(command)) => Ok(command),
            Ok(Judged::Answer(response)) => Err(response),
            Ok(Judged::Health(probe)) => Err(self.health.answer(probe)),
            Ok(Judged::Figures) => Err(self.figures()),
            Err(error) => Err(error.into_response(id)),
        }
    }

    /// That of a request that is complete now.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }

    /// Which hosts a request may name, as a text; `None` with a token, which makes the name irrelevant.
    pub(crate) fn accepted_hosts(&self) -> Option<String> {
        self.rules.access.accepted_hosts()
    }

    /// Names the rights of the token that a request carries, for the log.
    pub(crate) fn rights(&self, request: &Request) -> Option<&'static str> {
        self.rules.access.rights(request).map(access::Rights::name)
    }

    /// The users themselves, for what HTTP does not offer.
    #[doc(hidden)]
    pub fn users(&self) -> &Users {
        &self.users
    }

    /// All figures, as Prometheus reads them. Takes less than a millisecond.
    fn figures(&self) -> Response {
        /// Of the text format of Prometheus.
        const FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
        let mut text = Text::default();
        self.metrics.write(&mut text);
        let ready = u8::from(self.health.unready().is_none());
        text.gauge("userd_ready", "Whether /readyz says that the service is ready.", ready);
        let read_only = u8::from(self.health.database_is_read_only());
        text.gauge("userd_database_read_only", "Whether the database takes no changes.", read_only);
        let (held, limit) = (self.budget.held(), self.budget.limit());
        text.gauge("userd_memory_held_bytes", "Memory that is held for clients.", held);
        text.gauge("userd_memory_budget_bytes", "The most memory that may be.", limit);
        self.users.pool().write_figures(&mut text, self.metrics.lock_retries.get());
        let response = Response { status: 200, body: text.end().into(), ..Response::no_content() };
        response.with("Content-Type", FORMAT).with("Cache-Control", "no-store")
    }

    /// Executes one command to its end. If it meets another session's lock, it is executed again until its time is up.
    fn run(&self, mut command: Command) -> Response {
        let deadline = self.deadline();
        let mut retries = 0;
        loop {
            command = match self.execute(vec![command], &[deadline]).pop() {
                Some(Ok(Progress::Done(response))) => return response,
                Some(Ok(Progress::Next(command))) => command,
                Some(Ok(Progress::Contended(command))) => {
                    let pause = retry_pause(retries);
                    if Instant::now() + pause >= deadline {
                        return Error::Contended.into_response(None);
                    }
                    thread::sleep(pause);
                    retries += 1;
                    command
                }
                Some(Err(error)) => return error.into_response(None),
                None => return Error::Internal("a command has no outcome".to_owned()).into_response(None),
            };
        }
    }
}
