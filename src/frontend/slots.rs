//! What the event loop and the workers share: the table of connections, and the number of requests in flight.
//!
//! Owns the locks of the frontend. Each slot has its own, so a worker that answers one client never waits for another.

use super::{
    connection::{Connection, DOING},
    listener::Stream,
    peers::Peer,
    responder::Slot,
    warnings::Warnings,
};
use crate::{
    budget::{Budget, Reservation},
    config::Limits,
    reason::Reason,
};
use mio::Waker;
use std::{
    collections::HashMap,
    io, mem,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

/// What the event loop and the workers share.
pub struct SharedState {
    pub slots: Slots,
    pub in_flight: InFlight,
    /// What the requests hold that no worker has claimed yet.
    pub unclaimed: Unclaimed,
    pub budget: Budget,
    /// Answers that do not move are to be given up.
    pub shortage: AtomicBool,
    pub limits: Limits,
    waker: Waker,
    /// Answers say `Connection: close`, and nothing new is begun.
    pub stopping: AtomicBool,
    /// The stop ends now.
    pub aborted: AtomicBool,
    /// Connections that need the event loop after a worker's answer.
    scheduled: Mutex<Vec<u32>>,
    /// Warnings about clients that are answered 503.
    pub unavailable: Warnings,
}

impl SharedState {
    pub fn new(limits: Limits, budget: Budget, slots: usize, waker: Waker) -> SharedState {
        SharedState {
            slots: Slots::new(slots),
            // Abandoned requests stay in tiny_http's queue until a worker claims them. Without a bound, stuck workers
            // would let it grow as long as clients retry.
            in_flight: InFlight::new(2 * limits.max_connections),
            unclaimed: Unclaimed::default(),
            budget,
            shortage: AtomicBool::new(false),
            limits,
            waker,
            stopping: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            scheduled: Mutex::default(),
            unavailable: Warnings::default(),
        }
    }

    /// Has the event loop advance a connection. Only the first of several calls wakes it.
    pub fn schedule(&self, index: u32) {
        let mut scheduled = self.scheduled.lock().unwrap_or_else(PoisonError::into_inner);
        scheduled.push(index);
        if scheduled.len() == 1 {
            drop(scheduled);
            self.wake();
        }
    }

    /// Swaps the scheduled connections with an empty list.
    pub fn take_scheduled(&self, into: &mut Vec<u32>) {
        let mut scheduled = self.scheduled.lock().unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut *scheduled, into);
    }

    pub fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("the frontend cannot be woken: {error}");
        }
    }
}

/// A slot for each client that there may be. Memory for them is allocated as it is needed, and never moves.
pub struct Slots {
    blocks: Box<[OnceLock<Box<Block>>]>,
}

const BLOCK: usize = 64;
type Block = [Mutex<Entry>; BLOCK];

impl Slots {
    fn new(count: usize) -> Slots {
        let blocks = count.div_ceil(BLOCK);
        Slots { blocks: (0..blocks).map(|_| OnceLock::new()).collect() }
    }

    /// The entry of that index, if its block has ever been allocated.
    pub fn get(&self, index: u32) -> Option<MutexGuard<'_, Entry>> {
        let block = self.blocks.get(index as usize / BLOCK)?.get()?;
        let entry = &block[index as usize % BLOCK];
        Some(entry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// How many connections are in each state of [`DOING`].
    pub fn count(&self) -> [usize; DOING.len()] {
        let mut counts = [0; DOING.len()];
        for entry in self.blocks.iter().filter_map(OnceLock::get).flat_map(|block| block.iter()) {
            let entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(connection) = &entry.connection {
                counts[connection.doing()] += 1;
            }
        }
        counts
    }

    /// Allocates the block of that index.
    pub fn allocate(&self, index: u32) {
        self.blocks[index as usize / BLOCK]
            .get_or_init(|| Box::new(std::array::from_fn(|_| Mutex::default())));
    }
}

/// One slot: free, or with a connection in it.
#[derive(Default)]
pub struct Entry {
    pub connection: Option<Connection>,
    /// The generation of the next connection's first request. It never decreases, so that a late answer never meets
    /// another client.
    next_generation: u32,
}

impl Entry {
    /// Puts a client into this slot.
    pub fn open(&mut self, stream: Stream, peer: Peer, now: Instant) -> &mut Connection {
        self.connection.insert(Connection::new(stream, peer, self.next_generation, now))
    }

    /// Closes the socket, and returns what was there.
    pub fn close(&mut self) -> Option<Connection> {
        let connection = self.connection.take()?;
        self.next_generation = connection.generation().wrapping_add(1);
        Some(connection)
    }

    /// The connection, if that very request of it still waits for its answer.
    pub fn awaiting(&self, generation: u32) -> Option<&Connection> {
        self.connection.as_ref().filter(|connection| connection.awaits(generation))
    }

    /// As [`Entry::awaiting`].
    pub fn awaiting_mut(&mut self, generation: u32) -> Option<&mut Connection> {
        self.connection.as_mut().filter(|connection| connection.awaits(generation))
    }
}

/// How many requests are between the frontend and the workers.
pub struct InFlight {
    count: AtomicUsize,
    most: usize,
    broken: AtomicBool,
}

impl InFlight {
    fn new(most: usize) -> InFlight {
        InFlight { count: AtomicUsize::new(0), most, broken: AtomicBool::new(false) }
    }

    /// One request more, if the limit allows it; else why not.
    pub fn add(&self) -> Result<(), Reason> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(Reason::Broken);
        }
        if self.count() >= self.most {
            return Err(Reason::TooManyRequests);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// One request less.
    pub fn remove(&self) {
        let less = |count: usize| count.checked_sub(1);
        let result = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        debug_assert!(result.is_ok(), "a request was claimed twice");
    }

    /// No request gets through any more.
    pub fn break_down(&self, error: &io::Error) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            log::error!("the stream to tiny_http is broken, nothing can be served: {error}");
        }
    }
}

/// The memory of requests that have left the frontend, until a worker claims them: their connections may be gone by then.
#[derive(Default)]
pub struct Unclaimed {
    /// Most requests hold none: this spares the lock.
    count: AtomicUsize,
    held: Mutex<HashMap<(u32, u32), Reservation>>,
}

impl Unclaimed {
    /// To be called before the request is passed on.
    pub fn add(&self, slot: Slot, held: Reservation) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert((slot.index, slot.generation), held);
    }

    /// What a request holds. The stream that it came over orders this after [`Unclaimed::add`].
    pub fn take(&self, slot: Slot) -> Option<Reservation> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut all = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let held = all.remove(&(slot.index, slot.generation))?;
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_were_never_used() {
        let slots = Slots::new(100);
        assert!(slots.get(0).is_none() && slots.get(127).is_none() && slots.get(u32::MAX).is_none());
        slots.allocate(70);
        assert!(slots.get(63).is_none() && slots.get(64).is_some() && slots.get(127).is_some());
    }
}
