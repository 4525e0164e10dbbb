//! The cluster of a directory for a command that works beside a service: the server that another process runs there, or
//! else one that is started for as long as it is needed.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::unistd::Uid;

use super::account::{self, Account};
use super::directory::{ClusterDir, PORT, socket_fits};
use super::processes::{PidFile, serves};
use super::{CONNECT_PAUSE, Cluster, ClusterError, Options};
use crate::db::scratch::{answers, connection_string};

/// A cluster that accepts connections.
#[derive(Debug)]
pub enum Joined {
    /// Started here. Dropping it stops the server.
    Started(Box<Cluster>),
    /// Run by another process; the directory of its socket.
    Running(String),
}

impl Joined {
    /// The cluster in `options.dir`: the one that another process runs there, or one that is started as
    /// [`Cluster::start`] does. Root acts for the owner of the directory, so that nothing there becomes another's.
    ///
    /// Blocks for up to `start_timeout`, in which another process may be starting or stopping it.
    ///
    /// # Errors
    /// As of [`Cluster::start`]. Where `make` is not set: the directory has no cluster, and is left as it is.
    pub fn join(options: &Options, make: bool) -> Result<Joined, ClusterError> {
        let dir = &options.dir;
        if !make {
            check(dir)?;
        }
        let account = Account::owner_of(dir)?;
        let deadline = Instant::now() + options.start_timeout;
        loop {
            match ClusterDir::open(dir, account, Duration::ZERO) {
                Ok(directory) => {
                    let cluster = Cluster::start_in(directory, options, |_| Ok(None))?;
                    return Ok(Joined::Started(Box::new(cluster)));
                }
                Err(error) if !error.busy => return Err(error),
                Err(error) => {
                    let running = running(dir).filter(|file| file.ready);
                    let socket_dir = running.and_then(|file| file.socket_dir.to_str().map(str::to_owned));
                    if let Some(socket_dir) = socket_dir
                        && answers(connection_string(&socket_dir, PORT, "postgres"), deadline).is_ok()
                    {
                        return Ok(Joined::Running(socket_dir));
                    }
                    if Instant::now() >= deadline {
                        return Err(error);
                    }
                }
            }
            thread::sleep(CONNECT_PAUSE);
        }
    }

    /// For psql and the `postgres` crate, as [`Cluster::connection_string`].
    pub fn connection_string(&self, database: &str) -> String {
        match self {
            Joined::Started(cluster) => cluster.connection_string(database),
            Joined::Running(socket_dir) => connection_string(socket_dir, PORT, database),
        }
    }

    /// The server's process id, where it was started here.
    pub fn started(&self) -> Option<u32> {
        match self {
            Joined::Started(cluster) => Some(cluster.pid()),
            Joined::Running(_) => None,
        }
    }
}

/// The directory of the socket of the cluster in `dir`, whether it runs or not. `None` where that is known only while
/// it runs, as the directory's name is too long. Does not block.
///
/// # Errors
/// There is no cluster, or this user may not look.
pub fn socket_dir(dir: &Path) -> Result<Option<String>, ClusterError> {
    check(dir)?;
    let dir = fs::canonicalize(dir).map_err(ClusterError::io("read", dir))?;
    let running = running(&dir).and_then(|file| file.socket_dir.to_str().map(str::to_owned));
    Ok(running.or_else(|| socket_fits(&dir)))
}

/// What the server says that runs in `dir`.
fn running(dir: &Path) -> Option<PidFile> {
    let pgdata = fs::canonicalize(dir).ok()?.join("pgdata");
    PidFile::read(&pgdata).filter(|file| serves(file.pid, &pgdata))
}

/// That there is a cluster, and that this user may look at it.
fn check(dir: &Path) -> Result<(), ClusterError> {
    let pgdata = dir.join("pgdata");
    match fs::metadata(&pgdata) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ClusterError::new(format!(
            "{0} has no cluster; `userd --embedded={0}` makes one",
            dir.display()
        ))),
        Err(error) => {
            let failed = ClusterError::io("read", &pgdata)(error);
            let owner = fs::metadata(dir).ok().filter(|found| found.uid() != Uid::effective().as_raw());
            Err(match owner {
                Some(found) => ClusterError::new(format!(
                    "{failed}; {} belongs to user {1}: be {1}, or root",
                    dir.display(),
                    account::name(found.uid())
                )),
                None => failed,
            })
        }
    }
}
