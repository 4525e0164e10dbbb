//! HTTP/1.1 by RFC 9112: which bytes are a request.

mod body;
pub mod framing;
mod head;
