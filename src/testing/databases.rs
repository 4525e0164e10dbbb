//! Throw-away databases in a private cluster that all processes of a user share. Each database is a clone of a template
//! database, to which the migrations are applied once.

use crate::config::{Config, Database};
use crate::db::{blocking::run_outside_of_runtimes, connect::DbHosts, explain, migrate::Migrations};
use crate::error::StartError;
use crate::private_postgres::{SharedServer, connection_string};
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::{Client, Error, NoTls, error::SqlState};
use std::path::{Path, PathBuf};
use std::{env, thread};

/// This process's session in the shared cluster. It is static because it must last as long as the process: other
/// processes drop the databases of a session that has ended.
static CLUSTER_SESSION: Mutex<Option<ClusterSession>> = Mutex::new(None);

/// A migrated database, which is dropped when this value is dropped. The database is in a private cluster that all
/// processes of a user share, made by this machine's PostgreSQL (version 13 or newer).
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
    /// Blocks for some 20 ms, for about a second if the cluster has to be started first, or up to a minute on a slow
    /// machine. May be called within an async runtime, whose thread is blocked, too.
    ///
    /// # Errors
    /// [`StartError::Cluster`] if PostgreSQL is missing or does not start: one line that says what to do.
    pub fn create() -> Result<ScratchDatabase, StartError> {
        ScratchDatabase::with_migrations(None)
    }

    /// Creates a database with the migrations of a directory, or with the built-in ones if `dir` is `None`.
    pub fn with_migrations(dir: Option<&Path>) -> Result<ScratchDatabase, StartError> {
        run_outside_of_runtimes(|| {
            let migrations = Migrations::load(dir)?;
            let template = format!("userd_template_{:016x}", migrations.fingerprint());
            let mut session = CLUSTER_SESSION.lock();
            if session.as_ref().is_none_or(|session| session.cluster.session.is_closed()) {
                *session = Some(ClusterSession::open()?);
            }
            let session = session.as_mut().expect("the process has joined the cluster");
            let mut clone = session.clone_database(&template);
            if clone.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNDEFINED_DATABASE)) {
                let (name, url) = session.clone_database("template1").map_err(cluster_error)?;
                let config = Config { database: Database::Url(url.into()), ..test_config() };
                migrations.apply_missing(&*DbHosts::new(&config)?, true, false)?;
                // Ignores an error, because another process may have made the template meanwhile. A template gets its
                // name only when it is complete and refuses connections, so a template that has this name can be
                // cloned.
                let rename = format!(
                    "alter database {name} allow_connections false; alter database {name} rename to {template}"
                );
                let client = &mut session.cluster.session;
                let _ = end_sessions(client, &name).and_then(|()| client.batch_execute(&rename));
                clone = session.clone_database(&template);
            }
            clone.map(|(name, url)| ScratchDatabase { name, url }).map_err(cluster_error)
        })
    }

    /// Returns the connection string (`postgresql://…`) for psql, libpq and the `postgres` crate. The database needs no
    /// password and no TLS.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns settings for a [`Server`](crate::Server) or an [`App`](crate::App) on this database: the defaults, with
    /// two workers and two connections, because tests run many servers.
    pub fn config(&self) -> Config {
        Config { database: Database::Url(self.url.as_str().into()), ..test_config() }
    }
}

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        // Compares the stored counts of users with the users, at the end of every test of this crate that succeeds.
        #[cfg(test)]
        let compared = if thread::panicking() {
            Ok(String::new())
        } else {
            Client::connect(&self.url, NoTls)
                .map_or(Ok(String::new()), |mut db| crate::db::user_counts::compare_user_counts(&mut db))
        };
        run_outside_of_runtimes(|| {
            let mut session = CLUSTER_SESSION.lock();
            // Drops nothing if the session that created the database has ended: another process drops the database
            // then.
            let Some(session) = session.as_mut().filter(|own| self.name.contains(&own.id)) else { return };
            let client = &mut session.cluster.session;
            let drop = format!("drop database if exists {} with (force)", self.name);
            if let Err(error) = end_sessions(client, &self.name).and_then(|()| client.batch_execute(&drop)) {
                log::warn!("cannot drop {}: {}", self.name, explain(&error));
            }
        });
        #[cfg(test)]
        assert!(compared.is_ok(), "{compared:?}");
    }
}

