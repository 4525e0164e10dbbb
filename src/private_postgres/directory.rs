//! The directory of a server: made, checked, locked; its log; and the processes that a killed userd left in it. Has
//! `pgdata` (the cluster), `postgres.log`, `lock` (held by the userd that runs the server) and the socket.

use super::{Account, ClusterError, LOCK_WAIT, POLL, PORT, end, ready};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File, Metadata, Permissions, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::thread;
use std::time::Instant;

/// The longest path of a socket: `sun_path` without its final NUL.
const SOCKET_PATH_MAX: usize = 107;
/// Size from which on a start puts `postgres.log` aside.
const LOG_MAX_BYTES: u64 = 8 << 20;

/// Prints the processes of PostgreSQL that work in `$1`. Run by PostgreSQL's own account, which sees where its processes
/// are; root in a container may not.
const PROCESSES: &str = r#"
    for process in /proc/[0-9]*; do
        if [ "$process/cwd" -ef "$1" ] && read -r name <"$process/comm"; then
            case $name in *postgres*) echo "${process##*/}" ;; esac
        fi
    done 2>/dev/null"#;

/// A directory that this process has locked, until it is dropped.
#[derive(Debug)]
pub(super) struct ClusterDir {
    pub dir: PathBuf,
    pub account: Account,
    lock: File,
}

impl ClusterDir {
    /// Locks the directory. `None`: another process has locked it, or is just removing it.
    pub fn lock(dir: &Path, account: Account) -> Result<Option<ClusterDir>, ClusterError> {
        let path = dir.join("lock");
        let mut file = match account.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(ClusterError::io("open", &path))?,
        };
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(ClusterError::io("lock", &path)(error)),
            Ok(()) => {}
        }
        // The file may have been removed before it was locked.
        let inode = |found: Metadata| (found.dev(), found.ino());
        let ours = file.metadata().map(inode).map_err(ClusterError::io("lock", &path))?;
        if fs::symlink_metadata(&path).ok().map(inode) != Some(ours) {
            return Ok(None);
        }
        let written = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        written.map_err(ClusterError::io("lock", &path))?;
        Ok(Some(ClusterDir { dir: dir.to_owned(), account, lock: file }))
    }

    /// Locks the directory. Waits for what a killed userd has left, which holds the lock until it ends.
    pub fn wait_for_lock(dir: &Path, account: Account) -> Result<ClusterDir, ClusterError> {
        let deadline = Instant::now() + LOCK_WAIT;
        loop {
            if let Some(directory) = ClusterDir::lock(dir, account)? {
                return Ok(directory);
            }
            let holder = holder(dir).parse().unwrap_or(0);
            let is_alive = holder > 0 && kill(Pid::from_raw(holder), None) != Err(Errno::ESRCH);
            if is_alive || Instant::now() >= deadline {
                return Err(in_use(dir));
            }
            thread::sleep(POLL);
        }
    }

    /// Returns a second handle of the lock, which holds it as long as any of them is open.
    pub fn lock_handle(&self) -> Result<Stdio, ClusterError> {
        self.lock.try_clone().map(Stdio::from).map_err(ClusterError::io("share the lock of", &self.dir))
    }

    pub fn pgdata(&self) -> PathBuf {
        self.dir.join("pgdata")
    }

    /// Opens the log, and returns its length. One that has grown is put aside.
    pub fn log(&self) -> Result<(File, u64), ClusterError> {
        let path = self.dir.join("postgres.log");
        if fs::symlink_metadata(&path).is_ok_and(|found| found.len() > LOG_MAX_BYTES) {
            let aside = path.with_extension("log.old");
            fs::rename(&path, &aside).map_err(ClusterError::io("write", &aside))?;
        }
        let mut log = self.account.open(&path).map_err(ClusterError::io("open", &path))?;
        let length = log.seek(SeekFrom::End(0)).map_err(ClusterError::io("read", &path))?;
        Ok((log, length))
    }

    /// A program that is run as the account, in a process group of its own.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = self.account.command(program);
        command.current_dir(&self.dir).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Ends the server and the sessions that a killed userd or a killed server left, and removes the files that name
    /// them. Blocks as [`end`] does.
    pub fn clear(&self) -> Result<(), ClusterError> {
        let pgdata = self.pgdata();
        let processes = || {
            let mut shell = self.account.command("/bin/sh");
            let output = shell.args(["-c", PROCESSES, "sh"]).arg(&pgdata).current_dir("/").output();
            let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            let text = text.unwrap_or_default();
            text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>()
        };
        if !processes().is_empty() {
            log::warn!("ending the PostgreSQL that a killed userd left in {}", pgdata.display());
        }
        let signal = |signal| {
            let server = ready(&self.dir);
            let is_meant = |pid: &i32| signal != Signal::SIGINT || server.is_none_or(|server| server == *pid);
            for pid in processes().into_iter().filter(is_meant) {
                let _ = kill(Pid::from_raw(pid), signal);
            }
        };
        if !end(signal, || processes().is_empty()) {
            let text = format!("PostgreSQL still runs in {}, not even SIGKILL ends it", pgdata.display());
            return Err(ClusterError::new(text));
        }
        let socket = format!(".s.PGSQL.{PORT}");
        for name in ["pgdata/postmaster.pid", &socket, &format!("{socket}.lock")] {
            let _ = fs::remove_file(self.dir.join(name));
        }
        Ok(())
    }
}

