//! The state that the event loop and the workers share: the table of connections, the memory, and how one wakes the
//! other; and what a worker may do with a request, which it names by its [`Slot`].
//!
//! Owns the locks of the frontend. Each slot has its own: a worker holds one for one non-blocking write at most, so it
//! never waits for a client, nor for another worker.

use super::claim::{Claimed, Slot};
use super::connection::{Connection, Delivery, STATE_LABELS};
use super::warnings::Warnings;
use crate::budget::{Budget, Reservation};
use crate::{config::Limits, http::Response};
use mio::Waker;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Slots for connections beyond the capacity that are being told so. Each costs a descriptor and some 200 bytes.
pub const MAX_SURPLUS: usize = 256;

/// A slot for each client that there may be.
pub struct Slots {
    entries: Box<[Mutex<Entry>]>,
    pub(super) budget: Budget,
    /// A worker waits for memory: connections are to be closed.
    pub(super) shortage: AtomicBool,
    limits: Arc<Limits>,
    waker: Waker,
    /// Answers say `Connection: close`, and idle connections are closed.
    pub(super) stopping: AtomicBool,
    /// Connections that the event loop is to advance, as a worker has answered them.
    scheduled: Mutex<Vec<u32>>,
    /// Warnings about clients that are answered 503.
    pub warnings: Arc<Warnings>,
}

/// The contents of a slot.
#[derive(Default)]
pub(super) struct Entry {
    pub connection: Option<Box<Connection>>,
    /// A ticket names this slot, and no worker has claimed it yet. A newer request of the slot needs no other ticket.
    pub has_ticket: bool,
}

impl Entry {
    /// Returns the connection of a request, if the request still waits for its answer.
    fn awaiting(&mut self, slot: Slot) -> Option<&mut Connection> {
        self.connection.as_deref_mut().filter(|connection| connection.awaits(slot.generation))
    }
}

/// The calls of workers.
impl Slots {
    /// Claims the requests of a ticket. To be called exactly once for every ticket, and at once: until then, newer
    /// requests of its slots get no ticket of their own. Leaves out clients that do not wait for an answer any more.
    pub fn claim(&self, ticket: &str) -> impl Iterator<Item = Claimed> {
        ticket.split(['/', ',']).filter_map(|index| {
            let index = index.parse().ok()?;
            let mut entry = self.lock(index)?;
            entry.has_ticket = false;
            entry.connection.as_mut()?.claim(index, &self.limits, &self.budget)
        })
    }

    /// Sends the answer to its client, as much of it as the socket takes at once; of an answer that is to be cut short,
    /// so many bytes at most. Returns `None` if it comes too late: the frontend has answered 503 by then, or the client
    /// is gone.
    ///
    /// Never blocks: the event loop sends the bytes that the client's socket does not take at once, and counts them.
    /// `held` is the worker's reservation for the answer.
    pub fn send(
        &self,
        slot: Slot,
        response: Response,
        cut: Option<usize>,
        held: Option<Reservation>,
    ) -> Option<Delivery> {
        let stopping = self.stopping.load(Ordering::SeqCst);
        let (delivery, unfinished) =
            self.lock(slot.index)?.awaiting(slot)?.send_answer(response, cut, stopping);
        // Releases the worker's reservation: the connection counts the bytes that the socket did not take.
        drop(held);
        if unfinished {
            self.schedule(slot.index);
        }
        Some(delivery)
    }

    /// Counts the connections in each state of [`STATE_LABELS`], and returns how many there may be. Looks at each of them.
    pub fn connections(&self) -> (impl Iterator<Item = (&'static str, usize)>, usize) {
        let mut counts = [0; STATE_LABELS.len()];
        self.each(|_, connection| Some(connection.doing())).into_iter().for_each(|doing| counts[doing] += 1);
        (STATE_LABELS.into_iter().zip(counts), self.limits.max_connections)
    }

    /// Returns the number of slots: as many requests may wait for answers.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Marks a request as being executed, so that it is not given up for other clients. Returns whether its client
    /// still waits for the answer.
    pub fn begin(&self, slot: Slot) -> bool {
        self.lock(slot.index).is_some_and(|mut entry| entry.awaiting(slot).map(Connection::begin).is_some())
    }

    /// Returns whether the client has stopped waiting for the answer. Locks the slot for a moment.
    pub fn abandoned(&self, slot: Slot) -> bool {
        self.lock(slot.index).is_none_or(|mut entry| entry.awaiting(slot).is_none())
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
            scheduled: Mutex::default(),
            warnings: Arc::default(),
        }
    }

    /// Locks a slot, if there is one of that index.
    pub(super) fn lock(&self, index: u32) -> Option<MutexGuard<'_, Entry>> {
        Some(self.entries.get(index as usize)?.lock())
    }

    /// Calls `of` with each connection and its index, and collects the results. Locks one slot at a time.
    pub(super) fn each<T>(&self, mut of: impl FnMut(u32, &Connection) -> Option<T>) -> Vec<T> {
        let entries = (0..).zip(&self.entries);
        entries.filter_map(|(index, entry)| of(index, entry.lock().connection.as_deref()?)).collect()
    }

    /// Has the event loop advance a connection. Only the first of several calls wakes it.
    fn schedule(&self, index: u32) {
        let mut scheduled = self.scheduled.lock();
        scheduled.push(index);
        if scheduled.len() == 1 {
            drop(scheduled);
            self.wake();
        }
    }

    /// Moves the scheduled connections to the end of a list.
    pub(super) fn take_scheduled(&self, into: &mut Vec<u32>) {
        into.append(&mut self.scheduled.lock());
    }

    /// Has the event loop close connections for the memory that they hold.
    pub(super) fn report_shortage(&self) {
        if !self.shortage.swap(true, Ordering::Relaxed) {
            self.wake();
        }
    }

    /// Has the event loop start a stop. Returns at once; doing it again changes nothing.
    pub(super) fn drain(&self) {
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
