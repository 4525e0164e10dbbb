//! HTTP/1.1 by RFC 9112: which bytes are a request.
//!
//! `framing` drives `request_line`, `head` and `body`, in the order in which the bytes arrive; `forwarded` says which
//! client a proxy speaks for. The result is a [`Request`].

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
pub enum Parsed {
    /// The head or the body is incomplete.
    Incomplete,
    /// The head is complete, its body is welcome, and the client waits to be told so.
    Continue,
    /// A complete request.
    Complete(Arrived),
}

/// A complete request, and whether the connection stays open after its answer.
#[derive(Debug)]
pub struct Arrived {
    /// The request. Its peer is the client that a proxy says it speaks for; only to be believed of a trusted one.
    pub request: Request,
    /// Tells whether the connection stays open.
    pub persistence: Persistence,
}

/// Returns the next line, without its line end, if it has arrived completely. `most`: the greatest length of a line.
fn line(bytes: &[u8], most: usize, too_long: Error) -> Result<Option<&[u8]>, Error> {
    let end = bytes.iter().position(|&byte| !is_text(byte)).unwrap_or(bytes.len());
    if end > most {
        return Err(too_long);
    }
    match (bytes.get(end), bytes.get(end + 1)) {
        (None, _) | (Some(b'\r'), None) => Ok(None),
        (Some(b'\r'), Some(b'\n')) => Ok(Some(&bytes[..end])),
        _ => Err(Error::BadRequest("a line ends with CR LF, and has no control byte but tabs")),
    }
}

/// Returns whether a byte may stand in a line: tabs may, other control bytes (CR and LF among them) may not.
fn is_text(byte: u8) -> bool {
    (byte >= b' ' && byte != 0x7f) || byte == b'\t'
}
