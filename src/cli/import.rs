//! `userd import`: creates the users of a file or of standard input.

use super::{
    Failure,
    arguments::{Given, format_of},
    embedded, environment,
    progress::Progress as Bar,
    signals,
};
use serde_json::Value;
use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use userd::{
    Config, check,
    transfer::{self, Format, Import, Imported, Mapping, Progress, TransferError},
};

/// Imports the users of a file, or of standard input, and says what has become of each line that is refused. A private
/// cluster is made and migrated where it is missing, unless nothing is to be changed. Blocks until that is done.
pub fn import(given: &Given) -> Result<(), Failure> {
    let map = given.value("--map").map(|map| Mapping::parse(&map.to_string_lossy())).transpose();
    let what = Import {
        format: given.format(),
        map: map.map_err(|problem| Failure::argument(format!("--map {problem}")))?,
        ignore_unknown: given.has("--ignore-unknown"),
        skip_invalid: given.has("--skip-invalid"),
        skip_existing: given.has("--skip-existing"),
        dry_run: given.has("--dry-run"),
        as_is: given.has("--as-is"),
        keep_ids: given.has("--keep-ids"),
    };
    let mut config = environment::config(given).map_err(Failure::usage)?;
    let (input, bytes) = open(given.file())?;
    // Set by a signal or by the commit, whichever comes first. A signal after the commit has begun has no effect.
    let decided = Arc::new(AtomicBool::new(false));
    let interrupted = decided.clone();
    signals::on_signals(move |signal| {
        if !interrupted.swap(true, Ordering::SeqCst) {
            let _ = writeln!(io::stderr(), "userd: interrupted; nothing was imported");
            signals::exit(128 + signal);
        }
    })?;
    let cluster = embedded::join(given, &mut config, !what.dry_run)?;
    if cluster.is_some() && !what.dry_run {
        check::migrate(&config)?;
    }
    let bar = Bar::new();
    let input = bar.reading(input, bytes);
    let imported = transfer::import(&config, &what, input, &mut |progress| match progress {
        Progress::Checked(records) => bar.records(records),
        Progress::Storing(users) => bar.storing(users),
        Progress::Committing => {
            while decided.swap(true, Ordering::SeqCst) {
                // The thread that handles signals ends the process.
                thread::park();
            }
        }
    });
    drop(bar);
    let imported = imported.map_err(failure)?;
    report(&what, &imported)
}

/// Creates the users of a file in a database that begins with them: whatever their columns can hold, with their ids
/// where the first line has one. Blocks until that is done.
pub fn seed(config: &Config, file: &Path) -> Result<(), Failure> {
    let format = format_of(file).unwrap_or(Format::Ndjson);
    let keep_ids = has_ids(file, format);
    let what = Import { format: Some(format), as_is: true, keep_ids, ..Import::default() };
    let input = open(Some(file))?.0;
    let imported = transfer::import(config, &what, input, &mut |_| ());
    let imported = imported.map_err(failure)?;
    refusals(&what, &imported)
}

/// Returns whether the first user of a file has an id. A file that cannot be read twice, such as a pipe, counts as one
/// without ids, and so does one that the import refuses in a moment.
fn has_ids(file: &Path, format: Format) -> bool {
    let open = || File::open(file).ok().filter(|_| file.is_file()).map(BufReader::new);
    let Some(mut input) = open() else { return false };
    if input.fill_buf().is_ok_and(|start| start.starts_with("\u{feff}".as_bytes())) {
        input.consume(3);
    }
    match format {
        Format::Ndjson => {
            let first = serde_json::Deserializer::from_reader(input).into_iter::<Value>().next();
            let Some(Ok(first)) = first else { return false };
            let arrays = || first.as_object().into_iter().flat_map(|object| object.values());
            first.get("id").is_some()
                || first.pointer("/0/id").is_some()
                || arrays().any(|array| array.pointer("/0/id").is_some())
        }
        Format::Csv => {
            let header = input.lines().next().and_then(Result::ok).unwrap_or_default();
            let name = |cell: &str| cell.trim().trim_matches('"').trim().eq_ignore_ascii_case("id");
            header.split([',', ';', '\t']).any(name)
        }
    }
}

/// Opens the input. Returns its size, too, if that is known.
fn open(file: Option<&Path>) -> Result<(File, Option<u64>), Failure> {
    let open = || {
        let opened = match file {
            Some(file) => File::open(file)?,
            None => File::from(nix::unistd::dup(io::stdin())?),
        };
        let found = opened.metadata()?;
        match found.is_dir() {
            true => Err(io::ErrorKind::IsADirectory.into()),
            false => Ok((opened, Some(found.len()).filter(|_| found.is_file()))),
        }
    };
    let file = file.unwrap_or(Path::new("-"));
    open().map_err(|error| unreadable(file, error))
}

pub fn unreadable(file: &Path, error: io::Error) -> Failure {
    let file = file.display();
    Failure::runtime(format!("cannot read {file}: {error}; `userd help import` says what it reads"))
}

/// The refused lines on standard error, and on standard output what was done.
fn report(what: &Import, imported: &Imported) -> Result<(), Failure> {
    refusals(what, imported)?;
    let done = if what.dry_run { "would import" } else { "imported" };
    let mut line = format!("{done} {}", counted(imported.users, "user"));
    if imported.existing > 0 {
        line.push_str(&format!(", skipped {}", counted(imported.existing, "existing user")));
    }
    if imported.refused > 0 {
        line.push_str(&format!(", skipped {}", counted(imported.refused, "invalid line")));
    }
    if !imported.left_out.is_empty() {
        let one = |(name, count): (&String, &u64)| format!("{name:?} of {}", counted(*count, "user"));
        let names: Vec<String> = imported.left_out.iter().map(one).collect();
        line.push_str(&format!("; left out {}", names.join(", ")));
    }
    let _ = writeln!(io::stdout(), "{line}");
    Ok(())
}

/// The refused lines on standard error. An error where nothing was imported because of them.
fn refusals(what: &Import, imported: &Imported) -> Result<(), Failure> {
    let Imported { refused, problems, unit, .. } = imported;
    let mut stderr = io::stderr().lock();
    // Standard error may be a terminal that is closed.
    for (number, problem) in problems {
        let _ = writeln!(stderr, "{unit} {number}: {problem}");
    }
    let more = refused - problems.len() as u64;
    if more > 0 {
        let _ = writeln!(stderr, "and {}", counted(more, "more line"));
    }
    if *refused > 0 && !what.skip_invalid {
        let verb = if *refused == 1 { "is" } else { "are" };
        return Err(Failure::runtime(format!(
            "{} {verb} refused; nothing was imported",
            counted(*refused, "line")
        )));
    }
    Ok(())
}

/// `1 user`, `2 users`.
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn failure(error: TransferError) -> Failure {
    match error {
        TransferError::Start(error) => error.into(),
        error @ TransferError::Uncertain(_) => Failure::runtime(error),
        error => Failure::runtime(format!("{error}; nothing was imported")),
    }
}
