//! The operations on users. Each operation has a file: its parameters, how they are parsed, its statements, how they
//! are executed, and the answer, in the order in which they happen. This file has the parts that operations share:
//! commands, batches and outcomes.
//!
//! The statements can be pasted into psql. Operands have the exact types of PostgreSQL's own operators, and sessions
//! look names up in one schema alone, so that PostgreSQL chooses no operator of another role. `limit 1` within a
//! lateral and `= any (array(…))` make PostgreSQL use an index even if it planned the statement while the table was
//! empty.
//!
//! Operations know neither routes nor access rules: a request that is parsed here is allowed to be executed.

pub(crate) mod authenticate;
pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod find;
pub(crate) mod list;
pub(crate) mod throttle;
pub(crate) mod update;

pub use authenticate::Authenticate;
pub use create::Create;
pub use delete::Delete;
pub use find::Find;
pub use list::List;
pub use update::Update;

use crate::budget::MemoryBudget;
use crate::config::Config;
use crate::db::{Failure, Pool, is_caused_by_rows, is_caused_by_value, rows};
use crate::error::Error;
use crate::http::Response;
use crate::input::{etag, validation::BodySchemas};
use crate::secret::Secret;
use crate::users::password::{Hasher, PasswordHash};
use crate::users::relation::Loader;
use crate::users::revision::Condition;
use crate::users::user::{Credential, User};
use postgres::Row;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use strum::VariantNames;
use throttle::Throttle;
use time::OffsetDateTime;

/// The resources that operations are parsed and executed with.
pub struct Operations {
    pub(crate) pool: Arc<Pool>,
    /// Loads a credential when it is first accessed; `None` makes such an access an error (a lazy-loading violation).
    credential_loader: Option<Loader<Credential>>,
    pub(crate) schemas: BodySchemas,
    pub(crate) max_per_page: u32,
    pub(crate) throttle: Arc<Throttle>,
    hasher: Hasher,
    /// Counts and limits the memory that is held for clients. Hashing a password waits for memory of this budget.
    pub(crate) budget: MemoryBudget,
    request_timeout: Duration,
}

/// A valid request, from its validation to its answer.
#[derive(Debug)]
pub enum Command {
    /// `GET /users/{id}`.
    Find(Find),
    /// `GET /users`.
    List(List),
    /// `POST /users`.
    Create(Create),
    /// `PUT` and `PATCH /users/{id}`.
    Update(Update),
    /// `DELETE /users/{id}`.
    Delete(Delete),
    /// `POST /users/authenticate`.
    Authenticate(Authenticate),
}

/// The result of executing one step of a command.
#[derive(Debug)]
pub enum Outcome {
    /// The command is done: it has an answer.
    Answer(Result<Response, Error>),
    /// The command continues in the lane of its next step.
    Continue,
    /// The command has changed nothing, and is executed again after a pause.
    RetryLater,
}

impl From<Result<Outcome, Failure>> for Outcome {
    fn from(result: Result<Outcome, Failure>) -> Outcome {
        result.unwrap_or_else(|failure| match failure {
            Failure::Contended => Outcome::RetryLater,
            Failure::Error(error) => Outcome::Answer(Err(error)),
        })
    }
}

impl From<Response> for Outcome {
    fn from(response: Response) -> Outcome {
        Outcome::Answer(Ok(response))
    }
}

/// A command of a batch, with its deadline and the variable that receives its outcome.
struct BatchItem<'a, C> {
    command: &'a mut C,
    /// The time after which the command changes nothing any more.
    deadline: Instant,
    outcome: &'a mut Option<Outcome>,
}

/// A command that creates, updates or deletes a user. Changes of one kind share a statement and a commit.
trait Change: Sized {
    /// Executes changes with one statement. Returns the rows of the statement. Their column `position` says which
    /// change a row belongs to, counted from 1.
    fn execute_batch(pool: &Pool, changes: &[&Self], deadline: Instant) -> Result<Vec<Row>, Failure>;

