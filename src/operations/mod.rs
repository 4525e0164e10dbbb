//! One file for each operation, which parses a request, executes a batch of commands and answers them.
//!
//! A request is validated once, by its command's `parse`, and is then a [`Command`] until it is answered.

mod authenticate;
mod create;
mod delete;
mod find;
mod list;
pub(crate) mod throttle;
mod update;

use crate::app::routes::{self, Asked, Callers, Endpoint};
use crate::app::{App, Next};
use crate::db::{Create, Delete, Update, is_of_value, users::Change};
use crate::error::Error;
use crate::http::{Cors, Request, RequestId, Response, log_line};
use crate::input::{self, etag};
use crate::users::user::User;
use authenticate::Authenticate;
use find::Find;
use list::List;
use log::Level;
use std::time::{Duration, Instant};
use strum::VariantNames;

/// A valid request, from its validation to its answer.
#[derive(Debug)]
pub(crate) enum Command {
    Find(Find),
    List(List),
    Create(Create),
    Update(Update),
    Delete(Delete),
    Authenticate(Authenticate),
}

/// The answer of a command; `None` if the command continues in the lane that it needs now. An error ends the command,
/// except [`Error::Contended`]: then nothing was changed, and the command may be executed again later.
pub(crate) type Outcome = Result<Option<Response>, Error>;

/// A command of a batch.
pub(crate) struct Item<'a, C> {
    command: &'a mut C,
    /// The time after which no change is begun.
    deadline: Instant,
    outcome: &'a mut Outcome,
}

/// A kind of statement, or a hash. Commands of one lane form batches, and wait for no other lane.
/// The names in lower case are the labels in figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Lane {
    /// Reads of one user, by its id or its address: one query for all of a kind.
    Find,
    /// Pages: one query for several.
    List,
    /// Creates: one statement and one commit for all.
    Create,
    /// Changes of users, passwords aside: one statement and one commit for all updates, one for all deletes.
    Change,
    /// A write that is never batched: of passwords, of addresses, or on conditions of several states.
    Single,
    /// A password to hash or to check, and the look-up before: a core for its time, and no session meanwhile.
    Hash,
}

/// The next step of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// The lane that the command is queued in.
    pub lane: Lane,
    /// The user that the step changes: changes of one user are made in the order of their arrival.
    pub row: Option<i64>,
    /// The most users that a list has.
    pub users: usize,
}

impl Needs {
    /// Returns the needs of a command that changes no user.
    pub const fn of(lane: Lane) -> Needs {
        Needs { lane, row: None, users: 0 }
    }

    /// Returns the needs of a command that changes this user.
    pub const fn row(lane: Lane, user: i64) -> Needs {
        Needs { row: Some(user), ..Needs::of(lane) }
    }
}

/// Returns the pause of a command that met a lock; `retries`: how often it was retried already.
pub(crate) fn retry_pause(retries: usize) -> Duration {
    Duration::from_millis(10 << retries.min(3))
}

impl Command {
    /// Returns the lane that it is queued in next.
    pub fn needs(&self) -> Needs {
        match self {
            Command::Find(_) => Needs::of(Lane::Find),
            Command::List(list) => list.needs(),
            Command::Create(create) => create.needs(),
            Command::Update(update) => update.needs(),
            Command::Delete(delete) => delete.needs(),
            Command::Authenticate(authenticate) => authenticate.needs(),
        }
    }
}

impl App {
    /// Makes a request of this endpoint a command, or answers it with a page. Refuses it in the order of access, query,
    /// media type, JSON, schema, mass assignment.
    pub(crate) fn parse(
        &self,
        request: &Request,
        Asked { endpoint, callers, user }: Asked,
        cors: &Cors,
        token: Option<Callers>,
        id: Option<&RequestId>,
    ) -> Result<Next, Error> {
        if callers != Callers::Any {
            self.access.check(request, callers, cors, token)?;
            // A browser asks with the target of the request that it is about to send.
            if !matches!(endpoint, Endpoint::List | Endpoint::Page(_)) && !cors.is_preflight(request) {
                input::no_query(request)?;
            }
        }
        Ok(Next::Execute(match endpoint {
            Endpoint::List => Command::List(List(input::list_request(request, self.max_per_page)?)),
            Endpoint::Create => Command::Create(Create::parse(request, self)?),
            Endpoint::Find => Command::Find(Find::parse(request, user)?),
            Endpoint::Update => Update::parse(request, user, None)?,
            Endpoint::Patch => Update::parse(request, user, Some(&self.schemas.patch))?,
            Endpoint::Delete => Command::Delete(Delete::parse(request, user)?),
            Endpoint::Authenticate => Command::Authenticate(Authenticate::parse(request, self)?),
            Endpoint::Page(page) => return Ok(Next::Answer(page(self))),
            Endpoint::Options(routes) => {
                if let Some(origin) = request.header("origin").filter(|_| !cors.is_allowed()) {
                    // The browser sends no other request of a page of this origin.
                    let origin: String = origin.chars().take(100).collect();
                    let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                    log_line(Level::Info, id, line);
                }
                return Ok(Next::Answer(cors.permit(request, routes::options(routes))));
            }
        }))
    }

