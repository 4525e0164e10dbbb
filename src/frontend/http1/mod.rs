//! HTTP/1.1 by RFC 9112: decides which bytes are a request.
//!
//! `framing` calls `request_line`, `head` and `body` in the order in which the bytes arrive. `forwarded` finds the
//! client that a proxy names. The result is a [`Request`].

mod body;
mod forwarded;
pub mod framing;
#[cfg(test)]
mod fuzz;
pub mod head;
mod request_line;

use crate::error::Error;
use crate::http::{Persistence, Request};

/// How far the parsing of a request has come, after some of its bytes were parsed.
#[derive(Debug)]
pub enum Progress {
    /// The head or the body is incomplete.
    Incomplete,
    /// The head is complete, and the client waits for 100 (Continue) before it sends the body.
    AwaitsContinue,
    /// The request is complete.
    Complete(FramedRequest),
}

/// A request that was parsed from the bytes of a connection, and whether the connection stays open after its answer.
#[derive(Debug)]
pub struct FramedRequest {
    /// The request. Its `peer` is the client that `X-Forwarded-For` names. That client is the real one only on a
    /// connection of a trusted proxy.
    pub request: Request,
    /// Tells whether the connection stays open after the answer to the request.
    pub persistence: Persistence,
}

/// Returns the first line of `bytes` without its end, or `None` if the end has not arrived. Fails with `too_long` if
/// the line has more than `max_bytes` bytes.
fn next_line(bytes: &[u8], max_bytes: usize, too_long: Error) -> Result<Option<&[u8]>, Error> {
    let end = bytes.iter().position(|&byte| !is_allowed_in_line(byte)).unwrap_or(bytes.len());
    if end > max_bytes {
        return Err(too_long);
    }
    match (bytes.get(end), bytes.get(end + 1)) {
        (None, _) | (Some(b'\r'), None) => Ok(None),
        (Some(b'\r'), Some(b'\n')) => Ok(Some(&bytes[..end])),
        _ => Err(Error::BadRequest("a line ends with CR LF, and has no control byte but tabs")),
    }
}

/// Returns true if a byte may stand in a line: a tab, or a byte that is no control byte.
fn is_allowed_in_line(byte: u8) -> bool {
    (byte >= b' ' && byte != 0x7f) || byte == b'\t'
}
