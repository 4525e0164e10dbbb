//! Bounds every wait for the database: a thread that waits for a silent server is freed by shutting the socket down
//! under it, and then sees an ordinary broken connection. Before that the server is asked to cancel a statement.
//!
//! `postgres` has no such bound: its `connect_timeout` ends with the TCP connect, a query and the closing of a
//! connection wait for ever, and the socket is out of reach in a runtime of its own. Knows no SQL.

mod cancel;
mod descriptor;
mod watch;

use super::{
    blocking::outside_of_runtimes,
    sqlstate::{self, explain},
    tls::Connector,
};
use cancel::Cancel;
use descriptor::connected_socket;
use parking_lot::{Condvar, Mutex};
use postgres::{Client, Config, Socket, tls::MakeTlsConnect};
use r2d2::ManageConnection;
use r2d2_postgres::PostgresConnectionManager;
use std::{
    fmt, io, mem,
    ops::{Deref, DerefMut},
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};
pub(crate) use watch::Watch;

/// How often the thread looks at the watches, and how late it may be.
const TICK: Duration = Duration::from_millis(100);

/// The thread sleeps until the next wait begins once this many ticks have passed without one.
const QUIET_TICKS: u32 = 10;

/// How long one address may take to be connected to, where the connection string does not say.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Descriptors that are open while a connection is made: five of it stay, the look-up of a name and that of the socket
/// take some.
const CONNECT_DESCRIPTORS: usize = 12;

/// After a cancel request, how long its session has to answer before its socket is shut down.
pub(super) const CANCEL_TIMEOUT: Duration = Duration::from_millis(700);

/// How long closing a connection may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// One thread that watches all connections of a pool; it ends soon after this is dropped.
pub struct Watchdog(Arc<Watches>);

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.activity.lock().ended = true;
        self.0.begun.notify_one();
    }
}

#[derive(Default)]
struct Watches {
    /// Time in ticks while the thread is awake: reading it costs a request no system call.
    ticks: AtomicU64,
    activity: Mutex<Activity>,
    /// Told when the thread sleeps and a wait begins, and at the end.
    begun: Condvar,
    all: Mutex<Vec<Weak<Watch>>>,
    /// Whether the log says that there are waits without a bound.
    unbounded: AtomicBool,
}

#[derive(Default)]
struct Activity {
    /// Whether a wait has begun since the last tick.
    in_use: bool,
    /// Whether the thread sleeps until a wait begins.
    asleep: bool,
    ended: bool,
}

/// A client whose waits are bounded where its [`Watch`] is told, and whose closing always is.
pub struct Connection {
    client: Option<Client>,
    watch: Arc<Watch>,
}

const CLIENT: &str = "it is taken by drop only";

impl Connection {
    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// What ends this connection while it is in use.
    #[cfg(feature = "command")]
    pub(crate) fn breaker(&self) -> Arc<Watch> {
        self.watch.clone()
    }
}

impl Deref for Connection {
    type Target = Client;

