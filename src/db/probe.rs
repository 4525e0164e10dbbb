//! Readiness of the database, for load balancers. From the first question on, a thread probes it over a session of its
//! own, so that neither a busy pool nor a hanging database delays the answer. Once a minute it removes the idempotency keys
//! that have expired.
//!
//! [`Prober::readiness`] judges by the time of the last answer, as nothing ends a probe of a server that is stopped.
//! Knows no HTTP.

use super::{
    connect::{ConnectError, Servers},
    explain,
    keys::{REMOVE_EXPIRED, REMOVED_AT_ONCE},
    migrate::Migrations,
    sqlstate::{is_full, is_missing},
};
use parking_lot::Mutex;
use postgres::Client;
use std::{
    io, mem,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Between two probes.
const PAUSE: Duration = Duration::from_millis(500);

/// Between two removals of keys that have expired; the first one comes with the first question.
const CLEANING: Duration = Duration::from_secs(60);

/// A database that has not answered for this time is silent: it has failed three probes.
const SILENCE: Duration = Duration::from_millis(2500);

const OTHER_SCHEMA: &str = "the database's schema is not the one expected";

/// A thread that probes a database from the first question on. Dropping it ends the thread.
pub struct Prober {
    state: Arc<Mutex<ProbeState>>,
    servers: Arc<Servers>,
    /// Wakes the thread, and ends it when it is dropped.
    begin: Sender<()>,
}

#[derive(Default)]
struct ProbeState {
    /// True if the schema was not the one expected at the last answer.
    is_other_schema: bool,
    /// True once the log says that the database is silent.
    is_silent: bool,
    /// Why the last probe has failed, or empty.
    failure: String,
    /// True if the database took no changes at the last probe.
    read_only: bool,
    /// When the first question came.
    asked: Option<Instant>,
    /// When the database answered last: at the start, before there is a prober.
    answered: Option<Instant>,
}

impl Prober {
    /// Starts the thread, which only removes keys until [`Prober::readiness`] is called. `migrations`: those that the database has to
    /// have. Errors: the system has no more threads.
    pub fn start(servers: Arc<Servers>, migrations: Migrations) -> io::Result<Prober> {
        let state = ProbeState { answered: Some(Instant::now()), ..ProbeState::default() };
        let state = Arc::new(Mutex::new(state));
        let (begin, begun) = channel();
        let (shared, probed) = (state.clone(), servers.clone());
        thread::Builder::new().name("prober".to_owned()).spawn(move || {
            let (mut connection, mut pause) = (None, CLEANING);
            let (mut due, mut is_more) = (Instant::now(), false);
            loop {
                match begun.recv_timeout(if is_more { Duration::ZERO } else { pause }) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) => pause = PAUSE,
                }
                let found = probe(&probed, &migrations, &mut connection);
                let is_due = Instant::now() >= due;
                is_more = is_due && found == Ok((false, false)) && removes_keys(&mut connection);
                if is_due && !is_more {
                    due = Instant::now() + CLEANING;
                }
                shared.lock().keep(found);
                connection = connection.filter(|_| is_more || pause == PAUSE);
            }
        })?;
        Ok(Prober { state, servers, begin })
    }

    /// Returns why the service is not ready, if it is not; whether the database takes no changes, as the last probe has
    /// found it; and how long ago the database answered last. Never blocks.
    pub fn readiness(&self) -> (Option<&'static str>, bool, Duration) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.asked.is_none() {
            // An error: the thread has ended.
            let _ = self.begin.send(());
        }
        let (asked, answered) = (*state.asked.get_or_insert(now), state.answered.unwrap_or(now));
        if !state.is_silent && now >= answered.max(asked) + SILENCE {
            state.is_silent = true;
            let why = if state.failure.is_empty() { "no answer" } else { &state.failure };
            log::warn!("unready: the database does not answer: {why}");
            // Idle sessions of the pool would only be waited for.
            self.servers.end_epoch(self.servers.epoch());
        }
        let other_schema = state.is_other_schema.then_some(OTHER_SCHEMA);
        let reason = if state.is_silent { Some("the database does not answer") } else { other_schema };
        (reason, state.read_only, now.saturating_duration_since(answered))
    }
}

/// The answer of the database to a probe: whether its schema is not the one expected, and whether it takes no changes.
type Answer = (bool, bool);

impl ProbeState {
    /// Keeps the outcome of a probe.
    fn keep(&mut self, found: Result<Answer, String>) {
        match found {
            Ok((is_other, read_only)) => {
                let was_other = mem::replace(&mut self.is_other_schema, is_other);
                let was_silent = mem::take(&mut self.is_silent);
                (self.read_only, self.answered) = (read_only, Some(Instant::now()));
                self.failure.clear();
                if is_other && !was_other {
                    log::warn!("unready: {OTHER_SCHEMA}: see `userd check`");
                } else if !is_other && (was_other || was_silent) {
                    log::info!("ready again");
                }
            }
            Err(line) => self.failure = line,
        }
    }
}

/// Asks over the connection, or a new one, and leaves it if it can be used again. The error is one line.
fn probe(
    servers: &Servers,
    migrations: &Migrations,
    connection: &mut Option<(Client, u64)>,
) -> Result<Answer, String> {
    let connect = || servers.connect("set statement_timeout = 1000");
    let kept = connection.take().filter(|(_, epoch)| *epoch == servers.epoch());
    let (mut client, epoch) = match kept.map_or_else(connect, Ok) {
        Ok(connected) => connected,
        // The server has answered. It is its number of sessions that is short, and this one is an extra.
        Err(ConnectError::Refused(error)) if is_full(&error) => return Ok((false, false)),
        Err(error) => return Err(error.to_string()),
    };
    let answer = match client.query_typed(Migrations::ASK, &[]) {
        Ok(rows) => {
            let [read_only, lacks_table] =
                [3, 4].map(|column| rows.first().is_some_and(|row| row.get(column)));
            if read_only && servers.wants_primary() {
                return Err("the server takes no changes".to_owned());
            }
            (lacks_table || !matches!(migrations.judge(&rows), Ok(None)), read_only)
        }
        Err(error) if is_missing(&error) => (true, false),
        Err(error) => return Err(explain(&error)),
    };
    *connection = Some((client, epoch));
    Ok(answer)
}

/// Removes some keys that have expired. Returns true if there may be more.
fn removes_keys(connection: &mut Option<(Client, u64)>) -> bool {
    let Some((client, _)) = connection else { return false };
    match client.query_typed(REMOVE_EXPIRED, &[]) {
        Ok(rows) => rows.len() == REMOVED_AT_ONCE,
        Err(error) => {
            log::warn!("idempotency keys that have expired are not removed: {}", explain(&error));
            false
        }
    }
}
