//! A connection of a client: its socket, and how far its request or its answer has come.
//!
//! Owns the states of a connection; `reading` and `writing` have what is done in them. Knows nothing of other
//! connections. The event loop and the workers both call in here, one at a time (the lock is the slot's): a worker to
//! answer, the event loop for all else. Nothing here blocks.

mod reading;
mod writing;

use super::{
    Resources,
    http1::{Traits, framing::Framing, head::Echo},
    peers::{Expendable, Peer},
    responder::Claimed,
    shared::Shared,
    slots::Slot,
    to_tiny_http::ToTinyHttp,
};
use crate::{
    budget::Reservation,
    config::Limits,
    error::{Error, Reason},
    http::{Cors, RequestId},
};
use mio::{Registry, event::Event};
use socket2::Socket;
use std::{
    mem,
    net::IpAddr,
    time::{Duration, Instant},
};
use writing::Unsent;
pub use writing::{Delivery, interest, linger_time};

/// Reads and writes that a connection gets in one iteration of the event loop, before others get theirs.
const STEPS_PER_ITERATION: usize = 8;

/// Bytes that a request, a buffer or an answer may have without being counted. Most have no more.
const UNCOUNTED: usize = 1 << 10;

/// Returns how many of these bytes are counted.
fn counted(bytes: usize) -> usize {
    if bytes > UNCOUNTED { bytes } else { 0 }
}

/// The state that the event loop lends a connection for one iteration.
pub struct Context<'a> {
    /// The time, read once an iteration.
    pub now: Instant,
    pub shared: &'a Shared,
    /// Where sockets are registered.
    pub registry: &'a Registry,
    /// Bytes that were read go here first, so that a connection needs a buffer only for what is incomplete.
    pub scratch: &'a mut [u8],
    /// Complete requests for tiny_http, written once an iteration.
    pub to_tiny_http: &'a mut ToTinyHttp,
    pub resources: &'a Resources,
    /// No request is waited for that has not begun to arrive.
    pub stopping: bool,
    /// The connection has made more bytes counted.
    pub grown: bool,
    /// The length of the request that was passed on, if that is counted. It is the last one in `to_tiny_http`.
    pub passed: Option<usize>,
}

/// The next step of the event loop with a connection that it has called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Wait for an event or a worker.
    Wait,
    /// Call it again in the next iteration.
    Requeue,
    /// Close it.
    Close,
}

/// A connection of a client, from accept to close.
pub struct Connection {
    stream: Socket,
    peer: Peer,
    /// Counts requests, so that a late answer is recognized as late.
    generation: u64,
    /// The socket may hold bytes, or an end, that were not read.
    readable: bool,
    /// The client's end of sending was seen; a short read is not the last one then.
    ended: bool,
    /// The client has reset the connection: it cannot take an answer.
    reset: bool,
    /// Registered for writability too.
    awaits_writable: bool,
    /// Beyond the capacity: it is only told so.
    surplus: bool,
    /// The memory of its buffer, of the body that is arriving, or of its answer.
    held: Reservation,
    state: State,
}

/// The states of a connection. `since` is when it began: deadlines count from there, and no byte moves them. `input` is
/// what was read and is not used yet.
enum State {
    /// Between requests; the beginning of the next one may have been read with the last.
    Idle { since: Instant, input: Vec<u8> },
    /// A head or a body is arriving.
    Arriving { since: Instant, framing: Framing, input: Vec<u8> },
    /// The request is with the workers.
    Working { since: Instant, request: InWork, input: Vec<u8> },
    /// The socket did not take all of an answer.
    Writing { since: Instant, answer: Unsent },
    /// The last answer is sent.
    Closing,
    /// Shut down for writing; up to `left` bytes more are read and thrown away.
    Lingering { until: Instant, left: usize },
}

/// Labels of the states of connections in figures.
pub const DOING: [&str; 5] = ["idle", "reading", "working", "writing", "closing"];
/// The place in [`DOING`] of connections whose request the workers have.
pub const WORKING: usize = 2;

/// A request that the workers have, as far as its answer depends on it.
struct InWork {
    traits: Traits,
    id: RequestId,
    cors: Cors,
    head_only: bool,
    /// The memory of its head and its body, until a worker claims it.
    held: Option<Reservation>,
    /// A worker has begun to execute it.
    begun: bool,
}

impl InWork {
    /// Returns the address of its client: the connection's, or the one that a trusted proxy names.
    fn client(&self, peer: Peer) -> Option<IpAddr> {
        self.traits.client.filter(|_| peer.trusted).or(peer.address)
    }
}

impl Connection {
    /// A connection that was just accepted, which has `held` nothing yet. Its requests have generations from
    /// `generation` on.
    pub fn new(stream: Socket, peer: Peer, generation: u64, held: Reservation, now: Instant) -> Connection {
        Connection {
            stream,
            peer,
            generation,
            readable: false,
            ended: false,
            reset: false,
            awaits_writable: false,
            surplus: false,
            held,
            state: State::Idle { since: now, input: Vec::new() },
        }
    }

    /// Returns the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Hands the request that is in work over to the worker that has got it.
    pub fn claim(&mut self, slot: Slot, limits: &Limits) -> Option<Claimed> {
        let State::Working { since, request, .. } = &mut self.state else {
            return None;
        };
        Some(Claimed {
            slot: slot.with_peer(request.client(self.peer)),
            id: request.id.clone(),
            deadline: *since + limits.request_timeout,
            held: request.held.take(),
        })
    }

    /// Returns the place of its state in [`DOING`].
    pub fn doing(&self) -> usize {
        match &self.state {
            State::Idle { .. } => 0,
            State::Arriving { .. } => 1,
            State::Working { .. } => WORKING,
            State::Writing { .. } => 3,
            State::Closing | State::Lingering { .. } => 4,
        }
    }

