//! A private PostgreSQL, run from the server programs that this machine has.
//!
//! The data of a [`Cluster`] are kept; one process runs its server, and commands join it. The data of a
//! [`SharedServer`] are thrown away; all processes of a user share the server. These modules use no other module of
//! this crate, and know nothing of users, HTTP, tables and the command line.
//!
//! The server listens only on a Unix socket in its directory, which only the account that runs the server can enter, so
//! that there is no password. The server has a process group of its own, so that Ctrl-C reaches userd alone.

mod account;
mod cluster;
mod directory;
mod initdb;
mod programs;
mod server;
mod shared;
mod user;

use directory::ClusterDir;
use postgres::{Client, Config, NoTls};
use std::time::{Duration, Instant};
use std::{io, path::Path, result, thread};

pub use account::Account;
pub use cluster::{Cluster, check_has_cluster};
pub use shared::SharedServer;
pub use user::SystemUser;

/// How long a [`Wait`] sleeps before its caller looks again whether the wait is over.
const WAIT_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a [`Wait`] lasts before userd's log gets a first line about it, and then until each further line.
const WAIT_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The number in the name of the socket. The server listens on no TCP port.
const PORT: u16 = 5432;
const SOCKET_NAME: &str = ".s.PGSQL.5432";

/// The reason why a cluster or its server cannot be used: one line that tells a person what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClusterError(String);

type Result<T> = result::Result<T, ClusterError>;

/// A function that returns false to cancel the start of a server. The start calls the function every few milliseconds
/// while it waits, with the server's process id once there is one.
pub type ShouldGoOn = fn(server_pid: Option<u32>) -> bool;

/// A wait for PostgreSQL or for another process, without a bound: if userd gave up during a recovery or a checkpoint,
/// PostgreSQL would have to begin that work anew at the next start.
struct Wait {
    began_at: Instant,
    /// How many lines about this wait userd's log has.
    logged_lines: u32,
}

impl Wait {
    fn begin() -> Wait {
        Wait { began_at: Instant::now(), logged_lines: 0 }
    }

    /// Blocks for a few milliseconds. Logs `reason` every ten seconds. Fails if `go_on`, called with the process id of
    /// the server, returns false.
    fn pause(&mut self, go_on: ShouldGoOn, pid: Option<u32>, reason: impl FnOnce() -> String) -> Result<()> {
        if !go_on(pid) {
            return Err(ClusterError::new("interrupted"));
        }
        thread::sleep(WAIT_POLL_INTERVAL);
        if self.began_at.elapsed() >= WAIT_LOG_INTERVAL * (self.logged_lines + 1) {
            log::info!("waiting for {} s: {}", self.began_at.elapsed().as_secs(), reason());
            self.logged_lines += 1;
        }
        Ok(())
    }
}

impl ClusterError {
    fn new(message: impl AsRef<str>) -> ClusterError {
        ClusterError(message.as_ref().trim().replace(['\n', '\r'], " "))
    }

    /// Returns an error that quotes four lines of a program's output: the last four, or, if an earlier line has FATAL
    /// or PANIC, four from that line on.
    fn with_output(problem: &str, output: &[u8]) -> ClusterError {
        let output = String::from_utf8_lossy(output);
        let lines: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let fails = |line: &&str| line.contains(" FATAL: ") || line.contains(" PANIC: ");
        let first = lines.iter().position(fails).unwrap_or(usize::MAX).min(lines.len().saturating_sub(4));
        let shown = lines[first..].iter().take(4).copied().collect::<Vec<_>>().join("; ");
        ClusterError::new(format!("{problem}: {}", if shown.is_empty() { "it said nothing" } else { &shown }))
    }

    /// Returns a function for `map_err` that makes the error "cannot `doing` `path`: reason".
    fn cannot(doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| ClusterError::new(format!("cannot {doing} {}: {error}", path.display()))
    }
}

/// Returns the string with which psql or the `postgres` crate connects to a database of the server in `dir` as the
/// superuser `postgres`.
pub fn connection_string(dir: &Path, database: &str) -> String {
    let quote = |value: &str| format!("'{}'", value.replace('\\', r"\\").replace('\'', r"\'"));
    let (host, database) = (quote(&dir.to_string_lossy()), quote(database));
    format!("host={host} port={PORT} user=postgres dbname={database}")
}

/// Connects to the database `postgres` of the server in `dir`.
fn connect(dir: &Path) -> result::Result<Client, postgres::Error> {
    connection_string(dir, "postgres").parse::<Config>()?.connect(NoTls)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_from_its_first_fatal_line_on() {
        let full = "FATAL:  could not extend file: No space left on device";
        let rows = [
            ("", "it said nothing"),
            ("a\n\n b \nc\nd\ne\n", "b; c; d; e"),
            ("a\n1 FATAL:  b\nDETAIL:  c\n", "a; 1 FATAL:  b; DETAIL:  c"),
            (
                &format!("a\n1 {full}\n1 HINT:  b\n1 PANIC:  c\nAborted\nd\ne\n"),
                &format!("1 {full}; 1 HINT:  b; 1 PANIC:  c; Aborted"),
            ),
        ];
        for (said, expected) in rows {
            let error = ClusterError::with_output("initdb failed", said.as_bytes()).to_string();
            assert_eq!(error, format!("initdb failed: {expected}"));
        }
    }
}
