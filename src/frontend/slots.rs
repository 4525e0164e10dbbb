//! The table of connections, which the event loop and the workers share. A worker uses it to claim requests, to answer
//! them by their [`RequestHandle`], and to wake the event loop.
//!
//! Owns the locks of the frontend, one for each slot. A worker holds a lock for one non-blocking write at most, so it
//! never waits for a client, nor for another worker.

use super::busy_warnings::BusyWarnings;
use super::claimed_request::{ClaimedRequest, RequestHandle};
use super::connection::{Connection, Delivery, STATE_LABELS};
use crate::budget::{MemoryBudget, Reservation};
use crate::{config::Limits, http::Response};
use mio::Waker;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The most surplus clients: clients beyond `max_connections`, which only get a 503. Each costs a descriptor and some
/// 200 bytes.
pub const MAX_SURPLUS_CLIENTS: usize = 256;

/// The table of connections, with a slot for each client that may connect.
pub struct Slots {
    entries: Box<[Mutex<SlotContents>]>,
    pub(super) budget: MemoryBudget,
    /// True if a worker waits for memory, which the event loop is to free by closing connections.
    pub(super) is_memory_short: AtomicBool,
    pub limits: Arc<Limits>,
    waker: Waker,
    /// True once a stop has begun: answers say `Connection: close`, and idle connections are closed.
    pub(super) is_stopping: AtomicBool,
    /// Slots of connections that workers have answered, and that the event loop is to advance next.
    slots_for_loop: Mutex<Vec<u32>>,
    /// How many clients were answered together last. Each is likely to send its next request at once, so that the event
    /// loop may wait a moment for as many requests. The event loop sets it to 0 when it decides whether to wait.
    pub(super) expected_requests: AtomicUsize,
    /// Logs that clients are answered 503: at most one line a second for each reason.
    pub warnings: Arc<BusyWarnings>,
}

/// A slot of the table: the connection in it, if any, and its ticket.
#[derive(Default)]
pub(super) struct SlotContents {
    pub connection: Option<Box<Connection>>,
    /// True while a ticket that names this slot is on its way to a worker. That worker claims the request that it finds
    /// in the slot, even if the request is newer than the ticket, so a newer request needs no ticket of its own.
    pub has_pending_ticket: bool,
}

impl SlotContents {
    /// Returns the connection of a request; `None` if the request does not wait for its answer any more.
    fn connection_of(&mut self, handle: RequestHandle) -> Option<&mut Connection> {
        self.connection.as_deref_mut().filter(|connection| connection.awaits_answer(handle.request_number))
    }
}

/// The functions that workers call.
impl Slots {
    /// Claims the requests in the slots that a ticket names (`/3,17,`): the calling worker is to answer them. Leaves
    /// out slots whose request is gone. Call it exactly once for each ticket, and without delay: until then, newer
    /// requests of these slots get no ticket.
    pub fn claim(&self, ticket: &str) -> impl Iterator<Item = ClaimedRequest> {
        ticket.split(['/', ',']).filter_map(|slot| {
            let slot = slot.parse().ok()?;
            let mut entry = self.lock(slot)?;
            entry.has_pending_ticket = false;
            entry.connection.as_mut()?.claim(slot, &self.limits, &self.budget)
        })
    }

    /// Sends the answer to a request, as much of it as the socket takes in one go, and only `cut_at_byte` bytes if a
    /// test cuts the answer short. Returns `None` if the answer comes too late: the frontend has answered 503, or
    /// the client is gone.
    ///
    /// Never blocks: the event loop sends the remaining bytes later. `memory` is the worker's reservation for the
    /// answer, which ends here: the connection counts the remaining bytes.
    pub fn send(
        &self,
        handle: RequestHandle,
        response: Response,
        cut_at_byte: Option<usize>,
        memory: Option<Reservation>,
    ) -> Option<Delivery> {
        let is_stopping = self.is_stopping.load(Ordering::SeqCst);
        let (delivery, unfinished) =
            self.lock(handle.slot)?.connection_of(handle)?.send_answer(response, cut_at_byte, is_stopping);
        // Releases the worker's reservation, because the connection has counted the bytes that the socket did not take.
        drop(memory);
        if unfinished {
            self.queue_for_loop(handle.slot);
        }
        Some(delivery)
    }

