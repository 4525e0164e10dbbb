//! The server process of a cluster, from its start to the last signal. Knows its settings, not its users.

use super::{ClusterDir, ClusterError, PORT, Result, Wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Seek, SeekFrom};
use std::{fs, path::Path, process::Child};

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
const MAX_LOG_BYTES: u64 = 1 << 20;

/// A server that accepts connections. Dropping it stops it by a fast shutdown, and blocks until that is done.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pub child: Child,
}

impl ServerProcess {
    /// Starts the server with settings beside [`SERVER_SETTINGS`]. Blocks for as long as it starts. After an error nothing is
    /// running.
    pub fn start(dir: &ClusterDir, programs: &Path, max_connections: u32, settings: &[&str]) -> Result<Self> {
        let (program, pgdata) = (programs.join("postgres"), dir.pgdata());
        let mut log = dir.log()?;
        log.seek(SeekFrom::End(0)).map_err(ClusterError::io("log in", &dir.dir))?;
        let mut command = dir.command(&program, dir.log()?);
        command.arg("-D").arg(&pgdata).args([format!("--port={PORT}"), format!("-N{max_connections}")]);
        command.args(SERVER_SETTINGS.iter().chain(settings).map(|setting| format!("--{setting}")));
        let mut server = ServerProcess { child: command.spawn().map_err(ClusterError::io("run", &program))? };
        let (mut wait, pid) = (Wait::begin(), server.child.id());
        while !is_ready(&dir.dir) {
            if let Ok(Some(status)) = server.child.try_wait() {
                let mut said = Vec::new();
                let _ = log.take(MAX_LOG_BYTES).read_to_end(&mut said);
                return Err(ClusterError::said(&format!("PostgreSQL failed ({status})"), &said));
            }
            wait.pause(dir.go_on, Some(pid), || {
                format!("PostgreSQL (process {pid}) starts; see postgres.log")
            })?;
        }
        Ok(server)
    }
}

/// Returns whether the server in `dir` says that it accepts connections. A connection before that would add a refusal
/// to the server's log.
pub(super) fn is_ready(dir: &Path) -> bool {
    let file = fs::read_to_string(dir.join("pgdata/postmaster.pid")).unwrap_or_default();
    file.lines().nth(7).is_some_and(|state| state.trim() == "ready")
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let (mut wait, pid) = (Wait::begin(), self.child.id());
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
        }
        // An error counts as an end: another thread has reaped the child.
        while matches!(self.child.try_wait(), Ok(None)) {
            let _ = wait.pause(|_| true, None, || format!("PostgreSQL (process {pid}) stops"));
        }
    }
}
