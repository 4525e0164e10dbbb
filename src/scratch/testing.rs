//! Servers for tests: from nothing, each with a port and a database of its own, gone when dropped.
//!
//! ```
//! use userd::testing::TestServer;
//!
//! let server = TestServer::start();
//! let ada = server.user("Ada Lovelace", "ada@example.com");
//! assert_eq!(ureq::get(server.url(&format!("/users/{}", ada.id))).call()?.status(), 200);
//! # Ok::<(), ureq::Error>(())
//! ```
//!
//! The machine needs PostgreSQL's server programs, version 13 or newer (on Debian: `apt-get install
//! postgresql`), and nothing has to run or be set up. As root, PostgreSQL runs as the user `postgres`.
//!
//! The first server starts a private cluster, in memory (`/dev/shm`) where 2 GiB are free there, else in the
//! temporary directory: about a second. All processes of the
//! same user share it, so a process a test (`cargo nextest`) is as good as a thread a test; every server
//! after the first takes some hundredths of a second, for its database is a clone of one that has been
//! migrated already. The cluster is gone ten seconds after the last process that used it.

use crate::{
    App, ScratchDatabase,
    config::{Config, PasswordHashing, Secret},
    db::{New, scratch},
    error::StartError,
    server::Server,
    users::{
        password::Hasher,
        user::{User, Values},
    },
};
use std::net::SocketAddr;

/// A running server on a free port of the loopback, with a database of its own. Both go with this value.
pub struct TestServer {
    // In this order: the database is dropped after the server has stopped.
    server: Server,
    database: ScratchDatabase,
    hasher: Hasher,
}

impl TestServer {
    /// A server with the default settings, but for `password_hashing`: the least cost, since an unoptimized
    /// build takes most of a second for a hash of the default cost. Blocks until it answers.
    ///
    /// # Panics
    /// Where [`TestServer::try_with`] has an error: that is a failure of the test, in one clear line.
    #[track_caller]
    pub fn start() -> TestServer {
        TestServer::with(|_| ())
    }

    /// The same, with some settings changed:
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
        match TestServer::try_with(change) {
            Ok(server) => server,
            Err(error) => panic!("no test server: {error}"),
        }
    }

    /// A server with the default settings that begins with these users: id, name and address of each. The next user
    /// that is created has an id above theirs.
    ///
    /// ```
    /// use userd::testing::TestServer;
    ///
    /// let server = TestServer::with_users([(7, "Ada Lovelace", "ada@example.com")]);
    /// assert_eq!(server.user("Grace Hopper", "grace@example.com").id, 8);
    /// ```
    ///
    /// # Panics
    /// As [`TestServer::start`]; where two users have the same id or address, or the database refuses one.
    #[track_caller]
    pub fn with_users<'a>(users: impl IntoIterator<Item = (i64, &'a str, &'a str)>) -> TestServer {
        let server = TestServer::start();
        let (ids, names, emails): (Vec<_>, Vec<_>, Vec<_>) = users.into_iter().collect();
        let store = || scratch::store(server.database_url(), &ids, &names, &emails);
        let stored = crate::db::blocking::outside_of_runtimes(store);
        stored.unwrap_or_else(|error| panic!("cannot store the users: {}", crate::db::explain(&error)));
        server
    }

    /// The same, with errors as values. The database stays the server's own, whatever the change says. Blocks for less
    /// than 100 ms, about a second where this is the machine's first, and no longer than a minute.
    ///
    /// # Errors
    /// [`StartError::Cluster`] where there is no PostgreSQL on this machine, or it does not start; others
    /// come from the settings that were changed.
    pub fn try_with(change: impl FnOnce(&mut Config)) -> Result<TestServer, StartError> {
        let mut database = ScratchDatabase::create()?;
        let mut config = database.config();
        config.password_hashing = PasswordHashing::LeastCostForTests;
        change(&mut config);
        if config.migrations_dir.is_some() {
            database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
        }
        config.database = database.config().database;
        let hasher = Hasher::new(config.password_hashing);
        let server = Server::start(config)?;
        Ok(TestServer { server, database, hasher })
    }

    /// Where it listens, without a slash at its end: `http://127.0.0.1:41234`.
    pub fn base_url(&self) -> &str {
        self.server.base_url()
    }

    /// The URL of a path: `server.url("/users?page=2")`.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base_url())
    }

    /// The TCP address it listens on; `None` if the settings made it a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.addr()
    }

    /// The service behind it, to be asked without a socket.
    pub fn app(&self) -> &App {
        self.server.app()
    }

    /// The database behind it, as psql, libpq and the `postgres` crate take it.
    pub fn database_url(&self) -> &str {
        self.database.url()
    }

    /// Creates `n` users in one statement, `User 1` with `user1@example.com` and so on, counted on with each
    /// call. Returns their ids. Blocks for some 20 ms per thousand.
    ///
    /// # Panics
    /// When the database refuses, as for an address that is taken.
    #[track_caller]
    pub fn seed(&self, n: u32) -> Vec<i64> {
        let seed = || scratch::seed(self.database_url(), n);
        let ids = crate::db::blocking::outside_of_runtimes(seed);
        ids.unwrap_or_else(|error| panic!("cannot seed: {}", crate::db::explain(&error)))
    }

    /// Creates a user without a password and returns it. Blocks for a few milliseconds.
    ///
    /// # Panics
    /// When the address is taken, or the database refuses.
    #[track_caller]
    pub fn user(&self, name: &str, email: &str) -> User {
        self.create(name, email, None)
    }

    /// Creates a user with a password and returns it. Blocks for one hash as well: less than a millisecond, or some
    /// 20 ms with [`PasswordHashing::Owasp`](crate::PasswordHashing).
    ///
    /// # Panics
    /// As [`TestServer::user`].
    #[track_caller]
    pub fn user_with_password(&self, name: &str, email: &str, password: &str) -> User {
        self.create(name, email, Some(Secret::from(password)))
    }

    /// Stops the server and drops the database, as dropping this value does.
    pub fn stop(self) {}

    #[track_caller]
    fn create(&self, name: &str, email: &str, password: Option<Secret>) -> User {
        let create = || {
            let hash = password.as_ref().map(|clear| self.hasher.hash(clear)).transpose()?;
            let new = New { values: Values::new(name, email), deadline: self.app().deadline() };
            self.app().users().create(&new, hash.as_ref())
        };
        crate::db::blocking::outside_of_runtimes(create)
            .unwrap_or_else(|error| panic!("cannot create the user {email}: {error:?}"))
    }
}
