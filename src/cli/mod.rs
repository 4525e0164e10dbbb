//! The command: arguments and environment to a configuration, the log, signals, start, wait, exit code.

mod arguments;
mod commands;
mod embedded;
mod env_file;
mod environment;
mod export;
mod healthcheck;
mod import;
mod log;
mod log_json;
mod manual;
mod output;
mod privileges;
mod progress;
mod serve;
mod signals;
mod verbs;

use self::log::Format;
use ::log::Level;
use arguments::Given;
use std::{
    env, fmt,
    io::{self, Write},
    process::ExitCode,
};
use userd::{StartError, transfer::TransferError};

/// Does what the arguments say. Blocks until that is done.
pub fn run() -> ExitCode {
    signals::ignore_what_asks_for_nothing();
    let given = Given::parse(env::args_os().skip(1)).map_err(Failure::argument);
    let serves = given.as_ref().is_ok_and(|given| given.verb.name.is_empty());
    let done = given.and_then(|given| {
        // No other thread is there yet.
        given.set_variables()?;
        execute(&given)
    });
    ::log::logger().flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { code, line }) => {
            let format = environment::log_format().ok().filter(|_| serves).unwrap_or(Format::Text);
            let line = match line.as_str() {
                "" => Vec::new(),
                line => format.line(Level::Error, format_args!("{line}"), "userd: "),
            };
            // Standard error may be a terminal that is closed.
            let _ = io::stderr().write_all(&line);
            ExitCode::from(code)
        }
    }
}

/// Does what the subcommand is for. Not in the table of `verbs`, which some of these read.
fn execute(given: &Given) -> Result<(), Failure> {
    match given.verb.name {
        "export" => export::export(given),
        "import" => import::import(given),
        "migrate" => verbs::migrate(given),
        "check" => verbs::check(given),
        "recount" => verbs::recount(given),
        "grants" => verbs::grants(given),
        "config" => verbs::config(given),
        "healthcheck" => healthcheck::healthcheck(given),
        "man" => print(&manual::man()),
        "completion" => manual::completion(given),
        "help" => manual::help(given),
        "--version" => print(concat!("userd ", env!("CARGO_PKG_VERSION"), "\n")),
        _ => serve::serve(given),
    }
}

/// Why the command ends without success: an exit code, and one line for standard error; empty for none.
#[derive(Debug)]
struct Failure {
    code: u8,
    line: String,
}

impl Failure {
    /// The arguments are none that there are.
    fn argument(problem: impl fmt::Display) -> Failure {
        Failure::usage(format!("{problem}; `userd --help` lists what there is"))
    }

    /// The command line or a variable cannot be used.
    fn usage(problem: impl ToString) -> Failure {
        Failure { code: 2, line: problem.to_string() }
    }

    /// The service could not start, or could not go on.
    fn runtime(problem: impl ToString) -> Failure {
        Failure { code: 1, line: problem.to_string() }
    }
}

fn start_error(error: StartError) -> Failure {
    match error {
        StartError::Config(error) => Failure::usage(error),
        StartError::Database(_) => Failure::runtime(format!(
            "{error}; DATABASE_URL names another database, `userd --embedded` runs one of its own"
        )),
        error => Failure::runtime(error),
    }
}

fn transfer_error(error: TransferError) -> Failure {
    match error {
        TransferError::Start(error) => start_error(error),
        error => Failure::runtime(error),
    }
}

/// To standard output. The failure is without a line, as its reader has gone.
fn print(text: &str) -> Result<(), Failure> {
    io::stdout().write_all(text.as_bytes()).map_err(|_| Failure { code: 1, line: String::new() })
}
