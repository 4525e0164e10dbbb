//! Sends answers and refusals over the socket of a connection, and ends the connection.

use super::{Connection, LoopAction, LoopContext, State, budgeted_bytes};
use crate::error::{BusyReason, Error};
use crate::frontend::http1::head::AnswerInfo;
use crate::frontend::peers::{ClientName, Peer};
use crate::http::{Persistence, RequestId, Response, log_line};
use mio::{Interest, Token, unix::SourceFd};
use nix::libc::MSG_NOSIGNAL;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use std::{fmt, mem, os::fd::AsRawFd};

/// How long the server reads from a client after the last answer, before it closes the connection. Closing a socket
/// with unread bytes resets the connection, and the reset overtakes the answer.
pub const LINGER_TIME: Duration = Duration::from_secs(1);

/// How many bytes of an answer the socket took in the first write, and how many the answer has; for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// The number of bytes that the socket took in the first write. The event loop sends the remaining ones, and logs a
    /// line if the client does not take them.
    pub sent_bytes: usize,
    /// The number of bytes of the whole answer.
    pub total_bytes: usize,
}

/// Shows the size of the answer, `2048B`, or how much of it was sent, `1024B of 2048B so far`.
impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { sent_bytes: sent, total_bytes: total } = self;
        if sent == total { write!(f, "{total}B") } else { write!(f, "{sent}B of {total}B so far") }
    }
}

/// An answer of which the socket has not taken all bytes yet.
pub(super) struct UnsentAnswer {
    /// The bytes of the whole answer.
    bytes: Vec<u8>,
    /// The number of bytes that the socket has taken so far.
    sent_bytes: usize,
    /// The id of the answered request, for the log.
    id: RequestId,
    /// The time at which the socket last took bytes of the answer.
    pub last_sent_at: Instant,
    /// The bytes of the next request that were read together with the answered one; `None` if the connection is closed
    /// after the answer.
    next_input: Option<Vec<u8>>,
}

impl UnsentAnswer {
    fn is_sent(&self) -> bool {
        self.sent_bytes == self.bytes.len()
    }

    /// Logs that the client got only a part of the answer. `why` says whether connections or memory run out; `None`
    /// means that the deadline of the answer has passed.
    pub fn log_cut_off(&self, peer: Peer, why: Option<BusyReason>) {
        let why = why.map_or("after WRITE_TIMEOUT", BusyReason::log_text);
        let (client, sent, length) = (ClientName(peer.address), self.sent_bytes, self.bytes.len());
        let line = format_args!("cut off: {client} took {sent} of the {length} bytes of an answer ({why})");
        log_line(log::Level::Info, Some(&self.id), line);
    }
}

