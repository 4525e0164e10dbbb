//! Users in bulk: an export writes all users of a database to a stream, and an import stores the users of a stream.
//!
//! These modules know no arguments, no names of files and no terminal. They are not part of the library's interface.

mod export;
mod import;
mod read;
mod rules;

pub use export::{Export, export};
pub use import::{Import, Imported, import};
pub use rules::{Mapping, field_names};

use crate::db::{explain, violated_constraint};
use crate::error::StartError;
use std::io;

/// The format of a file of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON object a line; an import also takes one array of objects.
    Ndjson,
    /// RFC 4180 with a header; an import also takes semicolons or tabs for commas.
    Csv,
}

/// The name of the field that has the hash of a password in exports and imports.
const PASSWORD_HASH: &str = "passwordHash";

/// The problem of an import whose insert violates the unique index of addresses or ids.
const VALUE_TAKEN: &str = "another session stored one of the addresses or ids meanwhile, so repeat the import; or the sequence \
                     of ids is behind them, which `userd check` says";

/// The reason why an export or an import ended early.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The database cannot be used.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The input cannot be read.
    #[error("cannot read: {0}")]
    Read(#[from] io::Error),
    /// The database refused a statement, or the connection broke; one line.
    #[error("database error: {0}")]
    Database(String),
    /// The output cannot be written to.
    #[error("cannot write: {0}")]
    Write(io::Error),
    /// The connection broke while the import was committed; one line.
    #[error("the connection broke at the very end: all users were imported, or none ({0})")]
    Uncertain(String),
}

impl From<postgres::Error> for TransferError {
    fn from(error: postgres::Error) -> TransferError {
        TransferError::Database(match violated_constraint(&error) {
            Some("users_email_key" | "users_pkey") => VALUE_TAKEN.to_owned(),
            _ => explain(&error),
        })
    }
}
