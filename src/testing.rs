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
//! The first server starts a private cluster, in memory (`/dev/shm`) if 2 GiB are free there, else in the
//! temporary directory: about a second. All processes of a user share it, so a process a test (`cargo nextest`) is as
//! good as a thread a test; every server after the first takes some hundredths of a second, for its database is a clone
//! of one that has been migrated already. The cluster is gone ten seconds after the last process that used it.

pub use crate::server::Fault;

use crate::App;
use crate::config::{Config, Database, PasswordHashing, Secret};
use crate::db::{New, Once, blocking::outside_of_runtimes, explain, migrate::Migrations};
use crate::error::{self, StartError};
use crate::http::{Method, Request};
use crate::private_postgres::{Shared, connection_string};
use crate::server::{BoundServer, Server};
use crate::users::user::User;
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::{Client, Error, NoTls, error::SqlState, types::ToSql};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt, io, thread};

/// Share of this process in the cluster. Static, since it is to last as long as the process, and no longer.
static OWNER: Mutex<Option<Owner>> = Mutex::new(None);

/// A migrated database of its own, dropped with this value. In a private cluster, made from PostgreSQL's server
/// programs (version 13 or newer) on this machine, that all of a user's processes share while they want one.
///
/// ```
/// use userd::{App, Request, ScratchDatabase};
///
/// let database = ScratchDatabase::create()?;
/// let app = App::open(&database.config())?;
/// assert_eq!(app.handle(&Request::get("/users")).status, 200);
/// # Ok::<(), userd::StartError>(())
/// ```
#[derive(Debug)]
pub struct ScratchDatabase {
    name: String,
    url: String,
}

impl ScratchDatabase {
    /// Creates a database with the built-in migrations applied.
    ///
    /// Blocks: some 20 ms, about a second if the cluster has to be started first, and up to a minute when
    /// the machine is that slow. May be called from within an async runtime, whose thread it blocks as well.
    ///
    /// # Errors
    /// [`StartError::Cluster`]: one line that says what to do if PostgreSQL is missing or does not start.
    pub fn create() -> Result<ScratchDatabase, StartError> {
        ScratchDatabase::with_migrations(None)
    }

    /// Creates a database with the migrations of a directory, as `migrations_dir` has it in [`Config`].
    pub fn with_migrations(dir: Option<&Path>) -> Result<ScratchDatabase, StartError> {
        outside_of_runtimes(|| ScratchDatabase::filled(dir, None, |_| Ok(())))
    }

    /// Creates a database with the users that `fill` puts into the one whose URL it gets. They are kept in a template for
    /// `seed`, a number that changes with the users: the next database with this number is a clone.
    #[doc(hidden)]
    pub fn filled<E: From<StartError>>(
        dir: Option<&Path>,
        seed: Option<u64>,
        fill: impl FnOnce(&str) -> Result<(), E>,
    ) -> Result<ScratchDatabase, E> {
        let migrations = Migrations::load(dir).map_err(StartError::from)?;
        let template = format!("userd_template_{:016x}", migrations.fingerprint() ^ seed.unwrap_or_default());
        let mut owner = OWNER.lock();
        if owner.as_ref().is_none_or(|owner| owner.shared.client.is_closed()) {
            *owner = Some(Owner::join()?);
        }
        let owner = owner.as_mut().expect("it has joined");
        let mut created = owner.create(&template);
        if has_code(&created, &SqlState::UNDEFINED_DATABASE) {
            // The end of this session releases the lock. Another process may have made the template meanwhile.
            let mut session =
                Client::connect(&connection_string(&owner.shared.dir, "postgres"), NoTls).map_err(failed)?;
            session.batch_execute("select pg_advisory_lock(3)").map_err(failed)?;
            created = owner.create(&template);
            if has_code(&created, &SqlState::UNDEFINED_DATABASE) {
                let (name, url) = owner.create("template1").map_err(failed)?;
                let connect = || Client::connect(&url, NoTls).map_err(failed);
                migrations.apply(&mut connect()?, &mut connect()?).map_err(StartError::Cluster)?;
                fill(&url)?;
                keep_as_template(&mut session, &name, &template).map_err(failed)?;
                created = owner.create(&template);
            }
        }
        Ok(created.map(|(name, url)| ScratchDatabase { name, url }).map_err(failed)?)
    }

