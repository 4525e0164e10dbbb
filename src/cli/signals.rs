//! What ends the process: signals, the end of its parent, and the end of what it cannot do without.

use super::Failure;
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::fstat,
    },
    unistd::Pid,
};
use parking_lot::Mutex;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2},
    flag,
    iterator::Signals,
};
use std::{
    ffi::OsStr,
    fs, io,
    os::unix::fs::MetadataExt,
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};
use userd::embedded::Cluster;

/// How often the cluster and the parent are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// How long after the first signal another one is taken for a repetition of it.
const ONE_WISH: Duration = Duration::from_secs(1);

/// Why the service ends.
pub enum End {
    Asked,
    Broken,
    /// The private cluster's server is gone. A supervisor of the process starts both anew.
    Cluster(String),
}

/// What ends the process. The first signal lets it finish the requests in flight; one a second or more later does not.
pub struct Ending {
    ends: mpsc::Receiver<End>,
    end: mpsc::Sender<End>,
    /// Whether there is nothing to finish yet, so that the first signal ends it too.
    idle: Arc<AtomicBool>,
}

/// The private cluster's server, where the process has started one. Locked, it delays [`exit`].
pub static SERVER: Mutex<Option<u32>> = Mutex::new(None);

/// Ends the process at once, and the private cluster's server with it.
pub fn exit(code: i32) -> ! {
    if let Some(pid) = *SERVER.lock() {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
    }
    log::logger().flush();
    process::exit(code)
}

/// Ignores SIGUSR1 and SIGUSR2, which would end the process: programs that rotate logs send them. Programs that it
/// starts have the system's default.
pub fn ignore_what_asks_for_nothing() {
    for signal in [SIGUSR1, SIGUSR2] {
        // It fails for signals that cannot be handled.
        let _ = flag::register(signal, Arc::default());
    }
}

/// Has a thread call `each` with every signal that ends the process: SIGTERM, SIGINT, and SIGHUP where it is not
/// ignored, as `nohup` has it.
pub fn on_signals(each: impl FnMut(i32) + Send + 'static) -> Result<(), Failure> {
    let taken =
        [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP));
    let mut signals = Signals::new(taken).map_err(Failure::runtime)?;
    let thread = thread::Builder::new().name("signals".to_owned());
    thread.spawn(move || signals.forever().for_each(each)).map(drop).map_err(Failure::runtime)
}

impl Ending {
    /// Takes the signals from now on. A signal within [`ONE_WISH`] of the first one is part of it: `timeout` and npm
    /// pass on what the terminal has sent already.
    pub fn watch(idle: bool) -> Result<Ending, Failure> {
        let (end, ends) = mpsc::channel();
        let sender = end.clone();
        let idle = Arc::new(AtomicBool::new(idle));
        let is_idle = idle.clone();
        let mut first: Option<Instant> = None;
        on_signals(move |signal| match first {
            _ if is_idle.load(Ordering::SeqCst) => exit(128 + signal),
            None => {
                first = Some(Instant::now());
                let _ = sender.send(End::Asked);
            }
            Some(first) if first.elapsed() < ONE_WISH => {}
            Some(_) => exit(128 + signal),
        })?;
        Ok(Ending { ends, end, idle })
    }

    /// Ends as with a signal when the process of this number does; `None`: when standard input does, and so with the
    /// process that holds its other end.
    pub fn watch_parent(&self, pid: Option<&OsStr>) -> Result<(), Failure> {
        let (sender, idle) = (self.end.clone(), self.idle.clone());
        let ended = move || {
            if idle.load(Ordering::SeqCst) {
                exit(0);
            }
            let _ = sender.send(End::Asked);
        };
        let thread = thread::Builder::new().name("parent".to_owned());
        let spawned = match pid {
            None if is_null_device(io::stdin()) => {
                return Err(Failure::usage(
                    "--with-parent: standard input is /dev/null, as a shell gives it to a background job, and has \
                     ended already; give it a pipe, or name the process with --with-parent=PID",
                ));
            }
            None => thread.spawn(move || {
                let _ = io::copy(&mut io::stdin(), &mut io::sink());
                log::info!("standard input has ended, and this process with it (--with-parent)");
                ended();
            }),
            Some(pid) => {
                let pid = pid.to_str().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0);
                let pid = pid.ok_or_else(|| Failure::argument("--with-parent= names no process"))?;
                let Some(start) = start_of(pid) else {
                    return Err(Failure::usage(format!(
                        "--with-parent={pid}: there is no such process; name one that runs"
                    )));
                };
                thread.spawn(move || {
                    while start_of(pid) == Some(start) {
                        thread::sleep(LOOK);
                    }
                    log::info!("process {pid} has ended, and this process with it (--with-parent)");
                    ended();
                })
            }
        };
        spawned.map(drop).map_err(Failure::runtime)
    }

    /// To be called when the service is broken.
    pub fn on_broken(&self) -> impl FnOnce() + Send + 'static {
        let end = self.end.clone();
        move || drop(end.send(End::Broken))
    }

    /// From now on there is something to finish.
    pub fn begin(&self) {
        self.idle.store(false, Ordering::SeqCst);
    }

    /// Blocks until the first signal, or until the service is broken, or its cluster has ended.
    pub fn wait(&self, mut cluster: Option<&mut Cluster>) -> End {
        loop {
            let end = match cluster {
                Some(_) => self.ends.recv_timeout(LOOK).ok(),
                None => self.ends.recv().ok(),
            };
            if let Some(end) = end {
                return end;
            }
            if let Some(line) = cluster.as_mut().and_then(|cluster| cluster.ended()) {
                return End::Cluster(line);
            }
        }
    }
}

/// Whether the signal was ignored when the process started. Where there is no Linux /proc it was not.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn is_null_device(file: impl std::os::fd::AsFd) -> bool {
    match (fstat(file), fs::metadata("/dev/null")) {
        (Ok(file), Ok(null)) => file.st_rdev == null.rdev() && file.st_rdev != 0,
        _ => false,
    }
}

/// When a process that has not ended was started, in the system's own unit: its number may become another's. Where
/// there is no Linux /proc, 0 for any process.
fn start_of(pid: i32) -> Option<u64> {
    if !fs::exists("/proc/self/stat").unwrap_or_default() {
        return kill(Pid::from_raw(pid), None).ok().map(|()| 0);
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    match fields.first() {
        Some(&"Z" | &"X") => None,
        _ => fields.get(19)?.parse().ok(),
    }
}
