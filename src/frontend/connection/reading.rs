//! One direction of a connection: from bytes on its socket to a request for the workers.

use super::{Action, Connection, Context, InWork, State};
use crate::frontend::{
    http1::{Step, Traits, framing::Framing, head::Echo},
    in_flight::Shared,
    peers::{Client, Peer},
    slot::Slot,
};
use crate::{
    budget::{Budget, Purpose, Reservation},
    cors::Cors,
    error::Error,
    http::{Persistence, RequestId, Response},
    reason::Reason,
};
use std::{
    io::{self, ErrorKind, Read, Write},
    mem,
    net::IpAddr,
};

/// What one connection or one request may hold without being counted, in bytes: nearly all of them do with it.
pub(super) const UNCOUNTED: usize = 1 << 10;

/// Bytes that were read; the first `used` of them are done with.
#[derive(Default)]
pub(super) struct Input {
    bytes: Vec<u8>,
    used: usize,
    held: Option<Reservation>,
}

impl Input {
    pub fn unused(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    pub fn is_empty(&self) -> bool {
        self.unused().is_empty()
    }

    /// Counts what it holds; whether there is memory for that.
    fn reserve(&mut self, budget: &Budget) -> bool {
        match self.bytes.capacity() {
            bytes if bytes <= UNCOUNTED => {
                self.held = None;
                true
            }
            bytes => reserve(&mut self.held, Purpose::Head, bytes, budget),
        }
    }
}

/// Reserves so much; whether there is memory for that.
fn reserve(held: &mut Option<Reservation>, purpose: Purpose, bytes: usize, budget: &Budget) -> bool {
    match held {
        Some(held) if bytes <= held.bytes() => {
            held.set(bytes);
            true
        }
        Some(held) => held.try_grow(bytes),
        None => {
            *held = budget.try_reserve(purpose, bytes);
            held.is_some()
        }
    }
}

/// A request of so many bytes is complete: it takes what it has reserved with it.
fn pass_on(slot: Slot, bytes: usize, held: &mut Option<Reservation>, shared: &Shared) -> Result<(), Reason> {
    match bytes > UNCOUNTED {
        true if !reserve(held, Purpose::Body, bytes, &shared.budget) => return Err(no_memory(shared)),
        true => {}
        false => *held = None,
    }
    shared.in_flight.add()?;
    if let Some(held) = held.take() {
        shared.unclaimed.add(slot, held);
    }
    Ok(())
}

fn no_memory(shared: &Shared) -> Reason {
    // Answers that are not taken may be what holds it.
    shared.budget.report_shortage();
    Reason::NoMemory
}

impl Connection {
    pub(super) fn read(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        if let State::Idle { input, .. } = &mut self.state
            && !input.is_empty()
        {
            let input = mem::take(input);
            self.parse(Framing::default(), input, None, index, context);
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
                self.awaits_memory(&context.shared.limits).map(|_| Action::Wait)
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
    pub(super) fn take_in(&mut self, fresh: &[u8], index: u32, context: &mut Context) {
        let (mut framing, mut input, mut held) = match &mut self.state {
            State::Head { framing, input, .. } => (mem::take(framing), mem::take(input), None),
            State::Body { framing, input, held, .. } => (mem::take(framing), mem::take(input), held.take()),
            _ => (Framing::default(), Input::default(), None),
        };
        if !input.is_empty() {
            input.bytes.extend_from_slice(fresh);
            return self.parse(framing, input, held, index, context);
        }
        // A request that arrives in one piece needs no buffer.
        let (used, step) = self.frame(&mut framing, fresh, &mut held, index, context);
        let input = Input { bytes: fresh[used..].to_vec(), ..Input::default() };
        self.settle(step, framing, input, held, context);
    }

    fn parse(
        &mut self,
        mut framing: Framing,
        mut input: Input,
        mut held: Option<Reservation>,
        index: u32,
        context: &mut Context,
    ) {
        let (used, step) = self.frame(&mut framing, input.unused(), &mut held, index, context);
        input.used += used;
        self.settle(step, framing, input, held, context);
    }

    /// Shows bytes to the framing until they make a request, or do not suffice. Returns how many were used. `held` is
    /// what the request has reserved: the most that it may become, from the end of its head on.
    fn frame(
        &mut self,
        framing: &mut Framing,
        bytes: &[u8],
        held: &mut Option<Reservation>,
        index: u32,
        context: &mut Context,
    ) -> (usize, Parsed) {
        let slot = Slot::new(index, self.generation);
        let shared = context.shared;
        let mut used = 0;
        loop {
            let to_tiny_http = context.to_tiny_http.tail();
            let start = to_tiny_http.len();
            let (count, step) =
                framing.advance(&bytes[used..], &shared.limits, context.served, slot, to_tiny_http);
            used += count;
            if held.is_none()
                && let Some(most) = framing.most(&shared.limits)
                && !reserve(held, Purpose::Body, most, &shared.budget)
            {
                if matches!(step, Step::Body) && !context.last_try {
                    return (used, Parsed::Body);
                }
                let head_only = framing.head_only(bytes);
                let why = Error::Busy(no_memory(shared));
                return (used, Parsed::Refused(why, head_only, framing.take_echo()));
            }
            let parsed = match step {
                Step::Head => Parsed::Head,
                Step::Body => Parsed::Body,
                Step::Continue => {
                    // If so little does not fit, the client has not read earlier answers; it gets no more.
                    let interim = b"HTTP/1.1 100 Continue\r\n\r\n";
                    if matches!(self.stream.write(interim), Ok(sent) if sent == interim.len()) {
                        continue;
                    }
                    Parsed::Abandoned
                }
                Step::Complete(traits) => {
                    let Echo { id, cors } = framing.take_echo();
                    let id = id.unwrap_or_else(|| context.ids.make(context.now));
                    let client = Client(client(&traits, self.peer));
                    let parsed = match answer_at_once(&traits, &id, client, context) {
                        Some(answer) => Parsed::Answered(traits, id, cors, answer),
                        None => {
                            let length = context.to_tiny_http.since(start).len();
                            match pass_on(slot, length, held, shared) {
                                Ok(()) => return (used, Parsed::Complete(traits, id, cors)),
                                Err(why) => {
                                    let echo = Echo { id: Some(id), cors };
                                    Parsed::Refused(Error::Busy(why), traits.head_only, echo)
                                }
                            }
                        }
                    };
                    context.to_tiny_http.truncate(start);
                    parsed
                }
                Step::Refused { error, head_only } => Parsed::Refused(error, head_only, framing.take_echo()),
            };
            return (used, parsed);
        }
    }

    /// Enters the state that follows from what was parsed. A state that it is in already keeps its deadline.
    fn settle(
        &mut self,
        mut parsed: Parsed,
        mut framing: Framing,
        mut input: Input,
        held: Option<Reservation>,
        context: &mut Context,
    ) {
        let now = context.now;
        match parsed {
            // Moving the rest to the front at every request of many would be quadratic, so that waits.
            Parsed::Complete(..) => {}
            _ => drop(input.bytes.drain(..mem::take(&mut input.used))),
        }
        if input.is_empty() {
            input = Input::default();
        }
        if !input.reserve(&context.shared.budget) {
            let why = Error::Busy(no_memory(context.shared));
            match &mut parsed {
                // Requests behind this one are not answered, which the client sees by the end of the connection.
                Parsed::Complete(traits, ..) | Parsed::Answered(traits, ..) => {
                    traits.persistence = Persistence::Close;
                }
                Parsed::Head | Parsed::Body => {
                    let head_only = framing.head_only(input.unused());
                    parsed = Parsed::Refused(why, head_only, framing.take_echo());
                }
                Parsed::Refused(..) | Parsed::Abandoned => {}
            }
            input = Input::default();
        }
        self.state = match (parsed, &self.state) {
            (Parsed::Head, &State::Head { since, .. }) => State::Head { since, framing, input },
            (Parsed::Head, _) => State::Head { since: now, framing, input },
            (Parsed::Body, &State::Body { since, .. }) => State::Body { since, framing, input, held },
            (Parsed::Body, _) => State::Body { since: now, framing, input, held },
            (Parsed::Complete(traits, id, cors), _) => {
                State::Working { since: now, request: self.in_work(traits, id, cors), input }
            }
            (Parsed::Answered(traits, id, cors, answer), _) => {
                let request = self.in_work(traits, id, cors);
                self.state = State::Working { since: now, request, input };
                // The event loop goes on with this connection in any case.
                self.answer(answer, None, context.stopping, &context.shared.budget);
                return;
            }
            (Parsed::Refused(error, head_only, echo), _) => {
                return self.refuse_as(&error, head_only, echo, context);
            }
            (Parsed::Abandoned, _) => return self.give_up(),
        };
    }

    fn in_work(&self, traits: Traits, id: RequestId, cors: Cors) -> InWork {
        InWork {
            head_only: traits.head_only,
            persistence: traits.persistence,
            client: client(&traits, self.peer),
            id,
            cors,
            begun: false,
        }
    }
}

/// The address of a request's client: the connection's, or the one that a trusted proxy names.
fn client(traits: &Traits, peer: Peer) -> Option<IpAddr> {
    traits.client.filter(|_| peer.trusted).or(peer.address)
}

/// The answer to a request that needs no worker.
fn answer_at_once(traits: &Traits, id: &RequestId, client: Client, context: &Context) -> Option<Response> {
    let (method, path) = traits.at_once?;
    let answer = (context.answer_at_once)(method, path)?;
    let (method, status) = (method.name(), answer.status);
    log::debug!(
        method = method, path = path, status = status, client:% = client, request_id:% = id;
        "{method} {path} {status} at once"
    );
    Some(answer)
}

/// What bytes turned out to be.
enum Parsed {
    Head,
    Body,
    Complete(Traits, RequestId, Cors),
    /// Complete, and answered without a worker.
    Answered(Traits, RequestId, Cors, Response),
    /// Whether it was a HEAD request, and what the refusal repeats of it.
    Refused(Error, bool, Echo),
    /// The client does not read: nothing is worth sending or reading.
    Abandoned,
}
