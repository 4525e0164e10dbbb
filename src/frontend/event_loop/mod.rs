//! The event loop of the frontend's thread. The loop calls a connection when its socket is ready, when a worker has
//! answered its request, and when its deadline has passed.
//!
//! Owns the connections and the stream to tiny_http. Does not look at the bytes of a client: [`super::connection`]
//! reads and parses them.

mod admission;
mod coalescing;

use self::coalescing::CoalescingPolicy;
use super::connection::{Connection, ConnectionPermit, LINGER_TIME, LoopAction, LoopContext};
use super::slots::{SlotContents, Slots};
use super::{Listener, SharedResources};
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

/// The token in the events of the listening sockets. The token of a connection is the number of its slot.
const LISTENER_TOKEN: Token = Token(usize::MAX);
/// The token in the events by which other threads wake the event loop.
const WAKER_TOKEN: Token = Token(usize::MAX - 1);
/// The token in the events of the stream to tiny_http.
const TICKET_STREAM_TOKEN: Token = Token(usize::MAX - 2);
/// The token in the events of the timer for the next deadline.
const TIMER_TOKEN: Token = Token(usize::MAX - 3);
/// The most events that one poll takes from the kernel.
const MAX_EVENTS_PER_POLL: usize = 1024;
/// The most bytes that one read takes from a socket. All connections share one buffer of this size.
const MAX_READ_BYTES: usize = 16 * 1024;
/// The most calls of [`EventLoop::accept`] when a stop begins. They admit the clients that connected before the stop:
/// closing the listener would reset their connections.
const MAX_ACCEPT_CALLS_IN_STOP: usize = 64;
/// The most slots that one ticket names. A ticket hands the complete requests of these slots to one worker. If more
/// requests arrive together, several tickets share them out among the workers.
const MAX_SLOTS_PER_TICKET: usize = 32;
/// The shortest time between two sweeps. A sweep looks at the deadlines of all connections.
const MIN_SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// The event loop of the frontend's thread, with all that it owns.
pub struct EventLoop {
    context: LoopContext,
    pub slots: Arc<Slots>,
    /// The listening sockets; `None` once they are closed.
    listener: Option<Listener>,
    /// The stream to tiny_http, over which tickets reach the workers.
    ticket_stream: UnixStream,
    /// Slots with a complete request that no ticket names yet: the next tickets name these slots.
    slots_without_ticket: Vec<u32>,
    /// The permit of which each open connection has a clone: the reference count tells the number of open connections.
    /// A surplus connection, which only gets a 503, has none.
    shared_permit: ConnectionPermit,
    /// The number of connections that were accepted since the start. The first `request_number` of a connection
    /// has this number as its upper half, so that no two requests of a slot have the same number.
    accepted_connections: u64,
    /// Slots without a connection. The next connection gets the last slot of this list.
    free_slots: Vec<u32>,
    /// Slots of connections that asked to be called again in the next iteration.
    requeued_slots: Vec<u32>,
    /// The time at which the loop accepts clients next; `None` until the listener reports a client.
    next_accept_at: Option<Instant>,
    /// The time of the next sweep, which looks at the deadlines of all connections; `None` if there is no connection.
    next_sweep_at: Option<Instant>,
    /// Wakes the loop for the next deadline. The timer stays set while the loop waits several times: a time-out for
    /// each wait would set a timer of the kernel each time.
    timer: TimerFd,
    /// The time that `timer` is set for; `None` if it is not set.
    timer_set_for: Option<Instant>,
    coalescing: CoalescingPolicy,
}

