//! The waits for one connection's server, and the end of one that takes too long.

use super::{CANCEL_TIMEOUT, TICK, Watches, cancel::Cancel};
use nix::sys::socket::{MsgFlags, Shutdown, recv, shutdown};
use parking_lot::Mutex;
use std::{
    mem,
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, OnceLock, atomic::Ordering},
    thread,
    time::Duration,
};

/// Bounds the waits of one connection.
pub(crate) struct Watch {
    pub(super) watches: Arc<Watches>,
    wait: Mutex<Wait>,
    /// What cancels its statements, once it is made.
    pub(super) cancel: OnceLock<Arc<Cancel>>,
    /// A descriptor of our own of the connection's socket, so that it is that socket whatever the client closes.
    pub(super) socket: Mutex<Option<OwnedFd>>,
}

#[derive(Default)]
struct Wait {
    /// In ticks; `None` while no thread waits.
    until: Option<u64>,
    /// Whether what is waited for is a statement, which can be cancelled.
    cancels: bool,
    /// For good, once the connection is made.
    expired: bool,
}

impl Watch {
    /// Of a connection that is yet to be made.
    pub(super) fn new(watches: Arc<Watches>) -> Watch {
        Watch { watches, wait: Mutex::default(), cancel: OnceLock::new(), socket: Mutex::default() }
    }

    /// The wait for the greeting behind this socket begins. What expired was the wait for another address.
    pub(super) fn begin_anew(&self, socket: Option<OwnedFd>, limit: Duration) {
        *self.socket.lock() = socket;
        self.wait.lock().expired = false;
        self.begin(limit);
    }

    /// A wait begins, which may take `limit`.
    pub(in crate::db) fn begin(&self, limit: Duration) {
        self.start(limit, false);
    }

    /// The wait for a statement's answer begins. After `limit` the server is asked to cancel it, and [`CANCEL_TIMEOUT`]
    /// later the socket is shut down.
    pub(in crate::db) fn begin_statement(&self, limit: Duration) {
        self.start(limit, true);
    }

    fn start(&self, limit: Duration, cancels: bool) {
        let until = self.watches.ticks.load(Ordering::Relaxed) + ticks(limit);
        let mut wait = self.wait.lock();
        (wait.until, wait.cancels) = (Some(until), cancels);
        drop(wait);
        let mut activity = self.watches.activity.lock();
        activity.in_use = true;
        if activity.asleep {
            self.watches.begun.notify_one();
        }
    }

    /// The wait is over; whether it was in time. Otherwise it has [expired](Watch::expired): what was answered may be
    /// that of a cancelled statement.
    pub(in crate::db) fn end(&self) -> bool {
        let mut wait = self.wait.lock();
        wait.until.take().is_some() && !wait.expired
    }

    /// Whether a wait was ended, and the connection with it.
    pub(in crate::db) fn expired(&self) -> bool {
        self.wait.lock().expired
    }

    /// Whether the server has sent nothing unasked. One system call, which never blocks.
    pub(in crate::db) fn is_quiet(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match &*self.socket.lock() {
            Some(socket) => recv(socket.as_raw_fd(), &mut [0], flags) == Err(nix::Error::EAGAIN),
            None => true,
        }
    }

    /// Ends the connection: the server takes back what is not committed, and no operation on it blocks any more.
    pub(crate) fn shut_down(&self) {
        if let Some(socket) = &*self.socket.lock() {
            // It may be closed already.
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Ends the wait where its time is up. Whether there is one afterwards.
    pub(super) fn look(&self, now: u64) -> bool {
        let mut wait = self.wait.lock();
        if wait.until.is_none_or(|until| until > now) {
            return wait.until.is_some();
        }
        // Told before anything is sent: whatever the server answers to that comes after it.
        wait.expired = true;
        let cancel = mem::take(&mut wait.cancels).then(|| self.cancel.get().cloned()).flatten();
        wait.until = cancel.is_some().then(|| now + ticks(CANCEL_TIMEOUT));
        drop(wait);
        let thread = thread::Builder::new().name("cancel".to_owned());
        let cancels = cancel.is_some_and(|cancel| thread.spawn(move || cancel.send()).is_ok());
        if !cancels {
            self.shut_down();
        }
        cancels
    }
}

/// At least so long.
fn ticks(time: Duration) -> u64 {
    let ticks = time.as_millis() / TICK.as_millis() + 1;
    u64::try_from(ticks).unwrap_or(u64::MAX)
}
