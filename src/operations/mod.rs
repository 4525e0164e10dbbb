//! One file for each operation: its parameters, how they are parsed, its statements, how they are executed, and the
//! answer, in the order in which they happen. This file has the parts that operations share: commands, batches and
//! outcomes.
//!
//! The statements can be pasted into psql. Operands have the exact types of PostgreSQL's own operators, and sessions
//! look names up in one schema alone, so that PostgreSQL chooses no operator of another role. `limit 1` within a
//! lateral and `= any (array(…))` make PostgreSQL use an index even if it planned the statement while the table was
//! empty.
//!
//! Knows no route and no rule of access: a request that is parsed here may be executed.

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

use crate::budget::Budget;
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
    /// The count of the memory that is held for clients.
    pub(crate) budget: Budget,
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

/// The end of one execution of a command.
#[derive(Debug)]
pub enum Outcome {
    /// The command is done: it has an answer.
    Answered(Result<Response, Error>),
    /// The command continues in the lane of its next step.
    Continued,
    /// The command has changed nothing, and is executed again after a pause.
    Retried,
}

impl From<Result<Outcome, Failure>> for Outcome {
    fn from(result: Result<Outcome, Failure>) -> Outcome {
        result.unwrap_or_else(|failure| match failure {
            Failure::Contended => Outcome::Retried,
            Failure::Error(error) => Outcome::Answered(Err(error)),
        })
    }
}

impl From<Response> for Outcome {
    fn from(response: Response) -> Outcome {
        Outcome::Answered(Ok(response))
    }
}

/// A command of a batch, with its deadline and the place of its outcome.
struct Item<'a, C> {
    command: &'a mut C,
    /// The time after which the command changes nothing any more.
    deadline: Instant,
    outcome: &'a mut Option<Outcome>,
}

/// A command that changes users: creates, updates or deletes. Changes of one kind share a statement and a commit.
trait Change: Sized {
    /// Executes changes with one statement. Returns a row for each change, with its position, from 1.
    fn execute_batch(pool: &Pool, changes: &[&Self], deadline: Instant) -> Result<Vec<Row>, Failure>;

    /// Returns the outcome of a change after its batch was executed. `row` is the row of the change, if there is one.
    fn row_outcome(&mut self, operations: &Operations, row: Option<&Row>) -> Result<Outcome, Failure>;

    /// Executes the change with a statement of its own.
    fn apply_alone(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure>;
}

/// A kind of statement, or the hashing of passwords. Commands of one lane form batches, and wait for no other lane. The
/// names in lower case are the values of a label in the metrics.
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
    /// A write that is executed alone: of a password, of an address, or with a precondition that allows several
    /// states.
    Single,
    /// A password to hash or to verify, after the look-up that this needs. Hashing occupies a core, and no session.
    Hash,
}

/// The next step of a command.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The lane that the command is queued in.
    pub lane: Lane,
    /// The user that the step changes. Changes of one user are made in the order of their arrival.
    pub changed_user: Option<i64>,
    /// The most users that the answer to a list has; 0 for other commands.
    pub max_users: usize,
}

impl Step {
    /// Returns a step of a command that changes no user.
    pub const fn in_lane(lane: Lane) -> Step {
        Step { lane, changed_user: None, max_users: 0 }
    }

    /// Returns a step of a command that changes this user.
    pub const fn change(lane: Lane, user: i64) -> Step {
        Step { changed_user: Some(user), ..Step::in_lane(lane) }
    }
}

/// Returns how long a command pauses after it has met a lock. `retries`: how often it was retried before.
pub(crate) fn retry_pause(retries: usize) -> Duration {
    Duration::from_millis(10 << retries.min(3))
}