    /// Returns the outcome of a change after its batch was executed. `row` is the row that the statement has returned
    /// for the change, if there is one.
    fn row_outcome(&mut self, operations: &Operations, row: Option<&Row>) -> Result<Outcome, Failure>;

    /// Executes the change with a statement of its own.
    fn execute_unbatched(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure>;
}

/// A queue for commands: one for each kind of statement, and one for hashing passwords. Commands of one lane form
/// batches, and wait for no other lane. The names in lower case are the values of the label `lane` in the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Lane {
    /// Reads of one user, by id or by address: one statement for all reads by id, one for all by address.
    Find,
    /// Lists of users: one statement for all lists of a kind.
    List,
    /// Creates without a password: one statement and one commit for all.
    Create,
    /// Updates without a password, and deletes: one statement and one commit for all updates, one for all deletes.
    Change,
    /// Writes with a statement of their own, never in a batch: of a password, of an address, or with a precondition
    /// that allows several revisions.
    Single,
    /// Passwords to be hashed or verified, after a look-up of the user or the key. Hashing occupies a core, but no
    /// session.
    Hash,
}

/// The next step of a command: the lane of the step, and what the lane needs to order commands and to limit batches.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The lane that the command is queued in.
    pub lane: Lane,
    /// The id of the user that the step changes, or `None` if the step changes no user. Changes of one user are
    /// executed in the order of their arrival.
    pub changed_user_id: Option<i64>,
    /// The most users that the answer to a list has; 0 for other commands.
    pub max_listed_users: usize,
}

impl Step {
    /// Returns a step that changes no stored user.
    pub const fn in_lane(lane: Lane) -> Step {
        Step { lane, changed_user_id: None, max_listed_users: 0 }
    }

    /// Returns a step that changes the user with this id.
    pub const fn changing_user(lane: Lane, id: i64) -> Step {
        Step { changed_user_id: Some(id), ..Step::in_lane(lane) }
    }
}

/// Returns how long a command that has met a lock pauses before its next retry. `retries`: how often the command was
/// retried before.
pub(crate) fn retry_pause(retries: usize) -> Duration {
    Duration::from_millis(10 << retries.min(3))
}

impl Command {
    /// Returns the lane in which the command waits next, and the user that it changes there. A command with a password
    /// to hash waits in the lane of the hashers first.
    pub fn next_step(&self) -> Step {
        match self {
            Command::Find(_) => Step::in_lane(Lane::Find),
            Command::List(list) => list.next_step(),
            Command::Create(create) => create.next_step(),
            Command::Update(update) => update.next_step(),
            Command::Delete(delete) => delete.next_step(),
            Command::Authenticate(authenticate) => authenticate.next_step(),
        }
    }
}

impl Operations {
    /// Returns the operations of a service with these settings, on this pool of sessions.
    pub(crate) fn new(pool: Pool, config: &Config) -> Operations {
        let pool = Arc::new(pool);
        Operations {
            credential_loader: config.production.then(|| find::credential_loader(&pool)),
            pool,
            schemas: BodySchemas::new(config.schema, config.validation),
            max_per_page: config.max_per_page,
            throttle: Throttle::new(config.auth_attempts),
            hasher: Hasher::new(config.password_hashing.params()),
            budget: MemoryBudget::new(config.limits.memory_budget),
            request_timeout: config.limits.request_timeout,
        }
    }

