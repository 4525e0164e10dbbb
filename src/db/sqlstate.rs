//! Meaning of the errors of the PostgreSQL client. The only module that compares SQLSTATEs.
//!
//! | SQLSTATE | what it says | condition |
//! |---|---|---|
//! | 23505 | a value that must be unique is taken | `AlreadyExists` |
//! | 40001, 40P01, 55P03 | a lock or a concurrent transaction was met | [`Failure::Contended`] |
//! | 25006 | the database takes no changes for now, or another server does | `Unavailable` |
//! | 53xxx | disk, memory or connections are used up for now | `Unavailable` |
//! | 57014 | the statement was cancelled, or its time was up | `Unavailable` |
//! | 08xxx, 57Pxx, none | the session has ended | `Unavailable` for what was certainly not changed, else `Database` |
//! | all others | | `Database` |
//!
//! Knows nothing of sessions and statuses.

use crate::error::{Error, StartError};
use postgres::error::{DbError, Severity};
use std::{io, iter};

/// Consequences of a failed statement for its session, and for executing it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Consequence {
    /// The server ends the session, or has lost what belongs to it.
    Broken,
    /// A prepared statement does not fit the tables any more: a new session can prepare it. Nothing was changed.
    Outdated,
    /// A prepared statement is missing, or its name is taken: a pooler has lent the session to another client, too. Nothing
    /// was changed.
    OfAnotherSession,
    /// This server takes no changes, as a standby does. Nothing was changed.
    ReadOnly,
    /// Any other error: its reason is the statement, not the session. Nothing was changed.
    Statement,
}

impl Consequence {
    pub(super) fn of(error: &postgres::Error) -> Consequence {
        let Some(error) = error.as_db_error() else { return Consequence::Statement };
        // The routine decides: SQLSTATE 0A000, of a plan that does not fit, is also that of many other refusals.
        if error.routine() == Some("RevalidateCachedQuery") {
            return Consequence::Outdated;
        }
        match error.code().code() {
            _ if matches!(error.parsed_severity(), Some(Severity::Fatal | Severity::Panic)) => {
                Consequence::Broken
            }
            // Poolers report the end of a session as an ERROR, too.
            code if code.starts_with("08") || code.starts_with("57P") => Consequence::Broken,
            "26000" | "42P05" => Consequence::OfAnotherSession,
            "25006" => Consequence::ReadOnly,
            _ => Consequence::Statement,
        }
    }
}

/// Why a statement has no rows, or a command no answer yet.
#[derive(Debug, Clone)]
pub enum Failure {
    /// A lock was not granted, a concurrent transaction took precedence, or other passwords are being checked. Nothing was
    /// changed: a retry may succeed.
    Contended,
    /// The statement or the command failed for good: the client gets the error, and no retry follows.
    Error(Error),
}

impl Failure {
    /// Returns why a statement has failed. `sql` is its text.
    pub(super) fn of(sql: &'static str, error: &postgres::Error) -> Failure {
        if is_contended(error) { Failure::Contended } else { Failure::Error(condition(sql, error)) }
    }

    /// Returns the error that the client gets if no retry follows.
    pub(crate) fn into_error(self) -> Error {
        const BLOCKED: &str = "locks, or checks of other passwords, blocked a request for too long";
        match self {
            Failure::Contended => Error::Unavailable(BLOCKED.into()),
            Failure::Error(error) => error,
        }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Error(error.into())
    }
}

/// Returns the condition that a failed statement is answered with. `sql` is its text, or empty.
fn condition(sql: &'static str, error: &postgres::Error) -> Error {
    match code(error) {
        "23505" => {
            let constraint = error.as_db_error().and_then(DbError::constraint).unwrap_or_default();
            if constraint.starts_with("users_pkey") {
                log::error!(
                    "the sequence of ids gave an id that is taken: `userd check` says how to mend it"
                );
            }
            Error::AlreadyExists
        }
        "57014" => Error::Unavailable("the database cancelled a statement".into()),
        code if code == "25006" || code.starts_with("53") => Error::Unavailable(
            format!("the database cannot execute a statement now: {}", explain(error)).into(),
        ),
        code => {
            let hint = if lacks_table(error) { "; `userd check` says what is missing" } else { "" };
            Error::Database { sql, message: explain(error) + hint, code: code.to_owned() }
        }
    }
}

/// The condition of a row that cannot be read.
impl From<postgres::Error> for Error {
    fn from(error: postgres::Error) -> Error {
        condition("", &error)
    }
}

impl From<postgres::Error> for StartError {
    fn from(error: postgres::Error) -> StartError {
        StartError::Statement(explain(&error))
    }
}

/// Returns whether the rows of a statement may have caused its refusal, so that some of them may be accepted without the
/// others: any error but those of the connection and of the server (SQLSTATE classes 08, 57, 58 and XX). Triggers raise
/// errors of any class.
pub(crate) fn is_of_rows(failure: &Failure) -> bool {
    match failure {
        Failure::Error(Error::AlreadyExists) => true,
        Failure::Error(Error::Database { code, .. }) => {
            !code.is_empty() && !["08", "57", "58", "XX"].iter().any(|class| code.starts_with(class))
        }
        _ => false,
    }
}

