//! The peers of connections, and the rule which connections may be closed for new ones. Does no input or output.

use crate::config::TrustedProxies;
use crate::http::{PeerKey, peer_network};
use std::{fmt, net::IpAddr};

/// The peer of a connection, or the client for which a trusted proxy sends a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The address of the peer; `None` on a Unix socket.
    pub address: Option<IpAddr>,
    /// True for a trusted proxy between requests. Its connections carry requests of many clients, and are never closed
    /// for new ones.
    pub is_trusted_proxy: bool,
}

impl Peer {
    pub fn new(address: Option<IpAddr>, proxies: &TrustedProxies) -> Peer {
        // Converts an IPv4 address in IPv6 form (`::ffff:192.0.2.1`): a socket that takes IPv4 and IPv6 reports IPv4
        // peers in this form.
        let address = address.map(|address| address.to_canonical());
        Peer { address, is_trusted_proxy: proxies.contains(address) }
    }

    /// Returns the client of a request: the client that a trusted proxy has `named`, else the peer of the connection.
    pub fn client_of_request(self, named: Option<IpAddr>) -> Peer {
        Peer { address: named.filter(|_| self.is_trusted_proxy).or(self.address), is_trusted_proxy: false }
    }

    /// Returns the key under which the connections of this peer are counted; `None` for a trusted proxy, whose
    /// connections are not counted.
    pub fn counting_key(self) -> Option<PeerKey> {
        (!self.is_trusted_proxy).then(|| self.address.map(peer_network))
    }
}

/// Shows a client in log lines: its address, also behind a trusted proxy, or `unix`.
pub struct ClientName(pub Option<IpAddr>);

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(address) => address.fmt(f),
            None => f.write_str("unix"),
        }
    }
}

/// The rank of a connection that may be closed for another one. The client that holds the most connections (or bytes)
/// loses one first. Of its connections that may be closed, one with the lowest rank is closed: `Idle` is the lowest,
/// `Queued` the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CloseRank {
    /// The connection is between requests: closing it loses no request and no answer.
    Idle,
    /// The request is incomplete.
    IncompleteRequest,
    /// The client does not take its answer.
    Stalled,
    /// The request is complete, and no worker has begun to execute it.
    Queued,
}

/// Returns true if a newcomer that holds `held_by_newcomer` connections (or bytes) may take one of a client that holds
/// `held_by_loser`. The newcomer may take an idle connection if it holds no more than the client, which may be the
/// newcomer itself; any other connection only if the newcomer holds no more than the client afterwards, too.
pub fn may_displace(held_by_newcomer: usize, held_by_loser: usize, rank: CloseRank) -> bool {
    held_by_newcomer + 1 < held_by_loser || (rank == CloseRank::Idle && held_by_newcomer <= held_by_loser)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_counted_by_address_and_network() {
        let proxies = "10.0.0.1".parse().unwrap();
        let key = |text: &str| Peer::new(text.parse().ok(), &proxies).counting_key();
        assert_eq!(key("::ffff:1.1.1.1"), key("1.1.1.1"));
        assert_eq!(key("2001:db8::1"), key("2001:db8::2:1"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:1::1"));
        assert_eq!((key("unix"), key("10.0.0.1")), (Some(None), None));
    }

    #[test]
    fn only_idle_connections_are_displaced_if_that_reverses_the_order() {
        let rows = [(0, 1, false), (0, 2, true), (1, 2, false), (1, 3, true), (2, 3, false), (5, 5, false)];
        for (newcomer, held, expected) in rows {
            assert_eq!(
                may_displace(newcomer, held, CloseRank::IncompleteRequest),
                expected,
                "{newcomer} {held}"
            );
            assert!(may_displace(newcomer, held, CloseRank::Idle));
        }
        assert!(!may_displace(2, 1, CloseRank::Idle));
    }
}
