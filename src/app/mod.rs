//! The service without a socket: a [`Request`] in, a [`Response`] out.
//!
//! A request is judged once: `App::judge` makes it a typed `Command` or answers it, without the database. `router`,
//! `access` and `validation` hold the rules, `handlers` what a command does. Knows users and the database
//! behind them; no socket, no thread, no queue.

mod access;
mod command;
mod description;
mod handlers;
mod health;
mod idempotency;
mod lanes;
mod preconditions;
mod query;
mod router;
mod throttle;
pub(crate) mod validation;

pub(crate) use command::{Command, Step};
pub(crate) use health::Health;
pub(crate) use lanes::{Account, Lane, Needs};
pub(crate) use router::label;

use crate::{
    budget::Budget,
    config::{Config, Secret},
    db::{
        Backoff, Cleaner,
        blocking::{DropOutside, outside_of_runtimes},
        migrate::Migrations,
        open::Opening,
        users::Users,
    },
    error::Error,
    http::{Request, RequestId, Response},
    metrics::{Metrics, Text},
    start_error::StartError,
    users::password::{Hasher, PasswordHash, Turns},
};
use command::Judge;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// The service without a server: a function from a request to a response. Shared by reference between threads.
pub struct App {
    users: DropOutside<Users>,
    judge: Judge,
    health: Arc<Health>,
    metrics: Metrics,
    hasher: Hasher,
    /// How many passwords are hashed at once, over all callers.
    hashing: Turns,
    request_timeout: Duration,
    _cleaner: Cleaner,
    budget: Budget,
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
            log::info!("connecting to {opening}");
            let schema = migrations.schema();
            opening.migrate(migrations, config.migrate)?;
            let prober = opening.prober(schema, config.db_prepared).map_err(StartError::System)?;
            let users = Users::new(opening.into_pool(config), config.production);
            let cleaner = users.start_cleaner().map_err(StartError::System)?;
            Ok(App::new(users, cleaner, Health::new(prober), config))
        })
    }

    /// The service over these users, as the settings have it.
    fn new(users: Users, cleaner: Cleaner, health: Health, config: &Config) -> App {
        let budget = Budget::new(config.limits.memory_budget);
        App {
            _cleaner: cleaner,
            users: DropOutside::new(users),
            judge: Judge::new(config),
            health: Arc::new(health),
            metrics: Metrics::new(&Lane::LABELS),
            hasher: Hasher::new(config.password_hashing),
            hashing: Turns::new(&budget, config.password_hashing.memory()),
            request_timeout: config.limits.request_timeout,
            budget,
            parsing: Mutex::default(),
        }
    }

    /// Answers a request; what goes wrong is an answer too, and is logged where the client is not told.
    ///
    /// Blocks for the database, up to `db_acquire_timeout` for a connection and `request_timeout` for each of its
    /// statements, and where a password is involved until it may be hashed and for that work, some 20 ms. What only
    /// a server can refuse (its [`Limits`](crate::Limits)) is not refused here.
    pub fn handle(&self, request: &Request) -> Response {
        let mut response = match self.judge(request, None) {
            Ok(command) => outside_of_runtimes(|| self.run(command).contiguous()),
            Err(refusal) => refusal,
        };
        self.judge.cors(request).add_to(&mut response);
        response
    }

    /// What a request asks for, or its answer where that needs no database. `id` is the request's, where it has one.
    /// Blocks for nothing.
    pub(crate) fn judge(&self, request: &Request, id: Option<&RequestId>) -> Result<Command, Response> {
        /// A JSON text of small members takes some eighty times its length as a value.
        const LARGE: usize = 8 << 10;
        let _turn =
            (request.body.len() > LARGE).then(|| self.parsing.lock().unwrap_or_else(PoisonError::into_inner));
        // A server's frontend has answered these before.
        match self.health.answer(request.method, request.path()) {
            Some(answer) => Err(answer),
            None => {
                self.judge.command(request).map_err(|refusal| refusal.into_response(id, || self.figures()))
            }
        }
    }

    /// Does the next step of commands of one lane, with as few statements as they allow; in their order. None of them
    /// begins a change past its deadline.
    pub(crate) fn execute(&self, lane: Lane, commands: Vec<Command>, deadlines: &[Instant]) -> Vec<Step> {
        handlers::execute(self, lane, commands, deadlines)
    }

    /// That of a request that is complete now.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }

    /// Which hosts a request may name, as a text; `None` with a token, which makes the name irrelevant.
    pub(crate) fn accepted_hosts(&self) -> Option<String> {
        self.judge.accepted_hosts()
    }

    /// Whether it lives, and is ready.
    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// What is counted.
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Hashes a password, in its turn.
    fn hash(&self, password: &Secret) -> Result<PasswordHash, Error> {
        let work = || self.hasher.hash(password);
        self.hashing.take(self.hasher.memory(None), self.request_timeout, work).flatten()
    }

    /// Checks a password, in its turn.
    fn verify(&self, password: &Secret, hash: Option<&PasswordHash>) -> Result<bool, Error> {
        let work = || self.hasher.verify(password, hash);
        self.hashing.take(self.hasher.memory(hash), self.request_timeout, work)
    }

    /// The memory that is held for clients.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// How many passwords are hashed at once.
    pub(crate) fn hashes_at_once(&self) -> usize {
        self.hashing.count()
    }

    /// The users themselves, for what HTTP does not offer.
    #[doc(hidden)]
    pub fn users(&self) -> &Users {
        &self.users
    }

    /// All figures, as Prometheus reads them. Takes less than a millisecond.
    fn figures(&self) -> String {
        let mut text = Text::default();
        self.metrics.write(&mut text);
        let ready = u8::from(self.health.unready().is_none());
        text.gauge("userd_ready", "Whether /readyz says that the service is ready.", ready);
        let read_only = u8::from(self.health.database_is_read_only());
        text.gauge("userd_database_read_only", "Whether the database takes no changes.", read_only);
        let (held, limit) = (self.budget.held(), self.budget.limit());
        text.gauge("userd_memory_held_bytes", "Memory that is held for clients.", held);
        text.gauge("userd_memory_budget_bytes", "The most memory that may be.", limit);
        self.users.pool().write_figures(&mut text, self.metrics.lock_retries());
        text.end()
    }

    /// All steps of one command. A step that meets another session's lock is retried until the command's time is up.
    fn run(&self, mut command: Command) -> Response {
        /// Time for the transaction that won a deadlock: a loser that retries at once often takes its locks before the
        /// winner wakes, and both deadlock a second time (3 of 25 times on a busy machine).
        const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];
        let deadline = self.deadline();
        let mut backoff = Backoff::new(PAUSES[0], PAUSES[1], deadline);
        loop {
            command = match self.execute(command.lane(), vec![command], &[deadline]).pop() {
                Some(Step::Done(response)) => return response,
                Some(Step::Failed(error)) => return error.into_response(None),
                Some(Step::Next(command)) => command,
                Some(Step::Contended(command)) if backoff.pause() => command,
                Some(Step::Contended(_)) => return Error::Contended.into_response(None),
                None => return Error::Internal("a command has no outcome".to_owned()).into_response(None),
            };
        }
    }
}
