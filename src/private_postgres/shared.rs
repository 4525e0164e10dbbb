//! One throw-away server for all processes of a user that want one at the same time, such as the tests of a run. The first
//! process starts it; it is gone some seconds after the last of them has ended, however it ended.
//!
//! A session counts the others, and removes the server once there are none. It goes on after its connection is closed, as
//! the server does not check that. Until this session is there, a shell removes the server if this process ends.

use super::directory::{self, ClusterDir, PROCESSES};
use super::initdb::initialize;
use super::server::ServerProcess;
use super::{Account, ClusterError, Result, SOCKET, Wait, connect, programs};
use nix::sys::statvfs::{Statvfs, statvfs};
use nix::unistd::Uid;
use postgres::Client;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};
use std::{os::unix::net::UnixStream, thread};

/// Part of the directory's name: another number for each version that is not compatible.
const FORMAT: u32 = 5;

/// Bytes that are free where the server is made, unless it can be made nowhere else: for a cluster of 60 MB, some 8 MB a
/// database, and the write-ahead log.
const SPACE_NEEDED: u64 = 2 << 30;

/// Time in which a server that listens, and that no process is starting or removing, has to give a share.
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

/// Runs until no other session has been there for ten seconds. Each process that uses the server holds lock 1 shared.
const COUNT_SESSIONS: &str = "
    do $do$
    declare idle int := 0;
    begin
        if not pg_try_advisory_lock(2) then return; end if;
        loop
            commit;
            perform pg_sleep(0.5);
            select case count(*) when 0 then idle + 1 else 0 end into idle from pg_stat_activity
                where backend_type = 'client backend' and pid <> pg_backend_pid();
            exit when idle >= 20 and pg_try_advisory_lock(1);
        end loop;
        copy (select) to program 'cd .. && (PROCESSES remove \"$PWD\") </dev/null >/dev/null 2>&1 &';
    end $do$";

/// Returns whether a session counts the others, and whether this one has taken its share, lock 1: it cannot if the server is
/// about to end.
const TAKE_SHARE: &str = "
    select exists (select from pg_locks join pg_database d on d.oid = database and datname = current_database()
                   where locktype = 'advisory' and objid = 2 and mode = 'ExclusiveLock'),
        pg_try_advisory_lock_shared(1)";

/// A share in the server, until it is dropped.
pub struct Shared {
    /// Directory of the server's socket.
    pub dir: PathBuf,
    /// Directory of the server's programs.
    pub programs: PathBuf,
    /// Session of a superuser in the database `postgres`.
    pub client: Client,
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
        let name = format!("{}-{}-{FORMAT}-{fingerprint}", Uid::effective(), account.uid);
        let dirs = prefixes.iter().map(|prefix| PathBuf::from(format!("{}-{name}", prefix.display())));
        let dirs: Vec<PathBuf> = dirs.filter(|dir| directory::takes_a_socket(dir)).collect();
        let (mut wait, mut last_progress) = (Wait::begin(), Instant::now());
        let mut remover: Option<ChildStdin> = None;
        loop {
            let connected =
                dirs.iter().find_map(|dir| Some((connect_if_counted(dir, &account)?, dir.clone())));
            if let Some((client, dir)) = connected {
                if let Some(stdin) = &mut remover {
                    // From now on a session removes the directory.
                    stdin.write_all(b"\n").map_err(ClusterError::io("keep", &dir))?;
                }
                return Ok(Shared { dir, programs, client });
            }
            let dir = make(&dirs, &account)?;
            let is_dead = |locked: &ClusterDir| !accepts_connections(&dir) && locked.is_there();
            let locked = ClusterDir::lock(&dir, account, |_| true)?;
            if locked.is_none() {
                last_progress = Instant::now();
            }
            if let Some(directory) = locked.filter(is_dead) {
                let mut shell = remove_without_a_line(&directory)?;
                if directory.pgdata().exists() {
                    // The server was killed.
                    let _ = shell.wait();
                } else {
                    let major = programs::version(&programs, &account)?;
                    let settings = if major >= 14 { &THROWN_AWAY[..] } else { &THROWN_AWAY[..6] };
                    initialize(&directory, &programs, &["--no-sync"])?;
                    let mut server = ServerProcess::start(&directory, &programs, max_connections, settings)?;
                    log::info!("PostgreSQL {major} serves {}", dir.display());
                    thread::spawn(move || server.child.wait());
                    remover = shell.stdin.take();
                }
            }
            if last_progress.elapsed() >= MAX_WITHOUT_SHARE {
                return Err(directory::in_use(&dir));
            }
            wait.pause(|_| true, None, || format!("the PostgreSQL in {} starts or stops", dir.display()))?;
        }
    }
}

/// Starts a shell that removes the directory at the end of its standard input, unless there is a line. It holds the lock.
fn remove_without_a_line(directory: &ClusterDir) -> Result<Child> {
    let script = format!("read -r line && exit\n{PROCESSES}\nremove \"$1\"");
    let lock = directory.lock.try_clone().map_err(ClusterError::io("lock", &directory.dir))?;
    let mut shell = directory.command(Path::new("/bin/sh"), lock);
    shell.args(["-c", &script, "userd-postgres"]).arg(&directory.dir).stdin(Stdio::piped());
    shell.spawn().map_err(ClusterError::io("run", Path::new("/bin/sh")))
}

/// Connects to the server in `dir`, and takes a share. `None` if there is no server, or if it is starting or ending. If
/// another user has made the directory, its server is told nothing.
fn connect_if_counted(dir: &Path, account: &Account) -> Option<Client> {
    if !account.keeps_private(dir) {
        return None;
    }
    let mut client = connect(dir).ok()?;
    let row = client.query_one(TAKE_SHARE, &[]).ok()?;
    let (is_counted, has_share): (bool, bool) = (row.get(0), row.get(1));
    if !is_counted {
        count_sessions(dir);
    }
    (is_counted && has_share).then_some(client)
}

/// Returns whether a server listens, which may be starting, or have no session left.
fn accepts_connections(dir: &Path) -> bool {
    let connected = UnixStream::connect(dir.join(SOCKET));
    !connected.is_err_and(|error| [ErrorKind::NotFound, ErrorKind::ConnectionRefused].contains(&error.kind()))
}

/// Has a session of the server count the other sessions, unless one does. The session outlives this process.
fn count_sessions(dir: &Path) {
    let dir = dir.to_owned();
    let count = COUNT_SESSIONS.replace("PROCESSES", &PROCESSES.replace('\'', "''"));
    // If the thread cannot be started, the next process starts one.
    let _ = thread::Builder::new().spawn(move || -> std::result::Result<(), postgres::Error> {
        let mut client = connect(&dir)?;
        // Version 13 has no such setting, and does not look.
        let _ = client.batch_execute("set client_connection_check_interval = 0");
        client.batch_execute(&count)
    });
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
