//! The controls of a service that is thrown away: its states, and its time. `requests` has the controls of its requests.
//! A state is a schema with copies of the tables, and with the next id.

use super::databases::{ScratchDatabase, has_code};
use super::requests::Watch;
use crate::db::{WRITTEN, blocking::outside_of_runtimes, explain};
use crate::server::{BoundServer, Server};
use crate::{App, config::Config, error::StartError, http::Request};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::hash::{BuildHasher, RandomState};
use std::{collections::HashSet, io, sync::Arc, time::Duration};

/// The controls of a service.
#[doc(hidden)]
pub struct Control {
    app: Arc<App>,
    /// The URL of the database.
    url: String,
    /// Names of the saved states. Locked while one is saved or brought back.
    saved: Mutex<HashSet<String>>,
    pub(super) watch: Arc<Mutex<Watch>>,
}

impl ScratchDatabase {
    /// Starts a server on it, with its controls.
    #[doc(hidden)]
    pub fn serve(
        &self,
        mut bound: BoundServer,
        config: Config,
        on_listening: impl FnOnce() -> io::Result<()>,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<(Server, Control), StartError> {
        let watch = Arc::<Mutex<Watch>>::default();
        let watching = watch.clone();
        bound.faults = Some(Arc::new(move |request: &Request| watching.lock().choose(request)));
        let server = bound.start(config, on_listening, on_broken)?;
        let (app, url) = (server.app.clone(), self.url().to_owned());
        let control = Control { app, url, saved: Mutex::default(), watch };
        control.chance(RandomState::new().hash_one(0));
        Ok((server, control))
    }
}

impl Control {
    /// Saves the users, their credentials, the idempotency keys and the next id of one snapshot: as the state of a name,
    /// instead of an older one, or as the state at the start. A create that is committed meanwhile may have moved the next
    /// id, which is read last, so that it follows all ids of the snapshot.
    pub fn save(&self, name: Option<&str>) -> Result<(), String> {
        let is_allowed = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
        if name.is_some_and(|name| !(1..=40).contains(&name.len()) || !name.bytes().all(is_allowed)) {
            return Err("the name of a state has 1 to 40 characters of a-z, 0-9 and _".to_owned());
        }
        let (mut saved, state) = (self.saved.lock(), schema(name));
        let copy = |table| format!("create table {state}.{table} as table {table};");
        let copies: String = WRITTEN.iter().map(copy).collect();
        self.run_between_requests(&format!(
            "begin isolation level repeatable read; drop schema if exists {state} cascade; create schema {state}; \
             {copies} create table {state}.next_id as select last_value, is_called from users_id_seq; commit"
        ))?;
        saved.insert(state);
        Ok(())
    }

    /// Brings the state of a name back, in one transaction, and forgets counts of wrong passwords and faults; or the state
    /// at the start, which is empty if none was saved: then it forgets the requests, too.
    pub fn restore(&self, name: Option<&str>) -> Result<(), String> {
        let (saved, state) = (self.saved.lock(), schema(name));
        let mut restore = format!("truncate {} restart identity", WRITTEN.join(", "));
        if saved.contains(&state) {
            for table in WRITTEN {
                restore += &format!("; insert into {table} overriding system value table {state}.{table}");
            }
            restore +=
                &format!("; select setval('users_id_seq', last_value, is_called) from {state}.next_id");
        } else if name.is_some() {
            return Err("no state was saved under this name".to_owned());
        }
        self.run_between_requests(&restore)?;
        self.app.operations.throttle.advance(Duration::from_secs(60));
        self.watch.lock().forget(name.is_none());
        Ok(())
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords.
    pub fn advance(&self, time: Duration) -> Result<(), String> {
        // A key that has expired need not become older.
        let age = format!(
            "update idempotency_keys set expires_at = greatest(expires_at - interval '{} seconds', now())",
            time.as_secs_f64()
        );
        self.run(&age).map_err(|error| explain(&error))?;
        self.app.operations.throttle.advance(time);
        Ok(())
    }

    /// Executes statements that lock tables. A statement of a request may hold one of these locks and wait for another one:
    /// the statements then end, which releases their locks, and are tried again.
    fn run_between_requests(&self, sql: &str) -> Result<(), String> {
        let sql = format!("set lock_timeout = '50ms'; set jit = off; {sql}");
        let is_locked = |tried: &Result<(), Error>| has_code(tried, &SqlState::LOCK_NOT_AVAILABLE);
        let mut tries = (0..200).map(|_| self.run(&sql)).skip_while(is_locked);
        tries
            .next()
            .ok_or("another session keeps a lock on users: end its transaction")?
            .map_err(|error| explain(&error))
    }

    /// Executes statements in a session of their own.
    fn run(&self, sql: &str) -> Result<(), Error> {
        outside_of_runtimes(|| Client::connect(&self.url, NoTls)?.batch_execute(sql))
    }
}

/// Returns the schema of a state.
fn schema(name: Option<&str>) -> String {
    name.map_or("userd_start".to_owned(), |name| format!("userd_state_{name}"))
}
