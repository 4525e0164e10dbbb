//! The way of an answer: from a worker straight to the client's socket.
//!
//! Owns what a worker may do with a request, which it names by its [`Slot`]. A worker holds the lock of one slot for
//! one non-blocking write at most, so it never waits for a client, nor for another worker.

pub use super::slot::{Delivery, Slot};

use super::{
    connection::{Connection, DOING},
    shared::Shared,
    slots::Slots,
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

/// Sends answers to clients; one for all workers.
#[derive(Clone)]
pub struct Responder {
    pub(super) shared: Arc<Shared>,
    pub(super) slots: Arc<Slots>,
}

impl Responder {
    /// The slot in a request's fragment with the request's id and when it is answered 503, and the memory that is
    /// reserved for the request, to be kept for as long as that is. To be called exactly once for every request that
    /// tiny_http hands out, as soon as it does: this is how the frontend knows how many are in flight.
    ///
    /// No slot when the client does not wait for the answer any more; such a request is to be dropped.
    pub fn claim(&self, fragment: &str) -> (Option<(Slot, RequestId, Instant)>, Option<Reservation>) {
        self.shared.in_flight.remove();
        let Ok(slot) = fragment.parse::<Slot>() else {
            return (None, None);
        };
        let held = self.shared.unclaimed.take(slot);
        let mut entry = self.slots.get(slot.index);
        let connection = entry.as_mut().and_then(|entry| entry.awaiting(slot.generation));
        let claimed = connection.and_then(|connection| connection.in_work(&self.shared.limits));
        (claimed.map(|(client, id, deadline)| (slot.of(client), id, deadline)), held)
    }

    /// Sends the answer to its client, as much of it as the socket takes at once, or returns `None` when it comes too
    /// late (the frontend has answered 503 by then, or the client is gone).
    ///
    /// Never blocks: what the client's socket does not take at once is sent by the event loop. `held` is what is
    /// reserved for the answer; what it keeps is counted in any case.
    pub fn answer(&self, slot: Slot, response: Response, held: Option<Reservation>) -> Option<Delivery> {
        let shared = &*self.shared;
        let mut entry = self.slots.get(slot.index)?;
        let connection = entry.awaiting(slot.generation)?;
        let stopping = shared.stopping.load(Ordering::SeqCst);
        let (delivery, unfinished) = connection.answer(response, held, stopping, &shared.budget);
        drop(entry);
        if unfinished {
            shared.schedule(slot.index);
        }
        Some(delivery)
    }

    /// How many connections there are, by what they are doing; and how many there may be. Looks at each of them.
    pub fn connections(&self) -> (impl Iterator<Item = (&'static str, usize)>, usize) {
        (DOING.into_iter().zip(self.slots.count()), self.shared.limits.max_connections)
    }

    /// Warns that a request is refused, at most once a second for each reason.
    pub fn warn(&self, why: Reason, slot: Slot, id: &RequestId) {
        self.shared.unavailable.warn(Instant::now(), why.text(), Some((slot.peer(), id)));
    }

    /// A worker begins to execute a request, which is not given up for other clients from now on. Whether its client
    /// waits for the answer yet.
    pub fn begin(&self, slot: Slot) -> bool {
        let mut entry = self.slots.get(slot.index);
        let connection = entry.as_mut().and_then(|entry| entry.awaiting(slot.generation));
        connection.map(Connection::begin).is_some()
    }

    /// Whether the client does not wait for the answer any more, so that work on it would be in vain. Cheap.
    pub fn abandoned(&self, slot: Slot) -> bool {
        self.slots.get(slot.index).is_none_or(|mut entry| entry.awaiting(slot.generation).is_none())
    }
}
