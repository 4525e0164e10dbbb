//! HTTP/1.1 by RFC 9112: which bytes are a request.
//!
//! `framing` drives `request_line`, `head` and `body`, in the order in which the bytes arrive; `forwarded` says which
//! client a proxy speaks for. `head` and `body` know of `framing` only the types of its result.

mod body;
mod forwarded;
pub mod framing;
pub(in crate::frontend) mod head;
mod request_line;
