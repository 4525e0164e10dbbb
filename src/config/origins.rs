//! Origins whose pages may use the service from a browser.

use super::value::{is_host_name, list};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::{fmt, str::FromStr, sync::Arc};

/// Exact origins (`https://app.example`), and `*` for any. Parsed from a list, separated by commas or spaces. Empty by
/// default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedOrigins(Vec<Arc<str>>);

impl AllowedOrigins {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entry that allows an origin, as a browser names it.
    pub fn find(&self, origin: &[u8]) -> Option<&Arc<str>> {
        self.0.iter().find(|allowed| ***allowed == *"*" || allowed.as_bytes() == origin)
    }
}

impl fmt::Display for AllowedOrigins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

impl FromStr for AllowedOrigins {
    /// The entry that is wrong, and the reason.
    type Err = String;

    fn from_str(text: &str) -> Result<AllowedOrigins, String> {
        list(text, origin).map(AllowedOrigins)
    }
}

/// Returns the entry in lower case, as browsers write an origin. Refuses an entry that no browser sends, and `null`, the
/// origin of any sandboxed page and local file.
fn origin(entry: &str) -> Result<Arc<str>, String> {
    let lower = entry.to_ascii_lowercase();
    let (scheme, authority) = lower.split_once("://").unwrap_or_default();
    let is_scheme =
        !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c));
    // The colons of an IPv6 address are within brackets.
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_port = port.is_none_or(|port| {
        port.parse::<u16>().is_ok_and(|number| number.to_string() == port)
            && !matches!((scheme, port), ("https", "443") | ("http", "80"))
    });
    if entry == "*" || (is_scheme && is_host(host) && is_port) {
        return Ok(lower.into());
    }
    Err(format!(
        "{entry:?} is no origin as browsers send it: write scheme://host or scheme://host:port in ASCII (xn--…), without a \
         slash at its end and without the port that its scheme has anyway"
    ))
}

/// Returns whether browsers write a host so: a name, or an address in its one shortest form.
fn is_host(host: &str) -> bool {
    if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok_and(|parsed| parsed.to_string() == address);
    }
    let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    is_host_name(host)
        && (!host.rsplit('.').next().is_some_and(is_number) || host.parse::<Ipv4Addr>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries() {
        let rows = [
            ("", Ok("")),
            ("https://app.example", Ok("https://app.example")),
            (
                "https://App.Example, http://localhost:5173 HTTP://[::1]:8080",
                Ok("https://app.example,http://localhost:5173,http://[::1]:8080"),
            ),
            ("capacitor://localhost", Ok("capacitor://localhost")),
            ("chrome-extension://abcdefgh", Ok("chrome-extension://abcdefgh")),
            ("http://[::1]", Ok("http://[::1]")),
            ("*", Ok("*")),
            ("null", Err("\"null\" is no origin")),
            ("app.example", Err("\"app.example\" is no origin")),
            ("https://app.example/", Err("\"https://app.example/\" is no origin")),
            ("https://app.example/path", Err("is no origin")),
            ("https://*.example", Err("is no origin")),
            ("https://user@app.example", Err("is no origin")),
            ("https://", Err("is no origin")),
            ("://a", Err("is no origin")),
            ("https://app.example:443", Err("is no origin")),
            ("http://a:80", Err("is no origin")),
            ("https://bücher.example", Err("is no origin")),
            ("https://.example.com", Err("is no origin")),
            ("https://app..example", Err("is no origin")),
            ("https://-", Err("is no origin")),
            ("https://app.example:", Err("is no origin")),
            ("https://app.example:080", Err("is no origin")),
            ("https://app.example:65536", Err("is no origin")),
            ("https://app.example:*", Err("is no origin")),
            ("http://127.1", Err("is no origin")),
            ("http://[::1", Err("is no origin")),
            ("http://[0:0::1]", Err("is no origin")),
            ("http://::1", Err("is no origin")),
            ("http://my_app.test:8080", Ok("http://my_app.test:8080")),
            ("http://192.168.0.7:8080", Ok("http://192.168.0.7:8080")),
            ("https://a.example https://b.example/", Err("\"https://b.example/\"")),
        ];
        for (text, expected) in rows {
            match (text.parse::<AllowedOrigins>(), expected) {
                (Ok(origins), Ok(shown)) => assert_eq!(origins.0.join(","), shown, "{text}"),
                (Err(line), Err(part)) => assert!(line.contains(part), "{text}: {line}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }

    #[test]
    fn origins_are_compared_exactly() {
        let origins: AllowedOrigins = "https://app.example http://a:81".parse().unwrap();
        for (origin, entry) in [
            ("https://app.example", Some("https://app.example")),
            ("http://a:81", Some("http://a:81")),
            ("http://app.example", None),
            ("https://app.example:8443", None),
            ("https://app.example.evil.example", None),
            ("https://xapp.example", None),
            ("null", None),
            ("*", None),
            ("", None),
        ] {
            assert_eq!(origins.find(origin.as_bytes()).map(|entry| &**entry), entry, "{origin}");
        }
        let any: AllowedOrigins = "*".parse().unwrap();
        assert_eq!(any.find(b"https://x.example").map(|entry| &**entry), Some("*"));
        assert_eq!(any.find(b"*"), any.find(b"https://x.example"));
        assert!(AllowedOrigins::default().find(b"*").is_none());
    }
}
