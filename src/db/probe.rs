//! Probes in a thread whether the database is ready, for the health checks of load balancers. The thread has a session
//! of its own, so that neither a busy pool nor a database that hangs delays a health check. It probes once a minute
//! until the first health check (a call of [`Prober::readiness`]), then twice a second. Once a minute it also removes
//! expired idempotency keys.
//!
//! [`Prober::readiness`] decides by the time of the database's last answer, because a probe of a suspended server never
//! ends. Knows no HTTP.

use super::connect::{ConnectError, DbHosts};
use super::explain;
use super::migrate::Migrations;
use super::session::Session;
use super::sqlstate::{is_missing_table, is_too_many_clients};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{io, mem, thread};

/// The pause between two probes after the first health check.
const PROBE_PAUSE: Duration = Duration::from_millis(500);

/// The pause between two removals of expired idempotency keys, and between two probes until the first health check.
const CLEANUP_PAUSE: Duration = Duration::from_secs(60);

/// How long the database may leave probes unanswered before the service counts as unready. This is longer than several
/// pauses, so that one failed probe does not make the service unready.
const MAX_SILENCE: Duration = Duration::from_millis(2500);

/// Removes expired idempotency keys, and skips locked rows, because another session is removing these.
pub const EXPIRE_IDEMPOTENCY_KEYS: &str = "
    delete from idempotency_keys where key = any (array(
        select key from idempotency_keys where expires_at <= now()
        order by expires_at limit 1000 for update skip locked))
    returning key";

/// The most rows that one [`EXPIRE_IDEMPOTENCY_KEYS`] removes.
const MAX_REMOVED_KEYS: usize = 1000;

/// The problem of a service if [`DbAnswer::has_wrong_schema`] is true.
const UNEXPECTED_SCHEMA: &str = "the database's schema is not the one expected";

/// A thread that probes the database. The thread ends when its `Prober` is dropped.
pub struct Prober {
    probe_state: Arc<Mutex<ProbeState>>,
    hosts: Arc<DbHosts>,
    /// The channel that wakes the thread at the first health check. Dropping the channel ends the thread.
    waker: Sender<()>,
}

/// The results of the probes of a database.
struct ProbeState {
    /// The last answer of the database to a probe.
    answer: DbAnswer,
    /// True if the log says that the database does not answer, and no answer has come since.
    is_silent: bool,
    /// The error of the last probe. The text is empty if the probe has succeeded.
    error: String,
    /// The time of the first health check, if there was one.
    first_health_check: Option<Instant>,
    /// The time of the database's last answer, or the time at which the thread was started.
    last_answer_at: Instant,
}

/// The answer of the database to a probe. The default is the answer of a database that is ready.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct DbAnswer {
    /// True if a table is missing, or the migrations are not those that the service needs.
    has_wrong_schema: bool,
    /// True if the database takes no changes.
    is_read_only: bool,
}

/// Tells whether a service can use the database.
pub struct Readiness {
    /// The reason why the service cannot use the database. `None` if it can.
    pub problem: Option<&'static str>,
    /// True if the database took no changes at the last probe.
    pub is_read_only: bool,
    /// The time since the last answer of the database to a probe.
    pub silence: Duration,
}

