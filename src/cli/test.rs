//! `userd test`: runs a command beside a throw-away service, or serves for a test harness.

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

/// Variables of COMMAND, each with the name of the URL that it has. These names are also the members of a control's
/// answer.
const VARIABLES: [(&str, &str); 3] =
    [("USERD_URL", "url"), ("USERD_CONTROL", "control"), ("USERD_DATABASE_URL", "databaseUrl")];

/// Signals that this process passes on to COMMAND.
const FORWARDED_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// The least length of the name of `--control`, so that a web page cannot guess it.
const MIN_CONTROL_BYTES: usize = 16;

/// The most lines of the log that are printed if COMMAND fails.
const MAX_LOG_LINES: usize = 50;

/// The last lines of the log.
static LOG_TAIL: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Runs COMMAND to its end, or serves until the parent, standard input or a signal ends the process.
pub fn test(args: &Args) -> Result<(), Failure> {
    let command = args.command();
    let until_signal = args.has(commands::UNTIL_SIGNAL);
    let (name, settings) = (control_name(args)?, parse_settings(args)?);
    let lookup = |name: &str| settings.get(name).cloned();
    if command.is_empty() {
        signals::end_service_on_signal()?;
        log_to_stderr(&lookup)?;
        if !until_signal {
            // Ignores SIGTTIN, so that a read from the terminal fails if this process is a job in the background. The
            // signal would stop the process.
            signals::ignore_unignored([Signal::SIGTTIN]).for_each(drop);
            end_process_after("input", || _ = io::copy(&mut io::stdin(), &mut io::sink()))?;
            // Polls the id of the parent. The kernel can send a signal instead, but sends it when the thread that has
            // started this process ends, although the parent goes on.
            let parent = getppid();
            end_process_after("parent", move || {
                while getppid() == parent {
                    thread::sleep(signals::WATCH_PAUSE);
                }
            })?;
        }
    } else {
        log_to(&lookup, keep_log_tail)?;
    }
    let config = testing::config(&settings, true).map_err(Failure::usage)?;
    let read = |file| fs::read(file).map_err(|error| unreadable_failure(file, error));
    let users = args.value(commands::SEED).map(read).transpose()?;
    let services = Services::start(&config, users.as_deref(), name).map_err(Failure::runtime)?;
    let known = services.first_urls();
    let urls = VARIABLES.into_iter().filter_map(|(name, key)| Some((name, known[key].as_str()?)));
    if command.is_empty() { serve(urls) } else { run(&command, urls).inspect_err(|_| explain(services)) }
}

/// Returns a failure with the exit code of `userd test` and a single line. A failure of COMMAND has no line, and keeps
/// its exit code.
pub fn with_test_code(Failure { code, line }: Failure) -> Failure {
    let code = if line.is_empty() { code } else { code.max(OWN_FAILURE_CODE) };
    let lines = line.lines().map(str::trim).filter(|line| !line.is_empty());
    Failure { code, line: lines.collect::<Vec<_>>().join("; ") }
}

/// Returns the name that `--control` gives. The path of each control begins with this name.
fn control_name(args: &Args) -> Result<Option<String>, Failure> {
    let Some(name) = args.value(commands::CONTROL).map(Path::to_string_lossy) else { return Ok(None) };
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if name.len() < MIN_CONTROL_BYTES || !name.bytes().all(is_allowed) {
        let problem = "--control: a name has 16 characters at least, of A-Z, a-z, 0-9 and -._~";
        return Err(Failure::usage(problem));
    }
    Ok(Some(name.into_owned()))
}

