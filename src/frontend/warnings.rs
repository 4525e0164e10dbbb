//! Warnings about clients that are answered 503: at most one a second for each reason, however many there are.

use super::peers::{Client, PeerKey};
use crate::{
    config::counted_as,
    http::{RequestId, log_line},
};
use parking_lot::Mutex;
use std::{
    cmp::Reverse,
    collections::HashMap,
    fmt::Write,
    mem,
    net::IpAddr,
    time::{Duration, Instant},
};

const PAUSE: Duration = Duration::from_secs(1);

/// Peers that are counted between two lines; the requests of others are counted without them.
const MAX_PEERS: usize = 1024;

/// Peers that a line names.
const NAMED: usize = 3;

/// The reasons of which there has been a line.
#[derive(Default)]
pub struct Warnings(Mutex<HashMap<String, SinceTheLast>>);

/// What has happened since the last line.
struct SinceTheLast {
    last: Instant,
    skipped: u64,
    peers: HashMap<PeerKey, u64>,
}

impl Warnings {
    /// `refused`: the client's address, `None` on a Unix socket, and the request that is refused now, where there is one.
    pub fn warn(&self, now: Instant, what: &str, refused: Option<(Option<IpAddr>, &RequestId)>) {
        let mut reasons = self.0.lock();
        let Some(reason) = reasons.get_mut(what) else {
            let peers = HashMap::new();
            reasons.insert(what.to_owned(), SinceTheLast { last: now, skipped: 0, peers });
            drop(reasons);
            return log_line(log::Level::Warn, refused.map(|(_, id)| id), format_args!("503: {what}"));
        };
        if now < reason.last + PAUSE {
            return reason.skip(refused.map(|(peer, _)| peer));
        }
        let more = reason.take(now);
        drop(reasons);
        log_line(log::Level::Warn, refused.map(|(_, id)| id), format_args!("503: {what}{more}"));
    }
}

impl SinceTheLast {
    fn skip(&mut self, peer: Option<Option<IpAddr>>) {
        self.skipped += 1;
        let Some(key) = peer.map(|address| address.map(counted_as)) else {
            return;
        };
        if let Some(count) = self.peers.get_mut(&key) {
            *count += 1;
        } else if self.peers.len() < MAX_PEERS {
            self.peers.insert(key, 1);
        }
    }

    /// What a line says of those that had none, and that they are said. Empty where there were none.
    fn take(&mut self, now: Instant) -> String {
        self.last = now;
        let skipped = mem::take(&mut self.skipped);
        let mut peers: Vec<_> = mem::take(&mut self.peers).into_iter().collect();
        if skipped == 0 {
            return String::new();
        }
        peers.sort_unstable_by_key(|(key, count)| (Reverse(*count), *key));
        let mut text = format!(" (and {skipped} more since the last such line");
        for (at, (key, count)) in peers.into_iter().take(NAMED).enumerate() {
            let before = if at == 0 { "; the most from" } else { "," };
            let _ = write!(text, "{before} {} ({count})", Client(key));
        }
        text + ")"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peers_that_had_the_most_are_named() {
        let now = Instant::now();
        let mut reason = SinceTheLast { last: now, skipped: 0, peers: HashMap::new() };
        assert_eq!(reason.take(now), "");
        reason.skip(None);
        assert_eq!(reason.take(now), " (and 1 more since the last such line)");
        let rows = [("10.0.0.1", 2), ("2001:db8::1", 1), ("2001:db8::2", 3), ("unix", 1), ("10.0.0.2", 1)];
        for (address, count) in rows {
            (0..count).for_each(|_| reason.skip(Some(address.parse().ok())));
        }
        let expected =
            " (and 8 more since the last such line; the most from 2001:db8:: (4), 10.0.0.1 (2), unix (1))";
        assert_eq!((reason.take(now).as_str(), reason.take(now).as_str()), (expected, ""));
        for address in 0..100_000_u32 {
            reason.skip(Some(Some(IpAddr::V4(address.into()))));
        }
        assert_eq!((reason.skipped, reason.peers.len()), (100_000, MAX_PEERS));
    }
}
