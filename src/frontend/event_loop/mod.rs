//! The readiness loop of the frontend's thread. It calls a connection when its socket is ready, when a worker has
//! answered its request, and when its deadline has passed.
//!
//! Owns the connections and the stream to tiny_http. [`super::connection`] reads and parses the bytes of a client; the
//! loop looks at none.

mod admission;
mod coalescing;

use self::coalescing::Coalescing;
use super::connection::{Action, Admission, Connection, LINGER_TIME, LoopParts};
use super::slots::{SlotContents, Slots};
use super::{Listener, Resources};
use crate::{config::Limits, error::BusyReason};
use mio::{Events, Interest, Poll, Token, Waker, unix::SourceFd};
use nix::sys::socket::{MsgFlags, recv};
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, atomic::Ordering};
use std::time::{Duration, Instant};
use std::{fmt::Write as _, mem, os::unix::net::UnixStream};

const LISTENER: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
const TICKET_STREAM: Token = Token(usize::MAX - 2);
const TIMER: Token = Token(usize::MAX - 3);
/// The most events that one wait takes from the kernel.
const MAX_EVENTS: usize = 1024;
/// The most bytes of one read from a socket: a client that sends many requests at once takes up no more memory.
const MAX_READ_BYTES: usize = 16 * 1024;
/// How often a stop calls [`EventLoop::accept`]. The clients that have connected before the stop are accepted, because
/// closing the listener would reset their connections.
const MAX_LAST_ACCEPTS: usize = 64;
/// The most requests that one worker is handed at once. A ticket names the slots of connections with a complete
/// request, and one worker gets the ticket. If more requests arrive at once, several workers share them.
const MAX_TICKET_SLOTS: usize = 32;
/// The shortest time between two sweeps, each of which looks at the deadlines of all connections.
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// The state of the frontend's thread.
pub struct EventLoop {
    context: LoopParts,
    pub slots: Arc<Slots>,
    listener: Option<Listener>,
    ticket_stream: UnixStream,
    /// Slots of connections with a complete request that no worker was told of yet: the next tickets name these slots.
    slots_without_ticket: Vec<u32>,
    /// The permit of which each open connection has a clone: the number of clones tells the number of connections. A
    /// surplus connection, which only gets a 503, has none.
    admission: Admission,
    /// The number of connections since the start. It is the upper half of the generation, the number by which a
    /// connection tells its requests apart.
    connection_count: u64,
    /// Slots without a connection. The next connection gets the last slot of this list.
    free_slots: Vec<u32>,
    /// Connections that asked to be called again in the next iteration.
    requeued_slots: Vec<u32>,
    /// When the loop accepts clients next; `None` until the listener reports one.
    accept_at: Option<Instant>,
    /// When the loop looks at all deadlines next; `None` if there is no connection.
    sweep_at: Option<Instant>,
    /// Wakes the loop for the next deadline. It stays set from one wait to the next: a time-out for each wait would
    /// set a timer of the kernel each time.
    timer: TimerFd,
    /// The time that `timer` is set for, if it is set.
    timer_set_for: Option<Instant>,
    coalescing: Coalescing,
}

