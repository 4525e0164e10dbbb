//! The command: arguments and environment to a configuration, the log, signals, start, wait, exit code.

mod arguments;
mod commands;
mod control;
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
mod progress;
mod serve;
mod signals;
mod verbs;

use ::log::{Level, Record};
use arguments::Given;
use std::{
    env, fmt,
    io::{self, Write},
    process::ExitCode,
};
use userd::{StartError, check};

/// Executes the command line, to its end. Returns the exit code.
pub fn run() -> ExitCode {
    let given = Given::parse(env::args_os());
    let serves = matches!(&given, Ok(Some(given)) if given.verb.is_empty());
    let done = given.and_then(|given| given.map_or(Ok(()), execute));
    ::log::logger().flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { code, line }) => {
            let line = match line.as_str() {
                "" => line,
                text if serves && environment::log().1 => {
                    log::json(&Record::builder().level(Level::Error).args(format_args!("{text}")).build())
                        + "\n"
                }
                text => format!("userd: {text}\n"),
            };
            // Standard error may be a terminal that is closed.
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(code)
        }
    }
}

/// Executes the subcommand.
fn execute(mut given: Given) -> Result<(), Failure> {
    // The process has one thread so far.
    given.set_variables()?;
    let given = &given;
    let interrupted = match given.verb.as_str() {
        "" => return serve::serve(given),
        "import" => "interrupted; nothing was imported",
        _ => "",
    };
    signals::on_signals(move |signal| signals::exit(128 + signal, interrupted))?;
    match given.verb.as_str() {
        "export" => export::export(given),
        "import" => import::import(given),
        "migrate" => verbs::migrate(given),
        "check" => verbs::check(given),
        "recount" => verbs::recount(given),
        "grants" => verbs::grants(given),
        "config" => verbs::config(given),
        "healthcheck" => healthcheck::healthcheck(given),
        "man" => manual::man(),
        _ => manual::completion(given),
    }
}

/// The end of the command without success: an exit code, and a line for standard error, which may be empty.
#[derive(Debug)]
struct Failure {
    code: u8,
    line: String,
}

impl Failure {
    /// Reports an argument that cannot be used.
    fn argument(problem: impl fmt::Display) -> Failure {
        Failure::usage(format!("{problem}; `userd --help` lists what there is"))
    }

    /// Reports a command line or a variable that cannot be used.
    fn usage(problem: impl ToString) -> Failure {
        Failure { code: 2, line: problem.to_string() }
    }

    /// Reports that the service could not start, or could not go on.
    fn runtime(problem: impl ToString) -> Failure {
        Failure { code: 1, line: problem.to_string() }
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Failure {
        match error {
            StartError::Config(error) => Failure::usage(error),
            StartError::Database(_) => Failure::runtime(format!("{error}; {}", check::ANOTHER_DATABASE)),
            error => Failure::runtime(error),
        }
    }
}

/// Writes to standard output. A failure has no line: the reader is gone.
fn print(text: &str) -> Result<(), Failure> {
    io::stdout().write_all(text.as_bytes()).map_err(|_| Failure { code: 1, line: String::new() })
}
