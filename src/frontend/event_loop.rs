//! The readiness loop: which connection is called when, and whose time is up.
//!
//! Owns the set of connections and the stream to tiny_http. What is done with one connection's bytes is in
//! [`super::connection`]; nothing here looks at them.

mod admission;

use super::{
    Listener, Resources,
    connection::{Action, Connection, Context, interest, linger_time},
    shared::Shared,
    to_tiny_http::ToTinyHttp,
};
use crate::error::{Error, Reason};
pub use admission::MAX_SURPLUS;
use admission::Search;
use mio::{Events, Interest, Poll, Token, net, unix::SourceFd};
use std::{
    io::{self, ErrorKind, Read},
    mem,
    os::unix::net::UnixStream,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

const LISTENER: Token = Token(usize::MAX);
/// The token of the waker that [`EventLoop::new`] gets.
pub const WAKER: Token = Token(usize::MAX - 1);
const PRIVATE: Token = Token(usize::MAX - 2);
/// Events taken in one iteration.
const EVENTS: usize = 1024;
/// Bytes that one read takes at most. They bound the memory that a pipelining client takes up.
const SCRATCH_BYTES: usize = 16 * 1024;
/// Iterations of accepting before the listener closes, which resets connections that are still in its backlog.
const LAST_ACCEPTS: usize = 64;
/// The least time between two looks at the deadlines of all connections.
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// The state of the frontend's thread.
pub struct EventLoop {
    poll: Poll,
    pub shared: Arc<Shared>,
    listener: Option<Listener>,
    private: net::UnixStream,
    private_awaits_writable: bool,
    /// Complete requests for tiny_http.
    to_tiny_http: ToTinyHttp,
    resources: Resources,
    scratch: Box<[u8]>,
    /// Connections that count, up to `max_connections`.
    admitted: usize,
    search: Option<Search>,
    /// Connections that were ever opened.
    opened: u64,
    /// Slots that were used and are free.
    free: Vec<u32>,
    /// Connections that asked to be called again in the next iteration.
    requeued: Vec<u32>,
    /// There may be a client to accept, from then on.
    accept_at: Option<Instant>,
    sweep_at: Option<Instant>,
    /// When a stop has to be over.
    stop_at: Option<Instant>,
}

impl EventLoop {
    /// Registers what the loop listens to.
    pub fn new(
        poll: Poll,
        shared: Arc<Shared>,
        listener: Listener,
        private: UnixStream,
        resources: Resources,
    ) -> io::Result<EventLoop> {
        private.set_nonblocking(true)?;
        let mut private = net::UnixStream::from_std(private);
        let registry = poll.registry();
        registry.register(&mut SourceFd(&listener.fd()), LISTENER, Interest::READABLE)?;
        registry.register(&mut private, PRIVATE, Interest::READABLE)?;
        Ok(EventLoop {
            poll,
            shared,
            listener: Some(listener),
            private,
            private_awaits_writable: false,
            to_tiny_http: ToTinyHttp::default(),
            resources,
            scratch: vec![0; SCRATCH_BYTES].into(),
            admitted: 0,
            search: None,
            opened: 0,
            free: Vec::new(),
            requeued: Vec::new(),
            accept_at: None,
            sweep_at: None,
            stop_at: None,
        })
    }

    /// Runs until a stop is over. Errors are the end of all service.
    pub fn run(&mut self, on_broken: &mut dyn FnMut()) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        loop {
            match self.poll.poll(&mut events, self.timeout()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result?,
            }
            let now = Instant::now();
            let mut private = Ok(());
            let mut due = mem::take(&mut self.requeued);
            for event in &events {
                match event.token() {
                    LISTENER => self.accept_at = Some(self.accept_at.unwrap_or(now)),
                    WAKER => self.shared.take_scheduled(&mut due),
                    PRIVATE => private = self.read_private(),
                    Token(index) => self.call(index as u32, now, |connection, context| {
                        connection.note(event);
                        connection.advance(index as u32, context)
                    }),
                }
            }
            // One of them may be there twice.
            due.sort_unstable();
            due.dedup();
            for index in due {
                self.call(index, now, |connection, context| connection.advance(index, context));
            }
            // After the reads, which may find idle connections busy.
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept(now);
            }
            if self.sweep_at.is_some_and(|at| at <= now) {
                self.sweep(now);
            }
            if self.shared.shortage.swap(false, Ordering::Relaxed) {
                self.free_memory(now);
            }
            if let Err(error) = private.and_then(|()| self.flush()) {
                self.break_down(&error, now);
                on_broken();
            }
            if self.stop(now) {
                return Ok(());
            }
        }
    }

    /// How long to wait for events.
    fn timeout(&self) -> Option<Duration> {
        if !self.requeued.is_empty() {
            return Some(Duration::ZERO);
        }
        let times = [self.accept_at, self.sweep_at, self.stop_at];
        let first = times.into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Calls one connection, and does what it asks for then.
    fn call(&mut self, index: u32, now: Instant, work: impl FnOnce(&mut Connection, &mut Context) -> Action) {
        let shared = &*self.shared;
        let Some(mut entry) = self.shared.slots.get(index) else {
            return;
        };
        let Some(connection) = &mut *entry else {
            return;
        };
        let (peer, was_surplus) = (connection.peer(), connection.is_surplus());
        let mut context = Context {
            now,
            shared,
            registry: self.poll.registry(),
            scratch: &mut self.scratch,
            to_tiny_http: &mut self.to_tiny_http,
            resources: &self.resources,
            stopping: self.stop_at.is_some(),
            grown: false,
            passed: None,
        };
        let action = work(connection, &mut context);
        let (grown, passed) = (context.grown, context.passed);
        if !was_surplus && (connection.is_surplus() || action == Action::Close) {
            self.admitted -= 1;
        }
        match action {
            Action::Wait => {}
            Action::Requeue => self.requeued.push(index),
            Action::Close => {
                *entry = None;
                self.free.push(index);
            }
        }
        drop(entry);
        if grown && self.shared.budget.held() > self.shared.budget.limit() {
            self.make_memory(index, peer, passed, now);
        }
    }

    /// Sends the requests of this iteration to tiny_http with one write.
    fn flush(&mut self) -> io::Result<()> {
        let done = self.to_tiny_http.send(&mut self.private)?;
        if self.private_awaits_writable == done {
            self.private_awaits_writable = !done;
            self.poll.registry().reregister(&mut self.private, PRIVATE, interest(!done))?;
        }
        Ok(())
    }

    /// tiny_http has nothing to say here, except that it is gone. (A request that a worker dropped makes it write an
    /// answer, which must not fill the stream.)
    fn read_private(&mut self) -> io::Result<()> {
        loop {
            match self.private.read(&mut self.scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn break_down(&mut self, error: &io::Error, now: Instant) {
        self.shared.break_down(error);
        self.to_tiny_http = ToTinyHttp::default();
        for index in 0..self.shared.slots.used() {
            self.call(index, now, |connection, context| {
                if connection.is_working() {
                    connection.refuse(&Error::Busy(Reason::Broken), context);
                }
                connection.advance(index, context)
            });
        }
    }

    /// Starts or continues a stop, if there is one. Returns whether it is over.
    fn stop(&mut self, now: Instant) -> bool {
        if !self.shared.stopping.load(Ordering::SeqCst) {
            return false;
        }
        if self.stop_at.is_none() {
            // Clients whose connection was complete before this moment are let in.
            for _ in 0..LAST_ACCEPTS {
                self.accept(now);
                if self.accept_at != Some(now) {
                    break;
                }
            }
            self.listener = None;
            self.accept_at = None;
            self.stop_at = Some(now + self.shared.limits.stop_timeout);
            for index in 0..self.shared.slots.used() {
                self.call(index, now, |connection, context| {
                    connection.hurry(now);
                    connection.note_readable();
                    connection.advance(index, context)
                });
            }
            // Requests may have arrived with the last reads. The next iteration meets a failure again.
            let _ = self.flush();
            self.sweep_at = Some(now + SWEEP_PAUSE);
        }
        let late = self.stop_at.is_some_and(|at| at <= now);
        self.is_empty() || late || self.shared.aborted.load(Ordering::SeqCst)
    }

    /// Ends requests, answers and connections whose deadline has passed.
    ///
    /// The next sweep is at the first deadline that is set, or at the first one that may be set until then: no state has
    /// less time than the shortest limit.
    fn sweep(&mut self, now: Instant) {
        let mut next = now + self.shortest_limit();
        let late = self.shared.slots.each(|index, connection| {
            let at = connection.deadline(&self.shared.limits)?;
            if at > now {
                next = next.min(at);
            }
            (at <= now).then_some(index)
        });
        for index in late {
            self.call(index, now, |connection, context| {
                // It may have been answered in between.
                match connection.deadline(&context.shared.limits).is_some_and(|at| at <= now) {
                    true => connection.expire(index, context),
                    false => Action::Wait,
                }
            });
        }
        self.sweep_at = (!self.is_empty()).then(|| next.max(now + SWEEP_PAUSE));
    }

    /// Returns the shortest time that a state of a connection has.
    fn shortest_limit(&self) -> Duration {
        let limits = &self.shared.limits;
        let all = [
            limits.head_timeout,
            limits.body_timeout,
            limits.idle_timeout,
            limits.write_timeout,
            limits.request_timeout,
            linger_time(self.stop_at.is_some()),
        ];
        all.into_iter().min().expect("there are some")
    }

    /// Returns whether there is no connection.
    fn is_empty(&self) -> bool {
        self.free.len() == self.shared.slots.used() as usize
    }

    /// Leaves nothing open. The slots outlive the loop: workers hold them.
    pub fn clear(&mut self) {
        self.listener = None;
        let now = Instant::now();
        for index in 0..self.shared.slots.used() {
            self.call(index, now, |connection, context| {
                connection.cut_off(context);
                Action::Close
            });
        }
    }
}
