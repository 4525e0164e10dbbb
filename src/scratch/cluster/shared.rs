//! One temporary cluster for all processes of a user that want one at the same time, such as the tests of a
//! run. The first process starts it; it ends some seconds after the last of them has, however it ended.
//!
//! Everyone who uses it holds a named pipe open, whose other end the watcher reads: the kernel counts.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::mem;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use nix::sys::stat::Mode;

use super::account::Account;
use super::directory::{ClusterDir, PORT, USERS, USERS_NEW};
use super::processes::{PidFile, serves};
use super::watcher::Watcher;
use super::{Cluster, ClusterError, Options, POLL, programs};
use crate::db::scratch;

/// A share in the cluster, given back when this process ends: made to be kept in a static.
#[derive(Debug)]
pub(crate) struct Shared {
    socket_dir: String,
    programs: PathBuf,
    /// What keeps the cluster, where another process has started it.
    _pipe: Option<File>,
}

impl Shared {
    /// Joins the cluster of the programs that `options` means, or starts it. Its directory is what `directory` makes of
    /// the programs' name: those of two versions, or of two places, have two clusters.
    ///
    /// Blocks for up to `start_timeout`, which others may use to start or to end one. Errors as
    /// [`Cluster::start`].
    pub fn join(options: Options, directory: impl Fn(&str) -> PathBuf) -> Result<Shared, ClusterError> {
        let account = Account::find(options.durable)?;
        let known = |name: &str| account.keeps_private(&directory(name));
        let (programs, name) = programs::installation(options.programs.as_deref(), &account, known)?;
        Shared::join_in(&Options { dir: directory(&name), programs: Some(programs), ..options }, account)
    }

    /// With `programs` in the options.
    fn join_in(options: &Options, account: Account) -> Result<Shared, ClusterError> {
        let deadline = Instant::now() + options.start_timeout;
        loop {
            // Another user can have made the directory, and would get all that is told to its server.
            if account.keeps_private(&options.dir)
                && let Some(shared) = Shared::enter(options)
            {
                return Ok(shared);
            }
            if fs::symlink_metadata(&options.dir).is_ok_and(|found| found.is_symlink()) {
                let dir = options.dir.display();
                return Err(ClusterError::new(format!("{dir} is a symbolic link: remove it")));
            }
            match ClusterDir::open(&options.dir, account, Duration::ZERO) {
                Ok(directory) => return Shared::found(directory, options),
                Err(error) if !(error.busy || error.not_found) => return Err(error),
                Err(error) if Instant::now() >= deadline => return Err(error),
                Err(_) => thread::sleep(POLL),
            }
        }
    }

    /// For psql and the `postgres` crate, as [`Cluster::connection_string`].
    pub fn connection_string(&self, database: &str) -> String {
        scratch::connection_string(&self.socket_dir, PORT, database)
    }

    /// The directory of the server's programs.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// The directory of the server's socket.
    pub fn socket_dir(&self) -> &str {
        &self.socket_dir
    }

    /// `None` when there is nothing to join: no cluster, or one that is starting or ending.
    fn enter(options: &Options) -> Option<Shared> {
        let mut pipe = writer(&options.dir.join(USERS)).ok()?;
        let pgdata = options.dir.join("pgdata");
        let found = PidFile::read(&pgdata)?;
        if !serves(found.pid, &pgdata) {
            return None;
        }
        writeln!(pipe, "{}", found.pid).ok()?;
        Some(Shared {
            socket_dir: found.socket_dir.to_str()?.to_owned(),
            programs: options.programs.clone().unwrap_or_default(),
            _pipe: Some(pipe),
        })
    }

    fn found(directory: ClusterDir, options: &Options) -> Result<Shared, ClusterError> {
        let (hidden, name) = (directory.dir.join(USERS_NEW), directory.dir.join(USERS));
        let cluster = Cluster::start_in(directory, options, |directory| {
            let pipe = pipe(&hidden, &name).map_err(ClusterError::io("make", &hidden))?;
            Watcher::spawn(directory, Some(pipe)).map(Some)
        })?;
        fs::rename(&hidden, &name).map_err(ClusterError::io("make", &name))?;
        let socket_dir = cluster.directory.socket_dir.clone();
        // Its pipe stays open until this process ends, and it is never stopped by us: others may use it.
        mem::forget(cluster);
        Ok(Shared { socket_dir, programs: options.programs.clone().unwrap_or_default(), _pipe: None })
    }
}

/// Whether a shared cluster can be in `dir`: a directory of the account that runs PostgreSQL, closed to others.
pub(crate) fn can_share(dir: &Path) -> bool {
    Account::find(false).is_ok_and(|account| account.keeps_private(dir))
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

/// Fails where no process reads.
fn writer(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
    let file = options.open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        true => Ok(file),
        false => Err(io::ErrorKind::InvalidInput.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// As another local user would prepare it, to be sent the users of the tests.
    #[test]
    fn what_is_not_provably_a_cluster_of_this_account_is_not_joined() {
        let base = std::env::temp_dir().join(format!("userd-shared-{}", std::process::id()));
        let (dir, link) = (base.join("dir"), base.join("link"));
        fs::create_dir_all(dir.join("pgdata")).unwrap();
        symlink(&dir, &link).unwrap();
        let mode = |mode| fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
        mode(0o755);
        assert!(!can_share(&dir));
        mode(0o700);
        assert!(can_share(&dir) && !can_share(&link) && !can_share(&base.join("none")));
        if nix::unistd::Uid::effective().is_root() {
            std::os::unix::fs::chown(&dir, Some(65534), None).unwrap();
            assert!(!can_share(&dir));
        }
        let error = Shared::join_in(&Options::new(&link), Account::find(false).unwrap()).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");

        let (_reader, _writer) = pipe(&dir.join(USERS), &dir.join(USERS_NEW)).unwrap();
        let us = std::process::id();
        for pid in [1, us] {
            let text = format!("{pid}\n{}\n0\n5432\n/tmp\n\n0\nready\n", dir.join("pgdata").display());
            fs::write(dir.join("pgdata/postmaster.pid"), text).unwrap();
            assert!(Shared::enter(&Options::new(&dir)).is_none(), "process {pid} is no PostgreSQL");
        }
        fs::remove_dir_all(&base).unwrap();
    }
}
