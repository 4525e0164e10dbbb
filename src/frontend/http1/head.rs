//! The head of a request: checks its header fields, and makes the [`Request`], to which the body is added later.
//!
//! Owns the rules for header fields (RFC 9112, 5 and 6). Gets a complete head without forbidden bytes; knows nothing of
//! how the head arrived.

use super::request_line::{RequestLine, is_authority};
use super::{FramedRequest, forwarded};
use crate::http::{Cors, Method, Persistence, Request, RequestId, is_http_token_byte};
use crate::{config::Limits, error::Error};
use httparse::Header;
use memchr::memchr;
use std::{net::IpAddr, time::Duration};

/// The head of a request, parsed and checked.
pub struct Head {
    /// The request, without its body.
    pub framed_request: FramedRequest,
    /// The number of bytes of the body: 0 for no body, `None` for a body in chunks, whose length is not known.
    pub body_length: Option<u64>,
    /// True if the client waits for 100 (Continue) before it sends the body.
    pub expects_continue: bool,
}

impl Head {
    /// Parses and checks the fields of a head. `line` is the request line of the head, and `client` the client
    /// that `X-Forwarded-For` names.
    pub fn parse(
        head: &[u8],
        line: &RequestLine,
        fields: &[Header],
        client: Option<IpAddr>,
        limits: &Limits,
    ) -> Result<Head, Error> {
        let is_http10 = line.is_http10;
        let refuse = |rule| Err(Error::BadRequest(rule));
        single_field_value(fields, "content-type", "more than one Content-Type")?;
        match single_field_value(fields, "host", "more than one Host")? {
            None if !is_http10 => return refuse("no Host"),
            Some(host) if !is_authority(host) => return refuse("the Host is malformed"),
            _ => {}
        }
        let length = single_field_value(fields, "content-length", "more than one Content-Length")?;
        let length = length.map(parse_content_length).transpose()?;
        let is_chunked = match is_transfer_coding_chunked(fields)? {
            Some(_) if length.is_some() => return refuse("both Content-Length and Transfer-Encoding"),
            Some(_) if is_http10 => return refuse("a Transfer-Encoding in HTTP/1.0"),
            Some(false) => {
                return Err(Error::NotImplemented("the only Transfer-Encoding served is `chunked`"));
            }
            coding => coding.is_some(),
        };
        let is_known = |value: &[u8]| value.eq_ignore_ascii_case(b"100-continue");
        if !is_http10 && !field_values(fields, "expect").all(is_known) {
            return Err(Error::ExpectationFailed);
        }
        let persistence = if has_option(fields, b"close") || is_http10 && !has_option(fields, b"keep-alive") {
            Persistence::Close
        } else {
            Persistence::KeepAliveSeconds(keep_alive_seconds(limits.idle_timeout))
        };
        let request = make_request(head, line, client);
        Ok(Head {
            framed_request: FramedRequest { request, persistence },
            body_length: (!is_chunked).then(|| length.unwrap_or(0)),
            expects_continue: !is_http10 && field_values(fields, "expect").next().is_some(),
        })
    }
}

/// Returns the values of all header fields with this name, in their order. The name may be in any case.
pub fn field_values<'a>(fields: &[Header<'a>], name: &str) -> impl DoubleEndedIterator<Item = &'a [u8]> {
    let named = fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    named.map(|field| field.value)
}

/// Returns the value of a header field that a request may have once. If the request has several such fields, fails with
/// the text `refusal_if_repeated`.
fn single_field_value<'a>(
    fields: &[Header<'a>],
    name: &str,
    refusal_if_repeated: &'static str,
) -> Result<Option<&'a [u8]>, Error> {
    let mut values = field_values(fields, name);
    let first = values.next();
    if values.next().is_some() { Err(Error::BadRequest(refusal_if_repeated)) } else { Ok(first) }
}

/// Returns true if a `Connection` header field has this option, such as `close`.
fn has_option(fields: &[Header], connection_option: &[u8]) -> bool {
    let mut options = field_values(fields, "connection").flat_map(|list| list.split(|&b| b == b','));
    options.any(|given| given.trim_ascii().eq_ignore_ascii_case(connection_option))
}

