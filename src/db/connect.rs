//! Connections to the servers of a connection string. A server that is gone is noticed by TCP within seconds; one whose
//! kernel answers while it is stopped is waited for until it goes on or ends.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

use super::{blocking::outside_of_runtimes, sqlstate::explain, target::Target, tls::Connector};
use postgres::{Client, Config, config::TargetSessionAttrs};
use std::{
    io,
    ops::{Deref, DerefMut},
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicU64, Ordering},
};

/// Descriptors that are open while a connection is made: five of it stay, the look-up of a name and that of the socket
/// take some.
const CONNECT_DESCRIPTORS: usize = 12;

/// The servers of a connection string.
pub struct Servers {
    config: Config,
    tls: Connector,
    /// True if only a server that takes changes is accepted.
    pub wants_primary: bool,
    epoch: AtomicU64,
}

impl Servers {
    /// Connects to none.
    pub fn new(target: &Target, tls: Connector) -> Servers {
        let config = target.config.clone();
        let wants_primary = config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite;
        Servers { config, tls, wants_primary, epoch: AtomicU64::new(0) }
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

    /// Returns a connection on which `set_up` was executed, and its epoch. Blocks for the connect time-out with each
    /// address, and for as long as a server takes to answer.
    pub fn connect(&self, set_up: &str) -> Result<(DatabaseConnection, u64), ConnectError> {
        // Read first: if an epoch ends while this connects, the new connection is suspect, too.
        let epoch = self.epoch();
        let connected = without_panic(|| {
            let mut connection = DatabaseConnection(Some(self.config.connect(self.tls.clone())?));
            connection.batch_execute(set_up).map(|()| connection)
        });
        let connection = connected.map_err(ConnectError::System)?.map_err(ConnectError::Refused)?;
        Ok((connection, epoch))
    }
}

/// A client that may be dropped in an async task.
pub struct DatabaseConnection(Option<Client>);

const CLIENT: &str = "only drop takes it";

impl Deref for DatabaseConnection {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.0.as_ref().expect(CLIENT)
    }
}

impl DerefMut for DatabaseConnection {
    fn deref_mut(&mut self) -> &mut Client {
        self.0.as_mut().expect(CLIENT)
    }
}

impl Drop for DatabaseConnection {
    fn drop(&mut self) {
        let client = self.0.take();
        outside_of_runtimes(|| drop(client));
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
