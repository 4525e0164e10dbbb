//! The head of a request: judges its fields, and writes the fields that are passed on.
//!
//! Owns the rules for the fields (RFC 9112, 5 and 6). Gets a head that is complete and free of forbidden bytes;
//! knows nothing of how it arrived.

use super::{
    Traits, forwarded,
    request_line::{RequestLine, is_authority, is_token},
};
use crate::{
    config::Limits,
    error::Error,
    http::{Cors, Method, Persistence, RequestId, hosts, percent_decode},
};
use memchr::memchr;
use std::{fmt::Display, io::Write, time::Duration};

/// The fields and paths that the layers above serve.
#[derive(Clone, Copy, Default)]
pub struct Served {
    /// The fields that they read, in lower case, beside Host. All others end here.
    pub fields: &'static [&'static str],
    /// The paths of requests that they answer at once; `*` stands for any.
    pub at_once: &'static [&'static str],
}

impl Served {
    /// The method and the path of a request that is answered at once.
    fn at_once(&self, line: &RequestLine, bytes: &[u8]) -> Option<(Method, &'static str)> {
        let path = str::from_utf8(line.path(bytes)).ok().and_then(percent_decode).unwrap_or_default();
        let found = self.at_once.iter().find(|known| **known == path || **known == "*")?;
        Some((Method::from(str::from_utf8(line.method(bytes)).ok()?), found))
    }
}

/// The head of a request, as far as it is used.
pub struct Head<'a> {
    bytes: &'a [u8],
    line: &'a RequestLine,
    fields: &'a [httparse::Header<'a>],
    /// The Host, or what replaces it; `None` in HTTP/1.0.
    host: Option<&'a str>,
    served: Served,
    /// The traits that its answer depends on.
    pub traits: Traits,
    /// The length of the body, 0 for no body; `None` if it comes in chunks.
    pub length: Option<u64>,
    /// The client waits to be told that the body is welcome.
    pub expects_continue: bool,
}

impl<'a> Head<'a> {
    /// Judges the fields of a head. `bytes` is all of it, `line` its request line.
    pub fn new(
        bytes: &'a [u8],
        line: &'a RequestLine,
        fields: &'a [httparse::Header<'a>],
        limits: &Limits,
        served: Served,
    ) -> Result<Head<'a>, Error> {
        let http10 = line.http10;
        let refuse = |rule| Err(Error::BadRequest(rule));
        let (mut host, mut media_type, mut length) = (None, None, None);
        let (mut close, mut keep_alive, mut expects) = (false, false, None);
        for field in fields {
            let value = field.value;
            let is = |name| field.name.eq_ignore_ascii_case(name);
            if is("host") && host.replace(value).is_some() {
                return refuse("more than one Host");
            } else if is("content-type") && media_type.replace(value).is_some() {
                return refuse("more than one Content-Type");
            } else if is("content-length") && length.replace(value).is_some() {
                return refuse("more than one Content-Length");
            } else if is("expect") {
                let is_known = value.eq_ignore_ascii_case(b"100-continue");
                expects = Some(is_known && expects != Some(false));
            } else if is("connection") {
                for token in value.split(|&byte| byte == b',') {
                    let token = token.trim_ascii();
                    close |= token.eq_ignore_ascii_case(b"close");
                    keep_alive |= token.eq_ignore_ascii_case(b"keep-alive");
                }
            }
        }
        match host {
            None if !http10 => return refuse("no Host"),
            Some(host) if !is_authority(host) => return refuse("the Host is malformed"),
            _ => {}
        }
        let length = length.map(decimal).transpose()?;
        let is_chunked = match codings(fields)? {
            Some(_) if length.is_some() => return refuse("both Content-Length and Transfer-Encoding"),
            Some(_) if http10 => return refuse("a Transfer-Encoding in HTTP/1.0"),
            Some(false) => {
                return Err(Error::NotImplemented("the only Transfer-Encoding served is `chunked`"));
            }
            coding => coding.is_some(),
        };
        if expects == Some(false) && !http10 {
            return Err(Error::ExpectationFailed);
        }
        Ok(Head {
            bytes,
            line,
            fields,
            served,
            host: line.authority(bytes).or(host).and_then(|host| str::from_utf8(host).ok()),
            traits: Traits {
                persistence: match close || (http10 && !keep_alive) {
                    true => Persistence::Close,
                    false => Persistence::KeepAlive(reliable_seconds(limits.idle_timeout)),
                },
                client: forwarded::client(fields, &limits.trusted_proxies),
                at_once: served.at_once(line, bytes),
            },
            length: (!is_chunked).then(|| length.unwrap_or(0)),
            expects_continue: expects.is_some() && !http10,
        })
    }

    /// The head as tiny_http gets it, all but the length of the body and the empty line. `slot` becomes the
    /// fragment of the target: most requests need no field then, and each field costs tiny_http its line and
    /// several allocations.
    ///
    /// A Host that no stranger can own is accepted in any case, so it is left out where no Origin is compared with it.
    ///
    /// tiny_http ends its one stream at the first line that is not ASCII or not well-formed, so nothing else may be
    /// written here.
    pub fn write(&self, slot: impl Display, out: &mut Vec<u8>) {
        self.line.write(self.bytes, out);
        write!(out, "#{slot} HTTP/1.1\r\n").expect("writing to memory does not fail");
        let mut has_origin = false;
        for field in self.fields {
            let mut read = self.served.fields.iter();
            if let Some(name) = read.find(|name| field.name.eq_ignore_ascii_case(name)) {
                write_field(name, field.value, out);
                has_origin |= *name == "origin";
            }
        }
        if let Some(host) = self.host
            && (has_origin || !hosts::is_local(host))
        {
            write_field("host", host.as_bytes(), out);
        }
    }
}

