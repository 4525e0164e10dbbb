//! One throw-away server for all processes of a user that want one at the same time, such as the tests of a run. The first
//! process starts it; it ends some seconds after the last of them has, however it ended.
//!
//! A session counts the others, and ends the server once there are none. The connection that asks for it may be gone by
//! then: the server does not look.

use super::directory::{self, ClusterDir, failed_with};
use super::{Account, ClusterError, POLL, START_TIMEOUT};
use super::{arguments, connect, connection_string, programs, ready};
use nix::sys::statvfs::statvfs;
use nix::unistd::Uid;
use postgres::{Client, Error};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Instant;

/// Part of the directory's name: another number for each version that is not compatible.
const FORMAT: u32 = 4;

/// Bytes that are free where the server is made, unless it can be made nowhere else: for a cluster of 60 MB, some 8 MB a
/// database, and the write-ahead log.
const SPACE_NEEDED: u64 = 2 << 30;

/// Settings of a server whose data are not kept.
const THROWN_AWAY: [&str; 6] = [
    "fsync=off",
    "synchronous_commit=off",
    "full_page_writes=off",
    "restart_after_crash=off",
    // In the directory: a server that is killed would leave what it has in /dev/shm there.
    "dynamic_shared_memory_type=mmap",
    "client_connection_check_interval=1s",
];

/// Runs until no other session has been there for ten seconds. Each process that uses the server holds lock 1 shared.
const COUNT_SESSIONS: &str = "
    do $$
    declare idle int := 0;
    begin
        if not pg_try_advisory_lock(2) then return; end if;
        loop
            commit;
            perform pg_sleep(0.5);
            idle := idle + 1;
            if exists (select from pg_stat_activity
                       where backend_type = 'client backend' and pid <> pg_backend_pid()) then
                idle := 0;
            end if;
            exit when idle >= 20 and pg_try_advisory_lock(1);
        end loop;
        copy (select) to program 'read -r pid <postmaster.pid && kill -s INT \"$pid\"';
    end $$";

/// Returns whether a session counts, and whether this one has taken lock 1: not if the server is about to end.
const ENTER: &str = "
    with counting as (
        select exists (select from pg_locks where locktype = 'advisory' and objid = 2 and mode = 'ExclusiveLock'
            and database = (select oid from pg_database where datname = current_database())) as counts)
    select counts, case when counts then pg_try_advisory_lock_shared(1) else false end from counting";

/// A share in the server, until it is dropped.
pub struct Shared {
    dir: PathBuf,
    programs: PathBuf,
    /// Session of a superuser in the database `postgres`.
    pub client: Client,
}

