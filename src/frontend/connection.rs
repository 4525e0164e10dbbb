//! One client: its socket, and how far its request or its answer has come.
//!
//! Owns the states of a connection; `reading` and `writing` have what is done in them. Knows nothing of other
//! connections. The event loop and the workers both call in here, one at a time (the lock is the slot's): a worker to
//! answer, the event loop for all else. Nothing here blocks.

mod reading;
mod writing;

use super::{
    Resources,
    http1::{Traits, framing::Framing, head::Echo},
    listener::Stream,
    peers::{Expendable, Peer},
    shared::Shared,
    to_tiny_http::ToTinyHttp,
};
use crate::{
    budget::Reservation,
    config::Limits,
    error::{Error, Reason},
    http::{Cors, RequestId, RequestIds},
};
use mio::{Registry, event::Event};
use reading::Input;
use std::{
    mem,
    net::IpAddr,
    time::{Duration, Instant},
};
use writing::Unsent;
pub use writing::{interest, linger_time};

/// Reads and writes that a connection gets in one iteration of the event loop, before others get theirs.
const STEPS_PER_ITERATION: usize = 8;

/// What the event loop lends a connection for one iteration.
pub struct Context<'a> {
    /// The time, read once an iteration.
    pub now: Instant,
    /// Limits, and the number of requests in flight.
    pub shared: &'a Shared,
    /// Where sockets are registered.
    pub registry: &'a Registry,
    /// What is read goes here first, so that a connection needs a buffer only for what is incomplete.
    pub scratch: &'a mut [u8],
    /// Complete requests for tiny_http, written once an iteration.
    pub to_tiny_http: &'a mut ToTinyHttp,
    /// Ids for requests whose clients gave them none.
    pub ids: &'a mut RequestIds,
    /// What the frontend shares with the rest of the process.
    pub resources: &'a Resources,
    /// No request is waited for that has not begun to arrive.
    pub stopping: bool,
    /// A body for which there is no memory is refused, and does not wait until the event loop has made some.
    pub last_try: bool,
}

/// What the event loop does with a connection after having called it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Wait for an event or a worker.
    Wait,
    /// Call it again in the next iteration.
    Requeue,
    /// Close it.
    Close,
}

/// A client's connection.
pub struct Connection {
    stream: Stream,
    peer: Peer,
    /// Counts requests, so that a late answer is recognized as late.
    generation: u32,
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
    state: State,
}

/// What a connection is doing. `since` is when it began to: deadlines count from there, and no byte moves them.
enum State {
    /// Between requests; the beginning of the next one may have been read with the last.
    Idle { since: Instant, input: Input },
    /// A head is arriving, or a body, for all of which memory is `held`, or is about to be.
    Arriving { since: Instant, framing: Framing, input: Input, held: Option<Reservation> },
    /// The request is with the workers; `input` is what was read beyond it.
    Working { since: Instant, request: InWork, input: Input },
    /// The socket did not take all of an answer.
    Writing { since: Instant, answer: Unsent },
    /// The last answer is sent.
    Closing,
    /// Shut down for writing; up to `left` bytes more are read and thrown away.
    Lingering { until: Instant, left: usize },
}

/// What connections are doing, as figures are labelled by it.
pub const DOING: [&str; 5] = ["idle", "reading", "working", "writing", "closing"];
/// The place in [`DOING`] of those whose request the workers have.
pub const WORKING: usize = 2;

/// What has to be known of a request to answer it.
struct InWork {
    traits: Traits,
    id: RequestId,
    cors: Cors,
    head_only: bool,
    /// Whether a worker executes it, or has begun to.
    begun: bool,
}

impl InWork {
    /// The address of its client: the connection's, or the one that a trusted proxy names.
    fn client(&self, peer: Peer) -> Option<IpAddr> {
        self.traits.client.filter(|_| peer.trusted).or(peer.address)
    }
}

impl Connection {
    /// A client that has just connected.
    pub fn new(stream: Stream, peer: Peer, generation: u32, now: Instant) -> Connection {
        Connection {
            stream,
            peer,
            generation,
            readable: false,
            ended: false,
            reset: false,
            awaits_writable: false,
            surplus: false,
            state: State::Idle { since: now, input: Input::default() },
        }
    }

    /// The other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Of the request that is being received, in work, or answered last.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// The client whose request is in work, behind a trusted proxy too, the request's id, and when it is answered 503.
    pub fn in_work(&self, limits: &Limits) -> Option<(Option<IpAddr>, RequestId, Instant)> {
        match &self.state {
            State::Working { since, request, .. } => {
                Some((request.client(self.peer), request.id.clone(), *since + limits.request_timeout))
            }
            _ => None,
        }
    }

    /// What it is doing, as its place in [`DOING`].
    pub fn doing(&self) -> usize {
        match &self.state {
            State::Idle { .. } => 0,
            State::Arriving { .. } => 1,
            State::Working { .. } => WORKING,
            State::Writing { .. } => 3,
            State::Closing | State::Lingering { .. } => 4,
        }
    }

    /// Whether the workers have a request of it.
    pub fn is_working(&self) -> bool {
        matches!(self.state, State::Working { .. })
    }

