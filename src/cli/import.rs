//! `userd import`: creates the users of a file or of standard input.

use super::arguments::Args;
use super::{Failure, commands, embedded, log::with_priority, signals};
use crate::check;
use crate::transfer::{self, Import, Imported, Mapping, TransferError, field_names};
use log::Level;
use std::io::{self, Write};
use std::{fs::File, mem, path::Path};

/// Imports the users of a file or of standard input, and reports refused lines. Makes and migrates a private cluster
/// that is missing, unless the import is a dry run. Blocks until the import has ended.
pub fn import(args: &Args) -> Result<(), Failure> {
    let map = args.value(commands::MAP).map(|map| parse_mapping(&map.to_string_lossy())).transpose();
    let options = Import {
        format: args.format(),
        map: map.map_err(|problem| Failure::usage(format!("--map {problem}")))?,
        ignore_unknown: args.has(commands::IGNORE_UNKNOWN),
        skip_invalid: args.has(commands::SKIP_INVALID),
        skip_existing: args.has(commands::SKIP_EXISTING),
        dry_run: args.has(commands::DRY_RUN),
        as_is: args.has(commands::AS_IS),
        keep_ids: args.has(commands::KEEP_IDS),
        clear_passwords: args.has(commands::CLEAR_PASSWORDS),
        requires_ids: args.has(commands::KEEP_IDS),
    };
    let file = args.operand_file();
    let opened = match file {
        Some(file) => File::open(file),
        None => nix::unistd::dup(io::stdin()).map(File::from).map_err(io::Error::from),
    };
    let input = opened.map_err(|error| unreadable_failure(file.unwrap_or(Path::new("-")), error))?;
    let (config, cluster) = embedded::open_database(args, !options.dry_run)?;
    if cluster.is_some() && !options.dry_run {
        check::migrate(&config, false)?;
    }
    // Before the commit, takes a lock and never releases it. The handler of signals waits for this lock, so that no
    // signal ends the process after the commit.
    let imported = transfer::import(&config, &options, input, || mem::forget(signals::EXIT_CLEANUP.lock()));
    let done = report_outcome(&options, imported)?;
    let _ = writeln!(io::stdout(), "{done}");
    Ok(())
}

/// Parses a mapping such as `name=displayName,email=emails.0.value`. The error says what is wrong with the text.
fn parse_mapping(text: &str) -> Result<Mapping, String> {
    let pair = |pair: &str| {
        let (field, path) = pair.split_once('=')?;
        let field = field_names().find(|known| *known == field.trim())?;
        Some((field, path.trim().to_owned())).filter(|(_, path)| !path.is_empty())
    };
    let paths: Option<Mapping> = text.split(',').map(pair).collect();
    let paths = paths.filter(|paths| paths.len() == text.split(',').count());
    paths.ok_or_else(|| {
        format!(
            "must be FIELD=MEMBER,…, each FIELD once and one of {}",
            field_names().collect::<Vec<_>>().join(", ")
        )
    })
}

/// Returns the failure of a file of users that cannot be read.
pub fn unreadable_failure(file: &Path, error: io::Error) -> Failure {
    let file = file.display();
    Failure::runtime(format!("cannot read {file}: {error}; `userd help import` says what it reads"))
}

/// Writes the refused lines to standard error. Returns the line that says how many users were imported. Fails if no
/// user was imported because lines were refused.
fn report_outcome(options: &Import, imported: Result<Imported, TransferError>) -> Result<String, Failure> {
    let Imported { users, existing, refused, problems, unit, left_out } =
        imported.map_err(|error| match error {
            TransferError::Start(error) => error.into(),
            error @ TransferError::Uncertain(_) => Failure::runtime(error),
            error => Failure::runtime(format!("{error}; nothing was imported")),
        })?;
    // Ignores an error, because standard error may be a terminal that is closed.
    let complain = |line| _ = writeln!(io::stderr(), "{}", with_priority(Level::Warn, line));
    for (number, problem) in &problems {
        complain(format!("{unit} {number}: {problem}"));
    }
    let more = refused - problems.len() as u64;
    if more > 0 {
        complain(format!("and {more} more"));
    }
    if refused > 0 && !options.skip_invalid {
        return Err(Failure::runtime(format!("lines refused: {refused}; nothing was imported")));
    }
    let verb = if options.dry_run { "would import" } else { "imported" };
    let mut line = format!("{verb}: {users}, existing: {existing}, refused: {refused}");
    for (name, count) in &left_out {
        line.push_str(&format!(", left out {name:?}: {count}"));
    }
    Ok(line)
}
