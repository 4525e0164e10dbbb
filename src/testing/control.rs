//! The state, the faults and the time of a service that is thrown away.

use super::{ScratchDatabase, failed, has_code};
use crate::App;
use crate::config::Config;
use crate::db::{blocking::outside_of_runtimes, explain};
use crate::error::StartError;
use crate::http::{Method, Request};
use crate::server::{BoundServer, Fault, Server};
use parking_lot::Mutex;
use postgres::{Client, Error, NoTls, error::SqlState};
use std::io;
use std::sync::Arc;
use std::time::Duration;

impl ScratchDatabase {
    /// Starts a server on it that is reset, fails and has time pass on command.
    #[doc(hidden)]
    pub fn serve(
        &self,
        mut bound: BoundServer,
        config: Config,
        on_listening: impl FnOnce() -> io::Result<()>,
        on_broken: impl FnOnce() + Send + 'static,
    ) -> Result<(Server, Control), StartError> {
        let rules = Arc::new(Mutex::new(Vec::<Rule>::new()));
        let choosing = rules.clone();
        let choose = move |request: &Request| {
            let mut rules = choosing.lock();
            let is_met = |rule: &&mut Rule| rule.method == request.method && rule.path == request.path();
            let rule = rules.iter_mut().filter(|rule| rule.left > 0).find(is_met)?;
            rule.left -= 1;
            Some(rule.fault)
        };
        bound.faults = Some(Arc::new(choose));
        let server = bound.start(config, on_listening, on_broken)?;
        let control = Control { app: server.app.clone(), url: self.url.clone(), rules };
        Ok((server, control))
    }

    /// Keeps the users that are in it: a reset brings them back.
    #[doc(hidden)]
    pub fn keep_seed(&self) -> Result<(), StartError> {
        const KEEP: &str = "\
            create schema userd_seed; \
            create table userd_seed.users as table users; \
            create table userd_seed.credentials as table credentials; \
            create table userd_seed.ids as select last_value, is_called from users_id_seq";
        run(&self.url, KEEP).map_err(failed)
    }
}

/// The reset, the faults and the time of a service that is thrown away.
#[doc(hidden)]
pub struct Control {
    app: Arc<App>,
    url: String,
    rules: Arc<Mutex<Vec<Rule>>>,
}

impl Control {
    /// Removes all users, keys, counts of wrong passwords and faults, and brings the seed back.
    pub fn reset(&self) -> Result<(), String> {
        const RESET: &str = "\
            set lock_timeout = '50ms'; set jit = off; \
            truncate users, credentials, idempotency_keys restart identity; \
            do $$ begin \
                if to_regclass('userd_seed.users') is not null then \
                    insert into users overriding system value table userd_seed.users; \
                    insert into credentials table userd_seed.credentials; \
                    perform setval('users_id_seq', last_value, is_called) from userd_seed.ids; \
                end if; \
            end $$";
        self.fail_none();
        // A statement in flight may hold a lock, and wait for another one of these.
        let is_locked = |tried: &Result<(), Error>| has_code(tried, &SqlState::LOCK_NOT_AVAILABLE);
        let mut tries = (0..200).map(|_| run(&self.url, RESET)).skip_while(is_locked);
        tries.next().ok_or("a statement holds a lock")?.map_err(|error| explain(&error))?;
        self.app.rules.throttle.advance(Duration::from_secs(60));
        Ok(())
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords.
    pub fn advance(&self, time: Duration) -> Result<(), String> {
        // An older key is as good as none.
        let age = format!(
            "update idempotency_keys set kept_since = \
             greatest(kept_since - interval '{} seconds', now() - interval '25 hours')",
            time.as_secs_f64()
        );
        run(&self.url, &age).map_err(|error| explain(&error))?;
        self.app.rules.throttle.advance(time);
        Ok(())
    }

    /// Has the next requests with this method and path fail, so many times.
    pub fn fail(&self, fault: Fault, method: &str, path: &str, times: u32) -> Result<(), String> {
        const CAN: &str = "requests can fail whose method is GET, HEAD, POST, PUT, PATCH or DELETE and whose path, \
                           without a query, is /users or below";
        let method = Method::from(method);
        let is_of_users = path == "/users" || path.starts_with("/users/") && !path.contains('?');
        if !is_of_users || matches!(method, Method::Options | Method::Other) {
            return Err(CAN.to_owned());
        }
        self.rules.lock().push(Rule { fault, method, path: path.to_owned(), left: times });
        Ok(())
    }

    /// Forgets the faults that are left.
    pub fn fail_none(&self) {
        self.rules.lock().clear();
    }

    /// Returns how many requests are yet to fail.
    pub fn faults_left(&self) -> u32 {
        self.rules.lock().iter().map(|rule| rule.left).fold(0, u32::saturating_add)
    }
}

/// Requests that are to fail.
struct Rule {
    fault: Fault,
    method: Method,
    path: String,
    left: u32,
}

/// Executes statements in one transaction, in a session of their own.
fn run(url: &str, sql: &str) -> Result<(), Error> {
    outside_of_runtimes(|| Client::connect(url, NoTls)?.batch_execute(sql))
}
