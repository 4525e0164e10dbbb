//! One client: its socket, what was read of its request, what it has not taken of its answer.
//!
//! Owns the states of a connection and every read and write on its socket. Knows nothing of the other
//! connections. The loop and the workers both come here, one at a time (the lock is the seat's): a worker to
//! answer, the loop for all else. Nothing here blocks.

use super::{
    http1::framing::{Framing, Stage, Step},
    listener::Stream,
    responder::{Pipe, Slot},
};
use crate::{config::Limits, error::Error, http::Persistence};
use mio::Registry;
use std::{
    io::{self, ErrorKind, Read},
    mem,
    time::Instant,
};

/// Reads, and the like, that a connection gets in a turn of the loop; then it is the others' turn.
const STEPS_PER_TURN: usize = 8;
/// What the loop lends a connection for one turn.
pub struct Turn<'a> {
    /// The time, taken once a turn.
    pub now: Instant,
    /// What clients may use up.
    pub limits: &'a Limits,
    /// Where sockets are registered.
    pub registry: &'a Registry,
    /// Bytes land here first, so that a connection needs a buffer only for what is incomplete.
    pub scratch: &'a mut [u8],
    /// Whole requests, on their way to tiny_http.
    pub batch: &'a mut Vec<u8>,
    /// How many requests are on the way to the workers, and may be.
    pub pipe: &'a Pipe,
    /// No request that has not begun is waited for.
    pub stopping: bool,
}

/// What the loop does with a connection after its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Wait for an event or a worker.
    Wait,
    /// Come back in the next turn.
    Again,
    /// Give its place away.
    Close,
}

/// One place for a client, taken or free.
#[derive(Default)]
pub struct Connection {
    pub(super) stream: Option<Stream>,
    pub(super) phase: Phase,
    /// When the phase ends badly. Of no meaning while `stream` is none.
    pub(super) deadline: Option<Instant>,
    /// Counts requests, so that a late answer finds out that it is late. Never goes back.
    pub(super) generation: u32,
    /// The socket may hold bytes, or an end, that were not read.
    pub(super) readable: bool,
    /// The end was seen coming; a short read is not the last one then.
    pub(super) ended: bool,
    /// Registered for writability too.
    pub(super) awaits_writable: bool,
    /// Let in only to be told that there is no place.
    pub(super) turned_away: bool,
    pub(super) head_only: bool,
    pub(super) persistence: Option<Persistence>,
    pub(super) framing: Framing,
    /// Bytes that were read and not used, from `at` on.
    pub(super) input: Vec<u8>,
    pub(super) at: usize,
    /// Bytes that were rendered and not sent, from `sent` on.
    pub(super) output: Vec<u8>,
    pub(super) sent: usize,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Between requests; bytes of the next one may lie in `input`.
    #[default]
    Idle,
    Head,
    Body,
    /// With the workers.
    Working,
    Writing(Then),
    /// The last answer is out.
    Closing,
    /// Closed for writing; this many bytes more are read and thrown away.
    Lingering(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Idle,
    Close,
    Linger,
}

impl Connection {
    /// Takes a client in.
    pub fn open(&mut self, stream: Stream, now: Instant, limits: &Limits) {
        *self = Connection {
            stream: Some(stream),
            generation: self.generation,
            deadline: Some(now + limits.idle_timeout),
            ..Connection::default()
        };
    }

    /// Closes the socket and gives all memory back.
    pub fn close(&mut self) {
        *self = Connection { generation: self.generation.wrapping_add(1), ..Connection::default() };
    }

    /// Whether there is a client.
    pub fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// Whether the workers have a request of it.
    pub fn is_working(&self) -> bool {
        self.is_open() && self.phase == Phase::Working
    }

    /// Whether this very request still waits for its answer.
    pub fn awaits(&self, generation: u32) -> bool {
        self.generation == generation && self.is_working()
    }

    /// When it would be closed anyway, if nothing is lost by closing it now, and a place is won.
    pub fn spare_until(&self) -> Option<Instant> {
        match self.phase {
            Phase::Idle | Phase::Lingering(_) if self.is_open() && !self.turned_away => self.deadline,
            _ => None,
        }
    }

    /// Whether it was let in only to be told that there is no place.
    pub fn is_turned_away(&self) -> bool {
        self.turned_away
    }

    /// Tells the client that there is no place.
    pub fn turn_away(&mut self, turn: &Turn) {
        self.turned_away = true;
        self.refuse(&Error::Unavailable("too many connections".into()), turn);
    }

    /// When something has to happen.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.is_open())
    }

    /// The socket may have something to read; `ended` when its end was seen.
    pub fn note_readable(&mut self, ended: bool) {
        self.readable = true;
        self.ended |= ended;
    }

    /// Does all that can be done without waiting.
    pub fn advance(&mut self, slot: u32, turn: &mut Turn) -> Next {
        for _ in 0..STEPS_PER_TURN {
            let next = match self.phase {
                _ if !self.is_open() => Some(Next::Wait),
                Phase::Working => Some(Next::Wait),
                Phase::Idle | Phase::Head | Phase::Body => self.read(slot, turn),
                Phase::Writing(then) => self.write(slot, then, turn),
                // Without unread bytes the socket closes in peace.
                Phase::Closing if self.readable || !self.input.is_empty() => self.linger(turn),
                Phase::Closing => Some(Next::Close),
                Phase::Lingering(left) => self.discard(left, turn),
            };
            if let Some(next) = next {
                return next;
            }
        }
        match self.phase {
            Phase::Working => Next::Wait,
            _ => Next::Again,
        }
    }

