//! A cluster whose data are kept. The process that starts the cluster's server also stops it; commands that run
//! meanwhile use that server.

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

/// The most time for which a lock stays held after its owner has ended: between fork and exec, a process that the owner
/// has started has a copy of the lock.
const MAX_STALE_LOCK_TIME: Duration = Duration::from_secs(1);

/// A cluster whose server accepts connections. If this process started the server, dropping the value stops the server
/// by a fast shutdown, which keeps committed data, and blocks until the server has stopped.
///
/// If this process is killed, the server goes on. The next start of the cluster stops that server first.
#[derive(Debug)]
pub struct Cluster {
    /// The account that the server runs as.
    pub account: Account,
    dir: PathBuf,
    /// The server and the locked directory, if this process has started the server. The server is dropped first,
    /// because the directory must be locked until the server has stopped.
    own_server: Option<(ServerProcess, ClusterDir)>,
}

impl Cluster {
    /// Starts the server of the cluster in `dir`. Makes a missing directory (mode 0700) and a missing cluster, and
    /// stops a server that a killed userd has left. PostgreSQL runs as the account that [`Account::for_cluster`]
    /// returns.
    ///
    /// If `may_join` is true and another process already runs the server, uses that server. Root then acts as the owner
    /// of the directory, so that no file there gets another owner.
    ///
    /// Blocks until the server accepts connections, or until `go_on` returns false. After an error this process has no
    /// server running.
    ///
    /// # Errors
    /// One line that says what to do, if PostgreSQL, its right version or its user is missing; if its programs do not
    /// start; if the directory is unusable, another user's or in use; or if `initdb` or the server fails.
    pub fn open(dir: &Path, max_connections: u32, may_join: bool, go_on: ShouldGoOn) -> Result<Cluster> {
        let account = if may_join { Account::owner_of(dir) } else { Account::for_cluster(true) }?;
        let dir = directory::make_or_check_dir(dir, account)?;
        account.with_rights(|| {
            let mut wait = Wait::begin();
            loop {
                if let Some(directory) = ClusterDir::lock(&dir, account, go_on)? {
                    return Cluster::start_server_in(directory, max_connections);
                }
                match (may_join && server::is_ready(&dir)).then(|| connect(&dir)) {
                    Some(Ok(_)) => return Ok(Cluster { account, dir, own_server: None }),
                    Some(Err(error)) if error.code().is_some_and(|code| *code != SERVER_STARTS_OR_STOPS) => {
                        return Err(ClusterError::new(format!("cannot join {}: {error}", dir.display())));
                    }
                    None if !may_join && wait.began_at.elapsed() >= MAX_STALE_LOCK_TIME => {
                        return Err(directory::in_use_error(&dir));
                    }
                    _ => wait.pause(go_on, None, || directory::in_use_error(&dir).to_string())?,
                }
            }
        })
    }

    fn start_server_in(directory: ClusterDir, max_connections: u32) -> Result<Cluster> {
        let (dir, pgdata) = (directory.path.clone(), directory.pgdata());
        directory.end_leftover_processes()?;
        let is_new = !pgdata.exists();
        let wanted = if is_new { None } else { Some(read_major_version(&directory)?) };
        let (programs, major) = programs::find_programs(wanted, &directory.account)?;
        if is_new {
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            make_cluster(&directory, &programs, &[])?;
        }
        let server = ServerProcess::start(&directory, &programs, max_connections, &[])?;
        if is_new {
            // Takes from all roles the right to create objects in the schema `public`. PostgreSQL before 15 gives them
            // this right.
            const REVOKE_CREATE: &str = "revoke create on schema public from public";
            let revoked = connect(&dir).and_then(|mut client| client.batch_execute(REVOKE_CREATE));
            revoked.map_err(|error| ClusterError::new(format!("cannot set up the database: {error}")))?;
        }
        let (pid, place) = (server.child.id(), dir.display());
        log::info!("PostgreSQL {major} (process {pid}) serves {}, socket in {place}", pgdata.display());
        Ok(Cluster { account: directory.account, dir, own_server: Some((server, directory)) })
    }

    /// Returns the string with which psql or the `postgres` crate connects to a database of this cluster as the
    /// superuser `postgres`: `host='/dir' port=5432 user=postgres dbname='…'`. Every cluster has the database
    /// `postgres`.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.dir, database)
    }

    /// Returns the server's process id if this process has started the server.
    pub fn own_server_pid(&self) -> Option<u32> {
        self.own_server.as_ref().map(|(server, _)| server.child.id())
    }

    /// Returns a line that says how the server ended, if this process started the server and the server has ended by
    /// itself. Does not block.
    pub fn server_end_reason(&mut self) -> Option<String> {
        let server = &mut self.own_server.as_mut()?.0.child;
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

/// Checks that `dir` has a cluster. Does not start its server.
///
/// # Errors
/// There is no cluster, or this user may not enter the directory.
pub fn check_has_cluster(dir: &Path) -> Result<()> {
    let shown = dir.display();
    fs::metadata(dir.join("pgdata")).map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            ClusterError::new(format!("{shown} has no cluster; `userd --embedded={shown}` makes one"))
        }
        _ => Account::owner_of(dir).map_or_else(|why| why, |account| account.cannot("read", dir)(error)),
    })
}
