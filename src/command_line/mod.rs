//! What the command adds to the library: its log, and the health check.

pub mod healthcheck;
pub mod log_writer;
