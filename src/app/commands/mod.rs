//! One file for each operation, which parses a request, executes a batch of commands and answers them.
//!
//! A request is validated once, by [`Rules`], and is then a [`Command`] until it is answered.

mod authenticate;
mod create;
mod delete;
mod find;
mod list;
mod update;

use super::access::Access;
use super::fields::{self, etag};
use super::pages::{self, Description, Health};
use super::routes::{self, Asked, Callers, Endpoint};
use super::throttle::{Attempt, Throttle};
use super::{App, validation::Validation};
use crate::config::{Config, counted_as};
use crate::error::Error;
use crate::http::{Method, Request, RequestId, Response, log_line};
use crate::users::user::User;
use authenticate::Authenticate;
use create::Create;
use delete::Delete;
use find::Find;
use list::List;
use std::time::{Duration, Instant};
use std::{net::IpAddr, sync::Arc};
use update::Update;

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

/// The state of a command after a statement or a hash.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The answer.
    Done(Response),
    /// The command goes on in the lane that it needs now.
    Next(Command),
    /// The command needs a lock that another session holds. Nothing was changed: it may be executed again later.
    Contended(Command),
}

/// The progress of a command, or the error that ends it.
pub(crate) type Outcome = Result<Progress, Error>;

/// A kind of statement, or a hash. Commands of one lane form batches, and wait for no other lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

impl Lane {
    /// Their labels for figures, in the order of their numbers.
    pub const LABELS: [&str; 6] = ["find", "list", "create", "change", "single", "hash"];

    /// Each of them, in the order of their numbers (`lane as usize`).
    pub const ALL: [Lane; 6] = [Lane::Find, Lane::List, Lane::Create, Lane::Change, Lane::Single, Lane::Hash];

    /// Returns true if its statements change existing users.
    pub fn changes_rows(self) -> bool {
        matches!(self, Lane::Change | Lane::Single)
    }
}

/// The next step of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Needs {
    /// Where it is queued.
    pub lane: Lane,
    /// The user that the request changes: changes of one user are made in the order of their arrival.
    pub row: Option<i64>,
    /// Users that a list has, at most.
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

    /// Returns the needs of a list of at most so many users.
    pub const fn list(users: u32) -> Needs {
        Needs { users: users as usize, ..Needs::of(Lane::List) }
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
            Command::Find(find) => find.needs(),
            Command::List(list) => list.needs(),
            Command::Create(create) => create.needs(),
            Command::Update(update) => update.needs(),
            Command::Delete(delete) => delete.needs(),
            Command::Authenticate(authenticate) => authenticate.needs(),
        }
    }
}

impl App {
    /// Executes commands of one lane with as few statements as they allow; returns an outcome for each, in their order.
    /// No change begins past its deadline.
    pub(crate) fn execute(&self, commands: Vec<Command>, deadlines: &[Instant]) -> Vec<Outcome> {
        let mut outcomes: Vec<Option<Outcome>> = commands.iter().map(|_| None).collect();
        let (mut finds, mut creates, mut updates, mut deletes) = Default::default();
        let mut lists: [_; List::STATEMENTS] = Default::default();
        for (at, (command, deadline)) in commands.into_iter().zip(deadlines).enumerate() {
            match command {
                Command::Find(find) => put(&mut finds, at, find),
                Command::List(list) => put(&mut lists[list.statement()], at, list),
                Command::Create(create) => put(&mut creates, at, (create, *deadline)),
                Command::Update(update) => put(&mut updates, at, (update, *deadline)),
                Command::Delete(delete) => put(&mut deletes, at, (delete, *deadline)),
                Command::Authenticate(login) => outcomes[at] = Some(login.execute(self, *deadline)),
            }
        }
        let mut fill = |(places, found): (Vec<usize>, Vec<Outcome>)| {
            places.into_iter().zip(found).for_each(|(at, outcome)| outcomes[at] = Some(outcome));
        };
        fill(share(finds, |finds| Find::execute(self, finds)));
        lists.into_iter().for_each(|lists| fill(share(lists, |lists| List::execute(self, lists))));
        fill(share(creates, |creates| Create::execute(self, creates)));
        fill(share(updates, |updates| Update::execute(self, updates)));
        fill(share(deletes, |deletes| Delete::execute(self, deletes)));
        let missing = || Err(Error::Internal("a command has no outcome".to_owned()));
        outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(missing)).collect()
    }
}

