//! The pool of sessions: takes, opens and replaces sessions, and executes statements, some of them again if a session was broken.

use super::blocking::outside_of_runtimes;
use super::connect::{ConnectError, DbHosts, POOLER_LENDS_SESSIONS};
use super::session::{Param, Session};
use super::settings;
use super::sqlstate::{Consequence, Failure};
use crate::{config::Config, error::Error, metrics::MetricsText};
use parking_lot::Mutex;
use postgres::Row;
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The sessions in which the statements of a service are executed.
pub struct Pool {
    /// The sessions. `None` once `drop` has taken them.
    sessions: Option<r2d2::Pool<SessionManager>>,
    servers: Arc<DbHosts>,
    acquire_timeout: Duration,
    /// The longest time that a statement may take.
    pub statement_timeout: Duration,
    counters: Counters,
}

/// Counters of waits for a session, and of statements that were executed again.
#[derive(Debug, Default)]
struct Counters {
    /// How often a request has waited for a session.
    waits: AtomicU64,
    /// How often no session became free in time.
    timeouts: AtomicU64,
    /// How often a statement was executed again because its connection had ended.
    broken: AtomicU64,
    /// How often a statement was executed again because its session was of no use any more.
    stale: AtomicU64,
}

impl Pool {
    /// Returns the pool of a service. Does not block and does not fail, because a thread opens the sessions in the background.
    pub fn new(servers: Arc<DbHosts>, config: &Config) -> Pool {
        /// The longest time that the pool takes to connect after the database is back. r2d2 pauses at most half of this
        /// time between two tries.
        const MAX_RECONNECT_TIME: Duration = Duration::from_secs(1);
        let statement_timeout = servers.statement_timeout();
        let set_up = settings::setup_statements("set", statement_timeout);
        let manager = SessionManager { servers: servers.clone(), set_up, last_log_at: Mutex::default() };
        // Takes one thread, because r2d2's default of three threads is for pools that often open many sessions.
        let threads = ScheduledThreadPool::builder()
            .num_threads(1)
            .thread_name_pattern("pool-{}")
            // Discards r2d2's next look for idle connections when the pool is dropped, because the thread would live
            // until this look, for up to 30 s.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let sessions = r2d2::Pool::builder()
            .max_size(config.db_pool_size)
            .test_on_check_out(false)
            .connection_timeout(MAX_RECONNECT_TIME)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(NopErrorHandler))
            .build_unchecked(manager);
        let (sessions, acquire_timeout) = (Some(sessions), config.db_acquire_timeout);
        Pool { sessions, servers, acquire_timeout, statement_timeout, counters: Counters::default() }
    }

    /// Executes a statement and returns its rows. With a `deadline`, the statement is a change for a request that has to be answered by
    /// then; without it, the statement is a read.
    ///
    /// A change is sent only if the statement time-out ends before the deadline, so that the change has ended before the request is
    /// answered 503. If the session breaks, a read is executed once more in a new session, and a change only if the server has
    /// certainly not executed it.
    ///
    /// Blocks for a free session up to the acquire time-out, then for the statement up to the statement time-out. Fails with
    /// [`Error::Unavailable`] if one of these is over, if a change is too late, or if a second session breaks; with
    /// [`Failure::Contended`] if a lock was not granted within the lock time-out.
    pub fn execute(
        &self,
        sql: &'static str,
        params: &[Param],
        deadline: Option<Instant>,
    ) -> Result<Vec<Row>, Failure> {
        let mut is_repeated = false;
        loop {
            let mut session = self.take_session()?;
            if deadline.is_some() && !session.is_alive() {
                self.servers.epoch.end(session.epoch);
                self.counters.broken.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let prepared = session.prepare(sql, params);
            let is_late = |deadline| Instant::now() + self.statement_timeout > deadline;
            // Checks the deadline after the statement is prepared, because preparing it may have waited for the server.
            if prepared.is_ok() && deadline.is_some_and(is_late) {
                return Err(Error::Unavailable("a change could not be sent in time".into()).into());
            }
            let failure = match prepared.and_then(|prepared| session.query(sql, prepared.as_ref(), params)) {
                Ok(rows) => return Ok(rows),
                Err(failure) => failure,
            };
            let is_stale = match failure.consequence {
                Consequence::Outdated => true,
                Consequence::Lent => {
                    if self.servers.record_lent(true) {
                        log::warn!("{POOLER_LENDS_SESSIONS} from now on");
                    }
                    true
                }
                Consequence::ReadOnly => self.servers.wants_primary() || self.servers.finds_primary(),
                _ => false,
            };
            let is_broken = failure.consequence == Consequence::Broken;
            if is_stale || is_broken {
                // Ends the epoch, so that this session and all older sessions are replaced.
                self.servers.epoch.end(session.epoch);
            }
            drop(session);
            let is_harmless = is_broken && (deadline.is_none() || !failure.sent);
            if is_repeated || !is_stale && !is_harmless {
                let lost = |failure: Failure| Error::Unavailable(failure.into_error().to_string().into());
                return Err(if is_harmless { lost(failure.failure).into() } else { failure.failure });
            }
            is_repeated = true;
            let count = if is_broken { &self.counters.broken } else { &self.counters.stale };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes the metrics of the sessions. `lock_retries` is how often a statement that met a lock was executed again.
    pub fn write_metrics(&self, text: &mut MetricsText, lock_retries: u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let r2d2::State { connections: open, idle_connections: idle, .. } = self.sessions().state();
        let help = "Sessions of the database that are open, by state.";
        text.family("userd_database_sessions", "gauge", help);
        text.value(&[("state", "idle")], idle.min(open));
        text.value(&[("state", "busy")], open.saturating_sub(idle));
        let most = self.sessions().max_size();
        text.gauge("userd_database_sessions_max", "The most sessions that the pool opens.", most);
        let help = "How often a session was waited for.";
        text.counter("userd_database_session_waits_total", help, get(&self.counters.waits));
        let help = "Waits for a session that were in vain.";
        text.counter("userd_database_session_timeouts_total", help, get(&self.counters.timeouts));
        let help =
            "Statements executed again, by what they met: a lock, a broken connection, a session of no use.";
        text.family("userd_database_retries_total", "counter", help);
        text.value(&[("reason", "lock")], lock_retries);
        text.value(&[("reason", "connection")], get(&self.counters.broken));
        text.value(&[("reason", "session")], get(&self.counters.stale));
    }

    /// Returns the pool of r2d2.
    fn sessions(&self) -> &r2d2::Pool<SessionManager> {
        self.sessions.as_ref().expect("only drop takes it")
    }

    /// Takes a session from the pool, but none that was opened before the server has changed. Blocks up to the acquire time-out.
    fn take_session(&self) -> Result<PooledConnection<SessionManager>, Error> {
        let deadline = Instant::now() + self.acquire_timeout;
        loop {
            let session = match self.sessions().try_get() {
                Some(session) => session,
                None => {
                    self.counters.waits.fetch_add(1, Ordering::Relaxed);
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.sessions().get_timeout(left).map_err(|error| {
                        self.counters.timeouts.fetch_add(1, Ordering::Relaxed);
                        Error::Unavailable(format!("no database connection became free: {error}").into())
                    })?
                }
            };
            if session.epoch == self.servers.epoch.current() {
                return Ok(session);
            }
        }
    }
}

/// Drops the sessions outside of any async runtime, because the pool may be dropped in an async task.
impl Drop for Pool {
    fn drop(&mut self) {
        let sessions = self.sessions.take();
        outside_of_runtimes(|| drop(sessions));
    }
}

/// Opens sessions for r2d2, and tells it which sessions it has to replace.
struct SessionManager {
    servers: Arc<DbHosts>,
    /// The statements that set up a new session.
    set_up: String,
    /// The time of the last line about a failed connect.
    last_log_at: Mutex<Option<Instant>>,
}

impl ManageConnection for SessionManager {
    type Connection = Session;
    type Error = ConnectError;

    /// Opens a session. Logs a failure at most once a second, because each session of the pool is tried twice a second.
    fn connect(&self) -> Result<Session, ConnectError> {
        self.servers.connect(&self.set_up).inspect_err(|error| {
            let mut last = self.last_log_at.lock();
            let is_first = last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1));
            // Logs nothing after the service is dropped, when only this manager still has the servers.
            if is_first && Arc::strong_count(&self.servers) > 1 {
                *last = Some(Instant::now());
                log::warn!("cannot connect to the database: {error}");
            }
        })
    }

    /// Accepts every session. r2d2 never calls this here, because a check of each session that is taken would cost a round trip.
    fn is_valid(&self, _: &mut Session) -> Result<(), ConnectError> {
        Ok(())
    }

    /// Returns true if a session that is given back has to be replaced.
    fn has_broken(&self, session: &mut Session) -> bool {
        let is_old = session.epoch != self.servers.epoch.current();
        is_old || session.connection.is_closed()
    }
}
