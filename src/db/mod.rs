//! PostgreSQL: sessions and their pool, every statement, migrations, connection strings, TLS.
//!
//! The only module that knows SQL and SQLSTATEs. Knows nothing of HTTP.

pub(crate) mod blocking;
#[cfg(feature = "command")]
pub mod bulk;
pub mod connect;
#[cfg(any(test, feature = "command"))]
pub mod counts;
#[cfg_attr(not(feature = "command"), expect(dead_code, reason = "only a check tells weights"))]
pub mod findings;
pub mod migrate;
mod pool;
pub mod probe;
mod session;
pub mod settings;
mod sqlstate;
pub mod target;
pub mod tls;
pub mod users;

pub use pool::Pool;
pub use session::lines;
pub use sqlstate::explain;
pub(crate) use sqlstate::is_of_value;
#[cfg(feature = "command")]
pub use sqlstate::taken;
pub use users::{Create, Created, Delete, Update};
