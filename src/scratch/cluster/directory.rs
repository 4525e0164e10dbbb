//! The cluster's directory: made, checked, locked; its log; its socket's place. Every program of
//! PostgreSQL is run through [`ClusterDir::command`]. Knows nothing of running servers.

use std::fs::{File, Metadata, Permissions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use super::account::Account;
use super::processes::alive;
use super::programs;
use super::{ClusterError, POLL};

/// Never listened on: it names the socket's file.
pub(super) const PORT: &str = "5432";
const SOCKET: &str = ".s.PGSQL.5432";
const SOCKET_LOCK: &str = ".s.PGSQL.5432.lock";
/// How directories for sockets alone are named.
const SOCKET_DIR: &str = "userd-socket-";
const TEMPORARY: &str = "temporary";
const OLD_LOG: &str = "postgres.log.old";
/// The pipe that everyone who uses a shared cluster holds open; under its other names no process can join.
pub(super) const USERS: &str = "users";
pub(super) const USERS_NEW: &str = "users.new";
/// What `initdb` makes, until it is whole.
pub(super) const UNFINISHED_PGDATA: &str = "pgdata.new";
const OURS: [&str; 11] = [
    UNFINISHED_PGDATA,
    "postgres.log",
    OLD_LOG,
    "lock",
    TEMPORARY,
    USERS,
    USERS_NEW,
    "users.closed",
    SOCKET,
    SOCKET_LOCK,
    "lost+found",
];
/// `sun_path` without its final NUL.
const SOCKET_PATH_MAX: usize = if cfg!(target_os = "linux") { 107 } else { 103 };
/// Of `postgres.log`, and of `postgres.log.old` beside it.
const LOG_MAX_BYTES: u64 = 8 << 20;
/// What `initdb` and the first segments of the log of changes need, about.
const SPACE_NEEDED: u64 = 64 << 20;
/// For what a killed userd leaves: its `initdb`, or its watcher, which hold the lock until they end.
pub(super) const LOCK_WAIT: Duration = Duration::from_secs(30);
/// For a watcher that removes the directory just now; one that cannot be made at all looks alike.
const REMAKE_WAIT: Duration = Duration::from_secs(1);
const REMOVE_WAIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct ClusterDir {
    pub dir: PathBuf,
    /// Whom PostgreSQL runs as here.
    pub account: Account,
    lock: File,
    /// The directory itself, unless its name is too long or has signs that no client takes.
    pub socket_dir: String,
    socket_is_elsewhere: bool,
}

impl ClusterDir {
    /// The directory, of this account and ours alone until dropped; made when missing. Waits so long for what a killed
    /// userd left there; the error says whether it is `busy`.
    pub fn open(dir: &Path, account: Account, wait: Duration) -> Result<ClusterDir, ClusterError> {
        let (dir, lock) = lock(dir, &account, wait)?;
        // Once the server runs, the account itself may be the one that bounds the log.
        let old_log = dir.join(OLD_LOG);
        if old_log.exists() {
            account.open(&old_log).map_err(ClusterError::io("open", &old_log))?;
        }
        let (socket_dir, socket_is_elsewhere) = match socket_fits(&dir) {
            Some(dir) => (dir, false),
            None => (temporary_socket_dir(&account)?, true),
        };
        Ok(ClusterDir { dir, account, lock, socket_dir, socket_is_elsewhere })
    }

    pub fn pgdata(&self) -> PathBuf {
        self.dir.join("pgdata")
    }

    pub fn log_path(&self) -> PathBuf {
        self.dir.join("postgres.log")
    }

    /// The socket's directory, if it is not the cluster's.
    pub fn other_socket_dir(&self) -> Option<&str> {
        self.socket_is_elsewhere.then_some(&self.socket_dir)
    }

    /// A second handle of the lock, which holds it as long as any of them is open.
    pub fn lock_handle(&self) -> Result<Stdio, ClusterError> {
        self.lock.try_clone().map(Stdio::from).map_err(ClusterError::io("share the lock of", &self.dir))
    }

    /// Keeps durable and temporary clusters apart: the one must not be deleted, the other not trusted.
    pub fn claim(&self, durable: bool) -> Result<(), ClusterError> {
        let (dir, marker) = (self.dir.display(), self.dir.join(TEMPORARY));
        match (durable, marker.exists(), self.pgdata().exists()) {
            (true, true, _) => Err(ClusterError::new(format!(
                "{dir} holds a temporary cluster that a test left behind: remove it"
            ))),
            (false, false, true) => Err(ClusterError::new(format!(
                "{dir} holds a cluster, and a temporary one would delete it: choose another directory"
            ))),
            (true, false, _) => Ok(()),
            (false, ..) => {
                self.account.open(&marker).map_err(ClusterError::io("write", &marker))?;
                self.remove(&self.pgdata())
            }
        }
    }

    /// The version that made the cluster here; `None` when there is none yet.
    pub fn cluster_major(&self) -> Result<Option<u32>, ClusterError> {
        let pgdata = self.pgdata();
        let metadata = match fs::metadata(&pgdata) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata.map_err(ClusterError::io("read", &pgdata))?,
        };
        self.account.check_owner(&pgdata, &metadata)?;
        let file = pgdata.join("PG_VERSION");
        let text = fs::read_to_string(&file).map_err(ClusterError::io("read", &file))?;
        let bad = || ClusterError::new(format!("{} holds no version", file.display()));
        programs::number(&text).ok_or_else(bad).map(Some)
    }

    /// PostgreSQL's `program`, to be run as the right user, in a process group of its own. It writes errors to the log.
    pub fn command(&self, program: &Path) -> Result<Command, ClusterError> {
        self.bound_log()?;
        let path = self.log_path();
        let log = self.account.open(&path).map_err(ClusterError::io("open", &path))?;
        let mut command = self.account.command(program);
        command.current_dir(&self.dir).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(command)
    }

    /// Moves a log that has grown beyond its bound away. The server goes on writing to the same file, so it is copied
    /// and emptied; what is written meanwhile is lost.
    pub fn bound_log(&self) -> Result<(), ClusterError> {
        if self.log_length() <= LOG_MAX_BYTES {
            return Ok(());
        }
        let path = self.log_path();
        let old_path = self.dir.join(OLD_LOG);
        let mut log = self.account.open(&path).map_err(ClusterError::io("open", &path))?;
        let old = self.account.open(&old_path).map_err(ClusterError::io("open", &old_path))?;
        let mut copy = || {
            old.set_len(0)?;
            log.seek(SeekFrom::End(-LOG_MAX_BYTES.cast_signed()))?;
            let copied = io::copy(&mut Read::by_ref(&mut log).take(LOG_MAX_BYTES), &mut &old);
            // Also where there is no space for the copy: the log must not take more of it.
            log.set_len(0)?;
            copied
        };
        copy().map(drop).map_err(ClusterError::io("write to", &old_path))
    }

    /// A line that says so, where a program has failed and hardly any space is left: it could not log the reason.
    pub fn space_is_short(&self) -> Option<String> {
        let found = nix::sys::statvfs::statvfs(&self.dir).ok()?;
        let free = found.blocks_available() * found.fragment_size();
        let dir = self.dir.display();
        (free < SPACE_NEEDED).then(|| format!("{dir} is on a disk with {} MiB of free space", free >> 20))
    }

    pub fn log_length(&self) -> u64 {
        fs::metadata(self.log_path()).map_or(0, |metadata| metadata.len())
    }

    /// The line of the log, from byte `since` on, that best tells why a program ended.
    pub fn last_word(&self, since: u64) -> String {
        let read = || -> io::Result<String> {
            let mut file = File::open(self.log_path())?;
            let end = file.metadata()?.len();
            let since = if since > end { 0 } else { since };
            file.seek(SeekFrom::Start(since.max(end.saturating_sub(16 << 10))))?;
            let mut bytes = Vec::new();
            file.take(16 << 10).read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let text = read().unwrap_or_default();
        let mut lines = text.lines().rev().filter(|line| !line.trim().is_empty());
        let last = lines.clone().next().unwrap_or("it said nothing");
        let tells = |line: &&str| ["FATAL:", "PANIC:", "error:"].iter().any(|sign| line.contains(sign));
        lines.find(tells).unwrap_or(last).trim().to_owned()
    }

    /// Makes a rename within the directory outlast a power failure.
    pub fn sync(&self) -> Result<(), ClusterError> {
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(ClusterError::io("sync", &self.dir))
    }

    /// Removes the socket files of a server that is gone. A leftover `.lock` whose process id belongs
    /// to another process by now would keep the next server from starting.
    ///
    /// `dir` is what a file says: only the cluster's directory and those of `temporary_socket_dir` are touched.
    pub fn remove_sockets(&self, dir: &Path) {
        let is_elsewhere = dir != self.dir;
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        if is_elsewhere && !(name.starts_with(SOCKET_DIR) && self.account.keeps_private(dir)) {
            return;
        }
        for name in [SOCKET, SOCKET_LOCK] {
            let _ = fs::remove_file(dir.join(name));
        }
        if is_elsewhere {
            let _ = fs::remove_dir(dir);
        }
    }

    /// Removes a tree, several times if a program that is just ending still writes to it.
    pub fn remove(&self, tree: &Path) -> Result<(), ClusterError> {
        let deadline = Instant::now() + REMOVE_WAIT;
        loop {
            match fs::remove_dir_all(tree) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if Instant::now() >= deadline => {
                    return Err(ClusterError::io("remove", tree)(error));
                }
                Err(_) => thread::sleep(POLL),
            }
        }
    }
}

