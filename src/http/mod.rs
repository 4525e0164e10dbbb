//! HTTP as values: a [`Request`] with its id, and a [`Response`] with its bytes. Knows no socket and no tiny_http.

mod cors;
pub(crate) mod hosts;
mod id;
mod request;
mod response;

pub(crate) use cors::Cors;
pub(crate) use id::{RequestId, log_line};
pub use request::{Method, PeerKey, Request, counted_address, percent_decode};
pub use response::{Persistence, Response, phrase};

/// Returns true if methods, names of fields and transfer codings may have this byte (RFC 9110, 5.6.2).
pub(crate) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
