//! Servers that run in the process of a test, each with a database of its own.

use super::Fault;
use super::databases::{ScratchDatabase, test_config};
use super::running_service::RunningService;
use crate::App;
use crate::config::{Config, PasswordHashing};
use crate::db::{Failure, blocking::run_outside_of_runtimes};
use crate::error::{self, StartError};
use crate::operations::Create;
use crate::secret::Secret;
use crate::server::BoundServer;
use crate::users::email;
use crate::users::user::{NewUser, User};
use postgres::{Client, NoTls};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use std::{fmt, thread};

/// The most time that a change of the database may take, such as a reset.
const MAX_DB_CHANGE_TIME: Duration = Duration::from_secs(10);

/// A running server on a free port of the loopback, with a database of its own. Dropping this value stops the server
/// and drops the database.
pub struct TestServer(RunningService);

impl TestServer {
    /// Starts a server with the default settings, except for the least cost of `password_hashing`: a debug build takes
    /// most of a second for a hash of the default cost. Blocks until the server answers.
    ///
    /// # Panics
    /// If [`TestServer::try_with`] fails. The message is one line that says why.
    #[track_caller]
    pub fn start() -> TestServer {
        TestServer::with(|_| ())
    }

    /// Starts a server with some settings changed:
    ///
    /// ```
    /// use userd::{Schema, testing::TestServer};
    ///
    /// let server = TestServer::with(|config| {
    ///     config.schema = Schema::Strict;
    ///     config.api_token = Some("secret".into());
    /// });
    /// ```
    ///
    /// # Panics
    /// If [`TestServer::try_with`] fails. The message is one line that says why.
    #[track_caller]
    pub fn with(change: impl FnOnce(&mut Config)) -> TestServer {
        unwrap_or_panic("start a server", TestServer::try_with(change))
    }

    /// Starts a server with some settings changed, and returns an error instead of a panic. The server has a database
    /// of its own, whatever the settings say. Blocks for less than 100 ms, for about a second if the cluster has to be
    /// started first, or up to a minute on a slow machine.
    ///
    /// # Errors
    /// [`StartError::Cluster`] if PostgreSQL is missing or does not start. All other errors come from the changed
    /// settings.
    pub fn try_with(change: impl FnOnce(&mut Config)) -> Result<TestServer, StartError> {
        let mut config = Config { password_hashing: PasswordHashing::LeastCostForTests, ..test_config() };
        change(&mut config);
        let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
        config.database = database.config().database;
        RunningService::start(database, BoundServer::bind(&config)?, &config, |_| None).map(TestServer)
    }

    /// Returns the URL of the server without a slash at its end: `http://127.0.0.1:41234`.
    pub fn base_url(&self) -> &str {
        self.0.server.base_url()
    }

