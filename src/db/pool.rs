//! The pool of sessions: how a session is taken, opened and replaced, and when a statement is executed again.

use super::blocking::outside_of_runtimes;
use super::connect::{ConnectError, POOLER_LENDS, Servers};
use super::session::{Param, Session};
use super::settings;
use super::sqlstate::{Consequence, Failure};
use crate::{config::Config, error::Error, metrics::Text};
use parking_lot::Mutex;
use postgres::Row;
use r2d2::{ManageConnection, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A pool of sessions.
pub struct Pool {
    /// `None` once `drop` has taken it.
    sessions: Option<r2d2::Pool<Manager>>,
    servers: Arc<Servers>,
    acquire_timeout: Duration,
    /// The longest time that a statement may take.
    pub statement_timeout: Duration,
    figures: Arc<Figures>,
}

/// Counts of waits for sessions, and of statements that were executed again.
#[derive(Debug, Default)]
struct Figures {
    /// Waits for a session.
    waits: AtomicU64,
    /// Waits for a session that timed out.
    timeouts: AtomicU64,
    /// Statements that were executed again because a connection broke.
    broken: AtomicU64,
    /// Statements that were executed again because the session was too old.
    stale: AtomicU64,
}

impl Pool {
    /// Returns the pool of a service. It opens its sessions in the background: this does not block and does not fail.
    pub fn new(servers: Arc<Servers>, config: &Config) -> Pool {
        /// The longest time until the pool has sessions again once the database is back: r2d2 waits at most half of it
        /// between two tries to connect.
        const RETRY_WITHIN: Duration = Duration::from_secs(1);
        let statement_timeout = servers.statement_timeout();
        let figures = Arc::<Figures>::default();
        let log = LogConnectError { pool: Arc::downgrade(&figures), last: Mutex::default() };
        let manager =
            Manager { servers: servers.clone(), set_up: settings::statements("set", statement_timeout) };
        // One thread suffices: r2d2's default of three is for pools that reconnect in bulk.
        let threads = ScheduledThreadPool::builder()
            .num_threads(1)
            .thread_name_pattern("pool-{}")
            // A drop discards r2d2's look for idle connections, which is scheduled every 30 s: the thread would
            // outlive the pool until then.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let sessions = r2d2::Pool::builder()
            .max_size(config.db_pool_size)
            .test_on_check_out(false)
            .connection_timeout(RETRY_WITHIN)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(log))
            .build_unchecked(manager);
        let (sessions, acquire_timeout) = (Some(sessions), config.db_acquire_timeout);
        Pool { sessions, servers, acquire_timeout, statement_timeout, figures }
    }

    /// Returns the rows of a statement; of a read if there is no `deadline`, else of a change for a request that ends
    /// then. A change is sent only while the statement time-out is left until then, so that it has ended before the
    /// request is answered 503; else [`Error::Unavailable`]. If the session breaks, a read is executed once more on a
    /// new one, and a change only if the server has certainly not executed it; [`Error::Unavailable`] if that breaks, too.
    ///
    /// Blocks for a free connection up to the acquire time-out, then [`Error::Unavailable`]; and for an answer, as
    /// which the database sends [`Error::Unavailable`] after the statement time-out. [`Failure::Contended`] if a lock was
    /// not granted within the lock time-out.
    pub fn execute(
        &self,
        sql: &'static str,
        params: &[Param],
        deadline: Option<Instant>,
    ) -> Result<Vec<Row>, Failure> {
        let mut is_repeated = false;
        loop {
            let mut session = self.session()?;
            if deadline.is_some() && !session.is_alive() {
                self.servers.epoch.end(session.epoch);
                self.figures.broken.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let prepared = session.prepare(sql, params);
            let is_late = |deadline| Instant::now() + self.statement_timeout > deadline;
            // The deadline is checked after the statement is prepared, as preparing it may have waited for the
            // server.
            if prepared.is_ok() && deadline.is_some_and(is_late) {
                return Err(Error::Unavailable("a change could not be sent in time".into()).into());
            }
            let failure = match prepared.and_then(|prepared| session.query(sql, prepared.as_ref(), params)) {
                Ok(rows) => return Ok(rows),
                Err(failure) => failure,
            };
            let is_stale = match failure.consequence {
                Consequence::Outdated => true,
                Consequence::OfAnotherSession => {
                    if self.servers.learn(true) {
                        log::warn!("{POOLER_LENDS} from now on");
                    }
                    true
                }
                Consequence::ReadOnly => self.servers.wants_primary() || self.servers.finds_primary(),
                _ => false,
            };
            let is_broken = failure.consequence == Consequence::Broken;
            if is_stale || is_broken {
                // The epoch ends, so that this session and all older ones are replaced.
                self.servers.epoch.end(session.epoch);
            }
            drop(session);
            let is_harmless = is_broken && (deadline.is_none() || !failure.sent);
            if is_repeated || !is_stale && !is_harmless {
                let lost = |failure: Failure| Error::Unavailable(failure.into_error().to_string().into());
                return Err(if is_harmless { lost(failure.failure).into() } else { failure.failure });
            }
            is_repeated = true;
            let count = if is_broken { &self.figures.broken } else { &self.figures.stale };
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes the figures; `lock_retries`: how often a statement that met a lock was executed again.
    pub fn write_figures(&self, text: &mut Text, lock_retries: u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let r2d2::State { connections: open, idle_connections: idle, .. } = self.sessions().state();
        let help = "Sessions of the database that are open, by state.";
        text.family("userd_database_sessions", "gauge", help);
        text.value(&[("state", "idle")], idle.min(open));
        text.value(&[("state", "busy")], open.saturating_sub(idle));
        let most = self.sessions().max_size();
        text.gauge("userd_database_sessions_max", "The most sessions that the pool opens.", most);
        let help = "How often a session was waited for.";
        text.counter("userd_database_session_waits_total", help, get(&self.figures.waits));
        let help = "Waits for a session that were in vain.";
        text.counter("userd_database_session_timeouts_total", help, get(&self.figures.timeouts));
        let help =
            "Statements executed again, by what they met: a lock, a broken connection, a session of no use.";
        text.family("userd_database_retries_total", "counter", help);
        text.value(&[("reason", "lock")], lock_retries);
        text.value(&[("reason", "connection")], get(&self.figures.broken));
        text.value(&[("reason", "session")], get(&self.figures.stale));
    }

    fn sessions(&self) -> &r2d2::Pool<Manager> {
        self.sessions.as_ref().expect("only drop takes it")
    }

    fn session(&self) -> Result<PooledConnection<Manager>, Error> {
        let deadline = Instant::now() + self.acquire_timeout;
        loop {
            let session = match self.sessions().try_get() {
                Some(session) => session,
                None => {
                    self.figures.waits.fetch_add(1, Ordering::Relaxed);
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.sessions().get_timeout(left).map_err(|error| {
                        self.figures.timeouts.fetch_add(1, Ordering::Relaxed);
                        Error::Unavailable(format!("no database connection became free: {error}").into())
                    })?
                }
            };
            if session.epoch == self.servers.epoch.now() {
                return Ok(session);
            }
        }
    }
}

/// Drops the sessions outside of any async runtime: the pool may be dropped in an async task.
impl Drop for Pool {
    fn drop(&mut self) {
        let sessions = self.sessions.take();
        outside_of_runtimes(|| drop(sessions));
    }
}

/// Opens sessions, and tells r2d2 which are to be replaced.
struct Manager {
    servers: Arc<Servers>,
    set_up: String,
}

impl ManageConnection for Manager {
    type Connection = Session;
    type Error = ConnectError;

    fn connect(&self) -> Result<Session, ConnectError> {
        self.servers.connect(&self.set_up)
    }

    /// Accepts every session. r2d2 does not ask, as a check at each checkout would cost a round trip.
    fn is_valid(&self, _: &mut Session) -> Result<(), ConnectError> {
        Ok(())
    }

    fn has_broken(&self, session: &mut Session) -> bool {
        let is_old = session.epoch != self.servers.epoch.now();
        is_old || session.connection.is_closed()
    }
}

/// Logs failed connects, at most one a second, as each session of the pool tries twice a second. Logs nothing once the pool
/// is dropped.
#[derive(Debug)]
struct LogConnectError {
    pool: Weak<Figures>,
    last: Mutex<Option<Instant>>,
}

impl r2d2::HandleError<ConnectError> for LogConnectError {
    fn handle_error(&self, error: ConnectError) {
        let mut last = self.last.lock();
        let is_first = last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1));
        if is_first && self.pool.strong_count() > 0 {
            *last = Some(Instant::now());
            log::warn!("cannot connect to the database: {error}");
        }
    }
}
