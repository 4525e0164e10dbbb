//! The pool of sessions: who may use one, how it is opened, and when work is run again on another.
//!
//! The only room, with those beneath it, that knows SQL. Nothing here knows HTTP.

use super::{
    session::Session,
    target::Target,
    tls,
    watchdog::{ConnectError, Watchdog},
};
use crate::error::Error;
use postgres::{Config, config::TargetSessionAttrs};
use r2d2::{ManageConnection, PooledConnection};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How much of the database a pool may use, and how long its users wait.
#[derive(Debug, Clone, Copy)]
pub struct PoolLimits {
    /// Connections at the most.
    pub size: u32,
    /// How long a caller waits for a free one.
    pub acquire_timeout: Duration,
    /// How long the database works on one statement, or waits for a lock, before it gives up.
    pub statement_timeout: Duration,
    /// Whether sessions may keep prepared statements and settings between statements.
    pub prepared: bool,
}

/// A pool of sessions; clones share it.
#[derive(Clone)]
pub struct Pool {
    pool: r2d2::Pool<Manager>,
    acquire_timeout: Duration,
    answer_timeout: Duration,
    shared: Arc<Shared>,
}

/// What is known of the database, by those who use it and those who connect to it.
#[derive(Default)]
struct Shared {
    /// Sessions opened before the last seen break of a connection are not trusted any more.
    epoch: AtomicU64,
    /// Since when no connection could be opened.
    outage: Mutex<Option<Instant>>,
}

impl Shared {
    fn outage(&self) -> MutexGuard<'_, Option<Instant>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// A pool that opens its connections in the background: this does not block and does not fail.
    pub fn new(target: &Target, tls: tls::Connector, watchdog: Watchdog, limits: PoolLimits) -> Pool {
        /// r2d2 waits at most half of this between its tries to connect, so the pool is back this soon
        /// after the database is.
        const RETRY_WITHIN: Duration = Duration::from_secs(1);
        /// The database ends a statement by itself at the statement time-out; one that does not even say
        /// so is not waited for any longer than this.
        const SLACK: Duration = Duration::from_secs(1);
        let shared = Arc::new(Shared::default());
        let manager = Manager {
            config: target.config.clone(),
            tls,
            watchdog,
            set_up: match limits.prepared {
                true => set_up(limits.statement_timeout),
                false => String::new(),
            },
            prepared: limits.prepared,
            shared: shared.clone(),
        };
        // r2d2's default of three threads is for pools that reconnect in bulk.
        let threads = ScheduledThreadPool::builder()
            .num_threads(1)
            .thread_name_pattern("pool-{}")
            // r2d2 looks for idle connections every 30 s; the thread would wait for the next time.
            .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
            .build();
        let pool = r2d2::Pool::builder()
            .max_size(limits.size)
            .test_on_check_out(false)
            .connection_timeout(RETRY_WITHIN)
            .thread_pool(Arc::new(threads))
            .error_handler(Box::new(LogConnectError))
            .build_unchecked(manager);
        Pool {
            pool,
            acquire_timeout: limits.acquire_timeout,
            answer_timeout: limits.statement_timeout + SLACK,
            shared,
        }
    }

    /// Runs a read. It is run once more, on a fresh connection, where this one turns out to be broken; and up to three
    /// times, after pauses of 620 ms together, where the database gave it up for the sake of others.
    ///
    /// Blocks for a free connection up to the acquire time-out, then [`Error::Unavailable`]; and for an
    /// answer up to the statement time-out and a second, then [`Error::Unavailable`] too.
    pub fn read<T>(&self, work: impl FnMut(&mut Session) -> Result<T, Error>) -> Result<T, Error> {
        self.run_again(self.session()?, work, true)
    }

    /// Runs a write. It is run again, as a read is, only where it was certainly not done: it did not reach the server,
    /// or the server said so. Had the connection broken after it was sent, nobody could tell.
    ///
    /// Blocks as [`Pool::read`] does.
    pub fn write<T>(&self, work: impl FnMut(&mut Session) -> Result<T, Error>) -> Result<T, Error> {
        loop {
            let mut session = self.session()?;
            // The server says nothing unasked but that it ends the session.
            if self.settle(&mut session) && session.watch.is_quiet() {
                return self.run_again(session, work, false);
            }
            self.distrust(&mut session);
        }
    }

    /// Once more at the most, but a few times where others came first.
    fn run_again<T>(
        &self,
        mut session: PooledConnection<Manager>,
        mut work: impl FnMut(&mut Session) -> Result<T, Error>,
        read: bool,
    ) -> Result<T, Error> {
        /// For the others to take what was given up for them: at once, it would often be taken back before they
        /// wake, and they would stand in each other's way again (3 of 25 times on a busy machine).
        const PAUSES: [Duration; 3] =
            [Duration::from_millis(20), Duration::from_millis(100), Duration::from_millis(500)];
        let give_up = Instant::now() + self.answer_timeout;
        let mut pauses = PAUSES.into_iter();
        let mut again = true;
        loop {
            let failure = match self.run(&mut session, &mut work, read) {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            };
            drop(session);
            match (failure, pauses.next()) {
                (Failure::Again(_), _) if again => again = false,
                (Failure::RolledBack(_), Some(pause)) if Instant::now() < give_up => thread::sleep(pause),
                (failure, _) => return Err(failure.into()),
            }
            session = self.session()?;
        }
    }

