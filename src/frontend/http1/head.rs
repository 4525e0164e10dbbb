//! The head of a request: what it says, what of it is passed on, and what is wrong with it.
//!
//! Owns the rules for the request line and the fields (RFC 9112, 3 to 6). Gets a head that is whole and free of
//! forbidden bytes; knows nothing of how it came.

use super::framing::Traits;
use crate::{error::Error, http::Persistence};
use std::{fmt::Display, io::Write, mem::MaybeUninit};

/// The fields that the layers above look at. All others end here.
const FORWARDED: [&str; 4] = ["authorization", "content-type", "origin", "sec-fetch-site"];

const MAX_METHOD_BYTES: usize = 32;

/// What a request's head says, as far as anyone here asks.
pub struct Head<'a> {
    method: &'a str,
    /// The path and query; `slash` is missing before them.
    target: &'a str,
    slash: bool,
    /// From an absolute-form target; takes the place of the Host field.
    authority: Option<&'a str>,
    fields: &'a [httparse::Header<'a>],
    /// What has to be known to answer it.
    pub traits: Traits,
    /// How long its body is.
    pub length: Length,
    /// The client waits to be told that the body is welcome.
    pub expects_continue: bool,
}

/// How long the body is.
#[derive(Clone, Copy)]
pub enum Length {
    /// This many bytes; 0 for no body.
    Known(u64),
    /// As the chunks say.
    Chunked,
}

impl<'a> Head<'a> {
    /// Reads a head, its empty line included. `fields` is how many it may have.
    pub fn parse(
        bytes: &'a [u8],
        fields: &'a mut [MaybeUninit<httparse::Header<'a>>],
    ) -> Result<Head<'a>, Error> {
        let mut request = httparse::Request::new(&mut []);
        match request.parse_with_uninit_headers(bytes, fields) {
            Ok(httparse::Status::Complete(end)) if end == bytes.len() => {}
            Ok(_) => return Err(Error::BadRequest("the head is malformed")),
            Err(error) => return Err(refusal(error, bytes)),
        }
        let httparse::Request { method, path, version, headers } = request;
        let method = method.expect("a parsed head has a method");
        let target = path.expect("a parsed head has a target");
        let http10 = version == Some(0);
        let fields: &'a [httparse::Header<'a>] = headers;
        if method.len() > MAX_METHOD_BYTES {
            return Err(Error::BadRequest("the method is too long"));
        }
        let (authority, slash, target) = split_target(method, target)?;

        let (mut hosts, mut close, mut keep_alive, mut expects) = (0, false, false, None);
        let (mut known, mut chunked) = (None, false);
        for field in fields {
            let value = field.value;
            // By length first: most fields are none of these.
            match field.name.len() {
                4 if field.name.eq_ignore_ascii_case("host") => {
                    hosts += 1;
                    if hosts > 1 {
                        return Err(Error::BadRequest("more than one Host"));
                    }
                    if !value.iter().copied().all(is_authority) {
                        return Err(Error::BadRequest("the Host is malformed"));
                    }
                }
                6 if field.name.eq_ignore_ascii_case("expect") => {
                    let known = value.eq_ignore_ascii_case(b"100-continue");
                    expects = Some(known && expects != Some(false));
                }
                10 if field.name.eq_ignore_ascii_case("connection") => {
                    for token in value.split(|&byte| byte == b',') {
                        let token = token.trim_ascii();
                        close |= token.eq_ignore_ascii_case(b"close");
                        keep_alive |= token.eq_ignore_ascii_case(b"keep-alive");
                    }
                }
                14 if field.name.eq_ignore_ascii_case("content-length") => {
                    if known.is_some() {
                        return Err(Error::BadRequest("more than one Content-Length"));
                    }
                    known = Some(decimal(value)?);
                }
                17 if field.name.eq_ignore_ascii_case("transfer-encoding") => {
                    if http10 || chunked || !value.eq_ignore_ascii_case(b"chunked") {
                        return Err(Error::BadRequest(
                            "the only Transfer-Encoding served is one `chunked`, in HTTP/1.1",
                        ));
                    }
                    chunked = true;
                }
                _ => {}
            }
        }
        if hosts == 0 && !http10 {
            return Err(Error::BadRequest("no Host"));
        }
        if chunked && known.is_some() {
            return Err(Error::BadRequest("both Content-Length and Transfer-Encoding"));
        }
        if expects == Some(false) && !http10 {
            return Err(Error::ExpectationFailed);
        }
        Ok(Head {
            method,
            target,
            slash,
            authority,
            fields,
            traits: Traits {
                head_only: method == "HEAD",
                persistence: match (close, http10) {
                    (true, _) => Persistence::Close,
                    (false, false) => Persistence::KeepAlive,
                    (false, true) if keep_alive => Persistence::KeepAliveHttp10,
                    (false, true) => Persistence::Close,
                },
            },
            length: match chunked {
                true => Length::Chunked,
                false => Length::Known(known.unwrap_or(0)),
            },
            expects_continue: expects.is_some() && !http10,
        })
    }

    /// The head as tiny_http gets it, all but the length of the body and the empty line. The seat is the
    /// fragment of the target: most requests need no field then, and each costs tiny_http its line and several
    /// allocations.
    ///
    /// tiny_http ends its one stream at the first line that is not ASCII or not well-formed, so nothing
    /// else may come out of here.
    pub fn write(&self, seat: impl Display, out: &mut Vec<u8>) {
        out.extend_from_slice(self.method.as_bytes());
        out.extend_from_slice(if self.slash { b" /" } else { b" " });
        out.extend_from_slice(self.target.as_bytes());
        write!(out, "#{seat} HTTP/1.1\r\n").expect("writing to memory does not fail");
        let mut from_browser = false;
        for field in self.fields {
            let name = FORWARDED.iter();
            let mut name = name.filter(|name| field.name.eq_ignore_ascii_case(name));
            if let Some(name) = name.next() {
                write_field(name, field.value, out);
                from_browser |= *name == "origin";
            }
        }
        if from_browser {
            let host = |field: &&httparse::Header| field.name.eq_ignore_ascii_case("host");
            let host = self.fields.iter().find(host).map(|field| field.value);
            if let Some(host) = self.authority.map(str::as_bytes).or(host) {
                write_field("host", host, out);
            }
        }
    }
}

