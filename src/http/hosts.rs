//! Tells host names that no stranger can own from host names that may belong to another site. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The last labels of host names that no stranger can register, beside `home.arpa`. The log line about hosts and
/// docs/security.md have the same list: change all three.
const LOCAL_TOP_DOMAINS: [&str; 5] = ["localhost", "local", "internal", "test", "svc"];

/// Returns whether the host of an `authority` (`host` or `host:port`) is safe from DNS rebinding, because no stranger
/// can own it: the host is an IP address, a name without a dot, or a name that ends in a reserved label. By DNS
/// rebinding, a page of another site can reach this server, but only under a name that the site's owner has registered.
pub fn is_rebind_safe(authority: &str) -> bool {
    if let Some(rest) = authority.strip_prefix('[') {
        let address = rest.split_once(']').map(|(address, _)| address);
        return address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    }
    let name = host_name(authority);
    let mut labels = name.rsplit('.');
    let (last, before) = (labels.next().unwrap_or_default(), labels.next());
    let is = |label: &str, reserved: &str| label.eq_ignore_ascii_case(reserved);
    match before {
        // A percent-encoded name is not local, because one of its characters may be a dot.
        None => !name.is_empty() && !name.contains('%'),
        Some(_) if last.bytes().all(|byte| byte.is_ascii_digit()) => name.parse::<Ipv4Addr>().is_ok(),
        Some(before) => {
            LOCAL_TOP_DOMAINS.iter().any(|label| is(last, label)) || (is(last, "arpa") && is(before, "home"))
        }
    }
}

/// Returns the host name of `host` or `host:port` without its final dot. Not for IPv6 addresses.
pub fn host_name(authority: &str) -> &str {
    let name = authority.split(':').next().unwrap_or_default();
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_stranger_can_own() {
        let local = [
            "127.0.0.1",
            "127.0.0.1:3000",
            "10.1.2.3",
            "8.8.8.8:80",
            "[::1]",
            "[::1]:3000",
            "[2001:db8::7]",
            "localhost",
            "LOCALHOST:1",
            "localhost.",
            "app.localhost",
            "userd",
            "userd:3000",
            "user_d",
            "printer.local",
            "api.INTERNAL:8080",
            "users.home.arpa",
            "home.arpa",
            "a.b.test",
            "userd.default.svc",
            "userd.default.svc.cluster.local.",
            "0x7f000001",
        ];
        for host in local {
            assert!(is_rebind_safe(host), "{host}");
        }
        let foreign = [
            "",
            ".",
            ":80",
            "evil.example",
            "evil.example:3000",
            "evil.example.",
            "localhost.evil.example",
            "local.example",
            "evil.notlocal",
            "evil.mylocalhost",
            "x.arpa",
            "x.athome.arpa",
            "home.arpa.evil.example",
            "1.2.3.4.evil.example",
            "1.2.3.4.5",
            "256.1.1.1",
            "127.1",
            "evil%2eexample",
            "[::1",
            "[::g]",
            "[]",
        ];
        for host in foreign {
            assert!(!is_rebind_safe(host), "{host}");
        }
    }
}
