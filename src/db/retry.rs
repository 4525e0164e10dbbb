//! Pauses between attempts, for callers that may block.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Pauses that double from one attempt to the next, and end at a deadline.
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
    deadline: Instant,
}

impl Backoff {
    /// No pause comes after the deadline.
    pub(crate) fn new(first: Duration, longest: Duration, deadline: Instant) -> Backoff {
        Backoff { next: first, longest, deadline }
    }

    /// Blocks for one pause. `false`, at once, where the deadline would pass meanwhile.
    pub(crate) fn pause(&mut self) -> bool {
        let pause = self.next;
        self.next = self.longest.min(2 * pause);
        if Instant::now() + pause >= self.deadline {
            return false;
        }
        thread::sleep(pause);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_end_at_the_deadline() {
        let in_time = Instant::now() + Duration::from_secs(60);
        let mut backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(2), in_time);
        assert!((0..5).all(|_| backoff.pause()));
        let soon = Instant::now() + Duration::from_millis(50);
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1), soon);
        assert!((0..10).filter(|_| backoff.pause()).count() <= 1);
        assert!(!backoff.pause());
    }
}