impl Drop for ClusterDir {
    fn drop(&mut self) {
        if self.socket_is_elsewhere {
            self.remove_sockets(Path::new(&self.socket_dir));
        }
        // The next process waits for those that still have the lock: an initdb that was killed with its children left,
        // or a process that another thread starts just now, which holds all of our files until it runs its program.
        let _ = self.lock.set_len(0);
    }
}

/// The directory under its real name, and the lock on it.
fn lock(dir: &Path, account: &Account, wait: Duration) -> Result<(PathBuf, File), ClusterError> {
    let deadline = Instant::now() + wait;
    let remade = Instant::now() + REMAKE_WAIT;
    let open = || -> Result<(PathBuf, File), ClusterError> {
        let dir = make(dir, account)?;
        let path = dir.join("lock");
        let file = account.open(&path);
        Ok((dir, file.map_err(ClusterError::io("open", &path))?))
    };
    let failed = ClusterError::io("lock", dir);
    loop {
        let (real, mut file) = match open() {
            // The watcher of a temporary cluster removes it just now: make it again.
            Err(error) if error.not_found && Instant::now() < remade => {
                thread::sleep(POLL);
                continue;
            }
            opened => opened?,
        };
        match file.try_lock() {
            Ok(()) => {
                let inode = |metadata: Metadata| (metadata.dev(), metadata.ino());
                let ours = file.metadata().map(inode).map_err(&failed)?;
                // Unless the file was removed before it was locked.
                if fs::symlink_metadata(real.join("lock")).is_ok_and(|there| inode(there) == ours) {
                    let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
                    written.map_err(&failed)?;
                    return Ok((real, file));
                }
            }
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                let holder = text.trim();
                if holder.parse().is_ok_and(alive) || Instant::now() >= deadline {
                    let by = match holder {
                        "" => "what another userd has left running".to_owned(),
                        holder => format!("another userd (process {holder})"),
                    };
                    return Err(ClusterError::busy(format!("{} is in use by {by}", dir.display())));
                }
            }
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        thread::sleep(POLL);
    }
}

