//! What can be asked for: one file for each operation, which parses a request, executes a batch of commands and answers
//! them.
//!
//! A request is validated once, by [`Rules`], and is then a [`Command`] until it is answered.

mod authenticate;
mod create;
mod delete;
mod find;
mod list;
mod update;

use super::{
    App,
    access::Access,
    content::{ACCEPT_PATCH, json, merge_patch},
    description::{self, Description},
    health::Health,
    lanes::Needs,
    preconditions::etag,
    query,
    routes::{self, Asked, Callers, Endpoint, Probe, Route},
    throttle::{Attempt, Throttle},
    ui,
    validation::Validation,
};
use crate::{
    config::{Config, counted_as},
    error::Error,
    http::{Method, Request, RequestId, Response, log_line},
    users::user::User,
};
use authenticate::Authenticate;
use create::Create;
use delete::Delete;
use find::Find;
use list::List;
use std::{net::IpAddr, sync::Arc, time::Instant};
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

/// What was made of a command.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The answer.
    Done(Response),
    /// The command goes on in the lane that it needs now.
    Next(Command),
    /// The command needs a lock that another session holds. Nothing was changed: it may be executed again later.
    Contended(Command),
}

/// What was made of a command, or why it is refused.
pub(crate) type Outcome = Result<Progress, Error>;

impl Command {
    /// Where it is queued next.
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

/// Makes an outcome of what a statement has for a command. A command that met a lock stays as it is.
fn settle<C, T>(
    command: C,
    found: Result<T, Error>,
    again: fn(C) -> Command,
    answer: impl FnOnce(C, T) -> Outcome,
) -> Outcome {
    match found {
        Ok(found) => answer(command, found),
        Err(Error::Contended) => Ok(Progress::Contended(again(command))),
        Err(error) => Err(error),
    }
}

/// Ends the commands of a statement that has failed. An error that several commands share is logged once.
fn failed<C>(error: Error, commands: Vec<C>, again: fn(C) -> Command) -> Vec<Outcome> {
    let is_shared = commands.len() > 1;
    if is_shared && !matches!(error, Error::Contended) {
        error.log(None);
    }
    let outcome = |command| match &error {
        Error::Contended => Ok(Progress::Contended(again(command))),
        error if is_shared => Ok(Progress::Done(error.answer())),
        error => Err(error.clone()),
    };
    commands.into_iter().map(outcome).collect()
}

/// What has become of a request that was judged.
#[derive(Debug)]
pub(crate) enum Judged {
    /// The database is needed.
    Command(Command),
    /// It is answered.
    Answer(Response),
    /// It asks for the figures.
    Figures,
    /// It asks for the service's health.
    Health(Probe),
}

/// The rules that requests are judged by.
pub(crate) struct Rules {
    validation: Validation,
    /// Which requests are accepted.
    pub access: Access,
    description: Description,
    throttle: Arc<Throttle>,
    max_per_page: u32,
    /// Whether the page for the browser is served.
    pub ui: bool,
}

impl Rules {
    /// As the settings have them.
    pub fn new(config: &Config) -> Rules {
        Rules {
            validation: Validation::new(config.schema, config.validation),
            access: Access::new(config),
            description: description::of(config),
            throttle: Throttle::new(config.auth_attempts),
            max_per_page: config.max_per_page,
            ui: config.serves_ui(None),
        }
    }

    /// What the request asks for, or why it is refused: in the order of path, method, access, query, media type, JSON,
    /// schema, mass assignment. `id` is the request's, for the log.
    pub fn judge(&self, request: &Request, id: Option<&RequestId>) -> Result<Judged, Error> {
        let asked = routes::find(request.method, request.path(), self.ui)?;
        if asked.callers != Callers::Any {
            self.access.check(request, asked.callers)?;
        }
        let ignores_query = match asked.endpoint {
            Endpoint::List
            | Endpoint::Metrics
            | Endpoint::Description
            | Endpoint::Ui
            | Endpoint::Index
            | Endpoint::Health(_) => true,
            Endpoint::Options(routes) => routes.iter().all(Route::is_at_once),
            _ => false,
        };
        if !ignores_query {
            query::none(request)?;
        }
        let user = asked.user;
        Ok(Judged::Command(match asked.endpoint {
            Endpoint::List => Command::List(List::parse(request, self.max_per_page)?),
            Endpoint::Create => Command::Create(Create::parse(request, self)?),
            Endpoint::Find => Command::Find(Find::parse(request, user)?),
            Endpoint::Update => Update::parse(request, user, json)?,
            Endpoint::Patch => {
                let body = |request: &Request| self.validation.patch(merge_patch(request)?);
                Update::parse(request, user, body)?
            }
            Endpoint::Delete => Command::Delete(Delete::parse(request, user)?),
            Endpoint::Authenticate => Command::Authenticate(Authenticate::parse(request, self)?),
            Endpoint::Health(probe) => return Ok(Judged::Health(probe)),
            Endpoint::Metrics => return Ok(Judged::Figures),
            Endpoint::Description => return Ok(Judged::Answer(Response::clone(&self.description))),
            Endpoint::Index => return Ok(Judged::Answer(description::index(self.ui))),
            Endpoint::Ui => return Ok(Judged::Answer(ui::answer(request))),
            Endpoint::Options(routes) => {
                if let Some(origin) = request.header("origin")
                    && !self.access.cors(request).is_allowed()
                {
                    // All else that a page of this origin asks for stays in its browser.
                    let origin: String = origin.chars().take(100).collect();
                    let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                    log_line(log::Level::Info, id, line);
                }
                return Ok(Judged::Answer(options(routes)));
            }
        }))
    }
}

impl Rules {
    /// Counts an attempt of a client to name the password of an account; [`Error::TooManyAttempts`].
    fn attempt(&self, email: &str, peer: Option<IpAddr>) -> Result<Attempt, Error> {
        self.throttle.admit(email, peer.map(counted_as), Instant::now())
    }
}

/// The answer to a request that asks for the health of the service; `None` for any other.
pub(crate) fn answer_at_once(health: &Health, method: Method, path: &str) -> Option<Response> {
    match routes::find(method, path, true) {
        Ok(Asked { endpoint: Endpoint::Health(probe), .. }) => Some(health.answer(probe)),
        Ok(Asked { endpoint: Endpoint::Options(routes), .. }) => Some(options(routes)),
        Ok(_) => None,
        Err(error) => Some(error.answer()),
    }
}

fn options(routes: &'static [Route]) -> Response {
    let response = Response::no_content().with("Allow", routes::allow(routes));
    match routes {
        [route] if route.serves(Method::Patch) => response.with("Accept-Patch", ACCEPT_PATCH),
        _ => response,
    }
}

/// An answer with one user and the tag of its state.
fn one(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::lanes::Lane;
    use serde_json::json;

    /// The command that a request becomes, or the status of its answer.
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
