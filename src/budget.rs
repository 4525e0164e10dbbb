//! The memory that is held for clients, counted against one limit.
//!
//! Owns the count; allocates nothing. Bytes that exist are counted even if they are more than the limit: the frontend
//! then closes connections, or refuses the request.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// The pause between two looks at the count, while a reservation waits for memory.
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// The count of all memory that is held for clients. Clones share it.
#[derive(Clone)]
pub struct Budget {
    /// The most bytes that may be held for clients.
    pub limit: usize,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    held_bytes: AtomicUsize,
    /// Locked by the reservation that waits for memory; further reservations wait for this lock.
    waiting_turn: Mutex<()>,
    /// Called while a reservation waits for memory: makes the frontend close connections.
    on_shortage: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A number of bytes that are counted until this value is dropped.
pub struct Reservation {
    budget: Budget,
    bytes: usize,
}

impl Budget {
    /// Returns a budget of `limit` bytes.
    pub fn new(limit: usize) -> Budget {
        Budget { limit, counts: Arc::default() }
    }

    /// Returns the bytes that are held now. They may be more than the limit for a moment.
    pub fn held_bytes(&self) -> usize {
        self.counts.held_bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes, even beyond the limit.
    pub fn count(&self, bytes: usize) -> Reservation {
        self.counts.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        Reservation { budget: self.clone(), bytes }
    }

    /// Reserves memory for a hash or a large answer, before the work that needs it. Blocks until the memory is free
    /// and earlier reservations have theirs. `None` if the deadline comes first.
    pub fn reserve(&self, bytes: usize, deadline: Instant) -> Option<Reservation> {
        let bytes = bytes.min(self.limit);
        // Reserves at once if the memory is free. Overtakes no reservation that waits, because the bytes of a waiting
        // reservation are counted already and so are not free.
        let fits = |held: usize| Some(held + bytes).filter(|held| *held <= self.limit);
        if self.counts.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok() {
            return Some(Reservation { budget: self.clone(), bytes });
        }
        let _turn = self.counts.waiting_turn.try_lock_until(deadline)?;
        let reservation = self.count(bytes);
        while self.held_bytes() > self.limit && Instant::now() < deadline {
            self.counts.on_shortage.get().inspect(|report| report());
            thread::sleep(MEMORY_PAUSE);
        }
        (self.held_bytes() <= self.limit).then_some(reservation)
    }

    /// Sets the function that is called every few milliseconds while a reservation waits for memory. Only the first
    /// call has an effect.
    pub fn on_shortage(&self, report: impl Fn() + Send + Sync + 'static) {
        let _ = self.counts.on_shortage.set(Box::new(report));
    }
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the reservation larger or smaller, even beyond the limit.
    pub fn resize(&mut self, bytes: usize) {
        self.budget.counts.held_bytes.fetch_add(bytes.wrapping_sub(self.bytes), Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn reservations_change_and_are_given_back() {
        let budget = Budget::new(1000);
        let mut one = budget.count(1000);
        assert_eq!((one.bytes(), budget.held_bytes()), (1000, 1000));
        one.resize(500);
        assert_eq!((one.bytes(), budget.held_bytes()), (500, 500));
        drop(one);
        assert_eq!(budget.held_bytes(), 0);
        let too_much = budget.count(1100);
        assert_eq!(budget.held_bytes(), 1100);
        drop(too_much);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn a_hash_waits_for_memory_before_others() {
        let budget = Budget::new(1000);
        let answers = budget.count(700);
        let (shared, (reported, reports)) = (budget.clone(), mpsc::channel());
        budget.on_shortage(move || {
            let _ = reported.send(());
        });
        let waiting = thread::spawn(move || shared.reserve(400, Instant::now() + LONG).unwrap());
        reports.recv_timeout(LONG).unwrap();
        // Shows that no other work fits meanwhile.
        assert!(budget.held_bytes() >= budget.limit);
        drop(answers);
        assert_eq!(waiting.join().unwrap().bytes(), 400);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn a_hash_does_not_wait_for_ever() {
        let budget = Budget::new(1000);
        let all = budget.count(900);
        assert!(budget.reserve(400, Instant::now()).is_none());
        drop(all);
        // Reserves the whole budget for a hash that is larger: it is computed alone.
        assert_eq!(budget.reserve(5000, Instant::now()).unwrap().bytes(), 1000);
        assert_eq!(budget.held_bytes(), 0);
    }

    /// Checks that a page that does not wait is refused only if memory is short, and not because another reservation
    /// is being made.
    #[test]
    fn a_reservation_that_fits_needs_no_turn() {
        let budget = Budget::new(1000);
        let _turn = budget.counts.waiting_turn.lock();
        let fitting = budget.reserve(600, Instant::now());
        assert_eq!((fitting.map(|held| held.bytes()), budget.held_bytes()), (Some(600), 0));
        let _most = budget.count(600);
        assert!(budget.reserve(600, Instant::now()).is_none());
        assert_eq!(budget.held_bytes(), 600);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let budget = Budget::new(1 << 20);
        thread::scope(|scope| {
            for thread in 0..4_usize {
                let budget = &budget;
                scope.spawn(move || {
                    for waiting_turn in 0..2000 {
                        let mut held = budget.count((waiting_turn * 37 + thread) << 2);
                        held.resize(waiting_turn * 11);
                        drop(held);
                        if waiting_turn % 64 == 0 {
                            drop(budget.reserve(300_000, Instant::now() + LONG));
                        }
                    }
                });
            }
        });
        assert_eq!(budget.held_bytes(), 0);
    }
}
