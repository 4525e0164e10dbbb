//! A private PostgreSQL cluster, run from the server programs that this machine already has.
//!
//! Owns: one directory and the server process in it, from `initdb` to the last signal. Must not know:
//! HTTP, tables, pools, the command line, who installs the logger.
//!
//! The directory: `pgdata` (the cluster), `postgres.log` (the server's log), `lock` (held by the
//! one userd that runs), the server's Unix socket. The server listens nowhere else, and only the
//! account that runs it can enter the directory; so there are no passwords. It is in a process group
//! of its own: Ctrl-C reaches userd alone, which drains first and stops the server then.

mod account;
mod directory;
mod error;
mod joined;
mod processes;
mod programs;
mod recovery;
mod shared;
mod watcher;

use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::db::{explain, scratch};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use directory::{ClusterDir, LOCK_WAIT, PORT, UNFINISHED_PGDATA};
use processes::{PidFile, end};
use programs::Programs;
use watcher::Watcher;

pub use account::Account;
pub use error::ClusterError;
pub use joined::{Joined, socket_dir};
pub(crate) use shared::{Shared, can_share};

/// How long a start may take by default: recovery after a crash replays the log, `initdb` syncs files.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a fast shutdown may take by default, before the server is told to stop at once.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(10);

const POLL: Duration = Duration::from_millis(5);
/// Between connections to a server that says it is ready: each refusal is a line in its log.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);

/// What kind of cluster, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the cluster lives; created (mode 0700) when missing. One userd at a time.
    pub dir: PathBuf,
    /// `false`: a temporary cluster for tests. Nothing is synced to disk, and server and directory are
    /// gone as soon as the `Cluster` is dropped or this process ends, however it ends.
    pub durable: bool,
    /// The directory of `initdb` and `postgres`, and no other is used. `None`: the one that the variable `POSTGRES_BIN`
    /// names, or else what is found on this machine.
    pub programs: Option<PathBuf>,
    /// The server's `max_connections`, at least 1.
    pub max_connections: u32,
    /// Bytes of the server's `shared_buffers`; `None`: as the cluster's own configuration has it, at first 128 MB.
    pub shared_buffers: Option<u64>,
    /// Bound on [`Cluster::start`], see there.
    pub start_timeout: Duration,
    /// Bound on a fast shutdown, see [`Cluster::stop`].
    pub stop_timeout: Duration,
}

impl Options {
    /// A durable cluster in `dir` with 100 connections and the default time-outs.
    pub fn new(dir: impl Into<PathBuf>) -> Options {
        Options {
            dir: dir.into(),
            durable: true,
            programs: None,
            max_connections: 100,
            shared_buffers: None,
            start_timeout: START_TIMEOUT,
            stop_timeout: STOP_TIMEOUT,
        }
    }
}

/// A running server. Dropping it stops the server as [`Cluster::stop`] does.
///
/// If this process is killed, a durable cluster's server stays; the next start stops it and goes on.
#[derive(Debug)]
pub struct Cluster {
    server: Child,
    is_new: bool,
    stopped: bool,
    stop_timeout: Duration,
    // The order of these two matters: the directory is removed while its lock is still held.
    watcher: Option<Watcher>,
    directory: ClusterDir,
}

impl Cluster {
    /// A cluster that accepts connections, made first if the directory has none. A server that a killed
    /// userd left behind is stopped. PostgreSQL runs as the current user, or under root as [`Account::find`] has it.
    ///
    /// Blocks for up to `start_timeout`, plus what stopping a server left behind takes, and up to
    /// 30 s for the remains of a userd that was killed a moment ago. After an error nothing is running.
    ///
    /// # Errors
    /// One line saying what to do: PostgreSQL, its right version or the `postgres` user missing; its programs not to be
    /// entered or not starting; the directory unusable, not ours, or in use; `initdb` or the server failing, with its last
    /// word.
    pub fn start(options: &Options) -> Result<Cluster, ClusterError> {
        let account = Account::find(options.durable)?;
        Cluster::start_in(ClusterDir::open(&options.dir, account, LOCK_WAIT)?, options, |directory| {
            match options.durable {
                true => Ok(None),
                false => Watcher::spawn(directory, None).map(Some),
            }
        })
    }

