//! Creates the users of a file or a stream: all of them in one transaction, or none.
//!
//! Users are staged in a temporary table, where lines with the same address are found, and stored by one statement. A
//! file is first stored as it is read, without staging, and read again where it has such lines or passwords: a hash is
//! stored under its user's id, which is not known before the user is stored.

use super::{
    Format, TransferError,
    check::{Complaint, Rows, Rules},
    input::{Input, without_bom},
    pipeline::Pipeline,
    records::Records,
    stop::{Stage, Stop},
};
use crate::{
    config::Config,
    db::{
        explain,
        open::Opening,
        transfer::{Repeated, Staging},
    },
};
use std::io::{BufReader, Read};

/// What is imported, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct Import {
    /// How a user is written; `None`: as the first one looks.
    pub format: Option<Format>,
    /// Whether lines that are refused are left out.
    pub skip_invalid: bool,
    /// Whether users whose address is stored already are left out.
    pub skip_existing: bool,
    /// Whether nothing is to be stored in the end.
    pub dry_run: bool,
    /// Whether names and addresses are only held to what their columns can hold.
    pub as_is: bool,
    /// Whether users get the ids of their lines.
    pub keep_ids: bool,
}

/// What has become of the lines.
#[derive(Debug, Default)]
pub struct Imported {
    /// Users that were stored; or would have been, in a dry run or where lines were refused.
    pub users: u64,
    /// Users that were left out because their address is stored already.
    pub existing: u64,
    /// Lines that are refused.
    pub refused: Refused,
}

/// Lines that are refused: the first ones, and how many there are.
#[derive(Debug, Default)]
pub struct Refused {
    /// At most [`Refused::MOST`], by line.
    pub first: Vec<Complaint>,
    /// All of them.
    pub count: u64,
}

impl Refused {
    /// A person who has read so many knows what is wrong with the file.
    pub const MOST: usize = 20;

    fn add(&mut self, complaint: Complaint) {
        self.count += 1;
        let at = self.first.partition_point(|other| other.line < complaint.line);
        self.first.insert(at, complaint);
        self.first.truncate(Refused::MOST);
    }
}

/// How far an import is.
#[derive(Debug, Clone, Copy)]
pub enum Progress {
    /// Lines checked, and bytes of the stream. The lines of a file may be checked twice.
    Checked { lines: u64, bytes: u64 },
    /// All lines are checked: so many users are being stored.
    Storing { users: u64 },
}

/// Bytes of one read.
const READ: usize = 64 << 10;

/// How often users are stored anew when other sessions have stored one of them meanwhile.
const ATTEMPTS: u32 = 5;

/// Bytes that a record may have where bodies have no larger limit: one line of what a body of that size has become.
const LONGEST: usize = 1 << 20;

/// Imports users. Holds some megabytes, however many they and however long their lines are, and what hashing takes
/// where there are clear passwords, 19 MiB a core. Blocks until all is stored, or not.
///
/// # Errors
/// Nothing was imported. Lines that are refused are no error: [`Imported::refused`] has them, and nothing was imported
/// unless they were to be skipped.
pub fn import(
    config: &Config,
    import: Import,
    mut input: Input,
    stop: &Stop,
    mut on_progress: impl FnMut(Progress),
) -> Result<Imported, TransferError> {
    let mut client = Opening::new(config)?.connect_migrated(config)?;
    let breaker = client.breaker();
    stop.enter(Stage::Connected(client.breaker()))?;
    let format = import.format.map_or_else(|| input.format(), Ok).map_err(TransferError::Read)?;
    let import = Import { format: Some(format), ..import };
    let run = || {
        let staging = Staging::begin(&mut client, config.db_prepared, import.keep_ids)?;
        Run { config, import, staging, on_progress: &mut on_progress }.run(input, stop)
    };
    let imported = run();
    if imported.is_err() {
        // There is nothing to be ended in good order, and it might take long.
        breaker.shut_down();
    }
    imported
}

/// Why users were not stored as they were read.
enum Unstored {
    /// They have to be staged.
    Unsuitable,
    Failed(TransferError),
}

impl<E: Into<TransferError>> From<E> for Unstored {
    fn from(error: E) -> Unstored {
        Unstored::Failed(error.into())
    }
}