    /// Returns `postgresql://…`, as psql, libpq and the `postgres` crate take it. No password, no TLS.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns settings for a [`Server`] or an [`App`] on it: the defaults, with two workers
    /// and two connections, since tests run many servers and ask each of them little.
    pub fn config(&self) -> Config {
        Config { database: Database::Url(self.url.as_str().into()), ..small() }
    }

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

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        // Compares `user_counts` with the table after every test of this crate that has not failed.
        #[cfg(test)]
        let compared = match thread::panicking() {
            true => Ok(String::new()),
            false => Client::connect(&self.url, NoTls)
                .map_or(Ok(String::new()), |mut client| crate::db::counts::compare(&mut client)),
        };
        outside_of_runtimes(|| {
            let mut owner = OWNER.lock();
            // The databases of an owner that is gone are gone, too.
            let Some(owner) = owner.as_mut().filter(|owner| self.name.contains(&owner.id)) else { return };
            let client = &mut owner.shared.client;
            let drop = format!("drop database if exists {} with (force)", self.name);
            if let Err(error) = end_sessions(client, &self.name).and_then(|()| client.batch_execute(&drop)) {
                log::warn!("cannot drop {}: {}", self.name, explain(&error));
            }
        });
        #[cfg(test)]
        assert!(compared.is_ok(), "{compared:?}");
    }
}

/// Returns the settings of a service in a test: tests run many services and ask each of them little.
fn small() -> Config {
    Config { db_pool_size: 2, workers: 2, ..Config::default() }
}

/// Executes statements in one transaction, in a session of their own.
fn run(url: &str, sql: &str) -> Result<(), Error> {
    outside_of_runtimes(|| Client::connect(url, NoTls)?.batch_execute(sql))
}

/// Requests that are to fail.
struct Rule {
    fault: Fault,
    method: Method,
    path: String,
    left: u32,
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

/// Requests that are chosen to fail. [`Failing::times`] has them do so.
#[must_use = "`times` has requests fail"]
pub struct Failing<'a> {
    control: &'a Control,
    fault: Fault,
    method: String,
    path: String,
}

impl Failing<'_> {
    /// Chooses requests with this method and path, without a query; without this, `POST /users`.
    pub fn on(self, method: &str, path: &str) -> Self {
        Failing { method: method.to_owned(), path: path.to_owned(), ..self }
    }

    /// Has the next of them fail, so many times.
    ///
    /// # Panics
    /// If no such request can fail: its method has no meaning for users, or its path is not `/users` or below.
    #[track_caller]
    pub fn times(self, times: u32) {
        expected("have requests fail", self.control.fail(self.fault, &self.method, &self.path, times));
    }
}

/// Owner of the databases of this process.
struct Owner {
    /// The end of its session says that our databases have no owner any more.
    shared: Shared,
    /// Tells the session from all others, in the names of its databases.
    id: String,
    /// Copies a template's files, which takes half as long as the default; empty before PostgreSQL 15, which does so.
    strategy: String,
    count: u32,
}

impl Owner {
    fn join() -> Result<Owner, StartError> {
        const ASK: &str = "\
            select concat(pid, '_', (extract(epoch from backend_start) * 1000000)::bigint), \
                current_setting('server_version'), \
                case when current_setting('server_version_num')::int >= 150000 then 'strategy file_copy' else '' end \
            from pg_stat_activity where pid = pg_backend_pid()";
        let places =
            ["/dev/shm".into(), env::temp_dir(), "/tmp".into()].map(|dir: PathBuf| dir.join("userd-scratch"));
        // Test runners start as many processes as there are cores, each with some servers and their pools.
        let mut shared =
            Shared::join(&places, 1000).map_err(|error| StartError::Cluster(error.to_string()))?;
        let connection_string = connection_string(&shared.dir, "postgres");
        // A thread drops them, so that the start is quick. The next process drops those that the thread has left.
        let _ = thread::Builder::new().spawn(move || drop_leftovers(&connection_string));
        let row = shared.client.query_one(ASK, &[]).map_err(failed)?;
        log::info!("PostgreSQL {}, programs in {}", row.get::<_, &str>(1), shared.programs.display());
        Ok(Owner { id: row.get(0), strategy: row.get(2), shared, count: 0 })
    }