    /// Returns the deadline of a request that has just been read.
    pub(crate) fn new_deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }

    /// Executes commands of one lane with as few statements as possible. Returns an outcome for each command, in the
    /// order of the commands. No change begins after its deadline.
    pub fn execute(&self, mut commands_and_deadlines: Vec<(&mut Command, Instant)>) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = commands_and_deadlines.iter().map(|_| None).collect();
        let (mut finds, mut lists) = (vec![], vec![]);
        let (mut creates, mut updates, mut deletes) = (vec![], vec![], vec![]);
        for ((command, deadline), outcome) in commands_and_deadlines.iter_mut().zip(&mut outcomes) {
            let (deadline, is_hashed) = (*deadline, command.next_step().lane == Lane::Hash);
            match &mut **command {
                Command::Create(create) if is_hashed => *outcome = Some(create.hash_password(self).into()),
                Command::Update(update) if is_hashed => *outcome = Some(update.hash_password(self).into()),
                Command::Find(command) => finds.push(BatchItem { command, deadline, outcome }),
                Command::List(command) => lists.push(BatchItem { command, deadline, outcome }),
                Command::Create(command) => creates.push(BatchItem { command, deadline, outcome }),
                Command::Update(command) => updates.push(BatchItem { command, deadline, outcome }),
                Command::Delete(command) => deletes.push(BatchItem { command, deadline, outcome }),
                Command::Authenticate(login) => *outcome = Some(login.execute(self, deadline).into()),
            }
        }
        Find::execute(self, finds);
        List::execute(self, lists);
        Create::execute(self, creates);
        self.execute_changes(updates);
        self.execute_changes(deletes);
        // If the database has refused the statement of several reads because of a value in one of the reads, executes
        // each read alone.
        let is_batch = commands_and_deadlines.len() > 1;
        for (command, outcome) in commands_and_deadlines.into_iter().zip(&mut outcomes) {
            let is_read = matches!(command.0, Command::Find(_) | Command::List(_));
            let is_refused = |error: &Error| is_batch && is_read && is_caused_by_value(error);
            if matches!(outcome, Some(Outcome::Answer(Err(error))) if is_refused(error)) {
                *outcome = self.execute(vec![command]).pop();
            }
        }
        outcomes.into_iter().map(|outcome| outcome.expect("each kind of command is executed")).collect()
    }

    /// Executes one command to its end. If the command meets a lock of another session, retries the command until its
    /// deadline.
    pub(crate) fn execute_to_end(&self, mut command: Command) -> Result<Response, Error> {
        let deadline = self.new_deadline();
        let mut retries = 0;
        loop {
            match self.execute(vec![(&mut command, deadline)]).remove(0) {
                Outcome::Answer(answer) => return answer,
                Outcome::Continue => {}
                Outcome::RetryLater if Instant::now() + retry_pause(retries) < deadline => {
                    thread::sleep(retry_pause(retries));
                    retries += 1;
                }
                Outcome::RetryLater => return Err(Failure::Contended.into_error()),
            }
        }
    }

    /// Executes changes with one statement and one commit. If the database refuses the statement for a reason that may
    /// concern only some of the changes, executes each change alone. If the statement meets a lock, has each change
    /// retried. Refuses changes whose deadline is too near.
    fn execute_changes<C: Change>(&self, mut batch: Vec<BatchItem<C>>) {
        /// Time that a change needs beside its statement, which takes up to `statement_timeout`. A change with less
        /// time left than both together is refused, so that its batch does not wait for a session in vain.
        const TIME_NEEDED_BESIDE_STATEMENT: Duration = Duration::from_millis(100);
        if let [BatchItem { command, deadline, outcome }] = &mut batch[..] {
            **outcome = Some(command.execute_unbatched(self, *deadline).into());
            return;
        }
        let latest = Instant::now() + self.pool.statement_timeout + TIME_NEEDED_BESIDE_STATEMENT;
        let (batch, late): (Vec<_>, Vec<_>) = batch.into_iter().partition(|item| item.deadline >= latest);
        for BatchItem { outcome, .. } in late {
            let error = Error::Unavailable("a change could not be sent in time".into());
            *outcome = Some(Outcome::Answer(Err(error)));
        }
        let Some(earliest) = batch.iter().map(|item| item.deadline).min() else { return };
        let changes: Vec<&C> = batch.iter().map(|item| &*item.command).collect();
        let with_position = |row: Row| Ok((row.try_get("position")?, row));
        let rows: Result<HashMap<i64, Row>, Failure> = C::execute_batch(&self.pool, &changes, earliest)
            .and_then(|rows| rows.into_iter().map(with_position).collect());
        for (position, BatchItem { command, deadline, outcome }) in (1..).zip(batch) {
            let settled = match &rows {
                Err(failure) if is_caused_by_rows(failure) => command.execute_unbatched(self, deadline),
                Err(failure) => Err(failure.clone()),
                Ok(rows) => command.row_outcome(self, rows.get(&position)),
            };
            *outcome = Some(settled.into());
        }
    }

    /// Returns how many hashers (threads that hash passwords) a service has: one for every two cores, which leaves half
    /// of the cores to reads, but no more than the budget has memory for.
    pub(crate) fn max_hashing_threads(&self) -> usize {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (cores / 2).min(self.budget.limit / self.hasher.memory_bytes(None)).max(1)
    }

    /// Hashes a password, if there is one. Blocks as [`Operations::use_hasher`] does.
    pub(crate) fn hash_password(&self, password: Option<&Secret>) -> Result<Option<PasswordHash>, Error> {
        password.map(|password| self.use_hasher(None, |hasher| hasher.hash(password))?).transpose()
    }

    /// Runs `job`, which verifies a password against `hash` and may then make a new hash, while memory for the job is
    /// reserved. Blocks until the budget has memory for the larger of the two hashes, or fails with
    /// [`Error::Unavailable`] after `request_timeout`. Blocks for the job, too.
    fn use_hasher<T>(&self, hash: Option<&PasswordHash>, job: impl FnOnce(&Hasher) -> T) -> Result<T, Error> {
        let bytes = self.hasher.memory_bytes(hash).max(self.hasher.memory_bytes(None));
        match self.budget.reserve(bytes, self.new_deadline()) {
            Some(_held) => Ok(job(&self.hasher)),
            None => Err(Error::Unavailable("no memory became free for hashing a password".into())),
        }
    }

    /// Finds a user whose revision meets a condition. Fails with [`Error::NotFound`] or [`Error::PreconditionFailed`].
    fn find_user(&self, id: i64, condition: &Condition) -> Result<User, Failure> {
        let user = self.find_by_ids(&[id])?.pop().ok_or(Error::NotFound)?;
        if condition.is_met_by(user.revision()) { Ok(user) } else { Err(Error::PreconditionFailed.into()) }
    }

    fn read_user(&self, row: &Row) -> Result<User, Error> {
        Ok(rows::read_user(row, self.credential_loader.clone())?)
    }
}

