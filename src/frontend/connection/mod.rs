//! A connection of a client: its socket, and how far its request or its answer has come.
//!
//! Owns the states of a connection, and the way from bytes on its socket to a request for the workers; `writing` has
//! the way of an answer. Knows nothing of other connections. The event loop and the workers both call in here, one at a
//! time (the lock is the slot's): a worker to answer, the event loop for all else. Nothing here blocks.

mod state;
mod writing;

use super::claim::{Claimed, Slot};
use super::http1::{Arrived, Parsed, framing::Framing, head::Echo};
use super::{Resources, peers::Peer, warnings::Warnings};
use crate::budget::{Budget, Reservation};
use crate::config::Limits;
use crate::error::{BusyReason, Error};
use crate::http::{Persistence, RequestId};
use mio::{Poll, event::Event};
use nix::libc::MSG_NOSIGNAL;
use socket2::Socket;
pub use state::STATE_LABELS;
use state::{Stage, State};
use std::io::{self, ErrorKind, Read};
use std::{mem, net::Shutdown, sync::Arc, time::Instant};
pub use writing::{Delivery, LINGER_TIME};

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Reads and writes of one connection in one iteration of the event loop, at most: then the next connection has its turn.
const MAX_STEPS: usize = 8;

/// Bytes that a request, a buffer or an answer may have without being counted. Most have no more.
const MAX_UNCOUNTED: usize = 1 << 10;

/// Returns how many bytes of a buffer of this size are counted in the memory budget.
fn counted(bytes: usize) -> usize {
    if bytes > MAX_UNCOUNTED { bytes } else { 0 }
}

/// The state of the event loop that connections use, one at a time.
pub struct Context {
    /// The time, read once an iteration.
    pub now: Instant,
    pub limits: Arc<Limits>,
    /// Warnings about clients that are answered 503.
    pub warnings: Arc<Warnings>,
    /// The readiness of sockets.
    pub poll: Poll,
    /// Bytes that were read go here first, so that a connection needs a buffer only for what is incomplete.
    pub scratch: Box<[u8]>,
    pub resources: Resources,
    /// The deadline of a stop, once one has begun: idle connections are closed.
    pub stop_at: Option<Instant>,
}

/// Permit of one open connection. The event loop counts its clones to know how many connections are open.
pub type Admission = Arc<()>;

/// The next step of the event loop with a connection that it has called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Wait for an event or a worker.
    Wait,
    /// Write a ticket for its request, unless one names its slot already, and wait for a worker.
    Ticket,
    /// Bring the memory below its limit, at the cost of this connection if no other one may be closed, and call it again.
    MakeMemory,
    /// Call it again in the next iteration.
    Requeue,
    /// Close it.
    Close,
}

/// A connection of a client, from accept to close.
pub struct Connection {
    stream: Socket,
    /// Peer of the connection.
    peer: Peer,
    /// The client that its bytes count for: the peer, or the one that a trusted proxy names in the head of a request,
    /// until that is answered.
    pub holder: Peer,
    /// The number of the request, by which a late answer is recognized.
    generation: u64,
    /// The socket may hold bytes, or an end, that were not read.
    pub readable: bool,
    /// The client's end of sending was seen; a short read is not the last one then.
    ended: bool,
    /// The client has reset the connection: it cannot take an answer.
    reset: bool,
    /// The socket is registered for writability, too.
    awaits_writable: bool,
    /// The connection's permit; `None` for a connection beyond the capacity, which only gets a refusal.
    pub admission: Option<Admission>,
    /// The memory of its buffer, of its request until a worker claims that, or of its answer.
    pub held: Reservation,
    state: State,
}

impl Connection {
    /// Creates the connection of a socket that was just accepted. The generations of its requests begin with
    /// `generation`.
    pub fn new(
        stream: Socket,
        peer: Peer,
        generation: u64,
        admission: Admission,
        context: &Context,
    ) -> Connection {
        Connection {
            stream,
            peer,
            holder: peer,
            generation,
            readable: false,
            ended: false,
            reset: false,
            awaits_writable: false,
            admission: Some(admission),
            held: context.resources.budget.count(0),
            state: State::Idle { since: context.now, input: Vec::new() },
        }
    }

