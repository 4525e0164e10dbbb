//! Databases and servers that are thrown away, on a PostgreSQL started from this machine's own programs.
//!
//! `cluster` runs such a PostgreSQL, `database` creates databases in one that all processes of a user share, `testing`
//! starts servers on them. Stands on the rest of the crate; nothing of the rest knows it.

pub mod cluster;
pub mod database;
#[cfg(feature = "testing")]
pub mod testing;
