//! Readiness of the database, for load balancers. From the first question on, a thread probes it over a session of its
//! own, so that neither a busy pool nor a hanging database delays the answer.
//!
//! [`Prober::readiness`] judges by the time of the last answer, as nothing ends a probe of a server that is stopped.
//! Knows no HTTP.

use super::{
    connect::{ConnectError, DatabaseConnection, Servers},
    explain,
    migrate::Migrations,
    sqlstate::{is_full, is_missing},
};
use parking_lot::Mutex;
use std::{
    io, mem,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Between two probes of a database that answers.
const PAUSE: Duration = Duration::from_secs(1);

/// Between two probes of a database that does not answer, or lacks something.
const PAUSE_IN_TROUBLE: Duration = Duration::from_millis(500);

/// A database that has not answered for this time is silent: after a pause, it has failed three probes.
const SILENCE: Duration = Duration::from_millis(2500);

const OTHER_SCHEMA: &str = "the database's schema is not the one expected";
const MISSING_TABLE: &str = "a table is missing in the database";

/// A thread that probes a database from the first question on. Dropping it ends the thread.
pub struct Prober {
    state: Arc<Mutex<ProbeState>>,
    servers: Arc<Servers>,
    /// Wakes the thread, and ends it when it is dropped.
    begin: Sender<()>,
}

#[derive(Default)]
struct ProbeState {
    /// Why the service is not ready, as the last answer says.
    reason: Option<&'static str>,
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
    /// Starts the thread, which sleeps until [`Prober::readiness`] is called. `migrations`: those that
    /// the database has to have; `prepared`: whether sessions may keep settings. Errors: the system has no more threads.
    pub fn start(servers: Arc<Servers>, migrations: Migrations, prepared: bool) -> io::Result<Prober> {
        let state = ProbeState { answered: Some(Instant::now()), ..ProbeState::default() };
        let state = Arc::new(Mutex::new(state));
        let (begin, begun) = channel();
        let probes = Probes { servers: servers.clone(), migrations, prepared, connection: None };
        let shared = state.clone();
        let thread = thread::Builder::new().name("prober".to_owned());
        thread.spawn(move || probes.run(&shared, &begun))?;
        Ok(Prober { state, servers, begin })
    }

    /// Returns why the service is not ready, if it is not, and how long ago the database answered last. Never blocks.
    pub fn readiness(&self) -> (Option<&'static str>, Duration) {
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
        let reason = if state.is_silent { Some("the database does not answer") } else { state.reason };
        (reason, now.saturating_duration_since(answered))
    }

    /// Tells whether the database takes no changes, as the last probe has found it. Never blocks.
    pub fn is_read_only(&self) -> bool {
        self.state.lock().read_only
    }
}

/// The thread's own.
struct Probes {
    servers: Arc<Servers>,
    migrations: Migrations,
    prepared: bool,
    connection: Option<DatabaseConnection>,
}

impl Probes {
    fn run(mut self, state: &Mutex<ProbeState>, begun: &Receiver<()>) {
        if begun.recv().is_err() {
            return;
        }
        loop {
            let had_connection = self.connection.is_some();
            let mut probed = self.probe();
            // A session that has ended since the last probe says nothing of the database, which may end idle ones.
            if had_connection && self.connection.is_none() {
                probed = self.probe();
            }
            let mut state = state.lock();
            match probed {
                Ok((reason, read_only)) => {
                    let before = mem::replace(&mut state.reason, reason);
                    let was_silent = mem::take(&mut state.is_silent);
                    (state.read_only, state.answered) = (read_only, Some(Instant::now()));
                    state.failure.clear();
                    match reason {
                        None if was_silent || before.is_some() => log::info!("ready again"),
                        Some(reason) if before != Some(reason) => {
                            log::warn!("unready: {reason}: see `userd check`");
                        }
                        _ => {}
                    }
                }
                Err(line) => state.failure = line,
            }
            let is_well = state.failure.is_empty() && state.reason.is_none();
            drop(state);
            let pause = if is_well { PAUSE } else { PAUSE_IN_TROUBLE };
            if begun.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
                return;
            }
        }
    }

    /// Asks over the connection, or a new one, and leaves it if it can be used again. Returns why the service is not
    /// ready, and whether the server takes no changes. The error is one line.
    fn probe(&mut self) -> Result<(Option<&'static str>, bool), String> {
        let set_up = if self.prepared { "set statement_timeout = 1000" } else { "" };
        let connected =
            self.connection.take().map_or_else(|| self.servers.connect(set_up).map(|(new, _)| new), Ok);
        let mut connection = match connected {
            Ok(connection) => connection,
            // The server has answered. It is its number of sessions that is short, and this one is an extra.
            Err(ConnectError::Refused(error)) if is_full(&error) => return Ok((None, false)),
            Err(error) => return Err(error.to_string()),
        };
        let found = match connection.query_typed(Migrations::ASK, &[]) {
            Ok(rows) => {
                let read_only = rows.first().is_some_and(|row| row.get(3));
                if read_only && self.servers.wants_primary {
                    return Err("the server takes no changes".to_owned());
                }
                let lacks_table = rows.first().is_some_and(|row| row.get(4));
                match self.migrations.judge(&rows) {
                    Ok(true) => (lacks_table.then_some(MISSING_TABLE), read_only),
                    Ok(false) | Err(_) => (Some(OTHER_SCHEMA), read_only),
                }
            }
            Err(error) if is_missing(&error) => (Some(OTHER_SCHEMA), false),
            Err(error) => return Err(explain(&error)),
        };
        self.connection = Some(connection);
        Ok(found)
    }
}
