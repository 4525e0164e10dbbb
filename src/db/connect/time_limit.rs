//! Connects to a host within a time limit. A host that has not answered is tried after ever longer pauses.

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

/// The longest time that a connect to one host may take, unless the connection string has a longer `connect_timeout`,
/// as for a database that starts up when a client connects.
pub const MAX_CONNECT_TIME: Duration = Duration::from_secs(2);

/// The number of file descriptors that a connect opens: five that the connection keeps, and seven for the look-up of
/// the name and for the socket.
const DESCRIPTORS_PER_CONNECT: usize = 12;

/// The backoff of connects to one host, which grows with the connects that were given up without an answer in time.
#[derive(Default)]
pub struct ConnectBackoff {
    /// The number of threads that still wait for the host, although their connect was given up.
    waiting_threads: Arc<AtomicU32>,
    /// The time at which the last connect was given up.
    last_given_up_at: Mutex<Option<Instant>>,
}

impl ConnectBackoff {
    /// Returns true if it is too early to connect to the host again. The pause after a connect that was given up grows
    /// with the number of threads that still wait for the host.
    pub fn is_paused(&self) -> bool {
        /// The pause while one thread waits for the host. It grows with the square of the number of threads.
        const FIRST_PAUSE: Duration = Duration::from_millis(250);
        let threads = self.waiting_threads.load(Ordering::Relaxed);
        self.last_given_up_at.lock().is_some_and(|last| last.elapsed() < FIRST_PAUSE * threads * threads)
    }

    /// Connects to the host, and executes `setup_sql`. Blocks for at most [`MAX_CONNECT_TIME`], or for a longer
    /// `connect_timeout`, and never longer than `max_time`.
    pub fn connect(
        &self,
        mut host: postgres::Config,
        tls: Connector,
        setup_sql: String,
        max_time: Duration,
    ) -> Result<Client, ConnectError> {
        let bound = host.get_connect_timeout().map_or(MAX_CONNECT_TIME, |time| MAX_CONNECT_TIME.max(*time));
        if host.get_connect_timeout().is_none() {
            // Lets each address of the host's name take half of the time limit, so that there is time for a second
            // address.
            host.connect_timeout(MAX_CONNECT_TIME / 2);
        }
        let connect = move || {
            let mut client = PostgresConnectionManager::new(host, tls).connect()?;
            client.batch_execute(&setup_sql).map(|()| client)
        };
        let connected = run_within(bound.min(max_time), &self.waiting_threads, || catch_panic(connect));
        if matches!(connected, Err(ConnectError::NoAnswer)) {
            *self.last_given_up_at.lock() = Some(Instant::now());
        }
        connected?.map_err(ConnectError::NoResources)?.map_err(ConnectError::Refused)
    }
}

/// Executes `work` on a new thread, and waits for its result for at most `max_time`. If the work takes longer, returns
/// an error, and counts the thread in `waiting_threads` until the work ends.
pub fn run_within<T: Send + 'static>(
    max_time: Duration,
    waiting_threads: &Arc<AtomicU32>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ConnectError> {
    // The channel has no buffer, so that the thread can send its result only if the caller still waits for it.
    let ((sender, receiver), counted) = (mpsc::sync_channel(0), waiting_threads.clone());
    let run = move || {
        if sender.send(work()).is_err() {
            counted.fetch_sub(1, Ordering::Relaxed);
        }
    };
    thread::Builder::new().name("connect".to_owned()).spawn(run).map_err(ConnectError::NoResources)?;
    receiver.recv_timeout(max_time).map_err(|_| {
        waiting_threads.fetch_add(1, Ordering::Relaxed);
        ConnectError::NoAnswer
    })
}

/// Executes `connect`, and returns an error if the system lacks file descriptors or memory for it. The crate `postgres`
/// panics in this case, and a panic writes to standard error. Therefore looks for free descriptors first, and catches
/// the panic if another thread has taken the descriptors since.
fn catch_panic<T>(connect: impl FnOnce() -> T) -> io::Result<T> {
    // Opens pairs of sockets to see whether enough descriptors are free. Opening a file would show this, too, but in a
    // chroot there may be no file, not even `/dev/null`.
    let free: io::Result<Vec<_>> = (0..DESCRIPTORS_PER_CONNECT / 2).map(|_| UnixStream::pair()).collect();
    drop(free?);
    catch_unwind(AssertUnwindSafe(connect))
        .map_err(|_| io::Error::other("no descriptor, or no memory for a thread"))
}