impl Prober {
    /// Starts the thread. `migrations` are the migrations that the database has to have. Fails if the system refuses a
    /// thread.
    pub fn start(hosts: Arc<DbHosts>, migrations: Migrations) -> io::Result<Prober> {
        let (answer, last_answer_at, error) = (DbAnswer::default(), Instant::now(), String::new());
        let state = ProbeState { answer, is_silent: false, error, first_health_check: None, last_answer_at };
        let state = Arc::new(Mutex::new(state));
        let (waker, woken) = channel();
        let (shared, probed) = (state.clone(), hosts.clone());
        thread::Builder::new().name("prober".to_owned()).spawn(move || {
            let (mut session, mut pause) = (None, CLEANUP_PAUSE);
            let (mut due, mut is_more) = (Instant::now(), false);
            loop {
                match woken.recv_timeout(if is_more { Duration::ZERO } else { pause }) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) => pause = PROBE_PAUSE,
                }
                let found = probe(&probed, &migrations, &mut session);
                let is_due = Instant::now() >= due;
                is_more = is_due && found == Ok(DbAnswer::default()) && expire_idempotency_keys(&mut session);
                if is_due && !is_more {
                    due = Instant::now() + CLEANUP_PAUSE;
                }
                shared.lock().record(found);
                session = session.filter(|_| is_more || pause == PROBE_PAUSE);
            }
        })?;
        Ok(Prober { probe_state: state, hosts, waker })
    }

    /// Returns whether a service can use the database, by the last probes. The first call makes the thread probe twice
    /// a second. Never blocks.
    pub fn readiness(&self) -> Readiness {
        let now = Instant::now();
        let mut state = self.probe_state.lock();
        if state.first_health_check.is_none() {
            // Ignores the error that the thread has ended, because without probes the service becomes unready by
            // itself.
            let _ = self.waker.send(());
        }
        let asked = *state.first_health_check.get_or_insert(now);
        if !state.is_silent && now >= state.last_answer_at.max(asked) + MAX_SILENCE {
            state.is_silent = true;
            let why = if state.error.is_empty() { "no answer" } else { &state.error };
            log::warn!("unready: the database does not answer: {why}");
            // Ends the epoch, so that no request takes an idle session of the server that does not answer.
            self.hosts.epoch.end(self.hosts.epoch.current());
        }
        let other_schema = state.answer.has_wrong_schema.then_some(UNEXPECTED_SCHEMA);
        let problem = if state.is_silent { Some("the database does not answer") } else { other_schema };
        let silence = now.saturating_duration_since(state.last_answer_at);
        Readiness { problem, is_read_only: state.answer.is_read_only, silence }
    }
}

impl ProbeState {
    /// Records the result of a probe, and logs when the service becomes ready or unready.
    fn record(&mut self, result: Result<DbAnswer, String>) {
        match result {
            Ok(answer) => {
                let was_other = mem::replace(&mut self.answer, answer).has_wrong_schema;
                let was_silent = mem::take(&mut self.is_silent);
                self.last_answer_at = Instant::now();
                self.error.clear();
                if answer.has_wrong_schema && !was_other {
                    log::warn!("unready: {UNEXPECTED_SCHEMA}: see `userd check`");
                } else if !answer.has_wrong_schema && (was_other || was_silent) {
                    log::info!("ready again");
                }
            }
            Err(line) => self.error = line,
        }
    }
}

/// Probes the database over `session`, or over a new session if there is none or it is of an earlier epoch. Leaves the
/// session in `session` for the next probe. The error is one line.
fn probe(hosts: &DbHosts, required: &Migrations, session: &mut Option<Session>) -> Result<DbAnswer, String> {
    let connect = || hosts.connect("set statement_timeout = 1000");
    let kept = session.take().filter(|session| session.epoch == hosts.epoch.current());
    let mut asked = match kept.map_or_else(connect, Ok) {
        Ok(session) => session,
        // Counts the database as ready if the server has no free connection for the probe, because the sessions of the
        // pool are open already.
        Err(ConnectError::Refused(error)) if is_too_many_clients(&error) => return Ok(DbAnswer::default()),
        Err(error) => return Err(error.to_string()),
    };
    let answer = match Migrations::read_history(&mut asked.connection) {
        Ok(rows) => {
            let [is_read_only, lacks_table] =
                [3, 4].map(|column| rows.first().is_some_and(|row| row.get(column)));
            if is_read_only && hosts.wants_primary() {
                return Err("the server takes no changes".to_owned());
            }
            let has_wrong_schema = lacks_table || !matches!(required.compare_history(&rows), Ok(None));
            DbAnswer { has_wrong_schema, is_read_only }
        }
        Err(error) if is_missing_table(&error) => DbAnswer { has_wrong_schema: true, is_read_only: false },
        Err(error) => return Err(explain(&error)),
    };
    *session = Some(asked);
    Ok(answer)
}

/// Removes some expired idempotency keys. Returns true if there may be more.
fn expire_idempotency_keys(session: &mut Option<Session>) -> bool {
    let Some(session) = session else { return false };
    match session.connection.query_typed(EXPIRE_IDEMPOTENCY_KEYS, &[]) {
        Ok(rows) => rows.len() == MAX_REMOVED_KEYS,
        Err(error) => {
            log::warn!("idempotency keys that have expired are not removed: {}", explain(&error));
            false
        }
    }
}