/// Commands of one statement, with their places among the commands of the batch.
type Placed<C> = (Vec<usize>, Vec<C>);

fn put<C>((places, commands): &mut Placed<C>, at: usize, command: C) {
    places.push(at);
    commands.push(command);
}

fn share<C>((places, commands): Placed<C>, execute: impl FnOnce(Vec<C>) -> Vec<Outcome>) -> Placed<Outcome> {
    let outcomes = if commands.is_empty() { Vec::new() } else { execute(commands) };
    (places, outcomes)
}

/// Makes an outcome of the result that a statement has for a command.
fn settle<C, T>(
    command: C,
    found: Result<T, Error>,
    again: fn(C) -> Command,
    answer: impl FnOnce(C, T) -> Outcome,
) -> Outcome {
    match found {
        Ok(found) => answer(command, found),
        Err(error) => failure(error, again(command)),
    }
}

/// Ends a command with an error; a command that met a lock stays as it is.
fn failure(error: Error, command: Command) -> Outcome {
    match error {
        Error::Contended => Ok(Progress::Contended(command)),
        error => Err(error),
    }
}

/// Ends the commands of a statement that has failed.
fn failed<C>(error: &Error, commands: Vec<C>, again: fn(C) -> Command) -> Vec<Outcome> {
    commands.into_iter().map(|command| failure(error.clone(), again(command))).collect()
}

/// A request that was judged.
#[derive(Debug)]
pub(crate) enum Judged {
    /// The database is needed.
    Command(Command),
    /// It is answered.
    Answer(Response),
    /// It asks for a page that tells the state of the service.
    State(Endpoint),
}

/// The rules that requests are judged by.
pub(crate) struct Rules {
    validation: Validation,
    /// The requests that are accepted.
    pub access: Access,
    description: Description,
    throttle: Arc<Throttle>,
    max_per_page: u32,
    /// The page for the browser is served.
    pub ui: bool,
}

impl Rules {
    /// Returns the rules of the settings.
    pub fn new(config: &Config) -> Rules {
        Rules {
            validation: Validation::new(config.schema, config.validation),
            access: Access::new(config),
            description: pages::description(config),
            throttle: Throttle::new(config.auth_attempts),
            max_per_page: config.max_per_page,
            ui: config.serves_ui(None),
        }
    }

    /// Judges a request in the order of path, method, access, query, media type, JSON, schema, mass assignment. `id` is
    /// the request's, for the log.
    pub fn judge(&self, request: &Request, id: Option<&RequestId>) -> Result<Judged, Error> {
        let Asked { endpoint, callers, user } = routes::find(request.method, request.path(), self.ui)?;
        if callers != Callers::Any {
            self.access.check(request, callers)?;
            if !matches!(endpoint, Endpoint::List | Endpoint::Metrics) {
                fields::no_query(request)?;
            }
        }
        Ok(Judged::Command(match endpoint {
            Endpoint::List => Command::List(List::parse(request, self)?),
            Endpoint::Create => Command::Create(Create::parse(request, self)?),
            Endpoint::Find => Command::Find(Find::parse(request, user)?),
            Endpoint::Update => Update::parse(request, user, fields::json)?,
            Endpoint::Patch => {
                let body = |request: &Request| self.validation.patch(fields::merge_patch(request)?);
                Update::parse(request, user, body)?
            }
            Endpoint::Delete => Command::Delete(Delete::parse(request, user)?),
            Endpoint::Authenticate => Command::Authenticate(Authenticate::parse(request, self)?),
            Endpoint::Live | Endpoint::Ready | Endpoint::Metrics => return Ok(Judged::State(endpoint)),
            Endpoint::Description => return Ok(Judged::Answer(Response::clone(&self.description))),
            Endpoint::Index => return Ok(Judged::Answer(pages::index(self.ui))),
            Endpoint::Ui => return Ok(Judged::Answer(pages::ui(request))),
            Endpoint::Options(routes) => {
                if let Some(origin) = request.header("origin")
                    && !self.access.cors(request).is_allowed()
                {
                    // All other requests of a page of this origin stay in its browser.
                    let origin: String = origin.chars().take(100).collect();
                    let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                    log_line(log::Level::Info, id, line);
                }
                return Ok(Judged::Answer(pages::options(routes)));
            }
        }))
    }