fn write_field(name: &str, value: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    // obs-text has no meaning that is known, and tiny_http does not survive it.
    out.extend(value.iter().map(|&byte| if byte.is_ascii() { byte } else { b'?' }));
    out.extend_from_slice(b"\r\n");
}

/// Authority, whether a slash is missing, and path with query (RFC 9112, 3.2).
fn split_target<'a>(method: &str, target: &'a str) -> Result<(Option<&'a str>, bool, &'a str), Error> {
    let malformed = Error::BadRequest("the request target is malformed");
    if !target.bytes().all(|byte| (0x21..=0x7e).contains(&byte)) {
        return Err(malformed);
    }
    let is_authority = |text: &str| !text.is_empty() && text.bytes().all(is_authority);
    if target.starts_with('/') || (target == "*" && method == "OPTIONS") {
        return Ok((None, false, target));
    }
    if method == "CONNECT" && is_authority(target) {
        return Ok((None, false, target));
    }
    let after = |scheme: &str| match target.split_at_checked(scheme.len()) {
        Some((start, rest)) if start.eq_ignore_ascii_case(scheme) => Some(rest),
        _ => None,
    };
    let Some(rest) = after("http://").or_else(|| after("https://")) else {
        return Err(malformed);
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    if !is_authority(authority) {
        return Err(malformed);
    }
    match path {
        "" if method == "OPTIONS" => Ok((Some(authority), false, "*")),
        path => Ok((Some(authority), !path.starts_with('/'), path)),
    }
}

/// A Content-Length: digits and nothing else. More than a u64 holds is too large, not malformed.
fn decimal(value: &[u8]) -> Result<u64, Error> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Error::BadRequest("the Content-Length is malformed"));
    }
    Ok(value.iter().fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))))
}

fn refusal(error: httparse::Error, head: &[u8]) -> Error {
    match error {
        httparse::Error::TooManyHeaders => Error::HeadTooLarge,
        httparse::Error::Version => {
            let mut lines = head.split(|&byte| byte == b'\r');
            let mut parts = lines.next().unwrap_or_default().splitn(3, |&byte| byte == b' ');
            match parts.nth(2).and_then(|part| part.strip_prefix(b"HTTP/")) {
                Some([major, b'.', minor]) if major.is_ascii_digit() && minor.is_ascii_digit() => {
                    Error::VersionNotSupported
                }
                _ => Error::BadRequest("the request line is malformed"),
            }
        }
        httparse::Error::HeaderName => Error::BadRequest("a field name is malformed"),
        httparse::Error::HeaderValue => Error::BadRequest("a field value is malformed"),
        _ => Error::BadRequest("the request line is malformed"),
    }
}

/// The bytes of `host:port` (RFC 3986, 3.2.2); user information has no place in HTTP.
fn is_authority(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=%:[]".contains(&byte)
}