/// The directory under its real name: there, of mode 0700, the account's, and not another's files.
fn make(dir: &Path, account: &Account) -> Result<PathBuf, ClusterError> {
    let dir = path::absolute(dir).map_err(ClusterError::io("use", dir))?;
    if dir.to_string_lossy().contains(char::is_control) {
        let text = format!("{dir:?} has a control character in its name: choose another directory");
        return Err(ClusterError::new(text));
    }
    match fs::metadata(&dir) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => {
            let text = format!("{} is not a directory: choose another name", dir.display());
            return Err(ClusterError::new(text));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if dir.is_symlink() {
                let text = format!("{} is a symbolic link to nothing: remove it", dir.display());
                return Err(ClusterError::new(text));
            }
            let parent = dir.parent().unwrap_or(&dir);
            fs::create_dir_all(parent).map_err(ClusterError::uncreatable(parent))?;
            let parent = fs::canonicalize(parent).map_err(ClusterError::io("read", parent))?;
            account.check_way(&parent)?;
            match account.create_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                created => created.map_err(ClusterError::uncreatable(&dir))?,
            }
            // So that it outlasts a power failure; who may write there may not be allowed to read.
            let _ = File::open(&parent).and_then(|parent| parent.sync_all());
        }
        Err(error) => return Err(ClusterError::io("read", &dir)(error)),
    }
    let dir = fs::canonicalize(&dir).map_err(ClusterError::io("read", &dir))?;
    account.check_way(dir.parent().unwrap_or(&dir))?;

    let entries = fs::read_dir(&dir).map_err(ClusterError::io("read", &dir))?;
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    let foreign = names.iter().find(|name| !OURS.iter().any(|ours| *name == ours));
    if let Some(foreign) = foreign
        && !names.iter().any(|name| name == "pgdata")
    {
        return Err(ClusterError::new(format!(
            "{} is neither empty nor a cluster of userd's (it has {foreign:?}): \
             choose another directory",
            dir.display()
        )));
    }
    let read = || fs::metadata(&dir).map_err(ClusterError::io("read", &dir));
    let take = account.take_over(&dir, read()?.uid());
    take.map_err(ClusterError::io("change the owner of", &dir))?;
    let metadata = read()?;
    account.check_owner(&dir, &metadata)?;
    if metadata.mode() & 0o777 != 0o700 {
        let private = Permissions::from_mode(0o700);
        fs::set_permissions(&dir, private).map_err(ClusterError::io("make private", &dir))?;
    }
    Ok(dir)
}

/// A socket's path is short, and a comma separates hosts in a connection string.
pub(super) fn socket_fits(dir: &Path) -> Option<String> {
    let dir = dir.to_str().filter(|dir| dir.len() + 1 + SOCKET.len() <= SOCKET_PATH_MAX)?;
    (!dir.contains(',')).then(|| dir.to_owned())
}

fn temporary_socket_dir(account: &Account) -> Result<String, ClusterError> {
    let bases = [env::temp_dir(), PathBuf::from("/tmp")];
    for base in bases.into_iter().filter(|base| account.may_write(base)) {
        for number in 0..1000 {
            let dir = base.join(format!("{SOCKET_DIR}{}-{number}", process::id()));
            let Some(text) = socket_fits(&dir) else {
                break;
            };
            match account.create_dir(&dir) {
                Ok(()) => return Ok(text),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(_) => break,
            }
        }
    }
    Err(ClusterError::new(
        "PostgreSQL's socket has no place: the directory's name is too long or has a comma, \
         and nothing can be made in /tmp; choose a shorter name",
    ))
}
