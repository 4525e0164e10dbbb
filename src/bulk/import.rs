//! Creates the users of a stream: all of them in one transaction, or none.
//!
//! One thread cuts the stream into batches of records, one a core checks them, and the caller's passes the rows on to the
//! database, in the order of the stream. A fixed number of batches goes round, so that a slow stage makes the others wait.

use super::{
    BulkError, Format,
    check::{Checked, Complaint, Rules},
    connect,
    records::{Batch, Records},
};
use crate::{
    config::Config,
    db::{
        bulk::{Repeated, Staging, StoreError},
        explain,
        watchdog::Breaker,
    },
};
use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{self, BufRead, BufReader, Read},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, Sender},
    },
    thread,
};

/// What is imported, and how.
#[derive(Debug, Clone, Copy)]
pub struct Import {
    /// How a user is written.
    pub format: Format,
    /// Whether lines that are refused are left out.
    pub skip_invalid: bool,
    /// Whether users whose address is stored already are left out.
    pub skip_existing: bool,
    /// Whether nothing is to be stored in the end.
    pub dry_run: bool,
    /// Whether names and addresses are only held to what their columns can hold.
    pub as_is: bool,
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
    /// Lines checked and staged, and bytes of the stream.
    Staged { lines: u64, bytes: u64 },
    /// All lines are staged: so many users are being stored, which is one statement.
    Storing { users: u64 },
}

/// Ends an import from another thread, so that nothing of it is left.
#[derive(Clone, Default)]
pub struct Stop(Arc<Mutex<Stage>>);

#[derive(Default)]
enum Stage {
    #[default]
    Unconnected,
    Connected(Breaker),
    Committing,
    Stopped,
}

impl Stop {
    /// Whether nothing was imported, and nothing will be; otherwise it was too late. Does not block. The process is
    /// expected to end then.
    pub fn now(&self) -> bool {
        let mut stage = self.stage();
        match &*stage {
            Stage::Committing => return false,
            Stage::Connected(breaker) => breaker.trip(),
            Stage::Unconnected | Stage::Stopped => {}
        }
        *stage = Stage::Stopped;
        true
    }

    /// Whether [`Stop::now`] has ended the import.
    pub fn has_stopped(&self) -> bool {
        matches!(*self.stage(), Stage::Stopped)
    }

