//! The server process of a cluster: starts it, waits until it is ready, and stops it.

use super::{ClusterDir, ClusterError, PORT, Result, Wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{Read, Seek, SeekFrom};
use std::{fs, path::Path, process::Child};

/// The PostgreSQL settings of every private server, of a kept cluster as of a shared server.
const SERVER_SETTINGS: [&str; 10] = [
    "listen_addresses=",
    // The server works in `pgdata`, and its socket is in the parent directory.
    "unix_socket_directories=..",
    "unix_socket_permissions=0700",
    // Reserves no connections for superusers, because every session is a superuser's.
    "superuser_reserved_connections=0",
    "lc_messages=C",
    // Keeps the values of users' records out of the server's log. userd logs refused statements itself.
    "log_error_verbosity=terse",
    "log_min_error_statement=panic",
    // Keeps refused statements and checkpoints out of the log: userd never shortens the log.
    "log_min_messages=log",
    "log_checkpoints=off",
    "log_autovacuum_min_duration=-1",
];

/// The most bytes of the server's log that are read for the message of a failed start. One start logs much less.
const MAX_READ_LOG_BYTES: u64 = 1 << 20;

/// The process of a server that accepts connections. Dropping the value stops the server by a fast shutdown, and blocks
/// until the server has stopped.
#[derive(Debug)]
pub(super) struct ServerProcess {
    pub child: Child,
}

impl ServerProcess {
    /// Starts the server with [`SERVER_SETTINGS`] and with `settings`. Blocks until the server accepts connections.
    /// After an error no server is running.
    pub fn start(dir: &ClusterDir, programs: &Path, max_connections: u32, settings: &[&str]) -> Result<Self> {
        let (program, pgdata) = (programs.join("postgres"), dir.pgdata());
        let mut log = dir.open_server_log()?;
        log.seek(SeekFrom::End(0)).map_err(ClusterError::cannot("log in", &dir.path))?;
        let mut command = dir.command(&program, dir.open_server_log()?);
        command.arg("-D").arg(&pgdata).args([format!("--port={PORT}"), format!("-N{max_connections}")]);
        command.args(SERVER_SETTINGS.iter().chain(settings).map(|setting| format!("--{setting}")));
        let mut server =
            ServerProcess { child: command.spawn().map_err(ClusterError::cannot("run", &program))? };
        let (mut wait, pid) = (Wait::begin(), server.child.id());
        while !is_ready(&dir.path) {
            if let Ok(Some(status)) = server.child.try_wait() {
                let mut output = Vec::new();
                let _ = log.take(MAX_READ_LOG_BYTES).read_to_end(&mut output);
                return Err(ClusterError::with_output(&format!("PostgreSQL failed ({status})"), &output));
            }
            wait.pause(dir.should_go_on, Some(pid), || {
                format!("PostgreSQL (process {pid}) starts; see postgres.log")
            })?;
        }
        Ok(server)
    }
}

/// Returns whether the server in `dir` accepts connections, as its `postmaster.pid` says. Does not try to connect,
/// because a server that still starts would log each refused connection.
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
        // An error ends the wait, too: it means that another thread has collected the server's exit status, so the
        // server has ended.
        while matches!(self.child.try_wait(), Ok(None)) {
            let _ = wait.pause(|_| true, None, || format!("PostgreSQL (process {pid}) stops"));
        }
    }
}
