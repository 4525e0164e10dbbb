//! Makes, checks and locks the directory of a server, and ends the processes that a killed userd has left in it.
//!
//! The directory has `pgdata` (the cluster), `postgres.log`, `lock` (which the userd that runs the server has locked)
//! and the socket.

use super::{Account, ClusterError, Result, SOCKET_NAME, ShouldGoOn, Wait};
use nix::libc;
use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command, Stdio};

/// The most bytes in the path of a socket: the size of `sun_path` without its final NUL.
const MAX_SOCKET_PATH_BYTES: usize = 107;

/// Shell functions that end the processes in a directory. PostgreSQL's account runs them, because root in a container
/// may not see in which directory a process of the account works.
pub(super) const SHELL_FUNCTIONS: &str = include_str!("processes.sh");

/// The directory of a server, locked by this process until the value is dropped.
#[derive(Debug)]
pub(super) struct ClusterDir {
    pub dir: PathBuf,
    pub account: Account,
    pub lock: File,
    pub go_on: ShouldGoOn,
}

impl ClusterDir {
    /// Locks the directory. Returns `None` if another process has locked the directory or has just removed it.
    pub fn lock(dir: &Path, account: Account, go_on: ShouldGoOn) -> Result<Option<ClusterDir>> {
        let path = dir.join("lock");
        let mut file = match account.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(account.cannot("open", &path))?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked.map_err(|error| ClusterError::cannot("lock", &path)(error.into()))?,
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        written.map_err(ClusterError::cannot("write", &path))?;
        Ok(Some(ClusterDir { dir: dir.to_owned(), account, lock: file, go_on }))
    }

    /// Returns whether the locked directory still has its name. Another process may have renamed it to remove it.
    pub fn has_its_name(&self) -> bool {
        let inode = |found: Metadata| (found.dev(), found.ino());
        let named = fs::symlink_metadata(self.dir.join("lock")).map(inode).ok();
        named.is_some() && named == self.lock.metadata().map(inode).ok()
    }

    pub fn pgdata(&self) -> PathBuf {
        self.dir.join("pgdata")
    }

    /// Opens the server's log to append to.
    pub fn open_log(&self) -> Result<File> {
        let path = self.dir.join("postgres.log");
        self.account.open(&path).map_err(self.account.cannot("open", &path))
    }

    /// Returns a command that runs a program as the account, in a process group of its own. The program inherits no
    /// descriptor, because a descriptor of userd's parent may hold a lock, and the program may outlive this process.
    pub fn command(&self, program: &Path, stderr: impl Into<Stdio>) -> Command {
        let mut command = self.account.command(program);
        command.current_dir(&self.dir).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(stderr);
        let close_inherited = || {
            // An error is ignored: Linux before 5.11 does not know this call.
            // SAFETY: all arguments of the system call are numbers.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            Ok(())
        };
        // SAFETY: the closure only makes a system call, which is allowed between fork and exec.
        unsafe { command.pre_exec(close_inherited) };
        command
    }

