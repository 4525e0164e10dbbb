//! What a request asks for, as a value: everything that needs no database is judged here, once, before any queue.
//!
//! Owns the order of the checks: path, method, access, query, media type, JSON, schema, mass assignment.
//! Knows no SQL, no socket and no thread.

use super::{
    access::Access,
    description::Description,
    idempotency,
    lanes::{Account, Lane, Needs},
    preconditions::Preconditions,
    query,
    router::{Route, USER, label, route},
    throttle::{Attempt, Throttle},
    validation::{Validation, object},
};
use crate::{
    config::{Config, Secret, counted_as},
    cors::Cors,
    error::Error,
    http::{Request, RequestId, Response, log_line},
    metrics::Route as Label,
    users::{
        once::{Fingerprint, Kept, Key},
        pagination::{ListRequest, Range},
        password::{Password, PasswordHash},
        revision::Condition,
        user::{NewUser, User, UserChanges},
    },
};
use std::{net::IpAddr, sync::Arc, time::Instant};

/// A valid request, and the steps that it has behind it.
#[derive(Debug)]
pub(crate) enum Command {
    /// `GET /users/:id`
    Find(i64, Preconditions),
    /// `PUT` or `PATCH /users/:id` with a body that is refused: a missing user answers 404 all the same.
    RefuseUpdate(i64, Error),
    /// `GET /users`
    List(ListRequest),
    /// The same once more, with the memory that the largest users need: these need more than usual ones.
    ListAgain(Range),
    /// `POST /users`
    Create(NewUser),
    /// `POST /users` with an `Idempotency-Key`
    CreateOnce(Box<CreateOnce>),
    /// `PUT` or `PATCH /users/:id`
    Update {
        /// The user.
        id: i64,
        /// What changes.
        changes: UserChanges,
        /// In which states of the record.
        condition: Condition,
        /// What is known of the user.
        progress: Progress,
    },
    /// `DELETE /users/:id`
    Delete(i64, Condition),
    /// `POST /users/authenticate`, before the user is looked up.
    Authenticate(Login),
    /// The same after the look-up: `None` where no user has that address.
    Verify(Login, Option<Box<User>>),
    /// The same for a user whose password was right and whose hash is outdated: the hash that it was checked with, and the
    /// one to store instead.
    Rehash(Box<User>, PasswordHash, PasswordHash),
}

/// What is known of a user that is to be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing.
    New,
    /// It existed when it was looked up. A password is hashed only after that.
    Found,
    /// It is to have another address.
    Moves,
}

/// A create that may be repeated.
#[derive(Debug)]
pub(crate) struct CreateOnce {
    pub key: Key,
    pub fingerprint: Fingerprint,
    pub new: NewUser,
    /// The password as it was sent, to be checked against that of an earlier create.
    pub password: Option<Secret>,
    /// The client, whose wrong passwords are counted.
    pub peer: Option<IpAddr>,
    /// What is known of earlier creates with the key.
    pub earlier: Earlier,
}

/// What is known of an earlier create with a key.
#[derive(Debug)]
pub(crate) enum Earlier {
    /// Nothing. Where there is a password, it is looked up before the password is hashed.
    Unknown,
    /// It was in the same batch. Looked up, all repeats are answered together.
    Batched,
    /// There was none.
    Absent,
    /// It has the same body, if it has the same password.
    Kept(Box<Kept>),
}

/// An e-mail address and the password that is to be checked.
#[derive(Debug)]
pub(crate) struct Login {
    pub email: String,
    pub password: Secret,
    pub attempt: Attempt,
}

/// The outcome of a step.
#[derive(Debug)]
pub(crate) enum Step {
    /// The answer.
    Done(Response),
    /// What is to be logged, with the request that it concerns, and answered.
    Failed(Error),
    /// The command has a next step, in the lane that it now has.
    Next(Command),
    /// Another session holds a lock that the command needs. Nothing was changed; the command may be retried later.
    Contended(Command),
}

impl CreateOnce {
    fn new(key: Key, new: NewUser, peer: Option<IpAddr>) -> CreateOnce {
        let password = match &new.password {
            Some(Password::Clear(password)) => Some(password.clone()),
            _ => None,
        };
        let fingerprint = Fingerprint::of(&new);
        CreateOnce { key, fingerprint, new, password, peer, earlier: Earlier::Unknown }
    }
}