impl EventLoop {
    /// Registers the listening sockets and the stream to tiny_http for readiness events, and creates a slot for each
    /// client that may connect.
    pub fn new(
        listener: Listener,
        limits: Arc<Limits>,
        resources: SharedResources,
        ticket_stream: UnixStream,
    ) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER_TOKEN)?;
        let slots = Arc::new(Slots::new(limits.clone(), resources.budget.clone(), waker));
        // Lets writes to tiny_http block. Such a write waits only for the thread of tiny_http that reads, and that
        // thread waits for no client. Unread tickets take a bounded number of bytes, because no two name the same slot.
        ticket_stream.set_nonblocking(false)?;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC)?;
        listener.sockets.iter().try_for_each(|socket| register_readable(&poll, socket, LISTENER_TOKEN))?;
        register_readable(&poll, &ticket_stream, TICKET_STREAM_TOKEN)?;
        register_readable(&poll, &timer.as_fd(), TIMER_TOKEN)?;
        Ok(EventLoop {
            context: LoopContext {
                now: Instant::now(),
                limits,
                warnings: slots.warnings.clone(),
                poll,
                read_buffer: new_read_buffer(),
                resources,
                stop_deadline: None,
            },
            listener: Some(listener),
            ticket_stream,
            slots_without_ticket: Vec::new(),
            shared_permit: ConnectionPermit::default(),
            accepted_connections: 0,
            free_slots: (0..slots.len() as u32).rev().collect(),
            slots,
            requeued_slots: Vec::new(),
            next_accept_at: None,
            next_sweep_at: None,
            timer,
            timer_set_for: None,
            coalescing: CoalescingPolicy::default(),
        })
    }

    /// Runs the loop until a stop is over. An error means that the frontend can serve no further request.
    pub fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(MAX_EVENTS_PER_POLL);
        loop {
            let timeout = self.arm_timer()?;
            self.poll_and_advance(&mut events, timeout)?;
            // Polls once more before a ticket is written. Each ticket wakes a thread of tiny_http and a worker, so one
            // ticket for several requests costs less than several tickets.
            if !self.slots_without_ticket.is_empty() {
                self.poll_and_advance(&mut events, Some(Duration::ZERO))?;
                self.coalesce_requests(&mut events)?;
            }
            let now = self.context.now;
            // Accepts clients only after the connections were read from: accepting may close an idle connection, and a
            // read may show that a connection is not idle.
            if self.next_accept_at.is_some_and(|at| at <= now) {
                self.accept();
            }
            if self.next_sweep_at.is_some_and(|at| at <= now) {
                self.sweep_deadlines();
            }
            if self.slots.is_memory_short.swap(false, Ordering::Relaxed) {
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
    fn poll_and_advance(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        match self.context.poll.poll(events, timeout) {
            Err(error) if error.kind() == ErrorKind::Interrupted => events.clear(),
            result => result?,
        }
        self.context.now = Instant::now();
        let mut due = mem::take(&mut self.requeued_slots);
        for event in &*events {
            match event.token() {
                LISTENER_TOKEN => self.next_accept_at = Some(self.next_accept_at.unwrap_or(self.context.now)),
                WAKER_TOKEN => self.slots.take_queued_slots(&mut due),
                TICKET_STREAM_TOKEN if event.is_read_closed() => return Err(ErrorKind::UnexpectedEof.into()),
                // Discards the answers of tiny_http to tickets that a worker has dropped: unread answers would fill the
                // stream.
                TICKET_STREAM_TOKEN => {
                    let _ = recv(self.ticket_stream.as_raw_fd(), &mut [0; 1 << 10], MsgFlags::MSG_DONTWAIT);
                }
                TIMER_TOKEN => self.timer_set_for = None,
                Token(slot) => self.act_in_slot(slot as u32, |connection, context| {
                    connection.record_event(event);
                    connection.advance(slot as u32, context)
                }),
            }
        }
        // Removes duplicates: a connection may have been requeued and also answered by a worker.
        due.sort_unstable();
        due.dedup();
        due.into_iter().for_each(|slot| self.advance_connection(slot));
        Ok(())
    }

    /// Sets the timer for the next deadline, if it is not set for that time or an earlier one. Returns how long the
    /// loop may wait for events: zero if a requeued connection or a deadline is due now, else without a bound (`None`),
    /// because the timer ends the wait.
    fn arm_timer(&mut self) -> io::Result<Option<Duration>> {
        if !self.requeued_slots.is_empty() {
            return Ok(Some(Duration::ZERO));
        }
        let times = [self.next_accept_at, self.next_sweep_at, self.context.stop_deadline];
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

    /// Makes the connection in a slot read and send as far as its socket allows.
    fn advance_connection(&mut self, slot: u32) {
        self.act_in_slot(slot, |connection, context| connection.advance(slot, context));
    }

    /// Calls `act` with the connection in a slot, and carries out the action that `act` returns.
    fn act_in_slot(&mut self, slot: u32, act: impl FnOnce(&mut Connection, &mut LoopContext) -> LoopAction) {
        let Some(mut entry) = self.slots.lock(slot) else { return };
        let SlotContents { connection: Some(connection), has_pending_ticket } = &mut *entry else { return };
        // Catches a panic, so that it ends this connection alone: the logger of a program that embeds the service may
        // panic.
        let call = AssertUnwindSafe(|| act(connection, &mut self.context));
        let action = catch_unwind(call).unwrap_or_else(|_| {
            self.context.read_buffer = new_read_buffer();
            LoopAction::Close
        });
        match action {
            LoopAction::Wait => {}
            LoopAction::WakeWorker if mem::replace(has_pending_ticket, true) => {}
            LoopAction::WakeWorker => self.slots_without_ticket.push(slot),
            LoopAction::FreeMemory => {
                let client = connection.counted_client;
                drop(entry);
                self.enforce_memory_limit(slot, client);
                self.advance_connection(slot);
            }
            LoopAction::Requeue => self.requeued_slots.push(slot),
            LoopAction::Close => {
                entry.connection = None;
                self.free_slots.push(slot);
            }
        }
    }

    /// Wakes workers for the requests that have become complete, by tickets. A ticket is a small HTTP request to
    /// tiny_http, whose path names slots with a complete request. A worker receives the ticket from tiny_http. One
    /// system call writes all tickets.
    fn write_tickets(&mut self) -> io::Result<()> {
        if self.slots_without_ticket.is_empty() {
            return Ok(());
        }
        let mut tickets = String::new();
        for slots in self.slots_without_ticket.chunks(MAX_SLOTS_PER_TICKET) {
            tickets += "GET /";
            slots.iter().try_for_each(|slot| write!(tickets, "{slot},")).expect("a String takes all");
            tickets += " HTTP/1.1\r\n\r\n";
        }
        self.slots_without_ticket.clear();
        self.ticket_stream.write_all(tickets.as_bytes())
    }

    /// Begins the stop of the server if it was requested, or goes on with it. Returns true once the stop is over.
    fn proceed_with_stop(&mut self) -> bool {
        let now = self.context.now;
        if !self.slots.is_stopping.load(Ordering::SeqCst) {
            return false;
        }
        if self.context.stop_deadline.is_none() {
            // Admits the clients that connected before the stop: closing the listener would reset their connections.
            for _ in 0..MAX_ACCEPT_CALLS_IN_STOP {
                self.accept();
                if self.next_accept_at != Some(now) {
                    break;
                }
            }
            self.listener = None;
            self.next_accept_at = None;
            self.context.stop_deadline = Some(Instant::now() + self.context.limits.stop_timeout);
            for slot in self.slots.map_connections(|slot, _| Some(slot)) {
                self.act_in_slot(slot, |connection, context| {
                    connection.may_have_input = true;
                    connection.advance(slot, context)
                });
            }
            self.next_sweep_at = Some(now + MIN_SWEEP_PAUSE);
        }
        self.has_no_connections() || self.context.stop_deadline.is_some_and(|at| at <= now)
    }

    /// Ends requests, answers and connections whose deadline has passed.
    ///
    /// Sets the next sweep to the earliest deadline that is known now, but no later than the shortest time limit from
    /// now: a deadline that is set before the next sweep cannot be earlier than that.
    fn sweep_deadlines(&mut self) {
        let now = self.context.now;
        let Limits { head_timeout, body_timeout, idle_timeout, write_timeout, .. } = *self.context.limits;
        let all = [head_timeout, body_timeout, idle_timeout, write_timeout, LINGER_TIME];
        let mut next = now + all.into_iter().fold(self.context.limits.request_timeout, Duration::min);
        let late = self.slots.map_connections(|slot, connection| {
            let at = connection.deadline(&self.context.limits)?;
            if at > now {
                next = next.min(at);
            }
            (at <= now).then_some(slot)
        });
        for slot in late {
            self.act_in_slot(slot, |connection, context| connection.end_early(None, slot, context));
        }
        self.next_sweep_at = (!self.has_no_connections()).then(|| next.max(now + MIN_SWEEP_PAUSE));
    }

    fn has_no_connections(&self) -> bool {
        self.free_slots.len() == self.slots.len()
    }

    /// Closes the listener and all connections after the loop has ended. Answers 503 to requests that are arriving or
    /// not answered yet, as far as the socket takes the answer immediately. The slots stay, because workers hold them.
    pub fn close_all_sockets(&mut self) {
        self.listener = None;
        self.context.now = Instant::now();
        for slot in self.slots.map_connections(|slot, _| Some(slot)) {
            self.act_in_slot(slot, |connection, context| {
                if connection.has_request() {
                    connection.refuse_as_busy(BusyReason::Stopped, slot, context);
                }
                LoopAction::Close
            });
        }
    }
}

fn register_readable(poll: &Poll, file: &impl AsRawFd, token: Token) -> io::Result<()> {
    poll.registry().register(&mut SourceFd(&file.as_raw_fd()), token, Interest::READABLE)
}

fn new_read_buffer() -> Box<[u8]> {
    vec![0; MAX_READ_BYTES].into()
}
