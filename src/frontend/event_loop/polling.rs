//! When the event loop polls instead of sleeping. A pure value: no clock, no system call.
//!
//! A thread that sleeps is woken by an interrupt, and on a core that sleeps, too, in a virtual machine above all, that
//! takes longer than a request's work. While few clients send one short request after the other, the event loop keeps
//! its core awake instead: it asks for events again and again, and lets any other thread of that core run in between.

use std::time::{Duration, Instant};

/// Requests that came soon one after the other before polling begins.
const IN_A_ROW: u32 = 8;

/// How soon requests have come.
#[derive(Debug)]
pub(super) struct Polling {
    last: Instant,
    in_a_row: u32,
}

impl Polling {
    /// No request yet.
    pub fn new(now: Instant) -> Polling {
        Polling { last: now, in_a_row: 0 }
    }

    /// Requests have come. `time` is for how long polling pays after one.
    pub fn request(&mut self, time: Duration, now: Instant) {
        let soon = now.saturating_duration_since(self.last) <= time;
        self.in_a_row = if soon { self.in_a_row.saturating_add(1) } else { 0 };
        self.last = now;
    }

    /// Whether to poll once more.
    pub fn pays(&self, time: Duration, now: Instant) -> bool {
        self.in_a_row >= IN_A_ROW && now < self.last + time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(400);

    fn after(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    /// Requests at these distances.
    fn polling(start: Instant, distances: impl IntoIterator<Item = u64>) -> (Polling, Instant) {
        let (mut polling, mut now) = (Polling::new(start), start);
        for distance in distances {
            now += after(distance);
            polling.request(TIME, now);
        }
        (polling, now)
    }

    #[test]
    fn it_polls_where_requests_come_soon_one_after_the_other() {
        let start = Instant::now();
        let rows: [(&str, Vec<u64>, bool); 5] = [
            ("a client in a loop", vec![200; 8], true),
            ("too few to tell", vec![200; 7], false),
            ("a few now and then", [[100, 100, 100, 5000]; 9].concat(), false),
            ("a pause, then a loop", [vec![5000], vec![200; 8]].concat(), true),
            ("a loop, then a pause", [vec![200; 90], vec![401]].concat(), false),
        ];
        for (name, distances, expected) in rows {
            let (polling, now) = polling(start, distances);
            assert_eq!(polling.pays(TIME, now + after(100)), expected, "{name}");
        }
    }

    #[test]
    fn it_polls_for_no_longer_than_it_pays() {
        let (polling, now) = polling(Instant::now(), vec![100; 9]);
        for (time, waited, expected) in
            [(400, 399, true), (400, 400, false), (100, 200, false), (0, 0, false)]
        {
            assert_eq!(polling.pays(after(time), now + after(waited)), expected, "{waited} of {time}");
        }
    }
}
