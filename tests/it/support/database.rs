//! One throwaway PostgreSQL for the whole test process, and a fresh database in it for each test.

use super::{LONG, Proxy, eventually};
use postgres::{Client, NoTls, config::Host, error::SqlState};
use std::{
    ops::Deref,
    path::PathBuf,
    sync::{
        LazyLock, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};
use userd::{
    Config, Database as Target, PasswordHashing, Server,
    internals::{SharedServer, connection_string as connection_string_at},
    testing::TestServer,
};

/// The value for `DATABASE_URL` on the server of this process, which is started when it is first asked for. It ends some
/// seconds after the process.
fn connection_string(database: &str) -> String {
    static CLUSTER: LazyLock<Mutex<SharedServer>> = LazyLock::new(|| {
        let prefix = std::env::temp_dir().join(format!("userd-it-cluster-{}", std::process::id()));
        // For as many tests at once as there are cores, each with a service or some.
        let cluster = SharedServer::join(&[prefix], 1000);
        Mutex::new(cluster.unwrap_or_else(|error| panic!("the tests need PostgreSQL of their own: {error}")))
    });
    connection_string_at(&CLUSTER.lock().expect("it is not poisoned").socket_dir, database)
}

/// A database, dropped with whatever is connected to it. Where the test has not failed, the counts are compared with the
/// table first: a test that breaks them mends them, too.
pub struct Database {
    name: String,
}

impl Database {
    /// With the tables of a service that has started once, and no rows.
    pub fn create() -> Database {
        static TEMPLATE: OnceLock<Database> = OnceLock::new();
        let template = TEMPLATE.get_or_init(|| {
            let template = Database::empty();
            // In sessions that nothing is set in, so that the functions have their safe `search_path` of the migrations.
            let server = Server::start(Config { db_prepared: false, ..template.config() });
            server.expect("a server migrates an empty database").stop();
            template
        });
        Database::copy(&template.name, "")
    }

    /// Without any tables.
    pub fn empty() -> Database {
        Database::with("")
    }

    /// Without any tables, and with these options of CREATE DATABASE.
    pub fn with(options: &str) -> Database {
        let database = Database::unmade();
        admin(&format!("create database {} {options}", database.name)).expect("a database can be created");
        // PostgreSQL 15 and later do not grant this to public.
        database.run("revoke create on schema public from public");
        database
    }

    /// A copy of a database, with these options of CREATE DATABASE.
    pub fn copy(template: &str, options: &str) -> Database {
        let database = Database::unmade();
        let sql = format!("create database {} template {template} {options}", database.name);
        // The sessions of the template may take a moment to end.
        eventually(LONG, "the template is free", || match admin(&sql) {
            Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => false,
            created => created.map(|()| true).expect("a template can be cloned"),
        });
        database
    }

    /// A name only: there is no such database.
    pub fn unmade() -> Database {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("it_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Database { name }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the value for `DATABASE_URL`.
    pub fn url(&self) -> String {
        connection_string(&self.name)
    }

    /// Returns the value for `DATABASE_URL` that connects through a proxy on this port.
    pub fn url_at(&self, port: u16) -> String {
        let config: postgres::Config = self.url().parse().expect("our own connection string");
        let user = config.get_user().expect("it names one");
        format!("postgres://{user}@127.0.0.1:{port}/{}?sslmode=disable", self.name)
    }

    /// The cluster's socket.
    pub fn socket(&self) -> PathBuf {
        socket_dir(&self.url()).join(".s.PGSQL.5432")
    }

    /// The directory of the cluster's socket, which `DB_HOST` takes.
    pub fn socket_dir(&self) -> String {
        socket_dir(&self.url()).to_str().expect("a path of ours").to_owned()
    }

    /// A proxy before the cluster, and the settings of a server whose sessions pass it.
    pub fn proxied(&self) -> (Proxy, Config) {
        let proxy = Proxy::start(&self.socket());
        let database = Target::Url(self.url_at(proxy.port()).into());
        (proxy, Config { database, ..self.config() })
    }

    /// The settings of a server on it.
    pub fn config(&self) -> Config {
        Config {
            database: Target::Url(self.url().into()),
            // Enough for every test, and quicker to open than the default.
            db_pool_size: 4,
            ..Config::default()
        }
    }

    /// Starts servers on it that hash passwords quickly and let them be guessed.
    pub fn replicas<const N: usize>(&self) -> [Server; N] {
        [(); N].map(|()| {
            let password_hashing = PasswordHashing::LeastCostForTests;
            let config = Config { password_hashing, auth_attempts: 0, ..self.config() };
            Server::start(config).expect("a server starts")
        })
    }

    /// Makes each change of a row take so many seconds, so that other requests meet its locks.
    pub fn linger(&self, seconds: &str) {
        self.run(&format!(
            "create function linger() returns trigger language plpgsql as
                 $$ begin perform pg_sleep({seconds}); return null; end $$;
             create trigger linger after insert or update or delete on users
                 for each row execute function linger()"
        ));
    }

    /// Returns when a session of the service waits for a lock.
    pub fn waits_for_a_lock(&self) {
        self.sessions("Lock", "a session waits for a lock", |waiting| waiting > 0);
    }

    /// Returns when no session of the service waits for a lock.
    pub fn waits_for_no_lock(&self) {
        self.sessions("Lock", "no session waits for a lock", |waiting| waiting == 0);
    }

    /// Returns when the service has so many sessions: its pool is full, and uses these from now on.
    pub fn has_sessions(&self, count: i64) {
        self.sessions("%", "the pool has its sessions", |found| found == count);
    }

    /// Returns when the number of the service's sessions of a kind is as it should be.
    fn sessions(&self, kind: &str, what: &str, is: impl Fn(i64) -> bool) {
        let sql = "select count(*) from pg_stat_activity where datname = current_database() \
            and application_name = 'userd' and coalesce(wait_event_type, '') like $1";
        // A statement waits for 100 ms only: a session for each look would take as long on a busy machine.
        let mut client = self.client();
        eventually(LONG, what, || client.query_one(sql, &[&kind]).is_ok_and(|row| is(row.get(0))));
    }

    /// A session, to look behind the service's back.
    pub fn client(&self) -> Client {
        Client::connect(&self.url(), NoTls).expect("the cluster takes connections")
    }

    /// Ends the sessions of the service.
    pub fn end_sessions(&self) {
        self.run(
            "select pg_terminate_backend(pid) from pg_stat_activity \
             where datname = current_database() and application_name = 'userd'",
        );
    }

    /// A session in a transaction that has executed this, whose locks it holds until it ends.
    pub fn transaction(&self, sql: &str) -> Client {
        let mut client = self.client();
        client.batch_execute(&format!("begin; {sql}")).unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        client
    }

    /// One value of the one row that the query answers, as text.
    pub fn value(&self, sql: &str) -> String {
        let mut client = self.client();
        let row = client.query_one(&format!("select ({sql})::text"), &[]);
        let value: Option<String> = row.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0);
        value.unwrap_or_else(|| "null".to_owned())
    }

    /// Runs statements.
    pub fn run(&self, sql: &str) {
        run(&self.url(), sql);
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let client = if thread::panicking() { None } else { Client::connect(&self.url(), NoTls).ok() };
        let compared = client.map(compare_user_counts);
        // Whatever is left goes with the cluster.
        let _ = admin(&format!("drop database if exists {} with (force)", self.name));
        assert!(!matches!(compared, Some(Err(_))), "{compared:?}");
    }
}

/// The directory of the only socket that a cluster listens on.
pub fn socket_dir(url: &str) -> PathBuf {
    let config: postgres::Config = url.parse().expect("our own connection string");
    match config.get_hosts() {
        [Host::Unix(dir)] => dir.clone(),
        hosts => panic!("the cluster listens on one socket only, not {hosts:?}"),
    }
}

/// Runs statements in a session of their own.
pub fn run(url: &str, sql: &str) {
    let done = Client::connect(url, NoTls).and_then(|mut client| client.batch_execute(sql));
    done.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
}

/// A server of the library's own for tests. Where the test has not failed, its counts are compared with the table first.
pub struct Compared(pub TestServer);

impl Deref for Compared {
    type Target = TestServer;

    fn deref(&self) -> &TestServer {
        &self.0
    }
}

impl Drop for Compared {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        // Not on this thread: it may be a runtime's, and the client of the database runs one of its own.
        let compare = || Client::connect(self.0.database_url(), NoTls).map(compare_user_counts);
        let compared = thread::scope(|scope| scope.spawn(compare).join().expect("it does not panic"));
        assert!(matches!(compared, Ok(Ok(()))), "{compared:?}");
    }
}

/// Compares `user_counts` with the table of users, if the database has both.
pub fn compare_user_counts(mut client: Client) -> Result<(), String> {
    let tables = "select to_regclass('users') is not null and to_regclass('user_counts') is not null \
        and set_config('statement_timeout', '0', false) || set_config('lock_timeout', '20s', false) <> ''";
    let has_both = client.query_one(tables, &[]).is_ok_and(|row| row.get(0));
    if has_both { userd::internals::compare_user_counts(&mut client).map(drop) } else { Ok(()) }
}

fn admin(sql: &str) -> Result<(), postgres::Error> {
    let url = connection_string("postgres");
    Client::connect(&url, NoTls)?.batch_execute(sql)
}
