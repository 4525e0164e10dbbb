//! `userd test`: runs a command beside a throw-away service, or serves until a test harness ends it.

use super::arguments::Args;
use super::log::{log_to, log_to_stderr};
use super::{Failure, commands, import::unreadable_failure, signals};
use crate::testing::{self, Services};
use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, getpgid, getpgrp, getppid};
use parking_lot::Mutex;
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::{fs, path::Path, thread};

/// Exit code of a failure of `userd test` itself, not of COMMAND.
const OWN_FAILURE_CODE: u8 = 125;

/// Environment variables of COMMAND, the program that `userd test` runs. Behind each variable is the name that its URL has
/// in the JSON of `Services::first_service_urls`.
const COMMAND_VARIABLES: [(&str, &str); 3] =
    [("USERD_URL", "url"), ("USERD_CONTROL", "control"), ("USERD_DATABASE_URL", "databaseUrl")];

/// Signals that this process passes on to COMMAND.
const FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// The least length of NAME in `--control=NAME`, in bytes, so that a web page cannot guess the URL of the controls (the
/// requests that steer a test's service).
const MIN_CONTROL_NAME_BYTES: usize = 16;

/// The most lines of the service's log that are printed if COMMAND fails.
const MAX_LOG_TAIL_LINES: usize = 50;

/// The last lines of the service's log.
static LOG_TAIL: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Runs COMMAND to its end, or serves until the parent, standard input or a signal ends the process.
pub fn test(args: &Args) -> Result<(), Failure> {
    let command = args.test_command();
    let (name, settings) = (parse_control_name(args)?, parse_settings(args)?);
    let lookup = |name: &str| settings.get(name).cloned();
    if command.is_empty() {
        signals::end_service_on_signal()?;
        log_to_stderr(&lookup)?;
        if !args.has(commands::UNTIL_SIGNAL) {
            // Ignores SIGTTIN, which would stop this process if it reads from the terminal in the background. The read
            // fails instead.
            signals::ignore_signals([Signal::SIGTTIN]).for_each(drop);
            end_process_after("input", || _ = io::copy(&mut io::stdin(), &mut io::sink()))?;
            // Polls the parent's id. The kernel's signal for the end of the parent comes too early: it is sent when the
            // thread that has started this process ends.
            let parent = getppid();
            end_process_after("parent", move || {
                while getppid() == parent {
                    thread::sleep(signals::END_POLL_PAUSE);
                }
            })?;
        }
    } else {
        log_to(&lookup, keep_log_tail)?;
    }
    let config = testing::service_config(&settings, true).map_err(Failure::usage)?;
    let read = |file| fs::read(file).map_err(|error| unreadable_failure(file, error));
    let users = args.value(commands::SEED).map(read).transpose()?;
    let services = Services::start_first(&config, users.as_deref(), name).map_err(Failure::runtime)?;
    let urls = services.first_service_urls();
    let variables = COMMAND_VARIABLES.into_iter();
    let variables: Vec<_> = variables.filter_map(|(name, url)| Some((name, urls[url].as_str()?))).collect();
    if command.is_empty() {
        return print_variables_and_serve(&variables);
    }
    run_command(&command, &variables).inspect_err(|_| print_last_requests_and_log(services))
}

/// Returns the failure with an exit code of `userd test` itself, and with its message in one line. A failure of COMMAND
/// has no message, and keeps its exit code.
pub fn to_test_failure(Failure { exit_code, message }: Failure) -> Failure {
    let exit_code = if message.is_empty() { exit_code } else { exit_code.max(OWN_FAILURE_CODE) };
    let lines = message.lines().map(str::trim).filter(|line| !line.is_empty());
    Failure { exit_code, message: lines.collect::<Vec<_>>().join("; ") }
}

/// Parses the NAME of `--control=NAME`. The path of each control (a request that steers a test's service) begins with
/// NAME.
fn parse_control_name(args: &Args) -> Result<Option<String>, Failure> {
    let Some(name) = args.value(commands::CONTROL).map(Path::to_string_lossy) else { return Ok(None) };
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if name.len() < MIN_CONTROL_NAME_BYTES || !name.bytes().all(is_allowed) {
        let problem = "--control: a name has 16 characters at least, of A-Z, a-z, 0-9 and -._~";
        return Err(Failure::usage(problem));
    }
    Ok(Some(name.into_owned()))
}