impl Command {
    /// What its next step needs.
    pub fn needs(&self) -> Needs {
        let hash = (self.hashes() && self.lane() != Lane::Single)
            .then(|| self.account().map_or(Account::NEW, Account::of));
        Needs { row: self.changes_user(), memory: self.memory(), hash, ..Needs::of(self.lane()) }
    }

    /// The lane of its next step.
    pub fn lane(&self) -> Lane {
        match self {
            Command::Find(..) | Command::RefuseUpdate(..) => Lane::Find,
            Command::List(ListRequest::Email { .. }) => Lane::Find,
            Command::List(ListRequest::Range(_)) | Command::ListAgain(_) => Lane::List,
            Command::Create(new) => match &new.password {
                None => Lane::Create,
                Some(Password::Clear(_)) => Lane::Hash,
                Some(Password::Hashed(_)) => Lane::Single,
            },
            Command::CreateOnce(create) => match (&create.earlier, &create.new.password) {
                (Earlier::Kept(_), _) | (Earlier::Absent, Some(Password::Clear(_))) => Lane::Hash,
                (Earlier::Batched, _) | (Earlier::Unknown, Some(Password::Clear(_))) => Lane::Find,
                (_, None) => Lane::Create,
                (_, Some(Password::Hashed(_))) => Lane::Single,
            },
            Command::Update { changes, condition, progress, .. } => match (&changes.password, progress) {
                (Some(Some(Password::Clear(_))), Progress::New) => Lane::Find,
                (Some(Some(Password::Clear(_))), _) => Lane::Hash,
                (None, Progress::New) if condition.is_simple() => Lane::Change,
                _ => Lane::Single,
            },
            Command::Delete(_, condition) if condition.is_simple() => Lane::Change,
            Command::Delete(..) => Lane::Single,
            Command::Authenticate(_) => Lane::Find,
            Command::Verify(..) => Lane::Hash,
            Command::Rehash(..) => Lane::Single,
        }
    }

    /// Bytes of memory that its next step takes beside those that it holds, where they are many: those of a list.
    pub fn memory(&self) -> usize {
        match self {
            Command::List(ListRequest::Range(range)) => range.usual_memory(),
            Command::ListAgain(range) => range.most_memory(),
            _ => 0,
        }
    }

    /// The user that it changes. Changes of one user are executed in the order of their arrival.
    pub fn changes_user(&self) -> Option<i64> {
        match self {
            Command::Update { id, .. } | Command::Delete(id, _) => Some(*id),
            _ => None,
        }
    }

    /// Whether a password will be hashed or checked before it is done.
    pub fn hashes(&self) -> bool {
        match self {
            Command::Authenticate(_) | Command::Verify(..) => true,
            Command::Create(NewUser { password: Some(Password::Clear(_)), .. }) => true,
            Command::CreateOnce(create) => create.password.is_some(),
            Command::Update { changes, .. } => matches!(changes.password, Some(Some(Password::Clear(_)))),
            _ => false,
        }
    }

    /// The account whose password it checks.
    pub fn account(&self) -> Option<&str> {
        match self {
            Command::Authenticate(login) | Command::Verify(login, _) => Some(&login.email),
            _ => None,
        }
    }
}

/// The rules that requests are judged by.
pub(super) struct Judge {
    validation: Validation,
    access: Access,
    description: Description,
    throttle: Arc<Throttle>,
    max_per_page: u32,
}

impl Judge {
    pub fn new(config: &Config) -> Judge {
        Judge {
            validation: Validation::new(config.schema, config.validation),
            access: Access::new(config),
            description: Description::new(config),
            throttle: Throttle::new(config.auth_attempts),
            max_per_page: config.max_per_page,
        }
    }

    /// Counts an attempt of a client to name the password of an account; [`Error::TooManyAttempts`].
    pub fn attempt(&self, email: &str, peer: Option<IpAddr>) -> Result<Attempt, Error> {
        self.throttle.admit(email, peer.map(counted_as), Instant::now())
    }

    /// What the answer tells a page of another origin.
    pub fn cors(&self, request: &Request) -> Cors {
        self.access.cors(request)
    }

    /// Which hosts a request may name, as a text.
    pub fn accepted_hosts(&self) -> Option<String> {
        self.access.accepted_hosts()
    }

