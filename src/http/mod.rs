//! HTTP as values: a [`Request`] with its id, a [`Response`] and its bytes. Knows no socket and no tiny_http.

mod cors;
pub(crate) mod hosts;
mod id;
mod request;
mod response;

pub(crate) use cors::Cors;
pub(crate) use id::{RequestId, log_line};
pub use request::{Method, Request, percent_decode};
pub use response::{Persistence, Response};
