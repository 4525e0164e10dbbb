//! The other direction: answers, refusals, and the end of a connection.

use super::{
    connection::{Connection, Next, Phase, Then, Turn},
    http1::framing::Framing,
};
use crate::{
    config::Limits,
    error::Error,
    http::{Persistence, Response},
};
use mio::{Interest, Token};
use std::{
    io::{self, ErrorKind, Write},
    mem,
    time::{Duration, Instant},
};

/// How long, and for how much, a refused client is listened to so that it can read why: closing a socket
/// with unread bytes in it resets the connection, and the reset overtakes the answer.
const LINGER_TIME: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 8 << 20;
/// The same while stopping.
const LINGER_TIME_STOPPING: Duration = Duration::from_millis(300);

impl Connection {
    /// Answers with a refusal, after which the connection ends.
    pub fn refuse(&mut self, error: &Error, turn: &Turn) {
        match error {
            Error::Unavailable(why) => turn.pipe.unavailable.warn(turn.now, why),
            error => log::info!("refused: {error}"),
        }
        self.generation = self.generation.wrapping_add(1);
        self.output = Response::from(error).render(Persistence::Close, self.head_only);
        self.sent = 0;
        self.input = Vec::new();
        self.at = 0;
        self.framing = Framing::default();
        self.phase = Phase::Writing(Then::Linger);
        self.deadline = Some(turn.now + turn.limits.write_timeout);
    }

    /// Sends a worker's answer, as much of it as the socket takes. Returns its length, and whether the loop
    /// has to look after this connection now.
    pub fn answer(&mut self, response: &Response, limits: &Limits, stopping: bool) -> (usize, bool) {
        let persistence = match self.persistence {
            Some(persistence) if !stopping => persistence,
            _ => Persistence::Close,
        };
        let then = match persistence {
            Persistence::Close => Then::Close,
            _ => Then::Idle,
        };
        let bytes = response.render(persistence, self.head_only);
        let length = bytes.len();
        self.generation = self.generation.wrapping_add(1);
        let now = Instant::now();
        match self.send(&bytes) {
            Ok(sent) if sent == length => self.written(then, now, limits),
            Ok(sent) => {
                self.output = bytes;
                self.sent = sent;
                self.phase = Phase::Writing(then);
                self.deadline = Some(now + limits.write_timeout);
            }
            Err(_) => self.give_up(),
        }
        let more = self.phase != Phase::Idle || self.readable || !self.input.is_empty();
        (length, more || stopping)
    }

    /// Answers 503 if a request is in work, as far as the socket takes it. To be closed afterwards.
    pub fn cut_off(&mut self, turn: &Turn) {
        if self.phase == Phase::Working {
            self.refuse(&Error::Unavailable("the server stopped".into()), turn);
            let output = mem::take(&mut self.output);
            // Nothing can be done for a client that does not take it now.
            let _ = self.send(&output);
        }
    }

    /// Hurries a client that is only listened to out of politeness.
    pub fn hurry(&mut self, now: Instant) {
        if let (Phase::Lingering(_), Some(deadline)) = (self.phase, self.deadline) {
            self.deadline = Some(deadline.min(now + LINGER_TIME_STOPPING));
        }
    }

    pub(super) fn write(&mut self, slot: u32, then: Then, turn: &mut Turn) -> Option<Next> {
        let output = mem::take(&mut self.output);
        let Ok(count) = self.send(&output[self.sent..]) else {
            return Some(Next::Close);
        };
        self.sent += count;
        let done = self.sent == output.len();
        if self.awaits_writable == done {
            // The worker's one write is nearly always enough, so writability is asked for only when it was
            // not: a Unix socket would report it after every answer.
            self.awaits_writable = !done;
            let interest = match done {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            let stream = self.stream.as_mut().expect("only open connections write");
            let token = Token(slot as usize);
            if stream.source().reregister(turn.registry, token, interest).is_err() {
                return Some(Next::Close);
            }
            // Registering anew reports what is there already, so nothing is missed.
        }
        if !done {
            self.output = output;
            return Some(Next::Wait);
        }
        self.written(then, turn.now, turn.limits);
        None
    }

    /// Sends until the socket takes no more.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stream = self.stream.as_mut().expect("only open connections write");
        let mut sent = 0;
        while sent < bytes.len() {
            match stream.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(sent)
    }

    fn written(&mut self, then: Then, now: Instant, limits: &Limits) {
        self.sent = 0;
        self.phase = match then {
            Then::Idle => Phase::Idle,
            Then::Close => Phase::Closing,
            Then::Linger => {
                self.readable = true;
                Phase::Closing
            }
        };
        self.deadline = Some(now + limits.idle_timeout);
    }

    /// The client does not listen any more: nothing is worth sending or reading.
    pub(super) fn give_up(&mut self) {
        self.phase = Phase::Closing;
        self.readable = false;
        self.input = Vec::new();
        self.at = 0;
    }

    pub(super) fn linger(&mut self, turn: &Turn) -> Option<Next> {
        let stream = self.stream.as_mut().expect("only open connections linger");
        if stream.finish().is_err() {
            return Some(Next::Close);
        }
        self.input = Vec::new();
        self.at = 0;
        self.readable = true;
        self.phase = Phase::Lingering(LINGER_BYTES);
        self.deadline = Some(turn.now + linger_time(turn.stopping));
        None
    }

    pub(super) fn discard(&mut self, left: usize, turn: &mut Turn) -> Option<Next> {
        if !self.readable {
            return Some(Next::Wait);
        }
        match self.receive(turn.scratch) {
            Ok(count) if count > 0 && count < left => {
                self.phase = Phase::Lingering(left - count);
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            _ => Some(Next::Close),
        }
    }
}

/// How long a refused client is listened to.
pub fn linger_time(stopping: bool) -> Duration {
    match stopping {
        true => LINGER_TIME_STOPPING,
        false => LINGER_TIME,
    }
}
