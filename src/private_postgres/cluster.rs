//! A cluster that is kept: one directory and the server process in it, from `initdb` to the last signal; and the cluster
//! of a directory for a command that works beside a service.

use super::directory::{self, ClusterDir, failed, failed_with};
use super::{Account, ClusterError, POLL, START_TIMEOUT};
use super::{account, arguments, connect, connection_string, end, programs, ready};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Appended to the `postgresql.conf` of a new cluster, where it can be edited: a service of users needs little, and
/// PostgreSQL's default of 128 MB is too much for a machine of 192 MB.
const CONFIGURATION: &str = "\n# Of userd\nshared_buffers = 24MB\n";

/// Place and size of a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of the cluster; created (mode 0700) when missing. One userd at a time.
    pub dir: PathBuf,
    /// The server's `max_connections`, at least 1.
    pub max_connections: u32,
}

impl Options {
    /// A cluster in `dir` with 100 connections.
    pub fn new(dir: impl Into<PathBuf>) -> Options {
        Options { dir: dir.into(), max_connections: 100 }
    }
}

/// A running server. Dropping it stops the server as [`Cluster::stop`] does.
///
/// If this process is killed, the server stays; the next start stops it and goes on.
#[derive(Debug)]
pub struct Cluster {
    server: Child,
    is_new: bool,
    directory: ClusterDir,
}

impl Cluster {
    /// Starts the cluster, made first if the directory has none. A server that a killed userd left behind is stopped.
    /// PostgreSQL runs as the current user, or under root as [`Account::find`] has it.
    ///
    /// Blocks for up to a minute, plus what stopping a server left behind takes, and up to 30 s for the remains of a
    /// userd that was killed a moment ago. After an error nothing is running.
    ///
    /// # Errors
    /// One line saying what to do: PostgreSQL, its right version or the `postgres` user missing; its programs not to be
    /// entered or not starting; the directory unusable, not ours, or in use; `initdb` or the server failing, with the
    /// last lines of its log.
    pub fn start(options: &Options) -> Result<Cluster, ClusterError> {
        let account = Account::find(true)?;
        let dir = directory::make(&options.dir, &account)?;
        Cluster::start_in(ClusterDir::wait_for_lock(&dir, account)?, options)
    }

    fn start_in(directory: ClusterDir, options: &Options) -> Result<Cluster, ClusterError> {
        let pgdata = directory.pgdata();
        directory.clear()?;
        let is_new = !pgdata.exists();
        let wanted = if is_new { None } else { Some(major(&directory)?) };
        let (programs, major) = programs::find(wanted, &directory.account)?;
        if is_new {
            log::info!("making a PostgreSQL {major} cluster in {}", pgdata.display());
            initialize(&directory, &programs.join("initdb"))?;
        }
        let deadline = Instant::now() + START_TIMEOUT;
        let (log, length) = directory.log()?;
        let program = programs.join("postgres");
        let mut command = directory.command(&program);
        command.arg("-D").arg(&pgdata).args(arguments(&directory.dir, options.max_connections, &[]));
        command.stderr(log.try_clone().map_err(ClusterError::io("open", &directory.dir))?);
        let server = command.spawn().map_err(ClusterError::io("run", &program))?;
        let mut cluster = Cluster { server, is_new, directory };
        while ready(&cluster.directory.dir) != Some(cluster.pid().cast_signed()) {
            if let Some(status) = cluster.server.try_wait().ok().flatten() {
                return Err(failed_with(&format!("PostgreSQL failed ({status})"), &log, length));
            }
            if Instant::now() >= deadline {
                return Err(failed_with("PostgreSQL was not ready in time", &log, length));
            }
            thread::sleep(POLL);
        }
        if is_new {
            // Only a superuser may create in the schema, as it is by itself from version 15 on.
            let close = "revoke create on schema public from public";
            let closed =
                connect(&cluster.directory.dir, "postgres").and_then(|mut it| it.batch_execute(close));
            closed.map_err(|error| ClusterError::new(format!("cannot set up the database: {error}")))?;
        }
        let (pid, dir) = (cluster.pid(), cluster.directory.dir.display());
        log::info!("PostgreSQL {major} (process {pid}) serves {}, socket in {dir}", pgdata.display());
        Ok(cluster)
    }

    /// Returns what psql and the `postgres` crate need to connect to `database` as the superuser `postgres`:
    /// `host='/dir' port=5432 user=postgres dbname='…'`. The database `postgres` is always there.
    pub fn connection_string(&self, database: &str) -> String {
        connection_string(&self.directory.dir, database)
    }

