//! `userd migrate`, `check`, `recount`, `grants` and `config`: what an operator asks before and after a deployment.

use super::{Failure, arguments::Given, embedded, environment, print, signals, start_error};
use std::{
    env,
    io::{self, Write},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};
use userd::{
    Config,
    check::{self, Weight},
    embedded::Joined,
    server,
};

/// A check that takes longer says what it waits for.
const SOON: Duration = Duration::from_millis(500);

/// Applies the migrations that are missing, and says which. Blocks as a start does.
pub fn migrate(given: &Given) -> Result<(), Failure> {
    let (config, _cluster) = database(given, true)?;
    let applied = check::migrate(&config).map_err(start_error)?;
    let mut text: String = applied.iter().map(|name| format!("applied {name}\n")).collect();
    if applied.is_empty() {
        text.push_str("nothing to apply\n");
    }
    print(&text)
}

/// Counts all users anew.
pub fn recount(given: &Given) -> Result<(), Failure> {
    let (config, _cluster) = database(given, false)?;
    let line = check::recount(&config).map_err(start_error)?;
    print(&format!("{line}\n"))
}

/// Prints the statements that let a role run the service.
pub fn grants(given: &Given) -> Result<(), Failure> {
    let role = given.operand.as_ref().ok_or_else(|| Failure::argument("grants needs the name of a role"))?;
    let role = role.to_str().ok_or_else(|| Failure::argument(format!("{role:?} is no name of a role")))?;
    let (config, _cluster) = database(given, false)?;
    let grants = check::grants(&config, role).map_err(start_error)?;
    print(&grants.iter().map(|grant| format!("{grant}\n")).collect::<String>())
}

/// One line for each finding. The exit code is 1 where one of them is a problem.
pub fn check(given: &Given) -> Result<(), Failure> {
    let joined = |mut config: Config| {
        config.migrate = given.migrate();
        let _cluster = join(given, &mut config, false)?;
        let seconds = config.db_connect_timeout.as_secs_f64();
        if let Err(error) = server::check_system(&config) {
            return Err(Failure::runtime(error));
        }
        let (_done, waiting) = mpsc::channel::<()>();
        Ok(check::check(&config, given.has("--counts"), |database| {
            let line = format!("connecting to {database}, for up to {seconds} s (DB_CONNECT_TIMEOUT)");
            // The findings come all at once, in the end.
            thread::spawn(move || {
                if waiting.recv_timeout(SOON) == Err(RecvTimeoutError::Timeout) {
                    let _ = writeln!(io::stderr(), "{line}");
                }
            });
        }))
    };
    let findings = match environment::config().map(joined) {
        Ok(Ok(findings)) => findings,
        Ok(Err(Failure { line, .. })) => vec![(Weight::Problem, "database", line)],
        Err(error) => vec![(Weight::Problem, "configuration", error.to_string())],
    };
    let ineffective = environment::ineffective(given.has("--embedded"), false);
    let ineffective = ineffective.into_iter().map(|line| (Weight::Note, "configuration", line));
    let log = [environment::log_level().err(), environment::log_format().err()].into_iter().flatten();
    let log = log.map(|error| (Weight::Problem, "configuration", error.to_string()));
    let mut text = String::new();
    let mut done = Ok(());
    for (weight, subject, line) in log.chain(ineffective).chain(findings) {
        let weight = match weight {
            Weight::Fine => "ok",
            Weight::Note => "note",
            Weight::Problem => {
                done = Err(Failure { code: 1, line: String::new() });
                "problem"
            }
        };
        text.push_str(&format!("{weight:<8} {subject}: {line}\n"));
    }
    print(&text).and(done)
}

/// The settings, and the private cluster for as long as it is kept, where one is given.
fn database(given: &Given, make: bool) -> Result<(Config, Option<Joined>), Failure> {
    let mut config = environment::config().map_err(Failure::usage)?;
    let cluster = join(given, &mut config, make)?;
    Ok((config, cluster))
}

/// As [`embedded::join`], for a verb that does nothing at a signal but end.
fn join(given: &Given, config: &mut Config, make: bool) -> Result<Option<Joined>, Failure> {
    if given.has("--embedded") {
        signals::on_signals(|signal| signals::exit(128 + signal))?;
    }
    embedded::join(given, config, make)
}

/// The table of the settings in force, and for a private cluster what leads psql to it. Starts nothing.
pub fn config(given: &Given) -> Result<(), Failure> {
    let mut config = environment::config().map_err(Failure::usage)?;
    environment::log_level().map_err(Failure::usage)?;
    environment::log_format().map_err(Failure::usage)?;
    let is_private = given.has("--embedded") && embedded::listen_privately(&mut config);
    let mut rows = config.in_force(|name| env::var_os(name)).map_err(Failure::usage)?;
    let below = given.dir().map(|dir| embedded::describe(&dir, &config, &mut rows)).transpose()?;
    let width = |cell: fn(&(&'static str, String, String)) -> usize| rows.iter().map(cell).max().unwrap_or(0);
    let widths = [width(|row| row.0.chars().count()), width(|row| row.1.chars().count())];
    let mut text = String::new();
    for (variable, value, source) in &rows {
        let source = match *variable {
            _ if given.replaces(variable) => "argument",
            "HOST" if is_private => "--embedded",
            _ => source,
        };
        let line = format!("{variable:<0$} {value:<1$} {source}", widths[0], widths[1]);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&below.unwrap_or_default());
    print(&text)
}
