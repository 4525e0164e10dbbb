//! The domain: users and their passwords, pages of them. Knows neither SQL nor sockets.

pub(crate) mod email;
mod formats;
pub mod idempotency;
pub mod page;
pub mod password;
pub(crate) mod relation;
pub mod revision;
pub mod timestamp;
pub mod user;
