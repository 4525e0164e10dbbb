//! Requests of clients that were answered together go to the workers together.
//!
//! Clients that share a batch get their answers within microseconds of one another, so their next requests are not far
//! apart either. A ticket for the first of these requests would make a batch of one, and the next ticket a batch of the
//! other clients; one batch of all of them takes less processor time of userd and of PostgreSQL.

use super::EventLoop;
use mio::Events;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{io, thread};

/// How long the event loop waits for the next requests of clients that were answered together. Measured on two cores:
/// eight clients on the same machine need less.
const MAX_WAIT: Duration = Duration::from_micros(200);
/// The number of waits in a row that end before all expected requests have come, after which waits are left out.
const MAX_MISSES: u32 = 4;
/// The number of waits that are left out after [`MAX_MISSES`]: the clients of the moment do not send their next
/// requests at once, so a wait would only delay requests.
const SKIPPED_WAITS: u32 = 32;

/// Decides whether the event loop waits for further requests: not if the last waits were in vain.
#[derive(Default)]
pub(super) struct Coalescing {
    misses: u32,
    skipped: u32,
}

impl Coalescing {
    /// Returns whether the next wait is left out.
    fn skips_next_wait(&mut self) -> bool {
        let skips = self.skipped > 0;
        self.skipped -= u32::from(skips);
        skips
    }

    /// Counts a wait that has ended, with all of the requests or without some of them.
    fn count_wait(&mut self, is_complete: bool) {
        self.misses = if is_complete { 0 } else { self.misses + 1 };
        if self.misses == MAX_MISSES {
            *self = Coalescing { misses: 0, skipped: SKIPPED_WAITS };
        }
    }
}

impl EventLoop {
    /// Reads from the connections until as many requests are complete as clients were answered together, for
    /// [`MAX_WAIT`] at most. Never sleeps, because a complete request waits already.
    pub(super) fn coalesce(&mut self, events: &mut Events) -> io::Result<()> {
        let expected = self.slots.answered_together.swap(0, Ordering::Relaxed);
        if self.slots_without_ticket.len() >= expected || self.coalescing.skips_next_wait() {
            return Ok(());
        }
        let until = self.context.now + MAX_WAIT;
        while self.slots_without_ticket.len() < expected && self.context.now < until {
            thread::yield_now();
            self.poll(events, Some(Duration::ZERO))?;
        }
        self.coalescing.count_wait(self.slots_without_ticket.len() >= expected);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_that_bring_nothing_are_left_out_for_a_while() {
        let mut coalescing = Coalescing::default();
        for _ in 0..2 {
            for miss in 1..=MAX_MISSES {
                assert!(!coalescing.skips_next_wait(), "{miss}");
                coalescing.count_wait(false);
            }
            assert!((0..SKIPPED_WAITS).all(|_| coalescing.skips_next_wait()));
        }
        // A wait that brings all of the requests forgets earlier misses.
        for is_complete in [false, false, false, true, false, false, false] {
            coalescing.count_wait(is_complete);
            assert!(!coalescing.skips_next_wait());
        }
    }
}
