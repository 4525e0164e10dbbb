//! Pauses between attempts, for callers that may block.

use super::{explain, sqlstate};
use std::{
    error::Error,
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

/// Retries until an attempt meets no lock, and returns its result. An attempt waits for its locks only as long as reads
/// and writes may wait behind it. Blocks for ten minutes at the most. The error is one line.
pub(super) fn until_unlocked<T, E: Error + 'static>(
    mut attempt: impl FnMut() -> Result<T, E>,
    on_retry: impl Fn(),
) -> Result<T, String> {
    let [first, longest, all] = [500, 10_000, 600_000].map(Duration::from_millis);
    let mut backoff = Backoff::new(first, longest, Instant::now() + all);
    loop {
        match attempt() {
            Err(error) if sqlstate::is_locked(&error) && backoff.pause() => on_retry(),
            result => return result.map_err(|error| explain(&error)),
        }
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
