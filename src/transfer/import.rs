//! Creates the users of a stream, all of them in one transaction or none: their records are checked, staged in a
//! temporary table, compared with one another and with the stored users, and stored by one insert.

use super::{
    Complaint, Format, Mapping, TransferError,
    check::Rules,
    pipeline::Pipeline,
    read::{Layout, Source},
    select::{LeftOut, Selection, leave_out},
    stop::{Stage, Stop},
};
use crate::{
    config::Config,
    db::{
        bulk::{Staging, Taken},
        explain,
        open::Opening,
    },
};
use std::{
    io::Read,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Options of an import.
#[derive(Debug, Clone, Default)]
pub struct Import {
    /// The format of the file; `None`: as the first record looks.
    pub format: Option<Format>,
    /// Which member or column is which field; `None`: by their names.
    pub map: Option<Mapping>,
    /// Whether members or columns that are no field are left out. They are if there is a mapping.
    pub ignore_unknown: bool,
    /// Whether refused records are left out.
    pub skip_invalid: bool,
    /// Whether users whose address is stored already are left out.
    pub skip_existing: bool,
    /// Whether nothing is to be stored in the end.
    pub dry_run: bool,
    /// Whether names and addresses are only held to what their columns can hold.
    pub as_is: bool,
    /// Whether users get the ids of their records.
    pub keep_ids: bool,
}

/// The outcome of an import.
#[derive(Debug, Default)]
pub struct Imported {
    /// Users that were stored; or would have been, in a dry run or without the refused records.
    pub users: u64,
    /// Users that were left out because their address is stored already.
    pub existing: u64,
    /// Refused records.
    pub refused: Refused,
    /// Names of members or columns that were left out, each with the number of its records.
    pub left_out: LeftOut,
}

/// Refused records: the first ones, and the number of all.
#[derive(Debug, Default)]
pub struct Refused {
    /// At most [`Refused::MOST`], in order.
    pub first: Vec<Complaint>,
    /// All of them.
    pub count: u64,
}

impl Refused {
    /// A person who has read so many knows what is wrong with the file.
    pub const MOST: usize = 20;

    fn add(&mut self, complaint: Complaint) {
        self.count += 1;
        let at = self.first.partition_point(|other| other.number < complaint.number);
        self.first.insert(at, complaint);
        self.first.truncate(Refused::MOST);
    }
}

/// The progress of an import.
#[derive(Debug, Clone, Copy)]
pub enum Progress {
    /// Records that were checked, and bytes of the stream that were read.
    Checked { records: u64, bytes: u64 },
    /// All records are checked: so many users are being stored.
    Storing { users: u64 },
}

/// Attempts to store the users if other sessions store one of them meanwhile.
const ATTEMPTS: u32 = 5;

/// Bytes that a record may have unless bodies have a larger limit.
const LONGEST: usize = 1 << 20;

/// Imports users. Holds some megabytes, however many users there are and however long their records are, and 19 MiB a core
/// while clear passwords are hashed. Blocks until all is stored, or not.
///
/// # Errors
/// Nothing was imported. Refused records are no error: [`Imported::refused`] has them, and nothing was imported unless
/// they were to be skipped.
pub fn import(
    config: &Config,
    import: &Import,
    input: impl Read + Send + 'static,
    stop: &Stop,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<Imported, TransferError> {
    let mut client = Opening::new(config)?.connect_migrated(config)?;
    let breaker = client.breaker();
    stop.enter(Stage::Connected(client.breaker()))?;
    let run = || {
        let mut staging = Staging::begin(&mut client, config.db_prepared, import.keep_ids)?;
        let (mut imported, counts, is_array) = stage(config, import, &mut staging, input, on_progress)?;
        on_progress(Progress::Storing { users: counts.0 });
        if store(import, &mut staging, &mut imported, counts, is_array)? {
            stop.enter(Stage::Committing)?;
            staging.commit().map_err(|error| TransferError::Uncertain(explain(&error)))?;
        }
        Ok(imported)
    };
    // After an error the transaction is not ended in good order, which might take long.
    run().inspect_err(|_| breaker.shut_down())
}

/// Checks all records and stages the users that are accepted. Returns how many these are, how many of them have a
/// password, and whether the records are elements of an array.
fn stage(
    config: &Config,
    import: &Import,
    staging: &mut Staging,
    input: impl Read + Send + 'static,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(Imported, (u64, u64), bool), TransferError> {
    let (mut imported, mut counts) = (Imported::default(), (0, 0));
    let selection = Selection::new(import.map.as_ref(), import.ignore_unknown, import.keep_ids, import.as_is);
    let mut rules = Rules::new(config, import, selection, staging.present);
    let longest = LONGEST.max(config.limits.max_body_bytes + 4096);
    let position = Arc::new(AtomicU64::new(0));
    let source = Source::open(input, import.format, &rules.selection, longest, &position);
    let opened = source.and_then(|source| match source {
        Ok(source) => rules.begin(source),
        Err(complaint) => Ok(Err(complaint)),
    });
    let source = match opened.map_err(TransferError::Read)? {
        Ok(source) => source,
        Err(complaint) => {
            imported.refused.add(complaint);
            return Ok((imported, counts, false));
        }
    };
    let is_array = source.layout == Layout::Array;
    let mut pipeline = Pipeline::start(source, rules).map_err(TransferError::Read)?;
    let mut records = 0;
    staging.stage(|| {
        let Some(checked) = pipeline.next()? else { return Ok(None) };
        records += checked.records;
        counts = (counts.0 + checked.users, counts.1 + checked.with_password);
        checked.complaints.into_iter().for_each(|complaint| imported.refused.add(complaint));
        checked.left_out.iter().for_each(|(name, count)| leave_out(&mut imported.left_out, name, *count));
        on_progress(Progress::Checked { records, bytes: position.load(Ordering::Relaxed) });
        Ok::<_, TransferError>(Some(checked.rows))
    })?;
    Ok((imported, counts, is_array))
}

/// Stores what is staged, unless nothing is to be stored. Returns whether it did. `counts`: the staged users and hashes.
fn store(
    import: &Import,
    staging: &mut Staging,
    imported: &mut Imported,
    mut counts: (u64, u64),
    is_array: bool,
) -> Result<bool, TransferError> {
    // A file without a fault meets no conflict, so none is looked for until one is met. With ids, the sequence moves
    // before a conflict could be met, and for good.
    let mut looks = import.dry_run || import.keep_ids || imported.refused.count > 0;
    let mut attempts = 0;
    loop {
        if import.skip_existing {
            imported.existing += staging.skip_existing()?;
        }
        if looks {
            refuse_taken(staging, &mut imported.refused, is_array)?;
        }
        if import.skip_existing || looks {
            counts = staging.count()?;
        }
        imported.users = counts.0;
        if import.dry_run || (imported.refused.count > 0 && !import.skip_invalid) {
            return Ok(false);
        }
        attempts += 1;
        match staging.store(counts.1 > 0).map_err(TransferError::from) {
            Ok(stored) if stored == counts => return Ok(true),
            Ok((users, hashes)) => {
                return Err(TransferError::Database(format!(
                    "{users} users and {hashes} hashes were stored instead of {} and {}: a trigger of the table alters \
                     them",
                    counts.0, counts.1
                )));
            }
            // Other sessions store users, too.
            Err(TransferError::Taken) if attempts < ATTEMPTS => looks = true,
            Err(error) => return Err(error),
        }
    }
}

/// Refuses the staged records whose address or id an earlier record or a stored user has.
fn refuse_taken(staging: &mut Staging, refused: &mut Refused, is_element: bool) -> Result<(), TransferError> {
    let Taken { first, count } = staging.remove_taken(Refused::MOST as i64)?;
    refused.count += count - first.len() as u64;
    let unit = if is_element { "user" } else { "line" };
    for (number, earlier, is_id) in first {
        let field = if is_id { "/id" } else { "/email" };
        let problem = match earlier {
            Some(earlier) => format!("{field} is that of {unit} {earlier}, too"),
            None => format!("{field} is that of a user in the database"),
        };
        refused.add(Complaint { is_element, number, problem });
    }
    Ok(())
}
