//! Any bytes, split in any way: never a panic, the same answers as unsplit, never more requests than the ends of heads,
//! and nothing but visible ASCII in targets and well-formed fields. Chunk extensions and Host fields are held against
//! rules of their own. Tests run these checks, too.
//!
//! The first byte says how many sizes of pieces follow it, and by its two highest bits what the rest is: 01 a chunk's
//! extensions, 10 a Host field, else a whole stream.

use super::{FramedRequest, Framing, Limits, Progress, Request};
use std::net::Ipv6Addr;

pub fn check_all(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else {
        return;
    };
    let (sizes, rest) = rest.split_at(rest.len().min(first as usize % 16));
    match first >> 6 {
        1 => any_extensions(rest, sizes),
        2 => any_host(rest, sizes),
        _ => {
            any_stream(rest, sizes);
        }
    }
}

pub fn limits() -> Limits {
    Limits {
        max_head_bytes: 512,
        max_request_line_bytes: 128,
        max_header_fields: 8,
        max_body_bytes: 64,
        ..Limits::default()
    }
}

fn any_stream(stream: &[u8], sizes: &[u8]) -> usize {
    let limits = limits();
    let at_once = feed(stream, &limits, &[]);
    let split = feed(stream, &limits, sizes);
    assert_eq!(at_once, split, "splits matter");
    let bytes = feed(stream, &limits, &[0; 1]);
    assert_eq!(at_once, bytes, "splits matter");
    let ends = stream.windows(4).filter(|four| four == b"\r\n\r\n").count();
    assert!(at_once.0.len() <= ends, "more answers than requests");
    at_once.0.len()
}

/// Whether the bytes can stand in a line, and the line within its limit.
fn fits(bytes: &[u8]) -> bool {
    bytes.len() < 200 && bytes.iter().all(|&byte| (byte >= b' ' && byte != 0x7f) || byte == b'\t')
}

fn any_extensions(extensions: &[u8], sizes: &[u8]) {
    if !fits(extensions) || extensions.first().is_some_and(u8::is_ascii_hexdigit) {
        return;
    }
    let head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1";
    let stream = [head.as_slice(), extensions, b"\r\nx\r\n0\r\n\r\n"].concat();
    let accepted = any_stream(&stream, sizes) == 1;
    assert_eq!(accepted, are_extensions(extensions), "{:?}", String::from_utf8_lossy(extensions));
}

/// Blanks and a semicolon, and then bytes that are visible or blank.
fn are_extensions(bytes: &[u8]) -> bool {
    let visible = bytes.iter().all(|&byte| byte < 0x7f && (byte == b'\t' || byte >= b' '));
    let first = bytes.iter().find(|&&byte| byte != b' ' && byte != b'\t');
    visible && (bytes.is_empty() || first == Some(&b';'))
}

fn any_host(host: &[u8], sizes: &[u8]) {
    if !fits(host) {
        return;
    }
    let stream = [b"GET / HTTP/1.1\r\nHost:".as_slice(), host, b"\r\n\r\n"].concat();
    let accepted = any_stream(&stream, sizes) == 1;
    assert_eq!(accepted, is_host(host), "{:?}", String::from_utf8_lossy(host));
}

/// RFC 9110, 7.2, from right to left.
fn is_host(value: &[u8]) -> bool {
    let Ok(value) = std::str::from_utf8(value) else {
        return false;
    };
    let value = value.trim_matches([' ', '\t']);
    if value.is_empty() {
        return true;
    }
    let host = value.trim_end_matches(|c: char| c.is_ascii_digit()).strip_suffix(':');
    let host = host.filter(|host| !host.contains(':') || host.ends_with(']')).unwrap_or(value);
    if let Some(address) = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().is_ok();
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=%".contains(c);
    let escapes = host.split('%').skip(1);
    let escaped = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    !host.is_empty() && host.chars().all(allowed) && escapes.into_iter().all(escaped)
}

fn feed(stream: &[u8], limits: &Limits, sizes: &[u8]) -> (Vec<String>, Option<String>, usize) {
    let mut requests = Vec::new();
    let (mut framing, mut kept, mut rest) = (Framing::default(), Vec::new(), stream);
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let size = sizes.next().map_or(rest.len(), |&size| size as usize + 1);
        let (piece, later) = rest.split_at(size.min(rest.len()));
        kept.extend_from_slice(piece);
        rest = later;
        loop {
            let mut used = 0;
            let parsed = framing.parse_more(&kept, &mut used, limits);
            kept.drain(..used);
            match parsed {
                Ok(Progress::Incomplete) => break,
                Ok(Progress::AwaitsContinue) => assert!(kept.is_empty()),
                Ok(Progress::Complete(FramedRequest { request, persistence })) => {
                    check(&request);
                    requests.push(format!("{request:?} {:?} {persistence:?}", request.body));
                    framing = Framing::default();
                }
                Err(error) => return (requests, Some(format!("{error:?}")), 0),
            }
            if kept.is_empty() {
                break;
            }
        }
    }
    assert!(kept.len() <= limits.max_head_bytes + 1);
    (requests, None, kept.len())
}

/// A request as the layers above expect it.
fn check(request: &Request) {
    assert!(request.target.starts_with('/') || request.target == "*");
    assert!(request.target.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#'));
    assert!(request.body.len() <= limits().max_body_bytes);
    let host = request.header("host").unwrap_or_default();
    assert!(is_host(host.as_bytes()), "{host:?}");
    for name in ["content-length", "transfer-encoding", "authorization"] {
        let value = request.header(name).unwrap_or_default();
        assert!(!value.contains(|c: char| c.is_ascii_control() && c != '\t'), "{value:?}");
    }
}
