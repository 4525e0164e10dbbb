//! The end of a temporary cluster, also when this process is killed: a shell waits for the end of a
//! pipe that only its users hold, stops the server and removes the directory. Knows pids and paths only.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use super::directory::ClusterDir;
use super::{ClusterError, POLL};

/// Longer than the script's own bounds, of 10 s each for the server and the directory.
const WATCHER_WAIT: Duration = Duration::from_secs(25);

/// Lines on stdin name the process group to end, the last one counts; then come the directories. The first one is the
/// working directory, too, so that what is in it has no name that leads through a link, whatever is made beside it.
/// `postmaster.pid` is the server's last act. initdb has none, and removes what it made, by its name, as it ends: so
/// the directory stays until its leader runs no more. A process that has ended keeps its number until it is reaped. The
/// directory leaves its name in one step, for one below a fresh directory that no other account can enter: a process
/// that comes then makes a new one, and loses nothing of it. Where something else has taken the name, that stays.
/// `pgdata` goes first, so that no half a cluster is ever without its mark.
///
/// A shared cluster has its pipe in the directory, under the name `users`, and is kept for 10 s after its last
/// user, since the next one is often a process that is just being started. Who holds the pipe when its name
/// has gone came in time: then it is given its name again. Who comes later finds nothing to join.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM
group=
idle=0
# 0 and 1 as a group would be our own, and every process.
listen() {
    while read -r line; do
        case $line in 0|1|*[!0-9]*) continue ;; esac
        group=$line idle=0
    done
}
listen
while [ -p users ]; do
    if [ $idle -lt 40 ]; then
        sleep 0.25
        idle=$((idle + 1))
        listen
    else
        mv users users.closed || break
        if read -r line; then
            group=$line
            mv users.closed users
            idle=0
            listen
        fi
    fi
done
runs() {
    read -r stat < "/proc/$group/stat" || return 1
    case ${stat##*) } in [ZX]*) return 1 ;; esac
}
tries=0
if [ -n "$group" ] && kill -s QUIT -- "-$group"; then
    while { runs || [ -e pgdata/postmaster.pid ]; } && kill -s 0 -- "-$group" && [ $tries -lt 500 ]; do
        tries=$((tries + 1))
        if [ $tries -eq 350 ]; then kill -s KILL -- "-$group"; fi
        sleep 0.02
    done
fi
place=$1
fresh=$(mktemp -d -- "$1.XXXXXX") && mv -T -- "$1" "$fresh/cluster" && place=$fresh/cluster
shift
tries=0
until rm -rf -- pgdata pgdata.new "$@" && { [ ! "$place" -ef . ] || rm -rf -- "$place"; }; do
    tries=$((tries + 1))
    if [ $tries -ge 500 ]; then exit 1; fi
    sleep 0.02
done
[ -z "$fresh" ] || rmdir -- "$fresh"
"#;

/// Dropping it removes the directory and waits for that.
#[derive(Debug)]
pub(super) struct Watcher {
    shell: Child,
    pipe: Option<File>,
    dir: PathBuf,
}

impl Watcher {
    /// The shell holds the directory's lock until it has ended, and nothing else of ours: not the
    /// terminal's process group, output or directory.
    ///
    /// `pipe`: both ends of the pipe that users hold; without one, this process alone does.
    pub fn spawn(directory: &ClusterDir, pipe: Option<(File, File)>) -> Result<Watcher, ClusterError> {
        let (stdin, ours) = match pipe {
            Some((reader, writer)) => (Stdio::from(reader), Some(writer)),
            None => (Stdio::piped(), None),
        };
        let dir = directory.dir.to_owned();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT, "userd-watcher"]).arg(&dir).args(directory.other_socket_dir());
        command.current_dir(&dir).process_group(0);
        command.stdin(stdin).stdout(directory.lock_handle()?).stderr(Stdio::null());
        let spawned = command.spawn();
        let mut shell = spawned.map_err(|error| ClusterError::new(format!("cannot run /bin/sh: {error}")))?;
        let pipe = ours.or_else(|| Some(File::from(OwnedFd::from(shell.stdin.take()?))));
        Ok(Watcher { shell, pipe, dir })
    }

    /// From now on `leader`'s process group is what to end.
    pub fn watch(&mut self, leader: u32) {
        self.tell(&format!("{leader}\n"));
    }

    /// Nothing to end any more: the process id may become another's.
    pub fn forget(&mut self) {
        self.tell("\n");
    }

    fn tell(&mut self, line: &str) {
        let told = self.pipe.as_mut().map(|pipe| pipe.write_all(line.as_bytes()));
        if let Some(Err(error)) = told {
            log::warn!("the watcher of {} is gone: {error}", self.dir.display());
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.pipe = None;
        let deadline = Instant::now() + WATCHER_WAIT;
        while matches!(self.shell.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        let cleared = matches!(self.shell.try_wait(), Ok(Some(status)) if status.success());
        // Only if the watcher itself was killed: another may have made the directory anew by now.
        if !cleared
            && self.dir.exists()
            && let Err(error) = fs::remove_dir_all(&self.dir)
        {
            log::warn!("cannot remove {}: {error}", self.dir.display());
        }
    }
}
