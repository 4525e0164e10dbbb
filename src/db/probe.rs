//! Probes whether the database is ready, for load balancers. From the first question on, a thread does so over a session of its own, so
//! that neither a busy pool nor a database that hangs delays an answer. Once a minute the thread also removes idempotency keys that
//! have expired.
//!
//! [`Prober::readiness`] judges by the time of the last answer, because a probe of a server that is stopped never ends. Knows no HTTP.

use super::connect::{ConnectError, DbHosts};
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
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// The pause between two removals of keys that have expired, and between two probes until the first question.
const CLEANING_PAUSE: Duration = Duration::from_secs(60);

/// The time after which a database without an answer makes the service unready. Three probes have failed by then.
const MAX_SILENCE: Duration = Duration::from_millis(2500);

/// Removes keys that have expired. Skips rows that another session has locked to remove them.
pub const REMOVE_EXPIRED: &str = "
    delete from idempotency_keys where key = any (array(
        select key from idempotency_keys where expires_at <= now()
        order by expires_at limit 1000 for update skip locked))
    returning key";

/// The largest number of rows that [`REMOVE_EXPIRED`] removes.
const MAX_REMOVED_ROWS: usize = 1000;

const UNEXPECTED_SCHEMA: &str = "the database's schema is not the one expected";

/// A thread that probes a database from the first question on. The thread ends when its `Prober` is dropped.
pub struct Prober {
    state: Arc<Mutex<ProbeState>>,
    servers: Arc<DbHosts>,
    /// The channel that wakes the thread at the first question. If the channel is dropped, the thread ends.
    wake: Sender<()>,
}

/// The results of the probes of a database.
struct ProbeState {
    /// The last answer of the database.
    answer: Answer,
    /// True once the log says that the database is silent.
    is_silent: bool,
    /// The reason why the last probe has failed. The text is empty if the probe has succeeded.
    failure: String,
    /// The time of the first question, if there was one.
    first_asked_at: Option<Instant>,
    /// The time of the database's last answer, or of the start if there was none.
    last_answer_at: Instant,
}

/// The answer of the database to a probe. The default is the answer that a service needs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Answer {
    /// A table is missing, or the migrations are not those that the service needs.
    is_other_schema: bool,
    /// The database takes no changes.
    read_only: bool,
}

/// The answer to the question whether a service can use the database.
pub struct Readiness {
    /// The reason why the service is not ready. `None` if it is ready.
    pub reason: Option<&'static str>,
    /// True if the database took no changes at the last probe.
    pub read_only: bool,
    /// The time since the last answer of the database.
    pub age: Duration,
}

impl Prober {
    /// Starts the thread, which only removes keys until [`Prober::readiness`] is called. `migrations` are those that the database has to
    /// have. Fails if the system refuses a thread.
    pub fn start(servers: Arc<DbHosts>, migrations: Migrations) -> io::Result<Prober> {
        let (answer, last_answer_at, failure) = (Answer::default(), Instant::now(), String::new());
        let state = ProbeState { answer, is_silent: false, failure, first_asked_at: None, last_answer_at };
        let state = Arc::new(Mutex::new(state));
        let (wake, woken) = channel();
        let (shared, probed) = (state.clone(), servers.clone());
        thread::Builder::new().name("prober".to_owned()).spawn(move || {
            let (mut session, mut pause) = (None, CLEANING_PAUSE);
            let (mut due, mut is_more) = (Instant::now(), false);
            loop {
                match woken.recv_timeout(if is_more { Duration::ZERO } else { pause }) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) => pause = PROBE_PAUSE,
                }
                let result = probe(&probed, &migrations, &mut session);
                let is_due = Instant::now() >= due;
                is_more = is_due && result == Ok(Answer::default()) && remove_expired(&mut session);
                if is_due && !is_more {
                    due = Instant::now() + CLEANING_PAUSE;
                }
                shared.lock().record(result);
                session = session.filter(|_| is_more || pause == PROBE_PAUSE);
            }
        })?;
        Ok(Prober { state, servers, wake })
    }

    /// Returns what the last probes have shown. Never blocks.
    pub fn readiness(&self) -> Readiness {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.first_asked_at.is_none() {
            // Ignores an error, because the channel is closed only if the thread has ended.
            let _ = self.wake.send(());
        }
        let asked = *state.first_asked_at.get_or_insert(now);
        if !state.is_silent && now >= state.last_answer_at.max(asked) + MAX_SILENCE {
            state.is_silent = true;
            let why = if state.failure.is_empty() { "no answer" } else { &state.failure };
            log::warn!("unready: the database does not answer: {why}");
            // Ends the epoch, so that no request takes an idle session of the server that is silent.
            self.servers.epoch.end(self.servers.epoch.current());
        }
        let other_schema = state.answer.is_other_schema.then_some(UNEXPECTED_SCHEMA);
        let reason = if state.is_silent { Some("the database does not answer") } else { other_schema };
        let age = now.saturating_duration_since(state.last_answer_at);
        Readiness { reason, read_only: state.answer.read_only, age }
    }
}

impl ProbeState {
    /// Records the result of a probe, and logs whether the service becomes ready or unready.
    fn record(&mut self, result: Result<Answer, String>) {
        match result {
            Ok(answer) => {
                let was_other = mem::replace(&mut self.answer, answer).is_other_schema;
                let was_silent = mem::take(&mut self.is_silent);
                self.last_answer_at = Instant::now();
                self.failure.clear();
                if answer.is_other_schema && !was_other {
                    log::warn!("unready: {UNEXPECTED_SCHEMA}: see `userd check`");
                } else if !answer.is_other_schema && (was_other || was_silent) {
                    log::info!("ready again");
                }
            }
            Err(line) => self.failure = line,
        }
    }
}

/// Probes the database over `session` if that is still of use, else over a new session, which it leaves in `session`. The error is one
/// line.
fn probe(
    servers: &DbHosts,
    migrations: &Migrations,
    session: &mut Option<Session>,
) -> Result<Answer, String> {
    let connect = || servers.connect("set statement_timeout = 1000");
    let kept = session.take().filter(|session| session.epoch == servers.epoch.current());
    let mut asked = match kept.map_or_else(connect, Ok) {
        Ok(session) => session,
        // Takes the database for ready if it has no session left for the prober, because requests have their sessions
        // already.
        Err(ConnectError::Refused(error)) if has_too_many_connections(&error) => return Ok(Answer::default()),
        Err(error) => return Err(error.to_string()),
    };
    let answer = match Migrations::read_history(&mut asked.connection) {
        Ok(rows) => {
            let [read_only, lacks_table] =
                [3, 4].map(|column| rows.first().is_some_and(|row| row.get(column)));
            if read_only && servers.wants_primary() {
                return Err("the server takes no changes".to_owned());
            }
            let is_other_schema = lacks_table || !matches!(migrations.missing_in(&rows), Ok(None));
            Answer { is_other_schema, read_only }
        }
        Err(error) if lacks_table(&error) => Answer { is_other_schema: true, read_only: false },
        Err(error) => return Err(explain(&error)),
    };
    *session = Some(asked);
    Ok(answer)
}

/// Removes some keys that have expired. Returns true if there may be more of them.
fn remove_expired(session: &mut Option<Session>) -> bool {
    let Some(session) = session else { return false };
    match session.connection.query_typed(REMOVE_EXPIRED, &[]) {
        Ok(rows) => rows.len() == MAX_REMOVED_ROWS,
        Err(error) => {
            log::warn!("idempotency keys that have expired are not removed: {}", explain(&error));
            false
        }
    }
}
