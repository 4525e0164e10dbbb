//! The command `userd`: reads arguments and environment, sets up log and signals, executes a subcommand or runs the
//! service, and returns the exit code.

mod arguments;
mod commands;
mod embedded;
mod env_file;
mod environment;
mod export;
mod healthcheck;
mod import;
mod log;
mod manual;
mod output;
mod privileges;
mod serve;
mod signals;
mod test;
mod verbs;

use crate::StartError;
use ::log::Level;
use arguments::Args;
use commands::Verb;
use std::io::{self, Write};
use std::{env, process::ExitCode};

/// Executes the command line. Returns the exit code.
pub fn run() -> ExitCode {
    signals::reset_signals();
    let done = Args::parse(env::args_os()).and_then(|args| args.map_or(Ok(()), execute));
    let is_test = env::args_os().nth(1).is_some_and(|verb| verb == commands::TEST);
    let failure = done.err().unwrap_or_default();
    let Failure { code, line } = if is_test { test::with_test_code(failure) } else { failure };
    report(&line);
    ExitCode::from(code)
}

/// Prints the reason why the process ends, unless `line` is empty. If the log on standard error is in JSON, the line is
/// a line of the log. Blocks until the log is written.
fn report(line: &str) {
    let is_logged = log::IS_JSON.get() == Some(&true) && ::log::log_enabled!(Level::Error);
    if is_logged && !line.is_empty() {
        ::log::error!("{line}");
    }
    ::log::logger().flush();
    if !is_logged && !line.is_empty() {
        // Ignores an error, because standard error may be a terminal that is closed.
        let line = log::with_priority(Level::Error, format!("userd: {line}"));
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Executes the subcommand.
fn execute(mut args: Args) -> Result<(), Failure> {
    if args.verb != Verb::Test {
        // `set_variables` must be called while the process has one thread.
        environment::set_variables(&mut args)?;
    }
    let args = &args;
    if ![Verb::Service, Verb::Test].contains(&args.verb) {
        let interrupted = if args.verb == Verb::Import { "interrupted; nothing was imported" } else { "" };
        signals::handle_signals(move |signal| signals::exit_now(128 + signal, interrupted))?;
    }
    match args.verb {
        Verb::Service => serve::serve(args),
        Verb::Export => export::export(args),
        Verb::Import => import::import(args),
        Verb::Migrate => verbs::migrate(args),
        Verb::Check => verbs::check(args),
        Verb::Recount => verbs::recount(args),
        Verb::Grants => verbs::grants(args),
        Verb::Test => test::test(args),
        Verb::Config => verbs::config(args),
        Verb::Healthcheck => healthcheck::healthcheck(args),
        Verb::Man => manual::man(),
        Verb::Completion => manual::completion(args),
    }
}

/// The end of a command that failed: an exit code, and a line for standard error, which may be empty.
#[derive(Debug, Default)]
struct Failure {
    code: u8,
    line: String,
}

impl Failure {
    /// Returns the failure of a wrong command line or a wrong variable.
    fn usage(problem: impl ToString) -> Failure {
        Failure { code: 2, line: problem.to_string() }
    }

    /// Returns the failure of a command that could not start or could not go on.
    fn runtime(problem: impl ToString) -> Failure {
        Failure { code: 1, line: problem.to_string() }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Failure {
        match error {
            StartError::Config(error) => Failure::usage(error),
            error => Failure::runtime(error),
        }
    }
}

/// Writes to standard output. Fails without a line if the reader has closed it.
fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    io::stdout().write_all(text.as_ref()).map_err(|_| Failure { code: 1, line: String::new() })
}
