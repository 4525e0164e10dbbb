//! `userd migrate`, `check`, `recount`, `grants` and `config`, for operators.

use super::{Failure, arguments::Given, embedded, env_file::Assignment, environment, print, signals};
use std::io::ErrorKind::AddrInUse;
use userd::{
    BoundServer, Config, StartError,
    check::{self, Weight},
    private_postgres::Cluster,
    server,
};

/// Applies the migrations that are missing, and says which. Blocks as a start does.
pub fn migrate(given: &Given) -> Result<(), Failure> {
    let (config, _cluster) = database(given, true)?;
    let applied = check::migrate(&config)?;
    let mut text: String = applied.iter().map(|name| format!("applied {name}\n")).collect();
    if applied.is_empty() {
        text.push_str("nothing to apply\n");
    }
    print(&text)
}

/// Counts all users anew.
pub fn recount(given: &Given) -> Result<(), Failure> {
    let (config, _cluster) = database(given, false)?;
    let line = check::recount(&config)?;
    print(&format!("{line}\n"))
}

/// Prints the statements that let a role run the service.
pub fn grants(given: &Given) -> Result<(), Failure> {
    let role = given.operand().and_then(|role| role.to_str());
    let role = role.ok_or_else(|| Failure::argument("grants needs the name of a role, in UTF-8"))?;
    let (config, _cluster) = database(given, false)?;
    let grants = check::grants(&config, role)?;
    print(&grants.iter().map(|grant| format!("{grant}\n")).collect::<String>())
}

type Finding = (Weight, &'static str, String);

/// Prints one line for each finding. The exit code is 1 if one of them is a problem.
pub fn check(given: &Given) -> Result<(), Failure> {
    let notes = environment::warnings(given, false).into_iter().chain(environment::misspelt_variables());
    let mut findings: Vec<Finding> = notes.map(|line| (Weight::Note, "configuration", line)).collect();
    match environment::config(given) {
        Ok(config) => {
            findings.extend(system(&config));
            match of_database(given, config) {
                Ok(found) => findings.extend(found),
                Err(Failure { line, .. }) => findings.push((Weight::Problem, "database", line)),
            }
        }
        Err(error) => findings.push((Weight::Problem, "configuration", error.to_string())),
    }
    let mut text = String::new();
    let mut done = Ok(());
    for (weight, subject, line) in findings {
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

/// Returns what a start would meet before it asks the database: the limits of the system, and the address.
fn system(config: &Config) -> Vec<Finding> {
    let limits = match server::check_system(config) {
        Err(StartError::System(error)) => Some((Weight::Problem, "system", error.to_string())),
        _ => None,
    };
    let address = match BoundServer::bind(config) {
        Err(error @ StartError::Listen(..)) => {
            let is_in_use = matches!(&error, StartError::Listen(_, cause) if cause.kind() == AddrInUse);
            let weight = if is_in_use { Weight::Note } else { Weight::Problem };
            Some((weight, "address", error.to_string()))
        }
        // The check of the database says what else there is.
        _ => None,
    };
    limits.into_iter().chain(address).collect()
}

fn of_database(given: &Given, mut config: Config) -> Result<Vec<Finding>, Failure> {
    config.migrate = given.migrate();
    let _cluster = join(given, &mut config, false)?;
    Ok(check::check(&config, given.has("--counts")))
}

/// Returns the settings, and the private cluster, if one is given, for as long as it is kept.
fn database(given: &Given, make: bool) -> Result<(Config, Option<Cluster>), Failure> {
    let mut config = environment::config(given).map_err(Failure::usage)?;
    let cluster = join(given, &mut config, make)?;
    Ok((config, cluster))
}

/// Makes the private cluster the database of `config`, as [`embedded::join`] does. A signal ends the process.
fn join(given: &Given, config: &mut Config, make: bool) -> Result<Option<Cluster>, Failure> {
    if given.has("--embedded") {
        signals::on_signals(|signal| signals::exit(128 + signal))?;
    }
    embedded::join(given, config, make)
}

/// Prints the table of the settings in force, and for a private cluster what leads psql to it. Starts nothing.
pub fn config(given: &Given) -> Result<(), Failure> {
    let mut config = environment::config(given).map_err(Failure::usage)?;
    let is_private = given.has("--embedded") && embedded::listen_privately(&mut config);
    let ineffective = environment::ineffective(given.has("--embedded"), false);
    let mut rows = config.in_force(environment::lookup(&ineffective)).map_err(Failure::usage)?;
    let below = given.dir().map(|dir| embedded::describe(&dir, &mut rows)).transpose()?;
    let width = |cell: fn(&(&'static str, String, String)) -> usize| rows.iter().map(cell).max().unwrap_or(0);
    let widths = [width(|row| row.0.chars().count()), width(|row| row.1.chars().count())];
    let mut text = String::new();
    for (variable, value, source) in &rows {
        let place = given.assigned.iter().find(|assignment| assignment.name == *variable);
        let source = match (*variable, place) {
            _ if given.replaces(variable) => "argument",
            ("HOST", _) if is_private => "--embedded",
            (_, Some(Assignment { place, .. })) if source == "environment" => place,
            _ => source,
        };
        let line = format!("{variable:<0$} {value:<1$} {source}", widths[0], widths[1]);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text.push_str(&below.unwrap_or_default());
    print(&text)
}
