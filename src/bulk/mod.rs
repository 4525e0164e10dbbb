//! Many users at once, past HTTP: what the commands `export`, `import`, `migrate`, `check`, `recount` and `grants` do with
//! a database.
//!
//! Knows no arguments, no files by name and no terminal. Not part of the library's interface.

mod check;
mod export;
mod fields;
mod import;
mod input;
mod pipeline;
mod records;
mod upkeep;

pub use crate::db::inspection::Weight;
pub use check::Complaint;
pub use export::{Export, export};
pub use import::{Import, Imported, Progress, Refused, Stop, import};
pub use input::Input;
pub use upkeep::{check, compare_counts, grants, migrate, recount};

use crate::{
    config::Config,
    db::{explain, migrate::Migrations, open::Opening, watchdog::Connection},
    start_error::StartError,
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
pub enum BulkError {
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
}

impl fmt::Display for BulkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BulkError::Start(error) => error.fmt(f),
            BulkError::Database(line) => write!(f, "database error: {line}"),
            BulkError::Write(error) => write!(f, "cannot write: {error}"),
            BulkError::Read(error) => write!(f, "cannot read: {error}"),
            BulkError::Uncertain(line) => {
                write!(f, "the connection broke at the very end: all users were imported, or none ({line})")
            }
        }
    }
}

impl std::error::Error for BulkError {}

impl From<StartError> for BulkError {
    fn from(error: StartError) -> BulkError {
        BulkError::Start(error)
    }
}

/// What the driver says through a stream of rows.
impl From<io::Error> for BulkError {
    fn from(error: io::Error) -> BulkError {
        match error.downcast::<postgres::Error>() {
            Ok(error) => error.into(),
            Err(error) => BulkError::Database(error.to_string()),
        }
    }
}

impl From<postgres::Error> for BulkError {
    fn from(error: postgres::Error) -> BulkError {
        BulkError::Database(explain(&error))
    }
}

/// A session of a database that has all migrations.
fn connect(config: &Config) -> Result<(Opening, Connection), StartError> {
    let opening = Opening::new(config)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref())?;
    let mut client = opening.connect()?;
    match migrations.are_applied(&mut client).map_err(StartError::Migration)? {
        true => Ok((opening, client)),
        false => Err(StartError::NotMigrated(migrations.missing(&mut client))),
    }
}
