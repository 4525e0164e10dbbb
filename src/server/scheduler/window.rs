//! The coalescing window of creates: whether the next batch waits for the clients that have just been answered.

use std::time::{Duration, Instant};

/// The coalescing window of creates.
///
/// Clients that send their next request when the last one has been answered fall into two groups, each of which arrives
/// while the other's batch is in flight: a commit is paid for half of them. A short wait after a batch brings them
/// together. It is worth it where the clients that return, times what a batch costs whatever is in it, are more than the
/// commands that wait for them, times the wait. Requests that arrive independently of answers are never that many.
#[derive(Debug)]
pub(super) struct Window {
    /// When the last batch had been answered.
    opened: Instant,
    /// Commands in it.
    answered: usize,
    /// Commands that arrived since, in time.
    returned: usize,
    /// When the last of them did, from `opened` on.
    last: Duration,
    /// What counts as in time.
    limit: Duration,
    /// The share of the clients of a batch that return in time, averaged.
    share: f32,
    /// When the last of them does, averaged.
    took: Duration,
}

/// The last batch weighs an eighth in an average.
const WEIGHT: u32 = 8;

impl Window {
    pub fn new(now: Instant) -> Window {
        Window {
            opened: now,
            answered: 0,
            returned: 0,
            last: Duration::ZERO,
            limit: Duration::ZERO,
            share: 0.0,
            took: Duration::ZERO,
        }
    }

    /// A batch of so many commands has been answered while others wait; a batch of one takes `single`. Until when the next
    /// batch waits, unless [`Window::is_complete`] before.
    pub fn open(
        &mut self,
        commands: usize,
        waiting: usize,
        single: Duration,
        now: Instant,
    ) -> Option<Instant> {
        self.learn();
        (self.opened, self.answered, self.returned, self.limit) = (now, commands, 0, single);
        let gain = self.share * commands as f32 * single.as_secs_f32();
        let loss = waiting as f32 * self.took.as_secs_f32();
        (gain > loss).then_some(now + single)
    }

    /// A command arrives.
    pub fn arrived(&mut self, now: Instant) {
        let after = now.saturating_duration_since(self.opened);
        if after <= self.limit && self.returned < self.answered {
            self.returned += 1;
            self.last = after;
        }
    }

    /// Whether as many clients have returned as usually do.
    pub fn is_complete(&self) -> bool {
        self.returned as f32 >= self.share * self.answered as f32
    }

    fn learn(&mut self) {
        if self.answered > 0 {
            let share = self.returned as f32 / self.answered as f32;
            self.share += (share - self.share) / WEIGHT as f32;
        }
        if self.returned > 0 {
            self.took = (self.took * (WEIGHT - 1) + self.last) / WEIGHT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SINGLE: Duration = Duration::from_micros(300);

    /// A batch of 4 is answered while 4 wait, 50 times; as many as given return after so many microseconds. The last
    /// window: until when it is open, and whether the returning clients have closed it.
    fn last_of_many(returning: usize, after: u64) -> (Option<Duration>, bool) {
        let mut now = Instant::now();
        let mut window = Window::new(now);
        let mut last = (None, false);
        for _ in 0..50 {
            let until = window.open(4, 4, SINGLE, now);
            last.0 = until.map(|until| until - now);
            (0..returning).for_each(|_| window.arrived(now + Duration::from_micros(after)));
            last.1 = window.is_complete();
            now += 2 * SINGLE;
        }
        last
    }

    #[test]
    fn it_is_open_for_clients_that_return_soon() {
        assert_eq!(last_of_many(4, 150), (Some(SINGLE), true));
        assert_eq!(last_of_many(3, 150), (Some(SINGLE), true));
    }

    #[test]
    fn it_is_not_for_few_for_late_ones_or_for_none() {
        assert_eq!(last_of_many(1, 150).0, None);
        assert_eq!(last_of_many(4, 301).0, None);
        assert_eq!(last_of_many(0, 0).0, None);
    }

    #[test]
    fn the_first_of_one_client_closes_it() {
        let now = Instant::now();
        let mut window = Window::new(now);
        for batch in 0..50 {
            let now = now + batch * 2 * SINGLE;
            window.open(1, 0, SINGLE, now);
            window.arrived(now + SINGLE / 2);
            assert!(window.is_complete());
        }
    }
}
