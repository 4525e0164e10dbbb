//! The subcommands for operators: `userd migrate`, `check`, `recount`, `grants` and `config`.

use super::{Failure, arguments::Args, commands, embedded, environment, print};
use crate::check::{self, CheckOptions, Finding, Severity, TriedChanges};
use crate::{Database, Secret, config::ShownSetting, server};

/// Applies the missing migrations and prints them, even if another schema of the database has userd's tables. Blocks
/// for as long as a start of the service does.
pub fn migrate(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::open_database(args, true)?;
    let lines = check::migrate(&config, true)?;
    let text = if lines.is_empty() { "nothing to apply".to_owned() } else { lines.join("\n") };
    print(text + "\n")
}

/// Counts all users anew, and prints how the stored counts were corrected.
pub fn recount(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::open_database(args, false)?;
    let line = check::recount_users(&config)?;
    print(format!("{line}\n"))
}

/// Prints the GRANT statements that a role needs to run the service.
pub fn print_grants(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::open_database(args, false)?;
    let grants = check::make_grant_statements(&config, &args.operand_text())?;
    print(grants.iter().map(|grant| format!("{grant}\n")).collect::<String>())
}

/// Checks configuration and database, and prints a line for each problem and each note. Fails if there is a problem.
pub fn check(args: &Args) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let changes = match (args.has(commands::READ_ONLY), args.has(commands::FIRE_TRIGGERS)) {
        (true, _) => TriedChanges::None,
        (_, true) => TriedChanges::DespiteForeignTriggers,
        _ => TriedChanges::UnlessForeignTriggers,
    };
    let options = CheckOptions { compares_user_counts: args.has(commands::COUNTS), changes };
    let finding = |severity, subject, line| Finding { severity, subject, line };
    match environment::read_config(args) {
        Ok(mut config) => {
            let warning = environment::ssl_warning(args, &config);
            findings.extend(warning.map(|line| finding(Severity::Note, "configuration", line)));
            let limits = server::raise_limits_for_connections(&config).err();
            findings.extend(limits.map(|error| finding(Severity::Problem, "system", error.to_string())));
            match embedded::open_cluster(args, &mut config, false) {
                Ok(_cluster) => findings.extend(check::check(&config, options)),
                Err(failure) => findings.push(finding(Severity::Problem, "database", failure.message)),
            }
        }
        Err(error) => findings.push(finding(Severity::Problem, "configuration", error.to_string())),
    }
    let mut done = Ok(());
    for Finding { severity, subject, line } in findings {
        if severity == Severity::Problem {
            done = Err(Failure { exit_code: 1, message: String::new() });
        }
        print(format!("{severity:<8} {subject}: {line}\n"))?;
    }
    done
}

/// Prints the settings in force, and where each value comes from. Connects to no database.
pub fn print_config(args: &Args) -> Result<(), Failure> {
    let mut config = environment::read_config(args).map_err(Failure::usage)?;
    if args.has(commands::EMBEDDED) {
        config.database = Database::Url(Secret::default());
    }
    let rows = config.in_force(environment::variable_lookup(args));
    for ShownSetting { variable, value, source } in &rows {
        let place = args.variable_sources.get(*variable).filter(|_| *source == "environment");
        print(format!("{variable:<20} {value:<24} {}\n", place.unwrap_or(source)))?;
    }
    Ok(())
}
