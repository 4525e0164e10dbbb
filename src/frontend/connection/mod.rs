//! A connection of a client: its socket, and how far its request or its answer has come.
//!
//! Owns the states of a connection, and turns bytes from its socket into a request for the workers; `writing` sends
//! the answer. Knows nothing of other connections. A worker calls in here to answer, the event loop for all else, each
//! with the lock of the slot held. Nothing here blocks.

mod state;
mod writing;

use super::claim::{ClaimedRequest, Slot};
use super::http1::{ArrivedRequest, Progress, framing::Framing, head::AnswerInfo};
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

/// The most steps (reads, writes, changes of state) of one connection in one iteration of the event loop, before the
/// next connection has its turn.
const MAX_STEPS_PER_ITERATION: usize = 8;

/// The most bytes that a request, a buffer or an answer may have without being counted in the memory budget. Most have
/// fewer.
const MAX_UNCOUNTED_BYTES: usize = 1 << 10;

/// Returns how many bytes of a buffer of this size are counted in the memory budget.
fn counted_bytes(bytes: usize) -> usize {
    if bytes > MAX_UNCOUNTED_BYTES { bytes } else { 0 }
}

/// The parts of the event loop that a connection uses while it is called.
pub struct LoopParts {
    /// The time at which this iteration of the event loop began.
    pub now: Instant,
    pub limits: Arc<Limits>,
    /// Warnings about clients that are answered 503.
    pub warnings: Arc<Warnings>,
    /// The kernel's queue of readiness events.
    pub poll: Poll,
    /// The buffer that every connection reads into. A connection has a buffer of its own only while its request is
    /// incomplete.
    pub scratch: Box<[u8]>,
    pub resources: Resources,
    /// The deadline of a stop; `None` until a stop begins. During a stop, idle connections are closed.
    pub stop_at: Option<Instant>,
}

/// The permit of one open connection: the event loop counts the clones of one `Arc` to know how many connections are
/// open.
pub type Admission = Arc<()>;

/// The action that the event loop carries out for a connection after it has called the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Wait until the socket has an event or a worker answers.
    Wait,
    /// Tell a worker of the complete request by a ticket, a line to tiny_http that names the slot of the connection. Do
    /// nothing if a ticket on its way names the slot already.
    Ticket,
    /// Free memory, by closing this connection if no other one may be closed, and call the connection again.
    FreeMemory,
    /// Call the connection again in the next iteration.
    Requeue,
    /// Close the connection.
    Close,
}

/// A connection of a client, from accept to close.
pub struct Connection {
    stream: Socket,
    peer: Peer,
    /// The client that the memory of the connection counts for: the peer, or the client that a trusted proxy names in
    /// a head, until that request is answered.
    pub client: Peer,
    /// The number of the request among the requests of this slot. By this number an answer that comes too late is
    /// recognized.
    generation: u64,
    /// True if the socket may hold bytes, or an end of sending, that were not read.
    pub readable: bool,
    /// True if the client has ended sending. The socket is then read until a read finds its end, even after a short
    /// read.
    sending_ended: bool,
    /// True if the client has reset the connection, so that it takes no answer.
    is_reset: bool,
    /// True if the socket is registered for writability, too.
    awaits_writable: bool,
    /// The permit of the connection; `None` for a surplus connection, which only gets a 503.
    pub admission: Option<Admission>,
    /// The reservation of memory: of the buffer and the request until a worker claims the request, then of the answer.
    pub memory: Reservation,
    state: State,
}

impl Connection {
    /// Creates the connection of a socket that was just accepted. Its requests are numbered from `generation` on.
    pub fn new(
        stream: Socket,
        peer: Peer,
        generation: u64,
        admission: Admission,
        context: &LoopParts,
    ) -> Connection {
        Connection {
            stream,
            peer,
            client: peer,
            generation,
            readable: false,
            sending_ended: false,
            is_reset: false,
            awaits_writable: false,
            admission: Some(admission),
            memory: context.resources.budget.count(0),
            state: State::Idle { since: context.now, input: Vec::new() },
        }
    }

