//! Warnings about clients that are answered 503: at most one a second for each reason, however many there are.

use super::peers::ClientName;
use crate::http::{RequestId, log_line};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    mem,
    net::IpAddr,
    time::{Duration, Instant},
};

/// The least time between two lines about one reason.
const INTERVAL: Duration = Duration::from_secs(1);

/// The time of the last line about each reason, and how often there was none since.
#[derive(Default)]
pub struct Warnings(Mutex<HashMap<String, (Instant, u64)>>);

impl Warnings {
    /// Logs a warning, if the last one for this reason is long enough ago. `refused`: the client's address, `None` on a
    /// Unix socket, and the request that is refused, if there is one.
    pub fn warn(&self, now: Instant, what: &str, refused: Option<(Option<IpAddr>, &RequestId)>) {
        let Some(skipped) = self.count(now, what) else {
            return;
        };
        let mut line = format!("503: {what}");
        if let Some((client, _)) = refused {
            line += &format!(", client={}", ClientName(client));
        }
        if skipped > 0 {
            line += &format!(" (and {skipped} more since the last such line)");
        }
        log_line(log::Level::Warn, refused.map(|(_, id)| id), format_args!("{line}"));
    }

    /// Counts a warning. Returns how many were skipped since the last line; `None` if this one is skipped, too.
    fn count(&self, now: Instant, what: &str) -> Option<u64> {
        let mut reasons = self.0.lock();
        let Some((last, skipped)) = reasons.get_mut(what) else {
            reasons.insert(what.to_owned(), (now, 0));
            return Some(0);
        };
        if now < *last + INTERVAL {
            *skipped += 1;
            return None;
        }
        *last = now;
        Some(mem::take(skipped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_for_each_reason() {
        let (warnings, start) = (Warnings::default(), Instant::now());
        let count = |time, what| warnings.count(start + Duration::from_millis(time), what);
        assert_eq!(
            (count(0, "a"), count(1, "a"), count(1, "b"), count(999, "a")),
            (Some(0), None, Some(0), None)
        );
        assert_eq!((count(1000, "a"), count(1001, "b"), count(2000, "a")), (Some(2), Some(0), Some(0)));
    }
}
