//! One direction of a connection: from bytes on its socket to a request for the workers.

use super::{
    connection::{Action, Connection, Context, InWork, State},
    http1::framing::{Framing, Step, Traits},
    responder::Slot,
};
use crate::{error::Error, http::Response, request_id::RequestId};
use memchr::{memchr, memchr2};
use std::{
    io::{self, ErrorKind, Read},
    mem,
};

/// Bytes that were read; the first `used` of them are done with.
#[derive(Default)]
pub(super) struct Input {
    bytes: Vec<u8>,
    used: usize,
}

impl Input {
    pub fn unused(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    pub fn is_empty(&self) -> bool {
        self.unused().is_empty()
    }
}

impl Connection {
    pub(super) fn read(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        if let State::Idle { input, .. } = &mut self.state
            && !input.is_empty()
        {
            let input = mem::take(input);
            self.parse(Framing::default(), input, index, context);
            return None;
        }
        if !self.readable {
            return Some(match &self.state {
                State::Idle { .. } if context.stopping => Action::Close,
                _ => Action::Wait,
            });
        }
        let scratch = mem::take(&mut context.scratch);
        let action = match self.receive(scratch) {
            Ok(0) => Some(Action::Close),
            Ok(count) => {
                self.take_in(&scratch[..count], index, context);
                None
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(_) => Some(Action::Close),
        };
        context.scratch = scratch;
        action
    }

    /// Reads once. With edge triggering the socket has to be read until it is known to be empty; a short read says so
    /// as well as a failing one, unless the end has already been announced.
    pub(super) fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
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

    /// Takes bytes that were just read.
    fn take_in(&mut self, fresh: &[u8], index: u32, context: &mut Context) {
        let (mut framing, mut input) = match &mut self.state {
            State::Head { framing, input, .. } | State::Body { framing, input, .. } => {
                (mem::take(framing), mem::take(input))
            }
            _ => (Framing::default(), Input::default()),
        };
        if !input.is_empty() {
            input.bytes.extend_from_slice(fresh);
            return self.parse(framing, input, index, context);
        }
        // A request that arrives in one piece needs no buffer.
        let (used, step) = self.frame(&mut framing, fresh, index, context);
        let input = Input { bytes: fresh[used..].to_vec(), used: 0 };
        self.settle(step, framing, input, context);
    }

    fn parse(&mut self, mut framing: Framing, mut input: Input, index: u32, context: &mut Context) {
        let (used, step) = self.frame(&mut framing, input.unused(), index, context);
        input.used += used;
        self.settle(step, framing, input, context);
    }

    /// Shows bytes to the framing until they make a request, or do not suffice. Returns how many were used.
    fn frame(
        &mut self,
        framing: &mut Framing,
        bytes: &[u8],
        index: u32,
        context: &mut Context,
    ) -> (usize, Parsed) {
        let slot = Slot::new(index, self.generation);
        let shared = context.shared;
        let mut used = 0;
        loop {
            let start = context.outgoing.len();
            let (count, step) = framing.advance(&bytes[used..], &shared.limits, slot, context.outgoing);
            used += count;
            let parsed = match step {
                Step::Head => Parsed::Head,
                Step::Body => Parsed::Body,
                Step::Continue => {
                    // If so little does not fit, the client has not read earlier answers; it gets no more.
                    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
                    if matches!(self.send(interim), Ok(sent) if sent == interim.len()) {
                        continue;
                    }
                    Parsed::Abandoned
                }
                Step::Complete(traits) => {
                    let id = framing.take_request_id();
                    let id = id.unwrap_or_else(|| context.ids.make(context.now));
                    let parsed = match answer_immediately(start, &id, context) {
                        Some(answer) => Parsed::Answered(traits, id, answer),
                        None => match shared.in_flight.add() {
                            Ok(()) => return (used, Parsed::Complete(traits, id)),
                            Err(why) => Parsed::Refused(Error::Busy(why), traits.head_only, Some(id)),
                        },
                    };
                    context.outgoing.truncate(start);
                    parsed
                }
                Step::Refused { error, head_only } => {
                    Parsed::Refused(error, head_only, framing.take_request_id())
                }
            };
            return (used, parsed);
        }
    }

    /// Enters the state that follows from what was parsed. A state that it is in already keeps its deadline.
    fn settle(&mut self, parsed: Parsed, framing: Framing, mut input: Input, context: &mut Context) {
        let now = context.now;
        match parsed {
            // Moving the rest to the front at every request of many would be quadratic, so that waits.
            Parsed::Complete(..) => {}
            _ => drop(input.bytes.drain(..mem::take(&mut input.used))),
        }
        if input.is_empty() {
            input = Input::default();
        }
        self.state = match (parsed, &self.state) {
            (Parsed::Head, &State::Head { since, .. }) => State::Head { since, framing, input },
            (Parsed::Head, _) => State::Head { since: now, framing, input },
            (Parsed::Body, &State::Body { since, .. }) => State::Body { since, framing, input },
            (Parsed::Body, _) => State::Body { since: now, framing, input },
            (Parsed::Complete(traits, id), _) => {
                State::Working { since: now, request: self.in_work(traits, id), input }
            }
            (Parsed::Answered(traits, id, answer), _) => {
                let request = self.in_work(traits, id);
                self.state = State::Working { since: now, request, input };
                // The event loop goes on with this connection in any case.
                self.answer(&answer, context.stopping);
                return;
            }
            (Parsed::Refused(error, head_only, id), _) => {
                return self.refuse_as(&error, head_only, id, context);
            }
            (Parsed::Abandoned, _) => return self.give_up(),
        };
    }

    fn in_work(&self, traits: Traits, id: RequestId) -> InWork {
        let named = traits.client.filter(|_| self.peer.trusted);
        InWork {
            head_only: traits.head_only,
            persistence: traits.persistence,
            client: named.or(self.peer.address),
            id,
        }
    }
}

/// The answer to the request that was appended to `outgoing` at `start`, if it is one that needs no worker.
fn answer_immediately(start: usize, id: &RequestId, context: &Context) -> Option<Response> {
    let line = &context.outgoing[start..];
    let (method, rest) = line.split_at(memchr(b' ', line)?);
    let rest = rest.get(1..)?;
    let path = &rest[..memchr2(b'?', b'#', rest)?];
    let answer = (context.immediate)(method, path)?;
    let (method, path) = (String::from_utf8_lossy(method), String::from_utf8_lossy(path));
    let status = answer.status;
    log::debug!(
        method = method.as_ref(), path = path.as_ref(), status = status, request_id:% = id;
        "{method} {path} {status} at once"
    );
    Some(answer)
}

/// What bytes turned out to be.
enum Parsed {
    Head,
    Body,
    Complete(Traits, RequestId),
    /// Complete, and answered without a worker.
    Answered(Traits, RequestId, Response),
    /// Whether it was a HEAD request, and the id that its client gave it.
    Refused(Error, bool, Option<RequestId>),
    /// The client does not read: nothing is worth sending or reading.
    Abandoned,
}
