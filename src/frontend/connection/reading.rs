//! One direction of a connection: from bytes on its socket to a request for the workers.

use super::{Action, Connection, Context, InWork, State, counted};
use crate::frontend::{
    http1::{Parsed, framing::Framing, head::Echo},
    peers::Client,
    slots::Slot,
};
use crate::{
    error::Error,
    http::{Persistence, RequestId, Response},
};
use nix::libc::MSG_NOSIGNAL;
use std::{
    io::{self, ErrorKind, Read},
    mem,
};

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Connection {
    pub(super) fn read(&mut self, index: u32, context: &mut Context) -> Option<Action> {
        if matches!(&self.state, State::Idle { input, .. } if !input.is_empty()) {
            self.take_in(&[], index, context);
            return None;
        }
        if !self.readable {
            let is_over = context.stopping && matches!(self.state, State::Idle { .. });
            return Some(if is_over { Action::Close } else { Action::Wait });
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

    /// Takes bytes that were just read, behind those that were read before, and enters the state that follows. A state
    /// that it is in already keeps its deadline.
    fn take_in(&mut self, fresh: &[u8], index: u32, context: &mut Context) {
        let (shared, now) = (context.shared, context.now);
        let (mut framing, mut input, mut began) = match mem::replace(&mut self.state, State::Closing) {
            State::Arriving { since, framing, input } => (framing, input, Some(since)),
            State::Idle { input, .. } => (Framing::default(), input, None),
            other => return self.state = other,
        };
        let was_in_body = framing.is_in_body();
        let slot = Slot::new(index, self.generation);
        let to_tiny_http = context.to_tiny_http.tail();
        let (before, mut used) = (to_tiny_http.len(), 0);
        // A request that arrives in one piece needs no buffer.
        let bytes = match input.is_empty() {
            true => fresh,
            false => {
                input.extend_from_slice(fresh);
                &input
            }
        };
        let served = context.resources.served;
        let step = framing.advance(bytes, &mut used, &shared.limits, served, slot, to_tiny_http);
        let length = to_tiny_http.len() - before;
        let mut input = bytes[used..].to_vec();
        if let Ok(Parsed::Complete(mut traits)) = step {
            if counted(input.len()) > shared.budget.available() {
                // Requests behind this one are not answered, which the client sees by the end of the connection.
                traits.persistence = Persistence::Close;
                input = Vec::new();
            }
            self.held.set(counted(input.len()));
            let Echo { id, cors, head_only } = framing.take_echo();
            let id = id.unwrap_or_else(RequestId::new);
            let request = InWork { traits, id, cors, head_only, held: None, begun: false };
            self.state = State::Working { since: now, request, input };
            return self.pass_on(length, context);
        }
        if framing.is_in_body() != was_in_body {
            began = None;
        }
        // All of a body is counted before it arrives.
        let memory = counted(input.len()) + framing.most(&shared.limits).map_or(0, counted);
        context.grown |= memory > self.held.bytes();
        self.held.set(memory);
        let fits = shared.budget.held() <= shared.budget.limit();
        self.state = State::Arriving { since: began.unwrap_or(now), framing, input };
        match step {
            Err(error) => self.refuse(&error, context),
            // If so little does not fit, the client has not read earlier answers; it gets no more.
            Ok(Parsed::Continue)
                if fits
                    && self.stream.send_with_flags(CONTINUE, MSG_NOSIGNAL).ok() != Some(CONTINUE.len()) =>
            {
                self.give_up();
            }
            Ok(_) => {}
        }
    }

    /// Answers a request that is complete at once, or passes it on. `length`: its bytes, the last ones of those for
    /// tiny_http.
    fn pass_on(&mut self, length: usize, context: &mut Context) {
        let shared = context.shared;
        if let Some(answer) = self.answer_at_once(context) {
            context.to_tiny_http.take_back(length);
            // The event loop goes on with this connection in any case.
            self.answer(answer, context.stopping);
        } else if let Err(why) = shared.add_request() {
            context.to_tiny_http.take_back(length);
            self.refuse(&Error::Busy(why), context);
        } else if counted(length) > 0
            && let State::Working { request, .. } = &mut self.state
        {
            request.held = Some(shared.budget.count(length));
            (context.grown, context.passed) = (true, Some(length));
        }
    }

    /// Returns the answer to a request that needs no worker.
    fn answer_at_once(&self, context: &Context) -> Option<Response> {
        let State::Working { request, .. } = &self.state else {
            return None;
        };
        let (method, path) = request.traits.at_once?;
        let answer = (context.resources.answer_at_once)(method, path)?;
        let (method, status) = (method.name(), answer.status);
        log::debug!(
            method = method, path = path, status = status, client:% = Client(request.client(self.peer)),
            request_id:% = request.id;
            "{method} {path} {status} at once"
        );
        Some(answer)
    }
}
