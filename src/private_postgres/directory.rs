//! Makes, checks and locks the directory of a server, and ends the processes that a killed userd has left in the
//! directory.
//!
//! The directory has `pgdata` (the cluster), `postgres.log`, `lock` (a file that the userd which runs the server keeps
//! locked) and the socket.

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

/// Shell functions that end the processes which work in a directory. A shell of PostgreSQL's account runs the
/// functions, because root in a container may be unable to see in which directory a process of the account works.
pub(super) const SHELL_FUNCTIONS: &str = include_str!("processes.sh");

/// The directory of a server, locked by this process until the value is dropped.
#[derive(Debug)]
pub(super) struct ClusterDir {
    pub path: PathBuf,
    pub account: Account,
    pub lock_file: File,
    pub should_go_on: ShouldGoOn,
}

impl ClusterDir {
    /// Locks the directory. Returns `None` if another process has locked the directory or has just removed it.
    pub fn lock(dir: &Path, account: Account, go_on: ShouldGoOn) -> Result<Option<ClusterDir>> {
        let path = dir.join("lock");
        let mut file = match account.open_for_append(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(account.cannot("open", &path))?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked.map_err(|error| ClusterError::cannot("lock", &path)(error.into()))?,
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        written.map_err(ClusterError::cannot("write", &path))?;
        Ok(Some(ClusterDir { path: dir.to_owned(), account, lock_file: file, should_go_on: go_on }))
    }

    /// Returns whether the locked directory is still at its path: a process that removes a directory renames it first.
    pub fn is_at_its_path(&self) -> bool {
        let inode = |found: Metadata| (found.dev(), found.ino());
        let named = fs::symlink_metadata(self.path.join("lock")).map(inode).ok();
        named.is_some() && named == self.lock_file.metadata().map(inode).ok()
    }

    /// Returns the path of the cluster's data directory. Does not check that it exists.
    pub fn pgdata(&self) -> PathBuf {
        self.path.join("pgdata")
    }

    /// Opens the server's log to append to.
    pub fn open_server_log(&self) -> Result<File> {
        let path = self.path.join("postgres.log");
        self.account.open_for_append(&path).map_err(self.account.cannot("open", &path))
    }

    /// Returns a command that runs a program as the account, in the directory and in a process group of its own. Apart
    /// from `stderr`, the program inherits no open file: it may outlive this process, and would keep a lock of userd's
    /// or of userd's parent held.
    pub fn command(&self, program: &Path, stderr: impl Into<Stdio>) -> Command {
        let mut command = self.account.command(program);
        command.current_dir(&self.path).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(stderr);
        let close_inherited = || {
            // Ignores an error, because Linux before 5.11 does not know this system call.
            // SAFETY: all arguments of the system call are numbers.
            unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
            Ok(())
        };
        // SAFETY: the closure only makes a system call, which is allowed between fork and exec.
        unsafe { command.pre_exec(close_inherited) };
        command
    }

    /// Ends the processes that a killed userd or a killed server has left in the directory, and removes the socket and
    /// the files that have the process id of the server. Blocks until these processes have ended.
    pub fn end_leftover_processes(&self) -> Result<()> {
        // The script takes the rights to `pgdata` from the group, because PostgreSQL refuses to start if the group may
        // write there. Kubernetes lets the group write at each mount of a volume with `fsGroup`.
        let mut shell = self.command(Path::new("/bin/sh"), Stdio::null());
        shell.arg("-c").arg(format!(
            "{SHELL_FUNCTIONS}[ ! -d pgdata ] || chmod go= pgdata
            end_server; end_all . pgdata pgdata.new && rm -f pgdata/postmaster.pid {SOCKET_NAME} {SOCKET_NAME}.lock"
        ));
        let (mut wait, dir) = (Wait::begin(), self.path.display());
        let mut shell = shell.spawn().map_err(ClusterError::cannot("run", Path::new("/bin/sh")))?;
        while matches!(shell.try_wait(), Ok(None)) {
            wait.pause(self.should_go_on, None, || format!("the PostgreSQL left in {dir} stops"))
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

/// Returns whether clients could connect to a socket in the directory. The socket's path must be short, and must have
/// no line break and no comma, because a comma separates hosts in a connection string.
pub(super) fn can_have_socket(dir: &Path) -> bool {
    let bytes = dir.join(SOCKET_NAME).as_os_str().len();
    dir.to_str().is_some_and(|name| !name.contains([',', '\n'])) && bytes <= MAX_SOCKET_PATH_BYTES
}

/// Makes the directory `dir` for a cluster whose data are kept, or checks an existing `dir`. Makes sure that no other
/// account can enter it. Returns its path without links.
pub(super) fn make_or_check_dir(dir: &Path, account: Account) -> Result<PathBuf> {
    let dir = &path::absolute(dir).map_err(ClusterError::cannot("use", dir))?;
    let parent = dir.parent().unwrap_or(dir);
    let create =
        || fs::create_dir_all(dir).map_err(|why| bad_dir(dir, &format!("cannot be created ({why})")));
    let by_account = account.with_rights(|| account.check_may_enter(parent).map(|()| create()))?;
    let is_roots = || fs::metadata(dir).is_ok_and(|found| found.uid() == 0);
    match account.ids_to_switch_to().filter(|_| by_account.is_err() || is_roots()) {
        Some((uid, gid)) => {
            check_only_root_can_replace(dir)?;
            create()?;
            check_no_foreign_files(dir, &account)?;
            if dir.join("pgdata").exists() {
                account.check_owner(dir)?;
            }
            // Ignores an error, because `check_and_restrict_dir` reports a directory that is not the account's.
            let _ = lchown(dir, Some(uid), Some(gid));
        }
        None => by_account?,
    }
    account.with_rights(|| {
        // Syncs the parent, so that a new directory outlasts a power failure.
        let _ = File::open(parent).and_then(|parent| parent.sync_all());
        check_and_restrict_dir(fs::canonicalize(dir).map_err(ClusterError::cannot("read", dir))?, &account)
    })
}

/// Checks that only root can replace `dir` or one of its ancestors. Otherwise another user could put a link there, and
/// root would make or give away a directory at another place.
fn check_only_root_can_replace(dir: &Path) -> Result<()> {
    /// The bits of a mode that let the group and all other users write.
    const WRITE_BITS: u32 = 0o022;
    const STICKY_BIT: u32 = 0o1000;
    // Other users may write to an ancestor with the sticky bit, as `/tmp`, but cannot replace root's directory in it.
    let is_closed = |path: &Path, mode: u32| mode & WRITE_BITS == 0 || mode & STICKY_BIT != 0 || path == dir;
    let is_open = |path: &&Path| {
        let found = fs::symlink_metadata(path);
        found.is_ok_and(|found| !found.is_dir() || found.uid() != 0 || !is_closed(path, found.mode()))
    };
    let Some(open) = dir.ancestors().find(is_open) else { return Ok(()) };
    let why = "is a link or no directory, or others than root can change it";
    Err(bad_dir(dir, &format!("cannot be created or given away by root: {} {why}", open.display())))
}

/// Checks the directory, and sets its mode to 0700, so that no other account can enter it. Returns the directory.
fn check_and_restrict_dir(dir: PathBuf, account: &Account) -> Result<PathBuf> {
    if !can_have_socket(&dir) {
        return Err(bad_dir(&dir, "is too long for a socket, has a comma or a line break, or is not UTF-8"));
    }
    check_no_foreign_files(&dir, account)?;
    account.restrict_to_owner(&dir)?;
    check_no_foreign_links(&dir, account)?;
    Ok(dir)
}

/// Checks that the directory has no link that another user made while other users could still enter the directory.
fn check_no_foreign_links(dir: &Path, account: &Account) -> Result<()> {
    let is_foreign = |found: &Metadata| found.is_symlink() && found.uid() != account.uid && found.uid() != 0;
    let mut entries = fs::read_dir(dir).map_err(account.cannot("read", dir))?.flatten();
    match entries.find(|entry| entry.metadata().is_ok_and(|found| is_foreign(&found))) {
        Some(link) => Err(bad_dir(dir, &format!("has a link of another user ({:?})", link.file_name()))),
        None => Ok(()),
    }
}

/// Checks that a directory has a cluster, or at most files that a failed start has left: userd must not use a directory
/// with files of other programs.
fn check_no_foreign_files(dir: &Path, account: &Account) -> Result<()> {
    /// The beginnings of the names that a directory may have before it has a cluster.
    const ALLOWED_NAME_PREFIXES: [&str; 5] = ["pgdata", "postgres.log", "lock", ".s.PGSQL.", "lost+found"];
    let entries = fs::read_dir(dir).map_err(account.cannot("read", dir))?;
    let mut names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_foreign = |name: &String| !ALLOWED_NAME_PREFIXES.iter().any(|allowed| name.starts_with(allowed));
    match names.find(is_foreign).filter(|_| !dir.join("pgdata").exists()) {
        Some(name) => {
            Err(bad_dir(dir, &format!("is neither empty nor a cluster of userd's (it has {name:?})")))
        }
        None => Ok(()),
    }
}

/// Returns the error for a directory that cannot be used.
fn bad_dir(dir: &Path, why: &str) -> ClusterError {
    ClusterError::new(format!("{} {why}: choose another directory (--embedded=DIR)", dir.display()))
}