    /// Creates a clone of a template. Returns its name and URL.
    fn create(&mut self, template: &str) -> Result<(String, String), Error> {
        let name = format!("userd_scratch_{}_{}", self.id, self.count);
        self.count += 1;
        let sql = format!("create database {name} template {template} {}", self.strategy);
        self.shared.client.batch_execute(&sql)?;
        // The socket's directory is percent-encoded.
        let socket_dir = self.shared.dir.to_string_lossy();
        let host = utf8_percent_encode(&socket_dir, NON_ALPHANUMERIC);
        let url = format!("postgresql://postgres@{host}:5432/{name}");
        Ok((name, url))
    }
}

fn failed(error: Error) -> StartError {
    StartError::Cluster(explain(&error))
}

fn has_code<T>(done: &Result<T, Error>, code: &SqlState) -> bool {
    matches!(done, Err(error) if error.code() == Some(code))
}

/// Makes a database a template, and keeps the last four beside it. A template gets its name once it is complete, and accepts
/// no connection then: so it can be cloned at any time.
fn keep_as_template(client: &mut Client, name: &str, template: &str) -> Result<(), Error> {
    const OLD: &str = "\
        select datname::text from pg_database where starts_with(datname::text, 'userd_template_') \
        order by oid desc offset 4";
    for row in client.query(OLD, &[])? {
        client.batch_execute(&format!("drop database {}", row.get::<_, &str>(0)))?;
    }
    end_sessions(client, name)?;
    client.batch_execute(&format!(
        "alter database {name} allow_connections false; alter database {name} rename to {template}"
    ))
}

/// Ends the sessions of a database and waits until they have ended: `drop database` looks every 100 ms only.
fn end_sessions(client: &mut Client, name: &str) -> Result<(), Error> {
    client.batch_execute(&format!(
        "do $$ begin
            for i in 1..100 loop
                perform pg_stat_clear_snapshot();
                perform pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}';
                exit when not found;
                perform pg_sleep(0.001);
            end loop;
        end $$"
    ))
}

/// Drops the databases whose owner, the session that created them, has ended. Each is looked at right before.
fn drop_leftovers(connection_string: &str) -> Result<(), Error> {
    const LEFTOVER: &str = "\
        select datname::text from pg_database where starts_with(datname::text, 'userd_scratch_') and not exists ( \
            select from pg_stat_activity where starts_with(pg_database.datname::text, concat('userd_scratch_', pid, '_', \
                (extract(epoch from backend_start) * 1000000)::bigint, '_'))) limit 1";
    let mut client = Client::connect(connection_string, NoTls)?;
    while let Some(row) = client.query(LEFTOVER, &[])?.first() {
        client.batch_execute(&format!("drop database if exists {} with (force)", row.get::<_, &str>(0)))?;
    }
    Ok(())
}

