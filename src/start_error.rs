//! Why a service does not start, in one line.

use crate::config::ConfigError;
use std::{fmt, io};

/// Why a server did not start. Each is one clear line, and nothing is left running.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// A setting that cannot be used.
    Config(ConfigError),
    /// No connection to the database within `db_connect_timeout`, or a refusal that a retry would not change.
    Database(String),
    /// The database refused a statement, or the connection broke.
    Statement(String),
    /// No database to be thrown away: PostgreSQL's programs are missing, or its cluster does not start. Only
    /// of [`ScratchDatabase`](crate::ScratchDatabase) and what stands on it.
    Cluster(String),
    /// A migration that could not be applied; nothing of it was.
    Migration(String),
    /// The database lacks these migrations, and `migrate` is off.
    NotMigrated(Vec<String>),
    /// The address cannot be listened on.
    Listen(String, io::Error),
    /// The system refused a thread or a socket of our own, or allows the process too few descriptors or addresses.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Config(error) => error.fmt(f),
            StartError::Database(line) => write!(f, "cannot connect to the database: {line}"),
            StartError::Statement(line) => write!(f, "database error: {line}"),
            StartError::Cluster(line) => f.write_str(line),
            StartError::Migration(line) => write!(f, "cannot migrate the database: {line}"),
            StartError::NotMigrated(missing) if missing.is_empty() => {
                f.write_str("the database has other migrations than this userd; `userd migrate` says which")
            }
            StartError::NotMigrated(missing) => write!(
                f,
                "the database lacks {}; `userd migrate` applies what is missing",
                missing.join(", ")
            ),
            StartError::Listen(address, error) => {
                write!(f, "cannot listen on {address}: {error}; {}", remedy(address, error))
            }
            StartError::System(error) => write!(f, "cannot start: {error}"),
        }
    }
}

/// What makes an address one that can be listened on.
fn remedy(address: &str, error: &io::Error) -> &'static str {
    match error.kind() {
        _ if address.starts_with("unix:") => {
            "HOST names a socket in a directory that is there and may be written"
        }
        io::ErrorKind::AddrInUse => "end what listens there, or choose another PORT",
        io::ErrorKind::PermissionDenied => "choose a PORT from 1024 on, or let systemd pass the socket",
        _ => "HOST has to be an address of this machine",
    }
}

impl std::error::Error for StartError {}

impl From<ConfigError> for StartError {
    fn from(error: ConfigError) -> StartError {
        StartError::Config(error)
    }
}
