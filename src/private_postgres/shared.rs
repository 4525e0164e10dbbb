//! One throw-away server for all processes of a user that run at the same time, as those of a test run. The first
//! process starts the server. The server ends some seconds after the last of these processes has ended, even if they
//! were killed.
//!
//! Each process has a shared lock of the file `users` as long as it uses the server. A shell, which outlives the
//! process that has started the server, stops and removes the server once no process has such a lock.

use super::directory::{self, ClusterDir, SHELL_FUNCTIONS};
use super::initdb::make_cluster;
use super::server::ServerProcess;
use super::{Account, ClusterError, Result, Wait, connect, programs};
use nix::sys::statvfs::{Statvfs, statvfs};
use nix::unistd::Uid;
use postgres::Client;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Stdio};
use std::thread;
use std::time::Duration;

/// Version of the files in the server's directory. The directory's name has this number, so that a userd which expects
/// other files starts a server of its own.
const DIR_LAYOUT_VERSION: u32 = 6;

/// The fewest free bytes of a file system that is chosen for the server: a cluster takes 60 MB, a database some 8 MB,
/// and there is the write-ahead log. Only the last candidate may have less.
const MIN_FREE_BYTES: u64 = 2 << 30;

/// The most time that joining the shared server may take while another process starts or removes it.
const MAX_JOIN_WAIT: Duration = Duration::from_secs(60);

/// The further PostgreSQL settings of a server whose data are not kept: speed before safety.
const SCRATCH_SETTINGS: [&str; 7] = [
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "restart_after_crash=off",
    "shared_buffers=128MB",
    // Keeps shared memory in the server's directory: a killed server would leave its memory in /dev/shm for ever.
    "dynamic_shared_memory_type=mmap",
    // Ends the session of a killed client even while a query runs. PostgreSQL 13 has no such setting.
    "client_connection_check_interval=1s",
];

/// A process's connection to the shared server. The server runs at least until the value is dropped.
pub struct SharedServer {
    /// Directory of the server's socket.
    pub socket_dir: PathBuf,
    /// Directory of the server's programs.
    pub programs_dir: PathBuf,
    /// Session of a superuser in the database `postgres`.
    pub session: Client,
    /// The file `users`, on which this process has a shared lock. The server runs as long as a process has such a lock.
    _use_lock: File,
}

impl SharedServer {
    /// Connects to the shared server, or starts it in the first directory that can be made. The path of each directory
    /// begins with one of `dir_prefixes`. Each PostgreSQL that is installed has a shared server of its own, and an
    /// upgraded PostgreSQL has a new one.
    ///
    /// Blocks for some milliseconds if the server runs. Blocks up to a minute while the server is started or removed.
    ///
    /// # Errors
    /// Errors of [`Cluster::open`](super::Cluster::open).
    pub fn join(dir_prefixes: &[PathBuf], max_connections: u32) -> Result<SharedServer> {
        let account = Account::for_cluster(false)?;
        account.with_rights(|| SharedServer::join_as(account, dir_prefixes, max_connections))
    }

