//! Turns the bytes of a connection into complete requests: RFC 9112, read strictly.
//!
//! Owns which byte sequences are a request; `request_line`, `head` and `body` know the details. Knows no socket, no
//! clock and no thread. The same bytes give the same result however they were split on the way, so every refusal is
//! decided by the shortest prefix that deserves it.

use super::head::{AnswerInfo, Head, parse_fields};
use super::request_line::{PROXY_PROTOCOL, RequestLine};
use super::{Progress, body::ArrivingRequest, next_line};
use crate::config::{Limits, MAX_HEADER_FIELDS};
use crate::error::Error;
use std::net::IpAddr;

/// The most empty lines before a request line (RFC 9112, 2.2 asks for at least one).
const MAX_EMPTY_LINES: u8 = 4;
/// The first byte that a client of https sends, in its TLS handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Parses one request from the bytes of a connection. The next request gets a new `Framing`.
#[derive(Default)]
pub struct Framing {
    /// The position of the incomplete line in the head: parsing goes on there when more bytes come.
    line: usize,
    request_line: Option<RequestLine>,
    empty_lines: u8,
    body: Option<Box<ArrivingRequest>>,
    /// The parts of the head that the answer needs, as far as they have arrived.
    pub for_answer: AnswerInfo,
}

impl Framing {
    /// Parses more bytes. `bytes` begins with the bytes that no earlier call has used, and `used` grows by the number
    /// that this call uses. After a complete or refused request, the caller makes a new `Framing`.
    pub fn advance(&mut self, bytes: &[u8], used: &mut usize, limits: &Limits) -> Result<Progress, Error> {
        if let Some(body) = self.body.take() {
            return self.read_body(*body, bytes, used, limits);
        }
        let empty = bytes.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
        self.for_answer.head_only = bytes[empty..].starts_with(b"HEAD ");
        while bytes[*used..].starts_with(b"\r\n") {
            self.empty_lines += 1;
            if self.empty_lines > MAX_EMPTY_LINES {
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
        self.for_answer = AnswerInfo::read(&line, head, fields, limits);
        let Head { arrived, length, expects_continue } =
            Head::new(head, &line, fields, self.for_answer.client, limits)?;
        if length.is_some_and(|length| length > limits.max_body_bytes as u64) {
            return Err(Error::ContentTooLarge);
        }
        if length == Some(0) {
            return Ok(Progress::Complete(arrived));
        }
        let body = ArrivingRequest::new(arrived, length.map(|length| length as usize));
        if expects_continue && bytes.len() == *used {
            self.body = Some(Box::new(body));
            return Ok(Progress::Continue);
        }
        self.read_body(body, bytes, used, limits)
    }

    /// Parses more bytes of a body, and keeps the body until it is complete.
    fn read_body(
        &mut self,
        mut body: ArrivingRequest,
        bytes: &[u8],
        used: &mut usize,
        limits: &Limits,
    ) -> Result<Progress, Error> {
        if body.advance(bytes, used, limits)? {
            return Ok(Progress::Complete(body.arrived));
        }
        self.body = Some(Box::new(body));
        Ok(Progress::Incomplete)
    }

    /// Returns the most bytes that the arriving request can have; `None` until its head is complete.
    pub fn max_bytes(&self, limits: &Limits) -> Option<usize> {
        self.body.as_ref().map(|body| body.max_bytes(limits))
    }

    /// Returns the client that a proxy names for the request; `None` until its head is complete.
    pub fn client(&self) -> Option<IpAddr> {
        self.body.as_ref().and(self.for_answer.client)
    }

    /// Returns true if the head is complete and the body is arriving.
    pub fn is_in_body(&self) -> bool {
        self.body.is_some()
    }

    /// Returns the request line and the length of the head, or `None` until the head is complete. Refuses bytes that
    /// no head may hold as soon as they are there, and the request line once its end is there: httparse judges only
    /// complete heads, and allows a bare LF.
    fn scan_head(&mut self, bytes: &[u8], limits: &Limits) -> Result<Option<(RequestLine, usize)>, Error> {
        loop {
            let left = limits.max_head_bytes - self.line;
            let (most, too_long) = match (&self.request_line, bytes.first()) {
                (Some(_), _) => (left, Error::HeadTooLarge),
                (None, Some(&TLS_HANDSHAKE)) => {
                    return Err(Error::BadRequest("this port speaks plain http, not https"));
                }
                // Version 2 of the PROXY protocol begins with two empty lines and a NUL.
                (None, Some(0)) if self.empty_lines == 2 => return Err(Error::BadRequest(PROXY_PROTOCOL)),
                (None, _) => (left.min(limits.max_request_line_bytes), Error::UriTooLong),
            };
            let Some(line) = next_line(&bytes[self.line..], most, too_long)? else { return Ok(None) };
            self.line += line.len() + 2;
            if self.line > limits.max_head_bytes {
                return Err(Error::HeadTooLarge);
            }
            match self.request_line.take() {
                None => self.request_line = Some(RequestLine::parse(line)?),
                Some(parsed) if line.is_empty() => return Ok(Some((parsed, self.line))),
                some => self.request_line = some,
            }
        }
    }
}

#[cfg(test)]
mod tests;
