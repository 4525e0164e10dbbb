//! The end of the process: by signals, by the end of its parent, or of a part that it needs.

use super::{Failure, report};
use crate::private_postgres::Cluster;
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::unistd::Pid;
use parking_lot::{Condvar, Mutex};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

/// Interval between two looks at the cluster and at the parent.
pub const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// Time after the first signal in which a further one counts as its repetition.
const REPETITION: Duration = Duration::from_secs(1);

/// True once the service has requests to finish. While it is false, the first signal ends the process at once, as
/// a second one does later.
pub static HAS_WORK: AtomicBool = AtomicBool::new(false);

/// The end of the service, until [`wait`] takes it.
static END: Mutex<Option<Result<(), String>>> = Mutex::new(None);

/// The exit code if the service ends before it has served: 0, or of the signal that has ended it.
static EXIT_CODE: AtomicU8 = AtomicU8::new(0);

/// Wakes [`wait`] up.
static ENDED: Condvar = Condvar::new();

/// Remains that a process that ends at once has to remove.
pub struct Remains {
    /// The private cluster's server, if this process has started it.
    pub server: Option<u32>,
    /// The unfinished file of an export.
    pub file: Option<PathBuf>,
}

/// Remains that [`exit`] removes. It waits while they are locked.
pub static REMAINS: Mutex<Remains> = Mutex::new(Remains { server: None, file: None });

/// Ends the process at once, and leaves nothing that is unfinished. `line` is for standard error, and may be empty.
pub fn exit(code: i32, line: &str) -> ! {
    let remains = REMAINS.lock();
    if let Some(pid) = remains.server {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
    }
    if let Some(file) = &remains.file {
        let _ = fs::remove_file(file);
    }
    report(line);
    process::exit(code)
}

/// Undoes what a parent may have left to this process: signals that are blocked, and a SIGCHLD that is ignored, with which
/// no child can be waited for.
pub fn reset() {
    let _ = SigSet::all().thread_unblock();
    // SAFETY: no function is set as the handler.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
}

/// Calls `each` on a thread with every signal that ends the process: SIGTERM, SIGINT, and SIGHUP unless it is ignored,
/// as `nohup` has it.
pub fn on_signals(each: impl FnMut(i32) + Send + 'static) -> Result<(), Failure> {
    let signals = [SIGTERM, SIGINT].into_iter().chain(heeded([Signal::SIGHUP]));
    let mut signals = Signals::new(signals).map_err(Failure::runtime)?;
    spawn("signals", move || signals.forever().for_each(each))
}

/// Ignores those of these signals that the process does not ignore yet, and returns their numbers.
pub fn heeded(signals: impl IntoIterator<Item = Signal>) -> impl Iterator<Item = i32> {
    // SAFETY: no function is set as the handler.
    let before = |number| unsafe { signal(number, SigHandler::SigIgn) };
    let heeded = move |number: &Signal| !matches!(before(*number), Ok(SigHandler::SigIgn));
    signals.into_iter().filter(heeded).map(|number| number as i32)
}

/// Starts a thread that ends with the process.
pub fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop).map_err(Failure::runtime)
}

/// Ends the service: on request, or with the reason why it cannot go on. The first end counts.
pub fn end(end: Result<(), String>) {
    END.lock().get_or_insert(end);
    ENDED.notify_one();
}

/// Returns the end of the process if the service has been ended before it served.
pub fn interruption() -> Option<Failure> {
    END.lock().is_some().then(|| Failure { code: EXIT_CODE.load(SeqCst), line: String::new() })
}

/// Lets signals end the service from now on: the first one, once the requests in flight are finished; one that comes a
/// second or more later, at once. A signal within [`REPETITION`] of the first one is part of it: `timeout` and npm pass on
/// what the terminal has sent already.
pub fn end_service() -> Result<(), Failure> {
    let mut first: Option<Instant> = None;
    on_signals(move |signal| match first {
        Some(first) if first.elapsed() < REPETITION => {}
        None if HAS_WORK.load(SeqCst) => {
            first = Some(Instant::now());
            EXIT_CODE.store(128 + signal as u8, SeqCst);
            end(Ok(()));
        }
        _ => exit(128 + signal, ""),
    })
}

/// Blocks until the service ends, or its cluster has: a supervisor starts both anew.
pub fn wait(mut cluster: Option<&mut Cluster>) -> Result<(), String> {
    let pause = if cluster.is_some() { WATCH_PAUSE } else { Duration::MAX };
    let mut end = END.lock();
    while end.is_none() {
        if ENDED.wait_for(&mut end, pause).timed_out() {
            *end = cluster.as_mut().and_then(|cluster| cluster.ended()).map(Err);
        }
    }
    end.take().expect("it is there")
}