    /// Goes on to this stage, unless the import has been stopped.
    fn enter(&self, next: Stage) -> Result<(), BulkError> {
        match &mut *self.stage() {
            Stage::Stopped => Err(BulkError::Database("stopped".to_owned())),
            stage => {
                *stage = next;
                Ok(())
            }
        }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of one read.
const READ: usize = 64 << 10;

/// Batches that go round, for each core: one is cut, one checked, one waits for its turn.
const BATCHES_PER_CORE: usize = 3;

/// How often users are stored anew when other sessions have stored one of them meanwhile.
const ATTEMPTS: u32 = 5;

/// Bytes that a record may have where bodies have no larger limit: one line of what a body of that size has become.
const LONGEST: usize = 1 << 20;

/// Imports a stream. Holds some megabytes, however long the stream and its lines are, and what hashing takes where there
/// are clear passwords, 19 MiB a core. Blocks until all is stored, or not.
///
/// # Errors
/// Nothing was imported. Lines that are refused are no error: [`Imported::refused`] has them, and nothing was imported
/// unless they were to be skipped.
pub fn import(
    config: &Config,
    import: Import,
    input: impl Read + Send + 'static,
    stop: &Stop,
    mut on_progress: impl FnMut(Progress),
) -> Result<Imported, BulkError> {
    let (_, mut client) = connect(config)?;
    let breaker = client.breaker();
    stop.enter(Stage::Connected(client.breaker()))?;
    let run = || {
        let staging = Staging::begin(&mut client, config.db_prepared)?;
        run(config, import, Box::new(input), stop, staging, &mut on_progress)
    };
    let imported = run();
    if imported.is_err() {
        // There is nothing to be ended in good order, and it might take long.
        breaker.trip();
    }
    imported
}

fn run(
    config: &Config,
    import: Import,
    input: Box<dyn Read + Send>,
    stop: &Stop,
    mut staging: Staging,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<Imported, BulkError> {
    let mut imported = Imported::default();
    let (staged, hashes) = stage(config, import, input, &mut staging, &mut imported.refused, on_progress)?;
    let mut counts = (staged, hashes);
    on_progress(Progress::Storing { users: staged });
    if import.skip_existing {
        imported.existing += staging.skip_existing()?;
        counts = staging.count()?;
    }
    // A file without a fault meets no conflict, so none is looked for. Where one is found, all of them are.
    let mut look = import.dry_run || imported.refused.count > 0;
    for attempt in 1.. {
        if look {
            refuse_repeated(&mut staging, &mut imported.refused)?;
            counts = staging.count()?;
        }
        imported.users = counts.0;
        if import.dry_run || (imported.refused.count > 0 && !import.skip_invalid) {
            return Ok(imported);
        }
        match staging.store(counts.0, counts.1) {
            Ok(()) => break,
            // Other sessions store users, too.
            Err(StoreError::Repeated) if attempt < ATTEMPTS => look = true,
            Err(StoreError::Repeated) => {
                return Err(BulkError::Database("other sessions keep storing the same addresses".to_owned()));
            }
            Err(StoreError::Database(error)) => return Err(error.into()),
            Err(StoreError::Altered(users, hashes)) => {
                return Err(BulkError::Database(format!(
                    "{users} users and {hashes} hashes were stored instead of {} and {}: a trigger of the table alters them",
                    counts.0, counts.1
                )));
            }
        }
        if import.skip_existing {
            imported.existing += staging.skip_existing()?;
        }
    }
    stop.enter(Stage::Committing)?;
    staging.commit().map_err(|error| BulkError::Uncertain(explain(&error)))?;
    Ok(imported)
}

/// Refuses the staged lines whose address an earlier line or a stored user has.
fn refuse_repeated(staging: &mut Staging, refused: &mut Refused) -> Result<(), BulkError> {
    let Repeated { first, count } = staging.take_repeated(Refused::MOST)?;
    refused.count += count - first.len() as u64;
    for (line, of) in first {
        let problem = match of {
            Some(of) => format!("/email is that of line {of}, too"),
            None => "/email is that of a user in the database".to_owned(),
        };
        refused.add(Complaint { line, problem });
    }
    Ok(())
}

/// Checks all lines and stages those that are accepted: how many they are, and how many of them have a hash.
fn stage(
    config: &Config,
    import: Import,
    input: Box<dyn Read + Send>,
    staging: &mut Staging,
    refused: &mut Refused,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(u64, u64), BulkError> {
    let mut rules = Rules::new(config, import.format, import.as_is, !import.dry_run);
    let longest = LONGEST.max(config.limits.max_body_bytes + 4096);
    let input = match without_bom(input).map_err(BulkError::Read)? {
        Ok(input) => input,
        Err(problem) => {
            refused.add(Complaint { line: 1, problem });
            return Ok((0, 0));
        }
    };
    let mut records = Records::new(BufReader::with_capacity(READ, input), import.format, longest);
    if import.format == Format::Csv {
        let mut header = Batch::default();
        records.header(&mut header).map_err(BulkError::Read)?;
        let read = match header.records.first() {
            Some(record) => record.end.map_err(str::to_owned).and_then(|_| rules.read_header(&header.text)),
            None => Ok(()),
        };
        if let Err(problem) = read {
            refused.add(Complaint { line: header.records.first().map_or(1, |record| record.line), problem });
            return Ok((0, 0));
        }
    }
    let outcomes = Pipeline::start(records, rules).map_err(BulkError::Read)?;
    let (mut lines, mut staged, mut hashes) = (0, 0, 0);
    staging.stage(|| {
        let Some((batch, checked)) = outcomes.next()? else {
            return Ok(None);
        };
        lines += batch.records.len() as u64;
        staged += checked.count;
        hashes += checked.with_hash;
        checked.complaints.into_iter().for_each(|complaint| refused.add(complaint));
        on_progress(Progress::Staged { lines, bytes: batch.position });
        outcomes.reuse(batch);
        Ok::<_, BulkError>(Some(checked.rows))
    })?;
    Ok((staged, hashes))
}

/// The stream behind a byte order mark, which some programs write before UTF-8. The inner error is what the first line
/// is refused for.
fn without_bom(mut input: Box<dyn Read + Send>) -> io::Result<Result<impl Read + Send + 'static, String>> {
    let mut start = Vec::new();
    input.by_ref().take(3).read_to_end(&mut start)?;
    if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        return Ok(Err("is UTF-16, and should be UTF-8".to_owned()));
    }
    if start == b"\xef\xbb\xbf" {
        start.clear();
    }
    Ok(Ok(io::Cursor::new(start).chain(input)))
}

/// The threads that cut and check. They are not waited for: one may wait for a stream that never goes on.
struct Pipeline {
    outcomes: Receiver<Outcome>,
    free: Sender<Batch>,
    waiting: RefCell<Waiting>,
}

/// What came before its turn, by number; and the number whose turn it is.
#[derive(Default)]
struct Waiting {
    outcomes: BTreeMap<u64, (Batch, Checked)>,
    next: u64,
    /// How many batches there are, once that is known.
    end: Option<u64>,
}

enum Outcome {
    Checked(u64, Batch, Checked),
    /// There are so many batches, and what kept the stream from being read further.
    End(u64, io::Result<()>),
}

impl Pipeline {
    fn start<R: BufRead + Send + 'static>(mut records: Records<R>, rules: Rules) -> io::Result<Pipeline> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let (free, empty) = mpsc::channel();
        let (full, read) = mpsc::channel::<(u64, Batch)>();
        let (done, outcomes) = mpsc::channel();
        for _ in 0..cores * BATCHES_PER_CORE {
            // Its receiver is still here.
            let _ = free.send(Batch::default());
        }
        let (read, rules) = (Arc::new(Mutex::new(read)), Arc::new(rules));
        for core in 0..cores {
            let (read, rules, done) = (read.clone(), rules.clone(), done.clone());
            let body = move || {
                loop {
                    let next = read.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok((number, batch)) = next else { break };
                    let checked = rules.check(&batch);
                    if done.send(Outcome::Checked(number, batch, checked)).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new().name(format!("check-{core}")).spawn(body)?;
        }
        let body = move || {
            let mut number = 0;
            let end = loop {
                let Ok(mut batch) = empty.recv() else { return };
                match records.next_batch(&mut batch) {
                    Ok(true) if full.send((number, batch)).is_ok() => number += 1,
                    Ok(_) => break Ok(()),
                    Err(error) => break Err(error),
                }
            };
            let _ = done.send(Outcome::End(number, end));
        };
        thread::Builder::new().name("read".to_owned()).spawn(body)?;
        Ok(Pipeline { outcomes, free, waiting: RefCell::default() })
    }

    /// The next batch in the order of the stream; `None` at its end.
    fn next(&self) -> Result<Option<(Batch, Checked)>, BulkError> {
        let mut waiting = self.waiting.borrow_mut();
        loop {
            let next = waiting.next;
            if let Some(outcome) = waiting.outcomes.remove(&next) {
                waiting.next += 1;
                return Ok(Some(outcome));
            }
            if waiting.end == Some(next) {
                return Ok(None);
            }
            match self.outcomes.recv() {
                Ok(Outcome::Checked(number, batch, checked)) => {
                    waiting.outcomes.insert(number, (batch, checked));
                }
                Ok(Outcome::End(count, read)) => {
                    read.map_err(BulkError::Read)?;
                    waiting.end = Some(count);
                }
                Err(_) => return Err(BulkError::Read(io::Error::other("a thread has panicked"))),
            }
        }
    }

    /// Gives a batch back to the thread that fills it.
    fn reuse(&self, mut batch: Batch) {
        batch.clear();
        // The thread has ended where the stream has.
        let _ = self.free.send(batch);
    }
}
