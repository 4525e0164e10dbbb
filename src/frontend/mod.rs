//! The frontend: the only code that touches clients' sockets.
//!
//! One thread runs a readiness loop. It admits connections, reads one *complete* request from each within limits and
//! deadlines, and passes it to tiny_http over one private stream; the worker that gets it there sends its answer
//! straight to the client through the [`Responder`]. A slow, idle, hostile or absent client costs a few hundred bytes
//! and never a thread.
//!
//! `listener` is what is listened on, `event_loop` the thread, its `admission` and `peers` which clients are let in,
//! `connection` one client's state, `http1` which bytes are a request, `slots` and `responder` the way of an answer,
//! `to_tiny_http` the queue of requests. None of them knows routes, workers or databases, and of tiny_http only that it
//! takes requests.

mod connection;
mod event_loop;
pub(crate) mod http1;
mod listener;
mod peers;
mod responder;
mod shared;
mod slots;
#[cfg(test)]
mod tests;
mod to_tiny_http;
mod warnings;

pub use http1::head::Served;
pub use listener::{Bound, Listener};
pub use responder::{Claimed, Responder, Slot};

use crate::{
    budget::Budget,
    config::Limits,
    http::{Method, Response},
    metrics::Metrics,
};
pub use event_loop::MAX_SURPLUS;
use event_loop::{EventLoop, WAKER};
use mio::{Poll, Waker};
use shared::Shared;
use std::{
    io,
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    thread,
};

/// Answers a request for one of the paths in [`Served::at_once`], before it gets to tiny_http; `None` where a worker is
/// to answer it all the same. It must not block.
pub type AnswerAtOnce = Box<dyn Fn(Method, &str) -> Option<Response> + Send>;

/// A running frontend. Dropping it ends it at once; [`Frontend::stop`] drains it.
pub struct Frontend {
    shared: Arc<Shared>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Resources that a frontend shares with the rest of the process.
pub struct Resources {
    /// The memory that is held for clients.
    pub budget: Budget,
    /// The fields and paths that the layers above serve.
    pub served: Served,
    /// Answers without a worker.
    pub answer_at_once: AnswerAtOnce,
    /// The figures of the server.
    pub metrics: Arc<Metrics>,
}

/// Starts the end of a [`Frontend`] from anywhere.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Frontend {
    /// Starts the frontend: from now on clients are let in. Requests are written to `private`, whose other end
    /// must be a tiny_http server's that has no other client; answers come through the [`Responder`]. What is
    /// answered at once is not written there.
    ///
    /// If that stream breaks, everything is answered 503 and `on_broken` is called, once, on the frontend's thread:
    /// nothing can be served any more. The process has descriptors for `limits.max_connections` and [`MAX_SURPLUS`]
    /// more.
    pub fn open(
        listener: Listener,
        limits: Limits,
        resources: Resources,
        private: UnixStream,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> io::Result<(Frontend, Responder)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let shared = Arc::new(Shared::new(limits, resources.budget.clone(), waker));
        let weak = Arc::downgrade(&shared);
        shared.budget.on_shortage(move || {
            if let Some(shared) = weak.upgrade()
                && !shared.shortage.swap(true, Ordering::Relaxed)
            {
                shared.wake();
            }
        });
        let responder = Responder { shared: shared.clone() };
        let mut event_loop = EventLoop::new(poll, shared.clone(), listener, private, resources)?;
        let thread = thread::Builder::new().name("frontend".to_owned()).spawn(move || {
            let mut on_broken = Some(on_broken);
            let on_broken = &mut || {
                if let Some(on_broken) = on_broken.take() {
                    on_broken();
                }
            };
            let end = catch_unwind(AssertUnwindSafe(|| event_loop.run(on_broken)));
            event_loop.clear();
            let error = match end {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(_) => io::Error::other("the frontend's thread panicked"),
            };
            event_loop.shared.break_down(&error);
            on_broken();
        })?;
        Ok((Frontend { shared, thread: Some(thread) }, responder))
    }

    /// A handle for code that does not own the frontend, a signal handler's thread for one.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Drains and ends the frontend: no client is let in any more, requests that have begun to arrive are still
    /// answered, with `Connection: close`. Blocks until that is done, `Limits::stop_timeout` at most
    /// (what is in work then is answered 503), or until [`Stopper::abort`].
    pub fn stop(mut self) {
        self.stopper().drain();
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the frontend's thread panicked at its end");
        }
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        self.stopper().abort();
        self.join();
    }
}

impl Stopper {
    /// Starts draining, as [`Frontend::stop`] does, and returns at once. Doing it again changes nothing.
    pub fn drain(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        self.0.wake();
    }

    /// Ends the frontend now: what is in work is answered 503. Returns at once.
    pub fn abort(&self) {
        self.0.aborted.store(true, Ordering::SeqCst);
        self.drain();
    }
}
