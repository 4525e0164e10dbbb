//! The command `userd`: reads arguments and environment, sets up log and signals, executes a subcommand or runs the
//! service, and returns the exit code.

mod arguments;
mod commands;
mod embedded;
mod env_file;
mod environment;
mod export;
mod export_output;
mod healthcheck;
mod import;
mod log;
mod maintenance;
mod manual;
mod privileges;
mod serve;
mod signals;
mod test;

use crate::StartError;
use ::log::Level;
use arguments::Args;
use commands::Subcommand;
use std::io::{self, Write};
use std::{env, process::ExitCode};

/// Executes the command line. Returns the exit code.
pub fn run() -> ExitCode {
    signals::reset_signals();
    let done = Args::parse(env::args_os()).and_then(|args| args.map_or(Ok(()), execute_subcommand));
    let is_test = env::args_os().nth(1).is_some_and(|word| word == commands::TEST_SUBCOMMAND);
    let failure = done.err().unwrap_or_default();
    let Failure { exit_code, message } = if is_test { test::to_test_failure(failure) } else { failure };
    report_exit(&message);
    ExitCode::from(exit_code)
}

/// Reports why the process ends, unless `message` is empty: as a line of the log if the log on standard error is in
/// JSON, else as text on standard error. Blocks until the log is written.
fn report_exit(message: &str) {
    let is_logged = log::IS_JSON.get() == Some(&true) && ::log::log_enabled!(Level::Error);
    if is_logged && !message.is_empty() {
        ::log::error!("{message}");
    }
    ::log::logger().flush();
    if !is_logged && !message.is_empty() {
        // Ignores an error, because standard error may be a terminal that is closed.
        let line = log::with_priority(Level::Error, format!("userd: {message}"));
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Executes the subcommand, or runs the service.
fn execute_subcommand(mut args: Args) -> Result<(), Failure> {
    if args.subcommand != Subcommand::Test {
        // `set_env_variables` must be called while the process has one thread.
        environment::set_env_variables(&mut args)?;
    }
    let args = &args;
    if ![Subcommand::Service, Subcommand::Test].contains(&args.subcommand) {
        let is_import = args.subcommand == Subcommand::Import;
        let text = if is_import { "interrupted; nothing was imported" } else { "" };
        signals::handle_signals(move |signal| signals::exit_now(128 + signal, text))?;
    }
    match args.subcommand {
        Subcommand::Service => serve::serve(args),
        Subcommand::Export => export::export(args),
        Subcommand::Import => import::import(args),
        Subcommand::Migrate => maintenance::migrate(args),
        Subcommand::Check => maintenance::check(args),
        Subcommand::Recount => maintenance::recount(args),
        Subcommand::Grants => maintenance::print_grants(args),
        Subcommand::Test => test::test(args),
        Subcommand::Config => maintenance::print_config(args),
        Subcommand::Healthcheck => healthcheck::check_health(args),
        Subcommand::Man => manual::print_manual_page(),
        Subcommand::Completion => manual::print_completion(args),
    }
}

/// A command that failed: its exit code, and a message for standard error, which may be empty.
#[derive(Debug, Default)]
struct Failure {
    exit_code: u8,
    message: String,
}

impl Failure {
    /// Returns the failure for a wrong command line or a wrong environment variable.
    fn usage(problem: impl ToString) -> Failure {
        Failure { exit_code: 2, message: problem.to_string() }
    }

    /// Returns the failure for a command that could not start or could not go on.
    fn runtime(problem: impl ToString) -> Failure {
        Failure { exit_code: 1, message: problem.to_string() }
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

/// Prints a text on standard output. The failure has no message if the reader, such as `head`, has closed the output.
fn print(text: impl AsRef<[u8]>) -> Result<(), Failure> {
    io::stdout().write_all(text.as_ref()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Failure { exit_code: 1, message: String::new() },
        _ => Failure::runtime(format!("cannot write to standard output: {error}")),
    })
}
