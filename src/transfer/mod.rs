//! Users in bulk: all users of a database written to a stream, and the users of a file or a stream stored.
//!
//! Knows no arguments, no files by name and no terminal. Not part of the library's interface.

mod check;
mod export;
mod import;
mod pipeline;
mod read;
mod select;
mod stop;

pub use check::Complaint;
pub use export::{Export, export};
pub use import::{Import, Imported, Progress, Refused, import};
pub use select::Mapping;
pub use stop::Stop;

use crate::{
    db::{explain, taken},
    error::StartError,
};
use std::{fmt, io};

/// The format of a file of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A JSON object a line, or one array of objects.
    Ndjson,
    /// RFC 4180 with a header, separated by commas, semicolons or tabs.
    Csv,
}

/// The reason why an export or an import ended early.
#[derive(Debug)]
pub enum TransferError {
    /// The database cannot be used.
    Start(StartError),
    /// The database refused a statement, or the connection broke; one line.
    Database(String),
    /// The output takes nothing more.
    Write(io::Error),
    /// The input cannot be read.
    Read(io::Error),
    /// The connection broke while the import was committed; one line.
    Uncertain(String),
    /// An address or an id is that of another user, who was stored by another session.
    Taken,
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TransferError::Start(error) => error.fmt(f),
            TransferError::Database(line) => write!(f, "database error: {line}"),
            TransferError::Write(error) => write!(f, "cannot write: {error}"),
            TransferError::Read(error) => write!(f, "cannot read: {error}"),
            TransferError::Uncertain(line) => {
                write!(f, "the connection broke at the very end: all users were imported, or none ({line})")
            }
            TransferError::Taken => {
                f.write_str("database error: other sessions keep storing the same addresses or ids; or the sequence of ids is behind them, which `userd check` says")
            }
        }
    }
}

impl std::error::Error for TransferError {}

impl From<StartError> for TransferError {
    fn from(error: StartError) -> TransferError {
        TransferError::Start(error)
    }
}

/// Converts an error of a COPY, through which the driver reports the database's.
impl From<io::Error> for TransferError {
    fn from(error: io::Error) -> TransferError {
        match error.downcast::<postgres::Error>() {
            Ok(error) => error.into(),
            Err(error) => TransferError::Database(error.to_string()),
        }
    }
}

impl From<postgres::Error> for TransferError {
    fn from(error: postgres::Error) -> TransferError {
        match taken(&error) {
            Some("users_email_key" | "users_pkey") => TransferError::Taken,
            _ => TransferError::Database(explain(&error)),
        }
    }
}