    /// Reads what the server still had to say after an error: the client does not wait for it. Returns whether the
    /// session is there to be used.
    fn settle(&self, session: &mut Session) -> bool {
        if !std::mem::take(&mut session.unsettled) {
            return true;
        }
        session.watch.begin(self.answer_timeout);
        let settled = session.client.batch_execute("");
        session.watch.end();
        settled.is_ok()
    }

    fn run<T>(
        &self,
        session: &mut Session,
        work: &mut impl FnMut(&mut Session) -> Result<T, Error>,
        read: bool,
    ) -> Result<T, Failure> {
        (session.sent, session.undone) = (false, false);
        session.watch.begin(self.answer_timeout);
        let result = work(session);
        session.watch.end();
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let broken = session.stale || session.client.is_closed();
        if broken {
            self.distrust(session);
        }
        if session.watch.expired() {
            let what = "the database fell silent, and its connection was closed";
            return Err(Failure::Final(Error::Unavailable(what.into())));
        }
        Err(match broken {
            true if session.undone || read || !session.sent => Failure::Again(error),
            false if session.undone => Failure::RolledBack(error),
            _ => Failure::Final(error),
        })
    }

    /// This session is replaced, and those of its age as well.
    fn distrust(&self, session: &mut Session) {
        session.stale = true;
        let next = session.epoch + 1;
        self.shared.epoch.fetch_max(next, Ordering::Relaxed);
    }

    fn session(&self) -> Result<PooledConnection<Manager>, Error> {
        let mut deadline = None;
        loop {
            let mut session = match self.pool.try_get() {
                Some(session) => session,
                None => {
                    let deadline = *deadline.get_or_insert_with(|| self.acquire_deadline());
                    let left = deadline.saturating_duration_since(Instant::now());
                    self.pool.get_timeout(left).map_err(|error| {
                        let what = format!("no database connection became free: {error}");
                        Error::Unavailable(what.into())
                    })?
                }
            };
            if session.epoch == self.shared.epoch.load(Ordering::Relaxed) {
                return Ok(session);
            }
            session.stale = true;
        }
    }

    /// A short outage is waited out; once one has lasted that long, nobody waits for its end.
    fn acquire_deadline(&self) -> Instant {
        let now = Instant::now();
        let outage = match self.pool.state().connections {
            0 => *self.shared.outage(),
            _ => None,
        };
        outage.unwrap_or(now) + self.acquire_timeout
    }
}

/// Why work on a session failed.
enum Failure {
    /// Nothing was changed, and trying again on another session may bring success.
    Again(Error),
    /// Nothing was changed for the sake of others, and trying again after them may bring success.
    RolledBack(Error),
    /// Trying again brings nothing, or too much.
    Final(Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Again(error) | Failure::RolledBack(error) | Failure::Final(error) => error,
        }
    }
}

/// Opens sessions, and tells r2d2 which are to be replaced.
struct Manager {
    config: Config,
    tls: tls::Connector,
    watchdog: Watchdog,
    set_up: String,
    prepared: bool,
    shared: Arc<Shared>,
}

impl Manager {
    fn open(&self) -> Result<Session, ConnectError> {
        // Read first: a break that is seen while this connects makes the new session suspect too.
        let epoch = self.shared.epoch.load(Ordering::Relaxed);
        let (client, watch) = self.watchdog.connect(&self.config, &self.tls, &self.set_up)?;
        Ok(Session {
            client,
            statements: self.prepared.then(Vec::new),
            watch,
            epoch,
            stale: false,
            sent: false,
            undone: false,
            unsettled: false,
            wants_primary: self.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite,
        })
    }
}

impl ManageConnection for Manager {
    type Connection = Session;
    type Error = ConnectError;

    fn connect(&self) -> Result<Session, ConnectError> {
        let opened = self.open();
        let mut outage = self.shared.outage();
        *outage = match opened {
            Ok(_) => None,
            Err(_) => outage.or_else(|| Some(Instant::now())),
        };
        drop(outage);
        opened
    }

    /// Never asked: a check at each checkout would cost a round trip.
    fn is_valid(&self, _: &mut Session) -> Result<(), ConnectError> {
        Ok(())
    }

    fn has_broken(&self, session: &mut Session) -> bool {
        session.stale || session.client.is_closed()
    }
}

#[derive(Debug)]
struct LogConnectError;

impl r2d2::HandleError<ConnectError> for LogConnectError {
    fn handle_error(&self, error: ConnectError) {
        log::warn!("cannot connect to the database: {error}");
    }
}

/// What every session is set to. Statements are written for read committed, whatever the role's default is: each
/// is a transaction. Pages want the last two: the planner takes one for dearer than it is where a
/// table has no statistics yet, and compiling the query then took 93 ms for a page of half a millisecond; and
/// planning it anew for each call took longer than running it.
fn set_up(statement_timeout: Duration) -> String {
    let milliseconds = statement_timeout.as_millis().max(1);
    format!(
        "set statement_timeout = {milliseconds}; set lock_timeout = {milliseconds}; \
         set default_transaction_isolation = 'read committed'; \
         set jit = off; set plan_cache_mode = force_generic_plan"
    )
}
