//! The pool of sessions: how a session is taken, opened and replaced, and when a statement is executed again.

use super::{
    figures::Figures,
    retry::Backoff,
    servers::Servers,
    session::{Failure, Param, Session},
    settings,
    sqlstate::Meaning,
    watchdog::ConnectError,
};
use crate::{config::Config, error::Error, metrics::Text};
use parking_lot::Mutex;
use postgres::Row;
use r2d2::{ManageConnection, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};
use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// How long a statement waits for a lock before it is given up and executed again later: no statement that another
/// client's lock blocks keeps a session for longer. Many times what a commit takes, and short beside a request.
pub const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// A pool of sessions.
pub struct Pool {
    pool: r2d2::Pool<Manager>,
    servers: Arc<Servers>,
    acquire_timeout: Duration,
    statement_timeout: Duration,
    outage: Outage,
    figures: Figures,
}

/// Since when the pool could open no connection. A prober's connections say nothing of that.
type Outage = Arc<Mutex<Option<Instant>>>;

impl Pool {
    /// The pool of a service of these settings, which opens its connections in the background: this does not block and
    /// does not fail.
    pub fn new(servers: Arc<Servers>, config: &Config) -> Pool {
        /// r2d2 waits at most half of this between its tries to connect, so the pool is back this soon
        /// after the database is.
        const RETRY_WITHIN: Duration = Duration::from_secs(1);
        /// The database ends a statement by itself at the statement time-out. Without any answer, a session waits
        /// for this much longer before it asks the database to cancel it.
        const SLACK: Duration = Duration::from_millis(300);
        let statement_timeout = config.limits.request_timeout / 2;
        let outage = Outage::default();
        let manager = Manager {
            servers: servers.clone(),
            outage: outage.clone(),
            set_up: if config.db_prepared { set_up(statement_timeout) } else { String::new() },
            prepared: config.db_prepared,
            answer_timeout: statement_timeout + SLACK,
        };
        // r2d2's default of three threads is for pools that reconnect in bulk.
        let threads = ScheduledThreadPool::builder()
            .num_threads(1)
            .thread_name_pattern("pool-{}")
            // r2d2 looks for idle connections every 30 s; the thread would wait for the next time.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let pool = r2d2::Pool::builder()
            .max_size(config.db_pool_size)
            .test_on_check_out(false)
            .connection_timeout(RETRY_WITHIN)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(LogConnectError::default()))
            .build_unchecked(manager);
        let acquire_timeout = config.db_acquire_timeout;
        Pool { pool, servers, acquire_timeout, statement_timeout, outage, figures: Figures::default() }
    }

    /// The rows of a read. Where its session breaks it is executed again on a new one, until the statement time-out
    /// has passed.
    ///
    /// Blocks for a free connection up to the acquire time-out, then [`Error::Unavailable`]; and for an answer up to
    /// the statement time-out and a second, then [`Error::Unavailable`] too. [`Error::Contended`] where a lock was not
    /// granted within the lock time-out.
    pub(super) fn read(&self, sql: &'static str, params: &[Param]) -> Result<Vec<Row>, Error> {
        self.execute(true, |session| session.query(sql, params))
    }

    /// The rows that a write returns. It is executed again, as a read is, only where the server has certainly not
    /// executed it. Had the connection broken after it was sent, that would be unknown.
    ///
    /// Blocks as [`Pool::read`] does.
    pub(super) fn write(&self, sql: &'static str, params: &[Param]) -> Result<Vec<Row>, Error> {
        self.execute(false, |session| session.query(sql, params))
    }

    /// The rows of a statement of changes for a request that ends at `deadline`. It is sent only while the statement
    /// time-out is left until then, so that it has ended before the request is answered 503; else
    /// [`Error::Unavailable`]. Executed again as [`Pool::write`] does.
    pub(super) fn change(
        &self,
        sql: &'static str,
        params: &[Param],
        deadline: Instant,
    ) -> Result<Vec<Row>, Error> {
        self.execute(false, |session| match Instant::now() + self.statement_timeout <= deadline {
            true => session.query(sql, params),
            false => Err(Failure::late()),
        })
    }

    /// How long a statement may take.
    pub(super) fn statement_timeout(&self) -> Duration {
        self.statement_timeout
    }

    fn execute<T>(
        &self,
        read: bool,
        mut statement: impl FnMut(&mut Session) -> Result<T, Failure>,
    ) -> Result<T, Error> {
        /// While a database ends every session that it accepts, each attempt costs it a new one.
        const FIRST_PAUSE: Duration = Duration::from_millis(1);
        const LONGEST_PAUSE: Duration = Duration::from_millis(100);
        let deadline = Instant::now() + self.statement_timeout;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE, deadline);
        let mut was_stale = false;
        loop {
            let mut session = self.session()?;
            let outcome = match read || session.connection.watch().is_quiet() {
                true => statement(&mut session),
                false => Err(Failure::broken(false, "the database ended a session")),
            };
            let failure = match outcome {
                Ok(rows) => return Ok(rows),
                Err(failure) => failure,
            };
            let is_stale = match failure.meaning {
                Meaning::Outdated => true,
                Meaning::ReadOnly => self.servers.wants_primary,
                _ => false,
            };
            if is_stale || failure.meaning == Meaning::Broken {
                // It is replaced, and so are all that are as old.
                self.servers.end_epoch(session.epoch);
            }
            drop(session);
            match failure.meaning {
                Meaning::Broken if (read || !failure.sent) && backoff.pause() => {
                    self.figures.broken.fetch_add(1, Ordering::Relaxed);
                }
                _ if is_stale && !was_stale => {
                    was_stale = true;
                    self.figures.stale.fetch_add(1, Ordering::Relaxed);
                }
                _ => return Err(failure.error),
            }
        }
    }

    /// Writes what is counted; `lock_retries`: how often a statement that met a lock was executed again.
    pub fn write_figures(&self, text: &mut Text, lock_retries: u64) {
        self.figures.write(text, &self.pool.state(), self.pool.max_size(), lock_retries);
    }

    fn session(&self) -> Result<PooledConnection<Manager>, Error> {
        let mut deadline = None;
        loop {
            let session = match self.pool.try_get() {
                Some(session) => session,
                None => {
                    let start = Instant::now();
                    let deadline = *deadline.get_or_insert_with(|| self.acquire_deadline());
                    let waited = self.pool.get_timeout(deadline.saturating_duration_since(start));
                    self.figures.waited(start.elapsed(), waited.is_err());
                    waited.map_err(|error| {
                        let what = format!("no database connection became free: {error}");
                        Error::Unavailable(what.into())
                    })?
                }
            };
            if session.epoch == self.servers.epoch() {
                return Ok(session);
            }
        }
    }

    /// A short outage is waited out; once one has lasted for the acquire time-out, requests fail at once.
    fn acquire_deadline(&self) -> Instant {
        let now = Instant::now();
        let outage = match self.pool.state().connections {
            0 => *self.outage.lock(),
            _ => None,
        };
        outage.unwrap_or(now) + self.acquire_timeout
    }
}

