//! Readiness of the database, for load balancers. A thread probes it over a session of its own for as long as requests
//! ask, so that neither a busy pool nor a hanging database delays the answer.
//!
//! [`Prober::readiness`] judges by the time of the last answer, as nothing ends a probe of a server that is stopped.
//! Knows no HTTP.

use super::{
    connect::{Connection, Servers},
    explain,
    migrate::{Applied, Schema},
    sqlstate::is_missing,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    io, mem,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Between two probes of a database that answers.
const PAUSE: Duration = Duration::from_secs(1);

/// Between two probes of a database that does not answer, or lacks something.
const PAUSE_IN_TROUBLE: Duration = Duration::from_millis(500);

/// A database that has not answered for this time is silent: after a pause, it has failed three probes.
const SILENCE: Duration = Duration::from_millis(2500);

/// How long after a question the database is probed. The common health checks ask at least twice in this time.
const LATELY: Duration = Duration::from_secs(60);

/// How long the end of the thread is waited for. It may be connecting.
const LAST_WORK: Duration = Duration::from_millis(100);

/// Bytes of the thread's stack.
const STACK: usize = 512 << 10;

/// The tables of the database without which no request succeeds.
const MISSING_TABLE: &str = "select name from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts']) name \
    where to_regclass(name) is null limit 1";

/// The state of the database as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It answers.
    Ready,
    /// It does not answer.
    Silent,
    /// It has not the migrations that it has to have, or others that are not compatible.
    OtherSchema,
    /// It has the migrations, and lacks a table.
    MissingTable,
}

/// A thread that probes a database while it is asked for. Dropping it ends the thread.
pub struct Prober(Arc<Shared>);

struct Shared {
    state: Mutex<ProbeState>,
    changed: Condvar,
    servers: Arc<Servers>,
}

struct ProbeState {
    /// Readiness at the last answer.
    found: Readiness,
    /// True once the log says that the database is silent.
    is_silent: bool,
    /// Why the last probe has failed, or empty.
    failure: String,
    /// True if the database took no changes at the last probe.
    read_only: bool,
    asked: Option<Instant>,
    /// When the database answered last: at the start, before there is a prober.
    answered: Instant,
    /// Since when probes have been made without a rest.
    probed_since: Instant,
    ended: bool,
    gone: bool,
}

impl Prober {
    /// Starts the thread, which sleeps until [`Prober::readiness`] is called. `schema`: the migrations that the
    /// database has to have; `prepared`: whether sessions may keep settings. Errors: the system has no more threads.
    pub fn start(servers: Arc<Servers>, schema: Schema, prepared: bool) -> io::Result<Prober> {
        let now = Instant::now();
        let state = ProbeState {
            found: Readiness::Ready,
            is_silent: false,
            failure: String::new(),
            read_only: false,
            asked: None,
            answered: now,
            probed_since: now,
            ended: false,
            gone: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), servers });
        let prober = Prober(shared.clone());
        let thread = thread::Builder::new().name("prober".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            shared.run(&schema, prepared);
            shared.state.lock().gone = true;
            shared.changed.notify_all();
        })?;
        Ok(prober)
    }

    /// Returns the state, and how long ago the database answered last. Never blocks. The database is probed for a
    /// minute from now on.
    pub fn readiness(&self) -> (Readiness, Duration) {
        let now = Instant::now();
        let mut state = self.0.state.lock();
        if state.asked.replace(now).is_none_or(|before| now >= before + LATELY) {
            self.0.changed.notify_all();
            if !state.is_silent {
                state.probed_since = now;
            }
        }
        let since = state.answered.max(state.probed_since);
        if !state.is_silent && now >= since + SILENCE {
            state.is_silent = true;
            let why = if state.failure.is_empty() { "no answer" } else { &state.failure };
            log::warn!("unready: the database does not answer: {why}");
            // Idle sessions of the pool would only be waited for.
            self.0.servers.end_epoch(self.0.servers.epoch());
        }
        let readiness = if state.is_silent { Readiness::Silent } else { state.found };
        (readiness, now.saturating_duration_since(state.answered))
    }

    /// Tells whether the database takes no changes, as the last probe has found it. Never blocks.
    pub fn is_read_only(&self) -> bool {
        self.0.state.lock().read_only
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = true;
        self.0.changed.notify_all();
        self.0.changed.wait_while_for(&mut state, |state| !state.gone, LAST_WORK);
    }
}

