//! The table of connections, which the event loop and the workers share, and the names of requests in it.
//!
//! Owns the locks of the frontend. Each slot has its own, so a worker that answers one client never waits for another.

use super::{
    connection::{Connection, DOING},
    peers::Client,
};
use parking_lot::{Mutex, MutexGuard};
use std::{
    fmt,
    net::IpAddr,
    str::FromStr,
    sync::atomic::{AtomicU32, Ordering},
};

/// A slot for each client that there may be.
pub struct Slots {
    slots: Box<[Mutex<Option<Box<Connection>>>]>,
    /// How many slots were ever used, from the first one on.
    used: AtomicU32,
}

impl Slots {
    /// Creates so many free slots.
    pub fn new(count: usize) -> Slots {
        Slots { slots: (0..count).map(|_| Mutex::default()).collect(), used: AtomicU32::new(0) }
    }

    /// Locks a slot, if there is one of that index.
    pub fn get(&self, index: u32) -> Option<MutexGuard<'_, Option<Box<Connection>>>> {
        Some(self.slots.get(index as usize)?.lock())
    }

    /// Calls `work` with the connection of a request, if the request still waits for its answer.
    pub fn awaiting<T>(&self, slot: Slot, work: impl FnOnce(&mut Connection) -> T) -> Option<T> {
        let mut entry = self.get(slot.index)?;
        entry
            .as_mut()
            .filter(|connection| connection.awaits(slot.generation))
            .map(|connection| work(connection))
    }

    /// Returns how many slots were ever used.
    pub fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the index of a slot that was never used. Only the event loop may call it.
    pub fn next_unused(&self) -> u32 {
        self.used.fetch_add(1, Ordering::Relaxed)
    }

    /// Collects what `of` returns for each connection and its index. One slot is locked at a time.
    pub fn each<T>(&self, mut of: impl FnMut(u32, &Connection) -> Option<T>) -> Vec<T> {
        let used = &self.slots[..self.used() as usize];
        (0..).zip(used).filter_map(|(index, slot)| of(index, slot.lock().as_ref()?)).collect()
    }

    /// Counts the connections in each state of [`DOING`].
    pub fn count(&self) -> [usize; DOING.len()] {
        let mut counts = [0; DOING.len()];
        self.each(|_, connection| Some(connection.doing())).into_iter().for_each(|doing| counts[doing] += 1);
        counts
    }
}

/// The name of a request, by which the worker that gets it finds the client that waits for its answer: the fragment of
/// the target that tiny_http gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    index: u32,
    /// No other request of any connection in this slot has it, so that a late answer never meets another client.
    generation: u64,
    peer: Option<IpAddr>,
}

impl Slot {
    pub(super) fn new(index: u32, generation: u64) -> Slot {
        Slot { index, generation, peer: None }
    }

    pub(super) fn with_peer(self, peer: Option<IpAddr>) -> Slot {
        Slot { peer, ..self }
    }

    /// Returns the client's address: the connection's, or the one that a trusted proxy names. `None` on a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// Returns the index of the slot.
    pub(super) fn index(&self) -> u32 {
        self.index
    }

    /// Returns the client as the log names it.
    pub fn client(&self) -> impl fmt::Display {
        Client(self.peer)
    }
}

/// Index and generation, in hexadecimal digits.
impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{:x}", self.index, self.generation)
    }
}

impl FromStr for Slot {
    type Err = ();

    fn from_str(text: &str) -> Result<Slot, ()> {
        let (index, generation) = text.split_once('.').ok_or(())?;
        let index = u32::from_str_radix(index, 16).map_err(|_| ())?;
        Ok(Slot::new(index, u64::from_str_radix(generation, 16).map_err(|_| ())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_as_text() {
        for slot in [Slot::new(0, 0), Slot::new(31, 4096), Slot::new(u32::MAX, u64::MAX)] {
            assert_eq!(slot.to_string().parse(), Ok(slot));
        }
        assert_eq!(Slot::new(31, 4096).to_string(), "1f.1000");
        for text in ["", ".", "1", "1.", ".1", "1.g", "100000000.0", "1.1.1", "-1.0"] {
            assert_eq!(text.parse::<Slot>(), Err(()), "{text}");
        }
    }

    #[test]
    fn slots_that_were_never_used() {
        let slots = Slots::new(2);
        assert!(slots.get(1).is_some_and(|slot| slot.is_none()) && slots.get(2).is_none());
        assert_eq!((slots.used(), slots.next_unused(), slots.used()), (0, 0, 1));
        assert!(slots.get(u32::MAX).is_none());
    }
}
