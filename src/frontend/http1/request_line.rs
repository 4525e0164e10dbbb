//! The request line: method, target and version, and the grammar of `host:port`.
//!
//! Owns the rules of RFC 9112, 2.3 and 3. A line is parsed as soon as it is complete, so that a client that does not
//! speak HTTP is refused early.

use crate::error::Error;
use crate::http::is_http_token_byte;
use fluent_uri::UriRef;
use memchr::memchr;
use std::ops::Range;

/// The text of the refusal of a connection that begins with the PROXY protocol, by which a proxy names its client.
pub const PROXY_REFUSAL: &str = "the connection begins with the PROXY protocol, which is not read here";

/// The text of the refusal of a target with characters that a client has to percent-encode.
const UNENCODED_TARGET_REFUSAL: &str = "the request target has a space, a #, a \\ or a character beyond ASCII in it: percent-encode the \
                           query, as curl -G --data-urlencode does";

/// A well-formed request line. Its parts are positions in the bytes that it was parsed from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestLine {
    /// The position of the method.
    method: Range<usize>,
    /// The position of the path and query.
    target: Range<usize>,
    /// The text that belongs before the path but is not in the target: `/` or, for OPTIONS, `*` if a target in absolute
    /// form has no path; otherwise empty.
    implied_path: &'static str,
    /// The position of the authority (`host:port`) in an absolute-form target. The authority replaces the Host field.
    authority: Option<Range<usize>>,
    /// True for HTTP/1.0. Every higher minor version is treated as 1.1 (RFC 9110, 2.5).
    pub is_http10: bool,
}

impl RequestLine {
    /// Parses a request line. `line` has no line end.
    pub fn parse(line: &[u8]) -> Result<RequestLine, Error> {
        let is_of_proxy = line.starts_with(b"PROXY ");
        let problem = if is_of_proxy { PROXY_REFUSAL } else { "the request line is malformed" };
        let malformed = Error::BadRequest(problem);
        let (Some(first), Some(last)) = (memchr(b' ', line), memchr::memrchr(b' ', line)) else {
            return Err(malformed);
        };
        let method = &line[..first];
        if first >= last || method.is_empty() || !method.iter().copied().all(is_http_token_byte) {
            return Err(malformed);
        }
        let is_http10 = match line[last + 1..].strip_prefix(b"HTTP/") {
            Some([major @ b'0'..=b'9', b'.', minor @ b'0'..=b'9']) => match major {
                b'1' => *minor == b'0',
                _ => return Err(Error::VersionNotSupported),
            },
            _ => return Err(malformed),
        };
        let target = first + 1..last;
        let (authority, implied_path, target) = split_target(line, method, target)?;
        Ok(RequestLine { method: 0..first, target, implied_path, authority, is_http10 })
    }

    /// Returns the method. `head` begins with the request line.
    pub fn method<'a>(&self, head: &'a [u8]) -> &'a [u8] {
        &head[self.method.clone()]
    }

    /// Returns the `host:port` of a target in absolute form (`GET http://host:port/path`); `None` for a target without
    /// it. `head` begins with the request line.
    pub fn authority<'a>(&self, head: &'a [u8]) -> Option<&'a [u8]> {
        self.authority.clone().map(|authority| &head[authority])
    }

    /// Returns the target as path and query (origin-form). `head` begins with the request line.
    pub fn target(&self, head: &[u8]) -> String {
        let target = str::from_utf8(&head[self.target.clone()]).expect("a target is ASCII");
        [self.implied_path, target].concat()
    }
}

