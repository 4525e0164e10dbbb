//! A private PostgreSQL, run from the server programs that this machine already has.
//!
//! [`Cluster`] is kept in a directory and belongs to one process, which commands beside it join; [`Shared`] is thrown away,
//! and belongs to all processes of a user that want one. Knows nothing of users, HTTP, tables, pools and the command line,
//! and uses nothing else of this crate.
//!
//! The server listens on a Unix socket in its directory and nowhere else, and only the account that runs it can enter
//! the directory; so there are no passwords. It is in a process group of its own: Ctrl-C reaches userd alone.

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
pub use cluster::{Cluster, check};
pub use shared::Shared;
pub use user::User;

const POLL: Duration = Duration::from_millis(5);
/// Interval between two lines about a wait in userd's log.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Part of the name of the socket's file. No port is listened on.
const PORT: u16 = 5432;
const SOCKET: &str = ".s.PGSQL.5432";

/// Reason why there is no cluster: one line, made to be shown, that says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClusterError(String);

type Result<T> = result::Result<T, ClusterError>;

/// Returns false to cancel a start. It is called every few milliseconds while a start waits, with the server's process
/// id once a server runs.
pub type GoOn = fn(Option<u32>) -> bool;

/// A wait for what PostgreSQL or another process does. Has no bound: an end amid recovery or a checkpoint would only have
/// the next start begin it anew.
struct Wait {
    since: Instant,
    lines: u32,
}

impl Wait {
    fn begin() -> Wait {
        Wait { since: Instant::now(), lines: 1 }
    }

    /// Blocks for a moment. Every ten seconds, logs the reason of the wait. Returns an error if the caller has
    /// cancelled the start.
    fn pause(&mut self, go_on: GoOn, server: Option<u32>, what: impl FnOnce() -> String) -> Result<()> {
        if !go_on(server) {
            return Err(ClusterError::new("interrupted"));
        }
        thread::sleep(POLL);
        if self.since.elapsed() >= LINE_INTERVAL * self.lines {
            log::info!("waiting for {} s: {}", self.since.elapsed().as_secs(), what());
            self.lines += 1;
        }
        Ok(())
    }
}

impl ClusterError {
    fn new(message: impl AsRef<str>) -> ClusterError {
        ClusterError(message.as_ref().trim().replace(['\n', '\r'], " "))
    }

    /// Returns an error with the last four lines that a program has said, or those from an earlier failure on.
    fn said(what: &str, said: &[u8]) -> ClusterError {
        let said = String::from_utf8_lossy(said);
        let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let fails = |line: &&str| line.contains(" FATAL: ") || line.contains(" PANIC: ");
        let first = lines.iter().position(fails).unwrap_or(usize::MAX).min(lines.len().saturating_sub(4));
        let shown = lines[first..].iter().take(4).copied().collect::<Vec<_>>().join("; ");
        ClusterError::new(format!("{what}: {}", if shown.is_empty() { "it said nothing" } else { &shown }))
    }

    /// Returns a function for `map_err`: "cannot `doing` `path`: reason".
    fn io(doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| ClusterError::new(format!("cannot {doing} {}: {error}", path.display()))
    }
}

/// Returns how the superuser `postgres` reaches a database of the server in `dir`, for psql and the `postgres` crate.
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
            let error = ClusterError::said("initdb failed", said.as_bytes()).to_string();
            assert_eq!(error, format!("initdb failed: {expected}"));
        }
    }
}
