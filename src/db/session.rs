//! A connection with its prepared statements, and what a failed statement says about the connection.

use super::sqlstate::{Consequence, Failure};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::{ToSql, Type};
use postgres::{Client, Row, Statement};
use std::time::{Duration, Instant};

/// The value of a parameter of a statement, and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A connection, and the statements that were prepared on it.
pub(super) struct Session {
    // Declared first, so that the connection is dropped before the statements. A statement that is dropped while its
    // connection lives sends a message to the server.
    pub(super) connection: Client,
    /// Prepared statements by text. There are few, so that a scan is quicker than a map. `None` if a pooler lends the
    /// session, so that the next statement may meet another server process.
    pub(super) statements: Option<Vec<(&'static str, Statement)>>,
    /// The epoch in which the connection was opened: see `Epoch`.
    pub(super) epoch: u64,
    /// The time of the server's last answer.
    pub(super) last_answer_at: Instant,
}

/// The failure of a statement in a session.
#[derive(Debug)]
pub(super) struct QueryFailure {
    /// The consequence of the failure for the session.
    pub(super) consequence: Consequence,
    /// True if the statement was sent, not only prepared. If the connection has ended then, the server may have executed
    /// the statement.
    pub(super) sent: bool,
    /// The failure as the client is told it, unless the statement is executed again.
    pub(super) failure: Failure,
}

impl Session {
    /// Returns false if the server has ended the connection. Called before a change is sent, because a change whose
    /// connection breaks cannot be sent again: the server may have executed it. Looks only if the connection was idle
    /// for a second, and blocks for a millisecond then.
    pub(super) fn is_alive(&mut self) -> bool {
        const MIN_IDLE_TIME: Duration = Duration::from_secs(1);
        const POLL_PAUSE: Duration = Duration::from_millis(1);
        self.last_answer_at.elapsed() < MIN_IDLE_TIME
            || self.connection.notifications().timeout_iter(POLL_PAUSE).next().is_ok()
                && !self.connection.is_closed()
    }

    /// Returns the prepared statement with the text `sql`, or `None` if sessions keep no statements. The first call for a text
    /// prepares the statement, and blocks for a round trip.
    pub(super) fn prepare(
        &mut self,
        sql: &'static str,
        params: &[Param],
    ) -> Result<Option<Statement>, QueryFailure> {
        let Some(statements) = &mut self.statements else { return Ok(None) };
        if let Some((_, statement)) = statements.iter().find(|(known, _)| *known == sql) {
            return Ok(Some(statement.clone()));
        }
        let types: Vec<Type> = params.iter().map(|(_, ty)| ty.clone()).collect();
        let prepared = self.connection.prepare_typed(sql, &types);
        self.last_answer_at = Instant::now();
        match prepared {
            Ok(statement) => {
                statements.push((sql, statement.clone()));
                Ok(Some(statement))
            }
            Err(error) => Err(self.failure(sql, false, &error)),
        }
    }

    /// Executes a statement, prepared or not, and returns all of its rows. Blocks for a round trip.
    pub(super) fn query(
        &mut self,
        sql: &'static str,
        prepared: Option<&Statement>,
        params: &[Param],
    ) -> Result<Vec<Row>, QueryFailure> {
        let values = || params.iter().map(|(value, _)| *value).collect::<Vec<_>>();
        let rows = match prepared {
            Some(statement) => self.connection.query(statement, &values()),
            None => self.connection.query_typed(sql, params),
        };
        self.last_answer_at = Instant::now();
        rows.map_err(|error| self.failure(sql, true, &error))
    }

    /// Returns the failure of a statement. Its consequence is `Broken` if the connection has ended.
    fn failure(&self, sql: &'static str, sent: bool, error: &postgres::Error) -> QueryFailure {
        let consequence =
            if self.connection.is_closed() { Consequence::Broken } else { Consequence::from_error(error) };
        QueryFailure { consequence, sent, failure: Failure::from_statement(sql, error) }
    }
}

/// Executes a statement whose rows are lines of text, and returns the lines. Blocks for a round trip.
pub fn query_lines(client: &mut Client, sql: &str, params: &[Param]) -> Result<Vec<String>, postgres::Error> {
    Ok(client.query_typed(sql, params)?.iter().map(|row| row.get(0)).collect())
}