/// Returns the settings of the service from the options of `userd test`.
fn parse_settings(args: &Args) -> Result<BTreeMap<String, OsString>, Failure> {
    let mut settings: BTreeMap<String, OsString> = BTreeMap::from([("LOG_LEVEL".to_owned(), "warn".into())]);
    for pair in args.occurrences(commands::SET).flatten() {
        let pair = pair.to_string_lossy();
        let (name, value) =
            pair.split_once('=').ok_or_else(|| Failure::usage("--set: it has the form NAME=VALUE"))?;
        settings.insert(name.to_owned(), value.into());
    }
    for (option, name) in commands::VARIABLES {
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

/// Prints the variables, and blocks until a signal, the end of standard input or the end of the parent.
fn serve<'a>(variables: impl Iterator<Item = (&'static str, &'a str)>) -> Result<(), Failure> {
    signals::HAS_WORK.store(true, SeqCst);
    let lines: String = variables.map(|(name, value)| format!("{name}={value}\n")).collect();
    // Ignores an error, because a harness may have closed standard output.
    let _ = writeln!(io::stdout(), "{lines}");
    signals::wait_for_end(None).map_err(Failure::runtime)
}

/// Calls `wait` on a thread, and ends the process when `wait` returns.
fn end_process_after(name: &str, wait: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    const INPUT_ENDED: &str = "standard input has ended before the service could start: keep it open as long as the \
                               service is needed, name a COMMAND, or add --until-signal";
    signals::spawn_thread(name, || {
        wait();
        if !signals::HAS_WORK.load(SeqCst) {
            signals::exit_now(OWN_FAILURE_CODE.into(), INPUT_ENDED);
        }
        signals::end_service(Ok(()));
    })
}

/// Keeps the last lines of the log.
fn keep_log_tail(text: &[u8]) {
    let mut kept = LOG_TAIL.lock();
    kept.extend(String::from_utf8_lossy(text).split_inclusive('\n').map(str::to_owned));
    let surplus = kept.len().saturating_sub(MAX_LOG_LINES);
    kept.drain(..surplus);
}

/// Prints the last requests and the last lines of the log on standard error, which may explain a failure of COMMAND.
fn explain(services: &Services) {
    log::logger().flush();
    let (requests, lines) = (services.last_requests(), LOG_TAIL.lock().concat());
    for (what, lines) in [("last requests", requests), ("last lines of the log", lines)] {
        if !lines.is_empty() {
            let _ = write!(io::stderr(), "userd: {what}:\n{lines}");
        }
    }
}

/// Runs COMMAND to its end. Fails with its exit code, unless the code is 0.
fn run<'a>(
    command: &[&OsString],
    variables: impl Iterator<Item = (&'static str, &'a str)>,
) -> Result<(), Failure> {
    let program = Path::new(command[0]).display();
    let code = execute_command(command, variables).map_err(|error| {
        let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        Failure { code, line: format!("cannot execute {program}: {error}") }
    })?;
    if code == 0 { Ok(()) } else { Err(Failure { code, line: String::new() }) }
}

/// Runs COMMAND to its end. Returns its exit code. Fails if COMMAND cannot be executed.
fn execute_command<'a>(
    command: &[&OsString],
    variables: impl Iterator<Item = (&'static str, &'a str)>,
) -> io::Result<u8> {
    // Registers signals before COMMAND starts, so that no signal is lost.
    let mut signals = SignalsInfo::<WithOrigin>::new(signals::ignore_unignored(FORWARDED_SIGNALS))?;
    let parent = Pid::this();
    let mut program = Command::new(command[0]);
    program.args(&command[1..]).envs(variables);
    let prepare = move || {
        // Has the kernel end COMMAND if this process ends. Fails if this process has ended already.
        set_pdeathsig(Signal::SIGTERM)?;
        if getppid() == parent { Ok(()) } else { Err(Errno::ESRCH.into()) }
    };
    // SAFETY: the closure only makes system calls.
    let child = unsafe { program.pre_exec(prepare) }.spawn()?;
    let child = Pid::from_raw(child.id().cast_signed());
    let _ = signals::spawn_thread("signals", move || {
        for origin in &mut signals {
            // A signal of the terminal reaches all processes of the group, and so COMMAND, unless it has left the
            // group.
            let has_come = origin.cause == Cause::Kernel && getpgid(Some(child)) == Ok(getpgrp());
            if let (false, Ok(signal)) = (has_come, Signal::try_from(origin.signal)) {
                let _ = kill(child, signal);
            }
        }
    });
    // Does not reap COMMAND, so that no other process gets its number while signals are passed on.
    match waitid(Id::Pid(child), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)? {
        WaitStatus::Exited(_, code) => Ok(code as u8),
        WaitStatus::Signaled(_, signal, _) => Ok(128 + signal as u8),
        _ => Ok(OWN_FAILURE_CODE),
    }
}