impl Shared {
    /// Joins the server of the programs that `POSTGRES_BIN` names or that are found, or starts it, in the first directory
    /// that can be made. Their names begin with one of `prefixes`. Each installation has a server of its own.
    ///
    /// Blocks for some milliseconds, or for up to a minute if the server has to be started, or is ending.
    ///
    /// # Errors
    /// Errors of [`Cluster::start`](super::Cluster::start).
    pub fn join(prefixes: &[PathBuf], max_connections: u32) -> Result<Shared, ClusterError> {
        let account = Account::find(false)?;
        // Not found: the error says so.
        let programs = match programs::installations()?.into_iter().next() {
            Some(programs) => programs,
            None => programs::find(None, &account)?.0,
        };
        if programs::fingerprint(&programs).is_err() {
            // It says what is wrong with them.
            programs::version(&programs, &account)?;
        }
        let dirs = directories(prefixes, &programs, &account)?;
        let mut major = None;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(shared) = dirs.iter().find_map(|dir| Shared::enter(dir, &programs, &account)) {
                return Ok(shared);
            }
            let major = match major {
                Some(major) => major,
                None => *major.insert(programs::version(&programs, &account)?),
            };
            let dir = make(&dirs, &account)?;
            if let Some(directory) = ClusterDir::lock(&dir, account)? {
                return Shared::start(&directory, (&programs, major), max_connections, deadline);
            }
            if Instant::now() >= deadline {
                return Err(directory::in_use(&dir));
            }
            thread::sleep(POLL);
        }
    }

    /// Returns a string for psql and the `postgres` crate.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.dir, database)
    }

    /// Returns the directory of the server's socket.
    pub fn socket_dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the directory of the server's programs.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Connects to the server in `dir`. `None` if there is none, or if it is starting or ending. Another user could have
    /// made the directory, and would get all that is told to its server.
    fn enter(dir: &Path, programs: &Path, account: &Account) -> Option<Shared> {
        if !account.keeps_private(dir) || ready(dir).is_none() {
            return None;
        }
        let mut client = connect(dir, "postgres").ok()?;
        let row = client.query_one(ENTER, &[]).ok()?;
        if !row.get::<_, bool>(0) {
            count_sessions(dir);
        }
        row.get::<_, bool>(1).then(|| Shared { dir: dir.to_owned(), programs: programs.to_owned(), client })
    }

    fn start(
        directory: &ClusterDir,
        (programs, major): (&Path, u32),
        max_connections: u32,
        deadline: Instant,
    ) -> Result<Shared, ClusterError> {
        let (dir, account) = (&directory.dir, &directory.account);
        directory.clear()?;
        let (log, length) = directory.log()?;
        let mut command = directory.command(Path::new("/bin/sh"));
        command.args(["-c", include_str!("guard.sh"), "userd-postgres"]).arg(dir);
        command.args(["initdb", "postgres"].map(|name| programs.join(name)));
        // The session of a process that was killed ends amid its query. Version 13 has no such setting.
        let settings = if major >= 14 { &THROWN_AWAY[..] } else { &THROWN_AWAY[..5] };
        command.args(arguments(dir, max_connections, settings));
        command.stderr(log.try_clone().map_err(ClusterError::io("open", dir))?);
        command.stdin(Stdio::piped()).stdout(directory.lock_handle()?);
        let mut guard = command.spawn().map_err(ClusterError::io("run", Path::new("/bin/sh")))?;
        let stdin = guard.stdin.take();
        loop {
            if let Some(status) = guard.try_wait().ok().flatten() {
                return Err(failed_with(&format!("PostgreSQL failed ({status})"), &log, length));
            }
            if Instant::now() >= deadline {
                return Err(failed_with("PostgreSQL was not ready in time", &log, length));
            }
            if let Some(shared) = Shared::enter(dir, programs, account) {
                // It ends by itself from now on.
                let told = stdin.map_or(Ok(()), |mut stdin| stdin.write_all(b"\n"));
                told.map_err(ClusterError::io("keep the server in", dir))?;
                log::info!("PostgreSQL {} serves {}", major, dir.display());
                thread::spawn(move || guard.wait());
                return Ok(shared);
            }
            thread::sleep(POLL);
        }
    }
}

/// Has a session of the server count the other sessions, unless one does. The session outlives this process.
fn count_sessions(dir: &Path) {
    let dir = dir.to_owned();
    // If there is no thread, the next process tries it.
    let _ = thread::Builder::new().spawn(move || -> Result<(), Error> {
        let mut client = connect(&dir, "postgres")?;
        // Version 13 has no such setting, and does not look.
        let _ = client.batch_execute("set client_connection_check_interval = 0");
        client.batch_execute(COUNT_SESSIONS)
    });
}

/// Returns where the server of these programs may be: named by its user, its account, its programs and this version.
fn directories(
    prefixes: &[PathBuf],
    programs: &Path,
    account: &Account,
) -> Result<Vec<PathBuf>, ClusterError> {
    let programs = programs::fingerprint(programs).map_err(ClusterError::io("read", programs))?;
    let name = format!("{}-{}-{FORMAT}-{programs}", Uid::effective(), account.uid());
    let dirs = prefixes.iter().map(|prefix| PathBuf::from(format!("{}-{name}", prefix.display())));
    Ok(dirs.filter(|dir| directory::takes_a_socket(dir)).collect())
}

/// Returns the first directory that the account has, or that it can make. A directory that another user has put there
/// is passed over.
fn make(dirs: &[PathBuf], account: &Account) -> Result<PathBuf, ClusterError> {
    if let Some(dir) = dirs.iter().find(|dir| account.keeps_private(dir)) {
        return Ok(dir.clone());
    }
    let has_space = |dir: &Path| {
        let found = statvfs(dir.parent().unwrap_or(dir));
        found.is_ok_and(|found| found.blocks_available() * found.fragment_size() >= SPACE_NEEDED)
    };
    let mut problem = "a socket's name would be too long".to_owned();
    for (at, dir) in dirs.iter().enumerate() {
        if at + 1 < dirs.len() && !has_space(dir) {
            continue;
        }
        let made = account.command("mkdir").args(["-m", "700", "--"]).arg(dir).current_dir("/").output();
        let made = made.map_err(ClusterError::io("run mkdir for", dir))?;
        if account.keeps_private(dir) {
            return Ok(dir.clone());
        }
        problem = String::from_utf8_lossy(&made.stderr).into_owned();
    }
    Err(ClusterError::new(format!("no directory for a PostgreSQL that is thrown away: {problem}")))
}