/// A running server on a free port of the loopback, with a database of its own. Both go with this value.
pub struct TestServer {
    // In this order: the database is dropped after the server has stopped.
    server: Server,
    control: Control,
    database: ScratchDatabase,
}

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

    /// Starts a server with the default settings that begins with these users: id, name and address of each. The next
    /// user that is created has an id above theirs.
    ///
    /// ```
    /// use userd::testing::TestServer;
    ///
    /// let server = TestServer::with_users([(7, "Ada Lovelace", "ada@example.com")]);
    /// assert_eq!(server.user("Grace Hopper", "grace@example.com").id, 8);
    /// ```
    ///
    /// # Panics
    /// As [`TestServer::start`]; if two users have the same id or address, or the database refuses one.
    #[track_caller]
    pub fn with_users<'a>(users: impl IntoIterator<Item = (i64, &'a str, &'a str)>) -> TestServer {
        const STORE: &str = "\
            with stored as (insert into users (id, name, email) overriding system value \
                select unnest($1::bigint[]), unnest($2::text[]), unnest($3::text[]) returning id) \
            select coalesce(setval(pg_get_serial_sequence('users', 'id')::regclass, max(id)), 0) from stored";
        let server = TestServer::start();
        let (ids, names, emails): (Vec<i64>, Vec<&str>, Vec<&str>) = users.into_iter().collect();
        expected("store the users", server.query(STORE, &[&ids, &names, &emails]));
        expected("keep the users", server.database.keep_seed());
        server
    }

    /// Starts a server, with errors as values. The database stays the server's own, whatever the change says. Blocks for
    /// less than 100 ms, about a second if this is the machine's first, and no longer than a minute.
    ///
    /// # Errors
    /// [`StartError::Cluster`] if there is no PostgreSQL on this machine, or it does not start; others
    /// come from the settings that were changed.
    pub fn try_with(change: impl FnOnce(&mut Config)) -> Result<TestServer, StartError> {
        let mut config = Config { password_hashing: PasswordHashing::LeastCostForTests, ..small() };
        change(&mut config);
        let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
        config.database = database.config().database;
        let (server, control) = database.serve(BoundServer::bind(&config)?, config, || Ok(()), || {})?;
        Ok(TestServer { server, control, database })
    }

    /// Returns the address of the server, without a slash at its end: `http://127.0.0.1:41234`.
    pub fn base_url(&self) -> &str {
        self.server.base_url()
    }

    /// Returns the URL of a path: `server.url("/users?page=2")`.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base_url())
    }

    /// Returns the TCP address it listens on; `None` if the settings made it a Unix socket.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.addr()
    }

    /// Returns the service behind it, to be asked without a socket.
    pub fn app(&self) -> &App {
        self.server.app()
    }

    /// Returns the database behind it, as psql, libpq and the `postgres` crate take it.
    pub fn database_url(&self) -> &str {
        self.database.url()
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
        expected("seed", self.query(SEED, &[&i64::from(n)]))
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

    /// Removes all users, idempotency keys, counts of wrong passwords and faults: the server is as it began, with the
    /// users of [`TestServer::with_users`]. Requests in flight are executed before or after that. Blocks for some
    /// milliseconds.
    ///
    /// # Panics
    /// If the database refuses.
    #[track_caller]
    pub fn reset(&self) {
        expected("reset", self.control.reset());
    }

    /// Has requests fail: `server.fail(Fault::AnswerLost).on("POST", "/users").times(1)`.
    pub fn fail(&self, fault: Fault) -> Failing<'_> {
        Failing { control: &self.control, fault, method: "POST".to_owned(), path: "/users".to_owned() }
    }

    /// Returns how many requests are yet to fail. Dropping the server panics unless it is 0.
    pub fn faults_left(&self) -> u32 {
        self.control.faults_left()
    }

    /// Lets time pass for idempotency keys and for counts of wrong passwords. Blocks for some milliseconds.
    ///
    /// # Panics
    /// If the database refuses, as for more time than its timestamps have.
    #[track_caller]
    pub fn advance(&self, time: Duration) {
        expected("let time pass", self.control.advance(time));
    }

    /// Stops the server and drops the database, as dropping this value does.
    pub fn stop(self) {}

    fn create(&self, name: &str, email: &str, password: Option<&Secret>) -> Result<User, error::Error> {
        outside_of_runtimes(|| {
            let hash = self.app().hash(password)?;
            let (password, deadline) = (hash.as_ref(), self.app().deadline());
            let new = New { name, email, password, key: None, deadline };
            self.app().users().create_many(&[new]).remove(0).map(Once::into_user)
        })
    }

    /// Returns the ids that a statement returns.
    fn query(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<i64>, StartError> {
        let rows = outside_of_runtimes(|| Client::connect(self.database_url(), NoTls)?.query(sql, params))
            .map_err(failed)?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        let left = self.faults_left();
        assert!(left == 0 || thread::panicking(), "{left} requests were to fail, and have not come");
    }
}

/// Panics with the place of the test that called.
#[track_caller]
fn expected<T>(what: &str, result: Result<T, impl fmt::Debug>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("cannot {what}: {error:?}"),
    }
}