    /// Hands the complete request over to a worker, once, with the memory that is counted for it.
    pub fn claim(&mut self, index: u32, limits: &Limits, budget: &Budget) -> Option<Claimed> {
        let State::Working { since, stage, id, echo, input, .. } = &mut self.state else { return None };
        let unclaimed = matches!(stage, Stage::Unclaimed(_)).then_some(stage)?;
        let Stage::Unclaimed(request) = mem::replace(unclaimed, Stage::Claimed) else { return None };
        let bytes = counted(request.memory());
        self.held.set(counted(input.len()));
        Some(Claimed {
            slot: Slot { index, generation: self.generation },
            request,
            id: id.clone(),
            cors: echo.cors.clone(),
            deadline: *since + limits.request_timeout,
            held: (bytes > 0).then(|| budget.count(bytes)),
        })
    }

    /// Records what an event says of the socket: readable, ended or reset.
    pub fn note(&mut self, event: &Event) {
        let ended = event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || ended;
        self.ended |= ended;
        self.reset |= event.is_error();
    }

    /// Reads, parses and writes as far as that is possible without waiting.
    pub fn advance(&mut self, index: u32, context: &mut Context) -> Action {
        for _ in 0..MAX_STEPS {
            let action = match &self.state {
                // A command whose client has reset the connection is not executed. (A client that has only ended
                // sending still reads.)
                State::Working { .. } if self.reset => Some(Action::Close),
                State::Working { stage, .. } => Some(stage.action()),
                State::Arriving { awaits_continue: true, .. } => self.ask_for_body(),
                State::Idle { .. } | State::Arriving { .. } => {
                    let held = self.held.bytes();
                    let action = self.read(context);
                    let is_short = self.held.bytes() > held && context.resources.budget.is_exceeded();
                    action.or(is_short.then_some(Action::MakeMemory))
                }
                State::Writing { .. } => self.write(index, context),
                // Reads a socket that may have unread bytes before it is closed: unread bytes would reset the
                // connection.
                State::Closing if self.readable && self.stream.shutdown(Shutdown::Write).is_ok() => {
                    self.state = State::Lingering { until: context.now + LINGER_TIME };
                    None
                }
                State::Closing => Some(Action::Close),
                State::Lingering { .. } => self.discard(context),
            };
            if let Some(action) = action {
                return action;
            }
        }
        Action::Requeue
    }

