//! The frontend: the only code that touches clients' sockets.
//!
//! One thread runs a readiness loop. It admits connections, reads one *complete* request from each within limits and
//! deadlines, and keeps it in the slot of its connection. tiny_http gets a ticket with the numbers of such slots, over one
//! private stream; the worker that gets it there claims the requests, and sends their answers straight to the clients
//! through the [`Slots`]. A slow, idle, hostile or absent client costs a few hundred bytes
//! and never a thread.
//!
//! `listener` is what is listened on, `event_loop` the thread, its `admission` and `peers` which clients are let in,
//! `connection` one client's state, `http1` which bytes are a request, `slots` the way to the workers and back. None of
//! them knows routes, workers or databases, and of tiny_http only that it takes tickets.

mod claim;
mod connection;
mod event_loop;
pub(crate) mod http1;
mod listener;
mod peers;
mod slots;
#[cfg(test)]
mod tests;
mod warnings;

pub use claim::Claimed;
pub use listener::{Listener, address, addresses};
pub use peers::ClientName;
pub use slots::{MAX_SURPLUS, Slots};

use crate::http::{Request, RequestId, Response};
use crate::{budget::Budget, config::Limits, metrics::Metrics};
use event_loop::EventLoop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{io, os::unix::net::UnixStream, sync::Arc, thread};

/// Answers a request that needs no worker; `None` if a worker is to answer it. It must not block.
pub type AnswerAtOnce = Box<dyn Fn(&Request, &RequestId) -> Option<Response> + Send>;

/// A running frontend. Dropping it drains and ends it: no client is let in any more, requests that have begun to arrive
/// are still answered, with `Connection: close`. Blocks until that is done, `Limits::stop_timeout` at most (requests in
/// work are answered 503 then).
pub struct Frontend {
    slots: Arc<Slots>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Resources that a frontend shares with the rest of the process.
pub struct Resources {
    /// The memory that is held for clients.
    pub budget: Budget,
    /// Answers without a worker.
    pub answer_at_once: AnswerAtOnce,
    /// The figures of the server.
    pub metrics: Arc<Metrics>,
}

impl Frontend {
    /// Starts the frontend: from now on clients are let in. Tickets are written to `private`, whose other end must be a
    /// tiny_http server's that has no other client; workers claim and answer their requests through the [`Slots`].
    ///
    /// If that stream breaks, what is in work is answered 503, the port is closed, and `on_broken` is called on the
    /// frontend's thread. The process has descriptors for `limits.max_connections` and [`MAX_SURPLUS`] more.
    pub fn open(
        listener: Listener,
        limits: Limits,
        resources: Resources,
        private: UnixStream,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Frontend, Arc<Slots>)> {
        let mut event_loop = EventLoop::new(listener, Arc::new(limits), resources, private)?;
        let slots = event_loop.slots.clone();
        let weak = Arc::downgrade(&slots);
        slots.budget.on_shortage(move || weak.upgrade().iter().for_each(|slots| slots.report_shortage()));
        let thread = thread::Builder::new().name("frontend".to_owned()).spawn(move || {
            let end = catch_unwind(AssertUnwindSafe(|| event_loop.run()));
            event_loop.clear();
            let error = match end {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => io::Error::other("its thread panicked"),
            };
            log::error!(
                "nothing can be served any more, as the frontend has failed ({error}): restart userd"
            );
            on_broken();
        })?;
        Ok((Frontend { slots: slots.clone(), thread: Some(thread) }, slots))
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        self.slots.drain();
        // An error is ignored: a panic of the thread was caught and logged.
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}
