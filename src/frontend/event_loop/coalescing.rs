//! The event loop waits a moment for the next requests of clients that were answered together, so that one ticket (the
//! message that wakes a worker) hands all of these requests over.
//!
//! Clients that share a batch get their answers within microseconds of one another, so their next requests are not far
//! apart either. If the event loop sent a ticket for the first of these requests without waiting, its worker would
//! execute a batch of one, and the next worker a batch of the remaining ones. One batch of all requests takes less
//! processor time of userd and of PostgreSQL.

use super::EventLoop;
use mio::Events;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{io, thread};

/// How long the event loop waits for the next requests of clients that were answered together. Measured on two cores:
/// eight clients on the same machine need less.
const MAX_COALESCING_WAIT: Duration = Duration::from_micros(200);
/// How many waits in a row may end before all expected requests have come. Then [`SKIPPED_WAITS`] waits are left out.
const MAX_INCOMPLETE_WAITS: u32 = 4;
/// How many waits are left out after [`MAX_INCOMPLETE_WAITS`] incomplete ones. Such clients do not send their next
/// requests soon, and waiting would only delay complete requests.
const SKIPPED_WAITS: u32 = 32;

/// Decides whether the event loop waits for further requests. If the last waits were in vain, the next waits are left
/// out.
#[derive(Default)]
pub(super) struct CoalescingPolicy {
    /// How many waits in a row, up to the last one, ended before all expected requests had come.
    incomplete_waits: u32,
    /// How many of the next waits are left out.
    waits_to_skip: u32,
}

impl CoalescingPolicy {
    /// Returns true if the next wait is to be left out; then decreases `waits_to_skip`.
    fn skips_next_wait(&mut self) -> bool {
        let skips = self.waits_to_skip > 0;
        self.waits_to_skip -= u32::from(skips);
        skips
    }

    /// Counts a wait that has ended. `is_complete` is true if all expected requests came in time.
    fn count_wait(&mut self, is_complete: bool) {
        self.incomplete_waits = if is_complete { 0 } else { self.incomplete_waits + 1 };
        if self.incomplete_waits == MAX_INCOMPLETE_WAITS {
            *self = CoalescingPolicy { incomplete_waits: 0, waits_to_skip: SKIPPED_WAITS };
        }
    }
}

impl EventLoop {
    /// Reads from the connections until as many requests are complete as clients were answered together, but for
    /// [`MAX_COALESCING_WAIT`] at most. Polls without sleeping, because a complete request waits already.
    pub(super) fn coalesce_requests(&mut self, events: &mut Events) -> io::Result<()> {
        let expected = self.slots.expected_requests.swap(0, Ordering::Relaxed);
        if self.slots_without_ticket.len() >= expected || self.coalescing.skips_next_wait() {
            return Ok(());
        }
        let until = self.context.now + MAX_COALESCING_WAIT;
        while self.slots_without_ticket.len() < expected && self.context.now < until {
            thread::yield_now();
            self.poll_and_advance(events, Some(Duration::ZERO))?;
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
        let mut coalescing = CoalescingPolicy::default();
        for _ in 0..2 {
            for miss in 1..=MAX_INCOMPLETE_WAITS {
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
