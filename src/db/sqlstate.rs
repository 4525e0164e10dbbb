//! Finds out what an error of the PostgreSQL client means. This is the only module that compares SQLSTATEs.
//!
//! | SQLSTATE | what has happened | error for the client |
//! |---|---|---|
//! | 23505 | a value that must be unique is taken | `AlreadyExists` |
//! | 40001, 40P01, 55P03 | a lock or a concurrent transaction stopped the statement | [`Failure::Contended`] |
//! | 25006 | the database takes no changes for now, or another server does | `Unavailable` |
//! | 53xxx | disk, memory or connections are used up for now | `Unavailable` |
//! | 57014 | the statement was cancelled, or its time was up | `Unavailable` |
//! | 08xxx, 57Pxx, none | the session has ended | `Unavailable` if the statement cannot have changed a row, else `Database` |
//! | all others | | `Database` |
//!
//! Knows nothing of pools, and nothing of the HTTP statuses of answers.

use crate::error::{Error, StartError};
use postgres::error::{DbError, Severity};
use std::{io, iter};

/// The state of a session after a failed statement. The state decides whether the statement may be executed again:
/// unless the session is [broken](SessionState::Broken), the statement has changed no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionState {
    /// The server has ended the session.
    Broken,
    /// The prepared statement does not fit the tables any more. A new session can prepare it again.
    OutdatedStatement,
    /// The prepared statement is lost, or another one has its name, because a pooler has lent the session to another
    /// client.
    LentByPooler,
    /// The server takes no changes, as a standby does.
    ReadOnly,
    /// The session is as good as before: the error is about the statement alone.
    Usable,
}

impl SessionState {
    pub(super) fn from_error(error: &postgres::Error) -> SessionState {
        let Some(error) = error.as_db_error() else { return SessionState::Usable };
        // Compares the name of the server's routine, because an outdated plan has SQLSTATE 0A000, as many other errors
        // have.
        if error.routine() == Some("RevalidateCachedQuery") {
            return SessionState::OutdatedStatement;
        }
        match error.code().code() {
            _ if matches!(error.parsed_severity(), Some(Severity::Fatal | Severity::Panic)) => {
                SessionState::Broken
            }
            // Poolers report the end of a session as an ERROR, too.
            code if code.starts_with("08") || code.starts_with("57P") => SessionState::Broken,
            "26000" | "42P05" => SessionState::LentByPooler,
            "25006" => SessionState::ReadOnly,
            _ => SessionState::Usable,
        }
    }
}

/// The reason why a statement or a command has failed.
#[derive(Debug, Clone)]
pub enum Failure {
    /// A lock was not granted, a concurrent transaction has changed the row first, or other passwords for the same user
    /// are being verified. Nothing was changed, and a retry may succeed.
    Contended,
    /// The statement or the command failed for good: the client gets this error, and no retry follows.
    Error(Error),
}

impl Failure {
    /// Returns the reason why the statement with the text `sql` has failed.
    pub(super) fn from_statement(sql: &'static str, error: &postgres::Error) -> Failure {
        if is_contended(error) { Failure::Contended } else { Failure::Error(error_for_client(sql, error)) }
    }

    /// Returns the error that the client gets if no retry follows.
    pub(crate) fn into_error(self) -> Error {
        const BLOCKED_MESSAGE: &str = "locks, or checks of other passwords, blocked a request for too long";
        match self {
            Failure::Contended => Error::Unavailable(BLOCKED_MESSAGE.into()),
            Failure::Error(error) => error,
        }
    }
}

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Error(error.into())
    }
}

/// Returns the error that the client gets if the statement with the text `sql` has failed.
fn error_for_client(sql: &'static str, error: &postgres::Error) -> Error {
    match sqlstate(error) {
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
            let hint = if is_missing_table(error) { "; `userd check` says what is missing" } else { "" };
            Error::Database { sql, message: explain(error) + hint, code: code.to_owned() }
        }
    }
}

/// Converts an error of reading a row. The result names no statement, because the statement has succeeded.
impl From<postgres::Error> for Error {
    fn from(error: postgres::Error) -> Error {
        error_for_client("", &error)
    }
}

impl From<postgres::Error> for StartError {
    fn from(error: postgres::Error) -> StartError {
        StartError::Statement(explain(&error))
    }
}

/// Returns whether the database may accept some rows of a refused statement if it gets them without the other rows.
/// Returns true for errors of all SQLSTATE classes except those of the connection and the server (08, 57, 58 and XX),
/// because triggers raise errors of any class.
pub(crate) fn is_caused_by_rows(failure: &Failure) -> bool {
    match failure {
        Failure::Error(Error::AlreadyExists) => true,
        Failure::Error(Error::Database { code, .. }) => {
            !code.is_empty() && !["08", "57", "58", "XX"].iter().any(|class| code.starts_with(class))
        }
        _ => false,
    }
}

/// Returns whether a read has failed because of the value of a row or a parameter (SQLSTATE class 22).
pub(crate) fn is_caused_by_value(error: &Error) -> bool {
    matches!(error, Error::Database { code, .. } if code.starts_with("22"))
}

