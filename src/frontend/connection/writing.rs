//! From an answer or a refusal to bytes on the socket of a connection, and the end of a connection.

use super::{Action, Connection, Context, InWork, State, counted};
use crate::frontend::{http1::head::Echo, peers::Client, peers::Peer};
use crate::{
    error::{Error, Reason},
    http::{Persistence, RequestId, Response, log_line},
};
use mio::{Interest, Token, unix::SourceFd};
use nix::libc::MSG_NOSIGNAL;
use std::{
    fmt,
    io::{self, ErrorKind},
    mem,
    net::Shutdown,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

/// How long, and for how much, a refused client is read from so that it can read why: closing a socket with unread
/// bytes in it resets the connection, and the reset overtakes the answer.
const LINGER_TIME: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 8 << 20;
/// How long a refused client is read from during a stop.
const LINGER_TIME_STOPPING: Duration = Duration::from_millis(300);

/// How much of an answer the client's socket took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes that it took at once. The frontend sends the rest as the client takes it, and logs if it does not.
    pub taken: usize,
    /// Bytes of the whole answer.
    pub length: usize,
}

/// `2048B`, or `1024B of 2048B so far`.
impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { taken, length } = self;
        match taken == length {
            true => write!(f, "{length}B"),
            false => write!(f, "{taken}B of {length}B so far"),
        }
    }
}

/// An answer that the socket did not take at once.
pub(super) struct Unsent {
    bytes: Vec<u8>,
    sent: usize,
    id: RequestId,
    /// When the socket last took some of it.
    pub moved: Instant,
    /// Bytes that were read beyond the request, if the connection stays open.
    keep: Option<Vec<u8>>,
}

impl Unsent {
    fn is_sent(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Logs that the client did not get all of it.
    pub fn log_cut_off(&self, peer: Peer, when: &str) {
        let (sent, length) = (self.sent, self.bytes.len());
        let peer = peer.address.map_or_else(|| "a Unix socket".to_owned(), |address| address.to_string());
        let line = format_args!("cut off: {peer} took {sent} of the {length} bytes of an answer {when}");
        log_line(log::Level::Info, Some(&self.id), line);
    }
}

impl Connection {
    /// Answers with a refusal, after which the connection ends.
    pub fn refuse(&mut self, error: &Error, context: &mut Context) {
        let Echo { id, cors, head_only } = self.echo();
        let id = id.unwrap_or_else(RequestId::new);
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
        context.resources.metrics.refusal(error.label(), response.status);
        self.generation += 1;
        self.held.set(0);
        let bytes = response.into_bytes(Persistence::Close, head_only, &id);
        let answer = Unsent { bytes, sent: 0, id, moved: context.now, keep: None };
        self.state = State::Writing { since: context.now, answer };
        // More of the request may come.
        self.readable = true;
    }

    /// Sends a worker's answer, as much of it as the socket takes, and keeps the rest. Returns how much was taken, and
    /// whether the event loop has to advance this connection now. Only to be called when a request is in work.
    pub fn answer(&mut self, mut response: Response, stopping: bool) -> (Delivery, bool) {
        let (request, input) = self.end_work();
        request.cors.add_to(&mut response);
        let persistence = if stopping { Persistence::Close } else { request.traits.persistence };
        let keep = match persistence {
            Persistence::Close => {
                self.readable |= !input.is_empty();
                None
            }
            Persistence::KeepAlive(_) => Some(input),
        };
        let now = Instant::now();
        let bytes = response.into_bytes(persistence, request.head_only, &request.id);
        let length = bytes.len();
        let mut answer = Unsent { bytes, sent: 0, id: request.id, moved: now, keep };
        let result = self.send(&mut answer);
        let taken = answer.sent;
        match result {
            Ok(()) if answer.is_sent() => self.sent(answer, now),
            Ok(()) => {
                let input = answer.keep.as_ref().map_or(0, Vec::len);
                self.held.set(counted(answer.bytes.capacity()) + counted(input));
                self.state = State::Writing { since: now, answer };
            }
            Err(_) => self.give_up(),
        }
        let idle = matches!(&self.state, State::Idle { input, .. } if input.is_empty());
        (Delivery { taken, length }, stopping || self.readable || !idle)
    }

