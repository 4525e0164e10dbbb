//! The directory of a server: made, checked, locked; its log; and the processes that a killed userd left in it. Has
//! `pgdata` (the cluster), `postgres.log`, `lock` (held by the userd that runs the server) and the socket. They are in
//! `userd` below it if its owner or mode cannot be set, as that of a volume with `fsGroup` in Kubernetes.

use super::{Account, ClusterError, Result, SOCKET};
use nix::libc;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command, Stdio};

/// Name of the directory in one whose owner or mode cannot be set.
const BELOW: &str = "userd";

/// The longest path of a socket: `sun_path` without its final NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Functions of a shell that end the processes in directories. PostgreSQL's own account runs them: it sees where its
/// processes are, which root in a container may not see.
pub(super) const PROCESSES: &str = include_str!("processes.sh");

/// A directory that this process has locked, until it is dropped.
#[derive(Debug)]
pub(super) struct ClusterDir {
    pub dir: PathBuf,
    pub account: Account,
    pub lock: File,
}

impl ClusterDir {
    /// Locks the directory. `None`: another process has locked it, or has just removed it.
    pub fn lock(dir: &Path, account: Account) -> Result<Option<ClusterDir>> {
        let path = dir.join("lock");
        let mut file = match account.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(ClusterError::io("open", &path))?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked.map_err(|error| ClusterError::io("lock", &path)(error.into()))?,
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        written.map_err(ClusterError::io("write", &path))?;
        Ok(Some(ClusterDir { dir: dir.to_owned(), account, lock: file }))
    }

    /// Returns whether the locked directory still has its name.
    pub fn is_there(&self) -> bool {
        let inode = |found: Metadata| (found.dev(), found.ino());
        let named = fs::symlink_metadata(self.dir.join("lock")).map(inode).ok();
        named.is_some() && named == self.lock.metadata().map(inode).ok()
    }

    pub fn pgdata(&self) -> PathBuf {
        self.dir.join("pgdata")
    }

    /// Opens the log.
    pub fn log(&self) -> Result<File> {
        let path = self.dir.join("postgres.log");
        self.account.open(&path).map_err(ClusterError::io("open", &path))
    }

    /// Returns a command that runs a program as the account, in a process group of its own. The program may outlive this
    /// process. It inherits no descriptor that this process was started with, as one may hold a lock of the caller's.
    pub fn command(&self, program: &Path, errors: impl Into<Stdio>) -> Command {
        let mut command = self.account.command(program);
        command.current_dir(&self.dir).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(errors);
        let close_others = || {
            // SAFETY: the system call has numbers alone. Linux before 5.11 does not know it, and closes none.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            Ok(())
        };
        // SAFETY: the closure calls nothing that is unsafe between fork and exec.
        unsafe { command.pre_exec(close_others) };
        command
    }

    /// Ends the processes that a killed userd or a killed server left, and removes the files that name them. Blocks for up
    /// to 18 s.
    pub fn clear(&self) -> Result<()> {
        // PostgreSQL refuses a directory that the group may write to, as each mount of a volume with `fsGroup` has it.
        let mut shell = self.command(Path::new("/bin/sh"), Stdio::null());
        shell
            .arg("-c")
            .arg(format!("{PROCESSES}[ ! -d pgdata ] || chmod go= pgdata; end_all . pgdata pgdata.new"));
        if !shell.status().is_ok_and(|status| status.success()) {
            let dir = self.dir.display();
            return Err(ClusterError::new(format!("cannot end the PostgreSQL that runs in {dir}")));
        }
        for name in ["pgdata/postmaster.pid", SOCKET, &format!("{SOCKET}.lock")] {
            let _ = fs::remove_file(self.dir.join(name));
        }
        Ok(())
    }
}

/// Returns the error for a directory that another process has locked.
pub(super) fn in_use(dir: &Path) -> ClusterError {
    let holder = fs::read_to_string(dir.join("lock")).unwrap_or_default();
    ClusterError::new(format!("{} is in use by another userd (process {})", dir.display(), holder.trim()))
}

/// Returns whether a socket in the directory has a name that is short enough, and that connection strings can have: a
/// comma separates hosts there.
pub(super) fn takes_a_socket(dir: &Path) -> bool {
    let length = dir.join(SOCKET).as_os_str().len();
    dir.to_str().is_some_and(|name| !name.contains([',', '\n'])) && length <= SOCKET_PATH_MAX
}

/// Returns the directory that the cluster is in: `dir`, or the one below it.
pub(super) fn place(dir: &Path) -> PathBuf {
    let below = dir.join(BELOW);
    if below.join("lock").exists() && !dir.join("pgdata").exists() { below } else { dir.to_owned() }
}

/// Makes a directory for a cluster that is kept, of mode 0700 and the account's, or checks the one that is there.
/// Returns its real name.
pub(super) fn make(dir: &Path, account: Account) -> Result<PathBuf> {
    let refuse = |why: &str| {
        ClusterError::new(format!("{} {why}: choose another directory (--embedded=DIR)", dir.display()))
    };
    let absolute = path::absolute(dir).map_err(ClusterError::io("use", dir))?;
    let parent = absolute.parent().unwrap_or(&absolute);
    let create =
        |dir| fs::create_dir_all(dir).map_err(|error| refuse(&format!("cannot be created ({error})")));
    create(parent)?;
    account.check_way(&fs::canonicalize(parent).map_err(ClusterError::io("read", parent))?)?;
    create(&absolute)?;
    // After that, a new directory outlasts a power failure.
    let _ = File::open(parent).and_then(|parent| parent.sync_all());
    let dir = fs::canonicalize(&absolute).map_err(ClusterError::io("read", dir))?;
    let (place, below) = (place(&dir), dir.join(BELOW));
    if !takes_a_socket(&place) {
        return Err(refuse("is too long a name for a socket in it, or has a comma or a line break"));
    }
    let has_cluster = place.join("pgdata").exists();
    let entries = fs::read_dir(&dir).map_err(ClusterError::io("read", &dir))?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let ours = ["pgdata", "postgres.log", "lock", ".s.PGSQL.", "lost+found"];
    let foreign = names
        .find(|name| !(ours.iter().any(|ours| name.starts_with(ours)) || name == BELOW && place == below));
    if let Some(foreign) = foreign.filter(|_| !has_cluster) {
        return Err(refuse(&format!("is neither empty nor a cluster of userd's (it has {foreign:?})")));
    }
    let goes_below =
        || place == dir && !has_cluster && takes_a_socket(&below) && account.makes_private(&below);
    match account.take_over(&place) {
        Err(_) if goes_below() => Ok(below),
        taken => taken.map(|()| place),
    }
}
