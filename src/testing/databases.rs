//! Databases that are thrown away, in a private cluster that all processes of a user share. A database is a clone of a
//! template, which is migrated once.

use crate::config::{Config, Database};
use crate::db::{blocking::outside_of_runtimes, connect::Servers, explain, migrate::Migrations};
use crate::error::StartError;
use crate::private_postgres::{Shared, connection_string};
use parking_lot::Mutex;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use postgres::{Client, Error, NoTls, error::SqlState};
use std::path::{Path, PathBuf};
use std::{env, thread};

/// The share of this process in the cluster. Static, since it is to last as long as the process, and no longer.
static SHARE: Mutex<Option<Share>> = Mutex::new(None);

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
        outside_of_runtimes(|| {
            let migrations = Migrations::load(dir)?;
            let template = format!("userd_template_{:016x}", migrations.fingerprint());
            let mut share = SHARE.lock();
            if share.as_ref().is_none_or(|share| share.cluster.client.is_closed()) {
                *share = Some(Share::join()?);
            }
            let share = share.as_mut().expect("it has joined");
            let mut created = share.create(&template);
            if created.as_ref().is_err_and(|error| error.code() == Some(&SqlState::UNDEFINED_DATABASE)) {
                let made = share.create("template1").map_err(failed)?;
                let config = Config { database: Database::Url(made.1.into()), ..small() };
                migrations.apply_missing(&*Servers::new(&config)?, true, false)?;
                // Fails if another process has made the template meanwhile. A template gets its name once it is complete, and
                // accepts no connection then: so it can be cloned at any time.
                let name = format!(
                    "alter database {0} allow_connections false; alter database {0} rename to {template}",
                    made.0
                );
                let client = &mut share.cluster.client;
                let _ = end_sessions(client, &made.0).and_then(|()| client.batch_execute(&name));
                created = share.create(&template);
            }
            created.map(|(name, url)| ScratchDatabase { name, url }).map_err(failed)
        })
    }

    /// Returns `postgresql://…`, as psql, libpq and the `postgres` crate take it. No password, no TLS.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns settings for a [`Server`](crate::Server) or an [`App`](crate::App) on it: the defaults, with two workers
    /// and two connections, since tests run many servers and ask each of them little.
    pub fn config(&self) -> Config {
        Config { database: Database::Url(self.url.as_str().into()), ..small() }
    }
}

impl Drop for ScratchDatabase {
    fn drop(&mut self) {
        // Compares `user_counts` with the table after every test of this crate that has not failed.
        #[cfg(test)]
        let compared = if thread::panicking() {
            Ok(String::new())
        } else {
            Client::connect(&self.url, NoTls)
                .map_or(Ok(String::new()), |mut client| crate::db::counts::compare(&mut client))
        };
        outside_of_runtimes(|| {
            let mut share = SHARE.lock();
            // If the session that created the database has ended, another process drops it.
            let Some(share) = share.as_mut().filter(|share| self.name.contains(&share.id)) else { return };
            let client = &mut share.cluster.client;
            let drop = format!("drop database if exists {} with (force)", self.name);
            if let Err(error) = end_sessions(client, &self.name).and_then(|()| client.batch_execute(&drop)) {
                log::warn!("cannot drop {}: {}", self.name, explain(&error));
            }
        });
        #[cfg(test)]
        assert!(compared.is_ok(), "{compared:?}");
    }
}

/// Returns the settings of a service in a test: tests run many services and ask each of them little. No pooler is before
/// the private cluster.
pub fn small() -> Config {
    Config { db_pool_size: 2, workers: 2, find_pooler: false, ..Config::default() }
}

/// The share of a process in the cluster: the session that owns its databases.
struct Share {
    /// The cluster, with the session. Its end tells other processes that the databases have no owner any more.
    cluster: Shared,
    /// The session, as the names of its databases have it.
    id: String,
    /// Has a template's files copied, which takes half as long as the default; empty before PostgreSQL 15, as that copies
    /// files anyway.
    strategy: String,
    count: u32,
}

impl Share {
    fn join() -> Result<Share, StartError> {
        const DESCRIBE: &str = "\
            select concat(pid, '_', (extract(epoch from backend_start) * 1000000)::bigint), \
                current_setting('server_version'), \
                case when current_setting('server_version_num')::int >= 150000 then 'strategy file_copy' else '' end \
            from pg_stat_activity where pid = pg_backend_pid()";
        let places =
            ["/dev/shm".into(), env::temp_dir(), "/tmp".into()].map(|dir: PathBuf| dir.join("userd-scratch"));
        // Test runners start as many processes as there are cores, each with some servers and their pools.
        let mut cluster =
            Shared::join(&places, 1000).map_err(|error| StartError::Cluster(error.to_string()))?;
        let connection_string = connection_string(&cluster.dir, "postgres");
        // A thread drops databases of other owners, so that the start is quick. The next process drops the rest.
        let _ = thread::Builder::new().spawn(move || drop_leftovers(&connection_string));
        let row = cluster.client.query_one(DESCRIBE, &[]).map_err(failed)?;
        log::info!("PostgreSQL {}, programs in {}", row.get::<_, &str>(1), cluster.programs.display());
        Ok(Share { id: row.get(0), strategy: row.get(2), cluster, count: 0 })
    }

    /// Creates a clone of a template. Returns its name and URL.
    fn create(&mut self, template: &str) -> Result<(String, String), Error> {
        let name = format!("userd_scratch_{}_{}", self.id, self.count);
        self.count += 1;
        let sql = format!("create database {name} template {template} {}", self.strategy);
        self.cluster.client.batch_execute(&sql)?;
        // The socket's directory is percent-encoded.
        let socket_dir = self.cluster.dir.to_string_lossy();
        let host = utf8_percent_encode(&socket_dir, NON_ALPHANUMERIC);
        let url = format!("postgresql://postgres@{host}:5432/{name}");
        Ok((name, url))
    }
}

fn failed(error: Error) -> StartError {
    StartError::Cluster(explain(&error))
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

/// Drops the databases whose owner, the session that created them, has ended. Looks for one at a time, as its owner may be
/// dropping it.
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
