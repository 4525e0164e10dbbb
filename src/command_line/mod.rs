//! The command: arguments and environment to a configuration, the log, signals, start, wait, exit code.

mod arguments;
mod embedded;
mod ending;
mod env_file;
mod environment;
mod export;
mod healthcheck;
mod import;
mod log_json;
mod log_writer;
mod manual;
mod memory;
mod output;
mod privileges;
mod progress;
mod serve;
mod upkeep;
mod verbs;

use arguments::Arguments;
use log::Level;
use log_writer::Format;
use std::{
    env,
    io::{self, Write},
    process::ExitCode,
};
use userd::{StartError, transfer::TransferError};

/// Does what the arguments say. Blocks until that is done.
pub fn run() -> ExitCode {
    let parsed = Arguments::parse(env::args_os().skip(1));
    let arguments = parsed.map_err(Unstarted::Arguments).and_then(|(arguments, file)| match file {
        None => Ok(arguments),
        // No other thread is there yet.
        Some(file) => env_file::read(&file).map(|()| arguments).map_err(Unstarted::File),
    });
    let serves = matches!(arguments, Ok(Arguments::Serve(_)));
    let done = match arguments {
        Ok(Arguments::Help(verb)) if verb.name.is_empty() => return print(&manual::help()),
        Ok(Arguments::Help(verb)) => return print(&manual::help_of(verb)),
        Ok(Arguments::Version) => return print(concat!("userd ", env!("CARGO_PKG_VERSION"), "\n")),
        Ok(Arguments::Healthcheck(address)) => environment::config(|name| address.variable(name))
            .map_err(Failure::usage)
            .and_then(|config| healthcheck::healthcheck(&config).map_err(Failure::runtime)),
        Ok(Arguments::Serve(serve)) => serve::serve(serve),
        Ok(Arguments::Export(what, file, dir)) => export::export(what, file.as_deref(), dir.as_deref()),
        Ok(Arguments::Import(what, file, dir)) => import::import(what, file.as_deref(), dir.as_deref()),
        Ok(Arguments::Migrate(dir)) => upkeep::migrate(dir.as_deref()),
        Ok(Arguments::Check { address, migrate, counts, dir }) => {
            return upkeep::check(&address, migrate, counts, dir.as_deref());
        }
        Ok(Arguments::Recount(dir)) => upkeep::recount(dir.as_deref()),
        Ok(Arguments::Grants(role, dir)) => upkeep::grants(&role, dir.as_deref()),
        Ok(Arguments::Config(address, dir)) => upkeep::config(&address, dir.as_deref()),
        Ok(Arguments::Man) => return print(&manual::man()),
        Ok(Arguments::Completion(shell)) => return print(&manual::completion(&shell)),
        Err(Unstarted::Arguments(problem)) => {
            Err(Failure::usage(format!("{problem}; `userd --help` lists what there is")))
        }
        Err(Unstarted::File(problem)) => Err(Failure::usage(format!("--env-file: {problem}"))),
    };
    log::logger().flush();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { code, line }) => {
            let line = match serves && environment::log_format() == Ok(Format::Json) {
                _ if line.is_empty() => Vec::new(),
                true => log_json::line(Level::Error, &line),
                false => format!("userd: {line}\n").into_bytes(),
            };
            // Standard error may be a terminal that is closed.
            let _ = io::stderr().write_all(&line);
            ExitCode::from(code)
        }
    }
}

/// What keeps the command from beginning.
enum Unstarted {
    Arguments(String),
    File(String),
}

/// Why the command ends without success: an exit code, and one line for standard error; empty for none.
struct Failure {
    code: u8,
    line: String,
}

impl Failure {
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

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