    fn start_in(
        directory: ClusterDir,
        options: &Options,
        spawn_watcher: impl FnOnce(&ClusterDir) -> Result<Option<Watcher>, ClusterError>,
    ) -> Result<Cluster, ClusterError> {
        let pgdata = directory.pgdata();
        recovery::clear(&directory, options.stop_timeout)?;
        directory.claim(options.durable)?;
        let mut watcher = spawn_watcher(&directory)?;
        let wanted = directory.cluster_major()?;
        let programs = Programs::find(options.programs.as_deref(), wanted, &directory.account)?;
        let deadline = Instant::now() + options.start_timeout;
        let is_new = !pgdata.exists();
        if is_new {
            let major = programs.major;
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            let made = initialize(&directory, &programs, &mut watcher, options.durable, deadline);
            if let Some(watcher) = &mut watcher {
                watcher.forget();
            }
            made?;
        }
        let mut said = directory.log_length();
        let mut cluster = Cluster {
            server: launch(&directory, &programs, &mut watcher, options)?,
            is_new,
            stopped: false,
            stop_timeout: options.stop_timeout,
            watcher,
            directory,
        };
        while let Err(error) = cluster.wait_until_ready(said, deadline) {
            // Sessions outlive a postmaster that was killed until they notice, and the server starts
            // only when they are gone. It has no code for this, only this text (`lc_messages=C`).
            let sessions_left = error.message.contains("pre-existing shared memory block");
            if !sessions_left || Instant::now() >= deadline {
                return Err(error);
            }
            recovery::end_sessions(&cluster.directory)?;
            thread::sleep(CONNECT_PAUSE);
            said = cluster.directory.log_length();
            cluster.server = launch(&cluster.directory, &programs, &mut cluster.watcher, options)?;
        }
        if is_new && programs.major < 15 {
            cluster.close_schemas()?;
        }
        log::info!(
            "PostgreSQL {} (process {}) serves {}, socket in {}",
            programs.major,
            cluster.pid(),
            pgdata.display(),
            cluster.directory.socket_dir
        );
        Ok(cluster)
    }

    /// What psql and the `postgres` crate need to connect to `database` as the superuser `postgres`:
    /// `host='/dir' port=5432 user=postgres dbname='…'`. The database `postgres` is always there.
    pub fn connection_string(&self, database: &str) -> String {
        scratch::connection_string(&self.directory.socket_dir, PORT, database)
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Whether this start has made the cluster.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Looks after a running server, about once a second: keeps its log within bounds. Returns a line that says how
    /// the server ended, where it did so by itself. Does not block.
    pub fn ended(&mut self) -> Option<String> {
        if let Err(error) = self.directory.bound_log() {
            log::warn!("{error}");
        }
        let status = exit_status(&mut self.server).ok()??;
        let (pid, log) = (self.pid(), self.directory.log_path());
        Some(format!("PostgreSQL (process {pid}) has ended ({status}); see {}", log.display()))
    }

    /// Ends every session and stops the server; a temporary cluster's directory is removed.
    ///
    /// Blocks for a fast shutdown of up to `stop_timeout`, then an immediate one (6 s), then SIGKILL
    /// (2 s). What was committed is safe in every case. A temporary cluster is stopped at once.
    ///
    /// # Errors
    /// The server's process outlived even SIGKILL.
    pub fn stop(mut self) -> Result<(), ClusterError> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<(), ClusterError> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        let fast = (Signal::SIGINT, self.stop_timeout);
        let gentle = self.watcher.is_none().then_some(fast);
        let pid = self.pid();
        // An error means that another thread reaped the child: it has ended all the same.
        let server = &mut self.server;
        if !end(pid.cast_signed(), gentle, || !matches!(server.try_wait(), Ok(None))) {
            let text = format!("PostgreSQL (process {pid}) could not be stopped, not even by SIGKILL");
            return Err(ClusterError::new(text));
        }
        if let Some(watcher) = &mut self.watcher {
            watcher.forget();
        }
        log::info!("PostgreSQL (process {pid}) has stopped");
        Ok(())
    }

    /// Only a superuser may create in the schema `public`, as it is by itself from version 15 on.
    fn close_schemas(&self) -> Result<(), ClusterError> {
        for database in ["template1", "postgres"] {
            scratch::close_schema(&self.connection_string(database)).map_err(|error| {
                ClusterError::new(format!("cannot set up {database}: {}", explain(&error)))
            })?;
        }
        Ok(())
    }

