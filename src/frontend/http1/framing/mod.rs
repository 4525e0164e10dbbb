//! Turns the bytes of a connection into complete requests, by a strict reading of RFC 9112.
//!
//! Owns the decision which bytes are a request; `request_line`, `head` and `body` know the details. Knows no socket, no
//! clock and no thread. The result does not depend on how the bytes were split on the way: a request is refused at the
//! first byte that makes it wrong.

use super::head::{AnswerInfo, Head, parse_fields};
use super::request_line::{PROXY_REFUSAL, RequestLine};
use super::{Progress, body::ArrivingRequest, next_line};
use crate::config::{Limits, MAX_HEADER_FIELDS};
use crate::error::Error;
use std::net::IpAddr;

/// The most empty lines before a request line (RFC 9112, 2.2 asks for at least one).
const MAX_LEADING_EMPTY_LINES: u8 = 4;
/// The first byte of a TLS handshake, which a client sends that expects https.
const TLS_HANDSHAKE_BYTE: u8 = 0x16;

/// The parser of one request, from the bytes of a connection. The next request gets a new `Framing`.
#[derive(Default)]
pub struct Framing {
    /// The position in the head at which its first incomplete line begins. Parsing goes on there when more bytes come.
    line_start: usize,
    /// The request line; `None` until it has arrived.
    request_line: Option<RequestLine>,
    /// The number of empty lines that have arrived before the request line.
    empty_lines: u8,
    /// The request while its body arrives; `None` until its head is complete.
    arriving_request: Option<Box<ArrivingRequest>>,
    /// The parts of the head that the answer and its log line need, as far as they have arrived.
    pub for_answer: AnswerInfo,
}

impl Framing {
    /// Parses further bytes of the connection. `bytes` begins with the bytes that no earlier call has used, and `used`
    /// grows by the number of bytes that this call uses. After a complete or refused request, the caller makes a new
    /// `Framing`.
    pub fn parse_more(&mut self, bytes: &[u8], used: &mut usize, limits: &Limits) -> Result<Progress, Error> {
        if let Some(request) = self.arriving_request.take() {
            return self.parse_body(*request, bytes, used, limits);
        }
        let empty = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        self.for_answer.head_only = bytes[empty..].starts_with(b"HEAD ");
        while bytes[*used..].starts_with(b"\r\n") {
            self.empty_lines += 1;
            if self.empty_lines > MAX_LEADING_EMPTY_LINES {
                return Err(Error::BadRequest("too many empty lines before a request"));
            }
            *used += 2;
        }
        let Some((line, end)) = self.scan_head(&bytes[*used..], limits)? else {
            return Ok(Progress::Incomplete);
        };
        let head = &bytes[*used..*used + end];
        *used += end;
        let mut fields = [httparse::EMPTY_HEADER; MAX_HEADER_FIELDS];
        let fields = parse_fields(head, &mut fields[..limits.max_header_fields])?;
        self.for_answer = AnswerInfo::parse(&line, head, fields, limits);
        let Head { framed_request, body_length, expects_continue } =
            Head::parse(head, &line, fields, self.for_answer.client, limits)?;
        if body_length.is_some_and(|length| length > limits.max_body_bytes as u64) {
            return Err(Error::ContentTooLarge);
        }
        if body_length == Some(0) {
            return Ok(Progress::Complete(framed_request));
        }
        let request = ArrivingRequest::new(framed_request, body_length.map(|length| length as usize));
        if expects_continue && bytes.len() == *used {
            self.arriving_request = Some(Box::new(request));
            return Ok(Progress::AwaitsContinue);
        }
        self.parse_body(request, bytes, used, limits)
    }

    /// Parses further bytes of a body, and keeps the request until its body is complete.
    fn parse_body(
        &mut self,
        mut request: ArrivingRequest,
        bytes: &[u8],
        used: &mut usize,
        limits: &Limits,
    ) -> Result<Progress, Error> {
        if request.parse_more(bytes, used, limits)? {
            return Ok(Progress::Complete(request.framed_request));
        }
        self.arriving_request = Some(Box::new(request));
        Ok(Progress::Incomplete)
    }

    /// Returns the most bytes that the arriving request can have; `None` until its head is complete.
    pub fn max_bytes(&self, limits: &Limits) -> Option<usize> {
        self.arriving_request.as_ref().map(|request| request.max_bytes(limits))
    }

    /// Returns the client that `X-Forwarded-For` names; `None` until the head is complete.
    pub fn forwarded_client(&self) -> Option<IpAddr> {
        self.arriving_request.as_ref().and(self.for_answer.client)
    }

    /// Returns true if the head is complete and the body is arriving.
    pub fn is_in_body(&self) -> bool {
        self.arriving_request.is_some()
    }

    /// Looks for the end of the head. Returns the request line and the length of the head in bytes, or `None` until the
    /// head is complete. Refuses a forbidden byte or a malformed request line as soon as it has arrived, because
    /// httparse parses only complete heads, and allows a line that ends with LF alone.
    fn scan_head(&mut self, bytes: &[u8], limits: &Limits) -> Result<Option<(RequestLine, usize)>, Error> {
        loop {
            let left = limits.max_head_bytes - self.line_start;
            let (most, too_long) = match (&self.request_line, bytes.first()) {
                (Some(_), _) => (left, Error::HeadTooLarge),
                (None, Some(&TLS_HANDSHAKE_BYTE)) => {
                    return Err(Error::BadRequest("this port speaks plain http, not https"));
                }
                // The PROXY protocol, version 2, begins with two empty lines and a NUL.
                (None, Some(0)) if self.empty_lines == 2 => return Err(Error::BadRequest(PROXY_REFUSAL)),
                (None, _) => (left.min(limits.max_request_line_bytes), Error::UriTooLong),
            };
            let Some(line) = next_line(&bytes[self.line_start..], most, too_long)? else { return Ok(None) };
            self.line_start += line.len() + 2;
            if self.line_start > limits.max_head_bytes {
                return Err(Error::HeadTooLarge);
            }
            match self.request_line.take() {
                None => self.request_line = Some(RequestLine::parse(line)?),
                Some(parsed) if line.is_empty() => return Ok(Some((parsed, self.line_start))),
                some => self.request_line = some,
            }
        }
    }
}

#[cfg(test)]
mod tests;