    /// Tells the event loop that `client_count` clients are answered together, so that it waits for their next requests
    /// and sends one ticket for all of them.
    pub fn expect_requests(&self, client_count: usize) {
        self.expected_requests.store(client_count, Ordering::Relaxed);
    }

    /// Returns the number of connections in each state of [`STATE_LABELS`]. Locks each slot in turn.
    pub fn count_connections(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let mut counts = [0; STATE_LABELS.len()];
        let labels = self.map_connections(|_, connection| Some(connection.state_label_index()));
        labels.into_iter().for_each(|label| counts[label] += 1);
        STATE_LABELS.into_iter().zip(counts)
    }

    /// Returns the number of slots, which is the most requests that can wait for answers.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Records that a worker executes a request, so that its connection is not closed for another client. Returns false
    /// if the client does not wait for the answer any more.
    pub fn mark_executing(&self, handle: RequestHandle) -> bool {
        self.lock(handle.slot)
            .is_some_and(|mut entry| entry.connection_of(handle).map(Connection::mark_executing).is_some())
    }

    /// Returns true if the client of a request does not wait for its answer any more. Locks the slot for a moment.
    pub fn is_abandoned(&self, handle: RequestHandle) -> bool {
        self.lock(handle.slot).is_none_or(|mut entry| entry.connection_of(handle).is_none())
    }
}

impl Slots {
    /// Creates a table with a free slot for each connection that the limits allow, and for surplus clients.
    pub(super) fn new(limits: Arc<Limits>, budget: MemoryBudget, waker: Waker) -> Slots {
        Slots {
            entries: (0..limits.max_connections + MAX_SURPLUS_CLIENTS).map(|_| Mutex::default()).collect(),
            budget,
            is_memory_short: AtomicBool::default(),
            limits,
            waker,
            is_stopping: AtomicBool::default(),
            slots_for_loop: Mutex::default(),
            expected_requests: AtomicUsize::default(),
            warnings: Arc::default(),
        }
    }

    /// Locks the slot with this number; `None` if the table has no such slot.
    pub(super) fn lock(&self, slot: u32) -> Option<MutexGuard<'_, SlotContents>> {
        Some(self.entries.get(slot as usize)?.lock())
    }

    /// Calls `look` with each connection and its slot, and collects the results that are not `None`. Locks one slot at
    /// a time.
    pub(super) fn map_connections<T>(&self, mut look: impl FnMut(u32, &Connection) -> Option<T>) -> Vec<T> {
        let entries = (0..).zip(&self.entries);
        entries.filter_map(|(slot, entry)| look(slot, entry.lock().connection.as_deref()?)).collect()
    }

    /// Makes the event loop advance the connection in a slot. Wakes the loop only if no slot was queued before.
    fn queue_for_loop(&self, slot: u32) {
        let mut slots_for_loop = self.slots_for_loop.lock();
        slots_for_loop.push(slot);
        if slots_for_loop.len() == 1 {
            drop(slots_for_loop);
            self.wake_loop();
        }
    }

    /// Moves the slots that workers have queued for the event loop to the end of the list `due_slots`.
    pub(super) fn take_queued_slots(&self, due_slots: &mut Vec<u32>) {
        due_slots.append(&mut self.slots_for_loop.lock());
    }

    /// Tells the event loop that a worker waits for memory, so that it closes connections.
    pub(super) fn ask_for_memory(&self) {
        if !self.is_memory_short.swap(true, Ordering::Relaxed) {
            self.wake_loop();
        }
    }

    /// Makes the event loop begin a stop. Returns at once; a further call changes nothing.
    pub(super) fn begin_stop(&self) {
        self.is_stopping.store(true, Ordering::SeqCst);
        self.wake_loop();
    }

    /// Ends the event loop's wait for events.
    fn wake_loop(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("answers may be late, as the frontend cannot be woken ({error}): restart userd");
        }
    }
}
