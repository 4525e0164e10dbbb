//! Processes: whether one is there, whether it is the PostgreSQL of a data directory, and its end. A process id alone
//! proves nothing: it may be another process's by now.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::POLL;

/// After SIGQUIT the server itself kills what doesn't end within 5 s.
const QUIT_WAIT: Duration = Duration::from_secs(6);
const KILL_WAIT: Duration = Duration::from_secs(2);

/// What a server writes into its data directory (`postmaster.pid`).
pub(super) struct PidFile {
    pub pid: i32,
    /// The server says that it accepts connections.
    pub ready: bool,
    pub pgdata: PathBuf,
    pub socket_dir: PathBuf,
}

impl PidFile {
    /// `None` when there is no such file, or it names no process.
    pub fn read(pgdata: &Path) -> Option<PidFile> {
        let text = fs::read_to_string(pgdata.join("postmaster.pid")).ok()?;
        let lines: Vec<&str> = text.lines().collect();
        let line = |number: usize| lines.get(number).copied().unwrap_or_default();
        // Negative: a single-user server.
        let pid = line(0).trim().parse::<i32>().ok()?.checked_abs()?;
        // 1 is never a server, and as a group it would be every process.
        (pid > 1).then(|| PidFile {
            pid,
            ready: line(7).trim() == "ready",
            pgdata: line(1).into(),
            socket_dir: line(4).into(),
        })
    }
}

/// Ends a postmaster: the gentle signal first, if any, then an immediate shutdown, then SIGKILL.
pub(super) fn end(pid: i32, gentle: Option<(Signal, Duration)>, mut gone: impl FnMut() -> bool) -> bool {
    let harder = [(Signal::SIGQUIT, QUIT_WAIT), (Signal::SIGKILL, KILL_WAIT)];
    for (signal, wait) in gentle.into_iter().chain(harder) {
        if gone() {
            return true;
        }
        let _ = kill(Pid::from_raw(pid), signal);
        let deadline = Instant::now() + wait;
        while Instant::now() < deadline {
            if gone() {
                return true;
            }
            thread::sleep(POLL);
        }
        log::warn!("PostgreSQL (process {pid}) is still there {wait:?} after {signal}");
    }
    gone()
}

/// Whether there is such a process, of any owner.
pub(super) fn alive(pid: i32) -> bool {
    pid > 0 && kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// Whether the process is a PostgreSQL of this data directory. One that has ended is not, reaped or not.
pub(super) fn serves(pid: i32, pgdata: &Path) -> bool {
    if !Path::new("/proc/self/comm").exists() {
        let ps = Command::new("ps").args(["-ww", "-o", "command=", "-p", &pid.to_string()]).output();
        let line = ps.map(|ps| String::from_utf8_lossy(&ps.stdout).into_owned()).unwrap_or_default();
        return line.contains("postgres") && line.contains(&*pgdata.to_string_lossy());
    }
    let process = PathBuf::from(format!("/proc/{pid}"));
    let is_postgres = fs::read_to_string(process.join("comm")).is_ok_and(|name| name.contains("postgres"));
    // Root without CAP_SYS_PTRACE (Docker's default) may not see `cwd`, but anyone sees the arguments.
    let works_here = || fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == pgdata);
    let names_it = || {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|argument| argument == pgdata.as_os_str().as_bytes())
    };
    is_postgres && (works_here() || names_it())
}
