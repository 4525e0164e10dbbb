//! `userd import`: creates the users of a file or of standard input.

use super::arguments::Args;
use super::{Failure, commands, embedded, log::with_priority, signals};
use crate::check;
use crate::transfer::{self, FieldMapping, ImportOptions, ImportOutcome, TransferError, field_names};
use log::Level;
use std::io::{self, Write};
use std::{fs::File, mem, path::Path};

/// Imports the users of a file or of standard input, and reports refused lines. With `--embedded`, makes and migrates a
/// missing cluster first, unless the import is a dry run. Blocks until the import has ended.
pub fn import(args: &Args) -> Result<(), Failure> {
    let map = args.value(commands::MAP).map(|map| parse_mapping(&map.to_string_lossy())).transpose();
    let options = ImportOptions {
        format: args.file_format(),
        mapping: map.map_err(|problem| Failure::usage(format!("--map {problem}")))?,
        ignore_unknown: args.has(commands::IGNORE_UNKNOWN),
        skip_invalid: args.has(commands::SKIP_INVALID),
        skip_existing: args.has(commands::SKIP_EXISTING),
        dry_run: args.has(commands::DRY_RUN),
        as_is: args.has(commands::AS_IS),
        keep_ids: args.has(commands::KEEP_IDS),
        hash_passwords: args.has(commands::CLEAR_PASSWORDS),
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
    // Locks `CLEANUP` before the commit, and never unlocks it. A signal waits for this lock, so that it does not end
    // the process after the commit with the message that nothing was imported.
    let outcome = transfer::import(&config, &options, input, || mem::forget(signals::CLEANUP.lock()));
    let _ = writeln!(io::stdout(), "{}", report_outcome(&options, outcome.map_err(import_failure)?)?);
    Ok(())
}

/// Returns the failure for an import that ended with this error.
fn import_failure(error: TransferError) -> Failure {
    match error {
        TransferError::Start(error) => error.into(),
        error @ TransferError::UncertainCommit(_) => Failure::runtime(error),
        error => Failure::runtime(format!("{error}; nothing was imported")),
    }
}

/// Parses the value of `--map`, such as `name=displayName,email=emails.0.value`. The error says what is wrong with it.
fn parse_mapping(text: &str) -> Result<FieldMapping, String> {
    let pair = |pair: &str| {
        let (field, path) = pair.split_once('=')?;
        let field = field_names().find(|known| *known == field.trim())?;
        Some((field, path.trim().to_owned())).filter(|(_, path)| !path.is_empty())
    };
    let paths: Option<FieldMapping> = text.split(',').map(pair).collect();
    let paths = paths.filter(|paths| paths.len() == text.split(',').count());
    paths.ok_or_else(|| {
        format!(
            "must be FIELD=MEMBER,…, each FIELD once and one of {}",
            field_names().collect::<Vec<_>>().join(", ")
        )
    })
}

/// Returns the failure of a command that cannot read its file of users.
pub fn unreadable_failure(file: &Path, error: io::Error) -> Failure {
    let file = file.display();
    Failure::runtime(format!("cannot read {file}: {error}; `userd help import` says what it reads"))
}

/// Prints on standard error why lines were refused. Returns the line that says how many users were imported. Fails if
/// no user was imported because lines were refused.
fn report_outcome(options: &ImportOptions, outcome: ImportOutcome) -> Result<String, Failure> {
    let (new, existing, refused) = (outcome.imported_users, outcome.existing_users, outcome.refused_records);
    // Ignores an error, because standard error may be a terminal that is closed.
    let complain = |line| _ = writeln!(io::stderr(), "{}", with_priority(Level::Warn, line));
    for (number, problem) in &outcome.problems_by_record {
        complain(format!("{} {number}: {problem}", outcome.record_word));
    }
    let more = refused - outcome.problems_by_record.len() as u64;
    if more > 0 {
        complain(format!("and {more} more"));
    }
    if refused > 0 && !options.skip_invalid {
        return Err(Failure::runtime(format!("lines refused: {refused}; nothing was imported")));
    }
    let verb = if options.dry_run { "would import" } else { "imported" };
    let left_out =
        outcome.left_out_members.iter().map(|(name, count)| format!(", left out {name:?}: {count}"));
    let left_out = left_out.collect::<String>();
    Ok(format!("{verb}: {new}, existing: {existing}, refused: {refused}{left_out}"))
}