impl Shared {
    fn run(&self, schema: &Schema, prepared: bool) {
        let (mut connection, mut last) = (None, None);
        while self.wait(&mut connection, last) {
            last = Some(Instant::now());
            let had_connection = connection.is_some();
            let mut probed = self.probe(&mut connection, schema, prepared);
            // A session that has ended since the last probe says nothing of the database, which may end idle ones.
            if had_connection && connection.is_none() {
                probed = self.probe(&mut connection, schema, prepared);
            }
            let mut state = self.state.lock();
            let (found, read_only) = match probed {
                Ok(probed) => probed,
                Err(line) => {
                    state.failure = line;
                    continue;
                }
            };
            let before = mem::replace(&mut state.found, found);
            let was_silent = mem::take(&mut state.is_silent);
            (state.read_only, state.answered) = (read_only, Instant::now());
            state.failure.clear();
            match found {
                Readiness::Ready if was_silent || before != found => log::info!("ready again"),
                Readiness::OtherSchema if before != found => {
                    log::warn!("unready: the database's schema is not the one expected");
                }
                Readiness::MissingTable if before != found => {
                    log::warn!("unready: a table is missing in the database: see `userd check`");
                }
                _ => {}
            }
        }
    }

    /// Waits until a probe is due; `false` at the end. Until the service is ready again probes go on by themselves.
    fn wait(&self, connection: &mut Option<Connection>, last: Option<Instant>) -> bool {
        let mut resting = false;
        let mut state = self.state.lock();
        loop {
            if state.ended {
                return false;
            }
            let now = Instant::now();
            let trouble = !state.failure.is_empty() || state.is_silent || state.found != Readiness::Ready;
            let lately = state.asked.is_some_and(|asked| now < asked + LATELY);
            if !lately && !trouble {
                if mem::replace(&mut resting, true) {
                    self.changed.wait(&mut state);
                } else {
                    MutexGuard::unlocked(&mut state, || *connection = None);
                }
                continue;
            }
            let pause = if trouble { PAUSE_IN_TROUBLE } else { PAUSE };
            let left = last.map_or(Duration::ZERO, |last| (last + pause).saturating_duration_since(now));
            if left.is_zero() {
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Asks over a connection, or a new one, and leaves it if it can be used again. Returns also whether the server
    /// takes no changes. The error is one line.
    fn probe(
        &self,
        left: &mut Option<Connection>,
        schema: &Schema,
        prepared: bool,
    ) -> Result<(Readiness, bool), String> {
        let set_up = if prepared { "set statement_timeout = 1000" } else { "" };
        let connected = left.take().map_or_else(|| self.servers.connect(set_up).map(|(new, _)| new), Ok);
        let mut connection = match connected {
            Ok(connection) => connection,
            // The server has answered. It is its number of sessions that is short, and this one is an extra.
            Err(error) if error.is_full() => return Ok((Readiness::Ready, false)),
            Err(error) => return Err(error.to_string()),
        };
        let found = match connection.query_typed(Schema::ASK, &[]) {
            Ok(rows) => {
                let read_only = rows.first().is_some_and(|row| row.get(3));
                if read_only && self.servers.wants_primary {
                    return Err("the server takes no changes".to_owned());
                }
                match schema.judge(&rows) {
                    Ok(Applied::All | Applied::AndNewer(_)) => {
                        let missing = connection.query_typed(MISSING_TABLE, &[]);
                        match missing.map_err(|error| explain(&error))?.is_empty() {
                            true => (Readiness::Ready, read_only),
                            false => (Readiness::MissingTable, read_only),
                        }
                    }
                    Ok(Applied::No) | Err(_) => (Readiness::OtherSchema, read_only),
                }
            }
            Err(error) if is_missing(&error) => (Readiness::OtherSchema, false),
            Err(error) => return Err(explain(&error)),
        };
        *left = Some(connection);
        Ok(found)
    }
}