/// Returns the result of a search for `text`. Returns no user if the encoding of the database lacks a character of the
/// text (SQLSTATE 22P05), because no stored user can have such a text. If the text is ASCII, every encoding has its
/// characters: the error is about a stored row, and is returned.
pub(crate) fn empty_if_untranslatable<T: Default>(
    text: &str,
    result: Result<T, Failure>,
) -> Result<T, Failure> {
    match result {
        Err(Failure::Error(Error::Database { code, .. })) if code == "22P05" && !text.is_ascii() => {
            Ok(T::default())
        }
        result => result,
    }
}

/// Returns whether every further connect will fail: for wrong credentials (SQLSTATE class 28), for a missing database
/// (3D), or because the client library does not support the server's way to authenticate.
pub(super) fn is_final_refusal(error: &postgres::Error) -> bool {
    let code = sqlstate(error);
    code.starts_with("28") || code.starts_with("3D") || is_unsupported_auth(error)
}

/// Returns whether the server may have refused a connection for lack of TLS (SQLSTATE 28000, and 08P01 from a pooler).
pub(super) fn may_require_tls(error: &postgres::Error) -> bool {
    matches!(sqlstate(error), "28000" | "08P01")
}

/// Returns whether the client library refuses to authenticate as the server asks, for example because of too many
/// iterations of SCRAM.
pub(super) fn is_unsupported_auth(error: &postgres::Error) -> bool {
    io_error_kind(error) == Some(io::ErrorKind::InvalidInput)
}

/// Returns whether a connect has reached a program, but has opened no session: TLS failed, or the program is no
/// database.
pub(super) fn reached_no_database(error: &postgres::Error) -> bool {
    sqlstate(error).is_empty() && matches!(io_error_kind(error), None | Some(io::ErrorKind::InvalidData))
}

/// Returns the kind of the I/O error that has ended a connection.
fn io_error_kind(error: &postgres::Error) -> Option<io::ErrorKind> {
    std::error::Error::source(error)?.downcast_ref::<io::Error>().map(io::Error::kind)
}

/// Returns whether the server has refused a connection because all of its connections are taken (SQLSTATE 53300).
pub(super) fn is_too_many_clients(error: &postgres::Error) -> bool {
    sqlstate(error) == "53300"
}

/// Returns the unique constraint that a statement has violated (SQLSTATE 23505).
#[cfg(feature = "command")]
pub fn violated_constraint(error: &postgres::Error) -> Option<&str> {
    error.as_db_error().filter(|error| error.code().code() == "23505")?.constraint()
}

/// Returns whether a statement has failed because of a lock or a concurrent transaction, so that a retry may succeed.
pub fn is_contended(error: &postgres::Error) -> bool {
    matches!(sqlstate(error), "55P03" | "40P01" | "40001")
}

/// Returns whether a failed statement may succeed later: it has failed because of a lock, a concurrent transaction or a
/// cancellation.
#[cfg(feature = "command")]
pub fn is_transient(error: &postgres::Error) -> bool {
    is_contended(error) || sqlstate(error) == "57014"
}

/// Returns whether the server has refused a change because the transaction is read-only (SQLSTATE 25006).
#[cfg(feature = "command")]
pub fn is_read_only_error(error: &postgres::Error) -> bool {
    sqlstate(error) == "25006"
}

/// Returns whether the role lacks a right that a statement needs (SQLSTATE 42501). Returns false if a function that the
/// statement calls lacks the right.
pub fn lacks_right(error: &postgres::Error) -> bool {
    sqlstate(error) == "42501" && error.as_db_error().is_some_and(|error| error.where_().is_none())
}

/// Returns whether `on conflict` names columns for which the table has no unique index (SQLSTATE 42P10).
#[cfg(feature = "command")]
pub fn is_missing_index(error: &postgres::Error) -> bool {
    sqlstate(error) == "42P10"
}

/// Returns whether a table does not exist (SQLSTATE 42P01), or the search_path leads to no schema (3F000).
pub(super) fn is_missing_table(error: &postgres::Error) -> bool {
    matches!(sqlstate(error), "42P01" | "3F000")
}

/// Returns whether a table lacks a column that the statement names (SQLSTATE 42703), or has it with another type
/// (42846, 22P02).
pub(super) fn is_wrong_column(error: &postgres::Error) -> bool {
    matches!(sqlstate(error), "42703" | "42846" | "22P02")
}

/// Returns one line that says why a statement or a connect has failed: the server's severity, message and SQLSTATE, or
/// the chain of causes. Leaves the server's DETAIL out, which quotes whole rows.
pub fn explain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = String::new();
    for cause in iter::successors(Some(error), |cause| cause.source()) {
        let text = match cause.downcast_ref::<DbError>() {
            Some(db) => format!("{}: {} ({})", db.severity(), db.message(), db.code().code()),
            // Skips an error of the client library that only repeats the server's message, because the next cause is
            // that message.
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

/// Returns the SQLSTATE of an error, or an empty text if the error is not from the server.
fn sqlstate(error: &postgres::Error) -> &str {
    error.code().map(postgres::error::SqlState::code).unwrap_or_default()
}
