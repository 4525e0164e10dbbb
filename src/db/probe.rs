//! Readiness of the database, for load balancers. From the first question on, a thread probes it over a session of its
//! own, so that neither a busy pool nor a hanging database delays the answer. Once a minute it removes the idempotency keys
//! that have expired.
//!
//! [`Prober::readiness`] judges by the time of the last answer, as nothing ends a probe of a server that is stopped.
//! Knows no HTTP.

use super::connect::{ConnectError, Servers};
use super::explain;
use super::migrate::Migrations;
use super::session::Session;
use super::sqlstate::{has_too_many_connections, lacks_table};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

/// The pause between two probes.
const PAUSE: Duration = Duration::from_millis(500);

/// The pause between two removals of keys that have expired.
const CLEANING_PAUSE: Duration = Duration::from_secs(60);

/// A database that has not answered for this time is silent: it has failed three probes.
const MAX_SILENCE: Duration = Duration::from_millis(2500);

/// Removes keys that have expired, but no row that another session is removing.
pub const REMOVE_EXPIRED: &str = "
    delete from idempotency_keys where key = any (array(
        select key from idempotency_keys where expires_at <= now()
        order by expires_at limit 1000 for update skip locked))
    returning key";

/// The most rows that [`REMOVE_EXPIRED`] removes.
const MAX_REMOVED: usize = 1000;

const OTHER_SCHEMA: &str = "the database's schema is not the one expected";

/// A thread that probes a database from the first question on. Dropping it ends the thread.
pub struct Prober {
    state: Arc<Mutex<ProbeState>>,
    servers: Arc<Servers>,
    /// Wakes the thread, and ends it when it is dropped.
    begin: Sender<()>,
}

struct ProbeState {
    /// The last answer.
    answer: Answer,
    /// True once the log says that the database is silent.
    is_silent: bool,
    /// The reason why the last probe has failed; empty if it has succeeded.
    failure: String,
    /// When the first question came.
    asked: Option<Instant>,
    /// The time of the database's last answer. Until the first probe it is the time of the start.
    answered: Instant,
}

/// The answer of the database to a probe. By default it is as a service needs it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Answer {
    /// The schema is not the one expected.
    is_other_schema: bool,
    /// The database takes no changes.
    read_only: bool,
}

/// The readiness of the database.
pub struct Readiness {
    /// The reason why the service is not ready, if it is not.
    pub reason: Option<&'static str>,
    /// The database took no changes at the last probe.
    pub read_only: bool,
    /// The time since the last answer of the database.
    pub age: Duration,
}

impl Prober {
    /// Starts the thread, which only removes keys until [`Prober::readiness`] is called. `migrations`: the migrations that the database
    /// needs. An error if the system has no more threads.
    pub fn start(servers: Arc<Servers>, migrations: Migrations) -> io::Result<Prober> {
        let (answer, answered, failure) = (Answer::default(), Instant::now(), String::new());
        let state = ProbeState { answer, is_silent: false, failure, asked: None, answered };
        let state = Arc::new(Mutex::new(state));
        let (begin, begun) = channel();
        let (shared, probed) = (state.clone(), servers.clone());
        thread::Builder::new().name("prober".to_owned()).spawn(move || {
            let (mut session, mut pause) = (None, CLEANING_PAUSE);
            let (mut due, mut is_more) = (Instant::now(), false);
            loop {
                match begun.recv_timeout(if is_more { Duration::ZERO } else { pause }) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) => pause = PAUSE,
                }
                let found = probe(&probed, &migrations, &mut session);
                let is_due = Instant::now() >= due;
                is_more = is_due && found == Ok(Answer::default()) && removes_keys(&mut session);
                if is_due && !is_more {
                    due = Instant::now() + CLEANING_PAUSE;
                }
                shared.lock().keep(found);
                session = session.filter(|_| is_more || pause == PAUSE);
            }
        })?;
        Ok(Prober { state, servers, begin })
    }

    /// Returns the readiness, as the last probes have found it. Never blocks.
    pub fn readiness(&self) -> Readiness {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.asked.is_none() {
            // An error is ignored: sending fails only if the thread has ended.
            let _ = self.begin.send(());
        }
        let asked = *state.asked.get_or_insert(now);
        if !state.is_silent && now >= state.answered.max(asked) + MAX_SILENCE {
            state.is_silent = true;
            let why = if state.failure.is_empty() { "no answer" } else { &state.failure };
            log::warn!("unready: the database does not answer: {why}");
            // Ends the epoch: requests would wait for the pool's idle sessions of a server that is silent.
            self.servers.epoch.end(self.servers.epoch.now());
        }
        let other_schema = state.answer.is_other_schema.then_some(OTHER_SCHEMA);
        let reason = if state.is_silent { Some("the database does not answer") } else { other_schema };
        let age = now.saturating_duration_since(state.answered);
        Readiness { reason, read_only: state.answer.read_only, age }
    }
}

impl ProbeState {
    /// Keeps the outcome of a probe.
    fn keep(&mut self, found: Result<Answer, String>) {
        match found {
            Ok(answer) => {
                let was_other = mem::replace(&mut self.answer, answer).is_other_schema;
                let was_silent = mem::take(&mut self.is_silent);
                self.answered = Instant::now();
                self.failure.clear();
                if answer.is_other_schema && !was_other {
                    log::warn!("unready: {OTHER_SCHEMA}: see `userd check`");
                } else if !answer.is_other_schema && (was_other || was_silent) {
                    log::info!("ready again");
                }
            }
            Err(line) => self.failure = line,
        }
    }
}

/// Probes the database over the session, or a new one, and keeps the session if it can be used again. The error
/// is one line.
fn probe(
    servers: &Servers,
    migrations: &Migrations,
    session: &mut Option<Session>,
) -> Result<Answer, String> {
    let connect = || servers.connect("set statement_timeout = 1000");
    let kept = session.take().filter(|session| session.epoch == servers.epoch.now());
    let mut asked = match kept.map_or_else(connect, Ok) {
        Ok(session) => session,
        // A server without a free session for the prober has answered; the sessions of requests are open already.
        Err(ConnectError::Refused(error)) if has_too_many_connections(&error) => return Ok(Answer::default()),
        Err(error) => return Err(error.to_string()),
    };
    let answer = match Migrations::ask(&mut asked.connection) {
        Ok(rows) => {
            let [read_only, lacks_table] =
                [3, 4].map(|column| rows.first().is_some_and(|row| row.get(column)));
            if read_only && servers.wants_primary() {
                return Err("the server takes no changes".to_owned());
            }
            let is_other_schema = lacks_table || !matches!(migrations.judge(&rows), Ok(None));
            Answer { is_other_schema, read_only }
        }
        Err(error) if lacks_table(&error) => Answer { is_other_schema: true, read_only: false },
        Err(error) => return Err(explain(&error)),
    };
    *session = Some(asked);
    Ok(answer)
}

/// Removes some keys that have expired. Returns true if there may be more.
fn removes_keys(session: &mut Option<Session>) -> bool {
    let Some(session) = session else { return false };
    match session.connection.query_typed(REMOVE_EXPIRED, &[]) {
        Ok(rows) => rows.len() == MAX_REMOVED,
        Err(error) => {
            log::warn!("idempotency keys that have expired are not removed: {}", explain(&error));
            false
        }
    }
}
