//! Which client a proxy speaks for: `X-Forwarded-For`, and `Forwarded` (RFC 7239).
//!
//! Any client can send these fields. Each proxy appends the address that it was called from, so they are read from the
//! right: entries that a trusted proxy appended are true, and the first address that is no trusted proxy's is the
//! client's. Entries further to the left may be made up by that client.

use crate::config::{ProxyField, TrustedProxies};
use std::net::{IpAddr, SocketAddr};

/// The client that a trusted proxy speaks for. `None` where there are no trusted proxies, the fields name no client,
/// or either kind is believed and both are there and disagree: a proxy that appends to one kind passes the client's own
/// other kind on.
///
/// Only to be believed on a connection of a trusted proxy.
pub fn client(fields: &[httparse::Header], trusted: &TrustedProxies, believed: ProxyField) -> Option<IpAddr> {
    if trusted.is_empty() {
        return None;
    }
    let (mut plain, mut standard) = (Vec::new(), Vec::new());
    for field in fields {
        let is = |name| field.name.eq_ignore_ascii_case(name);
        let hops = match believed {
            ProxyField::Either | ProxyField::XForwardedFor if is("x-forwarded-for") => &mut plain,
            ProxyField::Either | ProxyField::Forwarded if is("forwarded") => &mut standard,
            _ => continue,
        };
        // A value that is not text hides everything to its left.
        let value = std::str::from_utf8(field.value).unwrap_or("unknown");
        hops.extend(value.split(',').map(str::trim));
    }
    let plain = rightmost_untrusted(plain.into_iter().map(address), trusted);
    let standard = rightmost_untrusted(standard.into_iter().map(|hop| address(for_parameter(hop)?)), trusted);
    match (plain, standard) {
        (Some(one), Some(other)) => (one == other).then_some(one),
        (one, other) => one.or(other),
    }
}

/// The first address from the right that is not a trusted proxy's; where all are, the leftmost. An entry that is no
/// address hides those to its left.
fn rightmost_untrusted(
    hops: impl DoubleEndedIterator<Item = Option<IpAddr>>,
    trusted: &TrustedProxies,
) -> Option<IpAddr> {
    let mut found = None;
    for hop in hops.rev() {
        let Some(hop) = hop else {
            break;
        };
        found = Some(hop);
        if !trusted.contains(Some(hop)) {
            break;
        }
    }
    found
}

/// The `for` of one element of `Forwarded`, without quotes.
fn for_parameter(element: &str) -> Option<&str> {
    let mut parameters = element.split(';').filter_map(|pair| pair.split_once('='));
    let (_, value) = parameters.find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
    Some(value.trim().trim_matches('"'))
}

/// An address, with or without brackets and port.
fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
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
        type Fields = &'static [(&'static str, &'static str)];
        let rows: &[(Fields, Option<&str>)] = &[
            (&[], None),
            (&[("X-Forwarded-For", "1.2.3.4")], Some("1.2.3.4")),
            (&[("x-forwarded-for", "6.6.6.6, 1.2.3.4")], Some("1.2.3.4")),
            (&[("X-Forwarded-For", "6.6.6.6, 1.2.3.4, 10.0.0.7")], Some("1.2.3.4")),
            (&[("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "1.2.3.4")], Some("1.2.3.4")),
            (&[("X-Forwarded-For", "10.0.0.9, 10.0.0.7")], Some("10.0.0.9")),
            (&[("X-Forwarded-For", "6.6.6.6, unknown, 10.0.0.7")], Some("10.0.0.7")),
            (&[("X-Forwarded-For", "unknown")], None),
            (&[("X-Forwarded-For", "")], None),
            (&[("X-Forwarded-For", "1.2.3.4:5678")], Some("1.2.3.4")),
            (&[("X-Forwarded-For", "[2001:4::1]:5678")], Some("2001:4::1")),
            (&[("X-Forwarded-For", "[2001:4::1]")], Some("2001:4::1")),
            (&[("X-Forwarded-For", "2001:4::1, 2001:db8::5")], Some("2001:4::1")),
            (&[("X-Forwarded-For", "::ffff:1.2.3.4")], Some("1.2.3.4")),
            (&[("Forwarded", "for=1.2.3.4")], Some("1.2.3.4")),
            (&[("Forwarded", "For=\"[2001:4::1]:99\";proto=http, for=10.0.0.1;by=x")], Some("2001:4::1")),
            (&[("Forwarded", "for=_hidden, for=10.0.0.1")], Some("10.0.0.1")),
            (&[("Forwarded", "proto=http")], None),
            (&[("Forwarded", "for=1.2.3.4"), ("X-Forwarded-For", "1.2.3.4")], Some("1.2.3.4")),
            // Which of the two is the client's own is not known.
            (&[("Forwarded", "for=6.6.6.6"), ("X-Forwarded-For", "1.2.3.4")], None),
        ];
        for (fields, expected) in rows {
            let header = |(name, value): &(&'static str, &'static str)| httparse::Header {
                name,
                value: value.as_bytes(),
            };
            let fields: Vec<_> = fields.iter().map(header).collect();
            let expected = expected.map(|text| text.parse().unwrap());
            let client = |believed| super::client(&fields, &trusted, believed);
            assert_eq!(client(ProxyField::Either), expected, "{fields:?}");
            assert_eq!(super::client(&fields, &TrustedProxies::default(), ProxyField::Either), None);
            // Of one kind: as if the other one were not there.
            for (believed, other) in
                [(ProxyField::XForwardedFor, "forwarded"), (ProxyField::Forwarded, "x-forwarded-for")]
            {
                let ours = fields.iter().filter(|field| !field.name.eq_ignore_ascii_case(other));
                let ours: Vec<_> = ours.copied().collect();
                assert_eq!(
                    client(believed),
                    super::client(&ours, &trusted, ProxyField::Either),
                    "{fields:?}"
                );
            }
        }
    }
}
