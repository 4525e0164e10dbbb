//! One connection with the statements that were prepared on it, and what a failed statement means for both.

use super::{
    sqlstate::{Meaning, condition},
    watchdog::{CANCEL_TIMEOUT, Connection},
};
use crate::error::Error;
use postgres::{
    Row, Statement,
    types::{ToSql, Type},
};
use std::time::Duration;

/// A parameter and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// One connection, and the statements that were prepared on it.
pub(super) struct Session {
    // Before the statements: a statement whose client lives sends a message when it is dropped.
    pub(super) connection: Connection,
    /// A handful, so a scan beats a hash. `None` where the next statement may meet another server process.
    pub(super) statements: Option<Vec<(&'static str, Statement)>>,
    /// How long one statement is waited for before it is cancelled.
    pub(super) answer_timeout: Duration,
    /// [`Servers::epoch`](super::servers::Servers::epoch) when the connection was opened.
    pub(super) epoch: u64,
}

/// Why a statement has no result.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) meaning: Meaning,
    /// Whether the statement itself, not only its preparation, was given to the connection. Where that is broken, the
    /// server may have executed it.
    pub(super) sent: bool,
    /// What a caller is told that does not execute it again.
    pub(super) error: Error,
}

impl Failure {
    /// The time of its request is nearly up.
    pub(super) fn late() -> Failure {
        let error = Error::Unavailable("a change could not be sent in time".into());
        Failure { meaning: Meaning::Statement, sent: false, error }
    }

    /// The connection is gone.
    pub(super) fn broken(sent: bool, line: &'static str) -> Failure {
        Failure { meaning: Meaning::Broken, sent, error: Error::Unavailable(line.into()) }
    }
}

impl Session {
    /// All rows of a statement, which is prepared on its first use. Blocks for one round trip, two the first time and
    /// after an error, and for `answer_timeout` and [`CANCEL_TIMEOUT`] at the most.
    pub(super) fn query(&mut self, sql: &'static str, params: &[Param]) -> Result<Vec<Row>, Failure> {
        self.run(sql, params, self.statements.is_some())
    }

    /// The same, prepared only where `prepare` says so.
    fn run(&mut self, sql: &'static str, params: &[Param], prepare: bool) -> Result<Vec<Row>, Failure> {
        let watch = self.connection.watch();
        match self.statements {
            Some(_) => watch.begin_statement(self.answer_timeout),
            // PgBouncer 1.18 and 1.19 crash where a request to cancel is closed at once, as the client does.
            None => watch.begin(self.answer_timeout + CANCEL_TIMEOUT),
        }
        let mut sent = !prepare;
        let mut rows = || {
            let Some(statements) = self.statements.as_mut().filter(|_| prepare) else {
                return self.connection.query_typed(sql, params);
            };
            let statement = match statements.iter().find(|(known, _)| *known == sql) {
                Some((_, statement)) => statement.clone(),
                None => {
                    let types: Vec<Type> = params.iter().map(|(_, ty)| ty.clone()).collect();
                    let statement = self.connection.prepare_typed(sql, &types)?;
                    statements.push((sql, statement.clone()));
                    statement
                }
            };
            sent = true;
            let values: Vec<_> = params.iter().map(|(value, _)| *value).collect();
            self.connection.query(&statement, &values)
        };
        let rows = rows();
        if !self.connection.watch().end() {
            // Whatever it says, a success included: it was asked to cancel, and then reports a commit as made that no
            // standby has.
            return Err(Failure::broken(sent, "the database fell silent, and its connection was closed"));
        }
        rows.map_err(|error| self.failure(sql, sent, &error))
    }

    fn failure(&mut self, sql: &'static str, sent: bool, error: &postgres::Error) -> Failure {
        let meaning = if self.connection.is_closed() { Meaning::Broken } else { Meaning::of(error) };
        match meaning {
            Meaning::Broken => self.connection.watch().shut_down(),
            _ => self.settle(),
        }
        Failure { meaning, sent, error: condition(sql, error) }
    }

    /// Reads what the server still has to say after an error, for which the client does not wait. Otherwise
    /// `Watch::is_quiet` would take it for the session's end.
    fn settle(&mut self) {
        /// The server has answered already; only the end of that answer is missing.
        const TIMEOUT: Duration = Duration::from_secs(1);
        self.connection.watch().begin(TIMEOUT);
        // The statement's error stands, whatever becomes of the session: a closed one is replaced.
        let _ = self.connection.batch_execute("");
        self.connection.watch().end();
    }
}
