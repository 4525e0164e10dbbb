//! The database's clock as a session has seen it, so that a deadline of ours can be said in its time. Pure values.
//!
//! A network or a stopped server process may hold a statement back for any time, and its request is answered 503
//! meanwhile. So each statement of a change carries the deadline of its request, and changes nothing past it. It is
//! compared with the database's own clock: where that is set back while a statement is held back, the statement may
//! still change something.

use crate::error::Error;
use postgres::Row;
use std::time::{Duration, Instant, SystemTime};

/// For how long a reading is relied on.
const FRESH: Duration = Duration::from_secs(60);

/// A reading that took longer is taken anew where there is time.
const QUICK: Duration = Duration::from_millis(250);

/// How much earlier a statement's deadline is than that of its request: a clock that is adjusted may go slower for a
/// while, and in the long run by one part in [`DRIFT`].
const MARGIN: Duration = Duration::from_millis(50);
const DRIFT: u32 = 1000;

/// What a clock that is adjusted, not set, gains or loses between two readings, at most: this, and one part in
/// [`ADJUSTMENT`].
const TOLERANCE: Duration = Duration::from_millis(50);
const ADJUSTMENT: u32 = 10;

/// What the database's clock was at some moment between a request for it and its answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reading {
    clock: SystemTime,
    sent: Instant,
    received: Instant,
}

impl Reading {
    pub(super) fn new(clock: SystemTime, sent: Instant, received: Instant) -> Reading {
        Reading { clock, sent, received }
    }

    /// Whether it says enough of the clock as it is now.
    pub(super) fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.received) < FRESH && self.received - self.sent < QUICK
    }

    /// The database's time by which a deadline has certainly not passed.
    pub(super) fn before(&self, deadline: Instant) -> SystemTime {
        match deadline.checked_duration_since(self.received) {
            Some(ahead) => self.clock + ahead - (MARGIN + ahead / DRIFT),
            None => self.clock - (MARGIN + (self.received - deadline)),
        }
    }

    /// The latest that the clock may have been when it was received.
    fn latest(&self) -> SystemTime {
        self.clock + (self.received - self.sent)
    }

    /// Whether the clock has not been set between an earlier reading and this one.
    pub(super) fn follows(&self, earlier: &Reading) -> bool {
        let least = self.sent.saturating_duration_since(earlier.received);
        let most = self.received.saturating_duration_since(earlier.sent);
        let tolerance = TOLERANCE + most / ADJUSTMENT;
        self.clock + tolerance >= earlier.clock + least && self.clock <= earlier.clock + most + tolerance
    }
}

/// What a statement of changes has answered.
#[derive(Debug)]
pub(super) struct Changed {
    /// Its rows. The last column is the clock.
    pub(super) rows: Vec<Row>,
    pub(super) deadlines: Vec<SystemTime>,
    /// What the clock was at its end, or later: read after the statement, or by its last row. `None` where it was set
    /// meanwhile.
    pub(super) end: Option<Reading>,
}

impl Changed {
    /// Why a change was not begun, if its deadline may have passed. Where it has not, by our own clock, the database's
    /// was set, or answers take long.
    pub(super) fn not_begun(&self, index: usize, deadline: Instant) -> Option<Error> {
        let is_late = self.end.is_none_or(|end| end.latest() >= self.deadlines[index]);
        is_late.then(|| match deadline > Instant::now() {
            true => Error::Contended,
            false => Error::Unavailable("the database did not begin a change in time".into()),
        })
    }

    /// The row of a single change; `missing` is why there is none, unless its deadline had passed.
    pub(super) fn only(&self, deadline: Instant, missing: impl FnOnce() -> Error) -> Result<&Row, Error> {
        self.rows.first().ok_or_else(|| self.not_begun(0, deadline).unwrap_or_else(missing))
    }
}

/// A trigger may leave a row out.
pub(super) fn no_row() -> Error {
    Error::Internal("an insert returned no row".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn milliseconds(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    #[test]
    fn a_deadline_is_never_said_too_late() {
        let (sent, clock) = (Instant::now(), SystemTime::UNIX_EPOCH + 1000 * SECOND);
        // The clock is read at once and the answer held back, or the other way round.
        for (took, read_after) in [(0, 0), (200, 0), (200, 200), (5000, 0), (5000, 5000)] {
            let received = sent + milliseconds(took);
            let reading = Reading::new(clock + milliseconds(read_after), sent, received);
            for deadline in [sent, received, received + 10 * SECOND] {
                let true_time = clock + (deadline - sent);
                let said = reading.before(deadline);
                assert!(said < true_time, "{took} {read_after}");
                let early = true_time.duration_since(said).unwrap();
                assert!(early <= MARGIN + milliseconds(10 + took - read_after), "{early:?}");
            }
        }
    }

    #[test]
    fn a_clock_that_is_set_is_told_from_one_that_goes() {
        let (start, clock) = (Instant::now(), SystemTime::UNIX_EPOCH + 1000 * SECOND);
        let first = Reading::new(clock, start, start + milliseconds(1));
        // Seconds until the next reading, milliseconds that it takes, and by how much the clock is then off.
        let rows = [
            (0, 1, 0, true),
            (0, 1, 100, false),
            (0, 1, -100, false),
            (1, 1, 100, true),
            (1, 1, -100, true),
            (1, 1, 1000, false),
            (1, 1, -1000, false),
            // An answer that was held back tells less.
            (1, 5000, 1000, true),
            (1, 5000, -1000, false),
            (30, 1, 3_600_000, false),
            (30, 1, -3_600_000, false),
        ];
        for (seconds, took, off, follows) in rows {
            let sent = start + seconds * SECOND;
            let true_time = clock + seconds * SECOND + milliseconds(1);
            let magnitude = milliseconds(i64::unsigned_abs(off));
            let read = if off < 0 { true_time - magnitude } else { true_time + magnitude };
            let reading = Reading::new(read, sent, sent + milliseconds(took));
            assert_eq!(reading.follows(&first), follows, "{seconds} {took} {off}");
        }
    }
}