    /// Returns whether the workers have a request of it.
    pub fn is_working(&self) -> bool {
        self.doing() == WORKING
    }

    /// Returns whether the request of that generation still waits for its answer.
    pub fn awaits(&self, generation: u64) -> bool {
        self.generation == generation && self.is_working()
    }

    /// Returns whether it is open only to be told that there is no capacity.
    pub fn is_surplus(&self) -> bool {
        self.surplus
    }

    /// Returns the bytes that are counted for it.
    pub fn memory(&self) -> usize {
        self.held.bytes()
    }

    /// Returns why it may be closed for another connection, and since when.
    pub fn expendable(&self) -> Option<(Expendable, Instant)> {
        if self.surplus || self.peer.trusted {
            return None;
        }
        match &self.state {
            State::Idle { since, .. } | State::Lingering { until: since, .. } => {
                Some((Expendable::Idle, *since))
            }
            State::Arriving { since, .. } => Some((Expendable::Incomplete, *since)),
            State::Writing { answer, .. } => Some((Expendable::Stalled, answer.moved)),
            State::Working { since, request, .. } if !request.begun => Some((Expendable::Queued, *since)),
            State::Working { .. } | State::Closing => None,
        }
    }

    /// Returns when [`Connection::expire`] is due.
    pub fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let (since, time) = match &self.state {
            State::Idle { since, .. } => (since, limits.idle_timeout),
            State::Arriving { since, framing, .. } if framing.is_in_body() => (since, limits.body_timeout),
            State::Arriving { since, .. } => (since, limits.head_timeout),
            State::Working { since, .. } => (since, limits.request_timeout),
            State::Writing { since, .. } => (since, limits.write_timeout),
            State::Lingering { until, .. } => (until, Duration::ZERO),
            // The event loop was told to close it.
            State::Closing => return None,
        };
        Some(*since + time)
    }

    /// Notes that the socket may have something to read.
    pub fn note_readable(&mut self) {
        self.readable = true;
    }

    /// Notes what an event says of the socket.
    pub fn note(&mut self, event: &Event) {
        let ended = event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || ended;
        self.ended |= ended;
        self.reset |= event.is_error();
    }

    /// Does all that can be done without waiting.
    pub fn advance(&mut self, index: u32, context: &mut Context) -> Action {
        for _ in 0..STEPS_PER_ITERATION {
            let action = match &self.state {
                // Work that has not begun is spared. (The end of sending alone says nothing of the kind.)
                State::Working { .. } if self.reset => Some(Action::Close),
                State::Working { .. } => Some(Action::Wait),
                State::Idle { .. } | State::Arriving { .. } => self.read(index, context),
                State::Writing { .. } => self.write(index, context),
                // Without unread bytes, closing the socket does not reset the connection.
                State::Closing if self.readable => self.linger(context),
                State::Closing => Some(Action::Close),
                State::Lingering { .. } => self.discard(context),
            };
            if let Some(action) = action {
                return action;
            }
        }
        if self.is_working() { Action::Wait } else { Action::Requeue }
    }

    /// Ends what has taken too long. Only to be called when the deadline has passed.
    pub fn expire(&mut self, index: u32, context: &mut Context) -> Action {
        match &self.state {
            State::Arriving { .. } => self.refuse(&Error::RequestTimeout, context),
            State::Working { .. } => self.refuse(&Error::Busy(Reason::Unanswered), context),
            State::Idle { .. } => return self.close_if_idle(index, context),
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.peer, "within WRITE_TIMEOUT");
                return Action::Close;
            }
            State::Closing | State::Lingering { .. } => return Action::Close,
        }
        self.advance(index, context)
    }

    /// Ends it because there is too little of something, unless it has just begun a request. A client that waits for an
    /// answer is told 503.
    pub fn make_way(&mut self, why: Reason, index: u32, context: &mut Context) -> Action {
        match &self.state {
            State::Idle { .. } => self.close_if_idle(index, context),
            State::Arriving { .. } | State::Working { .. } => self.turn_away(why, index, context),
            State::Writing { answer, .. } => {
                let needed = match why {
                    Reason::NoMemory => "before other requests needed the memory",
                    _ => "before other clients needed the connection",
                };
                answer.log_cut_off(self.peer, needed);
                Action::Close
            }
            State::Closing | State::Lingering { .. } => Action::Close,
        }
    }

    /// Tells a client that there is too little of something.
    pub fn turn_away(&mut self, why: Reason, index: u32, context: &mut Context) -> Action {
        self.surplus = true;
        self.refuse(&Error::Busy(why), context);
        self.advance(index, context)
    }

    /// Marks its request as being executed.
    pub fn begin(&mut self) {
        if let State::Working { request, .. } = &mut self.state {
            request.begun = true;
        }
    }

    /// Looks for a request once more, and has the connection closed if there is none.
    fn close_if_idle(&mut self, index: u32, context: &mut Context) -> Action {
        self.readable = true;
        match self.advance(index, context) {
            Action::Wait if matches!(self.state, State::Idle { .. }) => Action::Close,
            action => action,
        }
    }

    /// Hurries a client that is only read from so that it can read why it was refused.
    pub fn hurry(&mut self, now: Instant) {
        if let State::Lingering { until, .. } = &mut self.state {
            *until = (*until).min(now + linger_time(true));
        }
    }

    /// Returns what the answer that is sent now takes from its request.
    fn echo(&mut self) -> Echo {
        match &mut self.state {
            State::Arriving { framing, .. } => framing.take_echo(),
            State::Working { request, .. } => Echo {
                id: Some(request.id.clone()),
                cors: mem::take(&mut request.cors),
                head_only: request.head_only,
            },
            _ => Echo::default(),
        }
    }
}
