//! Starts a test's service with a database of its own, saves and restores its states, and lets time pass for it. A
//! state is a schema of the database with copies of the tables and the next id.

use super::databases::ScratchDatabase;
use super::{Refusal, requests::Interceptor};
use crate::config::Config;
use crate::db::{WRITTEN_TABLES, blocking::run_outside_of_runtimes, explain};
use crate::error::StartError;
use crate::http::Request;
use crate::server::{self, BoundServer, Interception, Server};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::time::{Duration, Instant};
use std::{collections::HashSet, sync::Arc};

/// How long before the deadline of a control (a request that steers a test's service) its statements are ended, so that
/// its answer is still sent in time.
const TIME_TO_SEND_ANSWER: Duration = Duration::from_millis(100);

/// A test's server with a database of its own.
pub struct RunningService {
    // The server is the first field, so that it stops before the database is dropped.
    pub server: Server,
    pub database: ScratchDatabase,
    pub interceptor: Arc<Mutex<Interceptor>>,
    /// Names of the schemas that hold saved states. Locked while a state is saved or restored.
    saved_schemas: Mutex<HashSet<String>>,
}

impl RunningService {
    /// Starts a server on a database, at an address that is bound already. `find_control` returns the function that
    /// executes a request if that is a control, which steers the service. Blocks until the server answers.
    pub fn start(
        database: ScratchDatabase,
        mut bound: BoundServer,
        config: &Config,
        find_control: impl Fn(&Request) -> Option<server::ControlHandler> + Send + Sync + 'static,
    ) -> Result<RunningService, StartError> {
        let interceptor = Arc::<Mutex<Interceptor>>::default();
        let interceptor_of_server = interceptor.clone();
        bound.intercept = Some(Arc::new(move |request| {
            let fault = || interceptor_of_server.lock().intercept(request).map(Interception::Fault);
            find_control(request).map(Interception::ControlRequest).or_else(fault)
        }));
        let config = Config { database: database.config().database, ..config.clone() };
        let server = bound.start(config, || {})?;
        Ok(RunningService { server, database, interceptor, saved_schemas: Mutex::default() })
    }

    /// Saves the tables and the next id as the state `name`, or as the state at the start of the service if `name` is
    /// `None`. Replaces an older state of this name.
    ///
    /// Copies all tables from one snapshot. Reads the next id last, so that it is larger than all ids in the snapshot.
    pub fn save_state(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refusal> {
        let is_allowed = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        if name.is_some_and(|name| !(1..=40).contains(&name.len()) || !name.bytes().all(is_allowed)) {
            return Err(Refusal::new(400, "the name of a state has 1 to 40 characters of a-z, 0-9 and _"));
        }
        let (mut saved, state) = (self.saved_schemas.lock(), state_schema_name(name));
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

    /// Restores the state `name` in one transaction, and removes faults and counts of wrong passwords. `None` restores
    /// the state at the start of the service, which has no users if none was saved, and empties the journal of
    /// requests, too.
    pub fn restore_state(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refusal> {
        let (saved, state) = (self.saved_schemas.lock(), state_schema_name(name));
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
        self.server.app.operations.throttle.advance_clock(Duration::from_secs(60));
        match name {
            Some(_) => self.interceptor.lock().remove_faults(),
            None => *self.interceptor.lock() = Interceptor::default(),
        }
        Ok(())
    }

    /// Makes idempotency keys and counts of wrong passwords older, as if this time had passed.
    pub fn advance_time(&self, time: Duration, deadline: Instant) -> Result<(), Refusal> {
        // Moves an expiry to now at the earliest, because several calls with long times would move it to before the
        // earliest timestamp of PostgreSQL.
        let age = format!(
            "update idempotency_keys set expires_at = greatest(expires_at - interval '{} seconds', now())",
            time.as_secs_f64()
        );
        self.execute(&age, deadline)?;
        self.server.app.operations.throttle.advance_clock(time);
        Ok(())
    }

    /// Executes statements in one transaction, and gives up shortly before the deadline. If another session has a lock,
    /// rolls back and tries again, because the request with that lock may itself wait for a lock of this transaction.
    fn execute(&self, sql: &str, deadline: Instant) -> Result<(), Refusal> {
        const TOO_LATE: &str =
            "it took too long, and has changed nothing: another session may keep a lock on users";
        let end = deadline.checked_sub(TIME_TO_SEND_ANSWER).unwrap_or(deadline);
        loop {
            let Err(error) = run_outside_of_runtimes(|| self.try_execute(sql, end)) else { return Ok(()) };
            let is_locked = error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE);
            if is_locked && Instant::now() < end {
                continue;
            }
            let is_late = is_locked || error.code() == Some(&SqlState::QUERY_CANCELED);
            let (code, why) = if is_late { (409, TOO_LATE.to_owned()) } else { (400, explain(&error)) };
            return Err(Refusal::new(code, why));
        }
    }

    /// Executes statements in one transaction, which is rolled back if a lock is not free within 50 ms, or at `end_at`.
    fn try_execute(&self, sql: &str, end_at: Instant) -> Result<(), Error> {
        let left_ms = end_at.saturating_duration_since(Instant::now()).as_millis().max(1);
        Client::connect(self.database.url(), NoTls)?.batch_execute(&format!(
            "set lock_timeout = '50ms'; set statement_timeout = {left_ms}; set jit = off; begin; {sql}; commit"
        ))
    }
}

/// Returns the name of the database schema that holds the state `name`, or for `None` the state at the start of the
/// service.
fn state_schema_name(name: Option<&str>) -> String {
    name.map_or("userd_start".to_owned(), |name| format!("userd_state_{name}"))
}
