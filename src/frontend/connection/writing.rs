//! Sends answers and refusals over the socket of a connection, and ends the connection.

use super::{Action, Connection, LoopParts, State, counted_bytes};
use crate::error::{BusyReason, Error};
use crate::frontend::http1::head::AnswerInfo;
use crate::frontend::peers::{ClientName, Peer};
use crate::http::{Persistence, RequestId, Response, log_line};
use mio::{Interest, Token, unix::SourceFd};
use nix::libc::MSG_NOSIGNAL;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use std::{fmt, mem, os::fd::AsRawFd};

/// How long a refused client is read from before the connection is closed. Closing a socket with unread bytes resets
/// the connection, and the reset overtakes the answer.
pub const LINGER_TIME: Duration = Duration::from_secs(1);

/// The bytes of an answer that the client's socket took at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The bytes that the socket took. The event loop sends the remaining ones, and logs a line if the client does not
    /// take them.
    pub taken: usize,
    /// The bytes of the whole answer.
    pub length: usize,
}

/// Writes `2048B`, or `1024B of 2048B so far`.
impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { taken, length } = self;
        if taken == length { write!(f, "{length}B") } else { write!(f, "{taken}B of {length}B so far") }
    }
}

/// An answer of which the socket has not taken all bytes.
pub(super) struct UnsentAnswer {
    bytes: Vec<u8>,
    sent: usize,
    id: RequestId,
    /// The time at which the socket last took bytes of the answer.
    pub moved_at: Instant,
    /// The bytes that were read behind the request; `None` if the connection is closed after the answer.
    input: Option<Vec<u8>>,
}

impl UnsentAnswer {
    fn is_sent(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Logs that the client did not take all of the answer before its deadline, or before connections or memory ran
    /// out (`why`).
    pub fn log_cut_off(&self, peer: Peer, why: Option<BusyReason>) {
        let why = why.map_or("after WRITE_TIMEOUT", BusyReason::text);
        let (client, sent, length) = (ClientName(peer.address), self.sent, self.bytes.len());
        let line = format_args!("cut off: {client} took {sent} of the {length} bytes of an answer ({why})");
        log_line(log::Level::Info, Some(&self.id), line);
    }
}

impl Connection {
    /// Answers with a refusal, and then ends the connection.
    pub fn refuse(&mut self, error: &Error, context: &mut LoopParts) {
        let AnswerInfo { id, cors, head_only, client } = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { framing, .. } => framing.for_answer,
            State::Working { id, for_answer, .. } => AnswerInfo { id: Some(id), ..for_answer },
            _ => AnswerInfo::default(),
        };
        let (id, client) = (id.unwrap_or_else(RequestId::new), self.peer.client_of_request(client).address);
        let mut response = error.answer();
        cors.add_to(&mut response);
        match error {
            Error::Busy(why) => {
                context.warnings.warn_of_refusal(*why, client, &id);
                context.resources.metrics.count_busy(*why);
            }
            error => log::info!(
                status = response.status, client:% = ClientName(client), request_id:% = id;
                "refused: {error}"
            ),
        }
        context.resources.metrics.count_refusal(response.status);
        self.generation += 1;
        self.memory.resize(0);
        let bytes = response.into_bytes(Persistence::Close, head_only, &id);
        let answer = UnsentAnswer { bytes, sent: 0, id, moved_at: context.now, input: None };
        self.state = State::Writing { since: context.now, answer };
        // Reads the socket again, because more bytes of the refused request may come.
        self.readable = true;
    }

