//! Opens sessions of the database by the settings. TCP notices within seconds that a server is gone. If a server is stopped
//! and its kernel still answers, a connect is given up, and an open session waits until the server goes on or ends.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

use super::session::Session;
use super::sqlstate::{asks_for_tls, explain, is_answered, is_final, is_unusable_answer};
use super::target::Target;
use super::tls::{self, Connector};
use crate::config::{Config, Database};
use crate::{error::StartError, secret};
use parking_lot::Mutex;
use postgres::Client;
use postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};
use r2d2::ManageConnection;
use r2d2_postgres::PostgresConnectionManager;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

/// Finding about a pooler in transaction mode.
pub(super) const LENT: &str =
    "a pooler lends its sessions for one transaction each: userd serves as with DB_PREPARED=false";

/// Remedy for a database that cannot be connected to.
const ANOTHER_DATABASE: &str =
    "; DATABASE_URL names another database, `userd --embedded` runs one of its own";

/// Remedy for a server that has refused a session without TLS.
const ONLY_TLS: &str = "; a server that takes TLS alone needs DB_SSL=true, and DB_SSL_CA if its authority is not the \
                        system's (sslmode and sslrootcert in DATABASE_URL)";

/// Remedy for a password that the client library refuses to prove, as that would take too long.
const MAX_ITERATIONS: &str =
    "; scram_iterations of the server may be 100000 at most: set it, and the password anew";

/// Descriptors that are open while a connection is made. The connection keeps five of them; the others are those of
/// looking up the name and of the socket.
const CONNECT_DESCRIPTORS: usize = 12;

/// The time that connecting to one host may take, unless `connect_timeout` is longer, as some databases have to wake up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The servers of a connection string, and all that it takes to connect to them.
pub struct Servers {
    /// The connection string.
    pub target: Target,
    tls: Connector,
    config: Config,
    /// The password of the last connect.
    password: Mutex<Option<Vec<u8>>>,
    /// True if each session belongs to one client, so that it keeps statements and settings; `None` until the first session
    /// shows it.
    are_own: Mutex<Option<bool>>,
    /// The statement that has sessions use the schema of the tables, once that is found.
    search_path: OnceLock<String>,
    epoch: AtomicU64,
    /// The number of connects that each host holds without an answer, and when the last one was given up.
    hanging: Vec<(Arc<AtomicUsize>, Mutex<Instant>)>,
    /// When a server that takes changes was looked for last.
    sought: Mutex<Option<Instant>>,
}

impl Servers {
    /// Returns the servers of these settings. Connects to none. Errors: [`StartError::Config`], files of TLS settings that cannot
    /// be used.
    pub fn new(config: &Config) -> Result<Arc<Servers>, StartError> {
        config.check()?;
        let target = Target::new(config)?;
        for warning in &target.warnings {
            log::warn!("DATABASE_URL: {warning}");
        }
        let tls = tls::connector(&target.tls).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        let is_known = !config.db_prepared || !config.find_pooler;
        Ok(Arc::new(Servers {
            tls,
            config: config.clone(),
            password: Mutex::new(target.hosts[0].get_password().map(<[u8]>::to_vec)),
            are_own: Mutex::new(is_known.then_some(config.db_prepared)),
            search_path: OnceLock::new(),
            epoch: AtomicU64::default(),
            hanging: target.hosts.iter().map(|_| (Arc::default(), Mutex::new(Instant::now()))).collect(),
            sought: Mutex::default(),
            target,
        }))
    }

