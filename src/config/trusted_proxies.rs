//! The setting `TRUSTED_PROXIES`: addresses and networks of proxies.

use super::setters::parse_list;
use ipnet::{IpNet, Ipv4Net};
use std::{fmt, net::IpAddr, str::FromStr};

/// Proxies whose `X-Forwarded-For` tells the client's address. Parsed from a list with commas or spaces between its
/// entries, such as `127.0.0.1, 10.0.0.0/8, unix`. The entry `unix` stands for every proxy that connects to a Unix
/// socket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Option<IpNet>>);

impl TrustedProxies {
    /// Returns true if no proxy is trusted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if a peer with this address is a trusted proxy. `None` stands for a peer on a Unix socket.
    pub fn contains(&self, peer: Option<IpAddr>) -> bool {
        self.0.iter().any(|entry| match (entry, &peer) {
            (Some(network), Some(peer)) => network.contains(peer),
            (entry, peer) => entry.is_none() && peer.is_none(),
        })
    }
}

impl fmt::Display for TrustedProxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |entry: &Option<IpNet>| entry.map_or("unix".to_owned(), |network| network.to_string());
        f.write_str(&self.0.iter().map(name).collect::<Vec<_>>().join(","))
    }
}

impl FromStr for TrustedProxies {
    /// The problem in one line, with the entry of the list that is wrong.
    type Err = String;

    fn from_str(text: &str) -> Result<TrustedProxies, String> {
        let parse_entry = |entry: &str| match parse_network(entry) {
            None if entry != "unix" => Err(format!("{entry:?} is not an address, a network or `unix`")),
            network => Ok(network),
        };
        parse_list(text, parse_entry).map(TrustedProxies)
    }
}

/// Parses a network or an address; `None` if the text is neither. Turns an IPv4-mapped address (`::ffff:10.0.0.1`) into
/// IPv4, because the addresses of peers are compared in this form.
fn parse_network(entry: &str) -> Option<IpNet> {
    let network = entry.parse().or_else(|_| entry.parse::<IpAddr>().map(IpNet::from)).ok()?;
    match network.addr() {
        IpAddr::V6(address) if let Some(address) = address.to_ipv4_mapped() => {
            Ipv4Net::new(address, network.prefix_len().checked_sub(96)?).ok().map(IpNet::V4)
        }
        _ => Some(network),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_proxies() {
        let trusted: TrustedProxies = "127.0.0.1, 10.0.0.0/8 2001:db8::/33,0.0.0.0/32,unix".parse().unwrap();
        let rows = [
            ("127.0.0.1", true),
            ("127.0.0.2", false),
            ("10.255.0.1", true),
            ("11.0.0.1", false),
            ("2001:db8:7fff::1", true),
            ("2001:db8:8000::1", false),
            ("::1", false),
        ];
        for (address, expected) in rows {
            assert_eq!(trusted.contains(Some(address.parse().unwrap())), expected, "{address}");
        }
        assert!(trusted.contains(None));
        let none = TrustedProxies::default();
        assert!(none.is_empty() && !none.contains(None) && !none.contains(Some([127, 0, 0, 1].into())));
        let all: TrustedProxies = "0.0.0.0/0".parse().unwrap();
        assert!(all.contains(Some([1, 2, 3, 4].into())) && !all.contains(None));
        let mapped: TrustedProxies = "::ffff:10.0.0.0/104, ::ffff:192.0.2.7".parse().unwrap();
        assert_eq!(mapped.to_string(), "10.0.0.0/8,192.0.2.7/32");
        for (address, expected) in [([10, 1, 2, 3], true), ([192, 0, 2, 7], true), ([192, 0, 2, 8], false)] {
            assert_eq!(mapped.contains(Some(address.into())), expected, "{address:?}");
        }
        for text in [
            "x",
            "10.0.0.0/33",
            "10.0.0.0/",
            "10.0.0/8",
            "::/129",
            "10.0.0.1:80",
            "unix:/x",
            "/8",
            "::ffff:10.0.0.0/95",
            "::ffff:10.0.0.0/129",
        ] {
            let wrong = format!("{text:?} is not an address, a network or `unix`");
            assert_eq!(text.parse::<TrustedProxies>(), Err(wrong));
        }
        assert_eq!(trusted.to_string().parse(), Ok(trusted));
    }
}
