//! From the settings to sessions of the database. A server that is gone is noticed by TCP within seconds. A server whose
//! kernel answers while it is stopped is given up while userd connects; an open session waits until it goes on or ends.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

use super::{
    migrate::LENT,
    settings::SEARCH_PATH,
    sqlstate::{explain, is_final},
    target::Target,
    tls::{self, Connector},
};
use crate::{
    config::{Config, Database, read_secret},
    error::StartError,
};
use parking_lot::Mutex;
use postgres::{
    Client,
    config::{LoadBalanceHosts, TargetSessionAttrs},
};
use r2d2::ManageConnection;
use r2d2_postgres::PostgresConnectionManager;
use std::{
    hash::{BuildHasher, RandomState},
    io,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Descriptors that are open while a connection is made: five of it stay, the look-up of a name and that of the socket
/// take some.
const CONNECT_DESCRIPTORS: usize = 12;

/// The time that connecting to one host may take, unless `connect_timeout` is longer, as some databases have to wake up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The servers of a connection string, and all that it takes to connect to them.
pub struct Servers {
    /// The connection string.
    pub target: Target,
    tls: Connector,
    config: Config,
    /// The password that was in force last.
    password: Mutex<Option<Vec<u8>>>,
    /// Unset until the first session shows if a pooler lends it.
    prepared: OnceLock<bool>,
    /// A statement has met a session of another client.
    is_lent: AtomicBool,
    epoch: AtomicU64,
    /// The number of connects that each host holds without an answer, and when the last one was given up.
    hanging: Vec<(Arc<AtomicUsize>, Mutex<Instant>)>,
    /// When a server that takes changes was looked for last.
    sought: Mutex<Option<Instant>>,
}

impl Servers {
    /// The servers of these settings. Connects to none. Errors: [`StartError::Config`], files of TLS settings that cannot
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
            password: Mutex::new(target.config.get_password().map(<[u8]>::to_vec)),
            prepared: if is_known { OnceLock::from(config.db_prepared) } else { OnceLock::new() },
            is_lent: AtomicBool::default(),
            epoch: AtomicU64::default(),
            hanging: target.hosts.iter().map(|_| (Arc::default(), Mutex::new(Instant::now()))).collect(),
            sought: Mutex::default(),
            target,
        }))
    }

    /// Returns true if only a server that takes changes is accepted.
    pub fn wants_primary(&self) -> bool {
        self.target.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Returns false if a pooler lends sessions for one transaction each: they hold no statements and no settings.
    pub fn prepared(&self) -> bool {
        *self.prepared.get().unwrap_or(&true) && !self.is_lent.load(Ordering::Relaxed)
    }

    /// Takes sessions for lent ones from now on, as a statement has met a session of another client, unless `db_prepared` was
    /// set on purpose.
    pub fn meets_another_session(&self) {
        if self.config.find_pooler && !self.is_lent.swap(true, Ordering::Relaxed) {
            log::warn!("{LENT}: userd serves as with DB_PREPARED=false from now on");
        }
    }

    /// Returns true if [`Servers::prepared`] is false because a pooler was found.
    pub fn found_pooler(&self) -> bool {
        self.config.db_prepared && !self.prepared()
    }

    /// Returns the longest time that a statement of a service may take.
    pub fn statement_timeout(&self) -> Duration {
        self.config.limits.request_timeout / 2
    }

    /// Returns the time that a start waits for the database.
    pub fn connect_timeout(&self) -> Duration {
        self.config.db_connect_timeout
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

    /// Returns a session, in which `set_up` was executed if sessions hold settings, and its epoch. Blocks for two seconds
    /// with each host, or for a longer `connect_timeout`.
    pub fn connect(&self, set_up: &str) -> Result<(Client, u64), ConnectError> {
        // Read first: if an epoch ends while this connects, the new connection is suspect, too.
        let epoch = self.epoch();
        self.open(set_up, None, Duration::MAX).map(|client| (client, epoch))
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
    /// once. The first session shows if a pooler lends it.
    pub fn connect_for_long(&self) -> Result<Client, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const NO_BOUNDS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let deadline = Instant::now() + self.connect_timeout();
        let mut error = ConnectError::Silent;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.open(NO_BOUNDS, None, left) {
                Ok(client) if self.prepared.get().is_some() => return Ok(client),
                Ok(mut client) => {
                    let _ = self.prepared.set(!self.lends(&mut client));
                    if !self.prepared() || client.batch_execute(&format!("{SEARCH_PATH}{NO_BOUNDS}")).is_ok()
                    {
                        return Ok(client);
                    }
                    continue;
                }
                // The last try has too little time for an answer: the one before it has the cause.
                Err(ConnectError::Silent) if left < CONNECT_TIMEOUT => {}
                Err(refusal) => error = refusal,
            }
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final(error));
            if is_final || Instant::now() + PAUSE > deadline {
                return Err(StartError::Database(format!("{error}; tried {}", self.target)));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(PAUSE);
        }
    }

    /// Returns whether a pooler lends its sessions for one transaction each: several of them serve one client, or one serves
    /// two. Blocks for up to two seconds; false if it cannot be told by then, as of a pooler with one session.
    pub fn lends(&self, client: &mut Client) -> bool {
        /// Other clients of the pooler may come between two statements.
        const LOOKS: usize = 8;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let mut is_lent = || {
            let mut other = self.open("", None, CONNECT_TIMEOUT).ok()?;
            let began = session(client).ok()?;
            for _ in 0..LOOKS {
                let left = deadline.saturating_duration_since(Instant::now());
                let ask = move || session(&mut other).map(|session| (other, session));
                let (client_again, of_other) = within(left, &Arc::default(), ask).ok()?.ok()?;
                other = client_again;
                let own = session(client).ok()?;
                if own != began || of_other == own {
                    return Some(());
                }
            }
            None
        };
        is_lent().is_some()
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
        if self.target.config.get_load_balance_hosts() == LoadBalanceHosts::Random {
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

    /// Connects to one host. One that holds connects without an answer is tried ever later, as each keeps a thread.
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
            // The name may have another address.
            host.connect_timeout(CONNECT_TIMEOUT / 2);
        }
        if let Some(password) = self.password() {
            host.password(password);
        }
        let set_up = if self.prepared.get().is_some() && self.prepared() {
            format!("{SEARCH_PATH}{set_up}")
        } else {
            String::new()
        };
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

    /// Returns the password; reads it again if it is in a file, as it may have changed there.
    fn password(&self) -> Option<Vec<u8>> {
        let mut password = self.password.lock();
        if let Some(file) = &self.config.db_password_file {
            let read = read_secret(file).and_then(|text| match self.config.database {
                Database::Parts { .. } => Ok(Some(text.into_bytes())),
                Database::Url(_) => {
                    Ok(Target::parse(&text, Some(""))?.config.get_password().map(<[u8]>::to_vec))
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
    /// The server has accepted the connection, and said nothing.
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

/// Executes work on a thread of its own, and waits for it so long. Then the thread is left behind, and `hanging` counts it
/// until it ends.
pub(super) fn within<T: Send + 'static>(
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

/// Catches the panic of `postgres` if the system refuses it a runtime. Descriptors are looked for first, as a panic is
/// told on standard error; another thread may take them before they are used.
fn without_panic<T>(connect: impl FnOnce() -> T) -> io::Result<T> {
    // Not `/dev/null`, which a jail may lack.
    let free: io::Result<Vec<_>> = (0..CONNECT_DESCRIPTORS / 2).map(|_| UnixStream::pair()).collect();
    drop(free?);
    catch_unwind(AssertUnwindSafe(connect))
        .map_err(|_| io::Error::other("no descriptor, or no memory for a thread"))
}
