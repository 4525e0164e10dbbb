//! The pool of database sessions. Opens and replaces sessions, and executes statements. If a session ends or becomes
//! stale during a statement, executes the statement again in another session, unless it may have changed a row.

use super::blocking::run_outside_of_runtimes;
use super::connect::{ConnectError, DbHosts, POOLER_NOTE};
use super::session::{Param, Session};
use super::session_settings;
use super::sqlstate::{Failure, SessionState};
use crate::{config::Config, error::Error, metrics::MetricsText};
use parking_lot::Mutex;
use postgres::Row;
use r2d2::{ManageConnection, NopErrorHandler, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A pool of the sessions in which a service executes its statements.
pub struct Pool {
    /// The pool of the crate r2d2, which holds the sessions. `None` once `drop` has taken it.
    r2d2_pool: Option<r2d2::Pool<SessionManager>>,
    hosts: Arc<DbHosts>,
    acquire_timeout: Duration,
    /// The longest time that a statement may take.
    pub statement_timeout: Duration,
    counters: PoolCounters,
}

/// Counters of waits for a session, and of statements that were executed again.
#[derive(Debug, Default)]
struct PoolCounters {
    /// How often a statement has waited for a free session.
    session_waits: AtomicU64,
    /// How often a statement has failed because no session became free in time.
    wait_timeouts: AtomicU64,
    /// How often a statement was given another session because its connection had ended.
    broken_retries: AtomicU64,
    /// How often a statement was executed again because its session was stale: its prepared statement was outdated or
    /// lost, or its server did not take changes any more.
    stale_retries: AtomicU64,
}

impl Pool {
    /// Returns the pool of a service. Does not block and does not fail, because a thread opens the sessions in the
    /// background.
    pub fn new(hosts: Arc<DbHosts>, config: &Config) -> Pool {
        /// The longest time that the pool takes to connect after the database is back. r2d2 pauses at most half of this
        /// time between two tries.
        const MAX_RECONNECT_TIME: Duration = Duration::from_secs(1);
        let statement_timeout = hosts.statement_timeout();
        let setup_sql = session_settings::setup_sql("set", statement_timeout);
        let manager = SessionManager { hosts: hosts.clone(), setup_sql, failure_logged_at: Mutex::default() };
        // Takes one thread, because r2d2's default of three threads is for pools that often open many sessions.
        let threads = ScheduledThreadPool::builder()
            .num_threads(1)
            .thread_name_pattern("pool-{}")
            // Discards r2d2's next check of idle connections when the pool is dropped, because the thread would live
            // until this check, for up to 30 s.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let r2d2_pool = r2d2::Pool::builder()
            .max_size(config.db_pool_size)
            .test_on_check_out(false)
            .connection_timeout(MAX_RECONNECT_TIME)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(NopErrorHandler))
            .build_unchecked(manager);
        let (r2d2_pool, acquire_timeout) = (Some(r2d2_pool), config.db_acquire_timeout);
        Pool { r2d2_pool, hosts, acquire_timeout, statement_timeout, counters: PoolCounters::default() }
    }

    /// Executes a statement and returns its rows. With a `deadline`, the statement is a change for a request that has
    /// to be answered by then; without it, the statement is a read.
    ///
    /// A change is sent only if the statement time-out ends before the deadline, so that no change is in progress when
    /// the request is answered with 503. If the session breaks, executes a read once more in a new session, and a
    /// change only if the server cannot have executed it.
    ///
    /// Blocks for a free session up to the acquire time-out, then for the statement up to the statement time-out. Fails
    /// with [`Error::Unavailable`] if one of these time-outs is over, if it is too late to send a change, or if a
    /// second session breaks; with [`Failure::Contended`] if a lock was not granted within the lock time-out.
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
                self.hosts.epoch.end(session.epoch);
                self.counters.broken_retries.fetch_add(1, Ordering::Relaxed);
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
            let is_stale = match failure.session_state {
                SessionState::OutdatedStatement => true,
                SessionState::LentByPooler => {
                    if self.hosts.record_pooler(true) {
                        log::warn!("{POOLER_NOTE} from now on");
                    }
                    true
                }
                SessionState::ReadOnly => self.hosts.wants_primary() || self.hosts.finds_primary(),
                _ => false,
            };
            let is_broken = failure.session_state == SessionState::Broken;
            if is_stale || is_broken {
                // Ends the epoch, so that this session and all older sessions are replaced.
                self.hosts.epoch.end(session.epoch);
            }
            drop(session);
            let is_harmless = is_broken && (deadline.is_none() || !failure.was_sent);
            if is_repeated || !is_stale && !is_harmless {
                let lost = |failure: Failure| Error::Unavailable(failure.into_error().to_string().into());
                return Err(if is_harmless { lost(failure.failure).into() } else { failure.failure });
            }
            is_repeated = true;
            let count = if is_broken { &self.counters.broken_retries } else { &self.counters.stale_retries };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes the metrics of the sessions. `lock_retries` is how often a statement was executed again because of a
    /// lock.
    pub fn write_metrics(&self, text: &mut MetricsText, lock_retries: u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let r2d2::State { connections: open, idle_connections: idle, .. } = self.r2d2_pool().state();
        let help = "Sessions of the database that are open, by state.";
        text.add_family("userd_database_sessions", "gauge", help);
        text.add_value(&[("state", "idle")], idle.min(open));
        text.add_value(&[("state", "busy")], open.saturating_sub(idle));
        let most = self.r2d2_pool().max_size();
        text.add_gauge("userd_database_sessions_max", "The most sessions that the pool opens.", most);
        let help = "How often a session was waited for.";
        text.add_counter("userd_database_session_waits_total", help, get(&self.counters.session_waits));
        let help = "Waits for a session that were in vain.";
        text.add_counter("userd_database_session_timeouts_total", help, get(&self.counters.wait_timeouts));
        let help =
            "Statements executed again, by what they met: a lock, a broken connection, a session of no use.";
        text.add_family("userd_database_retries_total", "counter", help);
        text.add_value(&[("reason", "lock")], lock_retries);
        text.add_value(&[("reason", "connection")], get(&self.counters.broken_retries));
        text.add_value(&[("reason", "session")], get(&self.counters.stale_retries));
    }

    fn r2d2_pool(&self) -> &r2d2::Pool<SessionManager> {
        self.r2d2_pool.as_ref().expect("only drop takes it")
    }

    /// Takes a session of the current epoch from the pool. Older sessions may be of a server that another one has
    /// replaced. Blocks up to the acquire time-out.
    fn take_session(&self) -> Result<PooledConnection<SessionManager>, Error> {
        let deadline = Instant::now() + self.acquire_timeout;
        loop {
            let session = match self.r2d2_pool().try_get() {
                Some(session) => session,
                None => {
                    self.counters.session_waits.fetch_add(1, Ordering::Relaxed);
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.r2d2_pool().get_timeout(left).map_err(|error| {
                        self.counters.wait_timeouts.fetch_add(1, Ordering::Relaxed);
                        Error::Unavailable(format!("no database connection became free: {error}").into())
                    })?
                }
            };
            if session.epoch == self.hosts.epoch.current() {
                return Ok(session);
            }
        }
    }
}