    /// Executes commands of one lane with as few statements as they allow; returns an outcome for each, in their order.
    /// No change begins past its deadline.
    pub(crate) fn execute(&self, mut commands: Vec<(&mut Command, Instant)>) -> Vec<Outcome> {
        let missing = || Err(Error::Internal("a command has no outcome".to_owned()));
        let mut outcomes: Vec<Outcome> = commands.iter().map(|_| missing()).collect();
        let (mut finds, mut lists) = (vec![], vec![]);
        let (mut creates, mut updates, mut deletes) = (vec![], vec![], vec![]);
        for ((command, deadline), outcome) in commands.iter_mut().zip(&mut outcomes) {
            let deadline = *deadline;
            match &mut **command {
                Command::Create(create) if create.needs().lane == Lane::Hash => *outcome = create.hash(self),
                Command::Update(update) if update.needs().lane == Lane::Hash => *outcome = update.hash(self),
                Command::Find(command) => finds.push(Item { command, deadline, outcome }),
                Command::List(command) => lists.push(Item { command, deadline, outcome }),
                Command::Create(command) => creates.push(Item { command, deadline, outcome }),
                Command::Update(command) => updates.push(Item { command, deadline, outcome }),
                Command::Delete(command) => deletes.push(Item { command, deadline, outcome }),
                Command::Authenticate(login) => *outcome = login.execute(self, deadline),
            }
        }
        Find::execute(self, finds);
        List::execute(self, lists);
        Create::execute(self, creates);
        change(self, updates, Update::answer);
        change(self, deletes, Delete::answer);
        // Reads whose statement is refused for the value of one of them are executed again one by one.
        let is_batch = commands.len() > 1;
        for (command, outcome) in commands.into_iter().zip(&mut outcomes) {
            let is_read = matches!(command.0, Command::Find(_) | Command::List(_));
            if is_batch && is_read && outcome.as_ref().is_err_and(is_of_value) {
                *outcome = self.execute(vec![command]).remove(0);
            }
        }
        outcomes
    }
}

/// Executes changes in one statement, and answers each of them.
fn change<C: Change>(app: &App, batch: Vec<Item<C>>, answer: impl Fn(&mut C, C::Done) -> Outcome) {
    let changes: Vec<_> = batch.iter().map(|item| (&*item.command, item.deadline)).collect();
    let done = app.users.change_many(&changes);
    for (Item { command, outcome, .. }, done) in batch.into_iter().zip(done) {
        *outcome = done.and_then(|done| answer(command, done));
    }
}

