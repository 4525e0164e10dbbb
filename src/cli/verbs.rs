//! `userd migrate`, `check`, `recount`, `grants` and `config`, for operators.

use super::{Failure, arguments::Args, commands, embedded, environment, print};
use crate::check::{self, Changes, Finding, Options, Weight};
use crate::{Database, Secret, config::InForce, server};

/// Applies the migrations that are missing, also in a schema other than that of the users, and says so. Blocks as a start does.
pub fn migrate(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::database(args, true)?;
    let lines = check::migrate(&config, true)?;
    let text = if lines.is_empty() { "nothing to apply".to_owned() } else { lines.join("\n") };
    print(text + "\n")
}

/// Counts all users anew.
pub fn recount(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::database(args, false)?;
    let line = check::recount(&config)?;
    print(format!("{line}\n"))
}

/// Prints the statements that let a role run the service.
pub fn grants(args: &Args) -> Result<(), Failure> {
    let (config, _cluster) = embedded::database(args, false)?;
    let grants = check::grants(&config, &args.word())?;
    print(grants.iter().map(|grant| format!("{grant}\n")).collect::<String>())
}

/// Prints one line for each finding. The exit code is 1 if one of them is a problem.
pub fn check(args: &Args) -> Result<(), Failure> {
    let mut findings = Vec::new();
    let changes = match (args.has(commands::READ_ONLY), args.has(commands::FIRE_TRIGGERS)) {
        (true, _) => Changes::None,
        (_, true) => Changes::WithTriggers,
        _ => Changes::Usual,
    };
    let options = Options { counts: args.has(commands::COUNTS), changes };
    let finding = |weight, subject, line| Finding { weight, subject, line };
    match environment::config(args) {
        Ok(mut config) => {
            let notes = environment::warnings(args, &config).into_iter();
            findings.extend(notes.map(|line| finding(Weight::Note, "configuration", line)));
            let limits = server::check_system(&config).err();
            findings.extend(limits.map(|error| finding(Weight::Problem, "system", error.to_string())));
            match embedded::open(args, &mut config, false) {
                Ok(_cluster) => findings.extend(check::check(&config, options)),
                Err(Failure { line, .. }) => findings.push(finding(Weight::Problem, "database", line)),
            }
        }
        Err(error) => findings.push(finding(Weight::Problem, "configuration", error.to_string())),
    }
    let mut done = Ok(());
    for Finding { weight, subject, line } in findings {
        if weight == Weight::Problem {
            done = Err(Failure { code: 1, line: String::new() });
        }
        print(format!("{weight:<8} {subject}: {line}\n"))?;
    }
    done
}

/// Prints the table of the settings in force. Starts nothing.
pub fn config(args: &Args) -> Result<(), Failure> {
    let mut config = environment::config(args).map_err(Failure::usage)?;
    if args.has(commands::EMBEDDED) {
        config.database = Database::Url(Secret::default());
    }
    let rows = config.in_force(environment::lookup(args));
    for InForce { variable, value, source } in &rows {
        let place = args.assigned.get(*variable).filter(|_| *source == "environment");
        print(format!("{variable:<20} {value:<24} {}\n", place.unwrap_or(source)))?;
    }
    Ok(())
}
