//! Migrations without a service, and a check that changes nothing.

use crate::{
    config::Config,
    db::{
        explain,
        inspection::{self, Weight},
        migrate::{Migrations, refuse_the_users_of_another_program},
    },
    server::{StartError, check_system, opening::Opening},
};

/// Applies the migrations that the database lacks; their names. Blocks as a start does.
pub fn migrate(config: &Config) -> Result<Vec<String>, StartError> {
    let opening = Opening::new(config)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref())?;
    opening.migrate(migrations, true)
}

/// What a start would meet: a word for the subject, and a line. Changes nothing. Blocks up to `db_connect_timeout`.
pub fn check(config: &Config) -> Vec<(Weight, &'static str, String)> {
    let mut findings = Vec::new();
    if let Err((subject, line)) = look(config, &mut findings) {
        findings.push((Weight::Problem, subject, line));
    }
    findings
}

type Problem = (&'static str, String);

/// Everything up to the first problem that hides the others.
fn look(config: &Config, findings: &mut Vec<(Weight, &'static str, String)>) -> Result<(), Problem> {
    let unusable = |error: StartError| match error {
        StartError::Config(error) => ("configuration", error.to_string()),
        error => ("database", error.to_string()),
    };
    let opening = Opening::new(config).map_err(unusable)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref());
    let migrations = migrations.map_err(|error| unusable(error.into()))?;
    findings.push((Weight::Fine, "configuration", "every variable can be used".to_owned()));
    check_system(config).map_err(|error| match error {
        StartError::System(error) => ("system", error.to_string()),
        error => ("system", error.to_string()),
    })?;
    let mut client = opening.connect().map_err(unusable)?;
    findings.push((Weight::Fine, "database", format!("connected to {opening}")));
    let failed = |error: postgres::Error| ("database", explain(&error));
    let server = inspection::server(&mut client, config.db_pool_size).map_err(failed)?;
    findings.extend(server.into_iter().map(|(weight, line)| (weight, "database", line)));

    let migrated = |line| ("migrations", line);
    let are_applied = match migrations.are_applied(&mut client) {
        Ok(are_applied) => are_applied,
        Err(line) => {
            // What else the role may not do belongs to it.
            let privileges = inspection::privileges(&mut client, false).map_err(failed)?;
            findings.extend(privileges.into_iter().map(|(weight, line)| (weight, "privileges", line)));
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
    let privileges = inspection::privileges(&mut client, !are_applied && config.migrate).map_err(failed)?;
    findings.extend(privileges.into_iter().map(|(weight, line)| (weight, "privileges", line)));
    Ok(())
}