    /// Ends a request, an answer or the connection: because connections or memory run out, if there is a reason `why`,
    /// else because its deadline has passed. Does nothing if a worker has begun to execute the request, or if the
    /// deadline has moved.
    pub fn end(&mut self, why: Option<BusyReason>, index: u32, context: &mut Context) -> Action {
        let may_end = match why {
            Some(_) => self.expendable().is_some(),
            None => self.deadline(&context.limits).is_some_and(|at| at <= context.now),
        };
        let error = match &self.state {
            _ if !may_end => return Action::Wait,
            State::Idle { .. } => return self.close_if_idle(index, context),
            State::Arriving { .. } => why.map_or(Error::RequestTimeout, Error::Busy),
            State::Working { .. } => Error::Busy(why.unwrap_or(BusyReason::NotAnsweredInTime)),
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.holder, why);
                return Action::Close;
            }
            State::Closing | State::Lingering { .. } => return Action::Close,
        };
        self.admission.take_if(|_| why.is_some());
        self.refuse(&error, context);
        self.advance(index, context)
    }

    /// Answers 503, because connections or memory run out or the server stops, and closes the connection.
    pub fn turn_away(&mut self, why: BusyReason, index: u32, context: &mut Context) -> Action {
        self.admission = None;
        self.refuse(&Error::Busy(why), context);
        self.advance(index, context)
    }

    /// Marks the request of the connection as being executed.
    pub fn begin(&mut self) {
        if let State::Working { stage, .. } = &mut self.state {
            *stage = Stage::Begun;
        }
    }

    /// Looks for a request once more, and closes the connection if there is none.
    fn close_if_idle(&mut self, index: u32, context: &mut Context) -> Action {
        self.readable = true;
        match self.advance(index, context) {
            Action::Wait if matches!(self.state, State::Idle { .. }) => Action::Close,
            action => action,
        }
    }

    /// Parses the bytes that were read behind the last request, or else reads from the socket.
    fn read(&mut self, context: &mut Context) -> Option<Action> {
        if matches!(&self.state, State::Idle { input, .. } if !input.is_empty()) {
            self.parse(&[], context);
            return None;
        }
        if !self.readable {
            let is_over = context.stop_at.is_some() && matches!(self.state, State::Idle { .. });
            return Some(if is_over { Action::Close } else { Action::Wait });
        }
        let mut scratch = mem::take(&mut context.scratch);
        let action = match self.receive(&mut scratch) {
            Ok(count @ 1..) => {
                self.parse(&scratch[..count], context);
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(Action::Close),
        };
        context.scratch = scratch;
        action
    }

    /// Reads once. With edge triggering the socket has to be read until it is known to be empty; a short read says so
    /// as well as a failing one, unless the end has already been announced.
    fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        loop {
            let result = self.stream.read(scratch);
            match &result {
                Ok(count) => self.readable = *count == scratch.len() || self.ended,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.readable = false,
            }
            return result;
        }
    }

    /// Parses the bytes that were read before and the `fresh` ones behind them, and enters the state that follows. A head or
    /// a body that goes on arriving keeps its deadline.
    fn parse(&mut self, fresh: &[u8], context: &mut Context) {
        let (now, limits) = (context.now, &context.limits);
        let (mut framing, mut input, mut began) = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { since, framing, input, .. } => (framing, input, Some(since)),
            State::Idle { input, .. } => (Framing::default(), input, None),
            other => return self.state = other,
        };
        let (was_in_body, mut used) = (framing.is_in_body(), 0);
        // A request that arrives in one piece needs no buffer.
        let bytes = if input.is_empty() {
            fresh
        } else {
            input.extend_from_slice(fresh);
            &input
        };
        let step = framing.advance(bytes, &mut used, limits);
        let input = bytes[used..].to_vec();
        if let Ok(Parsed::Complete(arrived)) = step {
            return self.handle_arrived(arrived, framing.echo, input, context);
        }
        if framing.is_in_body() != was_in_body {
            began = None;
            self.holder = self.peer.speaking_for(framing.client());
        }
        // All of a body is counted before it arrives.
        self.held.set(counted(input.len()) + framing.max_bytes(limits).map_or(0, counted));
        let awaits_continue = matches!(step, Ok(Parsed::Continue));
        self.state = State::Arriving { since: began.unwrap_or(now), framing, input, awaits_continue };
        if let Err(error) = step {
            self.refuse(&error, context);
        }
    }

    /// Sends 100 (Continue). If the socket does not take so few bytes, the client has not read earlier answers; it gets no
    /// more.
    fn ask_for_body(&mut self) -> Option<Action> {
        if let State::Arriving { awaits_continue, .. } = &mut self.state {
            *awaits_continue = false;
        }
        let sent = self.stream.send_with_flags(CONTINUE, MSG_NOSIGNAL).ok();
        (sent != Some(CONTINUE.len())).then_some(Action::Close)
    }

    /// Answers a complete request, if it has an answer already, or keeps it until a worker claims it.
    fn handle_arrived(
        &mut self,
        arrived: Arrived,
        mut echo: Echo,
        mut input: Vec<u8>,
        context: &mut Context,
    ) {
        let Arrived { mut request, mut persistence } = arrived;
        let (more, budget) = (counted(input.len()), &context.resources.budget);
        if more > 0 && budget.held() + more > budget.limit() {
            // Drops the requests behind this one if they exceed the memory budget. The client learns by the end
            // of the connection that they got no answer.
            persistence = Persistence::Close;
            input = Vec::new();
        }
        self.held.set(counted(input.len()) + counted(request.memory()));
        self.holder = self.peer.speaking_for(request.peer);
        request.peer = self.holder.address;
        let id = echo.id.take().unwrap_or_else(RequestId::new);
        let answer = (context.resources.answer_at_once)(&request, &id);
        let (since, stage) = (context.now, Stage::Unclaimed(request));
        self.state = State::Working { since, stage, persistence, id, echo, input };
        if let Some(answer) = answer {
            // The returned value is ignored, because the caller advances this connection in any case.
            self.send_answer(answer, None, context.stop_at.is_some());
        }
    }
}
