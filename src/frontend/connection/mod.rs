//! A connection of a client: its socket, and how far its request or its answer has come.
//!
//! Owns the states of a connection, and turns bytes from its socket into a request for the workers; `writing` sends the
//! answer. Knows nothing of other connections. The functions that claim and answer a request are for workers, all
//! others for the event loop. The caller holds the lock of the connection's slot. No function here blocks.

mod state;
mod writing;

use super::claimed_request::{ClaimedRequest, RequestHandle};
use super::http1::{FramedRequest, Progress, framing::Framing, head::AnswerInfo};
use super::{SharedResources, busy_warnings::BusyWarnings, peers::Peer};
use crate::budget::{MemoryBudget, Reservation};
use crate::config::Limits;
use crate::error::{BusyReason, Error};
use crate::http::{Persistence, RequestId};
use mio::{Poll, event::Event};
use nix::libc::MSG_NOSIGNAL;
use socket2::Socket;
pub use state::STATE_LABELS;
use state::{State, WorkStage};
use std::io::{self, ErrorKind, Read};
use std::{mem, net::Shutdown, sync::Arc, time::Instant};
pub use writing::{Delivery, LINGER_TIME};

/// The answer 100 (Continue), by which the server asks the client for the body.
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The most steps (a read, a write or a change of state) that a connection takes in one iteration of the event loop.
/// Then the next connection has its turn.
const MAX_STEPS_PER_ITERATION: usize = 8;

/// The most bytes of a request, a buffer or an answer that the memory budget does not count. Most are smaller, so that
/// only the large ones use up the budget.
const MAX_UNBUDGETED_ITEM_BYTES: usize = 1 << 10;

/// Returns how many bytes the memory budget counts for a request, a buffer or an answer of this size.
fn budgeted_bytes(bytes: usize) -> usize {
    if bytes > MAX_UNBUDGETED_ITEM_BYTES { bytes } else { 0 }
}

/// The parts of the event loop that its connections use, such as the time, the limits and the read buffer.
pub struct LoopContext {
    /// The time at which this iteration of the event loop began.
    pub now: Instant,
    pub limits: Arc<Limits>,
    /// Logs that clients are answered 503: at most one line a second for each reason.
    pub warnings: Arc<BusyWarnings>,
    /// The kernel's queue of readiness events (epoll), for which sockets are registered.
    pub poll: Poll,
    /// The buffer that all connections read into, one after another. A connection copies only bytes that it cannot use
    /// yet to a buffer of its own.
    pub read_buffer: Box<[u8]>,
    pub resources: SharedResources,
    /// The time at which a stop of the server ends, even if requests are unanswered; `None` until a stop begins. During
    /// a stop, idle connections are closed.
    pub stop_deadline: Option<Instant>,
}

/// A token by which an open connection is counted. Each holds a clone of one `ConnectionPermit`, whose reference count
/// tells the event loop how many connections are open.
pub type ConnectionPermit = Arc<()>;

/// The action that a connection asks of the event loop, when the event loop has called the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoopAction {
    /// Do nothing until the socket has an event or a worker answers.
    Wait,
    /// Send a ticket: a message that wakes a worker and names slots with a complete request. Do nothing if a ticket
    /// that names this connection's slot is on its way already.
    WakeWorker,
    /// Close other connections, because the memory budget is exceeded; answer 503 on this connection if no other one
    /// may be closed. Then call the connection again.
    FreeMemory,
    /// Call the connection again in the next iteration, because it has used up its steps in this one.
    Requeue,
    /// Close the connection, and free its slot.
    Close,
}