/// Answers with one user and the tag of its state.
fn one(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user.revision()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScratchDatabase;
    use serde_json::json;

    /// Judges requests: the command of each, or the status of its answer.
    fn judge(requests: impl IntoIterator<Item = Request>) -> Vec<Result<Command, u16>> {
        let database = ScratchDatabase::create().expect("PostgreSQL is installed");
        let app = App::open(&database.config()).unwrap();
        let judged = requests.into_iter().map(|request| match app.judge(&request, &Cors::Off, None).next {
            Next::Execute(command) => Ok(command),
            Next::Answer(answer) => Err(answer.status),
        });
        judged.collect()
    }

    #[test]
    fn lanes() {
        let new = |password| json!({"name": "A", "email": "a@b.co", "password": password}).to_string();
        let rows = [
            ("GET", "/users/1", String::new(), Ok(Lane::Find)),
            ("HEAD", "/users/1", String::new(), Ok(Lane::Find)),
            ("GET", "/users?page=2", String::new(), Ok(Lane::List)),
            ("GET", "/users?after=2", String::new(), Ok(Lane::List)),
            ("GET", "/users?id=2&id=3", String::new(), Ok(Lane::List)),
            ("GET", "/users?email=a@b.co", String::new(), Ok(Lane::Find)),
            ("POST", "/users", r#"{"name":"A","email":"a@b.co"}"#.to_owned(), Ok(Lane::Create)),
            ("POST", "/users", new("long enough"), Ok(Lane::Hash)),
            ("POST", "/users", new("long enough").replace("password", "passw\\u006frd"), Ok(Lane::Hash)),
            ("PUT", "/users/1", r#"{"name":"forgot her \"password\""}"#.to_owned(), Ok(Lane::Change)),
            ("PUT", "/users/1", r#"{"password":null}"#.to_owned(), Ok(Lane::Single)),
            ("PUT", "/users/1", r#"{"password":"long enough"}"#.to_owned(), Ok(Lane::Hash)),
            // The user is looked up before a body is refused.
            ("PUT", "/users/1", r#"{"name":1}"#.to_owned(), Ok(Lane::Find)),
            ("PUT", "/users/1", "{".to_owned(), Ok(Lane::Find)),
            ("DELETE", "/users/1", String::new(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"name":"A"}"#.to_owned(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"password":null}"#.to_owned(), Ok(Lane::Single)),
            ("PATCH", "/users/1", r#"{"password":"long enough"}"#.to_owned(), Ok(Lane::Hash)),
            // A PUT may set this address.
            ("PATCH", "/users/1", r#"{"email":"none"}"#.to_owned(), Ok(Lane::Find)),
            ("PATCH", "/users/0", "{".to_owned(), Err(404)),
            (
                "POST",
                "/users/authenticate",
                r#"{"email":"a@b.co","password":"x"}"#.to_owned(),
                Ok(Lane::Hash),
            ),
            ("OPTIONS", "/users", String::new(), Err(204)),
            ("GET", "/users/x", String::new(), Err(404)),
            ("PUT", "/users/0", "{".to_owned(), Err(404)),
            ("DELETE", "/users", String::new(), Err(405)),
            ("GET", "/users?page=0", String::new(), Err(400)),
            // A query is judged before the database is asked, and after the path.
            ("GET", "/users?perpage=1", String::new(), Err(400)),
            ("PUT", "/users/1?page=1", "{".to_owned(), Err(400)),
            ("POST", "/users?page=1", "{".to_owned(), Err(400)),
            ("GET", "/users/x?page=1", String::new(), Err(400)),
            ("GET", "/x?page=1", String::new(), Err(404)),
            ("OPTIONS", "/users?page=1", String::new(), Err(400)),
            ("POST", "/users", "{".to_owned(), Err(400)),
            ("POST", "/users", r#"{"name":"A"}"#.to_owned(), Err(400)),
            ("POST", "/users", r#"{"name":"A","email":"a@b.co","id":"1"}"#.to_owned(), Err(422)),
        ];
        let judged =
            judge(rows.iter().map(|(method, target, body, _)| Request::new(*method, *target, &**body)));
        for ((method, target, body, expected), found) in rows.into_iter().zip(judged) {
            assert_eq!(found.map(|command| command.needs().lane), expected, "{method} {target} {body}");
        }
    }

    #[test]
    fn lanes_of_creates_with_a_key() {
        let ada = json!({"name": "A", "email": "a@b.co"});
        let with_password = json!({"name": "A", "email": "a@b.co", "password": "long enough"});
        let keyed = |body, key| Request::post("/users", body).with("Idempotency-Key", key);
        let judged = judge([keyed(&ada, "k"), keyed(&with_password, "k"), keyed(&ada, "")]);
        let lanes = judged.into_iter().map(|found| found.map(|command| command.needs().lane));
        assert_eq!(lanes.collect::<Vec<_>>(), [Ok(Lane::Create), Ok(Lane::Hash), Err(400)]);
    }

    #[test]
    fn uploads_are_not_json() {
        let request = Request::post("/users", &json!({})).with("Content-Type", "Multipart/form-data; x");
        assert_eq!(judge([request]).remove(0).unwrap_err(), 415);
    }
}
