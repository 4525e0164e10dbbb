//! Pauses between attempts, for callers that may block.

use crate::error::Error;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Pauses that double from one attempt to the next, and end at a deadline.
pub(super) struct Backoff {
    next: Duration,
    longest: Duration,
    deadline: Instant,
}

impl Backoff {
    pub(super) fn new(first: Duration, longest: Duration, deadline: Instant) -> Backoff {
        Backoff { next: first, longest, deadline }
    }

    /// Blocks for one pause. `false`, at once, where the deadline would pass meanwhile.
    pub(super) fn pause(&mut self) -> bool {
        let pause = self.next;
        self.next = self.longest.min(2 * pause);
        if Instant::now() + pause >= self.deadline {
            return false;
        }
        thread::sleep(pause);
        true
    }
}

/// Runs `work` again for as long as it ends with [`Error::Contended`], after pauses of 20 ms that grow to 500 ms, and
/// not after the deadline. Holds no session while it pauses. For callers without a scheduler: they block meanwhile.
pub fn retry_contended<T>(deadline: Instant, mut work: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    /// For the transaction that won: a loser that comes back at once often takes its locks again before the winner
    /// wakes, and both deadlock once more (3 of 25 times on a busy machine).
    const FIRST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(500);
    let mut backoff = Backoff::new(FIRST, LONGEST, deadline);
    loop {
        match work() {
            Err(Error::Contended) if backoff.pause() => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contention_is_waited_out_until_the_deadline() {
        let in_time = Instant::now() + Duration::from_secs(60);
        let mut attempts = 0;
        let outcome = retry_contended(in_time, || {
            attempts += 1;
            if attempts < 3 { Err(Error::Contended) } else { Ok(attempts) }
        });
        assert_eq!(outcome.ok(), Some(3));

        let mut attempts = 0;
        let soon = Instant::now() + Duration::from_millis(50);
        let outcome: Result<(), Error> = retry_contended(soon, || {
            attempts += 1;
            Err(Error::Contended)
        });
        assert!(matches!(outcome, Err(Error::Contended)));
        assert!((1..=2).contains(&attempts), "{attempts}");

        let mut attempts = 0;
        let outcome: Result<(), Error> = retry_contended(in_time, || {
            attempts += 1;
            Err(Error::NotFound)
        });
        assert!(matches!((outcome, attempts), (Err(Error::NotFound), 1)));
    }
}
