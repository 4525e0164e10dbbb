//! HTTP as values: a [`Request`] with its id, and a [`Response`] with its bytes. Knows no socket and no tiny_http.

mod cors;
pub(crate) mod hosts;
mod id;
mod request;
mod response;

pub(crate) use cors::Cors;
pub(crate) use id::{RequestId, log_line};
pub use request::{Method, PeerKey, Request, peer_network, percent_decode};
pub use response::{Persistence, Response, reason_phrase};

/// Returns whether a token may have this byte (RFC 9110, 5.6.2). Methods, field names and transfer codings are tokens.
pub(crate) fn is_http_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}
