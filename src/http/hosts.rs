//! Host names: whether a page of another site may be served under a name. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

/// The last labels of host names that no stranger can register, beside `home.arpa`. Keep the list the same
/// as in the log line and in docs/security.md.
const RESERVED_LABELS: [&str; 5] = ["localhost", "local", "internal", "test", "svc"];

/// Returns true if no stranger can own the name in `host` or `host:port`, whatever its case: an IP address, a name
/// without a dot, a name under a reserved one. A page of another site has a name of its own, which then resolves to
/// this server (DNS rebinding), so it can have none of these names.
pub fn is_local(authority: &str) -> bool {
    if let Some(rest) = authority.strip_prefix('[') {
        let address = rest.split_once(']').map(|(address, _)| address);
        return address.is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    }
    let name = without_port(authority);
    let mut labels = name.rsplit('.');
    let (last, before) = (labels.next().unwrap_or_default(), labels.next());
    let is = |label: &str, reserved: &str| label.eq_ignore_ascii_case(reserved);
    match before {
        // Refuses a percent-encoded name, because a character of it may be a dot.
        None => !name.is_empty() && !name.contains('%'),
        Some(_) if last.bytes().all(|byte| byte.is_ascii_digit()) => name.parse::<Ipv4Addr>().is_ok(),
        Some(before) => {
            RESERVED_LABELS.iter().any(|label| is(last, label)) || (is(last, "arpa") && is(before, "home"))
        }
    }
}

/// Returns a host name without its port and its final dot. Not for IPv6 addresses.
pub fn without_port(authority: &str) -> &str {
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
            assert!(is_local(host), "{host}");
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
            assert!(!is_local(host), "{host}");
        }
    }
}
