//! PostgreSQL: sessions and their pool, every statement, migrations, connection strings, TLS.
//!
//! The only module that knows SQL and SQLSTATEs. Knows nothing of HTTP.

pub(crate) mod blocking;
#[cfg(feature = "command")]
pub mod check;
#[cfg(feature = "command")]
mod columns;
#[cfg(any(test, feature = "command"))]
pub mod counts;
mod figures;
#[cfg(feature = "command")]
pub mod inspection;
mod keys;
pub mod migrate;
pub mod open;
mod pool;
pub mod probe;
mod retry;
pub mod scratch;
pub mod servers;
mod session;
pub mod settings;
mod sqlstate;
pub mod target;
#[cfg(test)]
mod tests;
pub mod tls;
#[cfg(feature = "command")]
pub mod transfer;
pub mod users;
pub mod watchdog;

pub use keys::{NewOnce, Once};
pub use pool::Pool;
pub use sqlstate::explain;
pub use users::{Delete, New, PasswordChange, Update, Updated};
