//! The other direction of a connection: answers, refusals, and its end.

use super::{
    Action, Connection, Context, State,
    reading::{Input, UNCOUNTED},
};
use crate::frontend::{
    http1::head::Echo,
    peers::{Client, Peer},
    slot::Delivery,
};
use crate::{
    budget::{Budget, Purpose, Reservation},
    error::{Error, Reason},
    http::{Chunks, Persistence, RequestId, Response, log_line},
};
use mio::{Interest, Token, unix::SourceFd};
use std::{
    io::{self, ErrorKind},
    mem,
    time::{Duration, Instant},
};

/// How long, and for how much, a refused client is read from so that it can read why: closing a socket with unread
/// bytes in it resets the connection, and the reset overtakes the answer.
const LINGER_TIME: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 8 << 20;
/// The same while stopping.
const LINGER_TIME_STOPPING: Duration = Duration::from_millis(300);

/// An answer that the socket did not take at once.
pub(super) struct Unsent {
    /// What is left of it.
    chunks: Chunks,
    /// How long all of it is.
    length: usize,
    id: RequestId,
    /// When the socket last took some of it.
    pub moved: Instant,
    /// What was read beyond the request, if the connection stays open.
    keep: Option<Input>,
    held: Option<Reservation>,
}

impl Unsent {
    /// The memory that it holds.
    pub fn memory(&self) -> usize {
        self.chunks.memory()
    }

    /// Says that the client did not get all of it.
    pub fn log_cut_off(&self, peer: Peer, when: &str) {
        let (sent, length) = (self.length - self.chunks.len(), self.length);
        let line = format_args!("cut off: {peer} took {sent} of the {length} bytes of an answer {when}");
        log_line(log::Level::Info, Some(&self.id), line);
    }
}

impl Connection {
    /// Answers with a refusal, after which the connection ends.
    pub fn refuse(&mut self, error: &Error, context: &mut Context) {
        let Echo { id, cors, head_only } = self.state.echo();
        let id = id.unwrap_or_else(|| context.ids.make(context.now));
        let mut response = error.answer();
        cors.add_to(&mut response);
        match error {
            Error::Busy(why) => {
                let client = self.peer.address;
                context.shared.unavailable.warn(context.now, why.text(), Some((client, &id)));
            }
            error => log::info!(
                status = response.status, client:% = Client(self.peer.address), request_id:% = id;
                "refused: {error}"
            ),
        }
        context.resources.metrics.refusal(error.reason(), response.status);
        self.generation = self.generation.wrapping_add(1);
        let chunks = response.into_chunks(Persistence::Close, head_only, &id);
        let length = chunks.len();
        let answer = Unsent { chunks, length, id, moved: context.now, keep: None, held: None };
        self.state = State::Writing { since: context.now, answer };
        // More of the request may come.
        self.readable = true;
    }

    /// Sends a worker's answer, as much of it as the socket takes, and keeps the rest, with what is reserved for it.
    /// Returns how much was taken, and whether the event loop has to advance this connection now. Only to be called
    /// when a request is in work.
    pub fn answer(
        &mut self,
        mut response: Response,
        held: Option<Reservation>,
        stopping: bool,
        budget: &Budget,
    ) -> (Delivery, bool) {
        let State::Working { request, input, .. } = mem::replace(&mut self.state, State::Closing) else {
            unreachable!("the caller has made sure that a request is in work");
        };
        request.cors.add_to(&mut response);
        let persistence = if stopping { Persistence::Close } else { request.traits.persistence };
        self.generation = self.generation.wrapping_add(1);
        let keep = match persistence {
            Persistence::Close => {
                self.readable |= !input.is_empty();
                None
            }
            _ => Some(input),
        };
        let now = Instant::now();
        let mut chunks = response.into_chunks(persistence, request.head_only, &request.id);
        let length = chunks.len();
        let taken = match self.send(&mut chunks) {
            Ok(()) if chunks.is_empty() => {
                self.sent(keep, now);
                length
            }
            Ok(()) => {
                let memory = chunks.memory();
                let mut held = held;
                if memory > UNCOUNTED {
                    held.get_or_insert_with(|| budget.count(Purpose::Work, 0)).set(memory);
                }
                let taken = length - chunks.len();
                let answer = Unsent { chunks, length, id: request.id, moved: now, keep, held };
                self.state = State::Writing { since: now, answer };
                taken
            }
            Err(_) => {
                self.give_up();
                0
            }
        };
        let idle = matches!(&self.state, State::Idle { input, .. } if input.is_empty());
        (Delivery { taken, length }, stopping || self.readable || !idle)
    }

