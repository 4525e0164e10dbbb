//! One throw-away server for all processes of a user that want one at the same time, such as the tests of a run. The first
//! process starts it; it is gone some seconds after the last of them has ended, however it ended.
//!
//! Each process has a shared lock of the file `users` for as long as it uses the server. A shell, which outlives the process
//! that started it, removes the server once nothing has such a lock.

use super::directory::{self, ClusterDir, PROCESSES};
use super::initdb::initialize;
use super::server::{self, ServerProcess};
use super::{Account, ClusterError, Result, Wait, connect, programs};
use nix::sys::statvfs::{Statvfs, statvfs};
use nix::unistd::Uid;
use postgres::Client;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Version of the layout of the server's directory. It is a part of the directory's name, so that an incompatible userd
/// starts a server of its own.
const LAYOUT_VERSION: u32 = 6;

/// Bytes that are free where the server is made, unless it can be made nowhere else: for a cluster of 60 MB, some 8 MB a
/// database, and the write-ahead log.
const SPACE_NEEDED: u64 = 2 << 30;

/// Time in which a server that says that it accepts connections has to accept one.
const MAX_WITHOUT_SHARE: Duration = Duration::from_secs(60);

/// Settings of a server whose data are not kept.
const THROWN_AWAY: [&str; 7] = [
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "restart_after_crash=off",
    "shared_buffers=128MB",
    // Shared memory is in the directory, as a server that is killed would leave it in /dev/shm.
    "dynamic_shared_memory_type=mmap",
    // The session of a process that was killed ends amid its query. Version 13 has no such setting.
    "client_connection_check_interval=1s",
];

/// A share in the server, until it is dropped.
pub struct Shared {
    /// Directory of the server's socket.
    pub dir: PathBuf,
    /// Directory of the server's programs.
    pub programs: PathBuf,
    /// Session of a superuser in the database `postgres`.
    pub client: Client,
    /// The lock of the file `users`.
    _share: File,
}

impl Shared {
    /// Joins the server of the programs that `POSTGRES_BIN` names or that are found, or starts it, in the first directory
    /// that can be made. Their names begin with one of `prefixes`. Each installation has a server of its own.
    ///
    /// Blocks for some milliseconds, or for as long as the server starts or is removed.
    ///
    /// # Errors
    /// Errors of [`Cluster::open`](super::Cluster::open).
    pub fn join(prefixes: &[PathBuf], max_connections: u32) -> Result<Shared> {
        let account = Account::find(false)?;
        account.act(|| Shared::join_as(account, prefixes, max_connections))
    }

    fn join_as(account: Account, prefixes: &[PathBuf], max_connections: u32) -> Result<Shared> {
        let (programs, fingerprint) = programs::first(&account)?;
        let name = format!("{}-{}-{LAYOUT_VERSION}-{fingerprint}", Uid::effective(), account.uid);
        let dirs = prefixes.iter().map(|prefix| PathBuf::from(format!("{}-{name}", prefix.display())));
        let dirs: Vec<PathBuf> = dirs.filter(|dir| directory::takes_a_socket(dir)).collect();
        let (mut wait, mut last_progress) = (Wait::begin(), Instant::now());
        loop {
            let share = |dir: &PathBuf| Some((dir.clone(), share(dir, &account)?));
            if let Some((dir, (client, _share))) = dirs.iter().find_map(share) {
                if let Some(directory) = ClusterDir::lock(&dir, account, |_| true)? {
                    // The directory is not locked: the shell that kept the server was killed.
                    keep(&directory)?;
                }
                return Ok(Shared { dir, programs, client, _share });
            }
            let dir = make(&dirs, &account)?;
            let locked = ClusterDir::lock(&dir, account, |_| true)?;
            if let Some(directory) = locked.filter(ClusterDir::is_there) {
                let starts = keep(&directory)?;
                // If there is a cluster, its server and its shell were killed: the new shell removes it.
                if !directory.pgdata().exists() {
                    let major = programs::version(&programs, &account)?;
                    initialize(&directory, &programs, &["--no-sync"])?;
                    let settings = if major >= 14 { &THROWN_AWAY[..] } else { &THROWN_AWAY[..6] };
                    let mut server = ServerProcess::start(&directory, &programs, max_connections, settings)?;
                    log::info!("PostgreSQL {major} serves {}", dir.display());
                    thread::spawn(move || server.child.wait());
                }
                drop(starts);
            }
            if !server::is_ready(&dir) {
                last_progress = Instant::now();
            }
            if last_progress.elapsed() >= MAX_WITHOUT_SHARE {
                return Err(directory::in_use(&dir));
            }
            wait.pause(|_| true, None, || format!("the PostgreSQL in {} starts or stops", dir.display()))?;
        }
    }
}

/// Starts a shell that keeps the server, from the end of its standard input on, for as long as a process has a share, and
/// then removes the directory. It holds the lock of the directory. Returns its standard input.
fn keep(directory: &ClusterDir) -> Result<Option<ChildStdin>> {
    let script = format!("{PROCESSES}\nread -r end\nkeep \"$1\"");
    let lock = directory.lock.try_clone().map_err(ClusterError::io("lock", &directory.dir))?;
    let mut shell = directory.command(Path::new("/bin/sh"), lock);
    shell.args(["-c", &script, "userd-postgres"]).arg(&directory.dir).stdin(Stdio::piped());
    let mut shell = shell.spawn().map_err(ClusterError::io("run", Path::new("/bin/sh")))?;
    let input = shell.stdin.take();
    thread::spawn(move || shell.wait());
    Ok(input)
}

/// Takes a share in the server in `dir`, and connects. `None` if there is no server, or if it is starting or ending. If
/// another user has made the directory, its server is told nothing.
fn share(dir: &Path, account: &Account) -> Option<(Client, File)> {
    let users = account.keeps_private(dir).then(|| account.open(&dir.join("users")))?.ok()?;
    users.try_lock_shared().ok()?;
    Some((connect(dir).ok()?, users))
}

/// Returns the first directory that the account has, or that it can make. A directory that another user has put there
/// is passed over.
fn make(dirs: &[PathBuf], account: &Account) -> Result<PathBuf> {
    let is_usable = |dir: &&PathBuf| {
        let found = statvfs(dir.parent().unwrap_or(dir));
        let has_space = |found: Statvfs| found.blocks_available() * found.fragment_size() >= SPACE_NEEDED;
        account.keeps_private(dir) || found.is_ok_and(has_space) || Some(*dir) == dirs.last()
    };
    for dir in dirs.iter().filter(is_usable) {
        if account.makes_private(dir) {
            return Ok(dir.clone());
        }
    }
    let why = format!("no directory for a PostgreSQL that is thrown away: none of {dirs:?} can be made");
    Err(ClusterError::new(why))
}
