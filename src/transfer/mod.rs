//! Exports write all users of a database to a stream; imports store the users of a stream.
//!
//! These modules know no arguments, no names of files and no terminal. They are not part of the library's interface.

mod export;
mod import;
mod records;
mod rules;

pub use export::{ExportOptions, export};
pub use import::{ImportOptions, ImportOutcome, import};
pub use rules::{FieldMapping, field_names};

use crate::db::{explain, violated_constraint};
use crate::error::StartError;
use std::io;

/// The format of a file of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One JSON object a line. An import also reads one array of objects.
    Ndjson,
    /// CSV as in RFC 4180, with a header. An import also reads semicolons or tabs instead of commas.
    Csv,
}

/// The name of the field that has the hash of a password in exports and imports.
const PASSWORD_HASH_FIELD: &str = "passwordHash";

/// The message of an import whose insert violates the unique index of addresses or of ids.
const VALUE_TAKEN: &str = "another session stored one of the addresses or ids meanwhile, so repeat the import; or the sequence \
                     of ids is behind them, which `userd check` says";

/// The reason why an export or an import ended early.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// No connection to the database, or its schema does not fit.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The input cannot be read.
    #[error("cannot read: {0}")]
    Read(#[from] io::Error),
    /// The database refused a statement, or the connection broke. The text is one line.
    #[error("database error: {0}")]
    Database(String),
    /// The output cannot be written to.
    #[error("cannot write: {0}")]
    Write(io::Error),
    /// The connection broke during the commit, so that the users may be stored or not. The text is one line.
    #[error("the connection broke at the very end: all users were imported, or none ({0})")]
    UncertainCommit(String),
}

impl From<postgres::Error> for TransferError {
    fn from(error: postgres::Error) -> TransferError {
        TransferError::Database(match violated_constraint(&error) {
            Some("users_email_key" | "users_pkey") => VALUE_TAKEN.to_owned(),
            _ => explain(&error),
        })
    }
}
