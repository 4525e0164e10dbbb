//! A cluster that is kept: one directory and the server process in it, from `initdb` to the last signal.

use super::directory::{self, ClusterDir};
use super::{Account, ClusterError, POLL, PORT, Result, START_TIMEOUT, connect, connection_string, programs};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Settings of every server.
const SETTINGS: [&str; 10] = [
    "listen_addresses=",
    "unix_socket_directories=..", // from `pgdata`, which it works in
    "unix_socket_permissions=0700",
    "superuser_reserved_connections=0", // every session is a superuser's
    "lc_messages=C",
    // Keeps values of users' records out of the log: userd reports what goes wrong.
    "log_error_verbosity=terse",
    "log_min_error_statement=panic",
    // Logs neither refused statements nor checkpoints, which would fill the disk.
    "log_min_messages=log",
    "log_checkpoints=off",
    "log_autovacuum_min_duration=-1",
];

/// Appended to the `postgresql.conf` of a new cluster, where it can be edited: a service of users needs little, and
/// PostgreSQL's default of 128 MB is too much for a machine of 192 MB.
const CONFIGURATION: &str = "\n# Of userd\nshared_buffers = 24MB\n";

/// Bytes of the log that are read for an error: many times what a start says.
const MOST_SHOWN: u64 = 1 << 20;

/// A cluster that accepts connections. Dropping it ends every session and stops its server, if it was started here: what
/// was committed is safe. Blocks for a fast shutdown of up to 10 s, then an immediate one (6 s), then SIGKILL (2 s).
///
/// If this process is killed, the server stays; the next start stops it and goes on.
#[derive(Debug)]
pub struct Cluster {
    dir: PathBuf,
    /// The server is dropped first: the directory is locked until the server has stopped.
    started: Option<(ServerProcess, ClusterDir)>,
}

impl Cluster {
    /// Starts the cluster in `dir`, which is created (mode 0700) when missing, and the cluster made first if the directory
    /// has none. A server that a killed userd left behind is stopped. PostgreSQL runs as the current user, or under root as
    /// [`Account::find`] has it. `max_connections`: the server's, at least 1.
    ///
    /// Blocks for up to a minute, plus what stopping a server left behind takes. After an error nothing is running.
    ///
    /// # Errors
    /// One line saying what to do: PostgreSQL, its right version or the `postgres` user missing; its programs not to be
    /// entered or not starting; the directory unusable, not ours, or in use; `initdb` or the server failing, with the
    /// last lines of its log.
    pub fn start(dir: &Path, max_connections: u32) -> Result<Cluster> {
        Cluster::open(dir, Account::find(true)?, max_connections, false)
    }

    /// Connects to the server that another process runs in `dir`, or starts one as [`Cluster::start`] does. Root acts for
    /// the owner of the directory, so that nothing there becomes another's.
    ///
    /// Blocks for up to a minute, in which another process may be starting or stopping it.
    ///
    /// # Errors
    /// Errors of [`Cluster::start`].
    pub fn join(dir: &Path, max_connections: u32) -> Result<Cluster> {
        Cluster::open(dir, Account::owner_of(&directory::place(dir))?, max_connections, true)
    }

    fn open(dir: &Path, account: Account, max_connections: u32, joins: bool) -> Result<Cluster> {
        let dir = directory::make(dir, account)?;
        // A process that is being started has a copy of the lock for a moment.
        let deadline = Instant::now() + if joins { START_TIMEOUT } else { Duration::from_secs(1) };
        loop {
            if let Some(directory) = ClusterDir::lock(&dir, account)? {
                return Cluster::start_in(directory, max_connections);
            }
            if joins && connect(&dir).is_ok() {
                return Ok(Cluster { dir, started: None });
            }
            if Instant::now() >= deadline {
                return Err(directory::in_use(&dir));
            }
            thread::sleep(POLL * 10);
        }
    }

    fn start_in(directory: ClusterDir, max_connections: u32) -> Result<Cluster> {
        let (dir, pgdata) = (directory.dir.clone(), directory.pgdata());
        directory.clear()?;
        let is_new = !pgdata.exists();
        let wanted = if is_new { None } else { Some(major(&directory)?) };
        let (programs, major) = programs::find(wanted, &directory.account)?;
        if is_new {
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            initialize(&directory, &programs, &[])?;
        }
        let server = ServerProcess::start(&directory, &programs, max_connections, &[])?;
        if is_new {
            // Only a superuser may create in the schema, as it is by itself from version 15 on.
            const CLOSE: &str = "revoke create on schema public from public";
            let closed = connect(&dir).and_then(|mut client| client.batch_execute(CLOSE));
            closed.map_err(|error| ClusterError::new(format!("cannot set up the database: {error}")))?;
        }
        let (pid, place) = (server.0.id(), dir.display());
        log::info!("PostgreSQL {major} (process {pid}) serves {}, socket in {place}", pgdata.display());
        Ok(Cluster { dir, started: Some((server, directory)) })
    }

    /// Returns what psql and the `postgres` crate need to connect to `database` as the superuser `postgres`:
    /// `host='/dir' port=5432 user=postgres dbname='…'`. The database `postgres` is always there.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.dir, database)
    }

    /// Returns the server's process id, if it was started here.
    pub fn pid(&self) -> Option<u32> {
        self.started.as_ref().map(|(server, _)| server.0.id())
    }

    /// Returns a line that says how the server ended, if it did so by itself. Does not block.
    pub fn ended(&mut self) -> Option<String> {
        let server = &mut self.started.as_mut()?.0.0;
        let (pid, status) = (server.id(), server.try_wait().ok()??);
        let log = self.dir.join("postgres.log");
        Some(format!("PostgreSQL (process {pid}) has ended ({status}); see {}", log.display()))
    }
}

