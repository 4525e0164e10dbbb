//! A private PostgreSQL, run from the server programs that this machine already has.
//!
//! [`Cluster`] is kept in a directory and belongs to one process; [`Joined`] is that of a command beside it; [`Shared`] is
//! thrown away, and belongs to all processes of a user that want one. Knows nothing of users, HTTP, tables, pools and the
//! command line, and uses nothing else of this crate.
//!
//! The server listens on a Unix socket in its directory and nowhere else, and only the account that runs it can enter
//! the directory; so there are no passwords. It is in a process group of its own: Ctrl-C reaches userd alone.

mod account;
mod cluster;
mod directory;
mod programs;
mod shared;

use nix::sys::signal::Signal::{self, SIGINT, SIGKILL, SIGQUIT};
use postgres::{Client, Config, Error, NoTls};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fmt, fs, io, thread};

pub use account::Account;
pub use cluster::{Cluster, Joined, Options, check};
pub use shared::Shared;

/// Bound on a start: recovery after a crash replays the log, `initdb` syncs files.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Wait for what a killed userd left: its `initdb` holds the lock until it ends.
const LOCK_WAIT: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(5);

/// Part of the name of the socket's file. No port is listened on.
const PORT: u16 = 5432;

/// Settings of every server.
const SETTINGS: [&str; 9] = [
    "listen_addresses=",
    "unix_socket_permissions=0700",
    "superuser_reserved_connections=0", // every session is a superuser's
    "lc_messages=C",
    // No values of users' records in the log: userd reports what goes wrong.
    "log_error_verbosity=terse",
    "log_min_error_statement=panic",
    // No line for a statement that is refused, nor for a checkpoint: the log would fill the disk.
    "log_min_messages=log",
    "log_checkpoints=off",
    "log_autovacuum_min_duration=-1",
];

/// Reason why there is no cluster: one line, made to be shown, that says what to do.
#[derive(Debug)]
pub struct ClusterError(String);

impl ClusterError {
    fn new(message: impl AsRef<str>) -> ClusterError {
        ClusterError(message.as_ref().trim().replace(['\n', '\r'], " "))
    }

    /// Returns a function for `map_err`: "cannot `doing` `path`: reason".
    fn io(doing: &str, path: &Path) -> impl Fn(io::Error) -> ClusterError {
        move |error| ClusterError::new(format!("cannot {doing} {}: {error}", path.display()))
    }
}

impl fmt::Display for ClusterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ClusterError {}

/// Returns how the superuser `postgres` reaches a database of the server in `dir`, for psql and the `postgres` crate.
fn connection_string(dir: &Path, database: &str) -> String {
    let quote = |value: &str| format!("'{}'", value.replace('\\', r"\\").replace('\'', r"\'"));
    let (host, database) = (quote(&dir.to_string_lossy()), quote(database));
    format!("host={host} port={PORT} user=postgres dbname={database}")
}

/// Returns arguments of `postgres`, with settings beside those of every server. The socket is in `dir`.
fn arguments(dir: &Path, max_connections: u32, settings: &[&str]) -> Vec<String> {
    let place = format!("unix_socket_directories=\"{}\"", dir.to_string_lossy().replace('"', "\"\""));
    let more = [place, format!("port={PORT}"), format!("max_connections={max_connections}")];
    let settings = SETTINGS.iter().chain(settings).copied().chain(more.iter().map(String::as_str));
    settings.map(|setting| format!("--{setting}")).collect()
}

fn connect(dir: &Path, database: &str) -> Result<Client, Error> {
    connection_string(dir, database).parse::<Config>()?.connect(NoTls)
}

/// Returns the process id of the server in `dir`, if the server says that it accepts connections. A connection that is
/// made earlier would be refused with a line in its log.
fn ready(dir: &Path) -> Option<i32> {
    let file = fs::read_to_string(dir.join("pgdata/postmaster.pid")).ok()?;
    let mut lines = file.lines().map(str::trim);
    let pid = lines.next()?.parse().ok()?;
    (lines.nth(6)? == "ready").then_some(pid)
}

/// Ends a server: a fast shutdown, then an immediate one, then SIGKILL. Returns whether it has ended. Blocks for up to
/// 18 s.
fn end(mut signal: impl FnMut(Signal), mut has_ended: impl FnMut() -> bool) -> bool {
    // After SIGQUIT the server itself kills what does not end within 5 s.
    for (with, seconds) in [(SIGINT, 10), (SIGQUIT, 6), (SIGKILL, 2)] {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let mut ended = has_ended();
        if !ended {
            signal(with);
        }
        while !ended && Instant::now() < deadline {
            thread::sleep(POLL);
            ended = has_ended();
        }
        if ended {
            return true;
        }
    }
    false
}
