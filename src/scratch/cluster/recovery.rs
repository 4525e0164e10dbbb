//! Clears what a killed userd has left: a server that still runs, files that name one that does not, sessions without
//! a server.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::ClusterError;
use super::directory::ClusterDir;
use super::processes::{PidFile, alive, end, serves};

/// Stops a server that still runs in `directory`, and removes what would keep a new one from starting.
///
/// Only for the holder of the directory's lock. Blocks as `Cluster::stop` does.
pub(super) fn clear(directory: &ClusterDir, stop_timeout: Duration) -> Result<(), ClusterError> {
    let pgdata = directory.pgdata();
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
    directory.remove_sockets(&directory.dir);
    // In a copied directory, the file speaks of the original, which may well be running.
    if let Some(file) = found.filter(|file| file.pgdata == pgdata) {
        directory.remove_sockets(&file.socket_dir);
    }
    Ok(())
}

/// Ends the sessions of a postmaster that is dead (Linux; elsewhere they have to notice it themselves).
///
/// SIGQUIT is what the postmaster sends when one session has crashed; it ends them in mid-query. It is
/// sent by PostgreSQL's own account, which sees where its processes are; root in a container may not.
pub(super) fn end_sessions(directory: &ClusterDir) -> Result<(), ClusterError> {
    const SCRIPT: &str = r#"
        for process in /proc/[0-9]*; do
            if [ "$process/cwd" -ef "$1" ] && read -r name < "$process/comm"; then
                case $name in *postgres*) kill -s QUIT "${process##*/}" ;; esac
            fi
        done"#;
    log::warn!("ending the sessions of a killed PostgreSQL in {}", directory.dir.display());
    let mut shell = directory.command(Path::new("/bin/sh"))?;
    shell.args(["-c", SCRIPT, "userd"]).arg(directory.pgdata()).stderr(Stdio::null());
    shell.status().map(drop).map_err(ClusterError::io("run", Path::new("/bin/sh")))
}