impl EventLoop {
    /// Registers the listening sockets and the stream to tiny_http for readiness events, and creates a slot for each
    /// client that there may be.
    pub fn new(
        listener: Listener,
        limits: Arc<Limits>,
        resources: Resources,
        ticket_stream: UnixStream,
    ) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let slots = Arc::new(Slots::new(limits.clone(), resources.budget.clone(), waker));
        // Lets writes to tiny_http block. A write waits only for the thread of tiny_http that reads, and that thread
        // waits for no client. The tickets on their way are bounded, because one ticket at a time names a slot.
        ticket_stream.set_nonblocking(false)?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        listener.sockets.iter().try_for_each(|socket| register(&poll, socket, LISTENER))?;
        register(&poll, &ticket_stream, TICKET_STREAM)?;
        register(&poll, &timer.as_fd(), TIMER)?;
        Ok(EventLoop {
            context: LoopParts {
                now: Instant::now(),
                limits,
                warnings: slots.warnings.clone(),
                poll,
                scratch: scratch(),
                resources,
                stop_at: None,
            },
            listener: Some(listener),
            ticket_stream,
            slots_without_ticket: Vec::new(),
            admission: Admission::default(),
            connection_count: 0,
            free_slots: (0..slots.len() as u32).rev().collect(),
            slots,
            requeued_slots: Vec::new(),
            accept_at: None,
            sweep_at: None,
            timer,
            timer_set_for: None,
            coalescing: Coalescing::default(),
        })
    }

    /// Runs until a stop is over. An error ends the service.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(MAX_EVENTS);
        loop {
            let timeout = self.timeout()?;
            self.poll(&mut events, timeout)?;
            // Looks for further complete requests before a ticket is written, because each ticket wakes two threads:
            // one ticket for several requests costs less than several tickets.
            if !self.slots_without_ticket.is_empty() {
                self.poll(&mut events, Some(Duration::ZERO))?;
                self.coalesce(&mut events)?;
            }
            let now = self.context.now;
            // Accepts clients only after the connections were read from: accepting may close an idle connection, and a
            // read may show that a connection is not idle.
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept();
            }
            if self.sweep_at.is_some_and(|at| at <= now) {
                self.sweep();
            }
            if self.slots.shortage.swap(false, Ordering::Relaxed) {
                self.free_memory_for_worker();
            }
            let is_over = self.proceed_with_stop();
            self.write_tickets()?;
            if is_over {
                return Ok(());
            }
        }
    }

    /// Waits for events up to `timeout`. Then advances each connection that has an event, that a worker has answered,
    /// or that was requeued.
    fn poll(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        match self.context.poll.poll(events, timeout) {
            Err(error) if error.kind() == ErrorKind::Interrupted => events.clear(),
            result => result?,
        }
        self.context.now = Instant::now();
        let mut due = mem::take(&mut self.requeued_slots);
        for event in &*events {
            match event.token() {
                LISTENER => self.accept_at = Some(self.accept_at.unwrap_or(self.context.now)),
                WAKER => self.slots.take_queued(&mut due),
                TICKET_STREAM if event.is_read_closed() => return Err(ErrorKind::UnexpectedEof.into()),
                // Discards what tiny_http answers to a ticket that a worker has dropped: unread answers would fill the
                // stream.
                TICKET_STREAM => {
                    let _ = recv(self.ticket_stream.as_raw_fd(), &mut [0; 1 << 10], MsgFlags::MSG_DONTWAIT);
                }
                TIMER => self.timer_set_for = None,
                Token(index) => self.call_connection(index as u32, |connection, context| {
                    connection.note_event(event);
                    connection.advance(index as u32, context)
                }),
            }
        }
        // Removes duplicates, because a connection may be requeued and answered by a worker at once.
        due.sort_unstable();
        due.dedup();
        due.into_iter().for_each(|index| self.advance(index));
        Ok(())
    }

    /// Returns how long the loop may wait for events: zero if a connection is due now, else without a bound (`None`),
    /// as the timer ends the wait. Sets the timer if the next deadline is earlier than the time that it is set for.
    fn timeout(&mut self) -> io::Result<Option<Duration>> {
        if !self.requeued_slots.is_empty() {
            return Ok(Some(Duration::ZERO));
        }
        let times = [self.accept_at, self.sweep_at, self.context.stop_at];
        let first = times.into_iter().flatten().min();
        let Some(first) = first.filter(|first| self.timer_set_for.is_none_or(|at| *first < at)) else {
            return Ok(None);
        };
        let left = first.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Some(left));
        }
        self.timer.set(Expiration::OneShot(left.into()), TimerSetTimeFlags::empty())?;
        self.timer_set_for = Some(first);
        Ok(None)
    }

    /// Makes a connection read and write as far as its socket allows.
    fn advance(&mut self, index: u32) {
        self.call_connection(index, |connection, context| connection.advance(index, context));
    }

    /// Runs `work` on a connection, and carries out the action that `work` returns.
    fn call_connection(&mut self, index: u32, work: impl FnOnce(&mut Connection, &mut LoopParts) -> Action) {
        let Some(mut entry) = self.slots.lock(index) else { return };
        let SlotContents { connection: Some(connection), has_ticket } = &mut *entry else { return };
        // Catches a panic, so that it ends this connection alone: the logger of a program that embeds the service may
        // panic.
        let work = AssertUnwindSafe(|| work(connection, &mut self.context));
        let action = catch_unwind(work).unwrap_or_else(|_| {
            self.context.scratch = scratch();
            Action::Close
        });
        match action {
            Action::Wait => {}
            Action::Ticket if mem::replace(has_ticket, true) => {}
            Action::Ticket => self.slots_without_ticket.push(index),
            Action::FreeMemory => {
                let client = connection.client;
                drop(entry);
                self.enforce_memory_limit(index, client);
                self.advance(index);
            }
            Action::Requeue => self.requeued_slots.push(index),
            Action::Close => {
                entry.connection = None;
                self.free_slots.push(index);
            }
        }
    }

    /// Wakes workers for the requests that have become complete in this iteration. Writes tickets to tiny_http, because
    /// the workers receive from tiny_http. A ticket is a small request that names slots of complete requests. One
    /// system call writes all tickets.
    fn write_tickets(&mut self) -> io::Result<()> {
        if self.slots_without_ticket.is_empty() {
            return Ok(());
        }
        let mut tickets = String::new();
        for slots in self.slots_without_ticket.chunks(MAX_TICKET_SLOTS) {
            tickets += "GET /";
            slots.iter().try_for_each(|slot| write!(tickets, "{slot},")).expect("a String takes all");
            tickets += " HTTP/1.1\r\n\r\n";
        }
        self.slots_without_ticket.clear();
        self.ticket_stream.write_all(tickets.as_bytes())
    }

    /// Begins a stop if one was requested, or goes on with it. Returns true once the stop is over.
    fn proceed_with_stop(&mut self) -> bool {
        let now = self.context.now;
        if !self.slots.stopping.load(Ordering::SeqCst) {
            return false;
        }
        if self.context.stop_at.is_none() {
            // Admits the clients that connected before the stop: closing the listener would reset their connections.
            for _ in 0..MAX_LAST_ACCEPTS {
                self.accept();
                if self.accept_at != Some(now) {
                    break;
                }
            }
            self.listener = None;
            self.accept_at = None;
            self.context.stop_at = Some(Instant::now() + self.context.limits.stop_timeout);
            for index in self.slots.map_connections(|index, _| Some(index)) {
                self.call_connection(index, |connection, context| {
                    connection.readable = true;
                    connection.advance(index, context)
                });
            }
            self.sweep_at = Some(now + SWEEP_PAUSE);
        }
        self.is_empty() || self.context.stop_at.is_some_and(|at| at <= now)
    }

    /// Ends requests, answers and connections whose deadline has passed.
    ///
    /// The next sweep is at the earliest deadline that is known now, but no later than after the shortest time limit,
    /// because a deadline that is set meanwhile is not earlier than that.
    fn sweep(&mut self) {
        let now = self.context.now;
        let Limits { head_timeout, body_timeout, idle_timeout, write_timeout, .. } = *self.context.limits;
        let all = [head_timeout, body_timeout, idle_timeout, write_timeout, LINGER_TIME];
        let mut next = now + all.into_iter().fold(self.context.limits.request_timeout, Duration::min);
        let late = self.slots.map_connections(|index, connection| {
            let at = connection.deadline(&self.context.limits)?;
            if at > now {
                next = next.min(at);
            }
            (at <= now).then_some(index)
        });
        for index in late {
            self.call_connection(index, |connection, context| connection.end(None, index, context));
        }
        self.sweep_at = (!self.is_empty()).then(|| next.max(now + SWEEP_PAUSE));
    }

    /// Returns whether no connection is open.
    fn is_empty(&self) -> bool {
        self.free_slots.len() == self.slots.len()
    }

    /// Closes the listener and all connections when the loop has ended. Requests that are arriving or in work are
    /// answered 503, as far as the socket takes the answer at once. The slots stay, because workers hold them.
    pub fn clear(&mut self) {
        self.listener = None;
        self.context.now = Instant::now();
        for index in self.slots.map_connections(|index, _| Some(index)) {
            self.call_connection(index, |connection, context| {
                if connection.has_request() {
                    connection.turn_away(BusyReason::Stopped, index, context);
                }
                Action::Close
            });
        }
    }
}

fn register(poll: &Poll, file: &impl AsRawFd, token: Token) -> io::Result<()> {
    poll.registry().register(&mut SourceFd(&file.as_raw_fd()), token, Interest::READABLE)
}

fn scratch() -> Box<[u8]> {
    vec![0; MAX_READ_BYTES].into()
}