/// A connection of a client, from accept to close.
pub struct Connection {
    socket: Socket,
    peer: Peer,
    /// The client that this connection and its memory are counted for: the peer, or, while a request is not answered,
    /// the client that a trusted proxy names in the head of the request.
    pub counted_client: Peer,
    /// The number of the current request among all requests of this slot. An answer with another number comes too late,
    /// and is dropped.
    request_number: u64,
    /// True if the socket may hold bytes that were not read, or the end of what the client sends.
    pub may_have_input: bool,
    /// True if the client has ended sending. No further event comes then, so the socket is read until a read finds the
    /// end, even after a read that does not fill the buffer.
    client_ended_sending: bool,
    /// True if the client has reset the connection: it takes no answer any more.
    is_reset: bool,
    /// True if the kernel also reports when the socket can be written, not only when it can be read.
    awaits_writable: bool,
    /// The permit by which the connection is counted as open. `None` for a surplus connection: it gets a 503, and does
    /// not count towards `max_connections`.
    pub permit: Option<ConnectionPermit>,
    /// The reservation in the memory budget: for bytes that are not parsed yet, for the request until a worker claims
    /// it, and then for an answer that the socket has not taken completely.
    pub memory: Reservation,
    state: State,
}

impl Connection {
    /// Creates the connection of a socket that was just accepted. `request_number` is the number of its first request.
    pub fn new(
        socket: Socket,
        peer: Peer,
        request_number: u64,
        permit: ConnectionPermit,
        context: &LoopContext,
    ) -> Connection {
        Connection {
            socket,
            peer,
            counted_client: peer,
            request_number,
            may_have_input: false,
            client_ended_sending: false,
            is_reset: false,
            awaits_writable: false,
            permit: Some(permit),
            memory: context.resources.budget.reserve_unchecked(0),
            state: State::Idle { since: context.now, input: Vec::new() },
        }
    }

    /// Hands the complete request over to a worker, with the memory that is counted for it. Returns `None` if there is
    /// no complete request, or if a worker has claimed it already.
    pub fn claim(&mut self, slot: u32, limits: &Limits, budget: &MemoryBudget) -> Option<ClaimedRequest> {
        let State::Working { since, stage, id, for_answer, input, .. } = &mut self.state else { return None };
        let unclaimed = matches!(stage, WorkStage::Unclaimed(_)).then_some(stage)?;
        let WorkStage::Unclaimed(request) = mem::replace(unclaimed, WorkStage::Claimed) else { return None };
        let bytes = budgeted_bytes(request.memory_bytes());
        self.memory.resize(budgeted_bytes(input.len()));
        Some(ClaimedRequest {
            handle: RequestHandle { slot, request_number: self.request_number },
            request,
            id: id.clone(),
            cors: for_answer.cors.clone(),
            deadline: *since + limits.request_timeout,
            memory: (bytes > 0).then(|| budget.reserve_unchecked(bytes)),
        })
    }

    /// Records that the socket has become readable, that the client has ended sending, or that it has reset the
    /// connection.
    pub fn record_event(&mut self, event: &Event) {
        let ended = event.is_read_closed() || event.is_error();
        self.may_have_input |= event.is_readable() || ended;
        self.client_ended_sending |= ended;
        self.is_reset |= event.is_error();
    }

    /// Reads, parses and sends as far as the socket allows without waiting. Returns what the event loop is to do next.
    pub fn advance(&mut self, slot: u32, context: &mut LoopContext) -> LoopAction {
        for _ in 0..MAX_STEPS_PER_ITERATION {
            let action = match &self.state {
                // Closes a connection that the client has reset, so that the client's command is not executed. (A
                // client that has only ended sending still reads its answer.)
                State::Working { .. } if self.is_reset => Some(LoopAction::Close),
                State::Working { stage: WorkStage::Unclaimed(_), .. } => Some(LoopAction::WakeWorker),
                State::Working { .. } => Some(LoopAction::Wait),
                State::Arriving { awaits_continue: true, .. } => self.send_continue(),
                State::Idle { .. } | State::Arriving { .. } => {
                    let held = self.memory.reserved_bytes();
                    let action = self.read_request(context);
                    let budget = &context.resources.budget;
                    let is_short = self.memory.reserved_bytes() > held && budget.held_bytes() > budget.limit;
                    action.or(is_short.then_some(LoopAction::FreeMemory))
                }
                State::Writing { .. } => self.send_remaining(slot, context),
                // Ends sending and goes on reading: closing a socket with unread bytes would reset the connection
                // before the client has read the answer.
                State::Closing if self.may_have_input && self.socket.shutdown(Shutdown::Write).is_ok() => {
                    self.state = State::Lingering { until: context.now + LINGER_TIME };
                    None
                }
                State::Closing => Some(LoopAction::Close),
                State::Lingering { .. } => self.discard_input(context),
            };
            if let Some(action) = action {
                return action;
            }
        }
        LoopAction::Requeue
    }