    fn wait_until_ready(&mut self, said: u64, deadline: Instant) -> Result<(), ClusterError> {
        let pgdata = self.directory.pgdata();
        let mut refusal = None;
        loop {
            if let Some(status) = exit_status(&mut self.server)? {
                return Err(failed("PostgreSQL", status, &self.directory, said));
            }
            // Asked before it says "ready", the server would log a refusal each time.
            let ready = |file: PidFile| file.ready && file.pid.cast_unsigned() == self.pid();
            let mut pause = POLL;
            if PidFile::read(&pgdata).is_some_and(ready) {
                match scratch::answers(self.connection_string("postgres"), deadline) {
                    Ok(()) => return Ok(()),
                    Err(error) => refusal = Some(error),
                }
                pause = CONNECT_PAUSE;
            }
            if Instant::now() >= deadline {
                let log = self.directory.log_path();
                let last = refusal.unwrap_or_else(|| self.directory.last_word(said));
                return Err(ClusterError::new(format!(
                    "PostgreSQL was not ready in time: {last}; see {}",
                    log.display()
                )));
            }
            thread::sleep(pause);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.shut_down() {
            log::warn!("{error}");
        }
    }
}

/// `DIR/pgdata`, complete or not there at all: made as `pgdata.new` and renamed.
fn initialize(
    directory: &ClusterDir,
    programs: &Programs,
    watcher: &mut Option<Watcher>,
    durable: bool,
    deadline: Instant,
) -> Result<(), ClusterError> {
    let new = directory.dir.join(UNFINISHED_PGDATA);
    let run = |locale: &str, watcher: &mut Option<Watcher>| {
        directory.remove(&new)?;
        let said = directory.log_length();
        let mut command = directory.command(&programs.initdb)?;
        // By its name in the directory, whatever that is called meanwhile: a watcher that was not told of this initdb,
        // because userd was killed before, moves the directory away, and initdb removes what it made as it fails.
        command.args(["-D", UNFINISHED_PGDATA, "-U", "postgres", "--auth=trust", "-E", "UTF8", locale]);
        command.args((!durable).then_some("--no-sync"));
        // initdb keeps the lock: if userd is killed, the next one waits until initdb has ended.
        command.stdin(directory.lock_handle()?);
        let mut child = command.spawn().map_err(ClusterError::io("run", &programs.initdb))?;
        watch(watcher, &child);
        loop {
            match exit_status(&mut child)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(failed("initdb", status, directory, said)),
                None if Instant::now() >= deadline => {
                    // The whole group: initdb runs the server as its child.
                    let _ = kill(Pid::from_raw(-child.id().cast_signed()), Signal::SIGKILL);
                    let _ = child.wait();
                    return Err(ClusterError::new("initdb did not end in time; is the disk very slow?"));
                }
                None => thread::sleep(POLL),
            }
        }
    };
    // C.UTF-8 knows upper and lower case of every letter; C, which every system has, of a-z only.
    if let Err(error) = run("--locale=C.UTF-8", watcher) {
        if let Some(remedy) = directory.account.unknown_to_system() {
            return Err(ClusterError::new(format!("{error}; {remedy}")));
        }
        if Instant::now() >= deadline {
            return Err(error);
        }
        log::warn!("{error}; trying without a locale");
        run("--no-locale", watcher)?;
    }
    let pgdata = directory.pgdata();
    fs::rename(&new, &pgdata).map_err(ClusterError::io("rename to", &pgdata))?;
    directory.sync()
}

/// The server, started; not yet ready.
fn launch(
    directory: &ClusterDir,
    programs: &Programs,
    watcher: &mut Option<Watcher>,
    options: &Options,
) -> Result<Child, ClusterError> {
    let socket_dir = directory.socket_dir.replace('"', "\"\"");
    let socket_dir = format!("unix_socket_directories=\"{socket_dir}\"");
    let connections = format!("max_connections={}", options.max_connections);
    let buffers = options.shared_buffers.map(|bytes| format!("shared_buffers={}kB", bytes >> 10));
    let mut settings = vec![
        &*socket_dir,
        &*connections,
        "listen_addresses=",
        "unix_socket_permissions=0700",
        "superuser_reserved_connections=0", // everybody is superuser here
        "lc_messages=C",
        // No values of users' records in the log: userd reports what goes wrong.
        "log_error_verbosity=terse",
        "log_min_error_statement=panic",
        // Nor a line for each statement that is refused: clients of the service could fill the disk.
        "log_min_messages=log",
    ];
    settings.extend(buffers.as_deref());
    if !options.durable {
        settings.extend([
            "fsync=off",
            "synchronous_commit=off",
            "full_page_writes=off",
            // In the directory: a server that is killed would leave what it has in /dev/shm there.
            "dynamic_shared_memory_type=mmap",
        ]);
    }
    let mut command = directory.command(&programs.postgres)?;
    command.arg("-D").arg(directory.pgdata()).args(["-p", PORT]);
    command.args(settings.into_iter().flat_map(|setting| ["-c", setting]));
    let server = command.spawn().map_err(ClusterError::io("run", &programs.postgres))?;
    watch(watcher, &server);
    Ok(server)
}

fn watch(watcher: &mut Option<Watcher>, child: &Child) {
    if let Some(watcher) = watcher {
        watcher.watch(child.id());
    }
}

fn exit_status(child: &mut Child) -> Result<Option<ExitStatus>, ClusterError> {
    child.try_wait().map_err(|error| ClusterError::new(format!("cannot wait for PostgreSQL: {error}")))
}

fn failed(program: &str, status: ExitStatus, directory: &ClusterDir, said: u64) -> ClusterError {
    let (last, log) = (directory.last_word(said), directory.log_path());
    let last = directory.space_is_short().unwrap_or(last);
    ClusterError::new(format!("{program} failed ({status}): {last}; see {}", log.display()))
}