/// Drops the sessions outside of any async runtime, because the pool may be dropped in an async task.
impl Drop for Pool {
    fn drop(&mut self) {
        let r2d2_pool = self.r2d2_pool.take();
        run_outside_of_runtimes(|| drop(r2d2_pool));
    }
}

/// Opens sessions for r2d2, and tells it which sessions it has to replace.
struct SessionManager {
    hosts: Arc<DbHosts>,
    /// The statements that set up a new session, such as its time-outs.
    setup_sql: String,
    /// The time of the last log line about a failed connect.
    failure_logged_at: Mutex<Option<Instant>>,
}

impl ManageConnection for SessionManager {
    type Connection = Session;
    type Error = ConnectError;

    /// Opens a session. Logs a failure at most once a second, because each session of the pool is tried twice a second.
    fn connect(&self) -> Result<Session, ConnectError> {
        self.hosts.connect(&self.setup_sql).inspect_err(|error| {
            let mut last = self.failure_logged_at.lock();
            let is_first = last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1));
            // Logs nothing after the service is dropped, when nothing but this manager refers to the hosts.
            if is_first && Arc::strong_count(&self.hosts) > 1 {
                *last = Some(Instant::now());
                log::warn!("cannot connect to the database: {error}");
            }
        })
    }

    /// Accepts every session. r2d2 does not call this method here, because the pool turns the check off: it would cost
    /// a round trip for each statement.
    fn is_valid(&self, _: &mut Session) -> Result<(), ConnectError> {
        Ok(())
    }

    /// Returns true if a session that is given back has to be replaced.
    fn has_broken(&self, session: &mut Session) -> bool {
        let is_old = session.epoch != self.hosts.epoch.current();
        is_old || session.connection.is_closed()
    }
}
