//! Creates the users of a stream, all of them in one transaction or none.
//!
//! An import checks records, stages their users in a temporary table, compares the staged users with one another and
//! with the stored users, and stores them by one insert.

use super::read::{read, unreadable};
use super::rules::{Candidate, Record, Rules, member_at};
use super::{Format, Mapping, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{self, Duplicate, Duplicates},
    explain,
    migrate::connect_migrated,
};
use std::{collections::BTreeMap, io::Read, mem, thread};

/// Options of an import.
#[derive(Debug, Clone, Default)]
pub struct Import {
    /// The format of the file; `None` takes the format that the first record has.
    pub format: Option<Format>,
    /// Fields that are read from members or columns of other names. With a mapping, all other members are left out.
    pub map: Option<Mapping>,
    /// Leaves out members and columns that are no field of a user, instead of refusing their records.
    pub ignore_unknown: bool,
    /// Leaves out refused records, and stores all other users.
    pub skip_invalid: bool,
    /// Leaves out users whose address is stored already.
    pub skip_existing: bool,
    /// Checks all records and stores no user.
    pub dry_run: bool,
    /// Accepts every name and address that the column can hold, also those that the create schema refuses.
    pub as_is: bool,
    /// Gives users the ids of their records. A user whose record has no id gets a new one.
    pub keep_ids: bool,
    /// Accepts clear passwords, and hashes them. If false, a record with a clear password is refused.
    pub clear_passwords: bool,
    /// Refuses records without an id.
    pub requires_ids: bool,
}

impl Import {
    /// Returns whether every record must have this field.
    pub(super) fn requires(&self, field: &str) -> bool {
        matches!(field, "name" | "email") || (field == "id" && self.requires_ids)
    }
}

/// The outcome of an import.
#[derive(Debug, Default)]
pub struct Imported {
    /// Number of users that the import has stored, or would have stored if it were no dry run or had no refused
    /// records.
    pub users: u64,
    /// Number of users that were left out because their address is stored already.
    pub existing: u64,
    /// Number of refused records.
    pub refused: u64,
    /// The problems of the first refused records, at most [`Imported::MAX_PROBLEMS`], by the number of the record.
    pub problems: BTreeMap<i64, String>,
    /// The word for a record: `line`, or `user` for an element of an array.
    pub unit: &'static str,
    /// Names of members or columns that were left out, with the number of records that have each name.
    pub left_out: BTreeMap<String, u64>,
}

impl Imported {
    /// The most problems that are kept, because a person who has read 20 problems knows what is wrong with the file.
    pub const MAX_PROBLEMS: usize = 20;

    fn refuse(&mut self, number: i64, problem: String) {
        self.refused += 1;
        self.problems.insert(number, problem);
        if self.problems.len() > Imported::MAX_PROBLEMS {
            self.problems.pop_last();
        }
    }

    /// Counts a record in which the member of this name was left out. Counts all names after the first 20 as `…`.
    fn leave_out(&mut self, name: &str) {
        let is_new = self.left_out.len() >= Imported::MAX_PROBLEMS && !self.left_out.contains_key(name);
        *self.left_out.entry(if is_new { "…" } else { name }.to_owned()).or_default() += 1;
    }
}

/// Number of users that are collected before one statement stores them in the temporary table.
const USERS_PER_STAGING: usize = 2000;

/// Number of records that are checked at once, for each core. Hashing so many passwords takes some 1.3 s.
const RECORDS_PER_CORE: usize = 64;

/// Imports users. Takes some megabytes of memory, however many users there are, and 19 MiB a core while clear passwords
/// are hashed. Blocks until all users are stored or the import has failed.
///
/// Calls `before_commit` once all users are stored. If the process ends before this call, nothing is imported.
///
/// # Errors
/// After an error no user is stored. A refused record is no error: [`Imported::refused`] counts refused records, and
/// unless `skip_invalid` is set no user is stored if there are any.
pub fn import(
    config: &Config,
    import: &Import,
    input: impl Read,
    before_commit: impl FnOnce(),
) -> Result<Imported, TransferError> {
    let mut client = connect_migrated(config)?;
    let mut transaction = bulk::begin_import(&mut client)?;
    let rules = Rules::new(config, import);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (mut imported, mut users) = (Imported::default(), Vec::new());
    let mut check = |batch: Vec<Record>| {
        for (record, accepted) in batch.iter().zip(check_records(cores, &rules, &batch)) {
            match accepted {
                Ok(Candidate { user, left_out }) => {
                    users.push(user);
                    left_out.into_iter().for_each(|name| imported.leave_out(name));
                }
                Err(problem) => imported.refuse(record.number, problem),
            }
        }
        // The last call has an empty batch, and stages the users that are left.
        if users.len() >= USERS_PER_STAGING || batch.is_empty() {
            bulk::stage_users(&mut transaction, &users)?;
            imported.users += users.len() as u64;
            users.clear();
        }
        Ok::<_, TransferError>(())
    };
    let (mut batch, mut unseen) = (Vec::new(), None);
    let unit = read(input, &rules, &mut |record| {
        if let Ok(object) = &record.members {
            let paths = unseen.get_or_insert_with(|| rules.mapped_paths());
            paths.retain(|path| member_at(object, path).is_none());
        }
        batch.push(record);
        if batch.len() < RECORDS_PER_CORE * cores { Ok(()) } else { check(mem::take(&mut batch)) }
    })?;
    check(batch)?;
    check(Vec::new())?;
    if let Some(path) = unseen.iter().flatten().next() {
        return Err(unreadable(format!("no user has {path}, which --map names")));
    }
    imported.unit = unit;
    let removed = bulk::deduplicate(&mut transaction, import.skip_existing, Imported::MAX_PROBLEMS as i64)?;
    let Duplicates { skipped_count, refused_count, first_refused } = removed;
    imported.existing = skipped_count;
    imported.refused += refused_count - first_refused.len() as u64;
    for Duplicate { line, earlier_line, repeats_id } in first_refused {
        let field = if repeats_id { "/id" } else { "/email" };
        let user = earlier_line.map(|earlier| format!("{} {earlier}, too", imported.unit));
        let user = user.unwrap_or_else(|| "a user in the database".to_owned());
        imported.refuse(line, format!("{field} is that of {user}"));
    }
    imported.users -= skipped_count + refused_count;
    if import.dry_run || (imported.refused > 0 && !import.skip_invalid) {
        return Ok(imported);
    }
    // Counts what the database has stored, because a trigger may leave users out.
    imported.users = bulk::store_staged_users(&mut transaction, import.keep_ids)?;
    before_commit();
    transaction.commit().map_err(|error| TransferError::Uncertain(explain(&error)))?;
    Ok(imported)
}

/// Checks records, on all cores if clear passwords have to be hashed. Returns the user or the problem of each record.
fn check_records<'a>(cores: usize, rules: &Rules, batch: &'a [Record]) -> Vec<Result<Candidate<'a>, String>> {
    let check = |part: &'a [Record]| part.iter().map(|record| rules.check(record)).collect::<Vec<_>>();
    if !rules.import.clear_passwords {
        return check(batch);
    }
    thread::scope(|scope| {
        let parts = batch.chunks(batch.len().div_ceil(cores).max(1));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("checks do not panic")).collect()
    })
}
