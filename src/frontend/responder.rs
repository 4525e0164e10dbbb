//! The way of an answer: from a worker straight to the client's socket.
//!
//! Owns what a worker may do with a request, which it names by its [`Slot`]. A worker holds the lock of one slot for
//! one non-blocking write at most, so it never waits for a client, nor for another worker.

pub use super::slots::Slot;

use super::{
    connection::{Connection, DOING, Delivery},
    shared::Shared,
};
use crate::{
    budget::Reservation,
    error::Reason,
    http::{RequestId, Response},
};
use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// A request that a worker has claimed.
pub struct Claimed {
    /// Where it is answered.
    pub slot: Slot,
    pub id: RequestId,
    /// When the frontend answers it 503.
    pub deadline: Instant,
    /// Its memory, to be kept for as long as the request is.
    pub held: Option<Reservation>,
}

/// Sends answers to clients; one for all workers.
#[derive(Clone)]
pub struct Responder {
    pub(super) shared: Arc<Shared>,
}

impl Responder {
    /// Claims the request whose target has this fragment. To be called exactly once for every request that tiny_http
    /// hands out, as soon as it does: this is how the frontend knows how many are in flight.
    ///
    /// `None` if the client does not wait for the answer any more; such a request is to be dropped.
    pub fn claim(&self, fragment: &str) -> Option<Claimed> {
        self.shared.requests.fetch_sub(1, Ordering::Relaxed);
        let slot = fragment.parse::<Slot>().ok()?;
        self.shared.slots.awaiting(slot, |connection| connection.claim(slot, &self.shared.limits)).flatten()
    }

    /// Sends the answer to its client, as much of it as the socket takes at once. Returns `None` if it comes too late:
    /// the frontend has answered 503 by then, or the client is gone.
    ///
    /// Never blocks: the event loop sends the bytes that the client's socket does not take at once, and counts them.
    /// `held` is the worker's reservation for the answer.
    pub fn answer(&self, slot: Slot, response: Response, held: Option<Reservation>) -> Option<Delivery> {
        let stopping = self.shared.stopping.load(Ordering::SeqCst);
        let answer = |connection: &mut Connection| connection.answer(response, stopping);
        let (delivery, unfinished) = self.shared.slots.awaiting(slot, answer)?;
        // The bytes that are left are counted by the connection now.
        drop(held);
        if unfinished {
            self.shared.schedule(slot.index());
        }
        Some(delivery)
    }

    /// Sends the first bytes of an answer, and closes the connection.
    pub fn cut(&self, slot: Slot, response: Response, bytes: usize) {
        if self.shared.slots.awaiting(slot, |connection| connection.cut(response, bytes)).is_some() {
            self.shared.schedule(slot.index());
        }
    }

    /// Counts the connections by what they are doing, and returns how many there may be. Looks at each of them.
    pub fn connections(&self) -> (impl Iterator<Item = (&'static str, usize)>, usize) {
        (DOING.into_iter().zip(self.shared.slots.count()), self.shared.limits.max_connections)
    }

    /// Warns that a request is refused, at most once a second for each reason.
    pub fn warn(&self, why: Reason, slot: Slot, id: &RequestId) {
        self.shared.unavailable.warn(Instant::now(), why.text(), Some((slot.peer(), id)));
    }

    /// Marks a request as being executed, so that it is not given up for other clients. Returns whether its client still
    /// waits for the answer.
    pub fn begin(&self, slot: Slot) -> bool {
        self.shared.slots.awaiting(slot, Connection::begin).is_some()
    }

    /// Returns whether the client does not wait for the answer any more, so that work on it would be in vain. Cheap.
    pub fn abandoned(&self, slot: Slot) -> bool {
        self.shared.slots.awaiting(slot, |_| ()).is_none()
    }
}
