//! The controls of a service that is thrown away: its states, and its time. `requests` has the controls of its requests.
//! A state is a schema with copies of the tables, and with the next id.

use super::requests::Watch;
use crate::db::{WRITTEN, blocking::outside_of_runtimes, explain};
use crate::{App, error::StartError};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::time::{Duration, Instant};
use std::{collections::HashSet, sync::Arc};

/// Time before the deadline of a control in which nothing is committed: its client would be told that it failed.
const ANSWER_TIME: Duration = Duration::from_millis(100);

/// The reason why a control did nothing, with the status of its answer.
#[derive(Debug)]
#[cfg_attr(not(feature = "command"), allow(dead_code, reason = "`TestServer` shows it in a panic"))]
pub struct Refused {
    pub(super) status: u16,
    pub(super) message: String,
}

impl Refused {
    pub(super) fn new(status: u16, message: impl ToString) -> Refused {
        Refused { status, message: message.to_string() }
    }
}

impl From<StartError> for Refused {
    fn from(error: StartError) -> Refused {
        let is_ordered = matches!(error, StartError::Config(_) | StartError::Listen(..));
        Refused::new(if is_ordered { 400 } else { 503 }, error)
    }
}

/// The controls of a service.
pub struct Control {
    pub(super) app: Arc<App>,
    /// The URL of the database.
    pub(super) url: String,
    /// Names of the saved states. Locked while one is saved or brought back.
    pub(super) saved: Mutex<HashSet<String>>,
    pub(super) watch: Arc<Mutex<Watch>>,
}

impl Control {
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
        self.app.operations.throttle.advance(Duration::from_secs(60));
        self.watch.lock().forget(name.is_none());
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
        self.app.operations.throttle.advance(time);
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
        let mut client = Client::connect(&self.url, NoTls)?;
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
