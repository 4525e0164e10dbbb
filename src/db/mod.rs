//! PostgreSQL: sessions and their pool, every statement, migrations, connection strings, TLS.
//!
//! The only module, with `scratch`, that knows SQL and SQLSTATEs. Knows nothing of HTTP.

pub(crate) mod blocking;
#[cfg(feature = "command")]
pub mod bulk;
mod changes;
mod cleaner;
mod clock;
#[cfg(any(test, feature = "command"))]
pub mod counts;
mod figures;
mod insert;
#[cfg(feature = "command")]
pub mod inspection;
mod keys;
pub mod migrate;
pub mod open;
mod pool;
pub mod probe;
mod retry;
pub mod servers;
mod session;
pub mod settings;
#[cfg(test)]
mod silent;
mod sqlstate;
pub mod target;
pub mod tls;
#[cfg(feature = "command")]
pub mod upkeep;
pub mod users;
pub mod watchdog;

pub use changes::{Delete, New, PasswordChange, Update, Updated};
pub(crate) use cleaner::Cleaner;
pub use keys::{NewOnce, Once};
pub use pool::{Pool, PoolLimits};
pub(crate) use retry::Backoff;
pub use sqlstate::explain;