impl Connection {
    /// Makes `error` the last answer on this connection. The next call of `advance` sends it.
    pub fn refuse(&mut self, error: &Error, context: &mut LoopContext) {
        let AnswerInfo { id, cors, head_only, client } = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { framing, .. } => framing.for_answer,
            State::Working { id, for_answer, .. } => AnswerInfo { id: Some(id), ..for_answer },
            _ => AnswerInfo::default(),
        };
        let (id, client) = (id.unwrap_or_else(RequestId::new), self.peer.client_of_request(client).address);
        let mut response = error.answer();
        cors.add_fields_to(&mut response);
        match error {
            Error::Busy(why) => {
                context.warnings.warn_of_refusal(*why, client, &id);
                context.resources.metrics.count_busy_reason(*why);
            }
            error => log::info!(
                status = response.status, client:% = ClientName(client), request_id:% = id;
                "refused: {error}"
            ),
        }
        context.resources.metrics.count_refusal(response.status);
        self.request_number += 1;
        self.memory.resize(0);
        let bytes = response.into_bytes(Persistence::Close, head_only, &id);
        let answer = UnsentAnswer { bytes, sent_bytes: 0, id, last_sent_at: context.now, next_input: None };
        self.state = State::Writing { since: context.now, answer };
        // Assumes unread bytes, because more bytes of the refused request may come: they are read before the connection
        // is closed.
        self.may_have_input = true;
    }

    /// Sends the answer to a complete request as far as the socket takes it, and keeps the remaining bytes for the
    /// event loop. Sends at most `cut_at_byte` bytes, and then closes the connection, if a test asks for that. Returns
    /// how many bytes were sent, and true if the event loop has to advance this connection now. Panics if no request
    /// waits for an answer.
    pub fn send_answer(
        &mut self,
        mut response: Response,
        cut_at_byte: Option<usize>,
        is_stopping: bool,
    ) -> (Delivery, bool) {
        let state = mem::replace(&mut self.state, State::Closing);
        let State::Working { persistence, id, for_answer, input, .. } = state else {
            unreachable!("the caller has made sure that a request is in work");
        };
        // Increases the number of the current request, so that a later answer to this request is dropped.
        self.request_number += 1;
        for_answer.cors.add_fields_to(&mut response);
        let persistence = if is_stopping { Persistence::Close } else { persistence };
        let closes = persistence == Persistence::Close || cut_at_byte.is_some();
        self.may_have_input |= closes && !input.is_empty();
        let mut bytes = response.into_bytes(persistence, for_answer.head_only, &id);
        bytes.truncate(cut_at_byte.unwrap_or(usize::MAX));
        let (now, total_bytes, next_input) = (Instant::now(), bytes.len(), (!closes).then_some(input));
        let mut answer = UnsentAnswer { bytes, sent_bytes: 0, id, last_sent_at: now, next_input };
        let result = self.send_bytes(&mut answer, now);
        let sent_bytes = answer.sent_bytes;
        match result {
            Ok(()) if answer.is_sent() => self.finish_answer(answer, now),
            Ok(()) => {
                let input = answer.next_input.as_ref().map_or(0, Vec::len);
                self.memory.resize(budgeted_bytes(answer.bytes.capacity()) + budgeted_bytes(input));
                self.state = State::Writing { since: now, answer };
            }
            Err(_) => self.mark_broken(),
        }
        let idle = matches!(&self.state, State::Idle { input, .. } if input.is_empty());
        (Delivery { sent_bytes, total_bytes }, is_stopping || self.may_have_input || !idle)
    }

    /// Sends more of an answer that the socket did not take in one write. Returns `None` once all of it is sent.
    pub(super) fn send_remaining(&mut self, slot: u32, context: &mut LoopContext) -> Option<LoopAction> {
        let State::Writing { since, mut answer } = mem::replace(&mut self.state, State::Closing) else {
            return None;
        };
        if self.send_bytes(&mut answer, context.now).is_err() {
            return Some(LoopAction::Close);
        }
        let done = answer.is_sent();
        if self.awaits_writable == done {
            // Asks the kernel to report when the socket can be written, but only after a write that did not take all
            // bytes. Such a write is rare, and a Unix socket would otherwise be reported after every answer.
            self.awaits_writable = !done;
            let interest = if done { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
            let (fd, token) = (self.socket.as_raw_fd(), Token(slot as usize));
            // Also reports a socket that has become writable since the last write: registering it anew reports its
            // present state.
            if context.poll.registry().reregister(&mut SourceFd(&fd), token, interest).is_err() {
                return Some(LoopAction::Close);
            }
        }
        if !done {
            self.state = State::Writing { since, answer };
            return Some(LoopAction::Wait);
        }
        self.finish_answer(answer, context.now);
        None
    }

    /// Sends bytes of the answer until all are sent or the socket takes no more.
    fn send_bytes(&mut self, answer: &mut UnsentAnswer, now: Instant) -> io::Result<()> {
        while !answer.is_sent() {
            // Sets MSG_NOSIGNAL, so that writing to a client that is gone returns an error and does not raise SIGPIPE.
            match self.socket.send_with_flags(&answer.bytes[answer.sent_bytes..], MSG_NOSIGNAL) {
                Ok(count) => (answer.sent_bytes, answer.last_sent_at) = (answer.sent_bytes + count, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Enters the state that follows a sent answer: idle or closing.
    fn finish_answer(&mut self, answer: UnsentAnswer, now: Instant) {
        self.memory.resize(budgeted_bytes(answer.next_input.as_ref().map_or(0, Vec::len)));
        self.counted_client = self.peer;
        self.state = match answer.next_input {
            Some(input) => State::Idle { since: now, input },
            None => State::Closing,
        };
    }

    /// Marks the connection to be closed without another read or write, because a write has failed: the client is
    /// gone.
    fn mark_broken(&mut self) {
        self.state = State::Closing;
        self.may_have_input = false;
    }

    /// Reads and discards bytes of a client whose last answer is sent. Returns `None` while there may be more bytes.
    pub(super) fn discard_input(&mut self, context: &mut LoopContext) -> Option<LoopAction> {
        if !self.may_have_input {
            return Some(LoopAction::Wait);
        }
        match self.read_socket(&mut context.read_buffer) {
            Ok(1..) => None,
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(LoopAction::Close),
        }
    }
}
