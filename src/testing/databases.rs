//! Throw-away databases in a private cluster that all processes of a user share. Each database is a clone of a template
//! database, to which the migrations are applied once.

use crate::config::{Config, Database};
use crate::db::{blocking::outside_of_runtimes, connect::DbHosts, explain, migrate::Migrations};
use crate::error::StartError;
use crate::private_postgres::{SharedServer, connection_string};
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::{Client, Error, NoTls, error::SqlState};
use std::path::{Path, PathBuf};
use std::{env, thread};

/// This process's connection to the shared cluster. It is static because it must last as long as the process.
static CLUSTER_SHARE: Mutex<Option<ClusterShare>> = Mutex::new(None);

/// A migrated database, which is dropped with this value. It is in a private cluster that all processes of a user
/// share, made by this machine's PostgreSQL (version 13 or newer).
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
        outside_of_runtimes(|| {
            let migrations = Migrations::load(dir)?;
            let template = format!("userd_template_{:016x}", migrations.fingerprint());
            let mut share = CLUSTER_SHARE.lock();
            if share.as_ref().is_none_or(|share| share.cluster.session.is_closed()) {
                *share = Some(ClusterShare::join()?);
            }
            let share = share.as_mut().expect("the process has joined the cluster");
            let mut clone = share.clone_database(&template);
            if clone.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNDEFINED_DATABASE)) {
                let (name, url) = share.clone_database("template1").map_err(cluster_error)?;
                let config = Config { database: Database::Url(url.into()), ..small_config() };
                migrations.apply_missing(&*DbHosts::new(&config)?, true, false)?;
                // Ignores an error, because another process may have made the template meanwhile. The template gets its
                // name once it is complete and refuses connections, so that it can be cloned from then on.
                let rename = format!(
                    "alter database {name} allow_connections false; alter database {name} rename to {template}"
                );
                let client = &mut share.cluster.session;
                let _ = end_sessions(client, &name).and_then(|()| client.batch_execute(&rename));
                clone = share.clone_database(&template);
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
        Config { database: Database::Url(self.url.as_str().into()), ..small_config() }
    }
}

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        // Every test of this crate that succeeds ends with a comparison of `user_counts` with the users.
        #[cfg(test)]
        let compared = if thread::panicking() {
            Ok(String::new())
        } else {
            Client::connect(&self.url, NoTls)
                .map_or(Ok(String::new()), |mut client| crate::db::counts::compare_counts(&mut client))
        };
        outside_of_runtimes(|| {
            let mut share = CLUSTER_SHARE.lock();
            // If the session that created the database has ended, another process drops the database.
            let Some(share) = share.as_mut().filter(|share| self.name.contains(&share.id)) else { return };
            let client = &mut share.cluster.session;
            let drop = format!("drop database if exists {} with (force)", self.name);
            if let Err(error) = end_sessions(client, &self.name).and_then(|()| client.batch_execute(&drop)) {
                log::warn!("cannot drop {}: {}", self.name, explain(&error));
            }
        });
        #[cfg(test)]
        assert!(compared.is_ok(), "{compared:?}");
    }
}

/// Returns the settings of a service in a test: few workers and sessions, because tests run many services, and no look
/// for a pooler, because the private cluster has none.
pub fn small_config() -> Config {
    Config { db_pool_size: 2, workers: 2, find_pooler: false, ..Config::default() }
}

/// The connection of a process to the cluster, with the session that owns the process's databases.
struct ClusterShare {
    /// The cluster and the session. The end of the session tells other processes to drop its databases.
    cluster: SharedServer,
    /// The id of the session, which is in the names of its databases.
    id: String,
    /// The clause of `create database` that has files copied, which takes half as long as the default. Empty before
    /// PostgreSQL 15, which always copies files.
    strategy: String,
    /// The number of databases that the session has created.
    count: u32,
}

impl ClusterShare {
    fn join() -> Result<ClusterShare, StartError> {
        const DESCRIBE_SESSION: &str = "\
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
        // A thread drops the databases that ended processes have left, so that this process need not wait for that. An
        // error is ignored, because the next process drops what is left.
        let _ = thread::Builder::new().spawn(move || drop_leftovers(&connection_string));
        let row = cluster.session.query_one(DESCRIBE_SESSION, &[]).map_err(cluster_error)?;
        log::info!("PostgreSQL {}, programs in {}", row.get::<_, &str>(1), cluster.programs_dir.display());
        Ok(ClusterShare { id: row.get(0), strategy: row.get(2), cluster, count: 0 })
    }

    /// Creates a clone of a template database. Returns the name and the URL of the clone.
    fn clone_database(&mut self, template: &str) -> Result<(String, String), Error> {
        let name = format!("userd_scratch_{}_{}", self.id, self.count);
        self.count += 1;
        let sql = format!("create database {name} template {template} {}", self.strategy);
        self.cluster.session.batch_execute(&sql)?;
        // A URL has the directory of the socket percent-encoded, as its host.
        let socket_dir = self.cluster.socket_dir.to_string_lossy();
        let host = utf8_percent_encode(&socket_dir, NON_ALPHANUMERIC);
        let url = format!("postgresql://postgres@{host}:5432/{name}");
        Ok((name, url))
    }
}

fn cluster_error(error: Error) -> StartError {
    StartError::Cluster(explain(&error))
}

/// Ends the sessions of a database, and blocks until they have ended: `drop database` would look only every 100 ms.
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

/// Drops the databases whose owner, the session that created them, has ended. Looks for one database at a time, because
/// another process may drop some meanwhile.
fn drop_leftovers(connection_string: &str) -> Result<(), Error> {
    const FIND_LEFTOVER: &str = "\
        select datname::text from pg_database where starts_with(datname::text, 'userd_scratch_') and not exists ( \
            select from pg_stat_activity where starts_with(pg_database.datname::text, concat('userd_scratch_', pid, '_', \
                (extract(epoch from backend_start) * 1000000)::bigint, '_'))) limit 1";
    let mut client = Client::connect(connection_string, NoTls)?;
    while let Some(row) = client.query(FIND_LEFTOVER, &[])?.first() {
        client.batch_execute(&format!("drop database if exists {} with (force)", row.get::<_, &str>(0)))?;
    }
    Ok(())
}
