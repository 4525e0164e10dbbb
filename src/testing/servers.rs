//! Servers in this process, each on a database of its own.

use super::Fault;
use super::databases::{ScratchDatabase, small};
use super::states::Running;
use crate::App;
use crate::config::{Config, PasswordHashing};
use crate::db::{Failure, blocking::outside_of_runtimes};
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

/// Time that a control may take.
const CONTROL_TIME: Duration = Duration::from_secs(10);

/// A running server on a free port of the loopback, with a database of its own. Both go with this value.
pub struct TestServer(Running);

impl TestServer {
    /// Starts a server with the default settings, but for `password_hashing`: the least cost, since an unoptimized
    /// build takes most of a second for a hash of the default cost. Blocks until it answers.
    ///
    /// # Panics
    /// If [`TestServer::try_with`] has an error: that is a failure of the test, in one clear line.
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
    /// As [`TestServer::start`].
    #[track_caller]
    pub fn with(change: impl FnOnce(&mut Config)) -> TestServer {
        expected("start a server", TestServer::try_with(change))
    }

    /// Starts a server, with errors as values. The database stays the server's own, whatever the change says. Blocks for
    /// less than 100 ms, about a second if this is the machine's first, and no longer than a minute.
    ///
    /// # Errors
    /// [`StartError::Cluster`] if there is no PostgreSQL on this machine, or it does not start; other errors come from the
    /// settings that were changed.
    pub fn try_with(change: impl FnOnce(&mut Config)) -> Result<TestServer, StartError> {
        let mut config = Config { password_hashing: PasswordHashing::LeastCostForTests, ..small() };
        change(&mut config);
        let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
        config.database = database.config().database;
        Running::start(database, BoundServer::bind(&config)?, &config, |_| None).map(TestServer)
    }

    /// Returns the address of the server, without a slash at its end: `http://127.0.0.1:41234`.
    pub fn base_url(&self) -> &str {
        self.0.server.base_url()
    }

