//! One connection with the statements that were prepared on it, and what a failed statement means for both.

use super::sqlstate::{Consequence, Failure};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::{ToSql, Type};
use postgres::{Client, Row, Statement};
use std::time::{Duration, Instant};

/// A parameter and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// One connection, and the statements that were prepared on it.
pub(super) struct Session {
    // The client is dropped before the statements: a statement whose client lives sends a message when it is
    // dropped.
    pub(super) connection: Client,
    /// Prepared statements by text: a handful, so a scan beats a hash. `None` if the next statement may meet
    /// another server process.
    pub(super) statements: Option<Vec<(&'static str, Statement)>>,
    /// The epoch in which the connection was opened.
    pub(super) epoch: u64,
    /// When the server answered last.
    pub(super) answered: Instant,
}

/// Why a statement has no result.
#[derive(Debug)]
pub(super) struct QueryFailure {
    pub(super) consequence: Consequence,
    /// True if the statement itself, not only its preparation, was sent. If the connection is broken then, the
    /// server may have executed the statement.
    pub(super) sent: bool,
    /// The reason for the client, unless the statement is executed again.
    pub(super) failure: Failure,
}

impl Session {
    /// Returns false if the server has ended the connection. Looks only if it was idle for a second, as a write on a
    /// connection that has ended cannot be repeated. Blocks for a millisecond.
    pub(super) fn is_alive(&mut self) -> bool {
        const IDLE: Duration = Duration::from_secs(1);
        const POLL_PAUSE: Duration = Duration::from_millis(1);
        self.answered.elapsed() < IDLE
            || self.connection.notifications().timeout_iter(POLL_PAUSE).next().is_ok()
                && !self.connection.is_closed()
    }

    /// Prepares a statement on its first use; returns `None` if sessions keep no statements. Blocks for a round
    /// trip the first time.
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
        self.answered = Instant::now();
        match prepared {
            Ok(statement) => {
                statements.push((sql, statement.clone()));
                Ok(Some(statement))
            }
            Err(error) => Err(self.failure(sql, false, &error)),
        }
    }

    /// Returns all rows of a statement, prepared or not. Blocks for a round trip.
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
        self.answered = Instant::now();
        rows.map_err(|error| self.failure(sql, true, &error))
    }

    fn failure(&self, sql: &'static str, sent: bool, error: &postgres::Error) -> QueryFailure {
        let consequence =
            if self.connection.is_closed() { Consequence::Broken } else { Consequence::of(error) };
        QueryFailure { consequence, sent, failure: Failure::of(sql, error) }
    }
}

/// Returns the rows of a statement, each of which is a line.
pub fn lines(client: &mut Client, sql: &str, params: &[Param]) -> Result<Vec<String>, postgres::Error> {
    Ok(client.query_typed(sql, params)?.iter().map(|row| row.get(0)).collect())
}
