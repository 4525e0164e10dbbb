//! PostgreSQL: sessions and their pool, migrations, the statements of bulk transfers, connection strings, TLS.
//!
//! The only module that knows SQLSTATEs. Knows no operation and nothing of HTTP.

pub(crate) mod blocking;
#[cfg(feature = "command")]
pub mod bulk;
pub mod connect;
#[cfg_attr(not(feature = "command"), expect(dead_code, reason = "only a check tells weights"))]
pub mod findings;
pub mod migrate;
mod pool;
pub mod probe;
pub mod rows;
pub mod session;
pub mod session_settings;
mod sqlstate;
pub mod target;
pub mod tls;
#[cfg(any(test, feature = "command"))]
pub mod user_counts;

/// The tables whose rows the statements of a service change.
pub const WRITTEN_TABLES: &[&str] = &["users", "credentials", "idempotency_keys"];

/// All of userd's tables: those that a service writes, the counts that triggers write, and the history of migrations.
pub const ALL_TABLES: &[&str] =
    &[WRITTEN_TABLES[0], WRITTEN_TABLES[1], WRITTEN_TABLES[2], "user_counts", migrate::HISTORY_TABLE];

pub use pool::Pool;
pub use sqlstate::{Failure, explain};
pub(crate) use sqlstate::{empty_if_untranslatable, is_caused_by_rows, is_caused_by_value};
#[cfg(feature = "command")]
pub use sqlstate::{is_missing_index, is_read_only_error, is_transient, lacks_right, violated_constraint};