    /// Ends a request, an answer or an idle connection early. `why` says whether connections or memory run out; `None`
    /// means that the deadline has passed. Does nothing if the connection may not be closed for another one any more,
    /// or if its deadline has moved into the future.
    pub fn end_early(&mut self, why: Option<BusyReason>, slot: u32, context: &mut LoopContext) -> LoopAction {
        let may_end = match why {
            Some(_) => self.close_rank().is_some(),
            None => self.deadline(&context.limits).is_some_and(|at| at <= context.now),
        };
        let error = match &self.state {
            _ if !may_end => return LoopAction::Wait,
            State::Idle { .. } => return self.close_if_idle(slot, context),
            State::Arriving { .. } => why.map_or(Error::RequestTimeout, Error::Busy),
            State::Working { .. } => Error::Busy(why.unwrap_or(BusyReason::NotAnsweredInTime)),
            State::Writing { answer, .. } => {
                answer.log_cut_off(self.counted_client, why);
                return LoopAction::Close;
            }
            State::Closing | State::Lingering { .. } => return LoopAction::Close,
        };
        self.permit.take_if(|_| why.is_some());
        self.refuse(&error, context);
        self.advance(slot, context)
    }

    /// Answers 503 for the reason `why`, and then closes the connection.
    pub fn refuse_as_busy(&mut self, why: BusyReason, slot: u32, context: &mut LoopContext) -> LoopAction {
        self.permit = None;
        self.refuse(&Error::Busy(why), context);
        self.advance(slot, context)
    }

    /// Records that a worker executes the request, so that the connection is not closed for another one.
    pub fn mark_executing(&mut self) {
        if let State::Working { stage, .. } = &mut self.state {
            *stage = WorkStage::Executing;
        }
    }

    /// Closes an idle connection, but reads from it once more before: a request that has just arrived is served.
    fn close_if_idle(&mut self, slot: u32, context: &mut LoopContext) -> LoopAction {
        self.may_have_input = true;
        match self.advance(slot, context) {
            LoopAction::Wait if matches!(self.state, State::Idle { .. }) => LoopAction::Close,
            action => action,
        }
    }

    /// Parses the bytes that were read together with the previous request. If there are none, reads from the socket and
    /// parses what arrives. Returns `None` if the connection can take its next step now.
    fn read_request(&mut self, context: &mut LoopContext) -> Option<LoopAction> {
        if matches!(&self.state, State::Idle { input, .. } if !input.is_empty()) {
            self.parse_input(&[], context);
            return None;
        }
        if !self.may_have_input {
            let is_over = context.stop_deadline.is_some() && matches!(self.state, State::Idle { .. });
            return Some(if is_over { LoopAction::Close } else { LoopAction::Wait });
        }
        let mut read_buffer = mem::take(&mut context.read_buffer);
        let action = match self.read_socket(&mut read_buffer) {
            Ok(count @ 1..) => {
                self.parse_input(&read_buffer[..count], context);
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(LoopAction::Close),
        };
        context.read_buffer = read_buffer;
        action
    }

    /// Reads once from the socket, and records whether the socket may hold more. The kernel reports only new bytes
    /// (edge triggering), so the caller reads until a read fails or does not fill the buffer. After the client has
    /// ended sending, only a read of 0 bytes is the last one.
    fn read_socket(&mut self, read_buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let result = self.socket.read(read_buffer);
            match &result {
                Ok(count) => self.may_have_input = *count == read_buffer.len() || self.client_ended_sending,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.may_have_input = false,
            }
            return result;
        }
    }