    /// Ends what has taken too long. Only to be called when the deadline has passed.
    pub fn expire(&mut self, slot: u32, turn: &mut Turn) -> Next {
        match self.phase {
            Phase::Head | Phase::Body => self.refuse(&Error::RequestTimeout, turn),
            Phase::Working => {
                let error = Error::Unavailable("a request was not answered in time".into());
                self.refuse(&error, turn);
            }
            Phase::Idle => return self.close_if_idle(slot, turn),
            _ => return Next::Close,
        }
        self.advance(slot, turn)
    }

    /// Looks for a request once more, and has the connection closed if there is none. Only to be called
    /// when there was none, or the last one was refused.
    pub fn close_if_idle(&mut self, slot: u32, turn: &mut Turn) -> Next {
        if self.phase != Phase::Idle {
            return Next::Close;
        }
        self.readable = true;
        match self.advance(slot, turn) {
            Next::Wait if self.phase == Phase::Idle => Next::Close,
            next => next,
        }
    }

    fn read(&mut self, slot: u32, turn: &mut Turn) -> Option<Next> {
        if self.phase == Phase::Idle && !self.input.is_empty() {
            self.take_input(slot, turn);
            return None;
        }
        if !self.readable {
            return Some(match (self.phase, turn.stopping) {
                (Phase::Idle, true) => Next::Close,
                _ => Next::Wait,
            });
        }
        let scratch = mem::take(&mut turn.scratch);
        let count = match self.receive(scratch) {
            Ok(0) => Some(Next::Close),
            Ok(count) if self.input.is_empty() => {
                let used = self.take(&scratch[..count], slot, turn);
                self.input.extend_from_slice(&scratch[used..count]);
                None
            }
            Ok(count) => {
                self.input.extend_from_slice(&scratch[..count]);
                self.take_input(slot, turn);
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(_) => Some(Next::Close),
        };
        turn.scratch = scratch;
        count
    }

    /// Reads once. With edge triggering the socket has to be read until it is known to be empty; a short
    /// read says so as well as a failing one, unless the end has already been announced.
    pub(super) fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        let stream = self.stream.as_mut().expect("only open connections read");
        loop {
            let result = stream.read(scratch);
            match &result {
                Ok(count) => self.readable = *count == scratch.len() || self.ended,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => self.readable = false,
            }
            return result;
        }
    }

    fn take_input(&mut self, slot: u32, turn: &mut Turn) {
        let input = mem::take(&mut self.input);
        let at = mem::take(&mut self.at);
        let used = at + self.take(&input[at..], slot, turn);
        if used < input.len() && self.is_open() && !matches!(self.phase, Phase::Writing(_)) {
            self.input = input;
            self.at = used;
            // Not at every request of a pipelined batch: that would be quadratic.
            if self.phase != Phase::Working {
                self.input.drain(..mem::take(&mut self.at));
            }
        }
    }

    /// Shows bytes to the framing; returns how many were used.
    fn take(&mut self, bytes: &[u8], slot: u32, turn: &mut Turn) -> usize {
        let seat = Slot::new(slot, self.generation);
        let mut used = 0;
        loop {
            let start = turn.batch.len();
            let fresh = &bytes[used..];
            // Known before the head is whole, so that a refusal of it heeds that too.
            if self.framing.stage(0) != Stage::Body {
                self.head_only = fresh.starts_with(b"HEAD ");
            }
            let (count, step) = self.framing.advance(fresh, turn.limits, seat, turn.batch);
            used += count;
            match step {
                Step::More => {
                    let phase = match self.framing.stage(bytes.len() - used) {
                        Stage::Start => Phase::Idle,
                        Stage::Head => Phase::Head,
                        Stage::Body => Phase::Body,
                    };
                    self.enter(phase, turn);
                    return used;
                }
                Step::Continue => {
                    // If so little does not fit, the client has not read earlier answers; it gets no more.
                    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
                    if !matches!(self.send(interim), Ok(sent) if sent == interim.len()) {
                        self.give_up();
                        return bytes.len();
                    }
                }
                Step::Whole(traits) => {
                    self.head_only = traits.head_only;
                    self.persistence = Some(traits.persistence);
                    self.enter(Phase::Working, turn);
                    if let Err(why) = turn.pipe.enter() {
                        turn.batch.truncate(start);
                        self.refuse(&Error::Unavailable(why.into()), turn);
                        return bytes.len();
                    }
                    return used;
                }
                Step::Refused(error) => {
                    self.refuse(&error, turn);
                    return bytes.len();
                }
            }
        }
    }

    /// A deadline is absolute: staying in a phase does not move it.
    fn enter(&mut self, phase: Phase, turn: &Turn) {
        if self.phase != phase {
            self.phase = phase;
            self.deadline = Some(
                turn.now
                    + match phase {
                        Phase::Head => turn.limits.head_timeout,
                        Phase::Body => turn.limits.body_timeout,
                        Phase::Working => turn.limits.request_timeout,
                        _ => turn.limits.idle_timeout,
                    },
            );
        }
    }
}
