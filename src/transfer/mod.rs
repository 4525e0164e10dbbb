//! All users of a database written to a stream, and the users of a stream or a file stored: what the commands `export`
//! and `import` do.
//!
//! Knows no arguments, no files by name and no terminal. Not part of the library's interface.

mod check;
mod export;
mod fields;
mod import;
mod input;
mod pipeline;
mod records;
mod stop;

pub use check::Complaint;
pub use export::{Export, export};
pub use import::{Import, Imported, Progress, Refused, import};
pub use input::Input;
pub use stop::Stop;

use crate::{
    db::{explain, transfer::taken},
    error::StartError,
};
use std::{fmt, io};

/// The format of a file of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A JSON object a line.
    Ndjson,
    /// RFC 4180 with a header.
    Csv,
}

/// Why not all was done.
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
    /// A line has the address of an earlier one, or of a stored user, and attempts to store it have ended.
    EmailTaken,
    /// The same of its id, or of the id that it drew.
    IdTaken,
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
            TransferError::EmailTaken | TransferError::IdTaken => {
                f.write_str("database error: other sessions keep storing the same addresses or ids")
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

/// What the driver says through a stream of rows.
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
            Some("users_email_key") => TransferError::EmailTaken,
            Some("users_pkey") => TransferError::IdTaken,
            _ => TransferError::Database(explain(&error)),
        }
    }
}
