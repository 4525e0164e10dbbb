//! The frontend: the only code that touches clients' sockets.
//!
//! One thread runs the event loop. The loop admits connections and reads one *complete* request from each, within limits
//! and deadlines. A complete request waits in the slot of its connection. The loop writes the numbers of such slots to
//! tiny_http, as a ticket, over one private stream. The worker that receives a ticket claims its requests, and sends the
//! answers straight to the clients through the [`Slots`]. So a slow, idle, hostile or absent client costs a few hundred
//! bytes and never a thread.
//!
//! `listener` has the listening sockets, `event_loop` the thread. `admission` and `peers` decide which clients are let
//! in. `connection` is the state of one client, `http1` decides which bytes are a request, and the event loop and the
//! workers share `slots`. No module here knows routes or databases; of tiny_http they know only that it takes tickets.

mod busy_warnings;
mod claimed_request;
mod connection;
mod event_loop;
pub(crate) mod http1;
mod listener;
mod peers;
mod slots;
#[cfg(test)]
mod tests;

pub use claimed_request::ClaimedRequest;
pub use listener::{Listener, resolve_addresses, shown_address};
pub use peers::ClientName;
pub use slots::{MAX_SURPLUS_CLIENTS, Slots};

use crate::http::{Request, RequestId, Response};
use crate::{budget::MemoryBudget, config::Limits, metrics::Metrics};
use event_loop::EventLoop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{io, os::unix::net::UnixStream, sync::Arc, thread};

/// Function that answers a request without a worker, or returns `None` if the request needs one. It must not block,
/// because the event loop calls it.
pub type AnswerWithoutWorker = Box<dyn Fn(&Request, &RequestId) -> Option<Response> + Send>;

/// A running frontend. Dropping it admits no further client, answers the requests that have begun to arrive with
/// `Connection: close`, and ends the thread. The drop blocks until all are answered, at most for
/// `Limits::stop_timeout`, after which the remaining requests are answered 503.
pub struct Frontend {
    slots: Arc<Slots>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Resources that a frontend shares with the rest of the process.
pub struct SharedResources {
    /// Counts the bytes that are held for clients, against a limit.
    pub budget: MemoryBudget,
    /// Answers `/livez` and `/readyz`, which need no worker.
    pub answer_without_worker: AnswerWithoutWorker,
    pub metrics: Arc<Metrics>,
}

impl Frontend {
    /// Starts the frontend, which admits clients from now on and writes tickets to `ticket_stream`. The other end of
    /// this stream must be a tiny_http server without another client. Workers claim and answer requests through the
    /// returned [`Slots`].
    ///
    /// If the stream breaks or the thread panics, the frontend answers 503 to the requests that it has, closes the
    /// port, and calls `on_broken` on its thread. The process must have descriptors for `limits.max_connections` and
    /// [`MAX_SURPLUS_CLIENTS`] more.
    pub fn start(
        listener: Listener,
        limits: Limits,
        resources: SharedResources,
        ticket_stream: UnixStream,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Frontend, Arc<Slots>)> {
        let mut event_loop = EventLoop::new(listener, Arc::new(limits), resources, ticket_stream)?;
        let slots = event_loop.slots.clone();
        let weak = Arc::downgrade(&slots);
        slots.budget.on_shortage(move || weak.upgrade().iter().for_each(|slots| slots.ask_for_memory()));
        let thread = thread::Builder::new().name("frontend".to_owned()).spawn(move || {
            let end = catch_unwind(AssertUnwindSafe(|| event_loop.run()));
            event_loop.close_all_sockets();
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
        self.slots.begin_stop();
        // Ignores an error: the thread has caught and logged its panic.
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}
