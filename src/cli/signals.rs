//! The end of the process: by signals, by the end of its parent, or of a part that it needs.

use super::{Failure, control};
use nix::{
    sys::signal::{SigHandler, Signal, kill, signal},
    unistd::Pid,
};
use parking_lot::Mutex;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use std::{
    fs, io,
    path::Path,
    process,
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};
use userd::{private_postgres::Cluster, testing::Control};

/// Interval between two looks at the cluster and at the parent.
const POLL_PAUSE: Duration = Duration::from_secs(1);

/// Time after the first signal in which a further one counts as its repetition.
const ONE_WISH: Duration = Duration::from_secs(1);

/// The end of a service: on request, or with the reason why the service cannot go on.
pub type End = Result<(), String>;

/// Source of the end of a service. The first signal lets it finish the requests in flight; one a second or more later
/// ends it at once.
pub struct Ending {
    ends: Receiver<End>,
    end: Sender<End>,
}

/// False while there is nothing to finish, so that the first signal ends the service at once, too.
pub static HAS_WORK: AtomicBool = AtomicBool::new(false);

/// The private cluster's server, if the process has started one. Locked, it delays [`exit`].
pub static SERVER: Mutex<Option<u32>> = Mutex::new(None);

/// Ends the process at once, and the private cluster's server with it.
pub fn exit(code: i32) -> ! {
    if let Some(pid) = *SERVER.lock() {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
    }
    log::logger().flush();
    process::exit(code)
}

/// Calls `each` on a thread with every signal that ends the process: SIGTERM, SIGINT, and SIGHUP unless it is ignored,
/// as `nohup` has it.
pub fn on_signals(each: impl FnMut(i32) + Send + 'static) -> Result<(), Failure> {
    // SAFETY: no function is set as the handler.
    let before = unsafe { signal(Signal::SIGHUP, SigHandler::SigIgn) };
    let hangup = (!matches!(before, Ok(SigHandler::SigIgn))).then_some(SIGHUP);
    let mut signals = Signals::new([SIGTERM, SIGINT].into_iter().chain(hangup)).map_err(Failure::runtime)?;
    spawn("signals", move || signals.forever().for_each(each))
}

/// Starts a thread that ends with the process.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop).map_err(Failure::runtime)
}

impl Ending {
    /// Takes the signals from now on. A signal within [`ONE_WISH`] of the first one is part of it: `timeout` and npm
    /// pass on what the terminal has sent already.
    pub fn watch() -> Result<Ending, Failure> {
        let (end, ends) = mpsc::channel();
        let asked = end.clone();
        let mut first: Option<Instant> = None;
        on_signals(move |signal| match first {
            Some(first) if first.elapsed() < ONE_WISH => {}
            None if HAS_WORK.load(SeqCst) => {
                first = Some(Instant::now());
                let _ = asked.send(Ok(()));
            }
            _ => exit(128 + signal),
        })?;
        Ok(Ending { ends, end })
    }

    /// Reads standard input to its end, and executes the commands in it once there is a service. `is_parent`: the end of
    /// the input ends the service as a signal does.
    pub fn watch_input(&self, commands: Option<Receiver<Control>>, is_parent: bool) -> Result<(), Failure> {
        let end = self.end.clone();
        spawn("input", move || {
            let has_ended = match commands {
                Some(started) => control::execute_lines(&started),
                None => io::copy(&mut io::stdin(), &mut io::sink()).is_ok(),
            };
            if has_ended && is_parent {
                parent_ended(&end, "standard input");
            }
        })
    }

    /// Ends the service as a signal does when the process of this number ends.
    pub fn watch_parent(&self, pid: &Path) -> Result<(), Failure> {
        let pid = pid.display().to_string();
        let Some(start) = start_of(&pid) else {
            let problem = format!("--with-parent={pid}: there is no such process; name one that runs");
            return Err(Failure::usage(problem));
        };
        let end = self.end.clone();
        spawn("parent", move || {
            while start_of(&pid).as_ref() == Some(&start) {
                thread::sleep(POLL_PAUSE);
            }
            parent_ended(&end, &format!("process {pid}"));
        })
    }

    /// Returns the function to call when the service is broken.
    pub fn on_broken(&self) -> impl FnOnce() + Send + 'static {
        let end = self.end.clone();
        let line = "nothing could be served any more; the log says why, start it again";
        move || drop(end.send(Err(line.to_owned())))
    }

    /// Blocks until the first signal, or until the service is broken or its cluster has ended: a supervisor starts both
    /// anew.
    pub fn wait(&self, mut cluster: Option<&mut Cluster>) -> End {
        let pause = if cluster.is_some() { POLL_PAUSE } else { Duration::MAX };
        loop {
            match self.ends.recv_timeout(pause) {
                Ok(end) => return end,
                Err(_) => cluster.as_mut().and_then(|cluster| cluster.ended()).map_or(Ok(()), Err)?,
            }
        }
    }
}

/// Ends the service as a signal does.
fn parent_ended(end: &Sender<End>, what: &str) {
    log::info!("{what} has ended, and this process with it (--with-parent)");
    if !HAS_WORK.load(SeqCst) {
        exit(0);
    }
    let _ = end.send(Ok(()));
}

/// Returns the start time of a process that has not ended, which tells it from a later process of this number.
fn start_of(pid: &str) -> Option<String> {
    let pid: u32 = pid.parse().ok()?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in brackets, may have brackets and spaces.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let has_ended = matches!(fields.next(), Some("Z" | "X"));
    fields.nth(18).filter(|_| !has_ended).map(str::to_owned)
}
