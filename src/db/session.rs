//! A database session: a connection with its prepared statements. Tells from the failure of a statement whether the
//! session can be used further.

use super::sqlstate::{Failure, SessionState};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::{ToSql, Type};
use postgres::{Client, Row, Statement};
use std::time::{Duration, Instant};

/// The value of a parameter of a statement, and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// A connection, and the statements that were prepared on it.
pub(super) struct Session {
    // Declared first, so that the connection is dropped before the statements: each statement that is dropped while its
    // connection lives sends a message to the server.
    pub(super) connection: Client,
    /// Prepared statements, each with its text. A scan is quicker than a map, because there are few. `None` if a pooler
    /// lends the session, so that the next statement may meet another server process.
    pub(super) prepared_statements: Option<Vec<(&'static str, Statement)>>,
    /// The epoch in which the connection was opened. In a later epoch the session is not used any more.
    pub(super) epoch: u64,
    /// The time of the server's last answer in this session.
    pub(super) last_answer_at: Instant,
}

/// The failure of a statement, and what it means for the session.
#[derive(Debug)]
pub(super) struct QueryFailure {
    /// The state of the session after the failure.
    pub(super) session_state: SessionState,
    /// True if the statement was sent to be executed, false if it failed while it was prepared. If the connection has
    /// ended after the statement was sent, the server may have executed it.
    pub(super) was_sent: bool,
    /// The failure that the caller gets, unless the statement is executed again.
    pub(super) failure: Failure,
}

impl Session {
    /// Returns false if the server has ended the connection. Called before a change is sent: if the connection broke
    /// afterwards, the change could not be sent again, because the server may have executed it. Looks at the socket
    /// only if the connection was idle for a second, and then blocks for a millisecond.
    pub(super) fn is_alive(&mut self) -> bool {
        /// The idle time after which the socket is looked at.
        const MIN_IDLE_TIME: Duration = Duration::from_secs(1);
        /// The longest time that a look at the socket blocks.
        const MAX_POLL_TIME: Duration = Duration::from_millis(1);
        self.last_answer_at.elapsed() < MIN_IDLE_TIME
            || self.connection.notifications().timeout_iter(MAX_POLL_TIME).next().is_ok()
                && !self.connection.is_closed()
    }

    /// Returns the prepared statement with the text `sql`, or `None` if a pooler lends the session. The first call for
    /// a text prepares the statement, and blocks for a round trip.
    pub(super) fn prepare(
        &mut self,
        sql: &'static str,
        params: &[Param],
    ) -> Result<Option<Statement>, QueryFailure> {
        let Some(statements) = &mut self.prepared_statements else { return Ok(None) };
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
            Err(error) => Err(self.query_failure(sql, false, &error)),
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
        rows.map_err(|error| self.query_failure(sql, true, &error))
    }

    /// Returns the failure of a statement with the state of this session after it.
    fn query_failure(&self, sql: &'static str, was_sent: bool, error: &postgres::Error) -> QueryFailure {
        let session_state =
            if self.connection.is_closed() { SessionState::Broken } else { SessionState::from_error(error) };
        QueryFailure { session_state, was_sent, failure: Failure::from_statement(sql, error) }
    }
}

/// Executes a statement whose rows are lines of text, and returns the lines. Blocks for a round trip.
pub fn query_lines(client: &mut Client, sql: &str, params: &[Param]) -> Result<Vec<String>, postgres::Error> {
    Ok(client.query_typed(sql, params)?.iter().map(|row| row.get(0)).collect())
}