    /// Hands the complete request over to a worker, with the memory that is counted for it. `None` if there is no
    /// request, or a worker has claimed it.
    pub fn claim(&mut self, index: u32, limits: &Limits, budget: &Budget) -> Option<ClaimedRequest> {
        let State::Working { since, stage, id, for_answer, input, .. } = &mut self.state else { return None };
        let unclaimed = matches!(stage, Stage::Unclaimed(_)).then_some(stage)?;
        let Stage::Unclaimed(request) = mem::replace(unclaimed, Stage::Claimed) else { return None };
        let bytes = counted_bytes(request.memory());
        self.memory.resize(counted_bytes(input.len()));
        Some(ClaimedRequest {
            slot: Slot { index, generation: self.generation },
            request,
            id: id.clone(),
            cors: for_answer.cors.clone(),
            deadline: *since + limits.request_timeout,
            memory: (bytes > 0).then(|| budget.count(bytes)),
        })
    }

    /// Records that the socket has become readable, has ended or was reset.
    pub fn note_event(&mut self, event: &Event) {
        let ended = event.is_read_closed() || event.is_error();
        self.readable |= event.is_readable() || ended;
        self.sending_ended |= ended;
        self.is_reset |= event.is_error();
    }

    /// Reads, parses and writes as far as that is possible without waiting.
    pub fn advance(&mut self, index: u32, context: &mut LoopParts) -> Action {
        for _ in 0..MAX_STEPS_PER_ITERATION {
            let action = match &self.state {
                // Closes the connection, so that the command of a client that has reset it is not executed. (A client
                // that has only ended sending still reads its answer.)
                State::Working { .. } if self.is_reset => Some(Action::Close),
                State::Working { stage: Stage::Unclaimed(_), .. } => Some(Action::Ticket),
                State::Working { .. } => Some(Action::Wait),
                State::Arriving { awaits_continue: true, .. } => self.ask_for_body(),
                State::Idle { .. } | State::Arriving { .. } => {
                    let held = self.memory.bytes();
                    let action = self.read(context);
                    let budget = &context.resources.budget;
                    let is_short = self.memory.bytes() > held && budget.held_bytes() > budget.limit;
                    action.or(is_short.then_some(Action::FreeMemory))
                }
                State::Writing { .. } => self.write_answer(index, context),
                // Goes on reading before the socket is closed: closing it with unread bytes would reset the connection
                // before the client has read the answer.
                State::Closing if self.readable && self.stream.shutdown(Shutdown::Write).is_ok() => {
                    self.state = State::Lingering { until: context.now + LINGER_TIME };
                    None
                }
                State::Closing => Some(Action::Close),
                State::Lingering { .. } => self.discard_input(context),
            };
            if let Some(action) = action {
                return action;
            }
        }
        Action::Requeue
    }

