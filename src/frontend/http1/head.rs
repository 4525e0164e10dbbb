//! The head of a request: checks its fields, and makes the [`Request`] that the body is put into.
//!
//! Owns the rules for the fields (RFC 9112, 5 and 6). Gets a head that is complete and has no forbidden bytes; knows
//! nothing of how it arrived.

use super::request_line::{RequestLine, is_authority};
use super::{ArrivedRequest, forwarded};
use crate::http::{Cors, Method, Persistence, Request, RequestId, is_token};
use crate::{config::Limits, error::Error};
use memchr::memchr;
use std::{net::IpAddr, time::Duration};

/// The head of a request.
pub struct Head {
    /// The request, without its body.
    pub arrived: ArrivedRequest,
    /// The length of the body: 0 for no body, `None` for a body in chunks.
    pub length: Option<u64>,
    /// True if the client waits for 100 (Continue) before it sends the body.
    pub expects_continue: bool,
}

impl Head {
    /// Checks the fields of a head. `bytes` is the whole head, `line` its request line, and `client` the client that
    /// `X-Forwarded-For` names.
    pub fn new(
        bytes: &[u8],
        line: &RequestLine,
        fields: &[httparse::Header],
        client: Option<IpAddr>,
        limits: &Limits,
    ) -> Result<Head, Error> {
        let http10 = line.http10;
        let refuse = |rule| Err(Error::BadRequest(rule));
        single_value(fields, "content-type", "more than one Content-Type")?;
        match single_value(fields, "host", "more than one Host")? {
            None if !http10 => return refuse("no Host"),
            Some(host) if !is_authority(host) => return refuse("the Host is malformed"),
            _ => {}
        }
        let length = single_value(fields, "content-length", "more than one Content-Length")?;
        let length = length.map(parse_length).transpose()?;
        let is_chunked = match parse_codings(fields)? {
            Some(_) if length.is_some() => return refuse("both Content-Length and Transfer-Encoding"),
            Some(_) if http10 => return refuse("a Transfer-Encoding in HTTP/1.0"),
            Some(false) => {
                return Err(Error::NotImplemented("the only Transfer-Encoding served is `chunked`"));
            }
            coding => coding.is_some(),
        };
        let is_known = |value: &[u8]| value.eq_ignore_ascii_case(b"100-continue");
        if !http10 && !values(fields, "expect").all(is_known) {
            return Err(Error::ExpectationFailed);
        }
        let persistence = if has_option(fields, b"close") || http10 && !has_option(fields, b"keep-alive") {
            Persistence::Close
        } else {
            Persistence::KeepAlive(reliable_seconds(limits.idle_timeout))
        };
        let request = make_request(bytes, line, client);
        Ok(Head {
            arrived: ArrivedRequest { request, persistence },
            length: (!is_chunked).then(|| length.unwrap_or(0)),
            expects_continue: !http10 && values(fields, "expect").next().is_some(),
        })
    }
}

/// Returns the values of all fields of this name, whatever its case, in their order.
pub fn values<'a>(fields: &[httparse::Header<'a>], name: &str) -> impl DoubleEndedIterator<Item = &'a [u8]> {
    let named = fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    named.map(|field| field.value)
}

/// Returns the value of a field that may be there once. `repeated`: the rule that several such fields break.
fn single_value<'a>(
    fields: &[httparse::Header<'a>],
    name: &str,
    repeated: &'static str,
) -> Result<Option<&'a [u8]>, Error> {
    let mut values = values(fields, name);
    let first = values.next();
    if values.next().is_some() { Err(Error::BadRequest(repeated)) } else { Ok(first) }
}

/// Returns true if a `Connection` field has this option.
fn has_option(fields: &[httparse::Header], option: &[u8]) -> bool {
    let mut options = values(fields, "connection").flat_map(|value| value.split(|&byte| byte == b','));
    options.any(|given| given.trim_ascii().eq_ignore_ascii_case(option))
}

