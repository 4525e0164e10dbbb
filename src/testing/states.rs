//! A test's service with a database of its own: its start, its saved states and its time. A state is a schema of the
//! database with copies of the tables and the next id.

use super::databases::ScratchDatabase;
use super::{Refusal, requests::Interceptor};
use crate::config::Config;
use crate::db::{WRITTEN_TABLES, blocking::outside_of_runtimes, explain};
use crate::error::StartError;
use crate::http::Request;
use crate::server::{self, BoundServer, Server, Treatment};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::time::{Duration, Instant};
use std::{collections::HashSet, sync::Arc};

/// Time that is left for the answer of a control after its statements.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// A server with a database of its own.
pub struct RunningService {
    // The server is the first field, so that it stops before the database is dropped.
    pub server: Server,
    pub database: ScratchDatabase,
    pub interceptor: Arc<Mutex<Interceptor>>,
    /// Schemas of the saved states. Locked while a state is saved or restored.
    saved_schemas: Mutex<HashSet<String>>,
}

impl RunningService {
    /// Starts a server on a database, at an address that is bound already. `controls` returns the control that a
    /// request asks for, if any. Blocks until the server answers.
    pub fn start(
        database: ScratchDatabase,
        mut bound: BoundServer,
        config: &Config,
        controls: impl Fn(&Request) -> Option<server::HarnessHandler> + Send + Sync + 'static,
    ) -> Result<RunningService, StartError> {
        let interceptor = Arc::<Mutex<Interceptor>>::default();
        let watching = interceptor.clone();
        bound.intercept = Some(Arc::new(move |request| {
            let fault = || watching.lock().take_fault(request).map(Treatment::Fault);
            controls(request).map(Treatment::Harness).or_else(fault)
        }));
        let config = Config { database: database.config().database, ..config.clone() };
        let server = bound.start(config, || {})?;
        Ok(RunningService { server, database, interceptor, saved_schemas: Mutex::default() })
    }

    /// Saves the tables and the next id as the state of this name, or as the state at the start if `name` is `None`.
    /// Replaces an older state.
    ///
    /// The tables are those of one snapshot. The next id is read last, so that it is larger than all ids of the
    /// snapshot.
    pub fn save(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refusal> {
        let is_allowed = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        if name.is_some_and(|name| !(1..=40).contains(&name.len()) || !name.bytes().all(is_allowed)) {
            return Err(Refusal::new(400, "the name of a state has 1 to 40 characters of a-z, 0-9 and _"));
        }
        let (mut saved, state) = (self.saved_schemas.lock(), state_schema(name));
        let copy = |table| format!("create table {state}.{table} as table {table};");
        let copies: String = WRITTEN_TABLES.iter().map(copy).collect();
        let save = format!(
            "set transaction isolation level repeatable read; drop schema if exists {state} cascade; \
             create schema {state}; {copies} \
             create table {state}.next_id as select last_value, is_called from users_id_seq"
        );
        self.execute(&save, deadline)?;
        saved.insert(state);
        Ok(())
    }

    /// Restores the state of this name in one transaction, and removes faults and counts of wrong passwords. `None`
    /// restores the state at the start, which is empty if none was saved, and removes the journal of requests, too.
    pub fn restore(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refusal> {
        let (saved, state) = (self.saved_schemas.lock(), state_schema(name));
        let mut restore = format!("truncate {} restart identity", WRITTEN_TABLES.join(", "));
        if saved.contains(&state) {
            for table in WRITTEN_TABLES {
                restore += &format!("; insert into {table} overriding system value table {state}.{table}");
            }
            restore +=
                &format!("; select setval('users_id_seq', last_value, is_called) from {state}.next_id");
        } else if name.is_some() {
            return Err(Refusal::new(404, "no state was saved under this name"));
        }
        self.execute(&restore, deadline)?;
        self.server.app.operations.throttle.advance(Duration::from_secs(60));
        match name {
            Some(_) => self.interceptor.lock().remove_faults(),
            None => *self.interceptor.lock() = Interceptor::default(),
        }
        Ok(())
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords.
    pub fn advance(&self, time: Duration, deadline: Instant) -> Result<(), Refusal> {
        // Moves no expiry to before now, because several long times together would move the expiry to before the
        // earliest timestamp of PostgreSQL.
        let age = format!(
            "update idempotency_keys set expires_at = greatest(expires_at - interval '{} seconds', now())",
            time.as_secs_f64()
        );
        self.execute(&age, deadline)?;
        self.server.app.operations.throttle.advance(time);
        Ok(())
    }

    /// Executes statements in one transaction, and ends shortly before the deadline. If the statements meet a lock,
    /// tries them again. They hold no lock between two tries, because a request that has to end first may wait for a
    /// lock of theirs.
    fn execute(&self, sql: &str, deadline: Instant) -> Result<(), Refusal> {
        const LATE: &str =
            "it took too long, and has changed nothing: another session may keep a lock on users";
        let end = deadline.checked_sub(ANSWER_TIME).unwrap_or(deadline);
        loop {
            let Err(error) = outside_of_runtimes(|| self.try_execute(sql, end)) else { return Ok(()) };
            let is_locked = error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE);
            if is_locked && Instant::now() < end {
                continue;
            }
            let is_late = is_locked || error.code() == Some(&SqlState::QUERY_CANCELED);
            return Err(if is_late { Refusal::new(409, LATE) } else { Refusal::new(400, explain(&error)) });
        }
    }

    /// Executes statements in one transaction, which is rolled back if a lock is not free or at `end`.
    fn try_execute(&self, sql: &str, end: Instant) -> Result<(), Error> {
        let left_ms = end.saturating_duration_since(Instant::now()).as_millis().max(1);
        Client::connect(self.database.url(), NoTls)?.batch_execute(&format!(
            "set lock_timeout = '50ms'; set statement_timeout = {left_ms}; set jit = off; begin; {sql}; commit"
        ))
    }
}

/// Returns the schema of the state of this name, or of the state at the start.
fn state_schema(name: Option<&str>) -> String {
    name.map_or("userd_start".to_owned(), |name| format!("userd_state_{name}"))
}