    /// The command, or why there is none.
    pub fn command(&self, request: &Request) -> Result<Command, Refusal> {
        let route = route(request.method, request.path())?;
        // The description is open to all, and so are the methods of the server: they tell nothing of the users.
        let is_open = match route {
            Route::Description => true,
            Route::Options(_) => matches!(label(request.path()), Label::Description | Label::Other),
            _ => false,
        };
        if !is_open {
            self.access.check(request)?;
        }
        if !matches!(route, Route::List | Route::Metrics | Route::Description) {
            query::none(request)?;
        }
        Ok(match route {
            Route::Options(allow) => {
                let origin = request.header("origin").filter(|_| !self.access.cors(request).is_allowed());
                return Err(Refusal::Options(allow, origin.map(|origin| origin.chars().take(100).collect())));
            }
            Route::Metrics => return Err(Refusal::Metrics),
            Route::Description => return Err(Refusal::Description(self.description.response())),
            Route::List => Command::List(query::list(request, self.max_per_page)?),
            Route::Find(id) => {
                let preconditions = Preconditions::of(request)?;
                Command::Find(id.ok_or(Error::NotFound)?, preconditions)
            }
            Route::Delete(id) => {
                let condition = Preconditions::of(request)?.into_condition();
                Command::Delete(id.ok_or(Error::NotFound)?, condition)
            }
            Route::Create => {
                let key = idempotency::key(request)?;
                let new = NewUser::from_body(self.validation.create(json(request)?)?)?;
                match key {
                    None => Command::Create(new),
                    Some(key) => Command::CreateOnce(Box::new(CreateOnce::new(key, new, request.peer))),
                }
            }
            Route::Update(id) | Route::Patch(id) => {
                let condition = Preconditions::of(request)?.into_condition();
                let id = id.ok_or(Error::NotFound)?;
                let body = match route {
                    Route::Patch(_) => merge_patch(request).and_then(|body| self.validation.patch(body)),
                    _ => json(request),
                };
                match body.and_then(UserChanges::from_body) {
                    Ok(changes) => Command::Update { id, changes, condition, progress: Progress::New },
                    Err(refusal) => Command::RefuseUpdate(id, refusal),
                }
            }
            Route::Authenticate => {
                let body = self.validation.authenticate(json(request)?)?;
                let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
                let attempt = self.attempt(text("email"), request.peer)?;
                let (email, password) = (text("email").to_owned(), text("password").into());
                Command::Authenticate(Login { email, password, attempt })
            }
        })
    }
}

/// An answer that needs no database.
#[derive(Debug)]
pub(super) enum Refusal {
    /// `OPTIONS`, which is no error; the value of `Allow`, and the page's origin where that is not allowed.
    Options(&'static str, Option<String>),
    /// `GET /metrics`, which is none, either.
    Metrics,
    /// `GET /openapi.json`, neither.
    Description(Response),
    Error(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Error(error)
    }
}

impl Refusal {
    /// `request` is the request's id, where it has one; `metrics` makes the text of all figures.
    pub fn into_response(self, request: Option<&RequestId>, metrics: impl FnOnce() -> String) -> Response {
        /// Of the text format of Prometheus.
        const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
        match self {
            Refusal::Options(allow, origin) => {
                if let Some(origin) = origin {
                    // All else that a page of this origin asks for stays in its browser.
                    let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                    log_line(log::Level::Info, request, line);
                }
                let response = Response::no_content().with("Allow", allow);
                if allow == USER { response.with("Accept-Patch", ACCEPT_PATCH) } else { response }
            }
            Refusal::Metrics => {
                let response = Response { status: 200, body: metrics().into(), ..Response::no_content() };
                response.with("Content-Type", METRICS).with("Cache-Control", "no-store")
            }
            Refusal::Description(response) => response,
            Refusal::Error(error) => error.into_response(request),
        }
    }
}

/// The media types of a patch, of which the first is the one that it has (RFC 7396).
const ACCEPT_PATCH: &str = "application/merge-patch+json, application/json";

/// The body of a PATCH. It is a merge patch if it is JSON, or if its type is curl's default; other kinds of patches mean
/// something else, and so are refused.
fn merge_patch(request: &Request) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
    const CURLS: &str = "application/x-www-form-urlencoded";
    let media_type =
        request.header("content-type").map(|text| text.split(';').next().unwrap_or_default().trim());
    let accepted =
        |text: &str| ACCEPT_PATCH.split(", ").chain([CURLS]).any(|one| one.eq_ignore_ascii_case(text));
    match media_type {
        Some(other) if !accepted(other) => Err(unsupported(request, ACCEPT_PATCH, true)),
        _ if is_coded(request) => Err(unsupported(request, ACCEPT_PATCH, true)),
        _ => object(&request.body),
    }
}

