//! HTTP as values: a [`Request`] with its id, a [`Response`] and its bytes. Knows no socket and no tiny_http.

mod chunks;
mod cors;
pub(crate) mod hosts;
mod id;
mod request;
mod response;

pub(crate) use chunks::Chunks;
pub(crate) use cors::Cors;
pub(crate) use id::{RequestId, RequestIds, log_line};
pub use request::{Method, Request, percent_decode};
pub use response::{Persistence, Response};
