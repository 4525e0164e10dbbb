//! `userd migrate`, `check`, `recount`, `grants` and `config`: what an operator asks before and after a deployment.

use super::{Failure, arguments::Address, embedded, ending, environment, print, start_error, transfer_error};
use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};
use userd::{
    Config,
    embedded::Joined,
    upkeep::{self, Weight},
};

/// A check that takes longer says what it waits for.
const SOON: Duration = Duration::from_millis(500);

/// Applies the migrations that are missing, and says which. Blocks as a start does.
pub fn migrate(dir: Option<&Path>) -> Result<(), Failure> {
    let mut config = environment::config(|_| None).map_err(Failure::usage)?;
    let _cluster = join(dir, &mut config, true)?;
    let applied = upkeep::migrate(&config).map_err(start_error)?;
    let mut text: String = applied.iter().map(|name| format!("applied {name}\n")).collect();
    if applied.is_empty() {
        text.push_str("nothing to apply\n");
    }
    print(&text);
    Ok(())
}

/// Counts all users anew.
pub fn recount(dir: Option<&Path>) -> Result<(), Failure> {
    let mut config = environment::config(|_| None).map_err(Failure::usage)?;
    let _cluster = join(dir, &mut config, false)?;
    let line = upkeep::recount(&config).map_err(transfer_error)?;
    print(&format!("{line}\n"));
    Ok(())
}

/// Prints the statements that let a role run the service.
pub fn grants(role: &str, dir: Option<&Path>) -> Result<(), Failure> {
    let mut config = environment::config(|_| None).map_err(Failure::usage)?;
    let _cluster = join(dir, &mut config, false)?;
    let grants = upkeep::grants(&config, role).map_err(transfer_error)?;
    print(&grants.iter().map(|grant| format!("{grant}\n")).collect::<String>());
    Ok(())
}

/// One line for each finding. The exit code is 1 where one of them is a problem. `counts`: whether they are compared with
/// the table.
pub fn check(address: &Address, migrate: bool, counts: bool, dir: Option<&Path>) -> ExitCode {
    let joined = |mut config: Config| {
        config.migrate = migrate;
        let _cluster = join(dir, &mut config, false)?;
        let seconds = config.db_connect_timeout.as_secs_f64();
        let (_done, waiting) = mpsc::channel::<()>();
        Ok(upkeep::check(&config, counts, |database| {
            let line = format!("connecting to {database}, for up to {seconds} s (DB_CONNECT_TIMEOUT)");
            // The findings come all at once, in the end.
            thread::spawn(move || {
                if waiting.recv_timeout(SOON) == Err(RecvTimeoutError::Timeout) {
                    let _ = writeln!(io::stderr(), "{line}");
                }
            });
        }))
    };
    let findings = match environment::config(|name| address.variable(name)).map(joined) {
        Ok(Ok(findings)) => findings,
        Ok(Err(Failure { line, .. })) => vec![(Weight::Problem, "database", line)],
        Err(error) => vec![(Weight::Problem, "configuration", error.to_string())],
    };
    let ineffective = environment::ineffective(|name| address.variable(name), dir.is_some(), false);
    let ineffective = ineffective.into_iter().map(|line| (Weight::Note, "configuration", line));
    let log = [environment::log_level().err(), environment::log_format().err()].into_iter().flatten();
    let log = log.map(|error| (Weight::Problem, "configuration", error.to_string()));
    let mut text = String::new();
    let mut code = ExitCode::SUCCESS;
    for (weight, subject, line) in log.chain(ineffective).chain(findings) {
        let weight = match weight {
            Weight::Fine => "ok",
            Weight::Note => "note",
            Weight::Problem => {
                code = ExitCode::FAILURE;
                "problem"
            }
        };
        text.push_str(&format!("{weight:<8} {subject}: {line}\n"));
    }
    print(&text);
    code
}

/// As [`embedded::join`], for a verb that does nothing at a signal but end.
fn join(dir: Option<&Path>, config: &mut Config, make: bool) -> Result<Option<Joined>, Failure> {
    if dir.is_some() {
        ending::exit_with_signals().map_err(Failure::runtime)?;
    }
    embedded::join(dir, config, make)
}

/// The table of the settings in force, and for a private cluster what leads psql to it. Starts nothing.
pub fn config(address: &Address, dir: Option<&Path>) -> Result<(), Failure> {
    let mut config = environment::config(|name| address.variable(name)).map_err(Failure::usage)?;
    environment::log_level().map_err(Failure::usage)?;
    environment::log_format().map_err(Failure::usage)?;
    let private = dir.is_some() && embedded::is_private(address);
    if private {
        config.host = Config::default().host;
    }
    let rows = config.in_force(|name| address.variable(name).or_else(|| std::env::var_os(name)));
    let mut rows = rows.map_err(Failure::usage)?;
    let below = dir.map(|dir| embedded::describe(dir, &config, &mut rows)).transpose()?;
    let width = |cell: fn(&(&'static str, String, String)) -> usize| rows.iter().map(cell).max().unwrap_or(0);
    let widths = [width(|row| row.0.chars().count()), width(|row| row.1.chars().count())];
    let mut text = String::new();
    for (variable, value, source) in &rows {
        let source = match *variable {
            _ if address.variable(variable).is_some() => "argument",
            "HOST" if private => "--embedded",
            _ => source,
        };
        let line = format!("{variable:<0$} {value:<1$} {source}", widths[0], widths[1]);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&below.unwrap_or_default());
    print(&text);
    Ok(())
}