    /// Answers 503 if a request is in work, as far as the socket takes it. To be closed afterwards.
    pub fn cut_off(&mut self, context: &mut Context) {
        if self.is_working() {
            self.refuse(&Error::Busy(Reason::Stopped), context);
            if let State::Writing { mut answer, .. } = mem::replace(&mut self.state, State::Closing) {
                // Nothing can be done for a client that does not take it now.
                let _ = self.send(&mut answer.chunks);
            }
        }
    }

    pub(super) fn write(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        let State::Writing { since, mut answer } = mem::replace(&mut self.state, State::Closing) else {
            return None;
        };
        let before = answer.chunks.len();
        if self.send(&mut answer.chunks).is_err() {
            return Some(Action::Close);
        }
        if answer.chunks.len() < before {
            answer.moved = context.now;
            if let Some(held) = &mut answer.held {
                held.set(answer.chunks.memory());
            }
        }
        let done = answer.chunks.is_empty();
        if self.awaits_writable == done {
            // One write is nearly always enough, so writability is asked for only when it was not: a Unix socket would
            // report it after every answer.
            self.awaits_writable = !done;
            let interest = interest(!done);
            let (fd, token) = (self.stream.fd(), Token(index as usize));
            if context.registry.reregister(&mut SourceFd(&fd), token, interest).is_err() {
                return Some(Action::Close);
            }
            // Registering anew reports what is there already, so nothing is missed.
        }
        if !done {
            self.state = State::Writing { since, answer };
            return Some(Action::Wait);
        }
        self.sent(answer.keep, context.now);
        None
    }

    /// Sends until the socket takes no more.
    fn send(&mut self, chunks: &mut Chunks) -> io::Result<()> {
        while !chunks.is_empty() {
            match chunks.send(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// An answer is out.
    fn sent(&mut self, keep: Option<Input>, now: Instant) {
        self.state = match keep {
            Some(input) => State::Idle { since: now, input },
            None => State::Closing,
        };
    }

    /// The client does not read any more: nothing is worth sending or reading.
    pub(super) fn give_up(&mut self) {
        self.state = State::Closing;
        self.readable = false;
    }

    pub(super) fn linger(&mut self, context: &Context) -> Option<Action> {
        if self.stream.finish().is_err() {
            return Some(Action::Close);
        }
        let until = context.now + linger_time(context.stopping);
        self.state = State::Lingering { until, left: LINGER_BYTES };
        None
    }

    pub(super) fn discard(&mut self, context: &mut Context) -> Option<Action> {
        if !self.readable {
            return Some(Action::Wait);
        }
        let result = self.receive(context.scratch);
        let State::Lingering { left, .. } = &mut self.state else {
            return None;
        };
        match result {
            Ok(count) if count > 0 && count < *left => {
                *left -= count;
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(Action::Close),
        }
    }
}

/// What is asked of a socket that may have bytes to read, and of which writability is awaited or not.
pub fn interest(awaits_writable: bool) -> Interest {
    match awaits_writable {
        true => Interest::READABLE | Interest::WRITABLE,
        false => Interest::READABLE,
    }
}

/// How long a refused client is read from.
pub fn linger_time(stopping: bool) -> Duration {
    match stopping {
        true => LINGER_TIME_STOPPING,
        false => LINGER_TIME,
    }
}
