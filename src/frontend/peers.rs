//! How many connections each peer holds.
//!
//! Owns the rule of whose connections are closed when all slots are taken: those of the peer that holds the most. Pure.

use crate::config::{TrustedProxies, counted_as};
use std::{collections::HashMap, fmt, net::IpAddr};

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// `None` on a Unix socket.
    pub address: Option<IpAddr>,
    /// A trusted proxy: its connections carry many clients, and are never closed to free slots.
    pub trusted: bool,
}

impl Peer {
    pub fn new(address: Option<IpAddr>, proxies: &TrustedProxies) -> Peer {
        // On a socket that takes both, IPv4 peers have an address that is mapped into IPv6.
        let address = address.map(|address| address.to_canonical());
        Peer { address, trusted: proxies.contains(address) }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => address.fmt(f),
            None => f.write_str("a Unix socket"),
        }
    }
}

/// A client as log lines name it, behind a trusted proxy too: its address, or `unix`.
pub struct Client(pub Option<IpAddr>);

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("unix"),
        }
    }
}

/// What connections are counted by: an address, an IPv6 network, or all of a Unix socket.
pub type PeerKey = Option<IpAddr>;

/// How many connections each peer holds, trusted proxies apart.
#[derive(Default)]
pub struct PeerCounts(HashMap<PeerKey, usize>);

impl PeerCounts {
    /// What a peer is counted by; `None` for a trusted proxy, which is not.
    pub fn key(peer: Peer) -> Option<PeerKey> {
        (!peer.trusted).then(|| peer.address.map(counted_as))
    }

    /// One connection more.
    pub fn add(&mut self, peer: Peer) {
        if let Some(key) = PeerCounts::key(peer) {
            *self.0.entry(key).or_default() += 1;
        }
    }

    /// One connection less.
    pub fn remove(&mut self, peer: Peer) {
        let Some(key) = PeerCounts::key(peer) else {
            return;
        };
        let count = self.0.get_mut(&key).expect("it was counted when it was added");
        *count -= 1;
        if *count == 0 {
            self.0.remove(&key);
        }
    }

    /// The peer that holds the most connections, and how many.
    pub fn most(&self) -> Option<(PeerKey, usize)> {
        self.0.iter().map(|(key, count)| (*key, *count)).max_by_key(|(_, count)| *count)
    }

    /// How many connections a peer holds. A trusted proxy holds none: the client behind it may hold none.
    pub fn of(&self, peer: Peer) -> usize {
        PeerCounts::key(peer).and_then(|key| self.0.get(&key).copied()).unwrap_or(0)
    }
}

/// Why a connection may be closed to free its slot for another, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Expendable {
    /// Nothing is lost.
    Idle,
    /// The request is incomplete.
    Incomplete,
    /// The client does not take its answer.
    Stalled,
    /// The request is queued, and no worker has begun to execute it.
    Queued,
}

/// Whether a connection that is not idle may be closed for a newcomer: only if the newcomer's peer does not get ahead
/// of the other by that.
pub fn may_displace(held_by_newcomer: usize, held_by_most: usize) -> bool {
    held_by_newcomer + 1 < held_by_most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_that_holds_the_most() {
        let proxies = "10.0.0.1".parse().unwrap();
        let peer = |text: &str| Peer::new(text.parse().ok(), &proxies);
        let mut counts = PeerCounts::default();
        assert_eq!(counts.most(), None);
        let all = [
            "1.1.1.1",
            "2001:db8::1",
            "2001:db8::2:1",
            "unix",
            "10.0.0.1",
            "10.0.0.1",
            "10.0.0.1",
            "10.0.0.1",
        ];
        for text in all {
            counts.add(peer(text));
        }
        assert_eq!(counts.most(), Some(("2001:db8::".parse().ok(), 2)));
        counts.add(peer("1.1.1.1"));
        counts.add(peer("::ffff:1.1.1.1"));
        assert_eq!(counts.most(), Some(("1.1.1.1".parse().ok(), 3)));
        assert_eq!(
            (counts.of(peer("unix")), counts.of(peer("10.0.0.1")), counts.of(peer("9.9.9.9"))),
            (1, 0, 0)
        );
        for text in all {
            counts.remove(peer(text));
        }
        assert_eq!(counts.of(peer("1.1.1.1")), 2);
        counts.remove(peer("1.1.1.1"));
        counts.remove(peer("1.1.1.1"));
        assert_eq!(counts.most(), None);
    }

    #[test]
    fn displacing_never_reverses_the_order() {
        let rows = [(0, 1, false), (0, 2, true), (1, 2, false), (1, 3, true), (2, 3, false), (5, 5, false)];
        for (newcomer, most, expected) in rows {
            assert_eq!(may_displace(newcomer, most), expected, "{newcomer} {most}");
        }
    }
}
