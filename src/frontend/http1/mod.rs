//! HTTP/1.1 by RFC 9112: which bytes are a request.
//!
//! `framing` calls `request_line`, `head` and `body` in the order in which the bytes arrive. `forwarded` reads the
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

/// The progress of a request after some of its bytes were parsed.
#[derive(Debug)]
pub enum Progress {
    /// The head or the body is incomplete.
    Incomplete,
    /// The head is complete, and the client waits for 100 (Continue) before it sends the body.
    Continue,
    /// A complete request.
    Complete(ArrivedRequest),
}

/// A complete request, and whether the connection stays open after its answer.
#[derive(Debug)]
pub struct ArrivedRequest {
    /// The request. Its `peer` is the client that `X-Forwarded-For` names, which is true only if a trusted proxy has
    /// sent it.
    pub request: Request,
    /// Tells whether the connection stays open after the answer.
    pub persistence: Persistence,
}

/// Returns the next line without its end, or `None` if it has not arrived completely. A line of more than `most` bytes
/// is the error `too_long`.
fn next_line(bytes: &[u8], most: usize, too_long: Error) -> Result<Option<&[u8]>, Error> {
    let end = bytes.iter().position(|&byte| !is_line_byte(byte)).unwrap_or(bytes.len());
    if end > most {
        return Err(too_long);
    }
    match (bytes.get(end), bytes.get(end + 1)) {
        (None, _) | (Some(b'\r'), None) => Ok(None),
        (Some(b'\r'), Some(b'\n')) => Ok(Some(&bytes[..end])),
        _ => Err(Error::BadRequest("a line ends with CR LF, and has no control byte but tabs")),
    }
}

/// Returns true if a byte may stand in a line: a tab, or a byte that is no control byte.
fn is_line_byte(byte: u8) -> bool {
    (byte >= b' ' && byte != 0x7f) || byte == b'\t'
}
