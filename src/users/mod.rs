//! The domain: users, their passwords, and pages of users. These modules know neither SQL nor sockets.

pub(crate) mod email;
mod hash_formats;
pub mod idempotency;
pub mod page;
pub mod password;
pub(crate) mod relation;
pub mod revision;
pub mod timestamp;
pub mod user;