    /// Lets time pass for the counts of wrong passwords.
    pub fn advance(&self, time: Duration) {
        self.throttle.advance(time);
    }

    /// Counts an attempt of a client to name the password of an account; [`Error::TooManyAttempts`].
    fn attempt(&self, email: &str, peer: Option<IpAddr>) -> Result<Attempt, Error> {
        self.throttle.admit(email, peer.map(counted_as), Instant::now())
    }
}

/// Answers a request for the health of the service; `None` for any other.
pub(crate) fn answer_at_once(health: &Health, method: Method, path: &str) -> Option<Response> {
    match routes::find(method, path, true).map(|asked| asked.endpoint) {
        Ok(Endpoint::Live) => Some(health.live()),
        Ok(Endpoint::Ready) => Some(health.ready()),
        Ok(Endpoint::Options(routes)) => Some(pages::options(routes)),
        Ok(_) => None,
        Err(error) => Some(error.answer()),
    }
}

/// Answers with one user and the tag of its state.
fn one(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Judges a request: its command, or the status of its answer.
    fn judge(request: &Request) -> Result<Command, u16> {
        match Rules::new(&Config::default()).judge(request, None) {
            Ok(Judged::Command(command)) => Ok(command),
            Ok(Judged::Answer(response)) => Err(response.status),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.answer().status),
        }
    }

    #[test]
    fn lanes() {
        let new = |password| json!({"name": "A", "email": "a@b.co", "password": password}).to_string();
        let rows = [
            ("GET", "/users/1", String::new(), Ok(Lane::Find)),
            ("HEAD", "/users/1", String::new(), Ok(Lane::Find)),
            ("GET", "/users?page=2", String::new(), Ok(Lane::List)),
            ("GET", "/users?after=2", String::new(), Ok(Lane::List)),
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
            // A PUT may have it.
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
        for (method, target, body, expected) in rows {
            let found = judge(&Request::new(method, target, &*body)).map(|command| command.needs().lane);
            assert_eq!(found, expected, "{method} {target} {body}");
        }
    }

    #[test]
    fn lanes_of_creates_with_a_key() {
        let ada = json!({"name": "A", "email": "a@b.co"});
        let with_password = json!({"name": "A", "email": "a@b.co", "password": "long enough"});
        let keyed = |body| judge(&Request::post("/users", body).with("Idempotency-Key", "k")).unwrap();
        assert_eq!(keyed(&ada).needs().lane, Lane::Create);
        assert_eq!(keyed(&with_password).needs().lane, Lane::Hash);
        let malformed = Request::post("/users", &ada).with("Idempotency-Key", "");
        assert_eq!(judge(&malformed).unwrap_err(), 400);
    }

    #[test]
    fn uploads_are_not_json() {
        let request = Request::post("/users", &json!({})).with("Content-Type", "Multipart/form-data; x");
        assert_eq!(judge(&request).unwrap_err(), 415);
    }
}
