//! A service that is thrown away, with a database of its own: its start, its states and its time. A state is a schema with
//! copies of the tables, and with the next id.

use super::databases::ScratchDatabase;
use super::{Refused, requests::Watch};
use crate::config::Config;
use crate::db::{WRITTEN, blocking::outside_of_runtimes, explain};
use crate::error::StartError;
use crate::http::Request;
use crate::server::{self, BoundServer, Intercepted, Server};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::time::{Duration, Instant};
use std::{collections::HashSet, sync::Arc};

/// Time before the deadline of a control in which nothing is committed: its client would be told that it failed.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// A server with a database of its own.
pub struct Running {
    // In this order: the database is dropped after the server has stopped.
    pub server: Server,
    pub database: ScratchDatabase,
    pub watch: Arc<Mutex<Watch>>,
    /// Names of the saved states. Locked while one is saved or brought back.
    saved: Mutex<HashSet<String>>,
}

impl Running {
    /// Starts a server on a database, at an address that is bound already. `controls` chooses the requests that are
    /// controls. Blocks until it answers.
    pub fn start(
        database: ScratchDatabase,
        mut bound: BoundServer,
        config: &Config,
        controls: impl Fn(&Request) -> Option<server::Control> + Send + Sync + 'static,
    ) -> Result<Running, StartError> {
        let watch = Arc::<Mutex<Watch>>::default();
        let watching = watch.clone();
        bound.intercept = Some(Arc::new(move |request| {
            let fault = || watching.lock().choose(request).map(Intercepted::Fault);
            controls(request).map(Intercepted::Control).or_else(fault)
        }));
        let config = Config { database: database.config().database, ..config.clone() };
        Ok(Running { server: bound.start(config, || {})?, database, watch, saved: Mutex::default() })
    }

    /// Saves the users, their credentials, the idempotency keys and the next id of one snapshot: as the state of a name,
    /// instead of an older one, or as the state at the start. A create that is committed meanwhile may have moved the next
    /// id, which is read last, so that it follows all ids of the snapshot.
    pub fn save(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refused> {
        let is_allowed = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        if name.is_some_and(|name| !(1..=40).contains(&name.len()) || !name.bytes().all(is_allowed)) {
            return Err(Refused::new(400, "the name of a state has 1 to 40 characters of a-z, 0-9 and _"));
        }
        let (mut saved, state) = (self.saved.lock(), schema(name));
        let copy = |table| format!("create table {state}.{table} as table {table};");
        let copies: String = WRITTEN.iter().map(copy).collect();
        let save = format!(
            "set transaction isolation level repeatable read; drop schema if exists {state} cascade; \
             create schema {state}; {copies} \
             create table {state}.next_id as select last_value, is_called from users_id_seq"
        );
        self.run(&save, deadline)?;
        saved.insert(state);
        Ok(())
    }

    /// Brings the state of a name back, in one transaction, and forgets counts of wrong passwords and faults; or the state
    /// at the start, which is empty if none was saved: then it forgets the requests, too.
    pub fn restore(&self, name: Option<&str>, deadline: Instant) -> Result<(), Refused> {
        let (saved, state) = (self.saved.lock(), schema(name));
        let mut restore = format!("truncate {} restart identity", WRITTEN.join(", "));
        if saved.contains(&state) {
            for table in WRITTEN {
                restore += &format!("; insert into {table} overriding system value table {state}.{table}");
            }
            restore +=
                &format!("; select setval('users_id_seq', last_value, is_called) from {state}.next_id");
        } else if name.is_some() {
            return Err(Refused::new(404, "no state was saved under this name"));
        }
        self.run(&restore, deadline)?;
        self.server.app.operations.throttle.advance(Duration::from_secs(60));
        match name {
            Some(_) => self.watch.lock().fail_none(),
            None => *self.watch.lock() = Watch::default(),
        }
        Ok(())
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords.
    pub fn advance(&self, time: Duration, deadline: Instant) -> Result<(), Refused> {
        // A key that has expired need not become older.
        let age = format!(
            "update idempotency_keys set expires_at = greatest(expires_at - interval '{} seconds', now())",
            time.as_secs_f64()
        );
        self.run(&age, deadline)?;
        self.server.app.operations.throttle.advance(time);
        Ok(())
    }

    /// Executes statements in one transaction, which is rolled back if it has not ended in time. A statement of a request
    /// may hold one of the locks that they take, and wait for another one: they then end, which releases their locks, and
    /// are tried again.
    fn run(&self, sql: &str, deadline: Instant) -> Result<(), Refused> {
        const LATE: &str =
            "it took too long, and has changed nothing: another session may keep a lock on users";
        let end = deadline.checked_sub(ANSWER_TIME).unwrap_or(deadline);
        loop {
            let tried = outside_of_runtimes(|| self.try_run(sql, end));
            let code = tried.as_ref().err().and_then(Error::code);
            let is_locked = code == Some(&SqlState::LOCK_NOT_AVAILABLE);
            if is_locked && Instant::now() < end {
                continue;
            }
            let is_late = is_locked || code == Some(&SqlState::QUERY_CANCELED);
            return match tried {
                Ok(true) => Ok(()),
                Err(error) if !is_late => Err(Refused::new(400, explain(&error))),
                _ => Err(Refused::new(409, LATE)),
            };
        }
    }

    /// Returns whether the statements were executed before `end`; otherwise nothing is changed.
    fn try_run(&self, sql: &str, end: Instant) -> Result<bool, Error> {
        let left = end.saturating_duration_since(Instant::now()).as_millis().max(1);
        let mut client = Client::connect(self.database.url(), NoTls)?;
        client.batch_execute(&format!(
            "set lock_timeout = '50ms'; set statement_timeout = {left}; set jit = off; begin; {sql}"
        ))?;
        let is_in_time = Instant::now() < end;
        client.batch_execute(if is_in_time { "commit" } else { "rollback" })?;
        Ok(is_in_time)
    }
}

/// Returns the schema of a state.
fn schema(name: Option<&str>) -> String {
    name.map_or("userd_start".to_owned(), |name| format!("userd_state_{name}"))
}
