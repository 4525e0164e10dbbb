//! The readiness loop: which connection is called when, and whose time is up.
//!
//! Owns the set of connections and the stream to tiny_http. What is done with one connection's bytes is in
//! [`super::connection`]; nothing here looks at them.

mod admission;
mod deadlines;

use super::{
    Listener, Resources,
    connection::{Action, Connection, Context, interest},
    peers::PeerCounts,
    shared::Shared,
    slot::Slot,
    slots::Slots,
    to_tiny_http::ToTinyHttp,
};
use crate::{
    error::{Error, Reason},
    http::RequestIds,
};
use admission::Candidates;
pub use admission::MAX_SURPLUS;
use mio::{Events, Interest, Poll, Token, net, unix::SourceFd};
use std::{
    collections::VecDeque,
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
/// What one read takes at most; it bounds what a pipelining client makes the frontend keep.
const SCRATCH_BYTES: usize = 16 * 1024;
/// Iterations of accepting before the listener closes, which resets connections that are still in its backlog.
const LAST_ACCEPTS: usize = 64;
/// How long there is nothing to do until that is reported. Requests of people and of checks come more often.
const IDLE: Duration = Duration::from_secs(5);
/// Looking at every connection's deadline is cheap, but not free.
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// The state of the frontend's thread.
pub struct EventLoop {
    pub(super) poll: Poll,
    pub shared: Arc<Shared>,
    pub(super) slots: Arc<Slots>,
    pub(super) listener: Option<Listener>,
    private: net::UnixStream,
    private_awaits_writable: bool,
    /// Complete requests for tiny_http.
    to_tiny_http: ToTinyHttp,
    ids: RequestIds,
    pub(super) resources: Resources,
    scratch: Box<[u8]>,
    /// Connections that count, up to `max_connections`.
    pub(super) admitted: usize,
    /// The same by peer.
    pub(super) peers: PeerCounts,
    /// Connections beyond the capacity that are being told so, the oldest first; some have ended.
    pub(super) surplus: VecDeque<Slot>,
    pub(super) candidates: Candidates,
    pub(super) free: Vec<u32>,
    /// Slots that were ever used.
    pub(super) used: u32,
    /// Connections that asked to be called again in the next iteration.
    requeued: Vec<u32>,
    /// There may be a client to accept, from then on.
    pub(super) accept_at: Option<Instant>,
    pub(super) sweep_at: Option<Instant>,
    /// When the last event came.
    active_at: Instant,
    /// When `on_idle` is due, if no event comes until then.
    idle_at: Option<Instant>,
    /// When a stop has to be over.
    stop_at: Option<Instant>,
}

impl EventLoop {
    /// Registers what the loop listens to.
    pub fn new(
        poll: Poll,
        shared: Arc<Shared>,
        slots: Arc<Slots>,
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
            slots,
            listener: Some(listener),
            private,
            private_awaits_writable: false,
            to_tiny_http: ToTinyHttp::default(),
            ids: RequestIds::new(Instant::now()),
            resources,
            scratch: vec![0; SCRATCH_BYTES].into(),
            admitted: 0,
            peers: PeerCounts::default(),
            surplus: VecDeque::new(),
            candidates: Candidates::default(),
            free: Vec::new(),
            used: 0,
            requeued: Vec::new(),
            accept_at: None,
            sweep_at: None,
            active_at: Instant::now(),
            idle_at: None,
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
            if !events.is_empty() {
                self.active_at = now;
                self.idle_at.get_or_insert(now + IDLE);
            }
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
            if self.idle_at.is_some_and(|at| at <= now) {
                self.idle(now);
            }
            if self.shared.shortage.load(Ordering::Relaxed) {
                self.give_up_answers(now);
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
        let times = [self.accept_at, self.sweep_at, self.stop_at, self.idle_at];
        let first = times.into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Calls one connection, and does what it asks for then.
    pub(super) fn call(
        &mut self,
        index: u32,
        now: Instant,
        work: impl FnOnce(&mut Connection, &mut Context) -> Action,
    ) {
        let shared = &*self.shared;
        let Some(mut entry) = self.slots.get(index) else {
            return;
        };
        let Some(connection) = &mut entry.connection else {
            return;
        };
        let was_surplus = connection.is_surplus();
        let mut context = Context {
            now,
            shared,
            registry: self.poll.registry(),
            scratch: &mut self.scratch,
            to_tiny_http: &mut self.to_tiny_http,
            ids: &mut self.ids,
            resources: &self.resources,
            stopping: self.stop_at.is_some(),
            last_try: false,
        };
        let action = work(connection, &mut context);
        let (peer, awaited) = (connection.peer(), connection.awaits_memory(&shared.limits));
        let is_surplus = connection.is_surplus();
        if !was_surplus && (is_surplus || action == Action::Close) {
            self.admitted -= 1;
            self.peers.remove(peer);
        }
        if is_surplus && !was_surplus {
            self.surplus.push_back(Slot::new(index, connection.generation()));
        }
        match action {
            Action::Wait => {}
            Action::Requeue => self.requeued.push(index),
            Action::Close => {
                entry.close();
                self.free.push(index);
            }
        }
        drop(entry);
        if let Some(bytes) = awaited {
            self.make_memory(index, peer, bytes, now);
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
        self.shared.in_flight.break_down(error);
        self.to_tiny_http = ToTinyHttp::default();
        for index in 0..self.used {
            self.call(index, now, |connection, context| {
                if connection.is_working() {
                    connection.refuse(&Error::Busy(Reason::Broken), context);
                }
                connection.advance(index, context)
            });
        }
    }

    /// Whether the stop is over.
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
            for index in 0..self.used {
                self.call(index, now, |connection, context| {
                    connection.hurry(now);
                    connection.note_readable();
                    connection.advance(index, context)
                });
            }
            // What arrived with the last reads; a failure shows itself in the next iteration.
            let _ = self.flush();
            self.sweep_at = Some(now + SWEEP_PAUSE);
        }
        let late = self.stop_at.is_some_and(|at| at <= now);
        self.is_empty() || late || self.shared.aborted.load(Ordering::SeqCst)
    }

    /// Leaves nothing open. The slots outlive the loop: workers hold them.
    pub fn clear(&mut self) {
        self.listener = None;
        let now = Instant::now();
        for index in 0..self.used {
            self.call(index, now, |connection, context| {
                connection.cut_off(context);
                Action::Close
            });
        }
    }
}