    /// Returns true if only a server that takes changes is accepted.
    pub fn wants_primary(&self) -> bool {
        self.target.hosts[0].get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Has this session and later ones look names up in this schema, and in that of temporary tables last, also if a schema
    /// appears that the settings of the role name first. Does nothing if a pooler lends the sessions.
    pub(super) fn keep_schema(&self, client: &mut Client, name: &str) -> Result<(), postgres::Error> {
        let statement = || format!("set search_path = \"{}\", pg_temp; ", name.replace('"', "\"\""));
        let statement = self.search_path.get_or_init(statement);
        if *self.are_own.lock() == Some(true) { client.batch_execute(statement) } else { Ok(()) }
    }

    /// Returns false if a pooler lends sessions for one transaction each: they hold no statements and no settings.
    pub fn prepared(&self) -> bool {
        *self.are_own.lock() != Some(false)
    }

    /// Records that a pooler lends sessions, as a statement has met the session of another client. Does nothing if
    /// `db_prepared` was set on purpose.
    pub fn meets_another_session(&self) {
        if self.config.find_pooler && self.are_own.lock().replace(false) != Some(false) {
            log::warn!("{LENT} from now on");
        }
    }

    /// Returns true if [`Servers::prepared`] is false because a pooler was found.
    pub fn found_pooler(&self) -> bool {
        self.config.db_prepared && !self.prepared()
    }

    /// Returns the longest time that a statement of a service may take.
    pub fn statement_timeout(&self) -> Duration {
        self.config.limits.statement_timeout()
    }

    /// Connections of earlier epochs are not to be used any more: a server has ended one of them or does not answer, or
    /// another server has taken its place.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Ends an epoch, if it has not ended yet.
    pub fn end_epoch(&self, epoch: u64) {
        self.epoch.fetch_max(epoch + 1, Ordering::Relaxed);
    }

    /// Returns a session, in which `set_up` was executed if sessions hold settings. Blocks for two seconds with each host, or
    /// for a longer `connect_timeout`.
    pub(super) fn connect(&self, set_up: &str) -> Result<Session, ConnectError> {
        // Read first: if an epoch ends while this connects, the new connection is suspect, too.
        let epoch = self.epoch();
        let connection = self.open(set_up, None, Duration::MAX)?;
        let statements = self.prepared().then(Vec::new);
        Ok(Session { connection, statements, epoch, answered: Instant::now() })
    }

    /// Returns true if a new session takes changes. Looks at most once a second, as a database may take none for long.
    pub fn finds_primary(&self) -> bool {
        const PAUSE: Duration = Duration::from_secs(1);
        let Some(mut sought) = self.sought.try_lock() else { return false };
        if sought.is_some_and(|at: Instant| at.elapsed() < PAUSE) {
            return false;
        }
        let found = self.open("", Some(TargetSessionAttrs::ReadWrite), CONNECT_TIMEOUT);
        *sought = Some(Instant::now());
        found.is_ok()
    }

    /// Returns a session without bounds for its statements, as migrations, exports and imports take long. Tries until
    /// `db_connect_timeout` is up, with a line in the log for each try. A refusal that a retry would not change ends it at
    /// once. The first session shows if a pooler lends it: that, and one more connect, may take two seconds each beyond it.
    pub fn connect_for_long(&self) -> Result<Client, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const NO_BOUNDS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let mut deadline = Instant::now() + self.config.db_connect_timeout;
        let mut error = ConnectError::Silent;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.open(NO_BOUNDS, None, left) {
                Ok(client) if self.are_own.lock().is_some() => return Ok(client),
                // The next session is set up, if no pooler lends it.
                Ok(client) => {
                    let is_lent = self.lends(client);
                    self.are_own.lock().get_or_insert(!is_lent);
                    // The server has answered, and the look for a pooler may have used up the time.
                    deadline = deadline.max(Instant::now() + CONNECT_TIMEOUT);
                    continue;
                }
                // The last try has too little time for an answer, so that the error of an earlier one is reported.
                Err(ConnectError::Silent) if left < CONNECT_TIMEOUT => {}
                Err(refusal) => error = refusal,
            }
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final(error));
            if is_final || Instant::now() + PAUSE > deadline {
                let (tried, remedy) = (&self.target, self.remedy(&error));
                return Err(StartError::Database(format!("{error}; tried {tried}{remedy}")));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(PAUSE);
        }
    }

    /// Returns the remedy for a failed start, to end its line; an empty text if the error has it, or there is none.
    fn remedy(&self, error: &ConnectError) -> &'static str {
        let mut hosts = self.target.hosts.iter();
        let is_plain = hosts.any(|host| {
            matches!(host.get_hosts(), [Host::Tcp(_)]) && host.get_ssl_mode() == SslMode::Disable
        });
        match error {
            ConnectError::Refused(error) if asks_for_tls(error) && is_plain => ONLY_TLS,
            ConnectError::Refused(error) if is_unusable_answer(error) => MAX_ITERATIONS,
            ConnectError::Refused(error) if is_answered(error) => "",
            _ => ANOTHER_DATABASE,
        }
    }

    /// Returns whether a pooler lends its sessions for one transaction each: several of them serve one client, or one serves
    /// two. Blocks for up to two seconds; false if it cannot be told by then, as of a pooler with one session.
    pub fn lends(&self, mut client: Client) -> bool {
        /// Other clients of the pooler may come between two statements.
        const LOOKS: usize = 8;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let Ok(mut other) = self.open("", None, CONNECT_TIMEOUT) else { return false };
        let look = move || {
            let began = session(&mut client)?;
            for _ in 0..LOOKS {
                let (of_other, own) = (session(&mut other)?, session(&mut client)?);
                if own != began || of_other == own {
                    return Ok(true);
                }
            }
            Ok::<_, postgres::Error>(false)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        matches!(within(left, &Arc::default(), look), Ok(Ok(true)))
    }

    /// Returns a session of the first host that gives one within this time.
    fn open(
        &self,
        set_up: &str,
        attrs: Option<TargetSessionAttrs>,
        longest: Duration,
    ) -> Result<Client, ConnectError> {
        let (began, mut refusal) = (Instant::now(), ConnectError::Silent);
        let mut order: Vec<usize> = (0..self.target.hosts.len()).collect();
        if self.target.hosts[0].get_load_balance_hosts() == LoadBalanceHosts::Random {
            order.sort_by_cached_key(|at| RandomState::new().hash_one(at));
        }
        for at in order {
            let mut host = self.target.hosts[at].clone();
            host.target_session_attrs(attrs.unwrap_or(host.get_target_session_attrs()));
            match self.open_at(at, host, set_up, longest.saturating_sub(began.elapsed())) {
                Ok(client) => return Ok(client),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// Connects to one host. If connects to it are unanswered, it is tried after ever longer pauses, as each keeps a thread.
    fn open_at(
        &self,
        at: usize,
        mut host: postgres::Config,
        set_up: &str,
        longest: Duration,
    ) -> Result<Client, ConnectError> {
        const PAUSE: Duration = Duration::from_millis(250);
        let (hanging, since) = &self.hanging[at];
        let count = hanging.load(Ordering::Relaxed) as u32;
        if since.lock().elapsed() < PAUSE * count * count {
            return Err(ConnectError::Silent);
        }
        let bound = host.get_connect_timeout().map_or(CONNECT_TIMEOUT, |time| CONNECT_TIMEOUT.max(*time));
        if host.get_connect_timeout().is_none() {
            // Leaves time for another address of the name.
            host.connect_timeout(CONNECT_TIMEOUT / 2);
        }
        if let Some(password) = self.password() {
            host.password(password);
        }
        let search_path = self.search_path.get().map_or("", String::as_str);
        let set_up =
            if *self.are_own.lock() == Some(true) { format!("{search_path}{set_up}") } else { String::new() };
        let tls = self.tls.clone();
        let connect = move || {
            let mut client = PostgresConnectionManager::new(host, tls).connect()?;
            client.batch_execute(&set_up).map(|()| client)
        };
        let connected = within(bound.min(longest), hanging, || without_panic(connect));
        if matches!(connected, Err(ConnectError::Silent)) {
            *since.lock() = Instant::now();
        }
        connected?.map_err(ConnectError::System)?.map_err(ConnectError::Refused)
    }

    /// Returns the password. Reads it again if it is in a file, as the file may have changed.
    fn password(&self) -> Option<Vec<u8>> {
        let mut password = self.password.lock();
        if let Some(file) = &self.config.db_password_file {
            let read = secret::read(file).and_then(|text| match self.config.database {
                Database::Parts { .. } => Ok(Some(text.into_bytes())),
                Database::Url(_) => {
                    Ok(Target::parse(&text, Some(""))?.hosts[0].get_password().map(<[u8]>::to_vec))
                }
            });
            match read {
                Ok(new) => *password = new.or_else(|| password.take()),
                Err(problem) => {
                    log::warn!("the password stays as it was, its file cannot be used: {problem}")
                }
            }
        }
        password.clone()
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The network, or the server, refused.
    #[error("{}", explain(.0))]
    Refused(postgres::Error),
    /// The server has accepted the connection, and does not answer.
    #[error("the server does not answer")]
    Silent,
    /// The system has nothing to connect with: no descriptor is left, or no memory for a thread.
    #[error("the system refuses a connection: {0}")]
    System(io::Error),
}

/// Returns the session of the server that serves a client now.
fn session(client: &mut Client) -> Result<String, postgres::Error> {
    const SESSION: &str = "select pg_backend_pid()::text || pg_postmaster_start_time()::text";
    client.query_typed_one(SESSION, &[]).map(|row| row.get(0))
}

/// Executes work on a new thread and waits for it at most `longest`. After that `hanging` counts the thread until it ends.
fn within<T: Send + 'static>(
    longest: Duration,
    hanging: &Arc<AtomicUsize>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ConnectError> {
    // Without a buffer, a result is sent only if it is received.
    let ((sender, receiver), counted) = (mpsc::sync_channel(0), hanging.clone());
    let run = move || {
        if sender.send(work()).is_err() {
            counted.fetch_sub(1, Ordering::Relaxed);
        }
    };
    thread::Builder::new().name("connect".to_owned()).spawn(run).map_err(ConnectError::System)?;
    receiver.recv_timeout(longest).map_err(|_| {
        hanging.fetch_add(1, Ordering::Relaxed);
        ConnectError::Silent
    })
}

/// Catches the panic of `postgres` if the system refuses it a runtime. Looks for free descriptors first, as a panic is
/// reported on standard error. Another thread may take them before `connect` does.
fn without_panic<T>(connect: impl FnOnce() -> T) -> io::Result<T> {
    // Not `/dev/null`, which a jail may lack.
    let free: io::Result<Vec<_>> = (0..CONNECT_DESCRIPTORS / 2).map(|_| UnixStream::pair()).collect();
    drop(free?);
    catch_unwind(AssertUnwindSafe(connect))
        .map_err(|_| io::Error::other("no descriptor, or no memory for a thread"))
}