struct Run<'a> {
    config: &'a Config,
    import: Import,
    staging: Staging<'a>,
    on_progress: &'a mut dyn FnMut(Progress),
}

impl Run<'_> {
    fn run(mut self, input: Input, stop: &Stop) -> Result<Imported, TransferError> {
        let Import { dry_run, skip_existing, keep_ids, .. } = self.import;
        let stored = match input.ahead() {
            // The sequence of ids has to be past those of the lines before one is stored.
            Some(input) if !dry_run && !skip_existing && !keep_ids => self.store_unstaged(input),
            _ => Err(Unstored::Unsuitable),
        };
        let (imported, is_stored) = match stored {
            Ok(imported) => (imported, true),
            Err(Unstored::Unsuitable) => self.stage_and_store(input.read(), false)?,
            Err(Unstored::Failed(TransferError::EmailTaken | TransferError::IdTaken)) => {
                self.stage_and_store(input.read(), true)?
            }
            Err(Unstored::Failed(error)) => return Err(error),
        };
        if is_stored {
            stop.enter(Stage::Committing)?;
            self.staging.commit().map_err(|error| TransferError::Uncertain(explain(&error)))?;
        }
        Ok(imported)
    }

    /// Stores the users of a file as they are read, without staging them, which makes less work for the server. After
    /// an error nothing of it is stored. [`Unstored::Unsuitable`]: not all of them are to be stored, or one has a
    /// password, or the table takes no rows that are not staged.
    ///
    /// Creates of the same addresses then wait from the moment that a line is stored, not from the moment that all
    /// lines are checked. So this is for a file, which is read as quickly as the database stores, and not for a stream,
    /// which may pause for hours; nor for passwords, of which a core hashes fifty a second.
    fn store_unstaged(&mut self, input: Box<dyn Read + Send>) -> Result<Imported, Unstored> {
        let Run { config, import, staging, on_progress } = self;
        let mut lines = Lines::default();
        if !staging.may_store_unstaged {
            return Err(Unstored::Unsuitable);
        }
        let rules = Rules::new(config, *import, Rows::Stored, staging.present);
        let Some(mut checked) = check(config, rules, input, &mut lines.refused)? else {
            return Err(Unstored::Unsuitable);
        };
        let stored = staging.store_unstaged(|| {
            let rows = lines.take(&mut checked, on_progress)?;
            if lines.with_password > 0 || (lines.refused.count > 0 && !import.skip_invalid) {
                return Err(Unstored::Unsuitable);
            }
            if rows.is_none() {
                on_progress(Progress::Storing { users: lines.users });
            }
            Ok(rows)
        })?;
        refuse_altered((stored, 0), (lines.users, 0))?;
        Ok(Imported { users: lines.users, refused: lines.refused, ..Imported::default() })
    }

    /// Stages the users of all lines that are accepted, and stores them if they are to be stored; whether they were.
    /// `is_repeated`: whether an address is known to be that of two lines, or of a stored user.
    fn stage_and_store(
        &mut self,
        input: Box<dyn Read + Send>,
        is_repeated: bool,
    ) -> Result<(Imported, bool), TransferError> {
        let import = self.import;
        let Lines { users, with_password, refused, .. } = self.stage(input)?;
        let mut imported = Imported { refused, ..Imported::default() };
        let mut counts = (users, with_password);
        (self.on_progress)(Progress::Storing { users });
        let staging = &mut self.staging;
        if import.skip_existing {
            imported.existing += staging.skip_existing()?;
            counts = staging.count()?;
        }
        // A file without a fault meets no conflict, so none is looked for. Where one is found, all of them are. With
        // ids, the sequence moves before a conflict could be met, and for good.
        let mut look = is_repeated || import.dry_run || import.keep_ids || imported.refused.count > 0;
        for attempt in 1.. {
            if look {
                refuse_repeated(staging, &mut imported.refused)?;
                counts = staging.count()?;
            }
            imported.users = counts.0;
            if import.dry_run || (imported.refused.count > 0 && !import.skip_invalid) {
                return Ok((imported, false));
            }
            match staging.store(counts.1 > 0).map_err(TransferError::from) {
                Ok(stored) => {
                    refuse_altered(stored, counts)?;
                    break;
                }
                // Other sessions store users, too.
                Err(TransferError::IdTaken) if attempt < ATTEMPTS && !import.keep_ids => {
                    staging.move_ids()?
                }
                Err(TransferError::EmailTaken | TransferError::IdTaken) if attempt < ATTEMPTS => look = true,
                Err(error) => return Err(error),
            }
            if import.skip_existing {
                imported.existing += staging.skip_existing()?;
            }
        }
        Ok((imported, true))
    }

    /// Checks all lines and stages those that are accepted.
    fn stage(&mut self, input: Box<dyn Read + Send>) -> Result<Lines, TransferError> {
        let Run { config, import, staging, on_progress } = self;
        let mut lines = Lines::default();
        let rules = Rules::new(config, *import, Rows::Staged { hash: !import.dry_run }, staging.present);
        if let Some(mut checked) = check(config, rules, input, &mut lines.refused)? {
            staging.stage(|| lines.take(&mut checked, on_progress))?;
        }
        Ok(lines)
    }
}

