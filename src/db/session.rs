//! What a session adds to a client: statements that are prepared once, and what a failed one means for it.

use super::watchdog::Watch;
use crate::error::{self, Error};
use bytes::BytesMut;
use postgres::{
    Client, Row, Statement,
    types::{ToSql, Type},
};
use std::sync::Arc;

/// One connection, with the statements that were prepared on it.
pub struct Session {
    // Before the statements: a statement whose client lives sends a message when it is dropped.
    pub(super) client: Client,
    /// A handful, so a scan beats a hash. `None` where the next statement may meet another server process.
    pub(super) statements: Option<Vec<(&'static str, Statement)>>,
    pub(super) watch: Arc<Watch>,
    pub(super) epoch: u64,
    pub(super) stale: bool,
    /// Whether a statement that may have done something has left since the session was taken.
    pub(super) sent: bool,
    /// Whether the server refused one for a reason that may be gone when it is sent again.
    pub(super) undone: bool,
    /// Whether the server may have more to say about an error.
    pub(super) unsettled: bool,
    pub(super) wants_primary: bool,
}

impl Session {
    /// All rows of a statement, which is prepared on its first use. Blocks for one round trip.
    pub fn query(&mut self, sql: &'static str, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, Error> {
        let statement = self.statement(sql)?;
        self.sent = true;
        let result = match statement {
            Some(statement) => self.client.query(&statement, params),
            None => self.client.query_typed(sql, &typed(params)),
        };
        result.map_err(|error| self.failed(sql, &error))
    }

    /// How many rows a statement touched. Blocks for one round trip.
    pub fn execute(&mut self, sql: &'static str, params: &[&(dyn ToSql + Sync)]) -> Result<u64, Error> {
        let statement = self.statement(sql)?;
        self.sent = true;
        let result = match statement {
            Some(statement) => self.client.execute(&statement, params),
            None => self.client.execute_typed(sql, &typed(params)),
        };
        result.map_err(|error| self.failed(sql, &error))
    }

    fn statement(&mut self, sql: &'static str) -> Result<Option<Statement>, Error> {
        let Some(statements) = &mut self.statements else {
            return Ok(None);
        };
        if let Some((_, statement)) = statements.iter().find(|(known, _)| *known == sql) {
            return Ok(Some(statement.clone()));
        }
        match self.client.prepare(sql) {
            Ok(statement) => {
                statements.push((sql, statement.clone()));
                Ok(Some(statement))
            }
            Err(error) => Err(self.failed(sql, &error)),
        }
    }

    fn failed(&mut self, sql: &'static str, error: &postgres::Error) -> Error {
        self.unsettled = true;
        // Another host is the primary by now; or what was prepared here fits the tables no more.
        let stale = (self.wants_primary && error::is_read_only(error)) || error::is_outdated(error);
        self.stale |= stale;
        self.undone = stale || error::is_rolled_back(error);
        Error::from_query(sql, error)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.watch.forget();
    }
}

/// The parameters of a statement that is not prepared, whose types nobody has told: the first that fits.
fn typed<'a>(params: &[&'a (dyn ToSql + Sync)]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    const TYPES: [Type; 5] = [Type::INT8, Type::TEXT, Type::BOOL, Type::INT8_ARRAY, Type::TEXT_ARRAY];
    let type_of = |param: &(dyn ToSql + Sync)| {
        let fits = |ty: &Type| param.to_sql_checked(ty, &mut BytesMut::new()).is_ok();
        TYPES.into_iter().find(fits).unwrap_or(Type::UNKNOWN)
    };
    params.iter().map(|param| (*param, type_of(*param))).collect()
}