    /// Leaves the first bytes of a worker's answer to the event loop, which closes the connection after them. Only to be
    /// called when a request is in work.
    pub fn cut(&mut self, mut response: Response, bytes: usize) {
        let (request, input) = self.end_work();
        request.cors.add_to(&mut response);
        self.readable |= !input.is_empty();
        let mut sent = response.into_bytes(request.traits.persistence, request.head_only, &request.id);
        sent.truncate(bytes);
        self.held.set(counted(sent.capacity()));
        let now = Instant::now();
        let answer = Unsent { bytes: sent, sent: 0, id: request.id, moved: now, keep: None };
        self.state = State::Writing { since: now, answer };
    }

    /// Takes the request that is in work, with the bytes that were read behind it. A second answer to it is late from now
    /// on.
    fn end_work(&mut self) -> (InWork, Vec<u8>) {
        let State::Working { request, input, .. } = mem::replace(&mut self.state, State::Closing) else {
            unreachable!("the caller has made sure that a request is in work");
        };
        self.generation += 1;
        (request, input)
    }

    /// Answers 503 if a request is in work, as far as the socket takes it. To be closed afterwards.
    pub fn cut_off(&mut self, context: &mut Context) {
        if self.is_working() {
            self.refuse(&Error::Busy(Reason::Stopped), context);
            if let State::Writing { mut answer, .. } = mem::replace(&mut self.state, State::Closing) {
                // A client that does not take it now gets no more of it.
                let _ = self.send(&mut answer);
            }
        }
    }

    pub(super) fn write(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        let State::Writing { since, mut answer } = mem::replace(&mut self.state, State::Closing) else {
            return None;
        };
        let before = answer.sent;
        if self.send(&mut answer).is_err() {
            return Some(Action::Close);
        }
        if answer.sent > before {
            answer.moved = context.now;
        }
        let done = answer.is_sent();
        if self.awaits_writable == done {
            // One write is nearly always enough, so writability is asked for only if it was not: a Unix socket would
            // report it after every answer.
            self.awaits_writable = !done;
            let interest = interest(!done);
            let (fd, token) = (self.stream.as_raw_fd(), Token(index as usize));
            if context.registry.reregister(&mut SourceFd(&fd), token, interest).is_err() {
                return Some(Action::Close);
            }
            // Registering anew reports what is there already, so nothing is missed.
        }
        if !done {
            self.state = State::Writing { since, answer };
            return Some(Action::Wait);
        }
        self.sent(answer, context.now);
        None
    }

    /// Sends until the socket takes no more.
    fn send(&mut self, answer: &mut Unsent) -> io::Result<()> {
        while !answer.is_sent() {
            // A client that is gone is an error, and no signal.
            match self.stream.send_with_flags(&answer.bytes[answer.sent..], MSG_NOSIGNAL) {
                Ok(count) => answer.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Enters the state after an answer.
    fn sent(&mut self, answer: Unsent, now: Instant) {
        self.held.set(counted(answer.keep.as_ref().map_or(0, Vec::len)));
        self.state = match answer.keep {
            Some(input) => State::Idle { since: now, input },
            None => State::Closing,
        };
    }

    /// Gives up a client that does not read any more: nothing is worth sending or reading.
    pub(super) fn give_up(&mut self) {
        self.state = State::Closing;
        self.readable = false;
    }

    pub(super) fn linger(&mut self, context: &Context) -> Option<Action> {
        if self.stream.shutdown(Shutdown::Write).is_err() {
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

/// Returns the events that are asked for of a socket that may have bytes to read.
pub fn interest(awaits_writable: bool) -> Interest {
    match awaits_writable {
        true => Interest::READABLE | Interest::WRITABLE,
        false => Interest::READABLE,
    }
}

/// Returns how long a refused client is read from.
pub fn linger_time(stopping: bool) -> Duration {
    if stopping { LINGER_TIME_STOPPING } else { LINGER_TIME }
}
