//! The table of connections, which the event loop and the workers share.
//!
//! Owns the locks of the frontend. Each slot has its own, so a worker that answers one client never waits for another.

use super::{
    connection::{Connection, DOING},
    listener::Stream,
    peers::Peer,
};
use parking_lot::{Mutex, MutexGuard};
use std::{sync::OnceLock, time::Instant};

/// A slot for each client that there may be. Memory for them is allocated as it is needed, and never moves.
pub struct Slots {
    blocks: Box<[OnceLock<Box<Block>>]>,
}

const BLOCK: usize = 64;
type Block = [Mutex<Entry>; BLOCK];

impl Slots {
    pub fn new(count: usize) -> Slots {
        let blocks = count.div_ceil(BLOCK);
        Slots { blocks: (0..blocks).map(|_| OnceLock::new()).collect() }
    }

    /// The entry of that index, if its block has ever been allocated.
    pub fn get(&self, index: u32) -> Option<MutexGuard<'_, Entry>> {
        let block = self.blocks.get(index as usize / BLOCK)?.get()?;
        let entry = &block[index as usize % BLOCK];
        Some(entry.lock())
    }

    /// What `of` makes of each connection and its index, where that is something. One of them is locked at a time.
    pub fn each<T>(&self, mut of: impl FnMut(u32, &Connection) -> Option<T>) -> Vec<T> {
        let entries = self.blocks.iter().map_while(OnceLock::get).flat_map(|block| block.iter());
        let of = |(index, entry): (u32, &Mutex<Entry>)| of(index, entry.lock().connection.as_ref()?);
        (0..).zip(entries).filter_map(of).collect()
    }

    /// How many connections are in each state of [`DOING`].
    pub fn count(&self) -> [usize; DOING.len()] {
        let mut counts = [0; DOING.len()];
        let doing = self.each(|_, connection| Some(connection.doing()));
        doing.into_iter().for_each(|doing| counts[doing] += 1);
        counts
    }

    /// Allocates the block of that index, the first one that is not there.
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
    pub fn awaiting(&mut self, generation: u32) -> Option<&mut Connection> {
        self.connection.as_mut().filter(|connection| connection.awaits(generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_were_never_used() {
        let slots = Slots::new(100);
        assert!(slots.get(0).is_none() && slots.get(127).is_none() && slots.get(u32::MAX).is_none());
        slots.allocate(0);
        assert!(slots.get(63).is_some() && slots.get(64).is_none() && slots.get(127).is_none());
    }
}
