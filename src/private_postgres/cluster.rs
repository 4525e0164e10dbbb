//! A cluster that is kept, for the process that runs it and for commands beside it.

use super::directory::{self, ClusterDir};
use super::initdb::initialize;
use super::server::{self, ServerProcess};
use super::{Account, ClusterError, GoOn, Result, Wait, connect, connection_string, programs};
use postgres::error::SqlState;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// SQLSTATE with which a server refuses a session while it starts or stops.
const STARTS_OR_STOPS: SqlState = SqlState::CANNOT_CONNECT_NOW;

/// Time in which a process that is being started may have a copy of the lock.
const MAX_LOCK_COPY: Duration = Duration::from_secs(1);

/// A cluster that accepts connections. Dropping it ends every session and stops its server, if it was started here: what
/// was committed is safe. Blocks for as long as a fast shutdown takes.
///
/// If this process is killed, the server stays; the next start stops it and goes on.
#[derive(Debug)]
pub struct Cluster {
    /// The account that the server runs as.
    pub account: Account,
    dir: PathBuf,
    /// The server is dropped first: the directory is locked until the server has stopped.
    started: Option<(ServerProcess, ClusterDir)>,
}

impl Cluster {
    /// Starts the cluster in `dir`, which is created (mode 0700) when missing, and the cluster made first if the directory
    /// has none. A server that a killed userd left behind is stopped. PostgreSQL runs as the current user, or under root as
    /// [`Account::find`] has it. `max_connections`: the server's, at least 1.
    ///
    /// With `joins`, connects to the server that another process runs there, if one does. Root acts for the owner of the
    /// directory then, so that nothing there becomes another's.
    ///
    /// Blocks for as long as PostgreSQL starts, a server left behind stops, or another process does either, unless `go_on`
    /// ends that. After an error nothing is running.
    ///
    /// # Errors
    /// One line saying what to do: PostgreSQL, its right version or the `postgres` user missing; its programs not to be
    /// entered or not starting; the directory unusable, not ours, or in use; `initdb` or the server failing, with the
    /// last lines of its log.
    pub fn open(dir: &Path, max_connections: u32, joins: bool, go_on: GoOn) -> Result<Cluster> {
        let account = if joins { Account::owner_of(dir) } else { Account::find(true) }?;
        let dir = directory::make(dir, account)?;
        account.act(|| {
            let mut wait = Wait::begin();
            loop {
                if let Some(directory) = ClusterDir::lock(&dir, account, go_on)? {
                    return Cluster::start_in(directory, max_connections);
                }
                match (joins && server::is_ready(&dir)).then(|| connect(&dir)) {
                    Some(Ok(_)) => return Ok(Cluster { account, dir, started: None }),
                    Some(Err(error)) if error.code().is_some_and(|code| *code != STARTS_OR_STOPS) => {
                        return Err(ClusterError::new(format!("cannot join {}: {error}", dir.display())));
                    }
                    None if !joins && wait.since.elapsed() >= MAX_LOCK_COPY => {
                        return Err(directory::in_use(&dir));
                    }
                    _ => wait.pause(go_on, None, || directory::in_use(&dir).to_string())?,
                }
            }
        })
    }

    fn start_in(directory: ClusterDir, max_connections: u32) -> Result<Cluster> {
        let (dir, pgdata) = (directory.dir.clone(), directory.pgdata());
        directory.clear()?;
        let is_new = !pgdata.exists();
        let wanted = if is_new { None } else { Some(major(&directory)?) };
        let (programs, major) = programs::find(wanted, &directory.account)?;
        if is_new {
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            initialize(&directory, &programs, &[])?;
        }
        let server = ServerProcess::start(&directory, &programs, max_connections, &[])?;
        if is_new {
            // Revokes `create` on the schema, which PostgreSQL itself does only from version 15 on.
            const CLOSE: &str = "revoke create on schema public from public";
            let closed = connect(&dir).and_then(|mut client| client.batch_execute(CLOSE));
            closed.map_err(|error| ClusterError::new(format!("cannot set up the database: {error}")))?;
        }
        let (pid, place) = (server.child.id(), dir.display());
        log::info!("PostgreSQL {major} (process {pid}) serves {}, socket in {place}", pgdata.display());
        Ok(Cluster { account: directory.account, dir, started: Some((server, directory)) })
    }

    /// Returns what psql and the `postgres` crate need to connect to `database` as the superuser `postgres`:
    /// `host='/dir' port=5432 user=postgres dbname='…'`. The database `postgres` is always there.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.dir, database)
    }

    /// Returns the server's process id, if it was started here.
    pub fn pid(&self) -> Option<u32> {
        self.started.as_ref().map(|(server, _)| server.child.id())
    }

    /// Returns a line that says how the server ended, if it did so by itself. Does not block.
    pub fn ended(&mut self) -> Option<String> {
        let server = &mut self.started.as_mut()?.0.child;
        let (pid, status) = (server.id(), server.try_wait().ok()??);
        let log = self.dir.join("postgres.log");
        Some(format!("PostgreSQL (process {pid}) has ended ({status}); see {}", log.display()))
    }
}

/// Returns the version that made the cluster.
fn major(directory: &ClusterDir) -> Result<u32> {
    let pgdata = directory.pgdata();
    directory.account.check_owner(&pgdata)?;
    let file = pgdata.join("PG_VERSION");
    let text = fs::read_to_string(&file).map_err(ClusterError::io("read", &file))?;
    programs::number(&text).ok_or_else(|| ClusterError::new(format!("{} holds no version", file.display())))
}

/// Checks that there is a cluster. Starts nothing.
///
/// # Errors
/// There is no cluster, or this user may not look.
pub fn check(dir: &Path) -> Result<()> {
    let shown = dir.display();
    fs::metadata(dir.join("pgdata")).map(drop).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            ClusterError::new(format!("{shown} has no cluster; `userd --embedded={shown}` makes one"))
        }
        _ => Account::owner_of(dir).map_or_else(|why| why, |account| account.io("read", dir)(error)),
    })
}
