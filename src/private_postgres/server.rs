//! The server process of a cluster, from its start to the last signal. Knows its settings, not its users.

use super::{ClusterDir, ClusterError, POLL, PORT, Result, START_TIMEOUT};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Seek, SeekFrom};
use std::{fs, path::Path, process::Child, thread, time::Instant};

/// Settings of every server.
const SERVER_SETTINGS: [&str; 10] = [
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

/// Bytes of the log that are read for an error: many times the lines of a start.
const MOST_LOG_BYTES: u64 = 1 << 20;

/// A server that accepts connections. Dropping it stops it.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pub child: Child,
}

impl ServerProcess {
    /// Starts the server with settings beside [`SERVER_SETTINGS`]. Blocks for up to [`START_TIMEOUT`]. After an error nothing
    /// is running.
    pub fn start(dir: &ClusterDir, programs: &Path, max_connections: u32, settings: &[&str]) -> Result<Self> {
        let deadline = Instant::now() + START_TIMEOUT;
        let (program, pgdata) = (programs.join("postgres"), dir.pgdata());
        let mut log = dir.log()?;
        log.seek(SeekFrom::End(0)).map_err(ClusterError::io("log in", &dir.dir))?;
        let mut command = dir.command(&program, dir.log()?);
        command.arg("-D").arg(&pgdata).args([format!("--port={PORT}"), format!("-N{max_connections}")]);
        command.args(SERVER_SETTINGS.iter().chain(settings).map(|setting| format!("--{setting}")));
        let mut server = ServerProcess { child: command.spawn().map_err(ClusterError::io("run", &program))? };
        // The server would refuse an earlier connection with a line in its log.
        let is_ready = || {
            let file = fs::read_to_string(pgdata.join("postmaster.pid")).unwrap_or_default();
            file.lines().nth(7).is_some_and(|state| state.trim() == "ready")
        };
        while !is_ready() {
            let ended = server.child.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() >= deadline {
                let how = ended.map_or("not ready in time".to_owned(), |status| status.to_string());
                let mut said = Vec::new();
                let _ = log.take(MOST_LOG_BYTES).read_to_end(&mut said);
                return Err(ClusterError::said(&format!("PostgreSQL failed ({how})"), &said));
            }
            thread::sleep(POLL);
        }
        Ok(server)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let (pid, start) = (self.child.id(), Instant::now());
        // After SIGQUIT the server itself kills its processes that do not end within 5 s.
        let signals = [(0, Signal::SIGINT), (10, Signal::SIGQUIT), (16, Signal::SIGKILL)];
        let mut signals = signals.into_iter().peekable();
        // An error means that another thread reaped the child: it has ended all the same.
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed().as_secs() < 18 {
            if let Some((_, signal)) = signals.next_if(|(after, _)| start.elapsed().as_secs() >= *after) {
                let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
            }
            thread::sleep(POLL);
        }
    }
}
