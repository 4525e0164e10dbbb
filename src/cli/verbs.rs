//! `userd migrate`, `check`, `recount`, `grants` and `config`, for operators.

use super::{Failure, arguments::Given, embedded, env_file::Assignment, environment, print, signals};
use std::io::ErrorKind::AddrInUse;
use userd::{
    BoundServer, Config, StartError,
    check::{self, Weight},
    private_postgres::Cluster,
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
    let (config, _cluster) = database(given, false)?;
    let grants = check::grants(&config, given.word()?)?;
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
    let mut done = Ok(());
    for (weight, subject, line) in findings {
        let weight = match weight {
            Weight::Fine => "ok",
            Weight::Note => "note",
            Weight::Problem => "problem",
        };
        if weight == "problem" {
            done = Err(Failure { code: 1, line: String::new() });
        }
        print(&format!("{weight:<8} {subject}: {line}\n"))?;
    }
    done
}

/// Returns the problem that a start would meet before it asks the database: with the limits of the system, or with the
/// address. The check of the database says what else there is.
fn system(config: &Config) -> Option<Finding> {
    match BoundServer::bind(config).err()? {
        error @ StartError::System(_) => Some((Weight::Problem, "system", error.to_string())),
        StartError::Listen(address, cause) => {
            let weight = if cause.kind() == AddrInUse { Weight::Note } else { Weight::Problem };
            Some((weight, "address", StartError::Listen(address, cause).to_string()))
        }
        _ => None,
    }
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
    let mut rows = config.in_force(environment::lookup(given, false)).map_err(Failure::usage)?;
    let below = given.dir().map(|dir| embedded::describe(&dir, &mut rows)).transpose()?;
    let width = rows.iter().map(|(_, value, _)| value.chars().count()).max().unwrap_or(0);
    for (variable, value, source) in &rows {
        let place = given.assigned.iter().find(|assignment| assignment.name == *variable);
        let source = match (*variable, place) {
            _ if given.replaces(variable) => "argument",
            ("HOST", _) if is_private => "--embedded",
            (_, Some(Assignment { place, .. })) if source == "environment" => place,
            _ => source,
        };
        print(&format!("{variable:<20} {value:<width$} {source}\n"))?;
    }
    print(&below.unwrap_or_default())
}
