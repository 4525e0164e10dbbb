//! Whether other processes keep the threads from running. Pure but for [`Times::of`].

use nix::unistd::Pid;
use std::{
    fs,
    time::{Duration, Instant},
};

/// How often it is looked at, while there are requests.
const PERIOD: Duration = Duration::from_millis(100);

/// Time run and waited that tells enough.
const ENOUGH: Duration = Duration::from_millis(20);

/// The threads were kept from running if they waited for a core so much longer than they ran. Alone with the database
/// and the clients on two and on four cores, under 1 to 500 clients, they waited up to 2.1 times as long; beside a
/// process for each core that never sleeps, 3.4 to 40 times.
const TIMES_AS_LONG: u32 = 3;

/// For how long the cores count as contended then: the first time, and at most, where they are still contended after
/// that.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(16);

/// How long threads have run, and have waited for a core to run on, since they began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Times {
    ran: Duration,
    waited: Duration,
}

/// Whether the cores are contended.
#[derive(Debug)]
pub(super) struct Contention {
    due: Instant,
    last: Times,
    found: bool,
    lasts: Duration,
}

impl Contention {
    /// Not as far as is known.
    pub fn new(now: Instant) -> Contention {
        Contention { due: now + PERIOD, last: Times::default(), found: false, lasts: FIRST }
    }

    /// Whether they are.
    pub fn is_found(&self) -> bool {
        self.found
    }

    /// Whether it is time to [`learn`](Contention::learn).
    pub fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    /// What the threads' times are now. Returns whether that changes anything.
    pub fn learn(&mut self, times: Times, now: Instant) -> bool {
        self.due = now + PERIOD;
        if self.found {
            // Under the usual policy the times do not tell. So the other one is tried again.
            (self.found, self.last) = (false, times);
            return true;
        }
        let ran = times.ran.saturating_sub(self.last.ran);
        let waited = times.waited.saturating_sub(self.last.waited);
        if ran + waited < ENOUGH {
            return false;
        }
        self.last = times;
        self.found = waited > ran * TIMES_AS_LONG;
        if self.found {
            self.due = now + self.lasts;
        }
        self.lasts = if self.found { (self.lasts * 2).min(LONGEST) } else { FIRST };
        self.found
    }
}

impl Times {
    /// Of these threads together: those that have ended, and all where the system does not say, count nothing.
    pub fn of(threads: impl Iterator<Item = Pid>) -> Times {
        let mut all = Times::default();
        for thread in threads {
            let line = fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap_or_default();
            let mut numbers = line.split_ascii_whitespace().map_while(|number| number.parse().ok());
            let mut next = || Duration::from_nanos(numbers.next().unwrap_or_default());
            all.ran += next();
            all.waited += next();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::gettid;

    #[test]
    fn threads_that_wait_for_a_core_much_longer_than_they_run() {
        let start = Instant::now();
        let mut contention = Contention::new(start);
        assert!(!contention.is_due(start) && contention.is_due(start + PERIOD));
        let mut times = Times::default();
        // When, in ms; what was added to both times since the row before, in ms; whether that is contention; the next
        // time.
        let rows = [
            (100, 50, 110, false, 200),
            (200, 1, 18, false, 300),
            (300, 1, 18, true, 1300),
            (1300, 900, 10, false, 1400),
            (1400, 4, 16, true, 3400),
            (3400, 900, 10, false, 3500),
            (3500, 10, 40, true, 7500),
            (7500, 900, 10, false, 7600),
            (7600, 10, 30, false, 7700),
            (7700, 0, 5000, true, 8700),
            (8700, 0, 0, false, 8800),
            (99_000, 5, 14, false, 99_100),
        ];
        for (now, ran, waited, expected, due) in rows {
            let at = |milliseconds| start + Duration::from_millis(milliseconds);
            times.ran += Duration::from_millis(ran);
            times.waited += Duration::from_millis(waited);
            let before = contention.is_found();
            assert_eq!(contention.learn(times, at(now)), before != expected, "after {now} ms");
            assert_eq!((contention.is_found(), contention.due), (expected, at(due)), "after {now} ms");
        }
    }

    #[test]
    fn it_lasts_longer_each_time_up_to_a_bound() {
        let mut now = Instant::now();
        let (mut contention, mut times) = (Contention::new(now), Times::default());
        let mut longest = Duration::ZERO;
        for _ in 0..12 {
            times.waited += Duration::from_secs(1);
            now += PERIOD;
            assert!(contention.learn(times, now) && contention.is_found());
            longest = contention.due - now;
            now = contention.due;
            assert!(contention.learn(times, now) && !contention.is_found());
        }
        assert_eq!(longest, LONGEST);
    }

    #[test]
    fn a_threads_times() {
        let passed = || {
            let Times { ran, waited } = Times::of([gettid(), Pid::from_raw(i32::MAX)].into_iter());
            ran + waited
        };
        let (before, end) = (passed(), Instant::now() + Duration::from_secs(10));
        while passed() < before + Duration::from_millis(20) {
            assert!(Instant::now() < end, "this thread runs, or waits for a core");
        }
    }
}