    /// Whether that very request still waits for its answer.
    pub fn awaits(&self, generation: u32) -> bool {
        self.generation == generation && self.is_working()
    }

    /// Whether it was let in only to be told that there is no capacity.
    pub fn is_surplus(&self) -> bool {
        self.surplus
    }

    /// Whether it may be closed to free its slot, and since when it has been like that.
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

    /// When [`Connection::expire`] is due.
    pub fn deadline(&self, limits: &Limits) -> Option<Instant> {
        match &self.state {
            State::Idle { since, .. } => Some(*since + limits.idle_timeout),
            State::Arriving { since, framing, .. } if framing.is_in_body() => {
                Some(*since + limits.body_timeout)
            }
            State::Arriving { since, .. } => Some(*since + limits.head_timeout),
            State::Working { since, .. } => Some(*since + limits.request_timeout),
            State::Writing { since, .. } => Some(*since + limits.write_timeout),
            State::Lingering { until, .. } => Some(*until),
            // The event loop was told to close it.
            State::Closing => None,
        }
    }

    /// The socket may have something to read.
    pub fn note_readable(&mut self) {
        self.readable = true;
    }

    /// What an event says of the socket.
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
        match self.is_working() {
            true => Action::Wait,
            false => Action::Requeue,
        }
    }

    /// Ends what has taken too long. Only to be called when the deadline has passed.
    pub fn expire(&mut self, index: u32, context: &mut Context) -> Action {
        match &self.state {
            State::Arriving { .. } => self.refuse(&Error::RequestTimeout, context),
            State::Working { .. } => {
                self.refuse(&Error::Busy(Reason::Unanswered), context);
            }
            State::Idle { .. } => return self.close_if_idle(index, context),
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.peer, "within WRITE_TIMEOUT");
                return Action::Close;
            }
            State::Closing | State::Lingering { .. } => return Action::Close,
        }
        self.advance(index, context)
    }

    /// Ends it for the sake of another client, unless it has just begun a request. Only to be called when it is
    /// expendable. A client that waits for an answer is told 503.
    pub fn make_way(&mut self, index: u32, context: &mut Context) -> Action {
        match &self.state {
            State::Idle { .. } => return self.close_if_idle(index, context),
            State::Arriving { .. } | State::Working { .. } => {
                self.surplus = true;
                self.refuse(&Error::Busy(Reason::TooManyConnections), context);
            }
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.peer, "before other clients needed the connection");
                return Action::Close;
            }
            _ => return Action::Close,
        }
        self.advance(index, context)
    }

    /// The bytes that are reserved for a body which is not complete. A trusted proxy's carries many clients, and has
    /// none.
    pub fn incomplete(&self) -> Option<usize> {
        match &self.state {
            State::Arriving { held: Some(held), .. } if !self.peer.trusted => Some(held.bytes()),
            _ => None,
        }
    }

    /// The bytes of memory that a body needs, which the event loop is to make.
    pub fn awaits_memory(&self, limits: &Limits) -> Option<usize> {
        match &self.state {
            State::Arriving { held: None, framing, .. } => framing.most(limits),
            _ => None,
        }
    }

    /// Takes the memory that was made for its body; without it, the request is refused.
    pub fn take_memory(&mut self, index: u32, context: &mut Context) -> Action {
        context.last_try = true;
        self.take_in(&[], index, context);
        self.advance(index, context)
    }

    /// Refuses an incomplete body for the sake of the memory that is reserved for it.
    pub fn give_up_body(&mut self, index: u32, context: &mut Context) -> Action {
        if self.incomplete().is_some() {
            self.refuse(&Error::Busy(Reason::NoMemory), context);
        }
        self.advance(index, context)
    }

    /// A worker begins to execute its request.
    pub fn begin(&mut self) {
        if let State::Working { request, .. } = &mut self.state {
            request.begun = true;
        }
    }

    /// What it holds of an answer that has not moved for as long as given, weighed by the time.
    pub fn stalled(&self, now: Instant, at_least: Duration) -> Option<(usize, Duration)> {
        match &self.state {
            State::Writing { answer, .. } => {
                let time = now.saturating_duration_since(answer.moved);
                (time >= at_least).then(|| (answer.memory(), time))
            }
            _ => None,
        }
    }

    /// Ends it for the sake of the memory that its answer holds. Only to be called when that is stalled.
    pub fn give_up_answer(&mut self) -> Action {
        if let State::Writing { answer, .. } = &self.state {
            answer.log_cut_off(self.peer, "before other requests needed the memory");
        }
        Action::Close
    }

    /// Tells a client that there is no capacity.
    pub fn turn_away(&mut self, index: u32, context: &mut Context) -> Action {
        self.surplus = true;
        self.refuse(&Error::Busy(Reason::TooManyConnections), context);
        self.advance(index, context)
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
}

impl State {
    /// What the answer that is sent now takes from its request, of which the workers have the id.
    pub fn echo(&mut self) -> Echo {
        match self {
            State::Arriving { framing, .. } => framing.take_echo(),
            State::Working { request, .. } => {
                let (id, cors) = (Some(request.id.clone()), mem::take(&mut request.cors));
                Echo { id, cors, head_only: request.head_only }
            }
            _ => Echo::default(),
        }
    }
}