    /// Ends a request, an answer or the connection: if there is a reason `why`, because connections or memory run out,
    /// else because its deadline has passed. Does nothing if a worker has begun to execute the request, or if the
    /// deadline has moved.
    pub fn end(&mut self, why: Option<BusyReason>, index: u32, context: &mut LoopParts) -> Action {
        let may_end = match why {
            Some(_) => self.close_cause().is_some(),
            None => self.deadline(&context.limits).is_some_and(|at| at <= context.now),
        };
        let error = match &self.state {
            _ if !may_end => return Action::Wait,
            State::Idle { .. } => return self.close_if_idle(index, context),
            State::Arriving { .. } => why.map_or(Error::RequestTimeout, Error::Busy),
            State::Working { .. } => Error::Busy(why.unwrap_or(BusyReason::NotAnsweredInTime)),
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.client, why);
                return Action::Close;
            }
            State::Closing | State::Lingering { .. } => return Action::Close,
        };
        self.admission.take_if(|_| why.is_some());
        self.refuse(&error, context);
        self.advance(index, context)
    }

    /// Answers 503, because connections or memory run out or the server stops, and then closes the connection.
    pub fn turn_away(&mut self, why: BusyReason, index: u32, context: &mut LoopParts) -> Action {
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

    /// Closes the connection unless a request has arrived by now.
    fn close_if_idle(&mut self, index: u32, context: &mut LoopParts) -> Action {
        self.readable = true;
        match self.advance(index, context) {
            Action::Wait if matches!(self.state, State::Idle { .. }) => Action::Close,
            action => action,
        }
    }

    /// Parses bytes that were read together with the last request. If there are none, reads from the socket.
    fn read(&mut self, context: &mut LoopParts) -> Option<Action> {
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

    /// Reads once, and records whether the socket may have more. The event loop is told only of new bytes (edge
    /// triggering), so a socket is read until it is empty: until a read fails, or is short before the client has ended
    /// sending.
    fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        loop {
            let result = self.stream.read(scratch);
            match &result {
                Ok(count) => self.readable = *count == scratch.len() || self.sending_ended,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.readable = false,
            }
            return result;
        }
    }

    /// Parses the bytes that were kept, with the `fresh` bytes behind them, and enters the state that follows. A head
    /// or a body that goes on arriving keeps its deadline.
    fn parse(&mut self, fresh: &[u8], context: &mut LoopParts) {
        let (now, limits) = (context.now, &context.limits);
        let (mut framing, mut input, mut began) = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { since, framing, input, .. } => (framing, input, Some(since)),
            State::Idle { input, .. } => (Framing::default(), input, None),
            other => return self.state = other,
        };
        let (was_in_body, mut used) = (framing.is_in_body(), 0);
        // Copies no bytes of a request that arrives in one piece.
        let bytes = if input.is_empty() {
            fresh
        } else {
            input.extend_from_slice(fresh);
            &input
        };
        let step = framing.advance(bytes, &mut used, limits);
        let input = bytes[used..].to_vec();
        if let Ok(Progress::Complete(arrived)) = step {
            return self.handle_arrived(arrived, framing.for_answer, input, context);
        }
        if framing.is_in_body() != was_in_body {
            began = None;
            self.client = self.peer.client_of_request(framing.client());
        }
        // Counts the whole body before its bytes arrive. Otherwise many bodies could begin to arrive that together need
        // more memory than there is.
        self.memory.resize(counted_bytes(input.len()) + framing.max_bytes(limits).map_or(0, counted_bytes));
        let awaits_continue = matches!(step, Ok(Progress::Continue));
        self.state = State::Arriving { since: began.unwrap_or(now), framing, input, awaits_continue };
        if let Err(error) = step {
            self.refuse(&error, context);
        }
    }

    /// Sends 100 (Continue). Closes the connection if the socket does not take so few bytes, because the client then
    /// has not read earlier answers.
    fn ask_for_body(&mut self) -> Option<Action> {
        if let State::Arriving { awaits_continue, .. } = &mut self.state {
            *awaits_continue = false;
        }
        let sent = self.stream.send_with_flags(CONTINUE, MSG_NOSIGNAL).ok();
        (sent != Some(CONTINUE.len())).then_some(Action::Close)
    }

    /// Answers a complete request if it needs no worker, else keeps it until a worker claims it.
    fn handle_arrived(
        &mut self,
        arrived: ArrivedRequest,
        mut for_answer: AnswerInfo,
        mut input: Vec<u8>,
        context: &mut LoopParts,
    ) {
        let ArrivedRequest { mut request, mut persistence } = arrived;
        let (more, budget) = (counted_bytes(input.len()), &context.resources.budget);
        if more > 0 && budget.held_bytes() + more > budget.limit {
            // Drops the bytes behind this request if they exceed the memory budget. The end of the connection tells
            // the client that its further requests got no answer.
            persistence = Persistence::Close;
            input = Vec::new();
        }
        self.memory.resize(counted_bytes(input.len()) + counted_bytes(request.memory()));
        self.client = self.peer.client_of_request(request.peer);
        request.peer = self.client.address;
        let id = for_answer.id.take().unwrap_or_else(RequestId::new);
        let answer = (context.resources.answer_at_once)(&request, &id);
        let (since, stage) = (context.now, Stage::Unclaimed(request));
        self.state = State::Working { since, stage, persistence, id, for_answer, input };
        if let Some(answer) = answer {
            // Ignores the returned values: the caller advances this connection in any case.
            self.send_answer(answer, None, context.stop_at.is_some());
        }
    }
}