    /// Parses the bytes that earlier reads have left, followed by `new_bytes`, and enters the state that follows. The
    /// deadline of a head or a body does not move while it arrives.
    fn parse_input(&mut self, new_bytes: &[u8], context: &mut LoopContext) {
        let (now, limits) = (context.now, &context.limits);
        let (mut framing, mut input, mut began) = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { since, framing, input, .. } => (framing, input, Some(since)),
            State::Idle { input, .. } => (Framing::default(), input, None),
            other => return self.state = other,
        };
        let (was_in_body, mut used) = (framing.is_in_body(), 0);
        // Copies no bytes if the request arrives in one piece.
        let bytes = if input.is_empty() {
            new_bytes
        } else {
            input.extend_from_slice(new_bytes);
            &input
        };
        let step = framing.parse_more(bytes, &mut used, limits);
        let input = bytes[used..].to_vec();
        if let Ok(Progress::Complete(framed_request)) = step {
            return self.answer_or_keep_request(framed_request, framing.for_answer, input, context);
        }
        if framing.is_in_body() != was_in_body {
            began = None;
            self.counted_client = self.peer.client_of_request(framing.forwarded_client());
        }
        // Counts the whole body before its bytes arrive. Otherwise many bodies could begin to arrive that together need
        // more memory than there is.
        self.memory.resize(budgeted_bytes(input.len()) + framing.max_bytes(limits).map_or(0, budgeted_bytes));
        let awaits_continue = matches!(step, Ok(Progress::AwaitsContinue));
        self.state = State::Arriving { since: began.unwrap_or(now), framing, input, awaits_continue };
        if let Err(error) = step {
            self.refuse(&error, context);
        }
    }

    /// Sends 100 (Continue), for which the client waits before it sends the body. Closes the connection if the socket
    /// does not take these few bytes, because the client then does not read.
    fn send_continue(&mut self) -> Option<LoopAction> {
        if let State::Arriving { awaits_continue, .. } = &mut self.state {
            *awaits_continue = false;
        }
        let sent = self.socket.send_with_flags(CONTINUE, MSG_NOSIGNAL).ok();
        (sent != Some(CONTINUE.len())).then_some(LoopAction::Close)
    }

    /// Answers a complete request if it needs no worker; otherwise keeps the request until a worker claims it.
    fn answer_or_keep_request(
        &mut self,
        framed_request: FramedRequest,
        mut for_answer: AnswerInfo,
        mut input: Vec<u8>,
        context: &mut LoopContext,
    ) {
        let FramedRequest { mut request, mut persistence } = framed_request;
        let (more, budget) = (budgeted_bytes(input.len()), &context.resources.budget);
        if more > 0 && budget.held_bytes() + more > budget.limit {
            // Drops the bytes behind this request if they exceed the memory budget. The connection is closed after the
            // answer, which tells the client that its further requests get none.
            persistence = Persistence::Close;
            input = Vec::new();
        }
        self.memory.resize(budgeted_bytes(input.len()) + budgeted_bytes(request.memory_bytes()));
        self.counted_client = self.peer.client_of_request(request.peer);
        request.peer = self.counted_client.address;
        let id = for_answer.id.take().unwrap_or_else(RequestId::new);
        let answer = (context.resources.answer_without_worker)(&request, &id);
        let (since, stage) = (context.now, WorkStage::Unclaimed(request));
        self.state = State::Working { since, stage, persistence, id, for_answer, input };
        if let Some(answer) = answer {
            // Ignores what `send_answer` returns, because the caller advances this connection in any case.
            self.send_answer(answer, None, context.stop_deadline.is_some());
        }
    }
}
