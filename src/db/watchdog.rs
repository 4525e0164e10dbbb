//! Bounds every wait for the database: whoever waits for a server that has fallen silent is freed by shutting
//! the socket down under them, and then sees an ordinary broken connection.
//!
//! `postgres` has no such bound: its `connect_timeout` ends with the TCP connect, a query waits for ever, and
//! the socket is out of reach in a runtime that it keeps to itself. Owns finding that socket. Knows no SQL.

use super::tls::{self, Connector};
use crate::error::{self, explain};
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockaddrLike, SockaddrStorage, getpeername, recv, shutdown,
};
use postgres::{Client, Config, Socket, tls::MakeTlsConnect};
use r2d2::ManageConnection;
use r2d2_postgres::PostgresConnectionManager;
use std::{
    fmt, fs, io,
    os::{
        fd::{AsRawFd, RawFd},
        unix::fs::MetadataExt,
    },
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// How often it looks, and how late it may be.
const TICK: Duration = Duration::from_millis(100);

/// How long one address may take to be connected to, where the connection string does not say.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// One thread that looks after all connections of a pool; it ends soon after the last clone is dropped.
#[derive(Clone)]
pub struct Watchdog(Arc<Kennel>);

#[derive(Default)]
struct Kennel {
    /// Time as it is told here: looking at it costs a request no system call.
    ticks: Arc<AtomicU64>,
    watches: Mutex<Vec<Weak<Watch>>>,
}

/// Whoever waits on one connection, and until when.
pub struct Watch {
    ticks: Arc<AtomicU64>,
    /// In ticks; `NEVER` while nobody waits.
    until: AtomicU64,
    expired: AtomicBool,
    socket: Mutex<Option<Found>>,
}

const NEVER: u64 = u64::MAX;

/// A descriptor, and what tells whether it is still the same socket's.
#[derive(Clone, Copy)]
struct Found {
    fd: RawFd,
    inode: u64,
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The way to the server, or the server, refused.
    Refused(postgres::Error),
    /// Somebody took the connection and did not answer in time.
    Silent,
}

impl ConnectError {
    /// Whether waiting cannot mend it.
    pub fn is_final(&self) -> bool {
        matches!(self, ConnectError::Refused(error) if error::is_final(error))
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Refused(error) => f.write_str(&explain(error)),
            ConnectError::Silent => f.write_str("the server does not answer"),
        }
    }
}

impl std::error::Error for ConnectError {}

impl Watchdog {
    /// Starts the thread. Errors: the system has no more of them.
    pub fn start() -> io::Result<Watchdog> {
        let kennel = Arc::new(Kennel::default());
        let watched = Arc::downgrade(&kennel);
        thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            while let Some(kennel) = watched.upgrade() {
                kennel.look();
                drop(kennel);
                thread::sleep(TICK);
            }
        })?;
        Ok(Watchdog(kennel))
    }

    /// A connection on which `set_up` was run, and the watch over it. Blocks for the connect time-out of `config`
    /// with each address, as long again for its greetings, and once more for `set_up`.
    pub fn connect(
        &self,
        config: &Config,
        tls: &Connector,
        set_up: &str,
    ) -> Result<(Client, Arc<Watch>), ConnectError> {
        let watch = Arc::new(Watch {
            ticks: self.0.ticks.clone(),
            until: AtomicU64::new(NEVER),
            expired: AtomicBool::new(false),
            socket: Mutex::new(None),
        });
        let mut watches = self.0.watches();
        watches.retain(|watch| watch.strong_count() > 0);
        watches.push(Arc::downgrade(&watch));
        drop(watches);
        let limit = config.get_connect_timeout().copied();
        let limit = limit.unwrap_or(CONNECT_TIMEOUT);
        let watched = Watched { tls: tls.clone(), watch: watch.clone(), limit };
        let manager = PostgresConnectionManager::new(config.clone(), watched);
        let connected = manager.connect().and_then(|mut client| {
            watch.begin(limit);
            client.batch_execute(set_up).map(|()| client)
        });
        watch.end();
        match connected {
            Ok(client) => Ok((client, watch)),
            Err(error) => {
                watch.forget();
                Err(match watch.expired() {
                    true => ConnectError::Silent,
                    false => ConnectError::Refused(error),
                })
            }
        }
    }
}