    /// Returns the server's process id.
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Returns whether this start has made the cluster.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Returns a line that says how the server ended, if it did so by itself. Does not block.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.server.try_wait().ok()??;
        let log = self.directory.dir.join("postgres.log");
        Some(format!("PostgreSQL (process {}) has ended ({status}); see {}", self.pid(), log.display()))
    }

    /// Ends every session and stops the server. What was committed is safe. Blocks for a fast shutdown of up to 10 s, then
    /// an immediate one (6 s), then SIGKILL (2 s).
    ///
    /// # Errors
    /// The server's process outlived even SIGKILL.
    pub fn stop(mut self) -> Result<(), ClusterError> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<(), ClusterError> {
        let pid = self.pid();
        // An error means that another thread reaped the child: it has ended all the same.
        let mut has_ended = || !matches!(self.server.try_wait(), Ok(None));
        if has_ended() {
            return Ok(());
        }
        let signal = |signal| _ = kill(Pid::from_raw(pid.cast_signed()), signal);
        if !end(signal, has_ended) {
            return Err(ClusterError::new(format!("not even SIGKILL ends PostgreSQL (process {pid})")));
        }
        log::info!("PostgreSQL (process {pid}) has stopped");
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(error) = self.shut_down() {
            log::warn!("{error}");
        }
    }
}

/// Returns the version that made the cluster.
fn major(directory: &ClusterDir) -> Result<u32, ClusterError> {
    let pgdata = directory.pgdata();
    directory.account.check_owner(&pgdata)?;
    let file = pgdata.join("PG_VERSION");
    let text = fs::read_to_string(&file).map_err(ClusterError::io("read", &file))?;
    programs::number(&text).ok_or_else(|| ClusterError::new(format!("{} holds no version", file.display())))
}

/// Makes `pgdata`, complete or not there at all: made as `pgdata.new` and renamed. Blocks until `initdb` has ended.
fn initialize(directory: &ClusterDir, program: &Path) -> Result<(), ClusterError> {
    let new = directory.dir.join("pgdata.new");
    let run = |locale: &str| {
        match fs::remove_dir_all(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ClusterError::io("remove", &new)(error));
            }
            _ => {}
        }
        let mut initdb = directory.command(program);
        initdb.arg("-D").arg(&new).args(["-U", "postgres", "--auth=trust", "-E", "UTF8", locale]);
        // It keeps the lock: if userd is killed, the next one waits until initdb has ended.
        let output = initdb.stdin(directory.lock_handle()?).stderr(Stdio::piped()).output();
        let output = output.map_err(ClusterError::io("run", program))?;
        let said = String::from_utf8_lossy(&output.stderr);
        let what = || format!("initdb failed ({})", output.status);
        if output.status.success() { Ok(()) } else { Err(failed(&what(), &said)) }
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

/// A cluster that accepts connections.
#[derive(Debug)]
pub enum Joined {
    /// Started here. Dropping it stops the server.
    Started(Box<Cluster>),
    /// Run by another process in this directory.
    Running(PathBuf),
}

impl Joined {
    /// Connects to the server that another process runs in `options.dir`, or starts one as [`Cluster::start`] does. Root
    /// acts for the owner of the directory, so that nothing there becomes another's.
    ///
    /// Blocks for up to a minute, in which another process may be starting or stopping it.
    ///
    /// # Errors
    /// Errors of [`Cluster::start`]. If `make` is not set: the directory has no cluster, and is left as it is.
    pub fn join(options: &Options, make: bool) -> Result<Joined, ClusterError> {
        if !make {
            check(&options.dir)?;
        }
        let account = Account::owner_of(&options.dir)?;
        let dir = directory::make(&options.dir, &account)?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(directory) = ClusterDir::lock(&dir, account)? {
                return Ok(Joined::Started(Box::new(Cluster::start_in(directory, options)?)));
            }
            if ready(&dir).is_some() && connect(&dir, "postgres").is_ok() {
                return Ok(Joined::Running(dir));
            }
            if Instant::now() >= deadline {
                return Err(directory::in_use(&dir));
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns a string for psql and the `postgres` crate, as [`Cluster::connection_string`] does.
    pub fn connection_string(&self, database: &str) -> String {
        match self {
            Joined::Started(cluster) => cluster.connection_string(database),
            Joined::Running(dir) => connection_string(dir, database),
        }
    }

    /// Returns the server's process id, if it was started here.
    pub fn started(&self) -> Option<u32> {
        match self {
            Joined::Started(cluster) => Some(cluster.pid()),
            Joined::Running(_) => None,
        }
    }
}

/// Returns the real name of the directory, which its socket is in, if there is a cluster. Starts nothing.
///
/// # Errors
/// There is no cluster, or this user may not look.
pub fn check(dir: &Path) -> Result<PathBuf, ClusterError> {
    let shown = dir.display();
    match fs::metadata(dir.join("pgdata")) {
        Ok(_) => fs::canonicalize(dir).map_err(ClusterError::io("read", dir)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ClusterError::new(format!("{shown} has no cluster; `userd --embedded={shown}` makes one")))
        }
        Err(error) => {
            let owner =
                fs::metadata(dir).map_or("another user".to_owned(), |found| account::name(found.uid()));
            let error = ClusterError::io("read", dir)(error);
            Err(ClusterError::new(format!("{error}; it belongs to user {owner}: be {owner}, or root")))
        }
    }
}
