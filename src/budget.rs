//! Counts the memory that is held for clients, and compares it with one limit.
//!
//! Allocates nothing. Memory that is held already is counted even beyond the limit: the frontend then closes
//! connections or refuses requests.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// How long a reservation that waits for memory sleeps before it looks again whether the memory is free.
const SHORTAGE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The memory that may be held for clients, and the memory that is held. Clones share one count.
#[derive(Clone)]
pub struct MemoryBudget {
    /// The most bytes that may be held for clients.
    pub limit: usize,
    state: Arc<MemoryState>,
}

/// The count and the waiting reservation, which all clones of a [`MemoryBudget`] share.
#[derive(Default)]
struct MemoryState {
    held_bytes: AtomicUsize,
    /// Locked by the one reservation that waits for memory. Further reservations that do not fit wait for this lock.
    sole_waiter_lock: Mutex<()>,
    /// The function by which the frontend learns that a reservation waits for memory. The frontend then closes
    /// connections.
    on_shortage: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A number of bytes that a [`MemoryBudget`] counts as held until this value is dropped.
pub struct Reservation {
    budget: MemoryBudget,
    reserved_bytes: usize,
}

impl MemoryBudget {
    /// Returns a budget of `limit_bytes`, none of which is held.
    pub fn new(limit_bytes: usize) -> MemoryBudget {
        MemoryBudget { limit: limit_bytes, state: Arc::default() }
    }

    /// Returns how many bytes are held now. This can be more than the limit until the requests that workers have claimed
    /// are answered, or until a reservation that waits reaches its deadline.
    pub fn held_bytes(&self) -> usize {
        self.state.held_bytes.load(Ordering::Relaxed)
    }

    /// Counts bytes that are held already, even beyond the limit. Never blocks.
    pub fn reserve_unchecked(&self, bytes: usize) -> Reservation {
        self.state.held_bytes.fetch_add(bytes, Ordering::Relaxed);
        Reservation { budget: self.clone(), reserved_bytes: bytes }
    }

    /// Reserves memory for a hash or a large answer, before the memory is allocated. Blocks until the memory is free
    /// and earlier reservations have their memory. Returns `None` if the deadline comes first.
    pub fn reserve(&self, bytes: usize, deadline: Instant) -> Option<Reservation> {
        let bytes = bytes.min(self.limit);
        // Does not block if the bytes fit. A reservation that waits loses no memory by this, because its bytes are
        // counted as held already.
        let fits = |held: usize| Some(held + bytes).filter(|held| *held <= self.limit);
        if self.state.held_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok() {
            return Some(Reservation { budget: self.clone(), reserved_bytes: bytes });
        }
        let _turn = self.state.sole_waiter_lock.try_lock_until(deadline)?;
        let reservation = self.reserve_unchecked(bytes);
        while self.held_bytes() > self.limit && Instant::now() < deadline {
            self.state.on_shortage.get().inspect(|report| report());
            thread::sleep(SHORTAGE_POLL_INTERVAL);
        }
        (self.held_bytes() <= self.limit).then_some(reservation)
    }

    /// Sets the function that is called every few milliseconds while a reservation waits for memory. Only the first
    /// function that is set is used.
    pub fn on_shortage(&self, report: impl Fn() + Send + Sync + 'static) {
        let _ = self.state.on_shortage.set(Box::new(report));
    }
}

impl Reservation {
    /// Returns the number of reserved bytes.
    pub fn reserved_bytes(&self) -> usize {
        self.reserved_bytes
    }

    /// Sets the number of reserved bytes, even beyond the limit. Never blocks.
    pub fn resize(&mut self, bytes: usize) {
        self.budget.state.held_bytes.fetch_add(bytes.wrapping_sub(self.reserved_bytes), Ordering::Relaxed);
        self.reserved_bytes = bytes;
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
        let budget = MemoryBudget::new(1000);
        let mut one = budget.reserve_unchecked(1000);
        assert_eq!((one.reserved_bytes(), budget.held_bytes()), (1000, 1000));
        one.resize(500);
        assert_eq!((one.reserved_bytes(), budget.held_bytes()), (500, 500));
        drop(one);
        assert_eq!(budget.held_bytes(), 0);
        let too_much = budget.reserve_unchecked(1100);
        assert_eq!(budget.held_bytes(), 1100);
        drop(too_much);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn a_hash_waits_for_memory_before_others() {
        let budget = MemoryBudget::new(1000);
        let answers = budget.reserve_unchecked(700);
        let (shared, (reported, reports)) = (budget.clone(), mpsc::channel());
        budget.on_shortage(move || {
            let _ = reported.send(());
        });
        let waiting = thread::spawn(move || shared.reserve(400, Instant::now() + LONG).unwrap());
        reports.recv_timeout(LONG).unwrap();
        // Shows that no other work fits meanwhile.
        assert!(budget.held_bytes() >= budget.limit);
        drop(answers);
        assert_eq!(waiting.join().unwrap().reserved_bytes(), 400);
        assert_eq!(budget.held_bytes(), 0);
    }

    #[test]
    fn a_hash_does_not_wait_for_ever() {
        let budget = MemoryBudget::new(1000);
        let all = budget.reserve_unchecked(900);
        assert!(budget.reserve(400, Instant::now()).is_none());
        drop(all);
        // Reserves the whole budget for a hash that is larger: it is computed alone.
        assert_eq!(budget.reserve(5000, Instant::now()).unwrap().reserved_bytes(), 1000);
        assert_eq!(budget.held_bytes(), 0);
    }

    /// Checks that a page that does not wait is refused only if memory is short, and not because another reservation
    /// is being made.
    #[test]
    fn a_reservation_that_fits_needs_no_turn() {
        let budget = MemoryBudget::new(1000);
        let _turn = budget.state.sole_waiter_lock.lock();
        let fitting = budget.reserve(600, Instant::now());
        assert_eq!((fitting.map(|held| held.reserved_bytes()), budget.held_bytes()), (Some(600), 0));
        let _most = budget.reserve_unchecked(600);
        assert!(budget.reserve(600, Instant::now()).is_none());
        assert_eq!(budget.held_bytes(), 600);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let budget = MemoryBudget::new(1 << 20);
        thread::scope(|scope| {
            for thread in 0..4_usize {
                let budget = &budget;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let mut held = budget.reserve_unchecked((round * 37 + thread) << 2);
                        held.resize(round * 11);
                        drop(held);
                        if round % 64 == 0 {
                            drop(budget.reserve(300_000, Instant::now() + LONG));
                        }
                    }
                });
            }
        });
        assert_eq!(budget.held_bytes(), 0);
    }
}