impl Kennel {
    fn watches(&self) -> MutexGuard<'_, Vec<Weak<Watch>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        let now = self.ticks.fetch_add(1, Ordering::Relaxed) + 1;
        for watch in self.watches().iter().filter_map(Weak::upgrade) {
            let until = watch.until.load(Ordering::Relaxed);
            if until <= now {
                watch.expire(until);
            }
        }
    }
}

impl Watch {
    /// From now on somebody waits, for `limit` at the most.
    pub fn begin(&self, limit: Duration) {
        let ticks = limit.as_millis() / TICK.as_millis() + 1;
        let until = self.ticks.load(Ordering::Relaxed) + ticks as u64;
        self.until.store(until, Ordering::Relaxed);
    }

    /// Nobody waits any more.
    pub fn end(&self) {
        self.until.store(NEVER, Ordering::Relaxed);
    }

    /// Whether a wait was ended, and the connection with it.
    pub fn expired(&self) -> bool {
        self.expired.load(Ordering::Relaxed)
    }

    /// Whether the server has sent nothing unasked, such as its farewell. One system call, which never blocks.
    pub fn is_quiet(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match *self.socket() {
            Some(Found { fd, .. }) => recv(fd, &mut [0], flags) == Err(nix::Error::EAGAIN),
            None => true,
        }
    }

    /// To be called before the connection is closed: the number may be another's then.
    pub fn forget(&self) {
        *self.socket() = None;
    }

    fn socket(&self) -> MutexGuard<'_, Option<Found>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn expire(&self, until: u64) {
        let socket = self.socket();
        let (relaxed, never) = (Ordering::Relaxed, NEVER);
        let still = self.until.compare_exchange(until, never, relaxed, relaxed);
        // A connect that fails closes its socket before anybody can say so.
        if still.is_ok()
            && let Some(found) = *socket
            && Found::at(found.fd).is_some_and(|now| now.inode == found.inode)
        {
            self.expired.store(true, Ordering::Relaxed);
            let _ = shutdown(found.fd, Shutdown::Both);
        }
    }
}

impl Found {
    fn at(fd: RawFd) -> Option<Found> {
        let inode = fs::metadata(format!("/proc/self/fd/{fd}")).ok()?.ino();
        Some(Found { fd, inode })
    }
}

/// A connector that has the socket watched as soon as there is one.
#[derive(Clone)]
struct Watched {
    tls: Connector,
    watch: Arc<Watch>,
    limit: Duration,
}

impl MakeTlsConnect<Socket> for Watched {
    type Stream = tls::Stream;
    type TlsConnect = tls::Handshake;
    type Error = io::Error;

    // Called for every address, right after its TCP or Unix connect, whether TLS is on or off.
    fn make_tls_connect(&mut self, host: &str) -> io::Result<tls::Handshake> {
        *self.watch.socket() = connected_socket().and_then(Found::at);
        self.watch.begin(self.limit);
        self.tls.make_tls_connect(host)
    }
}

/// The socket that the runtime of this thread has just connected to a server. `None` where there is no Linux
/// /proc; nothing is bounded then.
///
/// A runtime has an epoll instance of its own. It is found by a socket that we give it, and has one other
/// whose peer has a name.
fn connected_socket() -> Option<RawFd> {
    let (marker, _other) = tokio::net::UnixStream::pair().ok()?;
    let registered_with = |text: String| -> Vec<RawFd> {
        let fd = |line: &str| {
            let number = line.strip_prefix("tfd:")?.split_whitespace().next()?;
            number.parse().ok()
        };
        text.lines().filter_map(fd).collect()
    };
    let descriptors = fs::read_dir("/proc/self/fdinfo").ok()?;
    descriptors
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .map(registered_with)
        .find(|registered| registered.contains(&marker.as_raw_fd()))?
        .into_iter()
        .find(|fd| has_named_peer(*fd))
}

fn has_named_peer(fd: RawFd) -> bool {
    let Ok(peer) = getpeername::<SockaddrStorage>(fd) else {
        return false;
    };
    match peer.as_unix_addr() {
        Some(unix) => unix.path().is_some(),
        None => matches!(peer.family(), Some(AddressFamily::Inet | AddressFamily::Inet6)),
    }
}
