//! The memory that is held for clients, counted against one limit.
//!
//! Owns the counts and the rule of what may be reserved; allocates nothing. The limit has two halves, shared by hashes
//! alone, so that neither clients that send slowly nor clients that do not read can stop what needs the other half:
//! - input: heads (an eighth of the limit at most) and bodies, from their first byte until their request is answered;
//! - work: rows from the database, answers, and the memory of Argon2. A hash is counted in either half, whichever has
//!   room.
//!
//! Input that does not fit is refused, unless refusing the largest incomplete body of a peer that has more makes room.
//! Work waits until answers are sent or cut off, or hashes end; the one hash that waits is counted as work already.

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// How often a hash that waits for memory looks whether there is some, should it miss a wake-up.
const LOOK: Duration = Duration::from_millis(10);

/// What memory is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A request's head, and what was read beyond a request.
    Head,
    /// A body, until its request is answered.
    Body,
    /// Rows, answers, hashes.
    Work,
}

/// The count of all memory that is held for clients. Clones share it.
#[derive(Clone)]
pub struct Budget(Arc<Counts>);

#[derive(Default)]
struct Counts {
    limit: usize,
    /// By purpose.
    held: [AtomicUsize; 3],
    /// The one hash that waits has this lock.
    turn: Mutex<()>,
    waits: AtomicBool,
    freed: (Mutex<()>, Condvar),
    /// Closes connections whose answers do not move.
    on_shortage: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Memory that is counted, until this value is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    purpose: Purpose,
    bytes: usize,
}

impl Budget {
    /// A budget of so many bytes.
    pub fn new(limit: usize) -> Budget {
        Budget(Arc::new(Counts { limit, ..Counts::default() }))
    }

    /// The bytes of the whole budget.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// The bytes that are held now. May be over the limit for a moment: see [`Budget::count`].
    pub fn held(&self) -> usize {
        self.input() + self.0.held(Purpose::Work)
    }

    /// The bytes that bodies and heads may have together.
    pub fn input_limit(&self) -> usize {
        self.0.limit / 2
    }

    /// The bytes that work may have.
    pub fn work_limit(&self) -> usize {
        self.0.limit - self.input_limit()
    }

    /// Reserves memory, if there is some.
    pub fn try_reserve(&self, purpose: Purpose, bytes: usize) -> Option<Reservation> {
        let reservation = self.count(purpose, bytes);
        // Counted first and taken back if it does not fit: two at once may both be refused, and never both admitted.
        self.fits(purpose).then_some(reservation)
    }

    /// Counts memory whether there is some or not: for what exists already, or is too small to be refused.
    pub fn count(&self, purpose: Purpose, bytes: usize) -> Reservation {
        self.0.of(purpose).fetch_add(bytes, Ordering::Relaxed);
        Reservation { budget: self.clone(), purpose, bytes }
    }

    /// The bytes that bodies may reserve now.
    pub fn free_for_input(&self) -> usize {
        self.input_limit().saturating_sub(self.input())
    }

    /// Reserves memory for a hash: at once where one half of the budget has it, else as soon as work has. Meanwhile no
    /// other work is begun. `None` where that takes longer than until the deadline.
    pub fn reserve_for_hash(&self, bytes: usize, deadline: Instant) -> Option<Reservation> {
        let bytes = bytes.min(self.work_limit());
        let at_once =
            || [Purpose::Work, Purpose::Body].into_iter().find_map(|half| self.try_reserve(half, bytes));
        if let Some(reservation) = at_once() {
            return Some(reservation);
        }
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reservation) = at_once() {
            return Some(reservation);
        }
        let reservation = self.count(Purpose::Work, bytes);
        self.0.waits.store(true, Ordering::Relaxed);
        while !self.fits(Purpose::Work) && Instant::now() < deadline {
            self.report_shortage();
            let (lock, freed) = &self.0.freed;
            let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            drop(freed.wait_timeout(guard, LOOK));
        }
        self.0.waits.store(false, Ordering::Relaxed);
        self.fits(Purpose::Work).then_some(reservation)
    }

    /// Has connections closed whose answers do not move, where there is a frontend that can.
    pub fn report_shortage(&self) {
        if let Some(report) = self.0.on_shortage.get() {
            report();
        }
    }

    /// What [`Budget::report_shortage`] does; only the first one counts.
    pub fn on_shortage(&self, report: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.on_shortage.set(Box::new(report));
    }

    fn fits(&self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Head => self.0.held(Purpose::Head) <= self.0.limit / 8 && self.fits(Purpose::Body),
            Purpose::Body => self.input() <= self.input_limit(),
            Purpose::Work => self.0.held(Purpose::Work) <= self.work_limit(),
        }
    }

    fn input(&self) -> usize {
        self.0.held(Purpose::Head) + self.0.held(Purpose::Body)
    }
}

impl Counts {
    fn of(&self, purpose: Purpose) -> &AtomicUsize {
        &self.held[purpose as usize]
    }