/// Returns whether the value of one row or one parameter has caused the refusal of a read (SQLSTATE class 22).
pub(crate) fn is_of_value(error: &Error) -> bool {
    matches!(error, Error::Database { code, .. } if code.starts_with("22"))
}

/// Returns the outcome of a search by `text`: none if the encoding of the database has no such characters (SQLSTATE 22P05).
/// Every encoding has those of ASCII, so that a row with other bytes was refused then.
pub(crate) fn none_if_untranslatable<T: Default>(
    text: &str,
    found: Result<T, Failure>,
) -> Result<T, Failure> {
    match found {
        Err(Failure::Error(Error::Database { code, .. })) if code == "22P05" && !text.is_ascii() => {
            Ok(T::default())
        }
        found => found,
    }
}

/// Returns whether waiting cannot mend a refused connection: wrong credentials (SQLSTATE class 28), a missing database
/// (3D) and a server that the client library does not go on with stay so.
pub(super) fn is_final(error: &postgres::Error) -> bool {
    let code = code(error);
    code.starts_with("28") || code.starts_with("3D") || is_unusable_answer(error)
}

/// Returns whether a server may have refused a connection because it is not encrypted (SQLSTATE 28000; 08P01 of poolers).
pub(super) fn asks_for_tls(error: &postgres::Error) -> bool {
    matches!(code(error), "28000" | "08P01")
}

/// Returns whether the client library refuses what the server says to prove the password, as too many iterations of SCRAM.
pub(super) fn is_unusable_answer(error: &postgres::Error) -> bool {
    kind(error) == Some(io::ErrorKind::InvalidInput)
}

/// Returns whether the answer to a connect is not usable: TLS failed, or the program that answers is no database.
pub(super) fn is_answered(error: &postgres::Error) -> bool {
    code(error).is_empty() && matches!(kind(error), None | Some(io::ErrorKind::InvalidData))
}

/// Returns the kind of I/O error that broke a connection.
fn kind(error: &postgres::Error) -> Option<io::ErrorKind> {
    std::error::Error::source(error)?.downcast_ref::<io::Error>().map(io::Error::kind)
}

/// Returns whether the server refused a connection because it has too many (SQLSTATE 53300).
pub(super) fn has_too_many_connections(error: &postgres::Error) -> bool {
    code(error) == "53300"
}

/// Returns the unique constraint that a statement has violated (SQLSTATE 23505).
#[cfg(feature = "command")]
pub fn violated_constraint(error: &postgres::Error) -> Option<&str> {
    error.as_db_error().filter(|error| error.code().code() == "23505")?.constraint()
}

/// Returns whether a statement has met a lock or a concurrent transaction.
pub fn is_contended(error: &postgres::Error) -> bool {
    matches!(code(error), "55P03" | "40P01" | "40001")
}

/// Returns whether a statement may succeed later: it has met a lock or a concurrent transaction, or was cancelled.
#[cfg(feature = "command")]
pub fn is_transient(error: &postgres::Error) -> bool {
    is_contended(error) || code(error) == "57014"
}

/// Returns whether a statement was refused because it changes rows in a read-only transaction (SQLSTATE 25006).
#[cfg(feature = "command")]
pub fn is_read_only(error: &postgres::Error) -> bool {
    code(error) == "25006"
}

/// Returns whether the role lacks a right that a statement needs, not a function in it.
#[cfg(feature = "command")]
pub fn is_denied(error: &postgres::Error) -> bool {
    code(error) == "42501" && error.as_db_error().is_some_and(|error| error.where_().is_none())
}

/// Returns whether a table does not exist (SQLSTATE 42P01, and 3F000 for its schema).
pub(super) fn lacks_table(error: &postgres::Error) -> bool {
    matches!(code(error), "42P01" | "3F000")
}

/// Returns whether a table lacks a column that the statement names (SQLSTATE 42703), or has it with another type
/// (42846, 22P02).
pub(super) fn is_of_other_columns(error: &postgres::Error) -> bool {
    matches!(code(error), "42703" | "42846" | "22P02")
}

/// Returns one line that says why the database refused: its severity, message and SQLSTATE, or the chain of causes
/// of a broken connection. The DETAIL is left out on purpose: it quotes whole rows.
pub fn explain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = String::new();
    for cause in iter::successors(Some(error), |cause| cause.source()) {
        let text = match cause.downcast_ref::<DbError>() {
            Some(db) => {
                let code = db.code().code();
                // A prepared statement is missing, or its name is taken.
                let is_of_another_session = ["26000", "42P05"].contains(&code);
                let hint = "; behind a pooler in transaction mode userd needs DB_PREPARED=false";
                let hint = if is_of_another_session { hint } else { "" };
                format!("{}: {} ({code}){hint}", db.severity(), db.message())
            }
            // Skips a cause whose text is only the server's message, which the next cause has.
            None if cause.downcast_ref::<postgres::Error>().is_some_and(|e| e.as_db_error().is_some()) => {
                continue;
            }
            None => cause.to_string(),
        };
        if !line.contains(&text) {
            line = if line.is_empty() { text } else { format!("{line}: {text}") };
        }
    }
    line.replace(['\n', '\r'], " ")
}

/// Returns the SQLSTATE of an error; an empty text if the error is not the server's.
fn code(error: &postgres::Error) -> &str {
    error.code().map(postgres::error::SqlState::code).unwrap_or_default()
}