    /// Returns the URL of a path: `server.url("/users?page=2")`.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base_url())
    }

    /// Returns the TCP address that the server listens on; `None` if the settings name a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.0.server.addr()
    }

    /// Returns the service behind the server, which answers requests without a socket.
    pub fn app(&self) -> &App {
        self.0.server.app()
    }

    /// Returns the connection string of the server's database, for psql, libpq and the `postgres` crate.
    pub fn database_url(&self) -> &str {
        self.0.database.url()
    }

    /// Creates `count` users in one statement: `User 1` with `user1@example.com`, and so on. A further call goes on
    /// with the next number. Returns the ids. Blocks for some 20 ms per thousand users.
    ///
    /// # Panics
    /// If the database refuses a user, as for an address that is taken.
    #[track_caller]
    pub fn seed(&self, count: u32) -> Vec<i64> {
        const SEED_USERS: &str = "\
            with start as (select coalesce(max(substring(email, '^user([0-9]{1,9})@example[.]com$')::bigint), 0) as taken \
                from users) \
            insert into users (name, email) \
            select concat('User ', taken + i), concat('user', taken + i, '@example.com') \
            from start, generate_series(1, $1::bigint) as i order by i returning id";
        let seeded = run_outside_of_runtimes(|| {
            Client::connect(self.database_url(), NoTls)?.query(SEED_USERS, &[&i64::from(count)])
        });
        unwrap_or_panic("seed", seeded).iter().map(|row| row.get(0)).collect()
    }

    /// Creates a user without a password. Returns the user. Blocks for a few milliseconds.
    ///
    /// # Panics
    /// If the database refuses the user, as for an address that is taken.
    #[track_caller]
    pub fn user(&self, name: &str, email: &str) -> User {
        unwrap_or_panic("create the user", self.create_user(name, email, None))
    }

    /// Creates a user with a password. Returns the user. Blocks for a few milliseconds, or for some 20 ms more with
    /// [`PasswordHashing::Owasp`](crate::PasswordHashing).
    ///
    /// # Panics
    /// If the database refuses the user, as for an address that is taken.
    #[track_caller]
    pub fn user_with_password(&self, name: &str, email: &str, password: &str) -> User {
        unwrap_or_panic("create the user", self.create_user(name, email, Some(&Secret::from(password))))
    }

    /// Removes all users, idempotency keys, counts of wrong passwords, faults and requests, so that the server is as it
    /// was at its start. A request in flight is executed before or after the reset. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If the database refuses.
    #[track_caller]
    pub fn reset(&self) {
        unwrap_or_panic("reset", self.0.restore_state(None, db_change_deadline()));
    }

    /// Saves users, passwords, idempotency keys and the next id as a state. Replaces an older state of the same name.
    /// If a request is in flight, the state includes its change only if the change is committed before the tables are
    /// copied. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If `name` has not 1 to 40 characters of `a-z`, `0-9` and `_`, or if the database refuses.
    #[track_caller]
    pub fn save(&self, name: &str) {
        unwrap_or_panic("save the state", self.0.save_state(Some(name), db_change_deadline()));
    }

    /// Restores a saved state. A test may restore it several times. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If no state of this name was saved, or if the database refuses. The users are not changed then.
    #[track_caller]
    pub fn restore(&self, name: &str) {
        unwrap_or_panic("restore the state", self.0.restore_state(Some(name), db_change_deadline()));
    }

    /// Makes the next `times` requests with this method, and with this path or target, fail:
    /// `server.fail(Fault::AnswerLost, "POST", "/users", 1)`.
    ///
    /// # Panics
    /// If no such request can fail, because the service has no such route, or answers it without a worker.
    #[track_caller]
    pub fn fail(&self, fault: Fault, method: &str, target: &str, times: u32) {
        let added = self.0.interceptor.lock().add_fault(fault, method, target, times);
        unwrap_or_panic("have requests fail", added);
    }

    /// Removes all faults, so that no further request fails.
    pub fn fail_none(&self) {
        self.0.interceptor.lock().remove_faults();
    }

    /// Returns how many further requests are to fail. Dropping the server panics unless this number is 0.
    pub fn faults_left(&self) -> u32 {
        self.0.interceptor.lock().faults_left()
    }

    /// Returns the requests that the server has received since its start or the last reset, in their order. Old
    /// requests are dropped if the requests take more than 8 MiB together. Requests that the frontend answers by itself
    /// are left out.
    ///
    /// A request has `method`, `target`, `headers` by names in lower case, and `body`: the JSON object, or the number
    /// of bytes of a body that is no JSON object. Secrets are `***`.
    pub fn requests(&self) -> Vec<Value> {
        self.0.interceptor.lock().requests()
    }

    /// Makes idempotency keys and counts of wrong passwords older, as if this time had passed. Blocks for some
    /// milliseconds.
    ///
    /// # Panics
    /// If the database refuses, as for more time than a timestamp can have.
    #[track_caller]
    pub fn advance(&self, time: Duration) {
        unwrap_or_panic("let time pass", self.0.advance_time(time, db_change_deadline()));
    }

    /// Waits for `drain_delay`, and then stops the server and drops the database, as dropping this value does.
    pub fn stop(self) {
        self.0.server.announce_stop();
    }

    fn create_user(&self, name: &str, email: &str, password: Option<&Secret>) -> Result<User, error::Error> {
        run_outside_of_runtimes(|| {
            let operations = self.app().operations();
            let hash = operations.hash_password(password)?;
            let user = NewUser { name: name.to_owned(), email: email::to_nfc(email), password: None };
            let create = Create { user, key: None, hash, peer: None };
            let created = create.store(operations, operations.new_deadline()).map_err(Failure::into_error)?;
            Ok(created.user)
        })
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let left = self.faults_left();
        assert!(left == 0 || thread::panicking(), "{left} requests were to fail, and have not come");
        if thread::panicking() {
            eprintln!("the last 10 requests:\n{}", self.0.interceptor.lock().last_journal_lines());
        }
    }
}

/// Returns the deadline of a change of the database that begins now.
fn db_change_deadline() -> Instant {
    Instant::now() + MAX_DB_CHANGE_TIME
}

/// Returns the value of a result, or panics with its error and the line of the test.
#[track_caller]
fn unwrap_or_panic<T>(what: &str, result: Result<T, impl fmt::Debug>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("cannot {what}: {error:?}"),
    }
}
