//! The table of connections, which the event loop and the workers share. By its functions a worker claims requests,
//! answers them, and wakes the event loop. A worker names a request by its [`Slot`].
//!
//! Owns the locks of the frontend. Each slot has one of its own. A worker holds it for one non-blocking write at most,
//! so it never waits for a client, nor for another worker.

use super::claim::{ClaimedRequest, Slot};
use super::connection::{Connection, Delivery, STATE_LABELS};
use super::warnings::Warnings;
use crate::budget::{Budget, Reservation};
use crate::{config::Limits, http::Response};
use mio::Waker;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The most surplus connections: connections beyond `max_connections`, which only get a 503. Each costs a descriptor
/// and some 200 bytes.
pub const MAX_SURPLUS: usize = 256;

/// The table of connections, with a slot for each client that there may be.
pub struct Slots {
    entries: Box<[Mutex<SlotContents>]>,
    pub(super) budget: Budget,
    /// True if a worker waits for memory: the event loop is to close connections.
    pub(super) shortage: AtomicBool,
    limits: Arc<Limits>,
    waker: Waker,
    /// True once a stop has begun: answers say `Connection: close`, and idle connections are closed.
    pub(super) stopping: AtomicBool,
    /// Slots of connections that a worker has answered and that the event loop is to advance.
    queued_for_loop: Mutex<Vec<u32>>,
    /// How many clients were answered together, until the event loop looks for their next requests.
    pub(super) answered_together: AtomicUsize,
    /// Warnings about clients that are answered 503.
    pub warnings: Arc<Warnings>,
}

/// The contents of a slot.
#[derive(Default)]
pub(super) struct SlotContents {
    pub connection: Option<Box<Connection>>,
    /// True while a ticket that names this slot is on its way to a worker. If a newer request of the slot is complete
    /// by then, the worker claims the newer request, so that request needs no ticket of its own.
    pub has_ticket: bool,
}

impl SlotContents {
    /// Returns the connection of a request, if the request still waits for its answer.
    fn client_of(&mut self, slot: Slot) -> Option<&mut Connection> {
        self.connection.as_deref_mut().filter(|connection| connection.awaits_answer(slot.generation))
    }
}

/// The functions that workers call.
impl Slots {
    /// Claims the requests in the slots that a ticket names: the calling worker is to answer them. Leaves out requests
    /// whose client does not wait any more. Call it exactly once for a ticket, and at once: until then, newer requests
    /// of these slots get no ticket.
    pub fn claim(&self, ticket: &str) -> impl Iterator<Item = ClaimedRequest> {
        ticket.split(['/', ',']).filter_map(|index| {
            let index = index.parse().ok()?;
            let mut entry = self.lock(index)?;
            entry.has_ticket = false;
            entry.connection.as_mut()?.claim(index, &self.limits, &self.budget)
        })
    }

    /// Sends the answer to a request, as much of it as the socket takes at once, and at most `cut_after` bytes of an
    /// answer that is to be cut short. Returns `None` if the answer comes too late: the frontend has answered 503, or
    /// the client is gone.
    ///
    /// Never blocks: the event loop sends the bytes that the socket does not take at once, and counts them. `memory` is
    /// the worker's reservation for the answer.
    pub fn send(
        &self,
        slot: Slot,
        response: Response,
        cut_after: Option<usize>,
        memory: Option<Reservation>,
    ) -> Option<Delivery> {
        let stopping = self.stopping.load(Ordering::SeqCst);
        let (delivery, unfinished) =
            self.lock(slot.index)?.client_of(slot)?.send_answer(response, cut_after, stopping);
        // Releases the worker's reservation: the connection counts the bytes that the socket did not take.
        drop(memory);
        if unfinished {
            self.queue_for_loop(slot.index);
        }
        Some(delivery)
    }

    /// Tells the event loop that so many clients are answered together, so that their next requests get one ticket.
    pub fn announce_answers(&self, clients: usize) {
        self.answered_together.store(clients, Ordering::Relaxed);
    }

    /// Returns the number of connections in each state of [`STATE_LABELS`], and the most connections that there may
    /// be. Locks each slot in turn.
    pub fn count_connections(&self) -> (impl Iterator<Item = (&'static str, usize)>, usize) {
        let mut counts = [0; STATE_LABELS.len()];
        let labels = self.map_connections(|_, connection| Some(connection.label_index()));
        labels.into_iter().for_each(|label| counts[label] += 1);
        (STATE_LABELS.into_iter().zip(counts), self.limits.max_connections)
    }

    /// Returns the number of slots, which is the most requests that can wait for answers.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Marks a request as being executed, so that its connection is not closed for another client. Returns false if
    /// its client does not wait for the answer any more.
    pub fn begin(&self, slot: Slot) -> bool {
        self.lock(slot.index).is_some_and(|mut entry| entry.client_of(slot).map(Connection::begin).is_some())
    }

    /// Returns true if the client of a request does not wait for its answer any more. Locks the slot for a moment.
    pub fn is_abandoned(&self, slot: Slot) -> bool {
        self.lock(slot.index).is_none_or(|mut entry| entry.client_of(slot).is_none())
    }
}

impl Slots {
    /// Creates free slots for as many connections as the limits allow.
    pub(super) fn new(limits: Arc<Limits>, budget: Budget, waker: Waker) -> Slots {
        Slots {
            entries: (0..limits.max_connections + MAX_SURPLUS).map(|_| Mutex::default()).collect(),
            budget,
            shortage: AtomicBool::default(),
            limits,
            waker,
            stopping: AtomicBool::default(),
            queued_for_loop: Mutex::default(),
            answered_together: AtomicUsize::default(),
            warnings: Arc::default(),
        }
    }

    /// Locks a slot, if there is one of that index.
    pub(super) fn lock(&self, index: u32) -> Option<MutexGuard<'_, SlotContents>> {
        Some(self.entries.get(index as usize)?.lock())
    }

    /// Calls `look` with each connection and its index, and collects the results. Locks one slot at a time.
    pub(super) fn map_connections<T>(&self, mut look: impl FnMut(u32, &Connection) -> Option<T>) -> Vec<T> {
        let entries = (0..).zip(&self.entries);
        entries.filter_map(|(index, entry)| look(index, entry.lock().connection.as_deref()?)).collect()
    }

    /// Makes the event loop advance a connection. Only the first of several calls wakes the loop.
    fn queue_for_loop(&self, index: u32) {
        let mut queued_for_loop = self.queued_for_loop.lock();
        queued_for_loop.push(index);
        if queued_for_loop.len() == 1 {
            drop(queued_for_loop);
            self.wake();
        }
    }

    /// Moves the slots of scheduled connections to the end of the list `due`.
    pub(super) fn take_queued(&self, due: &mut Vec<u32>) {
        due.append(&mut self.queued_for_loop.lock());
    }

    /// Makes the event loop close connections for their memory, as a worker waits for some.
    pub(super) fn report_shortage(&self) {
        if !self.shortage.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Makes the event loop begin a stop. Returns at once; a further call changes nothing.
    pub(super) fn begin_stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Ends the event loop's wait for events.
    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("answers may be late, as the frontend cannot be woken ({error}): restart userd");
        }
    }
}
