//! Creates the users that a stream has, all of them in one transaction or none.
//!
//! An import validates records, stages their users in a temporary table, compares the staged users with one another and
//! with the stored users, and stores them by one insert.

use super::records::{self, read_error};
use super::rules::{Record, Rules, ValidUser, member_at};
use super::{FieldMapping, Format, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{self, Duplicate, Duplicates},
    explain,
    migrate::connect_if_migrated,
};
use std::{collections::BTreeMap, io::Read, mem, thread};

#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// The format of the file, or `None` if the first record shows it.
    pub format: Option<Format>,
    /// The member or column that each field is read from. With a mapping, all other members are left out.
    pub mapping: Option<FieldMapping>,
    /// If true, members and columns that are no field of a user are left out. If false, their records are refused.
    pub ignore_unknown: bool,
    /// If true, refused records are left out and all other users are stored. If false, no user is stored if a record is
    /// refused.
    pub skip_invalid: bool,
    /// If true, users whose address is stored already are left out. If false, their records are refused.
    pub skip_existing: bool,
    /// If true, all records are validated and no user is stored.
    pub dry_run: bool,
    /// If true, every name and address that the column can hold is accepted, also if the create schema refuses it.
    pub as_is: bool,
    /// If true, users get the ids of their records. A user whose record has no id gets a new one.
    pub keep_ids: bool,
    /// If true, clear passwords are hashed. If false, a record with a clear password is refused.
    pub hash_passwords: bool,
    /// If true, a record without an id is refused.
    pub requires_ids: bool,
}

impl ImportOptions {
    /// Returns whether a record without this field is refused.
    pub(super) fn requires(&self, field: &str) -> bool {
        matches!(field, "name" | "email") || (field == "id" && self.requires_ids)
    }
}

/// The most problems of refused records that an import keeps, because a person who has read 20 knows what is wrong with
/// the file.
const MAX_PROBLEMS: usize = 20;

/// The counts and problems of an import that has ended.
#[derive(Debug, Default)]
pub struct ImportOutcome {
    /// Number of users that were stored. After a dry run, or if nothing was stored because of refused records, the
    /// number of users that would have been stored.
    pub imported_users: u64,
    /// Number of users that were left out because their address is stored already.
    pub existing_users: u64,
    pub refused_records: u64,
    /// The problems of the first refused records, at most [`MAX_PROBLEMS`], by the number of the record.
    pub problems_by_record: BTreeMap<i64, String>,
    /// The word for a record in messages: `line`, or `user` for an element of an array.
    pub record_word: &'static str,
    /// Names of the members or columns that were left out, each with the number of records that have it.
    pub left_out_members: BTreeMap<String, u64>,
}

impl ImportOutcome {
    /// Counts a refused record, and keeps its problem if the record is one of the first [`MAX_PROBLEMS`].
    fn add_problem(&mut self, record_number: i64, problem: String) {
        self.refused_records += 1;
        self.problems_by_record.insert(record_number, problem);
        if self.problems_by_record.len() > MAX_PROBLEMS {
            self.problems_by_record.pop_last();
        }
    }

    /// Counts a record from which the member of this name was left out. Counts all names after the first 20 together,
    /// as `…`.
    fn count_left_out_member(&mut self, name: &str) {
        let is_new = self.left_out_members.len() >= MAX_PROBLEMS && !self.left_out_members.contains_key(name);
        *self.left_out_members.entry(if is_new { "…" } else { name }.to_owned()).or_default() += 1;
    }
}

/// Number of users that are collected before one statement stores them in the temporary table.
const USERS_PER_STAGING: usize = 2000;

/// Number of records that each core validates in one batch. Hashing so many passwords takes some 1.3 s.
const RECORDS_PER_CORE: usize = 64;

/// Imports users. Takes some megabytes of memory, however many users there are, and 19 MiB a core while clear passwords
/// are hashed. Blocks until all users are stored or the import has failed.
///
/// Calls `before_commit` once all users are inserted. If the process ends before this call, nothing is imported.
///
/// # Errors
/// After an error no user is stored. A refused record is no error, but counted in [`ImportOutcome::refused_records`].
/// If there are refused records, users are stored only with `skip_invalid`.
pub fn import(
    config: &Config,
    options: &ImportOptions,
    input: impl Read,
    before_commit: impl FnOnce(),
) -> Result<ImportOutcome, TransferError> {
    let mut client = connect_if_migrated(config)?;
    let mut transaction = bulk::begin_import(&mut client)?;
    let rules = Rules::new(config, options);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (mut outcome, mut users) = (ImportOutcome::default(), Vec::new());
    let mut check = |batch: Vec<Record>| {
        for (record, accepted) in batch.iter().zip(validate_all(cores, &rules, &batch)) {
            match accepted {
                Ok(ValidUser { user, left_out_members }) => {
                    users.push(user);
                    left_out_members.into_iter().for_each(|name| outcome.count_left_out_member(name));
                }
                Err(problem) => outcome.add_problem(record.number, problem),
            }
        }
        // Stores the last users in the temporary table, too: the last call has an empty batch.
        if users.len() >= USERS_PER_STAGING || batch.is_empty() {
            bulk::stage_users(&mut transaction, &users)?;
            outcome.imported_users += users.len() as u64;
            users.clear();
        }
        Ok::<_, TransferError>(())
    };
    let (mut batch, mut unseen) = (Vec::new(), None);
    let record_word = records::read(input, &rules, &mut |record| {
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
        return Err(read_error(format!("no user has {path}, which --map names")));
    }
    outcome.record_word = record_word;
    let removed = bulk::deduplicate(&mut transaction, options.skip_existing, MAX_PROBLEMS as i64)?;
    let Duplicates { skipped_count, refused_count, first_refused } = removed;
    outcome.existing_users = skipped_count;
    outcome.refused_records += refused_count - first_refused.len() as u64;
    for Duplicate { line, earlier_line, repeats_id } in first_refused {
        let field = if repeats_id { "/id" } else { "/email" };
        let user = earlier_line.map(|earlier| format!("{} {earlier}, too", outcome.record_word));
        let user = user.unwrap_or_else(|| "a user in the database".to_owned());
        outcome.add_problem(line, format!("{field} is that of {user}"));
    }
    outcome.imported_users -= skipped_count + refused_count;
    if options.dry_run || (outcome.refused_records > 0 && !options.skip_invalid) {
        return Ok(outcome);
    }
    let stored_users = bulk::store_staged_users(&mut transaction, options.keep_ids)?;
    if let count @ 1.. = outcome.imported_users.saturating_sub(stored_users) {
        return Err(TransferError::Database(format!("users left out by another program's trigger: {count}")));
    }
    before_commit();
    transaction.commit().map_err(|error| TransferError::UncertainCommit(explain(&error)))?;
    Ok(outcome)
}

/// Validates records, on all cores if clear passwords have to be hashed. Returns the user or the problem of each
/// record.
fn validate_all<'a>(cores: usize, rules: &Rules, batch: &'a [Record]) -> Vec<Result<ValidUser<'a>, String>> {
    let check = |part: &'a [Record]| part.iter().map(|record| rules.validate(record)).collect::<Vec<_>>();
    if !rules.options.hash_passwords {
        return check(batch);
    }
    thread::scope(|scope| {
        let parts = batch.chunks(batch.len().div_ceil(cores).max(1));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("checks do not panic")).collect()
    })
}