/// Returns the version that made the cluster.
fn major(directory: &ClusterDir) -> Result<u32> {
    let pgdata = directory.pgdata();
    directory.account.check_owner(&pgdata)?;
    let file = pgdata.join("PG_VERSION");
    let text = fs::read_to_string(&file).map_err(ClusterError::io("read", &file))?;
    programs::number(&text).ok_or_else(|| ClusterError::new(format!("{} holds no version", file.display())))
}

/// Returns the real name of the directory, which its socket is in, if there is a cluster. Starts nothing.
///
/// # Errors
/// There is no cluster, or this user may not look.
pub fn check(dir: &Path) -> Result<PathBuf> {
    let (shown, dir) = (dir.display(), &directory::place(dir));
    let found = fs::metadata(dir.join("pgdata")).and_then(|_| fs::canonicalize(dir));
    found.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            ClusterError::new(format!("{shown} has no cluster; `userd --embedded={shown}` makes one"))
        }
        // The error of `check_owner` names the owner of the directory.
        _ => {
            let owner = Account::owner_of(dir).and_then(|account| account.check_owner(dir));
            owner.err().unwrap_or_else(|| ClusterError::io("read", dir)(error))
        }
    })
}

/// Makes `pgdata`, complete or not there at all: made as `pgdata.new` and renamed. Blocks until `initdb` has ended.
pub(super) fn initialize(directory: &ClusterDir, programs: &Path, more: &[&str]) -> Result<()> {
    let (program, new) = (programs.join("initdb"), directory.dir.join("pgdata.new"));
    let run = |locale: &str| {
        // If some of it stays, initdb says so.
        let _ = fs::remove_dir_all(&new);
        // initdb writes into a pipe and not into the log, as the disk may be full.
        let mut initdb = directory.command(&program, Stdio::piped());
        // A relative name: initdb cleans up when it fails, and the directory may have another name by then.
        initdb.args(["-D", "pgdata.new", "-U", "postgres", "--auth=trust", "-E", "UTF8", locale]).args(more);
        let output = initdb.output().map_err(ClusterError::io("run", &program))?;
        let failure = || failed(&format!("initdb failed ({})", output.status), &output.stderr);
        if output.status.success() { Ok(()) } else { Err(failure()) }
    };
    // C.UTF-8 knows upper and lower case of every letter; C, which every system has, of a-z only.
    if let Err(error) = run("--locale=C.UTF-8") {
        run("--no-locale").map_err(|_| error)?;
        log::warn!("the system has no locale C.UTF-8: upper and lower case of a to z alone are known");
    }
    let finish = || -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).open(new.join("postgresql.conf"))?;
        file.write_all(CONFIGURATION.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, directory.pgdata())?;
        // Syncs the directory, so that the rename outlasts a power failure.
        File::open(&directory.dir)?.sync_all()
    };
    finish().map_err(ClusterError::io("finish", &new))
}

/// A server that accepts connections. Dropping it stops it.
#[derive(Debug)]
pub(super) struct ServerProcess(pub Child);

impl ServerProcess {
    /// Starts the server with settings beside [`SETTINGS`]. Blocks for up to [`START_TIMEOUT`]. After an error nothing is
    /// running.
    pub fn start(
        directory: &ClusterDir,
        programs: &Path,
        max_connections: u32,
        settings: &[&str],
    ) -> Result<ServerProcess> {
        let deadline = Instant::now() + START_TIMEOUT;
        let (program, pgdata) = (programs.join("postgres"), directory.pgdata());
        let mut log = directory.log()?;
        log.seek(SeekFrom::End(0)).map_err(ClusterError::io("log in", &directory.dir))?;
        let mut command = directory.command(&program, directory.log()?);
        command.arg("-D").arg(&pgdata).args([format!("--port={PORT}"), format!("-N{max_connections}")]);
        command.args(SETTINGS.iter().chain(settings).map(|setting| format!("--{setting}")));
        let mut server = ServerProcess(command.spawn().map_err(ClusterError::io("run", &program))?);
        // The server would refuse an earlier connection with a line in its log.
        let is_ready = || {
            let file = fs::read_to_string(pgdata.join("postmaster.pid")).unwrap_or_default();
            file.lines().nth(7).is_some_and(|state| state.trim() == "ready")
        };
        while !is_ready() {
            let ended = server.0.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() >= deadline {
                let how = ended.map_or("not ready in time".to_owned(), |status| status.to_string());
                let mut said = Vec::new();
                let _ = log.take(MOST_SHOWN).read_to_end(&mut said);
                return Err(failed(&format!("PostgreSQL failed ({how})"), &said));
            }
            thread::sleep(POLL);
        }
        Ok(server)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let (pid, start) = (self.0.id(), Instant::now());
        // After SIGQUIT the server itself kills what does not end within 5 s.
        let signals = [(0, Signal::SIGINT), (10, Signal::SIGQUIT), (16, Signal::SIGKILL)];
        let mut signals = signals.into_iter().peekable();
        // An error means that another thread reaped the child: it has ended all the same.
        while matches!(self.0.try_wait(), Ok(None)) && start.elapsed().as_secs() < 18 {
            if let Some((_, signal)) = signals.next_if(|(after, _)| start.elapsed().as_secs() >= *after) {
                let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
            }
            thread::sleep(POLL);
        }
    }
}

/// Returns an error with the last lines of what a program has said.
fn failed(what: &str, said: &[u8]) -> ClusterError {
    let said = String::from_utf8_lossy(said);
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(4)..].join("; ");
    ClusterError::new(format!("{what}: {}", if last.is_empty() { "it said nothing" } else { &last }))
}
