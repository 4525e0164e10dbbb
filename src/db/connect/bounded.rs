//! Connects within a bound, and after ever longer pauses to a host that does not answer.

use super::{ConnectError, Connector};
use parking_lot::Mutex;
use postgres::Client;
use r2d2::ManageConnection;
use r2d2_postgres::PostgresConnectionManager;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

/// The time that connecting to one host may take, unless `connect_timeout` is longer, as some databases have to wake up.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Descriptors that are open while a connection is made. The connection keeps five of them; looking the name up, and the
/// socket, take the rest.
const CONNECT_DESCRIPTORS: usize = 12;

/// Connects to one host that were given up and are still running. Each keeps a thread.
#[derive(Default)]
pub struct Unanswered {
    count: Arc<AtomicU32>,
    /// The time at which the last connect was given up.
    last: Mutex<Option<Instant>>,
}

impl Unanswered {
    /// Returns whether the host is not to be connected to yet.
    pub fn is_spared(&self) -> bool {
        const PAUSE: Duration = Duration::from_millis(250);
        let count = self.count.load(Ordering::Relaxed);
        self.last.lock().is_some_and(|last| last.elapsed() < PAUSE * count * count)
    }

    /// Connects to the host, and executes `set_up`. Blocks at most for the longer one of [`CONNECT_TIMEOUT`] and
    /// `connect_timeout`, and at most `longest`.
    pub fn connect(
        &self,
        mut host: postgres::Config,
        tls: Connector,
        set_up: String,
        longest: Duration,
    ) -> Result<Client, ConnectError> {
        let bound = host.get_connect_timeout().map_or(CONNECT_TIMEOUT, |time| CONNECT_TIMEOUT.max(*time));
        if host.get_connect_timeout().is_none() {
            // Half of the time for one address leaves time for another address of the name.
            host.connect_timeout(CONNECT_TIMEOUT / 2);
        }
        let connect = move || {
            let mut client = PostgresConnectionManager::new(host, tls).connect()?;
            client.batch_execute(&set_up).map(|()| client)
        };
        let connected = within(bound.min(longest), &self.count, || without_panic(connect));
        if matches!(connected, Err(ConnectError::Silent)) {
            *self.last.lock() = Some(Instant::now());
        }
        connected?.map_err(ConnectError::System)?.map_err(ConnectError::Refused)
    }
}

/// Executes work on a new thread and waits for it at most `longest`. After that `unanswered` counts the thread until it ends.
pub fn within<T: Send + 'static>(
    longest: Duration,
    unanswered: &Arc<AtomicU32>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ConnectError> {
    // The channel has no buffer: sending succeeds only if the result is received in time.
    let ((sender, receiver), counted) = (mpsc::sync_channel(0), unanswered.clone());
    let run = move || {
        if sender.send(work()).is_err() {
            counted.fetch_sub(1, Ordering::Relaxed);
        }
    };
    thread::Builder::new().name("connect".to_owned()).spawn(run).map_err(ConnectError::System)?;
    receiver.recv_timeout(longest).map_err(|_| {
        unanswered.fetch_add(1, Ordering::Relaxed);
        ConnectError::Silent
    })
}

/// Catches the panic of `postgres` if the system refuses it a runtime. Looks for free descriptors first, as a panic is
/// reported on standard error. Another thread may take them before `connect` does.
fn without_panic<T>(connect: impl FnOnce() -> T) -> io::Result<T> {
    // Opens pairs of sockets to find free descriptors: a jail may lack `/dev/null`.
    let free: io::Result<Vec<_>> = (0..CONNECT_DESCRIPTORS / 2).map(|_| UnixStream::pair()).collect();
    drop(free?);
    catch_unwind(AssertUnwindSafe(connect))
        .map_err(|_| io::Error::other("no descriptor, or no memory for a thread"))
}