impl Drop for ClusterDir {
    fn drop(&mut self) {
        // The next process waits for programs that hold the lock longer, such as an `initdb` with its children.
        let _ = self.lock.set_len(0);
    }
}

/// Returns an error with the last lines that a program has said.
pub(super) fn failed(what: &str, said: &str) -> ClusterError {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(4)..].join("; ");
    ClusterError::new(format!("{what}: {}", if last.is_empty() { "it said nothing" } else { &last }))
}

/// Returns an error with the last lines of a log, behind this length.
pub(super) fn failed_with(what: &str, log: &File, length: u64) -> ClusterError {
    let mut bytes = vec![0; 4096];
    let end = log.metadata().map_or(0, |found| found.len());
    let read = log.read_at(&mut bytes, length.max(end.saturating_sub(4096))).unwrap_or(0);
    failed(what, &String::from_utf8_lossy(&bytes[..read]))
}

fn holder(dir: &Path) -> String {
    fs::read_to_string(dir.join("lock")).unwrap_or_default().trim().to_owned()
}

/// Returns the error for a directory that another process has locked.
pub(super) fn in_use(dir: &Path) -> ClusterError {
    let by = match holder(dir).as_str() {
        "" => "what another userd has left running".to_owned(),
        holder => format!("another userd (process {holder})"),
    };
    ClusterError::new(format!("{} is in use by {by}", dir.display()))
}

/// Returns whether a socket in the directory has a name that is short enough, and that connection strings can have: a
/// comma separates hosts there.
pub(super) fn takes_a_socket(dir: &Path) -> bool {
    let length = dir.as_os_str().len() + format!("/.s.PGSQL.{PORT}").len();
    dir.to_str().is_some_and(|name| !name.contains([',', '\n'])) && length <= SOCKET_PATH_MAX
}

/// Makes a directory for a cluster that is kept, of mode 0700 and the account's, or checks the one that is there.
/// Returns its real name.
pub(super) fn make(dir: &Path, account: &Account) -> Result<PathBuf, ClusterError> {
    let other = "choose another directory (--embedded=DIR)";
    let refuse = |why: String| Err(ClusterError::new(format!("{} {why}: {other}", dir.display())));
    let absolute = path::absolute(dir).map_err(ClusterError::io("use", dir))?;
    if !absolute.exists() {
        let parent = absolute.parent().unwrap_or(&absolute);
        let uncreatable =
            |error| ClusterError::new(format!("{}; {other}", ClusterError::io("create", &absolute)(error)));
        fs::create_dir_all(parent).map_err(uncreatable)?;
        account.check_way(&fs::canonicalize(parent).map_err(ClusterError::io("read", parent))?)?;
        match fs::create_dir(&absolute) {
            // So that it outlasts a power failure.
            Ok(()) => drop(File::open(parent).and_then(|parent| parent.sync_all())),
            // Another process has made it.
            Err(_) if absolute.is_dir() => {}
            Err(error) => return Err(uncreatable(error)),
        }
    }
    let dir = fs::canonicalize(&absolute).map_err(ClusterError::io("read", dir))?;
    account.check_way(dir.parent().unwrap_or(&dir))?;
    if !takes_a_socket(&dir) {
        return refuse("is too long a name for a socket in it, or has a comma or a line break".to_owned());
    }
    if !dir.is_dir() {
        return refuse("is not a directory".to_owned());
    }
    let entries = fs::read_dir(&dir).map_err(ClusterError::io("read", &dir))?;
    let names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
    let is_ours = |name: &str| {
        ["pgdata.new", "postgres.log", "lock", ".s.PGSQL.", "lost+found"]
            .iter()
            .any(|ours| name.starts_with(ours))
    };
    if !dir.join("pgdata").exists()
        && let Some(foreign) = names.iter().find(|name| !is_ours(&name.to_string_lossy()))
    {
        return refuse(format!("is neither empty nor a cluster of userd's (it has {foreign:?})"));
    }
    account.take_over(&dir).map_err(ClusterError::io("change the owner of", &dir))?;
    account.check_owner(&dir)?;
    let private = fs::set_permissions(&dir, Permissions::from_mode(0o700));
    private.map_err(ClusterError::io("make private", &dir))?;
    Ok(dir)
}
