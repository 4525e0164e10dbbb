//! One throwaway cluster for all processes of a user that want one at the same time, such as the tests of a
//! run. Whoever comes first starts it; it ends some seconds after the last of them has, however it ended.
//!
//! Everyone who uses it holds a named pipe open, whose other end the watcher reads: the kernel counts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::mem::ManuallyDrop;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::sys::stat::Mode;

use super::home::{Home, USERS, USERS_NEW};
use super::leftovers::PidFile;
use super::throwaway::Watcher;
use super::{Cluster, ClusterError, Options, POLL, connection_string};

/// A share in the cluster, given back when this process ends: made to be kept in a static.
#[derive(Debug)]
pub(crate) struct Shared {
    socket_dir: String,
    /// What keeps the cluster: the pipe, or the cluster with its pipe.
    _share: Share,
}

#[derive(Debug)]
enum Share {
    Guest {
        _pipe: File,
    },
    /// Never stopped by us: there may be guests.
    Founder {
        _cluster: ManuallyDrop<Cluster>,
    },
}

impl Shared {
    /// Joins the cluster in `options.dir`, or starts it.
    ///
    /// Blocks for up to `start_timeout`, which others may use to start or to end one. Errors as
    /// [`Cluster::start`].
    pub fn join(options: &Options) -> Result<Shared, ClusterError> {
        let deadline = Instant::now() + options.start_timeout;
        loop {
            if let Some(shared) = Shared::enter(&options.dir) {
                return Ok(shared);
            }
            match Home::open(&options.dir, Duration::ZERO) {
                Ok(home) => return Shared::found(home, options),
                Err(error) if !(error.busy || error.not_found) => return Err(error),
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// For psql and the `postgres` crate, as [`Cluster::connection_string`].
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.socket_dir, database)
    }

    /// The directory of the server's socket.
    pub fn socket_dir(&self) -> &str {
        &self.socket_dir
    }

    /// `None` when there is nothing to join: no cluster, or one that is starting or ending.
    fn enter(dir: &Path) -> Option<Shared> {
        let mut pipe = writer(&dir.join(USERS)).ok()?;
        let found = PidFile::read(&dir.join("pgdata"))?;
        writeln!(pipe, "{}", found.pid).ok()?;
        Some(Shared {
            socket_dir: found.socket_dir.to_str()?.to_owned(),
            _share: Share::Guest { _pipe: pipe },
        })
    }

    fn found(home: Home, options: &Options) -> Result<Shared, ClusterError> {
        let (hidden, name) = (home.dir().join(USERS_NEW), home.dir().join(USERS));
        let cluster = Cluster::start_in(home, options, |home| {
            let failed = ClusterError::io("make", &hidden);
            let (reader, writer) = pipe(&hidden, &name).map_err(&failed)?;
            Watcher::spawn_on(home, Stdio::from(reader), Some(writer)).map(Some)
        })?;
        fs::rename(&hidden, &name).map_err(ClusterError::io("make", &name))?;
        Ok(Shared {
            socket_dir: cluster.home.socket_dir().to_owned(),
            _share: Share::Founder { _cluster: ManuallyDrop::new(cluster) },
        })
    }
}

/// Both ends of a new named pipe. A reader that blocks can be had only while there is a writer, and a
/// writer only while there is a reader.
fn pipe(path: &Path, stale: &Path) -> io::Result<(File, File)> {
    for path in [path, stale] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    nix::unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let mut options = OpenOptions::new();
    let first = options.read(true).custom_flags(O_NONBLOCK).open(path)?;
    let writer = writer(path)?;
    drop(first);
    Ok((OpenOptions::new().read(true).open(path)?, writer))
}

/// Fails where nobody reads.
fn writer(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
    let file = options.open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        true => Ok(file),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}