    /// Ends the processes that a killed userd or a killed server has left, and removes the files with their numbers.
    /// Blocks until the server that was left has stopped.
    pub fn end_leftovers(&self) -> Result<()> {
        // The script takes the group's rights to `pgdata` away, because PostgreSQL refuses to start with them. A volume
        // of Kubernetes with `fsGroup` gives the group these rights at each mount.
        let mut shell = self.command(Path::new("/bin/sh"), Stdio::null());
        shell.arg("-c").arg(format!(
            "{SHELL_FUNCTIONS}[ ! -d pgdata ] || chmod go= pgdata
            end_server; end_all . pgdata pgdata.new && rm -f pgdata/postmaster.pid {SOCKET_NAME} {SOCKET_NAME}.lock"
        ));
        let (mut wait, dir) = (Wait::begin(), self.dir.display());
        let mut shell = shell.spawn().map_err(ClusterError::cannot("run", Path::new("/bin/sh")))?;
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
pub(super) fn in_use_error(dir: &Path) -> ClusterError {
    let holder = fs::read_to_string(dir.join("lock")).unwrap_or_default();
    ClusterError::new(format!("{} is in use by another userd (process {})", dir.display(), holder.trim()))
}

/// Returns whether a socket in the directory can be connected to. Its path must be short, and must have no comma and no
/// line break, because a connection string separates hosts by commas.
pub(super) fn can_have_socket(dir: &Path) -> bool {
    let bytes = dir.join(SOCKET_NAME).as_os_str().len();
    dir.to_str().is_some_and(|name| !name.contains([',', '\n'])) && bytes <= MAX_SOCKET_PATH_BYTES
}

/// Makes the directory of a cluster that is kept, or checks the directory that is there. Closes it to all other
/// accounts. Returns its real path.
pub(super) fn prepare(dir: &Path, account: Account) -> Result<PathBuf> {
    let dir = &path::absolute(dir).map_err(ClusterError::cannot("use", dir))?;
    let parent = dir.parent().unwrap_or(dir);
    let create =
        || fs::create_dir_all(dir).map_err(|error| refusal(dir, &format!("cannot be created ({error})")));
    let by_account = account.with_rights(|| account.check_may_enter(parent).map(|()| create()))?;
    let is_roots = || fs::metadata(dir).is_ok_and(|found| found.uid() == 0);
    match account.ids_if_root().filter(|_| by_account.is_err() || is_roots()) {
        Some((uid, gid)) => {
            check_only_root_changes(dir)?;
            create()?;
            check_entries(dir, &account)?;
            if dir.join("pgdata").exists() {
                account.check_owner(dir)?;
            }
            // An error is ignored: `close` reports that the directory is not the account's.
            let _ = lchown(dir, Some(uid), Some(gid));
        }
        None => by_account?,
    }
    account.with_rights(|| {
        // Syncs the parent, so that a new directory outlasts a power failure.
        let _ = File::open(parent).and_then(|parent| parent.sync_all());
        close(fs::canonicalize(dir).map_err(ClusterError::cannot("read", dir))?, &account)
    })
}

/// Checks that only root can replace `dir` or one of its ancestors, so that root may make the directory, or give it
/// away, by its path.
fn check_only_root_changes(dir: &Path) -> Result<()> {
    const WRITABLE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    // Other users may write to a sticky ancestor, but cannot replace root's directory in it.
    let is_closed = |path: &Path, mode: u32| mode & WRITABLE == 0 || mode & STICKY != 0 || path == dir;
    let is_open = |path: &&Path| {
        let found = fs::symlink_metadata(path);
        found.is_ok_and(|found| !found.is_dir() || found.uid() != 0 || !is_closed(path, found.mode()))
    };
    let Some(open) = dir.ancestors().find(is_open) else { return Ok(()) };
    let why = "is a link or no directory, or others than root can change it";
    Err(refusal(dir, &format!("cannot be created or given away by root: {} {why}", open.display())))
}

/// Checks the directory, and sets its mode to 0700, so that no other account can enter it. Returns the directory.
fn close(dir: PathBuf, account: &Account) -> Result<PathBuf> {
    if !can_have_socket(&dir) {
        return Err(refusal(&dir, "is too long for a socket, has a comma or a line break, or is not UTF-8"));
    }
    check_entries(&dir, account)?;
    account.restrict_to_owner(&dir)?;
    check_links(&dir, account)?;
    Ok(dir)
}

/// Checks that no other user has put a link into the directory before it was closed.
fn check_links(dir: &Path, account: &Account) -> Result<()> {
    let is_foreign = |found: &Metadata| found.is_symlink() && found.uid() != account.uid && found.uid() != 0;
    let mut entries = fs::read_dir(dir).map_err(account.cannot("read", dir))?.flatten();
    match entries.find(|entry| entry.metadata().is_ok_and(|found| is_foreign(&found))) {
        Some(link) => Err(refusal(dir, &format!("has a link of another user ({:?})", link.file_name()))),
        None => Ok(()),
    }
}

/// Checks that a directory has a cluster, or only files that a failed start has left.
fn check_entries(dir: &Path, account: &Account) -> Result<()> {
    const OWN_NAMES: [&str; 5] = ["pgdata", "postgres.log", "lock", ".s.PGSQL.", "lost+found"];
    let entries = fs::read_dir(dir).map_err(account.cannot("read", dir))?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_foreign = |name: &String| !OWN_NAMES.iter().any(|ours| name.starts_with(ours));
    match names.find(is_foreign).filter(|_| !dir.join("pgdata").exists()) {
        Some(name) => {
            Err(refusal(dir, &format!("is neither empty nor a cluster of userd's (it has {name:?})")))
        }
        None => Ok(()),
    }
}

/// Returns the error for a directory that cannot be used.
fn refusal(dir: &Path, why: &str) -> ClusterError {
    ClusterError::new(format!("{} {why}: choose another directory (--embedded=DIR)", dir.display()))
}