    /// Returns the URL of a path: `server.url("/users?page=2")`.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base_url())
    }

    /// Returns the TCP address it listens on; `None` if the settings made it a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.0.server.addr()
    }

    /// Returns the service behind it, to be asked without a socket.
    pub fn app(&self) -> &App {
        self.0.server.app()
    }

    /// Returns the database behind it, as psql, libpq and the `postgres` crate take it.
    pub fn database_url(&self) -> &str {
        self.0.database.url()
    }

    /// Creates `n` users in one statement, `User 1` with `user1@example.com` and so on, counted on with each
    /// call. Returns their ids. Blocks for some 20 ms per thousand.
    ///
    /// # Panics
    /// If the database refuses, as for an address that is taken.
    #[track_caller]
    pub fn seed(&self, n: u32) -> Vec<i64> {
        const SEED: &str = "\
            with start as (select coalesce(max(substring(email, '^user([0-9]{1,9})@example[.]com$')::bigint), 0) as taken \
                from users) \
            insert into users (name, email) \
            select concat('User ', taken + i), concat('user', taken + i, '@example.com') \
            from start, generate_series(1, $1::bigint) as i order by i returning id";
        let seeded = outside_of_runtimes(|| {
            Client::connect(self.database_url(), NoTls)?.query(SEED, &[&i64::from(n)])
        });
        expected("seed", seeded).iter().map(|row| row.get(0)).collect()
    }

    /// Creates a user without a password and returns it. Blocks for a few milliseconds.
    ///
    /// # Panics
    /// If the address is taken, or the database refuses.
    #[track_caller]
    pub fn user(&self, name: &str, email: &str) -> User {
        expected("create the user", self.create(name, email, None))
    }

    /// Creates a user with a password and returns it. Blocks for one hash as well: less than a millisecond, or some
    /// 20 ms with [`PasswordHashing::Owasp`](crate::PasswordHashing).
    ///
    /// # Panics
    /// As [`TestServer::user`].
    #[track_caller]
    pub fn user_with_password(&self, name: &str, email: &str, password: &str) -> User {
        expected("create the user", self.create(name, email, Some(&Secret::from(password))))
    }

    /// Removes all users, idempotency keys, counts of wrong passwords, faults and requests: the server is as it began.
    /// Requests in flight are executed before or after that. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If the database refuses.
    #[track_caller]
    pub fn reset(&self) {
        expected("reset", self.0.restore(None, soon()));
    }

    /// Saves users, passwords, idempotency keys and the next id under a name of 1 to 40 characters of `a-z`, `0-9` and `_`;
    /// instead of an older state of this name. Of requests in flight, those belong to the state that have been committed.
    /// Blocks for some milliseconds.
    ///
    /// # Panics
    /// If it is no such name, or the database refuses.
    #[track_caller]
    pub fn save(&self, name: &str) {
        expected("save the state", self.0.save(Some(name), soon()));
    }

    /// Brings a saved state back, any number of times, as [`TestServer::reset`] brings back the state at the start.
    ///
    /// # Panics
    /// If no state of this name was saved, or the database refuses: nothing is changed then.
    #[track_caller]
    pub fn restore(&self, name: &str) {
        expected("restore the state", self.0.restore(Some(name), soon()));
    }

    /// Has so many of the next requests with this method, and with this path or target, fail:
    /// `server.fail(Fault::AnswerLost, "POST", "/users", 1)`.
    ///
    /// # Panics
    /// If no such request can fail: the service has no such route, or answers it without a worker.
    #[track_caller]
    pub fn fail(&self, fault: Fault, method: &str, target: &str, times: u32) {
        expected("have requests fail", self.0.watch.lock().fail(fault, method, target, times));
    }

    /// Forgets the faults that are left.
    pub fn fail_none(&self) {
        self.0.watch.lock().fail_none();
    }

    /// Returns how many requests are yet to fail. Dropping the server panics unless it is 0.
    pub fn faults_left(&self) -> u32 {
        self.0.watch.lock().faults_left()
    }

    /// Returns the requests that were received since the start or the last reset, in their order, as far as 8 MiB hold
    /// them: `method`, `target`, `headers` by names in lower case, and `body`, which is an object or the length of any other
    /// body. Secrets are `***`. Requests that the frontend answers by itself are not among them.
    pub fn requests(&self) -> Vec<Value> {
        self.0.watch.lock().requests()
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If the database refuses, as for more time than its timestamps have.
    #[track_caller]
    pub fn advance(&self, time: Duration) {
        expected("let time pass", self.0.advance(time, soon()));
    }

    /// Stops the server and drops the database, as dropping this value does, but waits for `drain_delay` before.
    pub fn stop(self) {
        self.0.server.announce_stop();
    }

    fn create(&self, name: &str, email: &str, password: Option<&Secret>) -> Result<User, error::Error> {
        outside_of_runtimes(|| {
            let operations = self.app().operations();
            let hash = operations.hash_password(password)?;
            let user = NewUser { name: name.to_owned(), email: email::normalized(email), password: None };
            let create = Create { user, key: None, hash, peer: None };
            let created = create.store(operations, operations.deadline()).map_err(Failure::into_error)?;
            Ok(created.user)
        })
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let left = self.faults_left();
        assert!(left == 0 || thread::panicking(), "{left} requests were to fail, and have not come");
        if thread::panicking() {
            eprintln!("the last 10 requests:\n{}", self.0.watch.lock().last_lines());
        }
    }
}

/// Returns the deadline of a control that begins now.
fn soon() -> Instant {
    Instant::now() + CONTROL_TIME
}

/// Panics with the place of the test that called.
#[track_caller]
fn expected<T>(what: &str, result: Result<T, impl fmt::Debug>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("cannot {what}: {error:?}"),
    }
}