/// The position of the authority, the text that belongs before the path, and the position of the path with query.
type TargetParts = (Option<Range<usize>>, &'static str, Range<usize>);

/// Splits the target, which is at `range` in `line`, into the positions of its authority (`host:port`) and of its path
/// with query, and the text that belongs before that path (RFC 9112, 3.2).
fn split_target(line: &[u8], method: &[u8], range: Range<usize>) -> Result<TargetParts, Error> {
    let malformed = Error::BadRequest("the request target is malformed");
    let target = &line[range.clone()];
    // Refuses a fragment (`#`), which no target has, and `\`, which some clients read as a slash.
    let allowed = |byte: &u8| byte.is_ascii_graphic() && !matches!(byte, b'#' | b'\\');
    if !target.iter().all(allowed) {
        return Err(Error::BadRequest(UNENCODED_TARGET_REFUSAL));
    }
    if target.starts_with(b"/") || (target == b"*" && method == b"OPTIONS") {
        return Ok((None, "", range));
    }
    const HTTP_SCHEME: &[u8] = b"http://";
    if !target.get(..HTTP_SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(HTTP_SCHEME)) {
        return Err(malformed);
    }
    let start = range.start + HTTP_SCHEME.len();
    let path = line[start..range.end].iter().position(|byte| matches!(byte, b'/' | b'?'));
    let path = path.map_or(range.end, |length| start + length);
    let authority = &line[start..path];
    if authority.is_empty() || !is_authority(authority) {
        return Err(malformed);
    }
    let implied_path = match line[path..range.end].first() {
        None if method == b"OPTIONS" => "*",
        Some(b'/') => "",
        _ => "/",
    };
    Ok((Some(start..path), implied_path, path..range.end))
}

/// Returns true if a text may be the value of a Host field: empty, `host`, `host:` or `host:port` (RFC 9110, 4.2 and
/// RFC 3986, 3.2). Refuses user information, which HTTP does not allow, a port without a host, and IPvFuture, of which
/// no version exists.
pub fn is_authority(text: &[u8]) -> bool {
    let reference = str::from_utf8(text).map(|text| format!("//{text}")).unwrap_or_default();
    let parsed = UriRef::parse(reference.as_str()).ok();
    let authority = parsed.as_ref().and_then(UriRef::authority);
    authority.is_some_and(|authority| {
        let is_host =
            !authority.host().is_empty() && !authority.host().to_ascii_lowercase().starts_with("[v");
        authority.as_str().as_bytes() == text && !authority.has_userinfo() && (is_host || text.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities() {
        let valid = [
            "",
            "a",
            "a:1",
            "a:",
            "a.b:80",
            "127.0.0.1:8080",
            "[::1]",
            "[::1]:80",
            "[::ffff:1.2.3.4]",
            "%41b",
            "a_b~!$&'()*+,;=",
        ];
        for text in valid {
            assert!(is_authority(text.as_bytes()), "{text}");
        }
        let malformed = [
            "[",
            "[]",
            "[::1",
            "::1",
            "[::1]x",
            "[::1]:x",
            "[g::1]",
            "[1.2.3.4]",
            "[fe80::1%25eth0]",
            "[v1.a]",
            "a:b",
            "a:1:2",
            ":",
            ":80",
            "%zz",
            "%4",
            "%",
            "a b",
            "a/b",
            "a@b",
            "a,b:c",
            "\u{e9}",
            "a\\b",
            "a#b",
            "a?b",
            "a:-1",
            "a:+1",
        ];
        for text in malformed {
            assert!(!is_authority(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn request_lines() {
        let rows: &[(&str, Result<&str, u16>)] = &[
            ("GET / HTTP/1.1", Ok("GET /")),
            ("GET /a?b HTTP/1.9", Ok("GET /a?b")),
            ("GET http://h HTTP/1.1", Ok("GET /")),
            ("GET HTTP://h?q HTTP/1.1", Ok("GET /?q")),
            ("GET http://h:1/x HTTP/1.0", Ok("GET /x")),
            ("OPTIONS * HTTP/1.1", Ok("OPTIONS *")),
            ("OPTIONS http://h HTTP/1.1", Ok("OPTIONS *")),
            ("", Err(400)),
            ("GET", Err(400)),
            ("GET /", Err(400)),
            ("CONNECT h:1 HTTP/1.1", Err(400)),
            ("GET / ", Err(400)),
            ("GET  / HTTP/1.1", Err(400)),
            (" / HTTP/1.1", Err(400)),
            ("GET /a#b HTTP/1.1", Err(400)),
            ("GET /a\\b HTTP/1.1", Err(400)),
            ("GET http:///x HTTP/1.1", Err(400)),
            ("GET https://h/x HTTP/1.1", Err(400)),
            ("GET HTTPS://h HTTP/1.1", Err(400)),
            ("GET http://a:b/ HTTP/1.1", Err(400)),
            ("GET / HTTP/2.0", Err(505)),
            ("GET / HTTP/0.9", Err(505)),
            ("GET / HTTP/1.10", Err(400)),
        ];
        for (line, expected) in rows {
            let found = RequestLine::parse(line.as_bytes()).map(|parsed| {
                let method = String::from_utf8_lossy(parsed.method(line.as_bytes()));
                format!("{method} {}", parsed.target(line.as_bytes()))
            });
            let found = found.map_err(|error| error.answer().status);
            assert_eq!(found.as_deref().map_err(|status| *status), *expected, "{line}");
        }
    }
}