impl Command {
    /// Returns the next step of the command.
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
            credential_loader: config.production.then(|| find::loader(&pool)),
            pool,
            schemas: BodySchemas::new(config.schema, config.validation),
            max_per_page: config.max_per_page,
            throttle: Throttle::new(config.auth_attempts),
            hasher: Hasher::new(config.password_hashing.params()),
            budget: Budget::new(config.limits.memory_budget),
            request_timeout: config.limits.request_timeout,
        }
    }

    /// Returns the deadline of a request that has just been read.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }

    /// Executes commands of one lane with as few statements as they allow. Returns an outcome for each, in their
    /// order. No change begins after its deadline.
    pub fn execute(&self, mut commands: Vec<(&mut Command, Instant)>) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = commands.iter().map(|_| None).collect();
        let (mut finds, mut lists) = (vec![], vec![]);
        let (mut creates, mut updates, mut deletes) = (vec![], vec![], vec![]);
        for ((command, deadline), outcome) in commands.iter_mut().zip(&mut outcomes) {
            let (deadline, is_hashed) = (*deadline, command.next_step().lane == Lane::Hash);
            match &mut **command {
                Command::Create(create) if is_hashed => *outcome = Some(create.hash_password(self).into()),
                Command::Update(update) if is_hashed => *outcome = Some(update.hash_password(self).into()),
                Command::Find(command) => finds.push(Item { command, deadline, outcome }),
                Command::List(command) => lists.push(Item { command, deadline, outcome }),
                Command::Create(command) => creates.push(Item { command, deadline, outcome }),
                Command::Update(command) => updates.push(Item { command, deadline, outcome }),
                Command::Delete(command) => deletes.push(Item { command, deadline, outcome }),
                Command::Authenticate(login) => *outcome = Some(login.execute(self, deadline).into()),
            }
        }
        Find::execute(self, finds);
        List::execute(self, lists);
        Create::execute(self, creates);
        self.execute_changes(updates);
        self.execute_changes(deletes);
        // Executes reads again one by one if the database has refused their statement for the value of one of them.
        let is_batch = commands.len() > 1;
        for (command, outcome) in commands.into_iter().zip(&mut outcomes) {
            let is_read = matches!(command.0, Command::Find(_) | Command::List(_));
            let is_refused = |error: &Error| is_batch && is_read && is_caused_by_value(error);
            if matches!(outcome, Some(Outcome::Answered(Err(error))) if is_refused(error)) {
                *outcome = self.execute(vec![command]).pop();
            }
        }
        outcomes.into_iter().map(|outcome| outcome.expect("each kind of command is executed")).collect()
    }

    /// Executes one command to its end. If it meets a lock of another session, executes it again until its time is up.
    pub(crate) fn execute_alone(&self, mut command: Command) -> Result<Response, Error> {
        let deadline = self.deadline();
        let mut retries = 0;
        loop {
            match self.execute(vec![(&mut command, deadline)]).remove(0) {
                Outcome::Answered(answer) => return answer,
                Outcome::Continued => {}
                Outcome::Retried if Instant::now() + retry_pause(retries) < deadline => {
                    thread::sleep(retry_pause(retries));
                    retries += 1;
                }
                Outcome::Retried => return Err(Failure::Contended.into_error()),
            }
        }
    }

    /// Executes changes with one statement and one commit, each with the outcome that it would have had alone. After a
    /// refusal that may concern only some of them, executes each alone. Leaves out changes whose deadline has passed.
    /// If the batch meets a lock, each change is retried alone.
    fn execute_changes<C: Change>(&self, mut batch: Vec<Item<C>>) {
        /// Time that a change needs beside its statement. A change with less time left is not sent, so that the batch
        /// does not wait for a session in vain.
        const TIME_BESIDE_STATEMENT: Duration = Duration::from_millis(100);
        if let [Item { command, deadline, outcome }] = &mut batch[..] {
            **outcome = Some(command.apply_alone(self, *deadline).into());
            return;
        }
        let latest = Instant::now() + self.pool.statement_timeout + TIME_BESIDE_STATEMENT;
        let (batch, late): (Vec<_>, Vec<_>) = batch.into_iter().partition(|item| item.deadline >= latest);
        for Item { outcome, .. } in late {
            let error = Error::Unavailable("a change could not be sent in time".into());
            *outcome = Some(Outcome::Answered(Err(error)));
        }
        let Some(earliest) = batch.iter().map(|item| item.deadline).min() else { return };
        let changes: Vec<&C> = batch.iter().map(|item| &*item.command).collect();
        let with_position = |row: Row| Ok((row.try_get("position")?, row));
        let rows: Result<HashMap<i64, Row>, Failure> = C::execute_batch(&self.pool, &changes, earliest)
            .and_then(|rows| rows.into_iter().map(with_position).collect());
        for (position, Item { command, deadline, outcome }) in (1..).zip(batch) {
            let settled = match &rows {
                Err(failure) if is_caused_by_rows(failure) => command.apply_alone(self, deadline),
                Err(failure) => Err(failure.clone()),
                Ok(rows) => command.row_outcome(self, rows.get(&position)),
            };
            *outcome = Some(settled.into());
        }
    }

    /// Returns how many passwords are hashed at once: one for every two cores, which leaves half of the cores to
    /// reads, as far as the budget has memory.
    pub(crate) fn max_hashers(&self) -> usize {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        (cores / 2).min(self.budget.limit / self.hasher.memory(None)).max(1)
    }

    /// Hashes a password, if there is one. Blocks as [`Operations::with_hash`] does.
    pub(crate) fn hash_password(&self, password: Option<&Secret>) -> Result<Option<PasswordHash>, Error> {
        password.map(|password| self.with_hash(None, |hasher| hasher.hash(password))?).transpose()
    }

    /// Runs `work`, which verifies a password against `hash` and may then make a new hash. Blocks until the budget has
    /// memory for the larger of the two hashes, or fails with [`Error::Unavailable`] after `request_timeout`. Blocks
    /// for the work, too.
    fn with_hash<T>(&self, hash: Option<&PasswordHash>, work: impl FnOnce(&Hasher) -> T) -> Result<T, Error> {
        let bytes = self.hasher.memory(hash).max(self.hasher.memory(None));
        match self.budget.reserve(bytes, self.deadline()) {
            Some(_held) => Ok(work(&self.hasher)),
            None => Err(Error::Unavailable("no memory became free for hashing a password".into())),
        }
    }

    /// Finds a user whose state matches a condition. Fails with [`Error::NotFound`] or [`Error::PreconditionFailed`].
    fn find_match(&self, id: i64, condition: &Condition) -> Result<User, Failure> {
        let user = self.find_many(&[id])?.pop().ok_or(Error::NotFound)?;
        if condition.holds(user.revision()) { Ok(user) } else { Err(Error::PreconditionFailed.into()) }
    }

    fn read_user(&self, row: &Row) -> Result<User, Error> {
        Ok(rows::read_user(row, self.credential_loader.clone())?)
    }
}

/// Returns the row of a change if the batch has made the change; `None` if the change is to be executed alone.
fn changed_row(row: Option<&Row>) -> Result<Option<&Row>, Failure> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    match row.try_get("outcome")? {
        "done" => Ok(Some(row)),
        "by itself" => Ok(None),
        "precondition failed" => Err(Error::PreconditionFailed.into()),
        "locked" => Err(Failure::Contended),
        _ => Err(Error::NotFound.into()),
    }
}

/// Returns the three parameters by which a statement changes only an allowed state of a row: whether any state is
/// allowed; else the version and the time of change of the one allowed state. This is the state that was read
/// `before`, or the state of a simple condition. Nulls allow no state, as no row has them.
fn state_params(condition: &Condition, before: Option<&User>) -> (bool, Option<i64>, Option<OffsetDateTime>) {
    let state = before.map(User::revision).or_else(|| condition.only.as_ref()?.first().copied());
    let is_any = before.is_none() && condition.only.is_none();
    (is_any, state.map(|state| state.version), state.map(|state| state.updated_at))
}

/// Answers with one user, and with the tag of the user's state as `ETag`.
fn answer_user(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user.revision()))
}
