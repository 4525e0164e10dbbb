//! A cluster whose data are kept. The process that starts its server owns the cluster; commands beside it join the
//! server.

use super::directory::{self, ClusterDir};
use super::initdb::make_cluster;
use super::server::{self, ServerProcess};
use super::{Account, ClusterError, Result, ShouldGoOn, Wait, connect, connection_string, programs};
use postgres::error::SqlState;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// SQLSTATE with which a server refuses a session while it starts or stops.
const SERVER_STARTS_OR_STOPS: SqlState = SqlState::CANNOT_CONNECT_NOW;

/// How long a lock may be held although its owner has ended: a new process has a copy of the lock between fork and
/// exec.
const MAX_LOCK_COPY: Duration = Duration::from_secs(1);

/// A cluster that accepts connections. Dropping the value stops the server by a fast shutdown if this process started
/// it, and blocks until the server has stopped. What was committed is safe.
///
/// If this process is killed, the server goes on. The next start stops it first.
#[derive(Debug)]
pub struct Cluster {
    /// The account that the server runs as.
    pub account: Account,
    dir: PathBuf,
    /// The server and the locked directory, if this process has started the server. The server is dropped first,
    /// because the directory must be locked until the server has stopped.
    started: Option<(ServerProcess, ClusterDir)>,
}

impl Cluster {
    /// Starts the server of the cluster in `dir`. Makes a missing directory (mode 0700) and a missing cluster, and
    /// stops a server that a killed userd has left. PostgreSQL runs as the account that [`Account::find`] returns.
    ///
    /// With `joins`, uses the server that another process runs there, if there is one. Root then acts as the owner of
    /// the directory, so that no file there gets another owner.
    ///
    /// Blocks until the server accepts connections, unless `go_on` cancels the start. After an error no server is
    /// running.
    ///
    /// # Errors
    /// One line that says what to do, if PostgreSQL, its right version or its user is missing; if its programs do not
    /// start; if the directory is unusable, another user's or in use; or if `initdb` or the server fails.
    pub fn open(dir: &Path, max_connections: u32, joins: bool, go_on: ShouldGoOn) -> Result<Cluster> {
        let account = if joins { Account::owner_of(dir) } else { Account::find(true) }?;
        let dir = directory::prepare(dir, account)?;
        account.with_rights(|| {
            let mut wait = Wait::begin();
            loop {
                if let Some(directory) = ClusterDir::lock(&dir, account, go_on)? {
                    return Cluster::start_in(directory, max_connections);
                }
                match (joins && server::is_ready(&dir)).then(|| connect(&dir)) {
                    Some(Ok(_)) => return Ok(Cluster { account, dir, started: None }),
                    Some(Err(error)) if error.code().is_some_and(|code| *code != SERVER_STARTS_OR_STOPS) => {
                        return Err(ClusterError::new(format!("cannot join {}: {error}", dir.display())));
                    }
                    None if !joins && wait.since.elapsed() >= MAX_LOCK_COPY => {
                        return Err(directory::in_use_error(&dir));
                    }
                    _ => wait.pause(go_on, None, || directory::in_use_error(&dir).to_string())?,
                }
            }
        })
    }

    fn start_in(directory: ClusterDir, max_connections: u32) -> Result<Cluster> {
        let (dir, pgdata) = (directory.dir.clone(), directory.pgdata());
        directory.end_leftovers()?;
        let is_new = !pgdata.exists();
        let wanted = if is_new { None } else { Some(read_major_version(&directory)?) };
        let (programs, major) = programs::find(wanted, &directory.account)?;
        if is_new {
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            make_cluster(&directory, &programs, &[])?;
        }
        let server = ServerProcess::start(&directory, &programs, max_connections, &[])?;
        if is_new {
            // Takes from all roles the right to create objects in the schema `public`, which they have before
            // PostgreSQL 15.
            const CLOSE_SCHEMA: &str = "revoke create on schema public from public";
            let closed = connect(&dir).and_then(|mut client| client.batch_execute(CLOSE_SCHEMA));
            closed.map_err(|error| ClusterError::new(format!("cannot set up the database: {error}")))?;
        }
        let (pid, place) = (server.child.id(), dir.display());
        log::info!("PostgreSQL {major} (process {pid}) serves {}, socket in {place}", pgdata.display());
        Ok(Cluster { account: directory.account, dir, started: Some((server, directory)) })
    }

    /// Returns the connection string of a database, for psql and the `postgres` crate, as the superuser `postgres`:
    /// `host='/dir' port=5432 user=postgres dbname='…'`. Every cluster has the database `postgres`.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.dir, database)
    }

    /// Returns the server's process id if this process has started the server.
    pub fn pid(&self) -> Option<u32> {
        self.started.as_ref().map(|(server, _)| server.child.id())
    }

    /// Returns a line that says how the server ended, if this process has not stopped it. Does not block.
    pub fn end_reason(&mut self) -> Option<String> {
        let server = &mut self.started.as_mut()?.0.child;
        let (pid, status) = (server.id(), server.try_wait().ok()??);
        let log = self.dir.join("postgres.log");
        Some(format!("PostgreSQL (process {pid}) has ended ({status}); see {}", log.display()))
    }
}

/// Returns the major version of PostgreSQL that made the cluster.
fn read_major_version(directory: &ClusterDir) -> Result<u32> {
    let pgdata = directory.pgdata();
    directory.account.check_owner(&pgdata)?;
    let file = pgdata.join("PG_VERSION");
    let text = fs::read_to_string(&file).map_err(ClusterError::cannot("read", &file))?;
    programs::leading_number(&text).ok_or_else(|| ClusterError::new(format!("{file:?} has no version")))
}

/// Checks that `dir` has a cluster, without starting its server.
///
/// # Errors
/// There is no cluster, or this user may not enter the directory.
pub fn check(dir: &Path) -> Result<()> {
    let shown = dir.display();
    fs::metadata(dir.join("pgdata")).map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            ClusterError::new(format!("{shown} has no cluster; `userd --embedded={shown}` makes one"))
        }
        _ => Account::owner_of(dir).map_or_else(|why| why, |account| account.cannot("read", dir)(error)),
    })
}
