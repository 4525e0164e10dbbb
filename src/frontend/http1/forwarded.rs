//! The client that a trusted proxy names in `X-Forwarded-For`.
//!
//! Any client can send this field. Each proxy appends the address that called it, so the field is read from the right:
//! the entries of trusted proxies are true, and the first address that is not a trusted proxy's is the client's.
//! Entries further to the left may be made up by that client.

use super::head::field_values;
use crate::config::{TrustedProxies, without_brackets};
use std::net::{IpAddr, SocketAddr};

/// Returns the rightmost address in `X-Forwarded-For` that is not a trusted proxy's, or the leftmost address if all
/// are. If an entry is no address, ignores this entry and all to the left of it. Returns `None` if no proxy is trusted
/// or no client is named.
///
/// The caller uses the result only on a connection of a trusted proxy.
pub fn find_client(fields: &[httparse::Header], proxies: &TrustedProxies) -> Option<IpAddr> {
    if proxies.is_empty() {
        return None;
    }
    let lists = field_values(fields, "x-forwarded-for").map(|list| str::from_utf8(list).unwrap_or_default());
    let hops = lists.flat_map(|list| list.split(','));
    let mut found = None;
    for hop in hops.rev() {
        let Some(address) = parse_address(hop.trim()) else { break };
        found = Some(address);
        if !proxies.contains(found) {
            break;
        }
    }
    found
}

/// Parses an IP address, with or without brackets and port.
fn parse_address(text: &str) -> Option<IpAddr> {
    let bare = without_brackets(text);
    let address = bare.parse::<IpAddr>().ok();
    let address = address.or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()));
    address.map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_behind_proxies() {
        let trusted: TrustedProxies = "10.0.0.0/8, 2001:db8::/32".parse().unwrap();
        let rows: &[(&[&str], Option<&str>)] = &[
            (&[], None),
            (&["1.2.3.4"], Some("1.2.3.4")),
            (&["6.6.6.6, 1.2.3.4"], Some("1.2.3.4")),
            (&["6.6.6.6, 1.2.3.4, 10.0.0.7"], Some("1.2.3.4")),
            (&["6.6.6.6", "1.2.3.4"], Some("1.2.3.4")),
            (&["10.0.0.9, 10.0.0.7"], Some("10.0.0.9")),
            (&["6.6.6.6, unknown, 10.0.0.7"], Some("10.0.0.7")),
            (&["6.6.6.6", "\u{e9}", "10.0.0.7"], Some("10.0.0.7")),
            (&["unknown"], None),
            (&[""], None),
            (&["1.2.3.4:5678"], Some("1.2.3.4")),
            (&["[2001:4::1]:5678"], Some("2001:4::1")),
            (&["[2001:4::1]"], Some("2001:4::1")),
            (&["2001:4::1, 2001:db8::5"], Some("2001:4::1")),
            (&["::ffff:1.2.3.4"], Some("1.2.3.4")),
        ];
        for (values, expected) in rows {
            let header =
                |value: &&'static str| httparse::Header { name: "X-forwarded-FOR", value: value.as_bytes() };
            let forwarded = httparse::Header { name: "Forwarded", value: b"for=6.6.6.6" };
            let fields: Vec<_> = values.iter().map(header).chain([forwarded]).collect();
            let expected = expected.map(|text| text.parse().unwrap());
            assert_eq!(find_client(&fields, &trusted), expected, "{values:?}");
            assert_eq!(find_client(&fields, &TrustedProxies::default()), None);
        }
    }
}
