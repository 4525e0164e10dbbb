//! Ends the process: because of a signal, or because its parent, its cluster or a thread that it needs has ended.

use super::{Failure, report_exit};
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

/// Pause between two polls for the end of the private cluster or of the parent process.
pub const END_POLL_PAUSE: Duration = Duration::from_secs(1);

/// Time after the first signal in which further signals are ignored, because they may be repetitions of the first.
const MAX_REPETITION_TIME: Duration = Duration::from_secs(1);

/// True if the first signal lets the service finish its requests before the process ends. If false, the first signal
/// ends the process immediately.
pub static EXITS_GRACEFULLY: AtomicBool = AtomicBool::new(false);

/// How the service has ended: `Err` with the reason if it could not go on. `None` until the service ends, and after
/// [`wait_for_service_end`] has taken the value.
static SERVICE_RESULT: Mutex<Option<Result<(), String>>> = Mutex::new(None);

/// The exit code of a service that ends before it has served: 0, or 128 plus the number of the signal that has ended
/// it.
static EARLY_EXIT_CODE: AtomicU8 = AtomicU8::new(0);

/// Wakes [`wait_for_service_end`] up when the service ends.
static SERVICE_ENDED: Condvar = Condvar::new();

/// A server to end and a file to remove when the process ends, so that it leaves neither behind.
pub struct ExitCleanup {
    /// The process id of the private cluster's server, if this process has started it.
    pub postgres_pid: Option<u32>,
    /// The temporary file of an export that is not complete.
    pub temporary_file: Option<PathBuf>,
}

/// The server that [`exit_now`] ends, and the file that it removes. A thread that keeps this locked delays
/// [`exit_now`].
pub static CLEANUP: Mutex<ExitCleanup> = Mutex::new(ExitCleanup { postgres_pid: None, temporary_file: None });

/// Ends the process immediately, after it has ended the server and removed the file in [`CLEANUP`]. Prints `message` on
/// standard error, unless it is empty.
pub fn exit_now(code: i32, message: &str) -> ! {
    let cleanup = CLEANUP.lock();
    if let Some(pid) = cleanup.postgres_pid {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGINT);
    }
    if let Some(file) = &cleanup.temporary_file {
        let _ = fs::remove_file(file);
    }
    report_exit(message);
    process::exit(code)
}

/// Unblocks the signals that the parent has left blocked, and no longer ignores SIGCHLD, because a process that ignores
/// SIGCHLD cannot wait for a child.
pub fn reset_signals() {
    let _ = SigSet::all().thread_unblock();
    // SAFETY: no function is set as the handler.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
}

/// Starts a thread that calls `each` with the number of every SIGTERM, SIGINT and SIGHUP. Leaves SIGHUP alone if the
/// process already ignores it, as under `nohup`. Ignores SIGXFSZ, so that a write beyond `ulimit -f` fails and does not
/// end the process.
pub fn handle_signals(each: impl FnMut(i32) + Send + 'static) -> Result<(), Failure> {
    ignore_signals([Signal::SIGXFSZ]).for_each(drop);
    let signals = [SIGTERM, SIGINT].into_iter().chain(ignore_signals([Signal::SIGHUP]));
    let mut signals = Signals::new(signals).map_err(Failure::runtime)?;
    spawn_thread("signals", move || signals.forever().for_each(each))
}

/// Returns a lazy iterator, whose steps make the process ignore these signals. Its items are the numbers of the signals
/// that the process did not ignore before. A handler that is set later takes precedence.
pub fn ignore_signals(signals: impl IntoIterator<Item = Signal>) -> impl Iterator<Item = i32> {
    // SAFETY: no function is set as the handler.
    let ignore = |number| unsafe { signal(number, SigHandler::SigIgn) };
    let was_heeded = move |number: &Signal| !matches!(ignore(*number), Ok(SigHandler::SigIgn));
    signals.into_iter().filter(was_heeded).map(|number| number as i32)
}

/// Starts a thread of this name, for whose end no other thread waits.
pub fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    thread::Builder::new().name(name.to_owned()).spawn(body).map(drop).map_err(Failure::runtime)
}

/// Makes [`wait_for_service_end`] return `result`: `Err` with the reason if the service cannot go on. Only the first
/// call counts.
pub fn end_service(result: Result<(), String>) {
    SERVICE_RESULT.lock().get_or_insert(result);
    SERVICE_ENDED.notify_one();
}

/// Returns the failure of a service whose start a signal has interrupted, or `None` if no signal has come.
pub fn interruption() -> Option<Failure> {
    let has_ended = SERVICE_RESULT.lock().is_some();
    has_ended.then(|| Failure { exit_code: EARLY_EXIT_CODE.load(SeqCst), message: String::new() })
}

/// Lets signals end the service from now on. The first signal ends it once the requests in flight are finished. A
/// further signal within [`MAX_REPETITION_TIME`] is ignored, because `timeout` and npm repeat the signal that the
/// terminal has sent. A later signal ends the process immediately.
pub fn end_service_on_signal() -> Result<(), Failure> {
    let mut first: Option<Instant> = None;
    handle_signals(move |signal| match first {
        Some(first) if first.elapsed() < MAX_REPETITION_TIME => {}
        None if EXITS_GRACEFULLY.load(SeqCst) => {
            first = Some(Instant::now());
            EARLY_EXIT_CODE.store(128 + signal as u8, SeqCst);
            end_service(Ok(()));
        }
        _ => exit_now(128 + signal, ""),
    })
}

/// Blocks until the service or its private cluster has ended. Returns how the service has ended.
pub fn wait_for_service_end(mut cluster: Option<&mut Cluster>) -> Result<(), String> {
    let pause = if cluster.is_some() { END_POLL_PAUSE } else { Duration::MAX };
    let mut result = SERVICE_RESULT.lock();
    while result.is_none() {
        if SERVICE_ENDED.wait_for(&mut result, pause).timed_out() {
            *result = cluster.as_mut().and_then(|cluster| cluster.server_end_reason()).map(Err);
        }
    }
    result.take().expect("the service has ended")
}