/// The fields of a head, which ends with its empty line. `fields` is how many fields it may have.
pub fn parse_fields<'a>(
    head: &'a [u8],
    fields: &'a mut [httparse::Header<'a>],
) -> Result<&'a [httparse::Header<'a>], Error> {
    let start = memchr(b'\n', head).map_or(head.len(), |end| end + 1);
    match httparse::parse_headers(&head[start..], fields) {
        Ok(httparse::Status::Complete((end, fields))) if start + end == head.len() => Ok(fields),
        Err(httparse::Error::TooManyHeaders) => Err(Error::HeadTooLarge),
        Err(httparse::Error::HeaderName) => Err(Error::BadRequest("a field name is malformed")),
        _ => Err(Error::BadRequest("a field value is malformed")),
    }
}

/// The values that an answer takes from the head of its request, even if it is refused.
#[derive(Default)]
pub struct Echo {
    /// The id that the client gives its request.
    pub id: Option<RequestId>,
    /// The page of a browser that the request is of, as far as CORS concerns it.
    pub cors: Cors,
    /// HEAD, as far as can be told: the answer has no body.
    pub head_only: bool,
}

impl Echo {
    /// Reads the values from a head `bytes` with this request line and these fields.
    pub fn of(line: &RequestLine, bytes: &[u8], fields: &[httparse::Header], limits: &Limits) -> Echo {
        let named = fields.iter().map(|field| (field.name, field.value));
        let method = line.method(bytes);
        let cors = Cors::judge(&limits.allowed_origins, method == b"OPTIONS", named);
        Echo { id: request_id(fields), cors, head_only: method == b"HEAD" }
    }
}

/// Returns the id that the client gives its request, if there is one such field and its value may be taken over.
fn request_id(fields: &[httparse::Header]) -> Option<RequestId> {
    let mut found = fields.iter().filter(|field| field.name.eq_ignore_ascii_case("x-request-id"));
    match (found.next(), found.next()) {
        (Some(field), None) => RequestId::given(field.value),
        _ => None,
    }
}

fn write_field(name: &str, value: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    // obs-text has no defined meaning, and tiny_http does not survive it. A key has none: with this it stays malformed.
    let obs_text = if name == "idempotency-key" { 0x7f } else { b'?' };
    out.extend(value.iter().map(|&byte| if byte.is_ascii() { byte } else { obs_text }));
    out.extend_from_slice(b"\r\n");
}

/// Judges the transfer codings of all Transfer-Encoding fields, in their order (RFC 9112, 6.1). Returns whether they are
/// `chunked` alone; `None` if there are none.
fn codings(fields: &[httparse::Header]) -> Result<Option<bool>, Error> {
    let fields = fields.iter().filter(|field| field.name.eq_ignore_ascii_case("transfer-encoding"));
    let (mut chunked, mut served) = (false, None);
    for coding in fields.flat_map(|field| field.value.split(|&byte| byte == b',')) {
        let coding = coding.trim_ascii();
        let name = coding.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
        let is_malformed = chunked || name.is_empty() || !name.iter().copied().all(is_token);
        chunked = name.eq_ignore_ascii_case(b"chunked");
        if is_malformed || (chunked && name.len() < coding.len()) {
            return Err(Error::BadRequest("the Transfer-Encoding is malformed, or `chunked` is not its end"));
        }
        served = Some(chunked && served != Some(false));
    }
    Ok(served)
}

/// Returns the seconds that clients may rely on an idle connection: one less than it is kept, as a request is on its way
/// for a while; but at least one, if it is kept so long.
fn reliable_seconds(idle_timeout: Duration) -> u64 {
    let less = idle_timeout.saturating_sub(Duration::from_secs(1)).as_secs();
    less.max(idle_timeout.as_secs().min(1))
}

/// A Content-Length: digits and nothing else. More than a u64 holds is too large, not malformed.
fn decimal(value: &[u8]) -> Result<u64, Error> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Error::BadRequest("the Content-Length is malformed"));
    }
    Ok(value.iter().fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))))
}