/// Makes the request of a head, without its body. If the target is in absolute form, its authority replaces the Host
/// field, by standing before it.
fn make_request(head: &[u8], line: &RequestLine, peer: Option<IpAddr>) -> Request {
    let name = String::from_utf8_lossy(line.method(head));
    let method = Method::from(&*name);
    let text = |bytes| String::from_utf8_lossy(bytes);
    let mut raw_headers = text(&head[fields_start(head)..head.len() - "\r\n".len()]).into_owned();
    if let Some(authority) = line.authority(head) {
        raw_headers.insert_str(0, &format!("Host: {}\r\n", text(authority)));
    }
    let target = line.target(head);
    Request { method, method_name: method.name_for_log(&name), target, raw_headers, body: Vec::new(), peer }
}

/// Returns the position of the first header field in a head: behind the request line.
fn fields_start(head: &[u8]) -> usize {
    memchr(b'\n', head).map_or(head.len(), |end| end + 1)
}

/// Parses the header fields of a head into `fields`, whose length is the most fields that a head may have. `head` ends
/// with its empty line.
pub fn parse_fields<'a>(head: &'a [u8], fields: &'a mut [Header<'a>]) -> Result<&'a [Header<'a>], Error> {
    let start = fields_start(head);
    match httparse::parse_headers(&head[start..], fields) {
        Ok(httparse::Status::Complete((end, fields))) if start + end == head.len() => Ok(fields),
        Err(httparse::Error::TooManyHeaders) => Err(Error::HeadTooLarge),
        Err(httparse::Error::HeaderName) => Err(Error::BadRequest("a field name is malformed")),
        _ => Err(Error::BadRequest("a field value is malformed")),
    }
}

/// The parts of a head that the answer and its log line need, even if the request is refused.
#[derive(Default)]
pub struct AnswerInfo {
    /// The request id that the client has sent in `X-Request-Id`, if the service accepts it.
    pub id: Option<RequestId>,
    /// The CORS header fields of the answer, for a browser that shows a page of another origin.
    pub cors: Cors,
    /// True if the answer has no body, because the method is HEAD. Known before the head is complete.
    pub head_only: bool,
    /// The client that `X-Forwarded-For` names. It is used only on a connection of a trusted proxy.
    pub client: Option<IpAddr>,
}

impl AnswerInfo {
    /// Collects the values that an answer needs. `line` and `fields` were parsed from `head`.
    pub fn parse(line: &RequestLine, head: &[u8], fields: &[Header], limits: &Limits) -> Self {
        let named = fields.iter().map(|field| (field.name, field.value));
        let cors = Cors::for_request(&limits.allowed_origins, named);
        let client = forwarded::find_client(fields, &limits.trusted_proxies);
        AnswerInfo { id: parse_request_id(fields), cors, head_only: line.method(head) == b"HEAD", client }
    }
}

/// Returns the id in `X-Request-Id`; `None` if the field is missing or repeated, or if the service does not accept its
/// value.
fn parse_request_id(fields: &[Header]) -> Option<RequestId> {
    RequestId::from_client(single_field_value(fields, "x-request-id", "").ok()??)
}

/// Checks the transfer codings of all Transfer-Encoding fields, in their order (RFC 9112, 6.1). Returns true if the
/// only coding is `chunked`, false if there are other codings, and `None` if there are none.
fn is_transfer_coding_chunked(fields: &[Header]) -> Result<Option<bool>, Error> {
    let (mut chunked, mut served) = (false, None);
    for coding in field_values(fields, "transfer-encoding").flat_map(|list| list.split(|&b| b == b',')) {
        let coding = coding.trim_ascii();
        let name = coding.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
        let is_malformed = chunked || name.is_empty() || !name.iter().copied().all(is_http_token_byte);
        chunked = name.eq_ignore_ascii_case(b"chunked");
        if is_malformed || (chunked && name.len() < coding.len()) {
            return Err(Error::BadRequest("the Transfer-Encoding is malformed, or `chunked` is not its end"));
        }
        served = Some(chunked && served != Some(false));
    }
    Ok(served)
}

/// Returns the time-out for the Keep-Alive field: how many seconds a client may rely on an idle connection. That is one
/// second less than the connection is kept, because a request takes time to arrive, but at least one second.
fn keep_alive_seconds(idle_timeout: Duration) -> u64 {
    let less = idle_timeout.saturating_sub(Duration::from_secs(1)).as_secs();
    less.max(idle_timeout.as_secs().min(1))
}

/// Parses a Content-Length, which has digits alone. A number that is too large for a u64 becomes the greatest u64, so
/// that the body is refused as too large, not as malformed.
fn parse_content_length(value: &[u8]) -> Result<u64, Error> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Error::BadRequest("the Content-Length is malformed"));
    }
    Ok(value.iter().fold(0, |sum: u64, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0'))))
}