/// Opens sessions, and tells r2d2 which are to be replaced.
struct Manager {
    servers: Arc<Servers>,
    set_up: String,
    prepared: bool,
    answer_timeout: Duration,
    outage: Outage,
}

impl ManageConnection for Manager {
    type Connection = Session;
    type Error = ConnectError;

    fn connect(&self) -> Result<Session, ConnectError> {
        let connected = self.servers.connect(&self.set_up);
        let mut outage = self.outage.lock();
        *outage = connected.as_ref().err().and(outage.or_else(|| Some(Instant::now())));
        drop(outage);
        let (connection, epoch) = connected?;
        Ok(Session {
            connection,
            statements: self.prepared.then(Vec::new),
            answer_timeout: self.answer_timeout,
            epoch,
        })
    }

    /// Never asked: a check at each checkout would cost a round trip.
    fn is_valid(&self, _: &mut Session) -> Result<(), ConnectError> {
        Ok(())
    }

    fn has_broken(&self, session: &mut Session) -> bool {
        let is_old = session.epoch != self.servers.epoch();
        is_old || session.connection.is_closed() || session.connection.watch().expired()
    }
}

/// Each session tries by itself, twice a second: one line a second tells as much.
#[derive(Debug, Default)]
struct LogConnectError(Mutex<Option<Instant>>);

impl r2d2::HandleError<ConnectError> for LogConnectError {
    fn handle_error(&self, error: ConnectError) {
        let now = Instant::now();
        let mut last = self.0.lock();
        if last.is_none_or(|last| now >= last + Duration::from_secs(1)) {
            *last = Some(now);
            log::warn!("cannot connect to the database: {error}");
        }
    }
}

/// What every session is set to. The time-out for locks is set here, not in a statement: a statement locks its tables
/// before it can set anything.
fn set_up(statement_timeout: Duration) -> String {
    let [statement, lock] = [statement_timeout, LOCK_TIMEOUT].map(|time| time.as_millis().max(1));
    format!("{}set statement_timeout = {statement}; set lock_timeout = {lock}", settings::statements())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Limits;
    use crate::db::tests::{LONG, Until, server, watchdog};
    use std::{sync::mpsc, thread};

    fn pool(until: Until, statement_timeout: Duration) -> Pool {
        let (watchdog, tls) = watchdog();
        let limits = Limits { request_timeout: statement_timeout, ..Limits::default() };
        let config = Config {
            db_pool_size: 1,
            db_acquire_timeout: LONG,
            limits,
            db_prepared: false,
            ..Config::default()
        };
        Pool::new(Arc::new(Servers::new(&server(until), tls, watchdog)), &config)
    }

    /// What `work` returns; it does not block for long.
    fn in_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, outcome) = mpsc::channel();
        thread::spawn(move || done.send(work()));
        outcome.recv_timeout(LONG).expect("it ends in time")
    }

    #[test]
    fn a_silent_server_blocks_neither_statements_nor_the_closing_of_sessions() {
        let outcome = in_time(|| {
            let pool = pool(Until::Refused, LONG);
            let outcome = pool.write("select", &[]);
            drop(pool);
            outcome
        });
        assert!(matches!(outcome, Err(Error::Database { code, .. }) if code == "XX000"));

        for read in [true, false] {
            let outcome = in_time(move || {
                let pool = pool(Until::Set, Duration::from_millis(100));
                let outcome = pool.execute(read, |session| session.query("select", &[]));
                drop(pool);
                outcome
            });
            assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
        }
    }
}
