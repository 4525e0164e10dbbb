//! Creates the users of a stream, all of them in one transaction or none: their records are checked, staged in a
//! temporary table, compared with one another and with the stored users, and stored by one insert.

use super::read::{read, unreadable};
use super::rules::{Accepted, Record, Rules, member};
use super::{Format, Mapping, TransferError};
use crate::config::Config;
use crate::db::{
    bulk::{self, Removed, Taken},
    explain,
    migrate::connect_migrated,
};
use std::{collections::BTreeMap, io::Read, mem, thread};

/// Options of an import.
#[derive(Debug, Clone, Default)]
pub struct Import {
    /// The format of the file; `None`: the first record tells.
    pub format: Option<Format>,
    /// Fields that are read from members or columns of other names. Members that are not mapped are left out.
    pub map: Option<Mapping>,
    /// Leaves out members or columns that are no field.
    pub ignore_unknown: bool,
    /// Leaves out refused records.
    pub skip_invalid: bool,
    /// Leaves out users whose address is stored already.
    pub skip_existing: bool,
    /// Stores nothing in the end.
    pub dry_run: bool,
    /// Accepts every name and address that its column can hold.
    pub as_is: bool,
    /// Gives users the ids of their records, and a new one if there is none.
    pub keep_ids: bool,
    /// Accepts clear passwords, and hashes them. If false, a record with a clear password is refused.
    pub clear_passwords: bool,
    /// Refuses records without an id.
    pub requires_ids: bool,
}

impl Import {
    /// Returns whether every record needs this field.
    pub(super) fn requires(&self, field: &str) -> bool {
        matches!(field, "name" | "email") || (field == "id" && self.requires_ids)
    }
}

/// The outcome of an import.
#[derive(Debug, Default)]
pub struct Imported {
    /// Users that were stored; or would have been, in a dry run or without the refused records.
    pub users: u64,
    /// Users that were left out because their address is stored already.
    pub existing: u64,
    /// Number of refused records.
    pub refused: u64,
    /// The problems of the first refused records, by the number of the record; at most [`Imported::MAX_TOLD`].
    pub problems: BTreeMap<i64, String>,
    /// The word for a record: `line`, or `user` for an element of an array.
    pub unit: &'static str,
    /// Names of members or columns that were left out, each with the number of its records.
    pub left_out: BTreeMap<String, u64>,
}

impl Imported {
    /// The most problems that are kept: a person who has read so many knows what is wrong with the file.
    pub const MAX_TOLD: usize = 20;

    fn refuse(&mut self, number: i64, problem: String) {
        self.refused += 1;
        self.problems.insert(number, problem);
        if self.problems.len() > Imported::MAX_TOLD {
            self.problems.pop_last();
        }
    }

    /// Counts a record in which a member was left out. After some names, the rest is counted together.
    fn leave_out(&mut self, name: &str) {
        let is_new = self.left_out.len() >= Imported::MAX_TOLD && !self.left_out.contains_key(name);
        *self.left_out.entry(if is_new { "…" } else { name }.to_owned()).or_default() += 1;
    }
}

/// Users of an insert into the temporary table.
const STAGED: usize = 2000;

/// Records of a batch for each core. Hashing the passwords of a batch takes some 1.3 s.
const BATCH: usize = 64;

/// Imports users. Holds some megabytes, however many users there are, and 19 MiB a core while clear passwords are hashed.
/// Blocks until all users are stored, or none. `before_commit` is called once all are stored: nothing is imported if the
/// process ends before it.
///
/// # Errors
/// An import with an error has stored no user. Refused records are no error: [`Imported::refused`] counts them, and no
/// user is stored unless they are to be skipped.
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
        for (record, accepted) in batch.iter().zip(check_on(cores, &rules, &batch)) {
            match accepted {
                Ok(Accepted { user, left_out }) => {
                    users.push(user);
                    left_out.into_iter().for_each(|name| imported.leave_out(name));
                }
                Err(problem) => imported.refuse(record.number, problem),
            }
        }
        // An empty batch is the last one: the remaining users are staged.
        if users.len() >= STAGED || batch.is_empty() {
            bulk::stage(&mut transaction, &users)?;
            imported.users += users.len() as u64;
            users.clear();
        }
        Ok::<_, TransferError>(())
    };
    let (mut batch, mut unseen) = (Vec::new(), None);
    let unit = read(input, &rules, &mut |record| {
        if let Ok(object) = &record.members {
            unseen.get_or_insert_with(|| rules.mapped()).retain(|path| member(object, path).is_none());
        }
        batch.push(record);
        if batch.len() < BATCH * cores { Ok(()) } else { check(mem::take(&mut batch)) }
    })?;
    check(batch)?;
    check(Vec::new())?;
    if let Some(path) = unseen.iter().flatten().next() {
        return Err(unreadable(format!("no user has {path}, which --map names")));
    }
    imported.unit = unit;
    let removed = bulk::remove_taken(&mut transaction, import.skip_existing, Imported::MAX_TOLD as i64)?;
    let Removed { existing, taken, first } = removed;
    imported.existing = existing;
    imported.refused += taken - first.len() as u64;
    for Taken { line, earlier, is_id } in first {
        let field = if is_id { "/id" } else { "/email" };
        let user = earlier.map(|earlier| format!("{} {earlier}, too", imported.unit));
        let user = user.unwrap_or_else(|| "a user in the database".to_owned());
        imported.refuse(line, format!("{field} is that of {user}"));
    }
    imported.users -= existing + taken;
    if import.dry_run || (imported.refused > 0 && !import.skip_invalid) {
        return Ok(imported);
    }
    // Counts the stored users, as a trigger may leave users out.
    imported.users = bulk::store(&mut transaction, import.keep_ids)?;
    before_commit();
    transaction.commit().map_err(|error| TransferError::Uncertain(explain(&error)))?;
    Ok(imported)
}

/// Checks a batch; on each core a part of it, if clear passwords are to be hashed. Returns the user or the problem of each
/// record.
fn check_on<'a>(cores: usize, rules: &Rules, batch: &'a [Record]) -> Vec<Result<Accepted<'a>, String>> {
    let check = |part: &'a [Record]| part.iter().map(|record| rules.user(record)).collect::<Vec<_>>();
    if !rules.import.clear_passwords {
        return check(batch);
    }
    thread::scope(|scope| {
        let parts = batch.chunks(batch.len().div_ceil(cores).max(1));
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("checks do not panic")).collect()
    })
}
