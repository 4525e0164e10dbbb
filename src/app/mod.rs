//! The service without a socket: a [`Request`](crate::Request) in, a [`Response`](crate::Response) out.
//!
//! `router` and `access` say what a request asks for and whether it may, `validation` what its body must be, `handlers`
//! what is done. Knows users and the database behind them; no socket, no thread.

pub(crate) mod access;
pub(crate) mod handlers;
pub(crate) mod router;
pub(crate) mod validation;

pub use handlers::App;
