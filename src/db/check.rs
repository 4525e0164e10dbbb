//! The commands `migrate`, `check`, `recount` and `grants` on a database: migrations without a service, a check that
//! changes nothing, and the repairs of its findings. Not part of the library's interface.

pub use super::inspection::Weight;

use super::{
    counts, explain, inspection,
    migrate::{Migrations, refuse_the_users_of_another_program},
    open::Opening,
};
use crate::{config::Config, error::StartError};

/// Remedy for a database that cannot be connected to.
pub const ANOTHER_DATABASE: &str =
    "DATABASE_URL names another database, `userd --embedded` runs one of its own";

/// Applies the migrations that the database lacks; their names. Blocks as a start does.
pub fn migrate(config: &Config) -> Result<Vec<String>, StartError> {
    let opening = Opening::new(config)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref())?;
    opening.migrate(&migrations, true)
}

/// Counts all users anew; a line with how many they are. Blocks while other transactions write users, for ten minutes
/// at the most, and while they are counted.
pub fn recount(config: &Config) -> Result<String, StartError> {
    let mut client = Opening::new(config)?.connect_migrated(config)?;
    counts::recount(&mut client).map_err(StartError::Statement)
}

/// The statements that let a role run a service on the database.
pub fn grants(config: &Config, role: &str) -> Result<Vec<String>, StartError> {
    let mut client = Opening::new(config)?.connect_migrated(config)?;
    let grants =
        inspection::grants(&mut client, role).map_err(|error| StartError::Statement(explain(&error)))?;
    match grants.is_empty() {
        true => Err(StartError::Statement(format!("there is no role {role:?}"))),
        false => Ok(grants),
    }
}

/// Compares the counts behind pages with the table. Returns a line that says so, or the difference. For tests.
pub fn compare_counts(client: &mut postgres::Client) -> Result<String, String> {
    counts::compare(client)
}

/// A subject in a word, and a line.
type Finding = (Weight, &'static str, String);
type Problem = (&'static str, String);

/// Returns findings about the database, as a start would meet them. Changes nothing. Blocks up to `db_connect_timeout`.
/// `with_counts`: all users are counted, too.
pub fn check(config: &Config, with_counts: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err((subject, line)) = look(config, with_counts, &mut findings) {
        findings.push((Weight::Problem, subject, line));
    }
    findings
}

/// Everything up to the first problem that hides the others.
fn look(config: &Config, with_counts: bool, findings: &mut Vec<Finding>) -> Result<(), Problem> {
    let unusable = |error: StartError| match error {
        StartError::Config(error) => ("configuration", error.to_string()),
        StartError::System(error) => ("system", error.to_string()),
        error @ StartError::Database(_) => ("database", format!("{error}; {ANOTHER_DATABASE}")),
        error => ("database", error.to_string()),
    };
    let opening = Opening::new(config).map_err(unusable)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref());
    let migrations = migrations.map_err(|error| unusable(error.into()))?;
    findings.push((Weight::Fine, "configuration", "every variable can be used".to_owned()));
    let mut client = opening.connect().map_err(unusable)?;
    findings.push((Weight::Fine, "database", format!("connected to {}", opening.target)));
    add(findings, "database", inspection::server(&mut client, config.db_pool_size))?;
    if !config.db_prepared {
        add(findings, "settings", inspection::session_settings(&mut client))?;
    }
    add(findings, "schema", inspection::schemas(&mut client))?;

    if config.db_prepared && sessions_are_lent(&opening, &mut client) {
        let line = "a pooler lends its sessions for one transaction each: userd needs DB_PREPARED=false";
        findings.push((Weight::Problem, "database", line.to_owned()));
    }
    let migrated = |line| ("migrations", line);
    let are_applied = match migrations.are_applied(&mut client) {
        Ok(are_applied) => are_applied,
        Err(line) => {
            // Missing rights may be the cause.
            add(findings, "privileges", inspection::privileges(&mut client, false))?;
            return Err(migrated(line));
        }
    };
    if are_applied {
        findings.push((Weight::Fine, "migrations", "all are applied".to_owned()));
    } else {
        if config.migrations_dir.is_none() {
            refuse_the_users_of_another_program(&mut client).map_err(migrated)?;
        }
        let missing = migrations.missing(&mut client);
        let (weight, what) = match (missing.is_empty(), config.migrate) {
            (true, _) => (Weight::Problem, "the database has others than this userd"),
            (false, true) => (Weight::Note, "a start applies what is missing"),
            (false, false) => (Weight::Problem, "`userd migrate` applies what is missing"),
        };
        findings.push((weight, "migrations", format!("{what}: {}", missing.join(", "))));
    }
    add(findings, "privileges", inspection::privileges(&mut client, !are_applied && config.migrate))?;
    if are_applied {
        let before = findings.len();
        add(findings, "tables", inspection::tables(&mut client))?;
        if findings.len() > before {
            // The rest would fail, or say it once more.
            return Ok(());
        }
        add(findings, "tables", inspection::ids(&mut client))?;
        add(findings, "tables", inspection::row_security(&mut client))?;
        if with_counts {
            let line = counts::compare(&mut client).map_err(|line| ("tables", line))?;
            findings.push((Weight::Fine, "tables", line));
        }
    }
    Ok(())
}

fn add(
    findings: &mut Vec<Finding>,
    subject: &'static str,
    found: inspection::Findings,
) -> Result<(), Problem> {
    let found = found.map_err(|error| ("database", explain(&error)))?;
    findings.extend(found.into_iter().map(|(weight, line)| (weight, subject, line)));
    Ok(())
}

/// Returns whether two connections are served by one session of the server, as by a pooler in transaction mode, which
/// lends the session that was given back last.
fn sessions_are_lent(opening: &Opening, client: &mut postgres::Client) -> bool {
    const TRIES: usize = 3;
    let Ok(mut other) = opening.connect() else { return false };
    let session = |client: &mut postgres::Client| {
        let row = client.query_typed_one("select pg_backend_pid()", &[]);
        row.ok().map(|row| row.get::<_, i32>(0))
    };
    (0..TRIES).any(|_| {
        let first = session(client);
        first.is_some() && first == session(&mut other)
    })
}
