//! The directory of a server: made, checked, locked; its log; and the processes that a killed userd left in it. Has
//! `pgdata` (the cluster), `postgres.log`, `lock` (held by the userd that runs the server) and the socket.

use super::{Account, ClusterError, GoOn, Result, SOCKET, Wait};
use nix::libc;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command, Stdio};

/// The longest path of a socket: `sun_path` without its final NUL.
const MAX_SOCKET_PATH: usize = 107;

/// Functions of a shell that end the processes in directories. PostgreSQL's own account runs them: it sees where its
/// processes are, which root in a container may not see.
pub(super) const PROCESSES: &str = include_str!("processes.sh");

/// A directory that this process has locked, until it is dropped.
#[derive(Debug)]
pub(super) struct ClusterDir {
    pub dir: PathBuf,
    pub account: Account,
    pub lock: File,
    pub go_on: GoOn,
}

impl ClusterDir {
    /// Locks the directory. `None`: another process has locked it, or has just removed it.
    pub fn lock(dir: &Path, account: Account, go_on: GoOn) -> Result<Option<ClusterDir>> {
        let path = dir.join("lock");
        let mut file = match account.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(account.io("open", &path))?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked.map_err(|error| ClusterError::io("lock", &path)(error.into()))?,
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        written.map_err(ClusterError::io("write", &path))?;
        Ok(Some(ClusterDir { dir: dir.to_owned(), account, lock: file, go_on }))
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
        self.account.open(&path).map_err(self.account.io("open", &path))
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

    /// Ends the processes that a killed userd or a killed server left, and removes the files that name them. Blocks for as
    /// long as a server stops.
    pub fn clear(&self) -> Result<()> {
        // PostgreSQL refuses a directory that the group may write to, as each mount of a volume with `fsGroup` has it.
        let mut shell = self.command(Path::new("/bin/sh"), Stdio::null());
        shell.arg("-c").arg(format!(
            "{PROCESSES}[ ! -d pgdata ] || chmod go= pgdata
            end_server; end_all . pgdata pgdata.new && rm -f pgdata/postmaster.pid {SOCKET} {SOCKET}.lock"
        ));
        let (mut wait, dir) = (Wait::begin(), self.dir.display());
        let mut shell = shell.spawn().map_err(ClusterError::io("run", Path::new("/bin/sh")))?;
        while matches!(shell.try_wait(), Ok(None)) {
            wait.pause(self.go_on, None, || format!("the PostgreSQL left in {dir} stops"))
                .inspect_err(|_| drop(shell.kill()))?;
        }
        if !shell.wait().is_ok_and(|status| status.success()) {
            return Err(ClusterError::new(format!("cannot end the PostgreSQL that runs in {dir}")));
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
    dir.to_str().is_some_and(|name| !name.contains([',', '\n'])) && length <= MAX_SOCKET_PATH
}

/// Makes a directory for a cluster that is kept, of mode 0700 and the account's, or checks the one that is there.
/// Returns its real name.
pub(super) fn make(dir: &Path, account: Account) -> Result<PathBuf> {
    let dir = &path::absolute(dir).map_err(ClusterError::io("use", dir))?;
    let parent = dir.parent().unwrap_or(dir);
    let created =
        || fs::create_dir_all(dir).map_err(|error| refuse(dir, &format!("cannot be created ({error})")));
    let by_account = account.act(|| account.check_way(parent).map(|()| created()))?;
    let is_roots = || fs::metadata(dir).is_ok_and(|found| found.uid() == 0);
    match account.instead_of_root().filter(|_| by_account.is_err() || is_roots()) {
        Some((uid, gid)) => {
            check_of_root(dir)?;
            created()?;
            check_entries(dir, &account)?;
            if dir.join("pgdata").exists() {
                account.check_owner(dir)?;
            }
            // An error is ignored: on a file system that keeps no owners, `take` reports it.
            let _ = lchown(dir, Some(uid), Some(gid));
        }
        None => by_account?,
    }
    account.act(|| {
        // Syncs the parent, so that a new directory outlasts a power failure.
        let _ = File::open(parent).and_then(|parent| parent.sync_all());
        take(fs::canonicalize(dir).map_err(ClusterError::io("read", dir))?, &account)
    })
}

/// Checks that only root can change the way to `dir`, so that root can make it or give it away by its name.
fn check_of_root(dir: &Path) -> Result<()> {
    const OPEN: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    // In a sticky directory, root's can be replaced by root alone.
    let is_closed = |path: &Path, mode: u32| mode & OPEN == 0 || mode & STICKY != 0 || path == dir;
    let is_open = |path: &&Path| {
        let found = fs::symlink_metadata(path);
        found.is_ok_and(|found| !found.is_dir() || found.uid() != 0 || !is_closed(path, found.mode()))
    };
    let Some(open) = dir.ancestors().find(is_open) else { return Ok(()) };
    let why = "is a link or no directory, or others than root can change it";
    Err(refuse(dir, &format!("cannot be created or given away by root: {} {why}", open.display())))
}

/// Sets the directory's mode to 0700, so that no other account can enter it.
fn take(dir: PathBuf, account: &Account) -> Result<PathBuf> {
    if !takes_a_socket(&dir) {
        let why = match dir.to_str() {
            Some(_) => "is too long a name for a socket in it, or has a comma or a line break",
            None => "has a name that is not UTF-8",
        };
        return Err(refuse(&dir, why));
    }
    check_entries(&dir, account)?;
    account.restrict_to_owner(&dir)?;
    check_links(&dir, account)?;
    Ok(dir)
}

/// Checks that no other user has put a link into a directory, which is closed by now.
fn check_links(dir: &Path, account: &Account) -> Result<()> {
    let is_foreign = |found: &Metadata| found.is_symlink() && found.uid() != account.uid && found.uid() != 0;
    let mut entries = fs::read_dir(dir).map_err(account.io("read", dir))?.flatten();
    match entries.find(|entry| entry.metadata().is_ok_and(|found| is_foreign(&found))) {
        Some(link) => Err(refuse(dir, &format!("has a link of another user ({:?})", link.file_name()))),
        None => Ok(()),
    }
}

/// Checks that a directory has a cluster, or nothing but what a start without success has left.
fn check_entries(dir: &Path, account: &Account) -> Result<()> {
    const OURS: [&str; 5] = ["pgdata", "postgres.log", "lock", ".s.PGSQL.", "lost+found"];
    let entries = fs::read_dir(dir).map_err(account.io("read", dir))?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_foreign = |name: &String| !OURS.iter().any(|ours| name.starts_with(ours));
    match names.find(is_foreign).filter(|_| !dir.join("pgdata").exists()) {
        Some(name) => {
            Err(refuse(dir, &format!("is neither empty nor a cluster of userd's (it has {name:?})")))
        }
        None => Ok(()),
    }
}

fn refuse(dir: &Path, why: &str) -> ClusterError {
    ClusterError::new(format!("{} {why}: choose another directory (--embedded=DIR)", dir.display()))
}