    /// Sends a worker's answer, as much of it as the socket takes, and keeps the remaining bytes. `cut_after` limits
    /// the bytes of an answer that is to be cut short. Returns the number of bytes that were taken, and whether the
    /// event loop has to advance this connection now. Call it only for a request in work.
    pub fn send_answer(
        &mut self,
        mut response: Response,
        cut_after: Option<usize>,
        stopping: bool,
    ) -> (Delivery, bool) {
        let state = mem::replace(&mut self.state, State::Closing);
        let State::Working { persistence, id, for_answer, input, .. } = state else {
            unreachable!("the caller has made sure that a request is in work");
        };
        // Changes the generation, so that a later answer to this request is dropped.
        self.generation += 1;
        for_answer.cors.add_to(&mut response);
        let persistence = if stopping { Persistence::Close } else { persistence };
        let closes = persistence == Persistence::Close || cut_after.is_some();
        self.readable |= closes && !input.is_empty();
        let mut bytes = response.into_bytes(persistence, for_answer.head_only, &id);
        bytes.truncate(cut_after.unwrap_or(usize::MAX));
        let (now, length, input) = (Instant::now(), bytes.len(), (!closes).then_some(input));
        let mut answer = UnsentAnswer { bytes, sent: 0, id, moved_at: now, input };
        let result = self.write_bytes(&mut answer, now);
        let taken = answer.sent;
        match result {
            Ok(()) if answer.is_sent() => self.finish_answer(answer, now),
            Ok(()) => {
                let input = answer.input.as_ref().map_or(0, Vec::len);
                self.memory.resize(counted_bytes(answer.bytes.capacity()) + counted_bytes(input));
                self.state = State::Writing { since: now, answer };
            }
            Err(_) => self.give_up(),
        }
        let idle = matches!(&self.state, State::Idle { input, .. } if input.is_empty());
        (Delivery { taken, length }, stopping || self.readable || !idle)
    }

    /// Sends more of an answer. Returns `None` once all of it is sent.
    pub(super) fn write_answer(&mut self, index: u32, context: &mut LoopParts) -> Option<Action> {
        let State::Writing { since, mut answer } = mem::replace(&mut self.state, State::Closing) else {
            return None;
        };
        if self.write_bytes(&mut answer, context.now).is_err() {
            return Some(Action::Close);
        }
        let done = answer.is_sent();
        if self.awaits_writable == done {
            // Asks the kernel to report when the socket can be written only after a write that did not take all bytes.
            // Such a write is rare, and a Unix socket would otherwise be reported after every answer.
            self.awaits_writable = !done;
            let interest = interest(!done);
            let (fd, token) = (self.stream.as_raw_fd(), Token(index as usize));
            // Misses no event, because registering anew reports a socket that is writable already.
            if context.poll.registry().reregister(&mut SourceFd(&fd), token, interest).is_err() {
                return Some(Action::Close);
            }
        }
        if !done {
            self.state = State::Writing { since, answer };
            return Some(Action::Wait);
        }
        self.finish_answer(answer, context.now);
        None
    }

    /// Sends until the socket takes no more.
    fn write_bytes(&mut self, answer: &mut UnsentAnswer, now: Instant) -> io::Result<()> {
        while !answer.is_sent() {
            // MSG_NOSIGNAL makes writing to a client that is gone an error, without a signal.
            match self.stream.send_with_flags(&answer.bytes[answer.sent..], MSG_NOSIGNAL) {
                Ok(count) => (answer.sent, answer.moved_at) = (answer.sent + count, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Enters the state that follows a sent answer.
    fn finish_answer(&mut self, answer: UnsentAnswer, now: Instant) {
        self.memory.resize(counted_bytes(answer.input.as_ref().map_or(0, Vec::len)));
        self.client = self.peer;
        self.state = match answer.input {
            Some(input) => State::Idle { since: now, input },
            None => State::Closing,
        };
    }

    /// Marks the connection to be closed without another read or write, because a write has failed: the client is
    /// gone.
    fn give_up(&mut self) {
        self.state = State::Closing;
        self.readable = false;
    }

    /// Reads and discards bytes of a client that was refused. Returns `None` while there may be more.
    pub(super) fn discard_input(&mut self, context: &mut LoopParts) -> Option<Action> {
        if !self.readable {
            return Some(Action::Wait);
        }
        match self.receive(&mut context.scratch) {
            Ok(1..) => None,
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(Action::Close),
        }
    }
}

/// Returns the events that a socket is registered for.
pub fn interest(awaits_writable: bool) -> Interest {
    if awaits_writable { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE }
}
