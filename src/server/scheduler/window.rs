//! The coalescing window: whether the next batch waits for the clients that have just been answered.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The coalescing window of a lane.
///
/// Clients that send their next request when the last one has been answered return together, one shortly after the other.
/// If the first of them started a batch, the rest would wait until the next one may start: for a commit, or for a part of a
/// round trip. A short wait brings them together. It is worth it where the clients that return, times the wait that it
/// spares each, are more than the commands that wait for them, times the wait. Requests that arrive independently of
/// answers are seldom that many.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// Batches whose clients may yet return in time, the oldest first.
    answered: VecDeque<Answered>,
    /// The share of the clients of a batch that return in time, averaged.
    share: f32,
    /// When the last of them does, averaged.
    took: Duration,
}

/// A batch that was answered.
#[derive(Debug)]
struct Answered {
    at: Instant,
    /// What arrives later is not in time.
    until: Instant,
    commands: usize,
    /// Commands that arrived since, in time.
    returned: usize,
    /// When the last of them did, from `at` on.
    last: Duration,
}

/// The last batch weighs an eighth in an average.
const WEIGHT: u32 = 8;

impl Window {
    /// A batch of so many commands was answered. Its clients are in time if they return within `limit`.
    pub fn open(&mut self, commands: usize, limit: Duration, now: Instant) {
        self.learn(now);
        let (until, returned, last) = (now + limit, 0, Duration::ZERO);
        self.answered.push_back(Answered { at: now, until, commands, returned, last });
    }

    /// A command arrives; whether it is in time, as that of a client that was just answered.
    pub fn arrived(&mut self, now: Instant) -> bool {
        self.learn(now);
        let Some(batch) = self.answered.iter_mut().find(|batch| batch.returned < batch.commands) else {
            return false;
        };
        batch.returned += 1;
        batch.last = now.saturating_duration_since(batch.at);
        true
    }

    /// Until when the next batch, of `waiting` commands, had better wait for those that are about to arrive; `None`: not at
    /// all. `free` batches may start now, and the next one after these `apart` from now.
    pub fn waits(&self, waiting: usize, free: usize, apart: Duration, now: Instant) -> Option<Instant> {
        let (mut expected, mut last, mut until) = (0.0, Duration::ZERO, now);
        for batch in self.answered.iter().filter(|batch| batch.until > now) {
            let missing = self.share * batch.commands as f32 - batch.returned as f32;
            if missing > 0.0 {
                expected += missing;
                // It is late where it is not there on average; it may still come.
                let left = (batch.at + self.took).saturating_duration_since(now);
                last = last.max(left).max(self.took / 2);
                until = batch.until;
            }
        }
        // Each of the batches that may start has its share without a wait.
        let enough = (waiting * free.saturating_sub(1)) as f32 >= expected;
        let gain = expected * apart.as_secs_f32();
        let loss = waiting as f32 * last.as_secs_f32();
        (!enough && gain > loss).then_some(until)
    }

    /// From batches for whose clients it is too late.
    fn learn(&mut self, now: Instant) {
        while let Some(batch) = self.answered.front().filter(|batch| batch.until < now) {
            let share = batch.returned as f32 / batch.commands as f32;
            self.share += (share - self.share) / WEIGHT as f32;
            if batch.returned > 0 {
                self.took = (self.took * (WEIGHT - 1) + batch.last) / WEIGHT;
            }
            self.answered.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SINGLE: Duration = Duration::from_micros(300);

    fn microseconds(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    /// A batch of 4 is answered, 50 times; as many clients as given return after so many microseconds. And once more: the
    /// window, and when it was opened.
    fn learned(returning: usize, after: u64) -> (Window, Instant) {
        let mut now = Instant::now();
        let mut window = Window::default();
        for _ in 0..50 {
            window.open(4, SINGLE, now);
            (0..returning).for_each(|_| assert_eq!(window.arrived(now + microseconds(after)), after <= 300));
            now += 2 * SINGLE;
        }
        window.open(4, SINGLE, now);
        (window, now)
    }

    #[test]
    fn it_is_open_for_clients_that_return_soon() {
        for returning in [3, 4] {
            let (mut window, now) = learned(returning, 150);
            assert_eq!(window.waits(4, 1, SINGLE, now), Some(now + SINGLE));
            let now = now + microseconds(150);
            for there in 0..returning - 1 {
                assert!(window.waits(1 + there, 1, SINGLE, now).is_some(), "{there} of {returning}");
                window.arrived(now);
            }
            window.arrived(now);
            assert_eq!(window.waits(1 + returning, 1, SINGLE, now), None, "all are there");
        }
    }

    #[test]
    fn it_is_not_for_few_for_late_ones_or_for_none() {
        for (returning, after) in [(1, 150), (4, 301), (0, 0)] {
            let (window, now) = learned(returning, after);
            assert_eq!(window.waits(4, 1, SINGLE, now), None, "{returning} after {after} µs");
        }
    }

    #[test]
    fn it_closes_in_time() {
        let (window, now) = learned(4, 150);
        assert!(window.waits(1, 1, SINGLE, now + SINGLE - microseconds(1)).is_some());
        assert_eq!(window.waits(1, 1, SINGLE, now + SINGLE), None);
    }

    #[test]
    fn a_batch_that_has_its_share_waits_for_no_more() {
        let (window, now) = learned(4, 50);
        for (waiting, free, waits) in [(1, 1, true), (1, 4, true), (1, 5, false), (2, 2, true), (4, 2, false)]
        {
            let until = window.waits(waiting, free, SINGLE, now);
            assert_eq!(until.is_some(), waits, "{waiting} waiting, {free} may start");
        }
    }

    #[test]
    fn the_clients_of_several_batches_return() {
        let (mut window, first) = learned(4, 100);
        let second = first + microseconds(50);
        window.open(4, SINGLE, second);
        let now = first + microseconds(100);
        (0..4).for_each(|_| assert!(window.arrived(now)));
        assert_eq!(window.waits(4, 1, SINGLE, now), Some(second + SINGLE));
        (0..4).for_each(|_| assert!(window.arrived(now)));
        assert_eq!(window.waits(8, 1, SINGLE, now), None);
    }

    #[test]
    fn the_first_of_one_client_closes_it() {
        let mut window = Window::default();
        let now = Instant::now();
        for batch in 0..50 {
            let now = now + batch * 2 * SINGLE;
            window.open(1, SINGLE, now);
            window.arrived(now + SINGLE / 2);
            assert_eq!(window.waits(1, 1, SINGLE, now + SINGLE / 2), None);
        }
    }
}