/// Bodies are JSON whatever their Content-Type says, as curl's is a form's, except uploads.
fn json(request: &Request) -> Result<serde_json::Map<String, serde_json::Value>, Error> {
    let media_type = request.header("content-type").unwrap_or_default();
    let upload = media_type.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("multipart/"));
    match upload || is_coded(request) {
        true => Err(unsupported(request, "application/json", false)),
        false => object(&request.body),
    }
}

/// Whether the body is something else than what was meant, which a decoder would make of it.
fn is_coded(request: &Request) -> bool {
    let fields = request.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("content-encoding"));
    let mut codings = fields.flat_map(|(_, value)| value.split(',')).map(str::trim);
    codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case("identity"))
}

fn unsupported(request: &Request, accepted: &'static str, patch: bool) -> Error {
    Error::UnsupportedMediaType { accepted, patch, coded: is_coded(request) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::Method;
    use serde_json::json;

    fn judge(method: &str, target: &str, body: &str) -> Result<Command, u16> {
        let judge = Judge::new(&Config::default());
        let request = Request::new(Method::from(method), target, body);
        judge.command(&request).map_err(|refusal| refusal.into_response(None, String::new).status)
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
            // The user is looked up before its password is hashed, or its body refused.
            ("PUT", "/users/1", r#"{"password":"long enough"}"#.to_owned(), Ok(Lane::Find)),
            ("PUT", "/users/1", r#"{"name":1}"#.to_owned(), Ok(Lane::Find)),
            ("PUT", "/users/1", "{".to_owned(), Ok(Lane::Find)),
            ("DELETE", "/users/1", String::new(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"name":"A"}"#.to_owned(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"password":null}"#.to_owned(), Ok(Lane::Single)),
            ("PATCH", "/users/1", r#"{"password":"long enough"}"#.to_owned(), Ok(Lane::Find)),
            // A PUT may have it.
            ("PATCH", "/users/1", r#"{"email":"none"}"#.to_owned(), Ok(Lane::Find)),
            ("PATCH", "/users/0", "{".to_owned(), Err(404)),
            (
                "POST",
                "/users/authenticate",
                r#"{"email":"a@b.co","password":"x"}"#.to_owned(),
                Ok(Lane::Find),
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
            let found = judge(method, target, &body).map(|command| command.lane());
            assert_eq!(found, expected, "{method} {target} {body}");
        }
    }

    /// What needs no hash is decided by the statement that creates; before a hash, the key is looked up.
    #[test]
    fn lanes_of_creates_with_a_key() {
        let judge = Judge::new(&Config::default());
        let ada = json!({"name": "A", "email": "a@b.co"});
        let with_password = json!({"name": "A", "email": "a@b.co", "password": "long enough"});
        for (body, lane, hashes) in [(&ada, Lane::Create, false), (&with_password, Lane::Find, true)] {
            let request = Request::post("/users", body).with("Idempotency-Key", "k");
            let mut command = judge.command(&request).unwrap();
            assert_eq!((command.lane(), command.hashes()), (lane, hashes), "{body}");
            if let Command::CreateOnce(create) = &mut command {
                create.earlier = Earlier::Absent;
            }
            let next = if hashes { Lane::Hash } else { Lane::Create };
            assert_eq!(command.lane(), next, "{body}");
        }
        let malformed = Request::post("/users", &ada).with("Idempotency-Key", "");
        assert_eq!(judge.command(&malformed).unwrap_err().into_response(None, String::new).status, 400);
    }

    #[test]
    fn uploads_are_not_json() {
        let request = Request::post("/users", &json!({})).with("Content-Type", "Multipart/form-data; x");
        let refusal = Judge::new(&Config::default()).command(&request).unwrap_err();
        assert_eq!(refusal.into_response(None, String::new).status, 415);
    }
}