    fn deref(&self) -> &Client {
        self.client.as_ref().expect(CLIENT)
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut Client {
        self.client.as_mut().expect(CLIENT)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.watch.begin(CLOSE_TIMEOUT);
        let client = self.client.take();
        // This may be in an async task, which drops the service.
        outside_of_runtimes(|| drop(client));
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub enum ConnectError {
    /// The network, or the server, refused.
    Refused(postgres::Error),
    /// A server accepted the connection and did not answer in time.
    Silent,
    /// The system has nothing to connect with: no descriptor is left, or no memory for a thread.
    System(io::Error),
}

impl ConnectError {
    /// Whether waiting cannot mend it.
    pub fn is_final(&self) -> bool {
        matches!(self, ConnectError::Refused(error) if sqlstate::is_final(error))
    }

    /// Whether the connection was accepted and ended then: the next one may be better.
    pub fn is_ended(&self) -> bool {
        matches!(self, ConnectError::Refused(error) if sqlstate::is_ended(error))
    }

    /// Whether the server has answered, and has no connection left.
    pub fn is_full(&self) -> bool {
        matches!(self, ConnectError::Refused(error) if sqlstate::is_full(error))
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Refused(error) => f.write_str(&explain(error)),
            ConnectError::Silent => f.write_str("the server does not answer"),
            ConnectError::System(error) => write!(f, "the system refuses a connection: {error}"),
        }
    }
}

impl std::error::Error for ConnectError {}

impl Watchdog {
    /// Starts the thread. Errors: the system has no more of them.
    pub fn start() -> io::Result<Watchdog> {
        let watches = Arc::new(Watches::default());
        let watchdog = Watchdog(watches.clone());
        thread::Builder::new().name("watchdog".to_owned()).spawn(move || watches.run())?;
        Ok(watchdog)
    }

    /// A connection on which `set_up` was run. Blocks for the connect time-out of `config` with each address, as long
    /// again for the server's greeting, and once more for `set_up`.
    pub fn connect(
        &self,
        config: &Config,
        tls: &Connector,
        set_up: &str,
    ) -> Result<Connection, ConnectError> {
        let watch = Arc::new(Watch::new(self.0.clone()));
        let mut all = self.0.all.lock();
        all.retain(|watch| watch.strong_count() > 0);
        all.push(Arc::downgrade(&watch));
        drop(all);
        let limit = config.get_connect_timeout().copied().unwrap_or(CONNECT_TIMEOUT);
        let watched = Watched { tls: Connector::clone(tls), watch: watch.clone(), limit };
        let manager = PostgresConnectionManager::new(config.clone(), watched);
        let connected = without_panic(|| {
            manager.connect().and_then(|client| {
                let mut connection = Connection { client: Some(client), watch: watch.clone() };
                watch.begin(limit);
                connection.batch_execute(set_up).map(|()| connection)
            })
        });
        let in_time = watch.end();
        match connected.map_err(ConnectError::System)? {
            Ok(connection) if in_time => {
                let token = connection.cancel_token();
                let cancel = Cancel { token, tls: Connector::clone(tls) };
                let _ = watch.cancel.set(Arc::new(cancel));
                Ok(connection)
            }
            Err(error) if !watch.expired() => Err(ConnectError::Refused(error)),
            _ => Err(ConnectError::Silent),
        }
    }
}

/// Does what `postgres` panics in where the system refuses it a runtime. The descriptors are looked for first, as a
/// panic is told on standard error; another thread may take them before they are used.
fn without_panic<T>(connect: impl FnOnce() -> T) -> io::Result<T> {
    // Not `/dev/null`, which a jail may lack.
    let free: io::Result<Vec<_>> = (0..CONNECT_DESCRIPTORS / 2).map(|_| UnixStream::pair()).collect();
    drop(free?);
    catch_unwind(AssertUnwindSafe(connect))
        .map_err(|_| io::Error::other("no descriptor, or no memory for a thread"))
}

impl Watches {
    fn run(&self) {
        let mut quiet = 0;
        loop {
            thread::sleep(TICK);
            let waits = self.look();
            let mut activity = self.activity.lock();
            quiet = if mem::take(&mut activity.in_use) || waits { 0 } else { quiet + 1 };
            if quiet == QUIET_TICKS {
                quiet = 0;
                activity.asleep = true;
                while !activity.in_use && !activity.ended {
                    self.begun.wait(&mut activity);
                }
                activity.asleep = false;
            }
            if activity.ended {
                return;
            }
        }
    }

    /// Ends the waits whose time is up. Whether there are others.
    fn look(&self) -> bool {
        let now = self.ticks.fetch_add(1, Ordering::Relaxed) + 1;
        let watches: Vec<_> = self.all.lock().iter().filter_map(Weak::upgrade).collect();
        watches.iter().filter(|watch| watch.look(now)).count() > 0
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
    type Stream = <Connector as MakeTlsConnect<Socket>>::Stream;
    type TlsConnect = <Connector as MakeTlsConnect<Socket>>::TlsConnect;
    type Error = io::Error;

    // Called for every address, right after its TCP or Unix connect, whether TLS is on or off.
    fn make_tls_connect(&mut self, host: &str) -> io::Result<Self::TlsConnect> {
        let socket = connected_socket()?;
        if socket.is_none() && !self.watch.watches.unbounded.swap(true, Ordering::Relaxed) {
            log::warn!(
                "cannot find a database connection's socket in /proc/self/fdinfo: \
                 waits for a silent database server have no bound"
            );
        }
        self.watch.begin_anew(socket, self.limit);
        MakeTlsConnect::<Socket>::make_tls_connect(&mut self.tls, host).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::tests::{LONG, Until, server, watchdog};
    use std::{
        net::{TcpListener, TcpStream},
        os::fd::AsRawFd,
        time::Instant,
    };

    /// Polls until the thread sleeps.
    fn asleep(watchdog: &Watchdog) {
        let deadline = Instant::now() + LONG;
        while !watchdog.0.activity.lock().asleep {
            assert!(Instant::now() < deadline, "the thread still looks at the watches");
            thread::sleep(TICK / 10);
        }
    }

    #[test]
    fn the_thread_sleeps_until_a_wait_begins() {
        let (watchdog, tls) = watchdog();
        let target = server(Until::Accepted);
        for _ in 0..2 {
            asleep(&watchdog);
            let refused = watchdog.connect(&target.config_for(&target.hosts), &tls, "").err();
            assert!(matches!(refused, Some(ConnectError::Silent)), "{refused:?}");
        }
        // It ends from its sleep, too.
        asleep(&watchdog);
        let watches = Arc::downgrade(&watchdog.0);
        drop(watchdog);
        let deadline = Instant::now() + LONG;
        while watches.strong_count() > 0 {
            assert!(Instant::now() < deadline, "the thread is left");
            thread::sleep(TICK / 10);
        }
    }

    /// The number of a closed socket is soon another one's.
    #[test]
    fn a_watch_is_of_one_socket_whatever_its_client_closes() {
        let (watchdog, tls) = watchdog();
        let target = server(Until::Set);
        let connection = watchdog.connect(&target.config_for(&target.hosts), &tls, "").unwrap();
        assert!(connection.watch().is_quiet());
        let watch = connection.watch.clone();
        let before = watch.socket.lock().as_ref().map(|socket| socket.as_raw_fd());
        drop(connection);
        let others: Vec<_> = (0..64).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        assert!(others.iter().all(|other| Some(other.as_raw_fd()) != before), "it is ours until the end");
        watch.shut_down();
        assert!(!watch.is_quiet());
        assert!(others.iter().all(|other| TcpStream::connect(other.local_addr().unwrap()).is_ok()));
    }
}
