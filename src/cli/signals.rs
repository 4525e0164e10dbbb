//! Ends the process: because of a signal, or because its parent, its cluster or a thread that it needs has ended.

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

/// Pause between two looks whether the cluster or the parent has ended.
pub const WATCH_PAUSE: Duration = Duration::from_secs(1);

/// Time after the first signal in which a further signal counts as a repetition of the first.
const MAX_REPETITION_TIME: Duration = Duration::from_secs(1);

/// True if a signal has to wait until the service has finished its requests. If false, the first signal ends the
/// process at once.
pub static HAS_WORK: AtomicBool = AtomicBool::new(false);

/// The end of the service: `Err` if the service cannot go on, with the reason. `None` until the service ends, and after
/// [`wait_for_end`] has taken the value.
static SERVICE_END: Mutex<Option<Result<(), String>>> = Mutex::new(None);

/// The exit code of a service that ends before it has served: 0, or the code of the signal that has ended it.
static EXIT_CODE: AtomicU8 = AtomicU8::new(0);

/// Wakes [`wait_for_end`] up.
static SERVICE_ENDED: Condvar = Condvar::new();

/// The server and the file that a process which ends at once must not leave behind.
pub struct ExitCleanup {
    /// The process id of the private cluster's server, if this process has started it.
    pub server: Option<u32>,
    /// The temporary file of an export.
    pub file: Option<PathBuf>,
}

/// The server and the file that [`exit_now`] ends and removes. While this is locked, [`exit_now`] waits.
pub static EXIT_CLEANUP: Mutex<ExitCleanup> = Mutex::new(ExitCleanup { server: None, file: None });

/// Ends the process at once, after it has cleaned up by [`EXIT_CLEANUP`]. Prints `line` on standard error, unless it is
/// empty.
pub fn exit_now(code: i32, line: &str) -> ! {
    let cleanup = EXIT_CLEANUP.lock();
    if let Some(pid) = cleanup.server {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
    }
    if let Some(file) = &cleanup.file {
        let _ = fs::remove_file(file);
    }
    report(line);
    process::exit(code)
}

/// Resets signals that the parent has left blocked, and an ignored SIGCHLD, because a process that ignores SIGCHLD
/// cannot wait for a child.
pub fn reset_signals() {
    let _ = SigSet::all().thread_unblock();
    // SAFETY: no function is set as the handler.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
}

/// Starts a thread that calls `each` with every SIGTERM, SIGINT and SIGHUP. Leaves SIGHUP alone if the process ignores
/// it, as below `nohup`.
pub fn handle_signals(each: impl FnMut(i32) + Send + 'static) -> Result<(), Failure> {
    let signals = [SIGTERM, SIGINT].into_iter().chain(ignore_unignored([Signal::SIGHUP]));
    let mut signals = Signals::new(signals).map_err(Failure::runtime)?;
    spawn_thread("signals", move || signals.forever().for_each(each))
}

/// Ignores these signals, until a handler is set. Returns the numbers of the signals that the process did not ignore
/// before.
pub fn ignore_unignored(signals: impl IntoIterator<Item = Signal>) -> impl Iterator<Item = i32> {
    // SAFETY: no function is set as the handler.
    let ignore = |number| unsafe { signal(number, SigHandler::SigIgn) };
    let was_heeded = move |number: &Signal| !matches!(ignore(*number), Ok(SigHandler::SigIgn));
    signals.into_iter().filter(was_heeded).map(|number| number as i32)
}

/// Starts a thread that no other thread waits for.
pub fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop).map_err(Failure::runtime)
}

/// Ends the service. `Err` has the reason why the service cannot go on. Only the first call counts.
pub fn end_service(end: Result<(), String>) {
    SERVICE_END.lock().get_or_insert(end);
    SERVICE_ENDED.notify_one();
}

/// Returns the failure of a start that a signal has interrupted, or `None` if no signal has come.
pub fn interruption() -> Option<Failure> {
    SERVICE_END.lock().is_some().then(|| Failure { code: EXIT_CODE.load(SeqCst), line: String::new() })
}

/// Lets signals end the service from now on. The first signal ends it once the requests in flight are finished. A
/// signal that comes later than [`MAX_REPETITION_TIME`] ends it at once. An earlier signal is ignored, because
/// `timeout` and npm repeat the signal that the terminal has sent.
pub fn end_service_on_signal() -> Result<(), Failure> {
    let mut first: Option<Instant> = None;
    handle_signals(move |signal| match first {
        Some(first) if first.elapsed() < MAX_REPETITION_TIME => {}
        None if HAS_WORK.load(SeqCst) => {
            first = Some(Instant::now());
            EXIT_CODE.store(128 + signal as u8, SeqCst);
            end_service(Ok(()));
        }
        _ => exit_now(128 + signal, ""),
    })
}

/// Blocks until the service ends or its cluster has ended. Returns how the service has ended.
pub fn wait_for_end(mut cluster: Option<&mut Cluster>) -> Result<(), String> {
    let pause = if cluster.is_some() { WATCH_PAUSE } else { Duration::MAX };
    let mut end = SERVICE_END.lock();
    while end.is_none() {
        if SERVICE_ENDED.wait_for(&mut end, pause).timed_out() {
            *end = cluster.as_mut().and_then(|cluster| cluster.server_end_reason()).map(Err);
        }
    }
    end.take().expect("the service has ended")
}