/// Returns the settings of a service in a test: few workers and sessions, because tests run many services, and no
/// search for a pooler, because the private cluster has none.
pub fn test_config() -> Config {
    Config { db_pool_size: 2, workers: 2, find_pooler: false, ..Config::default() }
}

/// A process's session in the shared cluster, which owns the process's databases.
struct ClusterSession {
    /// The cluster's server, with the client of the session. Once the session ends, other processes drop its databases.
    cluster: SharedServer,
    /// The id of the session, which is a part of the names of its databases.
    id: String,
    /// The clause of `create database` by which PostgreSQL copies files, which takes half as long as its default. Empty
    /// for versions before 15, because they have no such clause and always copy files.
    copy_clause: String,
    /// How many databases the session has created, which is also the number in the name of the next one.
    created_databases: u32,
}

impl ClusterSession {
    fn open() -> Result<ClusterSession, StartError> {
        const READ_SESSION_ID_AND_VERSION: &str = "\
            select concat(pid, '_', (extract(epoch from backend_start) * 1000000)::bigint), \
                current_setting('server_version'), \
                case when current_setting('server_version_num')::int >= 150000 then 'strategy file_copy' else '' end \
            from pg_stat_activity where pid = pg_backend_pid()";
        let places =
            ["/dev/shm".into(), env::temp_dir(), "/tmp".into()].map(|dir: PathBuf| dir.join("userd-scratch"));
        // Allows 1000 sessions, because a test runner starts a process for each core, and each process may run many
        // servers with two sessions each.
        let mut cluster =
            SharedServer::join(&places, 1000).map_err(|error| StartError::Cluster(error.to_string()))?;
        let connection_string = connection_string(&cluster.socket_dir, "postgres");
        // Drops the databases of ended processes in a thread, so that this process need not wait for that. Ignores an
        // error, because the next process drops what is left.
        let _ = thread::Builder::new().spawn(move || drop_leftover_databases(&connection_string));
        let row = cluster.session.query_one(READ_SESSION_ID_AND_VERSION, &[]).map_err(cluster_error)?;
        log::info!("PostgreSQL {}, programs in {}", row.get::<_, &str>(1), cluster.programs_dir.display());
        Ok(ClusterSession { id: row.get(0), copy_clause: row.get(2), cluster, created_databases: 0 })
    }

    /// Creates a clone of a template database. Returns the name and the URL of the clone.
    fn clone_database(&mut self, template: &str) -> Result<(String, String), Error> {
        let name = format!("userd_scratch_{}_{}", self.id, self.created_databases);
        self.created_databases += 1;
        let sql = format!("create database {name} template {template} {}", self.copy_clause);
        self.cluster.session.batch_execute(&sql)?;
        // Percent-encodes the directory of the socket, which the URL has as its host.
        let socket_dir = self.cluster.socket_dir.to_string_lossy();
        let host = utf8_percent_encode(&socket_dir, NON_ALPHANUMERIC);
        let url = format!("postgresql://postgres@{host}:5432/{name}");
        Ok((name, url))
    }
}

fn cluster_error(error: Error) -> StartError {
    StartError::Cluster(explain(&error))
}

/// Ends the sessions of a database, and looks every millisecond until none is left, because `drop database` would look
/// only every 100 ms.
fn end_sessions(client: &mut Client, database: &str) -> Result<(), Error> {
    client.batch_execute(&format!(
        "do $$ begin
            for i in 1..100 loop
                perform pg_stat_clear_snapshot();
                perform pg_terminate_backend(pid) from pg_stat_activity where datname = '{database}';
                exit when not found;
                perform pg_sleep(0.001);
            end loop;
        end $$"
    ))
}

/// Drops the databases whose session has ended. Looks for one database at a time, because another process may drop some
/// meanwhile.
fn drop_leftover_databases(connection_string: &str) -> Result<(), Error> {
    const FIND_LEFTOVER_DATABASE: &str = "\
        select datname::text from pg_database where starts_with(datname::text, 'userd_scratch_') and not exists ( \
            select from pg_stat_activity where starts_with(pg_database.datname::text, concat('userd_scratch_', pid, '_', \
                (extract(epoch from backend_start) * 1000000)::bigint, '_'))) limit 1";
    let mut client = Client::connect(connection_string, NoTls)?;
    while let Some(row) = client.query(FIND_LEFTOVER_DATABASE, &[])?.first() {
        client.batch_execute(&format!("drop database if exists {} with (force)", row.get::<_, &str>(0)))?;
    }
    Ok(())
}