/// What the lines that were checked so far have come to.
#[derive(Default)]
struct Lines {
    count: u64,
    /// Those that are accepted, and how many of them have a password, in clear or hashed.
    users: u64,
    with_password: u64,
    refused: Refused,
}

impl Lines {
    /// Adds the next batch; its rows.
    fn take(
        &mut self,
        pipeline: &mut Pipeline,
        on_progress: &mut dyn FnMut(Progress),
    ) -> Result<Option<Vec<u8>>, TransferError> {
        let Some(checked) = pipeline.next()? else {
            return Ok(None);
        };
        self.count += checked.lines;
        self.users += checked.count;
        self.with_password += checked.with_password;
        checked.complaints.into_iter().for_each(|complaint| self.refused.add(complaint));
        on_progress(Progress::Checked { lines: self.count, bytes: checked.position });
        Ok(Some(checked.rows))
    }
}

/// The error: what was stored, users and hashes, is not what was sent.
fn refuse_altered(stored: (u64, u64), sent: (u64, u64)) -> Result<(), TransferError> {
    match stored == sent {
        true => Ok(()),
        false => Err(TransferError::Database(format!(
            "{} users and {} hashes were stored instead of {} and {}: a trigger of the table alters them",
            stored.0, stored.1, sent.0, sent.1
        ))),
    }
}

/// Refuses the staged lines whose address, or whose id, an earlier line or a stored user has.
fn refuse_repeated(staging: &mut Staging, refused: &mut Refused) -> Result<(), TransferError> {
    let Repeated { first, count } = staging.take_repeated(Refused::MOST)?;
    refused.count += count - first.len() as u64;
    for (line, of, is_id) in first {
        let field = if is_id { "/id" } else { "/email" };
        let problem = match of {
            Some(of) => format!("{field} is that of line {of}, too"),
            None => format!("{field} is that of a user in the database"),
        };
        refused.add(Complaint { line, problem });
    }
    Ok(())
}

/// Begins to check all lines. `None` where the first one says that none can be read, and is refused.
fn check(
    config: &Config,
    mut rules: Rules,
    input: Box<dyn Read + Send>,
    refused: &mut Refused,
) -> Result<Option<Pipeline>, TransferError> {
    let longest = LONGEST.max(config.limits.max_body_bytes + 4096);
    let input = match without_bom(input).map_err(TransferError::Read)? {
        Ok(input) => input,
        Err(problem) => {
            refused.add(Complaint { line: 1, problem });
            return Ok(None);
        }
    };
    let format = rules.format;
    let mut records = Records::new(BufReader::with_capacity(READ, input), format, longest);
    if format == Format::Csv {
        let header = records.batch(1).map_err(TransferError::Read)?;
        let read = match header.records.first() {
            Some(record) => record.end.map_err(str::to_owned).and_then(|_| rules.read_header(&header.text)),
            None => Ok(()),
        };
        if let Err(problem) = read {
            refused.add(Complaint { line: header.records.first().map_or(1, |record| record.line), problem });
            return Ok(None);
        }
    }
    Pipeline::start(records, rules).map(Some).map_err(TransferError::Read)
}