    fn held(&self, purpose: Purpose) -> usize {
        self.of(purpose).load(Ordering::Relaxed)
    }
}

/// `12 of 50331648 bytes held`.
impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes held", self.held(), self.limit())
    }
}

impl Reservation {
    /// How much is reserved.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes it larger or smaller, whether there is memory or not.
    pub fn set(&mut self, bytes: usize) {
        let count = self.budget.0.of(self.purpose);
        match bytes > self.bytes {
            true => drop(count.fetch_add(bytes - self.bytes, Ordering::Relaxed)),
            false => self.give_back(self.bytes - bytes),
        }
        self.bytes = bytes;
    }

    /// Makes it at least so large, if there is memory for that.
    #[must_use]
    pub fn try_grow(&mut self, bytes: usize) -> bool {
        let before = self.bytes;
        self.set(bytes.max(before));
        let fits = bytes <= before || self.budget.fits(self.purpose);
        if !fits {
            self.set(before);
        }
        fits
    }

    fn give_back(&self, bytes: usize) {
        let counts = &self.budget.0;
        counts.of(self.purpose).fetch_sub(bytes, Ordering::Relaxed);
        if counts.waits.load(Ordering::Relaxed) {
            counts.freed.1.notify_all();
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Purpose::{Body, Head, Work};
    use std::{sync::mpsc, thread};

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn each_half_has_its_own_limit() {
        let budget = Budget::new(1000);
        let rows: [(Purpose, usize, bool); 8] = [
            (Head, 126, false),
            (Head, 125, true),
            (Head, 1, false),
            (Body, 376, false),
            (Body, 375, true),
            (Work, 501, false),
            (Work, 500, true),
            (Work, 1, false),
        ];
        let mut kept = Vec::new();
        for (purpose, bytes, fits) in rows {
            let reservation = budget.try_reserve(purpose, bytes);
            assert_eq!(reservation.is_some(), fits, "{purpose:?} {bytes}");
            kept.extend(reservation);
        }
        assert_eq!(budget.held(), 1000);
        kept.clear();
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn reservations_change_and_are_given_back() {
        let budget = Budget::new(1000);
        let mut one = budget.try_reserve(Work, 100).unwrap();
        assert!(one.try_grow(500) && one.try_grow(20) && one.bytes() == 500);
        assert!(!one.try_grow(501) && one.bytes() == 500);
        one.set(40);
        assert_eq!(budget.held(), 40);
        drop(one);
        assert_eq!(budget.held(), 0);
        // What exists is counted even if it is too much, and nothing is admitted then.
        let too_much = budget.count(Work, 600);
        assert!(budget.try_reserve(Work, 0).is_none());
        drop(too_much);
        assert!(budget.try_reserve(Work, 500).is_some());
    }

    #[test]
    fn a_hash_takes_what_is_free_in_either_half_and_else_waits() {
        let budget = Budget::new(1000);
        let answers = budget.count(Work, 450);
        let first = budget.reserve_for_hash(400, Instant::now() + LONG).unwrap();
        assert_eq!(first.purpose, Body);
        let (done, result) = mpsc::channel();
        let (shared, reported) = (budget.clone(), mpsc::channel());
        budget.on_shortage(move || {
            let _ = reported.0.send(());
        });
        let waiting = thread::spawn(move || {
            let reservation = shared.reserve_for_hash(400, Instant::now() + LONG);
            done.send(reservation.unwrap().purpose).unwrap();
        });
        reported.1.recv_timeout(LONG).unwrap();
        // Other work is not begun meanwhile, though it would fit without the hash.
        assert!(budget.try_reserve(Work, 50).is_none());
        assert!(result.try_recv().is_err());
        drop(answers);
        assert_eq!(result.recv_timeout(LONG).unwrap(), Work);
        waiting.join().unwrap();
        drop(first);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_hash_does_not_wait_for_ever() {
        let budget = Budget::new(1000);
        let all = [budget.count(Work, 450), budget.count(Body, 450)];
        assert!(budget.reserve_for_hash(400, Instant::now()).is_none());
        drop(all);
        // One that is larger than its half is computed alone.
        let large = budget.reserve_for_hash(5000, Instant::now()).unwrap();
        assert_eq!(large.bytes(), 500);
        drop(large);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn many_threads_leave_nothing_behind() {
        let budget = Budget::new(1 << 20);
        thread::scope(|scope| {
            for thread in 0..4_usize {
                let budget = &budget;
                scope.spawn(move || {
                    for turn in 0..2000 {
                        let purpose = [Head, Body, Work][turn % 3];
                        if let Some(mut held) = budget.try_reserve(purpose, (turn * 37 + thread) << 6) {
                            held.set(turn * 11);
                            drop(held);
                        }
                        if turn % 64 == 0 {
                            drop(budget.reserve_for_hash(300_000, Instant::now() + LONG));
                        }
                    }
                });
            }
        });
        assert_eq!(budget.held(), 0);
    }
}