/// Makes the request of a head, without its body. The authority of a target in absolute form is put before the Host
/// field, which it replaces.
fn make_request(bytes: &[u8], line: &RequestLine, peer: Option<IpAddr>) -> Request {
    let name = String::from_utf8_lossy(line.method(bytes));
    let method = Method::from(&*name);
    let text = |bytes| String::from_utf8_lossy(bytes);
    let mut raw_headers = text(&bytes[fields_start(bytes)..bytes.len() - "\r\n".len()]).into_owned();
    if let Some(authority) = line.authority(bytes) {
        raw_headers.insert_str(0, &format!("Host: {}\r\n", text(authority)));
    }
    let target = line.target(bytes);
    Request { method, method_name: method.name_for_log(&name), target, raw_headers, body: Vec::new(), peer }
}

/// Returns the position of the first field in a head.
fn fields_start(head: &[u8]) -> usize {
    memchr(b'\n', head).map_or(head.len(), |end| end + 1)
}

/// Parses the fields of a head into `fields`, whose length is the most fields that a head may have. `head` ends with
/// its empty line.
pub fn parse_fields<'a>(
    head: &'a [u8],
    fields: &'a mut [httparse::Header<'a>],
) -> Result<&'a [httparse::Header<'a>], Error> {
    let start = fields_start(head);
    match httparse::parse_headers(&head[start..], fields) {
        Ok(httparse::Status::Complete((end, fields))) if start + end == head.len() => Ok(fields),
        Err(httparse::Error::TooManyHeaders) => Err(Error::HeadTooLarge),
        Err(httparse::Error::HeaderName) => Err(Error::BadRequest("a field name is malformed")),
        _ => Err(Error::BadRequest("a field value is malformed")),
    }
}

/// The parts of a head that its answer and its log line need, even if the request is refused.
#[derive(Default)]
pub struct AnswerInfo {
    /// The id that the client has sent in `X-Request-Id`.
    pub id: Option<RequestId>,
    /// The CORS fields of the answer, for a browser with a page of another origin.
    pub cors: Cors,
    /// True if the method is HEAD, as far as its bytes have arrived: the answer then has no body.
    pub head_only: bool,
    /// The client that a trusted proxy names.
    pub client: Option<IpAddr>,
}

impl AnswerInfo {
    /// Reads the values that an answer needs from the head `bytes`, whose request line and fields are parsed already.
    pub fn read(line: &RequestLine, bytes: &[u8], fields: &[httparse::Header], limits: &Limits) -> Self {
        let named = fields.iter().map(|field| (field.name, field.value));
        let cors = Cors::for_fields(&limits.allowed_origins, named);
        let client = forwarded::find_client(fields, &limits.trusted_proxies);
        AnswerInfo { id: parse_request_id(fields), cors, head_only: line.method(bytes) == b"HEAD", client }
    }
}

/// Returns the id in `X-Request-Id`, if there is one such field and the service accepts its value.
fn parse_request_id(fields: &[httparse::Header]) -> Option<RequestId> {
    RequestId::from_client(single_value(fields, "x-request-id", "").ok()??)
}

/// Checks the transfer codings of all Transfer-Encoding fields, in their order (RFC 9112, 6.1). Returns true if the
/// only coding is `chunked`, false if there are other codings, `None` if there are none.
fn parse_codings(fields: &[httparse::Header]) -> Result<Option<bool>, Error> {
    let (mut chunked, mut served) = (false, None);
    for coding in values(fields, "transfer-encoding").flat_map(|value| value.split(|&byte| byte == b',')) {
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

/// Returns how many seconds a client may rely on an idle connection: one second less than the connection is kept,
/// because a request takes time to arrive, but at least one second.
fn reliable_seconds(idle_timeout: Duration) -> u64 {
    let less = idle_timeout.saturating_sub(Duration::from_secs(1)).as_secs();
    less.max(idle_timeout.as_secs().min(1))
}

/// Parses a Content-Length, which has digits alone. A number beyond a u64 becomes the largest one, because such a body
/// is too large and not malformed.
fn parse_length(value: &[u8]) -> Result<u64, Error> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Error::BadRequest("the Content-Length is malformed"));
    }
    Ok(value.iter().fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))))
}
