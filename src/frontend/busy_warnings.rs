//! Warnings about clients that are answered 503: at most one a second for each reason, however many there are.

use super::peers::ClientName;
use crate::error::BusyReason;
use crate::http::{RequestId, log_line};
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use std::{collections::HashMap, fmt, mem, net::IpAddr};

/// The shortest time between two log lines with the same reason.
const MIN_WARNING_INTERVAL: Duration = Duration::from_secs(1);

/// Limits the log lines about clients that are answered 503. Has, for each reason, the time from which the next line
/// may be logged, and the number of lines that were skipped since the last one.
#[derive(Default)]
pub struct BusyWarnings(Mutex<HashMap<&'static str, (Instant, u64)>>);

impl BusyWarnings {
    /// Warns that a request is refused with 503; logs at most one line a second for each reason.
    pub fn warn_of_refusal(&self, why: BusyReason, client: Option<IpAddr>, id: &RequestId) {
        self.warn(why.log_text(), format_args!(", client={}", ClientName(client)), Some(id));
    }

    /// Logs a warning, if the last line with this reason is at least a second old. `id` is the id of the refused
    /// request, if there is one. A panic of the logger, which may be the embedding program's, loses this line alone.
    pub fn warn(&self, why: &'static str, detail: fmt::Arguments, id: Option<&RequestId>) {
        if let Some(skipped) = self.take_skipped_count(Instant::now(), why) {
            let more = match skipped {
                0 => String::new(),
                _ => format!(" (and {skipped} more since the last such line)"),
            };
            let line = || log_line(log::Level::Warn, id, format_args!("503: {why}{detail}{more}"));
            let _ = catch_unwind(AssertUnwindSafe(line));
        }
    }

    /// If a line with this reason may be logged now, returns the number of warnings that were skipped since the last
    /// line. Otherwise counts this warning as skipped, and returns `None`.
    fn take_skipped_count(&self, now: Instant, why: &'static str) -> Option<u64> {
        let mut reasons = self.0.lock();
        let (next, skipped) = reasons.entry(why).or_insert((now, 0));
        if now < *next {
            *skipped += 1;
            return None;
        }
        *next = now + MIN_WARNING_INTERVAL;
        Some(mem::take(skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_for_each_reason() {
        let (warnings, start) = (BusyWarnings::default(), Instant::now());
        let count = |time, what| warnings.take_skipped_count(start + Duration::from_millis(time), what);
        assert_eq!(
            (count(0, "a"), count(1, "a"), count(1, "b"), count(999, "a")),
            (Some(0), None, Some(0), None)
        );
        assert_eq!((count(1000, "a"), count(1001, "b"), count(2000, "a")), (Some(2), Some(0), Some(0)));
    }
}
