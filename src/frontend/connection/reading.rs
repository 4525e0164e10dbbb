//! One direction of a connection: from bytes on its socket to a request for the workers.

use super::{Action, Connection, Context, InWork, State};
use crate::frontend::{
    http1::{Parsed, framing::Framing, head::Echo},
    peers::{Client, Peer},
    shared::Shared,
    slot::Slot,
};
use crate::{
    budget::{Budget, Purpose, Reservation},
    error::{Error, Reason},
    http::{Persistence, Response},
};
use std::{
    io::{self, ErrorKind, Read, Write},
    mem,
};

/// What one connection or one request may hold without being counted, in bytes: nearly all of them do with it.
pub(super) const UNCOUNTED: usize = 1 << 10;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

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

    /// Adds bytes that were read; all that are to be used. Moving the rest to the front at every request of many would
    /// be quadratic, so that is done where there are more.
    fn extend(&mut self, fresh: &[u8]) -> &[u8] {
        if !fresh.is_empty() {
            self.bytes.drain(..mem::take(&mut self.used));
            self.bytes.extend_from_slice(fresh);
        }
        self.unused()
    }

    /// Counts what it holds, which is nothing where all is used. Whether there is memory for that; else it is dropped.
    fn reserve(&mut self, budget: &Budget) -> bool {
        if self.is_empty() {
            *self = Input::default();
        }
        let bytes = self.bytes.capacity();
        if bytes <= UNCOUNTED {
            self.held = None;
            return true;
        }
        let fits = reserve(&mut self.held, Purpose::Head, bytes, budget);
        if !fits {
            *self = Input::default();
        }
        fits
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

fn no_memory(shared: &Shared) -> Reason {
    // Answers that are not taken may be what holds it.
    shared.budget.report_shortage();
    Reason::NoMemory
}

impl Connection {
    pub(super) fn read(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        if matches!(&self.state, State::Idle { input, .. } if !input.is_empty()) {
            self.take_in(&[], index, context);
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

    /// Takes bytes that were just read, behind those that were read before, and enters the state that follows. A state
    /// that it is in already keeps its deadline.
    pub(super) fn take_in(&mut self, fresh: &[u8], index: u32, context: &mut Context) {
        let (shared, mut since) = (context.shared, context.now);
        let (mut framing, mut input, mut held) = match &mut self.state {
            State::Arriving { framing, input, held, .. } => {
                (mem::take(framing), mem::take(input), held.take())
            }
            State::Idle { input, .. } => (Framing::default(), mem::take(input), None),
            _ => return,
        };
        let was_in_body = framing.is_in_body();
        let slot = Slot::new(index, self.generation);
        let to_tiny_http = context.to_tiny_http.tail();
        let before = to_tiny_http.len();
        // A request that arrives in one piece needs no buffer.
        let bytes = match input.is_empty() {
            true => fresh,
            false => input.extend(fresh),
        };
        let mut used = 0;
        let step =
            framing.advance(bytes, &mut used, &shared.limits, context.resources.served, slot, to_tiny_http);
        let length = to_tiny_http.len() - before;
        match input.is_empty() {
            true => input.bytes = fresh[used..].to_vec(),
            false => input.used += used,
        }
        let fits = input.reserve(&shared.budget);
        let awaits_continue = matches!(step, Ok(Parsed::Continue));
        let refused = match step {
            Ok(Parsed::Complete(mut traits)) => {
                if !fits {
                    // Requests behind this one are not answered, which the client sees by the end of the connection.
                    traits.persistence = Persistence::Close;
                }
                let Echo { id, cors, head_only } = framing.take_echo();
                let id = id.unwrap_or_else(|| context.ids.make(context.now));
                let request = InWork { traits, id, cors, head_only, begun: false };
                self.state = State::Working { since, request, input };
                return self.pass_on(slot, length, held, context);
            }
            Err(error) => Some(error),
            Ok(_) if !fits => Some(Error::Busy(no_memory(shared))),
            Ok(Parsed::Head) => None,
            Ok(Parsed::Body | Parsed::Continue) => {
                let most = framing.most(&shared.limits).unwrap_or_default();
                let fits = held.is_some() || reserve(&mut held, Purpose::Body, most, &shared.budget);
                let may_wait = !awaits_continue && !context.last_try;
                (!fits && !may_wait).then(|| Error::Busy(no_memory(shared)))
            }
        };
        if let State::Arriving { since: began, .. } = self.state
            && framing.is_in_body() == was_in_body
        {
            since = began;
        }
        self.state = State::Arriving { since, framing, input, held };
        match refused {
            Some(error) => self.refuse(&error, context),
            // If so little does not fit, the client has not read earlier answers; it gets no more.
            None if awaits_continue && self.stream.write(CONTINUE).ok() != Some(CONTINUE.len()) => {
                self.give_up()
            }
            None => {}
        }
    }

    /// Answers a request that is complete at once, or passes it on with what it has reserved. `length`: its bytes, the
    /// last ones of those for tiny_http.
    fn pass_on(&mut self, slot: Slot, length: usize, mut held: Option<Reservation>, context: &mut Context) {
        let State::Working { request, .. } = &self.state else {
            return;
        };
        let shared = context.shared;
        if let Some(answer) = answer_at_once(request, self.peer, context) {
            context.to_tiny_http.take_back(length);
            // The event loop goes on with this connection in any case.
            self.answer(answer, None, context.stopping, &shared.budget);
            return;
        }
        let counted = length > UNCOUNTED;
        let passed = match counted && !reserve(&mut held, Purpose::Body, length, &shared.budget) {
            true => Err(no_memory(shared)),
            false => shared.in_flight.add(),
        };
        match passed {
            Err(why) => {
                context.to_tiny_http.take_back(length);
                self.refuse(&Error::Busy(why), context);
            }
            Ok(()) => {
                if let Some(held) = held.filter(|_| counted) {
                    shared.unclaimed.add(slot, held);
                }
            }
        }
    }
}

/// The answer to a request that needs no worker.
fn answer_at_once(request: &InWork, peer: Peer, context: &Context) -> Option<Response> {
    let (method, path) = request.traits.at_once?;
    let answer = (context.resources.answer_at_once)(method, path)?;
    let (method, status) = (method.name(), answer.status);
    log::debug!(
        method = method, path = path, status = status, client:% = Client(request.client(peer)),
        request_id:% = request.id;
        "{method} {path} {status} at once"
    );
    Some(answer)
}
