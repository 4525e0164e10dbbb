//! A request as a value: method, target, fields, body.

use serde_json::Value;
use std::net::{IpAddr, Ipv6Addr};
use std::{borrow::Cow, fmt};
use strum::VariantArray;

/// The HTTP methods that routes have, and `Other` for every further method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "UPPERCASE")]
#[allow(missing_docs)]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Patch,
    Delete,
    Options,
    /// Any other method. No route has it.
    Other,
}

impl From<&str> for Method {
    /// Parses a method's name. `get` is `Other`, because methods are case-sensitive (RFC 9110, 9.1).
    fn from(name: &str) -> Method {
        Method::VARIANTS.iter().copied().find(|known| known.name() == name).unwrap_or(Method::Other)
    }
}

impl Method {
    /// Returns the method's name for the log: `sent_name`, which the client sent, or `OTHER` if no route has the method and
    /// `sent_name` is too long for a log line.
    pub(crate) fn name_for_log(self, sent_name: &str) -> Cow<'static, str> {
        /// The most bytes of an unknown method's name in the log. Almost all registered methods are as short.
        const MAX_LOGGED_NAME_BYTES: usize = 16;
        match self {
            Method::Other if sent_name.len() <= MAX_LOGGED_NAME_BYTES => Cow::Owned(sent_name.to_owned()),
            known => Cow::Borrowed(known.name()),
        }
    }

    /// Returns the method's name, or `OTHER` for a method that no route has.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

/// A complete request, whose whole body has arrived.
#[derive(Clone)]
pub struct Request {
    /// The HTTP method.
    pub method: Method,
    /// The method's name for the log, also of a method that no route has.
    pub(crate) method_name: Cow<'static, str>,
    /// Path and query as they were sent, percent-encoded: `/users?page=2`.
    pub target: String,
    /// The header fields as they were sent: one `name: value` a line.
    pub(crate) raw_headers: String,
    /// The body, without the framing of chunks.
    pub body: Vec<u8>,
    /// The client's address, also if a trusted proxy forwarded the request. `None` if the client used a Unix socket, or
    /// no socket.
    pub peer: Option<IpAddr>,
}

/// The key by which a client's connections, requests and passwords are counted: its IPv4 address or its IPv6 network.
/// `None` for all clients of a Unix socket together.
pub type PeerKey = Option<IpAddr>;

/// Returns the address that stands for a client in a [`PeerKey`]: its IPv4 address, or the /64 network of its IPv6
/// address, because one client usually has such a network to itself.
pub fn peer_network(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => peer,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

/// Shows neither the values of header fields, where a token may be, nor the body, where a password may be.
impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("method", &self.method)
            .field("target", &self.target)
            .field("headers", &self.header_fields().map(|(name, _)| name).collect::<Vec<_>>())
            .field("body", &format_args!("{} bytes", self.body.len()))
            .field("peer", &self.peer)
            .finish()
    }
}

impl Request {
    /// Returns a `GET` of a target: `Request::get("/users?page=2")`.
    pub fn get(target: impl Into<String>) -> Request {
        Request::new(Method::Get, target, "")
    }

    /// Returns a `POST` of a JSON body:
    ///
    /// ```
    /// # use userd::Request;
    /// use serde_json::json;
    ///
    /// let request = Request::post("/users", &json!({"name": "Ada", "email": "ada@example.com"}));
    /// ```
    pub fn post(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Post, target, body.to_string())
    }

    /// Returns a `PUT` of a JSON body.
    pub fn put(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Put, target, body.to_string())
    }

    /// Returns a `PATCH` of a JSON body.
    pub fn patch(target: impl Into<String>, body: &Value) -> Request {
        Request::new(Method::Patch, target, body.to_string())
    }

    /// Returns a `DELETE` of a target.
    pub fn delete(target: impl Into<String>) -> Request {
        Request::new(Method::Delete, target, "")
    }

    /// Adds a header: `.with("Authorization", "Bearer …")`. Replaces line ends in the name and the value by spaces.
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Request {
        let line = format!("{}: {}", name.into(), value.into());
        self.raw_headers += &line.replace(['\r', '\n'], " ");
        self.raw_headers += "\r\n";
        self
    }

    /// Returns a request without headers, of any method and with any body.
    pub fn new(method: impl Into<Method>, target: impl Into<String>, body: impl Into<Vec<u8>>) -> Request {
        let method = method.into();
        Request {
            method,
            method_name: method.name().into(),
            target: target.into(),
            raw_headers: String::new(),
            body: body.into(),
            peer: None,
        }
    }

    /// Returns the value of the first header field of this name (case-insensitive).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.header_values(name).next()
    }

    /// Returns the values of all header fields of this name (case-insensitive), in the order of the request.
    pub(crate) fn header_values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.header_fields().filter(move |field| field.0.eq_ignore_ascii_case(name)).map(|field| field.1)
    }

    /// Returns the names and values of all header fields, in the order of the request.
    pub(crate) fn header_fields(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.raw_headers.split('\n').filter_map(|line| line.split_once(':'));
        pairs.map(|(name, value)| (name, value.trim_matches([' ', '\t', '\r'])))
    }

    /// Returns how many bytes of memory the request takes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.target.len() + self.raw_headers.len() + self.body.len()
    }

    /// Returns the path, without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }
}

/// Decodes a percent-encoded text. Returns `None` if a `%` has no two hexadecimal digits, or if the result is not
/// UTF-8.
pub fn percent_decode(text: &str) -> Option<Cow<'_, str>> {
    let is_escape = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    let decoded = percent_encoding::percent_decode_str(text).decode_utf8().ok();
    decoded.filter(|_| text.split('%').skip(1).all(is_escape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_counted_by_address_or_network() {
        let rows = [
            ("127.0.0.2", "127.0.0.2"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:3:3:4:5:6", "2001:db8:1:3::"),
        ];
        for (peer, expected) in rows {
            assert_eq!(peer_network(peer.parse().unwrap()), expected.parse::<IpAddr>().unwrap());
        }
    }

    #[test]
    fn percent_decoding() {
        let rows = [
            ("abc", Some("abc")),
            ("%34%32", Some("42")),
            ("%4", None),
            ("%", None),
            ("%+1", None),
            ("%zz", None),
            ("%ff", None),
            ("%c3%a9", Some("é")),
            ("%2531", Some("%31")),
            ("a%", None),
            ("%4%31", None),
            ("%é", None),
        ];
        for (text, expected) in rows {
            assert_eq!(percent_decode(text).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn requests_are_shown_without_secrets() {
        let request = Request::post("/users/authenticate", &serde_json::json!({"password": "hunter2"}));
        let shown = format!("{:?}", request.with("Authorization", "Bearer t0ken"));
        assert!(shown.contains("Authorization") && shown.contains("22 bytes"), "{shown}");
        assert!(!shown.contains("hunter2") && !shown.contains("t0ken"), "{shown}");
    }
}
