//! Where an answer goes.
//!
//! Owns the table of places that the loop and the workers share, and the way from a request back to its
//! client. A place has its own lock, held for one non-blocking write at most, so a worker never waits for a
//! client, nor for another worker.

use super::connection::Connection;
use crate::{config::Limits, http::Response};
use mio::Waker;
use std::{
    fmt, io, mem,
    str::FromStr,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Which client waits for a request's answer, and for which of its requests: the fragment of
/// the target that tiny_http gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    slot: u32,
    generation: u32,
}

/// The way for answers; one for all workers.
#[derive(Clone)]
pub struct Responder(pub(super) Arc<Shared>);

impl Responder {
    /// The seat in a request's fragment. To be called exactly once for every request that tiny_http
    /// hands out, as soon as it does: this is how the door knows how many are on their way.
    ///
    /// `None` when nobody waits for the answer any more; such a request is to be dropped.
    pub fn claim(&self, fragment: &str) -> Option<Slot> {
        self.0.pipe.leave();
        let seat = fragment.parse().ok()?;
        (!self.abandoned(seat)).then_some(seat)
    }

    /// Sends the answer to its client and returns its length in bytes, or `None` when it came too late (the
    /// door has answered 503 by then, or the client is gone).
    ///
    /// Never blocks: what the client's socket does not take at once is sent by the loop.
    pub fn answer(&self, seat: Slot, response: &Response) -> Option<usize> {
        let shared = &*self.0;
        let mut connection = shared.places.get(seat.slot)?;
        if !connection.awaits(seat.generation) {
            return None;
        }
        let stopping = shared.stopping.load(Ordering::SeqCst);
        let (length, more) = connection.answer(response, &shared.limits, stopping);
        drop(connection);
        if more {
            shared.call(seat.slot);
        }
        Some(length)
    }

    /// Whether nobody waits for the answer any more, so that work on it would be in vain. Cheap.
    pub fn abandoned(&self, seat: Slot) -> bool {
        match self.0.places.get(seat.slot) {
            Some(connection) => !connection.awaits(seat.generation),
            None => true,
        }
    }
}

impl Slot {
    pub(super) fn new(slot: u32, generation: u32) -> Slot {
        Slot { slot, generation }
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{:x}", self.slot, self.generation)
    }
}

impl FromStr for Slot {
    type Err = ();

    fn from_str(text: &str) -> Result<Slot, ()> {
        let (slot, generation) = text.split_once('.').ok_or(())?;
        let number = |text| u32::from_str_radix(text, 16).map_err(|_| ());
        Ok(Slot::new(number(slot)?, number(generation)?))
    }
}

/// What the loop and the workers share.
pub(super) struct Shared {
    pub places: Places,
    pub pipe: Pipe,
    pub limits: Limits,
    pub waker: Waker,
    /// Answers say `Connection: close`, and nothing new is begun.
    pub stopping: AtomicBool,
    /// The end is now.
    pub aborted: AtomicBool,
    calls: Mutex<Vec<u32>>,
}

impl Shared {
    pub fn new(limits: Limits, places: usize, waker: Waker) -> Shared {
        Shared {
            places: Places::new(places),
            // Abandoned requests stay in tiny_http's queue until a worker comes by. Without a bound, stuck
            // workers would let it grow as long as clients try again.
            pipe: Pipe::new(2 * limits.max_connections),
            limits,
            waker,
            stopping: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            calls: Mutex::default(),
        }
    }

    /// Has the loop look after a connection. Wakes it only for the first of several calls.
    fn call(&self, slot: u32) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.push(slot);
        if calls.len() == 1 {
            drop(calls);
            self.wake();
        }
    }

    /// The connections that workers called for.
    pub fn take_calls(&self, into: &mut Vec<u32>) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut *calls, into);
    }

    pub fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("the door cannot be woken: {error}");
        }
    }
}

/// A place for each client there may be. Room for them is made as it is needed, and never moves.
pub(super) struct Places {
    blocks: Box<[OnceLock<Box<Block>>]>,
}

const BLOCK: usize = 64;
type Block = [Mutex<Connection>; BLOCK];

impl Places {
    fn new(count: usize) -> Places {
        let blocks = count.div_ceil(BLOCK);
        Places { blocks: (0..blocks).map(|_| OnceLock::new()).collect() }
    }

    /// The place of that number, if there has ever been a client in it or its neighbours.
    pub fn get(&self, slot: u32) -> Option<MutexGuard<'_, Connection>> {
        let block = self.blocks.get(slot as usize / BLOCK)?.get()?;
        let place = &block[slot as usize % BLOCK];
        Some(place.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Makes room for the place of that number.
    pub fn make(&self, slot: u32) {
        self.blocks[slot as usize / BLOCK]
            .get_or_init(|| Box::new(std::array::from_fn(|_| Mutex::default())));
    }
}

/// The way to the workers: how many requests are on it.
pub(super) struct Pipe {
    count: AtomicUsize,
    most: usize,
    broken: AtomicBool,
    pub unavailable: Rarely,
}

impl Pipe {
    fn new(most: usize) -> Pipe {
        Pipe {
            count: AtomicUsize::new(0),
            most,
            broken: AtomicBool::new(false),
            unavailable: Rarely::default(),
        }
    }

    /// One request more, if there is room.
    pub fn enter(&self) -> Result<(), &'static str> {
        if self.broken.load(Ordering::Relaxed) {
            return Err("the way to the workers is broken");
        }
        if self.count.load(Ordering::Relaxed) >= self.most {
            return Err("too many requests wait for the workers");
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn leave(&self) {
        let less = |count: usize| count.checked_sub(1);
        let result = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        debug_assert!(result.is_ok(), "a request was claimed twice");
    }

    /// No request gets through any more.
    pub fn break_down(&self, error: &io::Error) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            log::error!("the way to the workers is broken, nothing can be served: {error}");
        }
    }
}

/// A warning that comes at most once a second, with the number of those that it stands for.
#[derive(Default)]
pub(super) struct Rarely(Mutex<(Option<Instant>, u64)>);

impl Rarely {
    pub fn warn(&self, now: Instant, what: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, skipped) = &mut *state;
        if last.is_some_and(|last| now < last + Duration::from_secs(1)) {
            *skipped += 1;
            return;
        }
        match mem::take(skipped) {
            0 => log::warn!("503: {what}"),
            more => log::warn!("503: {what} (and {more} more since the last such line)"),
        }
        *last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_as_text() {
        for seat in [Slot::new(0, 0), Slot::new(31, 4096), Slot::new(u32::MAX, u32::MAX)] {
            assert_eq!(seat.to_string().parse(), Ok(seat));
        }
        assert_eq!(Slot::new(31, 4096).to_string(), "1f.1000");
        for text in ["", ".", "1", "1.", ".1", "1.g", "100000000.0", "1.1.1", "-1.0"] {
            assert_eq!(text.parse::<Slot>(), Err(()), "{text}");
        }
    }

    #[test]
    fn places_nobody_ever_took() {
        let places = Places::new(100);
        assert!(places.get(0).is_none() && places.get(127).is_none() && places.get(u32::MAX).is_none());
        places.make(70);
        assert!(places.get(63).is_none() && places.get(64).is_some() && places.get(127).is_some());
    }
}
