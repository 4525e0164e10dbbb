//! Databases and servers that are thrown away, on a PostgreSQL started from this machine's own programs.
//!
//! `cluster` runs such a PostgreSQL, `database` creates databases in one that all processes of a user share, `testing`
//! starts servers on them. Stands on the rest of the crate; nothing of the rest knows it.

pub mod cluster;
pub mod database;
#[cfg(feature = "testing")]
pub mod testing;

use crate::db::tls;
use postgres::{Client, Config, Error, config::SslMode};

/// A connection without TLS. By the service's own connector: with another one, the client's code would be compiled twice.
fn connect(connection_string: &str) -> Result<Client, Error> {
    let plain = tls::connector(None).expect("it reads no certificate");
    let mut config: Config = connection_string.parse()?;
    config.ssl_mode(SslMode::Disable).connect(plain)
}