/// Parses the settings of the service in the options of `userd test`.
fn parse_settings(args: &Args) -> Result<BTreeMap<String, OsString>, Failure> {
    let mut settings: BTreeMap<String, OsString> = BTreeMap::from([("LOG_LEVEL".to_owned(), "warn".into())]);
    for pair in args.occurrences(commands::SET).flatten() {
        let pair = pair.to_string_lossy();
        let (name, value) =
            pair.split_once('=').ok_or_else(|| Failure::usage("--set: it has the form NAME=VALUE"))?;
        settings.insert(name.to_owned(), value.into());
    }
    for (option, name) in commands::ENV_OPTIONS {
        settings.extend(args.value(option).map(|value| (name.to_owned(), value.into())));
    }
    if settings.get("HOST").is_some_and(|host| host.as_encoded_bytes().starts_with(b"unix:")) {
        return Err(Failure::usage("HOST: a service of a test listens on a TCP port"));
    }
    if args.has(commands::ENV_FILE) {
        return Err(Failure::usage("--env-file has no effect on it: --set gives it a setting"));
    }
    Ok(settings)
}

/// Prints the environment variables, and serves until a signal, the end of standard input or the end of the parent.
fn print_variables_and_serve(variables: &[(&str, &str)]) -> Result<(), Failure> {
    signals::EXITS_GRACEFULLY.store(true, SeqCst);
    let lines: String = variables.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    // Ignores an error, because a test harness may have closed standard output.
    let _ = writeln!(io::stdout(), "{lines}");
    signals::wait_for_service_end(None).map_err(Failure::runtime)
}

/// Starts a thread that calls `wait`, and ends the process when `wait` returns.
fn end_process_after(thread_name: &str, wait: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    const INPUT_ENDED: &str = "standard input has ended before the service could start: keep it open as long as the \
                               service is needed, name a COMMAND, or add --until-signal";
    signals::spawn_thread(thread_name, || {
        wait();
        if !signals::EXITS_GRACEFULLY.load(SeqCst) {
            signals::exit_now(OWN_FAILURE_CODE.into(), INPUT_ENDED);
        }
        signals::end_service(Ok(()));
    })
}

/// Appends lines of the service's log to `LOG_TAIL`, and drops the oldest lines if it has too many.
fn keep_log_tail(text: &[u8]) {
    let mut kept = LOG_TAIL.lock();
    kept.extend(String::from_utf8_lossy(text).split_inclusive('\n').map(str::to_owned));
    let surplus = kept.len().saturating_sub(MAX_LOG_TAIL_LINES);
    kept.drain(..surplus);
}

/// Prints the last requests and the last lines of the log on standard error, because they may explain why COMMAND
/// failed.
fn print_last_requests_and_log(services: &Services) {
    log::logger().flush();
    let (requests, lines) = (services.last_requests(), LOG_TAIL.lock().concat());
    for (what, lines) in [("last requests", requests), ("last lines of the log", lines)] {
        if !lines.is_empty() {
            let _ = write!(io::stderr(), "userd: {what}:\n{lines}");
        }
    }
}

/// Runs COMMAND with these environment variables to its end. Fails with its exit code, unless the code is 0.
fn run_command(command: &[&OsString], variables: &[(&str, &str)]) -> Result<(), Failure> {
    let program = Path::new(command[0]).display();
    let exit_code = run_to_exit_code(command, variables).map_err(|error| {
        let exit_code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        Failure { exit_code, message: format!("cannot execute {program}: {error}") }
    })?;
    if exit_code == 0 { Ok(()) } else { Err(Failure { exit_code, message: String::new() }) }
}

/// Starts COMMAND, passes signals on to it, and waits for its end. Returns its exit code. Fails if COMMAND cannot be
/// executed.
fn run_to_exit_code(command: &[&OsString], variables: &[(&str, &str)]) -> io::Result<u8> {
    // Registers signals before COMMAND starts, so that no signal is lost.
    let mut signals = SignalsInfo::<WithOrigin>::new(signals::ignore_signals(FORWARDED_SIGNALS))?;
    let parent = Pid::this();
    let mut program = Command::new(command[0]);
    program.args(&command[1..]).envs(variables.iter().copied());
    let prepare = move || {
        // Has the kernel send SIGTERM to COMMAND when `userd test` ends. Fails if `userd test` has ended already.
        set_pdeathsig(Signal::SIGTERM)?;
        if getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
    };
    // SAFETY: the closure only makes system calls.
    let child = unsafe { program.pre_exec(prepare) }.spawn()?;
    let child = Pid::from_raw(child.id().cast_signed());
    let _ = signals::spawn_thread("signals", move || {
        for origin in &mut signals {
            // Does not pass on a signal of the terminal, which reaches all processes of the group, unless COMMAND has
            // left the group.
            let has_come = origin.cause == Cause::Kernel && getpgid(Some(child)) == Ok(getpgrp());
            if let (false, Ok(signal)) = (has_come, Signal::try_from(origin.signal)) {
                let _ = kill(child, signal);
            }
        }
    });
    // Does not reap COMMAND, so that no other process gets its process id while signals are passed on.
    match waitid(Id::Pid(child), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)? {
        WaitStatus::Exited(_, code) => Ok(code as u8),
        WaitStatus::Signaled(_, signal, _) => Ok(128 + signal as u8),
        _ => Ok(OWN_FAILURE_CODE),
    }
}
