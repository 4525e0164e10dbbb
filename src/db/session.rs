//! One connection with the statements that were prepared on it, and what a failed statement means for both.

use super::{
    clock::{Changed, Reading},
    sqlstate::{Meaning, condition},
    watchdog::{CANCEL_TIMEOUT, Connection},
};
use crate::error::Error;
use postgres::{
    Row, Statement,
    types::{ToSql, Type},
};
use std::time::{Duration, Instant, SystemTime};

/// A parameter and its type.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// Until when the rows of a statement may be changed: the statement's first parameter.
#[derive(Clone, Copy)]
pub(super) enum Deadlines<'a> {
    /// As a `timestamptz`.
    One(Instant),
    /// As a `timestamptz[]`.
    Each(&'a [Instant]),
}

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
    /// The database's clock, as it was seen last.
    pub(super) clock: Option<Reading>,
    /// Whether that clock was set since the session began, or another server answers now.
    pub(super) clock_was_set: bool,
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

    /// What a statement of changes answers. Its first parameter, before those given, is the deadlines, past which it
    /// changes nothing; the last column of its rows is the database's clock. One more round trip where it has no rows,
    /// or where the session's knowledge of the clock is old.
    pub(super) fn change(
        &mut self,
        sql: &'static str,
        params: &[Param],
        deadlines: Deadlines,
    ) -> Result<Changed, Failure> {
        let reading = match self.clock.filter(|reading| reading.is_fresh(Instant::now())) {
            Some(reading) => reading,
            None => self.read_clock()?,
        };
        let times: Vec<SystemTime> = match deadlines {
            Deadlines::One(deadline) => vec![reading.before(deadline)],
            Deadlines::Each(deadlines) => deadlines.iter().map(|each| reading.before(*each)).collect(),
        };
        let first: Param = match deadlines {
            Deadlines::One(_) => (&times[0], Type::TIMESTAMPTZ),
            Deadlines::Each(_) => (&times, Type::TIMESTAMPTZ_ARRAY),
        };
        let params: Vec<Param> = [first].into_iter().chain(params.iter().cloned()).collect();
        let sent = Instant::now();
        let rows = self.query(sql, &params)?;
        let end = match rows.last() {
            Some(row) => self.see_clock(sql, row, sent)?,
            None => self.read_clock()?,
        };
        Ok(Changed { rows, deadlines: times, end: Some(end).filter(|end| end.follows(&reading)) })
    }

    fn read_clock(&mut self) -> Result<Reading, Failure> {
        const CLOCK: &str = "select pg_catalog.clock_timestamp()";
        let sent = Instant::now();
        // Not prepared: that would be one more round trip.
        let rows = self.run(CLOCK, &[], false);
        // It changes nothing, so that what it is read for may be executed again.
        let rows = rows.map_err(|failure| Failure { sent: false, ..failure })?;
        self.see_clock(CLOCK, &rows[0], sent)
    }

    /// The clock in the last column of an answer.
    fn see_clock(&mut self, sql: &'static str, row: &Row, sent: Instant) -> Result<Reading, Failure> {
        let clock = row.try_get(row.len() - 1).map_err(|error| self.failure(sql, true, &error))?;
        let reading = Reading::new(clock, sent, Instant::now());
        self.clock_was_set |= self.clock.is_some_and(|earlier| !reading.follows(&earlier));
        self.clock = Some(reading);
        Ok(reading)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::tests::{LONG, Until, server, watchdog};

    /// The clock is read before a change: that this fails says nothing against executing the change again.
    #[test]
    fn a_change_is_not_sent_where_the_clock_cannot_be_read() {
        let (watchdog, tls) = watchdog();
        let target = server(Until::Closed);
        for statements in [Some(Vec::new()), None] {
            let connection = watchdog.connect(&target.config_for(&target.hosts), &tls, "").unwrap();
            let mut session = Session {
                connection,
                statements,
                answer_timeout: LONG,
                epoch: 0,
                clock: None,
                clock_was_set: false,
            };
            let changed = session.change("update", &[], Deadlines::One(Instant::now() + LONG));
            let failure = changed.expect_err("the connection is closed");
            assert_eq!((failure.meaning, failure.sent), (Meaning::Broken, false));
            // A statement itself may have been executed.
            let connection = watchdog.connect(&target.config_for(&target.hosts), &tls, "").unwrap();
            session = Session { connection, statements: None, ..session };
            assert!(session.query("update", &[]).unwrap_err().sent);
        }
    }
}