    /// Connects to the shared server, or starts it, as `account`. Must be called with the account's rights.
    fn join_as(account: Account, dir_prefixes: &[PathBuf], max_connections: u32) -> Result<SharedServer> {
        let (programs, major) = programs::find_programs(None, &account)?;
        let server =
            fs::metadata(programs.join("postgres")).map_err(ClusterError::cannot("read", &programs))?;
        let name =
            format!("{}-{}-{DIR_LAYOUT_VERSION}-{major}-{:x}", Uid::effective(), account.uid, server.ino());
        let dirs = dir_prefixes.iter().map(|prefix| PathBuf::from(format!("{}-{name}", prefix.display())));
        let dirs: Vec<PathBuf> = dirs.filter(|dir| directory::can_have_socket(dir)).collect();
        let mut wait = Wait::begin();
        loop {
            let join = |dir: &PathBuf| Some((dir.clone(), join_running_server(dir, &account)?));
            if let Some((socket_dir, (session, _use_lock))) = dirs.iter().find_map(join) {
                if let Some(directory) = ClusterDir::lock(&socket_dir, account, |_| true)? {
                    // The directory was not locked, so the shell that has to remove the server was killed. Starts
                    // another shell.
                    start_removal_shell(&directory)?;
                }
                return Ok(SharedServer { socket_dir, programs_dir: programs, session, _use_lock });
            }
            let dir = make_first_usable_dir(&dirs, &account)?;
            let locked = ClusterDir::lock(&dir, account, |_| true)?;
            if let Some(directory) = locked.filter(ClusterDir::is_at_its_path) {
                let remover_input = start_removal_shell(&directory)?;
                // If there is a cluster although no server runs, the server was killed. The new shell removes the
                // cluster, and a later turn of this loop makes a new one.
                if !directory.pgdata().exists() {
                    make_cluster(&directory, &programs, &["--no-sync"])?;
                    let settings = if major >= 14 { &SCRATCH_SETTINGS[..] } else { &SCRATCH_SETTINGS[..6] };
                    let mut server = ServerProcess::start(&directory, &programs, max_connections, settings)?;
                    log::info!("PostgreSQL {major} serves {}", dir.display());
                    thread::spawn(move || server.child.wait());
                }
                drop(remover_input);
            } else if wait.began_at.elapsed() >= MAX_JOIN_WAIT {
                return Err(directory::in_use_error(&dir));
            }
            wait.pause(|_| true, None, || format!("the PostgreSQL in {} starts or stops", dir.display()))?;
        }
    }
}

/// Starts a shell that stops the server and removes the directory once no process uses the server. The shell first
/// waits until the returned pipe is closed, by this process or by its death. The shell has the directory's lock until
/// it ends, so that no other process starts a server there.
fn start_removal_shell(directory: &ClusterDir) -> Result<Option<ChildStdin>> {
    let script = format!("{SHELL_FUNCTIONS}\nread -r end\nkeep \"$1\"");
    let lock = directory.lock_file.try_clone().map_err(ClusterError::cannot("lock", &directory.path))?;
    let mut shell = directory.command(Path::new("/bin/sh"), lock);
    shell.args(["-c", &script, "userd-postgres"]).arg(&directory.path).stdin(Stdio::piped());
    let mut shell = shell.spawn().map_err(ClusterError::cannot("run", Path::new("/bin/sh")))?;
    let input = shell.stdin.take();
    thread::spawn(move || shell.wait());
    Ok(input)
}

/// Connects to the server in the directory. Returns the session, and the file `users` with a shared lock: the server
/// runs as long as the file is open. Returns `None` if there is no server, or if the server starts or stops.
/// Never connects in a directory that another user has made: the server there could pretend to be ours.
fn join_running_server(dir: &Path, account: &Account) -> Option<(Client, File)> {
    let users = account.has_private_dir(dir).then(|| account.open_for_append(&dir.join("users")))?.ok()?;
    users.try_lock_shared().ok()?;
    Some((connect(dir).ok()?, users))
}

/// Returns the first directory that the account has or can make. Skips directories that another user has made.
fn make_first_usable_dir(dirs: &[PathBuf], account: &Account) -> Result<PathBuf> {
    let is_usable = |dir: &&PathBuf| {
        let found = statvfs(dir.parent().unwrap_or(dir));
        let has_space = |found: Statvfs| found.blocks_available() * found.fragment_size() >= MIN_FREE_BYTES;
        account.has_private_dir(dir) || found.is_ok_and(has_space) || Some(*dir) == dirs.last()
    };
    let made = dirs.iter().filter(is_usable).find(|dir| account.ensure_private_dir(dir)).cloned();
    let why = format!("no directory for a PostgreSQL that is thrown away: none of {dirs:?} can be made");
    made.ok_or(ClusterError::new(why))
}
