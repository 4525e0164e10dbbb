//! What a killed userd leaves behind: a server that still runs, files that name one that doesn't,
//! sessions without a server. A process id alone proves nothing: it may be another's by now.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::home::Home;
use super::{ClusterError, end};

/// What a server writes into its data directory (`postmaster.pid`).
pub(super) struct PidFile {
    pub pid: i32,
    /// The server says that it accepts connections.
    pub ready: bool,
    pgdata: PathBuf,
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
        (pid > 0).then(|| PidFile {
            pid,
            ready: line(7).trim() == "ready",
            pgdata: line(1).into(),
            socket_dir: line(4).into(),
        })
    }
}

/// Stops a server that still runs in `home`, and removes what would keep a new one from starting.
///
/// Only for the holder of the directory's lock. Blocks as `Cluster::stop` does.
pub(super) fn clear(home: &Home, stop_timeout: Duration) -> Result<(), ClusterError> {
    let pgdata = home.pgdata();
    let found = PidFile::read(&pgdata);
    if let Some(PidFile { pid, .. }) = found
        && serves(pid, &pgdata)
    {
        log::warn!("stopping PostgreSQL (process {pid}), which a killed userd left in {}", pgdata.display());
        let fast = Some((Signal::SIGINT, stop_timeout));
        if !end(pid, fast, || !serves(pid, &pgdata)) {
            return Err(ClusterError::new(format!(
                "PostgreSQL (process {pid}) still runs in {}, and could not be stopped: stop it first",
                pgdata.display()
            )));
        }
    }
    // PostgreSQL removes a dead process's file itself. It refuses to start when the process lives, or
    // when the file is empty, as it is after some power failures.
    let file = pgdata.join("postmaster.pid");
    if file.exists() && PidFile::read(&pgdata).is_none_or(|file| alive(file.pid)) {
        log::warn!("removing {}, which names no PostgreSQL of this directory", file.display());
        fs::remove_file(&file).map_err(ClusterError::io("remove", &file))?;
    }
    home.remove_sockets(home.dir());
    // In a copied directory, the file speaks of the original, which may well be running.
    if let Some(file) = found.filter(|file| file.pgdata == pgdata) {
        home.remove_sockets(&file.socket_dir);
    }
    Ok(())
}

/// Ends the sessions of a postmaster that is dead (Linux; elsewhere they have to notice it themselves).
///
/// SIGQUIT is what the postmaster sends when one session has crashed; it ends them in mid-query. It is
/// sent by PostgreSQL's own account, which sees where its processes are; root in a container may not.
pub(super) fn end_sessions(home: &Home) -> Result<(), ClusterError> {
    const SCRIPT: &str = r#"
        for process in /proc/[0-9]*; do
            if [ "$process/cwd" -ef "$1" ] && read -r name < "$process/comm"; then
                case $name in *postgres*) kill -s QUIT "${process##*/}" ;; esac
            fi
        done"#;
    log::warn!("ending the sessions of a killed PostgreSQL in {}", home.dir().display());
    let mut shell = home.command(Path::new("/bin/sh"))?;
    shell.args(["-c", SCRIPT, "userd"]).arg(home.pgdata()).stderr(Stdio::null());
    shell.status().map(drop).map_err(ClusterError::io("run", Path::new("/bin/sh")))
}

/// Whether there is such a process, whoever owns it.
pub(super) fn alive(pid: i32) -> bool {
    pid > 0 && kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// Whether the process is a PostgreSQL of this data directory. One that has ended is not, reaped or not.
fn serves(pid: i32, pgdata: &Path) -> bool {
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
