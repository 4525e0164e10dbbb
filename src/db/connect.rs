//! From the settings to sessions of the database. A server that is gone is noticed by TCP within seconds; one whose kernel
//! answers while it is stopped is waited for until it goes on or ends.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

use super::{
    settings::SEARCH_PATH,
    sqlstate::{explain, is_final},
    target::Target,
    tls::{self, Connector},
};
use crate::{config::Config, error::StartError};
use postgres::{Client, config::TargetSessionAttrs};
use std::{
    io,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Descriptors that are open while a connection is made: five of it stay, the look-up of a name and that of the socket
/// take some.
const CONNECT_DESCRIPTORS: usize = 12;

/// The servers of a connection string, and all that it takes to connect to them.
pub struct Servers {
    /// The connection string.
    pub target: Target,
    tls: Connector,
    /// False if a pooler lends sessions for one transaction each: they hold no statements and no settings.
    pub prepared: bool,
    connect_timeout: Duration,
    epoch: AtomicU64,
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
        let (prepared, connect_timeout) = (config.db_prepared, config.db_connect_timeout);
        Ok(Arc::new(Servers { target, tls, prepared, connect_timeout, epoch: AtomicU64::default() }))
    }

    /// Returns true if only a server that takes changes is accepted.
    pub fn wants_primary(&self) -> bool {
        self.target.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite
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

    /// Returns a session, in which `set_up` was executed if sessions hold settings, and its epoch. Blocks for the connect
    /// time-out with each address, and for as long as a server takes to answer.
    pub fn connect(&self, set_up: &str) -> Result<(Client, u64), ConnectError> {
        // Read first: if an epoch ends while this connects, the new connection is suspect, too.
        let epoch = self.epoch();
        let set_up = if self.prepared { format!("{SEARCH_PATH}{set_up}") } else { String::new() };
        let connected = without_panic(|| {
            let mut client = self.target.config.connect(self.tls.clone())?;
            client.batch_execute(&set_up).map(|()| client)
        });
        let client = connected.map_err(ConnectError::System)?.map_err(ConnectError::Refused)?;
        Ok((client, epoch))
    }

    /// Returns a session without bounds for its statements, as migrations, exports and imports take long. Tries until
    /// `db_connect_timeout` is up, with a line in the log for each try. A refusal that a retry would not change ends it at
    /// once.
    pub fn connect_for_long(self: &Arc<Servers>) -> Result<Client, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const NO_BOUNDS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let deadline = Instant::now() + self.connect_timeout;
        loop {
            // On a thread of its own, as a server that listens and says nothing would be waited for without a bound.
            let (servers, (sender, connected)) = (self.clone(), mpsc::channel());
            let connect = move || drop(sender.send(servers.connect(NO_BOUNDS)));
            thread::Builder::new().name("connect".to_owned()).spawn(connect).map_err(StartError::System)?;
            let error = match connected.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok((client, _))) => return Ok(client),
                Ok(Err(error)) => error,
                Err(_) => return Err(StartError::Database("the server does not answer".to_owned())),
            };
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final(error));
            if is_final || Instant::now() + PAUSE > deadline {
                return Err(StartError::Database(error.to_string()));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(PAUSE);
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The network, or the server, refused.
    #[error("{}", explain(.0))]
    Refused(postgres::Error),
    /// The system has nothing to connect with: no descriptor is left, or no memory for a thread.
    #[error("the system refuses a connection: {0}")]
    System(io::Error),
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