/// Returns the row of a change that a batch has made; `None` if the batch has left the change to a statement of its
/// own. Fails if the user is missing, locked, or does not meet the precondition.
fn changed_row(row: Option<&Row>) -> Result<Option<&Row>, Failure> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    match row.try_get("outcome")? {
        "done" => Ok(Some(row)),
        "by itself" => Ok(None),
        "precondition failed" => Err(Error::PreconditionFailed.into()),
        "locked" => Err(Failure::Contended),
        "refused" => Err(refused_by_trigger("")),
        _ => Err(Error::NotFound.into()),
    }
}

/// Returns the error for a change of a row that a trigger of another program has left as it was.
fn refused_by_trigger(sql: &'static str) -> Failure {
    let message = "a trigger of another program left the row as it was, by returning null".to_owned();
    Error::Database { sql, message, code: String::new() }.into()
}

/// Returns three parameters by which a statement changes a row only at an allowed revision: true if every revision is
/// allowed; the version and the time of change of the only allowed revision, or nulls. This is the revision of
/// `before`, the user as read earlier, or else the revision in the condition.
fn etag_params(condition: &Condition, before: Option<&User>) -> (bool, Option<i64>, Option<OffsetDateTime>) {
    let revision = before.map(User::revision).or_else(|| condition.if_match.as_ref()?.first().copied());
    let is_any = before.is_none() && condition.if_match.is_none();
    (is_any, revision.map(|revision| revision.version), revision.map(|revision| revision.updated_at))
}

/// Answers with one user, and with the tag of the user's revision as `ETag`.
fn answer_with(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user.revision()))
}
