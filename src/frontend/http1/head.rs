//! The head of a request: judges its fields, and makes the [`Request`] that the body is put into.
//!
//! Owns the rules for the fields (RFC 9112, 5 and 6). Gets a head that is complete and free of forbidden bytes;
//! knows nothing of how it arrived.

use super::request_line::{RequestLine, is_authority};
use super::{Arrived, forwarded};
use crate::http::{Cors, Method, Persistence, Request, RequestId, is_token};
use crate::{config::Limits, error::Error};
use memchr::memchr;
use std::{net::IpAddr, time::Duration};

/// The head of a request.
pub struct Head {
    /// The request, without its body.
    pub arrived: Arrived,
    /// The length of the body, 0 for no body; `None` if it comes in chunks.
    pub length: Option<u64>,
    /// The client waits to be told that the body is welcome.
    pub expects_continue: bool,
}

/// The fields that framing depends on, of which most may be there once.
#[derive(Default)]
struct Framed<'a> {
    host: Option<&'a [u8]>,
    media_type: Option<&'a [u8]>,
    length: Option<&'a [u8]>,
    /// `Expect` asks for `100-continue` alone.
    expects: Option<bool>,
    close: bool,
    keep_alive: bool,
}

impl Head {
    /// Judges the fields of a head. `bytes` is all of it, `line` its request line, `client` the one that it names.
    pub fn new(
        bytes: &[u8],
        line: &RequestLine,
        fields: &[httparse::Header],
        client: Option<IpAddr>,
        limits: &Limits,
    ) -> Result<Head, Error> {
        let http10 = line.http10;
        let refuse = |rule| Err(Error::BadRequest(rule));
        let Framed { host, length, expects, close, keep_alive, .. } = Framed::of(fields)?;
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
        let persistence = if close || (http10 && !keep_alive) {
            Persistence::Close
        } else {
            Persistence::KeepAlive(reliable_seconds(limits.idle_timeout))
        };
        let request = request(bytes, line, client);
        Ok(Head {
            arrived: Arrived { request, persistence },
            length: (!is_chunked).then(|| length.unwrap_or(0)),
            expects_continue: expects.is_some() && !http10,
        })
    }
}

impl<'a> Framed<'a> {
    fn of(fields: &[httparse::Header<'a>]) -> Result<Framed<'a>, Error> {
        let mut found = Framed::default();
        for &httparse::Header { name, value } in fields {
            let is = |known| name.eq_ignore_ascii_case(known);
            if is("host") && found.host.replace(value).is_some() {
                return Err(Error::BadRequest("more than one Host"));
            } else if is("content-type") && found.media_type.replace(value).is_some() {
                return Err(Error::BadRequest("more than one Content-Type"));
            } else if is("content-length") && found.length.replace(value).is_some() {
                return Err(Error::BadRequest("more than one Content-Length"));
            } else if is("expect") {
                let is_known = value.eq_ignore_ascii_case(b"100-continue");
                found.expects = Some(is_known && found.expects != Some(false));
            } else if is("connection") {
                for token in value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii) {
                    found.close |= token.eq_ignore_ascii_case(b"close");
                    found.keep_alive |= token.eq_ignore_ascii_case(b"keep-alive");
                }
            }
        }
        Ok(found)
    }
}

/// Makes the request of a head, all but its body. The authority of an absolute-form target stands before the Host
/// field, which it replaces.
fn request(bytes: &[u8], line: &RequestLine, peer: Option<IpAddr>) -> Request {
    let name = String::from_utf8_lossy(line.method(bytes));
    let method = Method::from(&*name);
    let text = |bytes| String::from_utf8_lossy(bytes);
    let mut fields = text(&bytes[first_field(bytes)..bytes.len() - "\r\n".len()]).into_owned();
    if let Some(authority) = line.authority(bytes) {
        fields.insert_str(0, &format!("Host: {}\r\n", text(authority)));
    }
    let target = line.target(bytes);
    Request { method, method_name: method.shown(&name), target, fields, body: Vec::new(), peer }
}

/// Returns the position of the first field in a head.
fn first_field(head: &[u8]) -> usize {
    memchr(b'\n', head).map_or(head.len(), |end| end + 1)
}

/// Parses the fields of a head into `fields`, whose length is the most fields that the head may have. The head ends with its
/// empty line.
pub fn parse_fields<'a>(
    head: &'a [u8],
    fields: &'a mut [httparse::Header<'a>],
) -> Result<&'a [httparse::Header<'a>], Error> {
    let start = first_field(head);
    match httparse::parse_headers(&head[start..], fields) {
        Ok(httparse::Status::Complete((end, fields))) if start + end == head.len() => Ok(fields),
        Err(httparse::Error::TooManyHeaders) => Err(Error::HeadTooLarge),
        Err(httparse::Error::HeaderName) => Err(Error::BadRequest("a field name is malformed")),
        _ => Err(Error::BadRequest("a field value is malformed")),
    }
}

/// The values that an answer, and the line of the log about it, take from the head of a request, even if it is refused.
#[derive(Default)]
pub struct Echo {
    /// The id that the client gives its request.
    pub id: Option<RequestId>,
    /// The fields that the answer needs for a page of another origin.
    pub cors: Cors,
    /// The method is HEAD, if the bytes show that already: the answer has no body.
    pub head_only: bool,
    /// The client that a trusted proxy names.
    pub client: Option<IpAddr>,
}

impl Echo {
    /// Reads the values from a head `bytes` with this request line and these fields.
    pub fn of(line: &RequestLine, bytes: &[u8], fields: &[httparse::Header], limits: &Limits) -> Echo {
        let named = fields.iter().map(|field| (field.name, field.value));
        let cors = Cors::of(&limits.allowed_origins, named);
        let client = forwarded::client(fields, &limits.trusted_proxies);
        Echo { id: request_id(fields), cors, head_only: line.method(bytes) == b"HEAD", client }
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

/// Judges the transfer codings of all Transfer-Encoding fields, in their order (RFC 9112, 6.1). Returns whether they
/// are `chunked` alone; `None` if there are none.
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

/// Returns the seconds that clients may rely on an idle connection: one less than it is kept, as a request is on its
/// way for a while; but at least one, if it is kept so long.
fn reliable_seconds(idle_timeout: Duration) -> u64 {
    let less = idle_timeout.saturating_sub(Duration::from_secs(1)).as_secs();
    less.max(idle_timeout.as_secs().min(1))
}

/// Parses a Content-Length, which has digits alone. A number beyond a u64 is too large, not malformed.
fn decimal(value: &[u8]) -> Result<u64, Error> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Error::BadRequest("the Content-Length is malformed"));
    }
    Ok(value.iter().fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))))
}
