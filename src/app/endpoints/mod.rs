//! What can be asked for: one file for each endpoint, with what is judged before anything is queued, what each step
//! needs, and what becomes of its outcome.
//!
//! A request is judged once, by [`Rules`], and is then a [`Task`], whose steps are executed with those of others.

mod authenticate;
mod batch;
mod create;
mod delete;
mod find;
mod list;
mod update;

use super::{
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
use std::{net::IpAddr, sync::Arc, time::Instant};

/// A valid request, in the state that it is in: each is a type of its endpoint.
#[derive(Debug)]
pub(crate) enum Task {
    Find(find::Find),
    Page(list::Page),
    FindAddress(list::Address),
    Create(create::Create),
    FindKept(create::Repeatable),
    HashNew(create::HashNew),
    CreateAlone(create::CreateAlone),
    CheckKept(create::CheckKept),
    Update(update::Update),
    FindChanged(update::FindChanged),
    HashChange(update::HashChange),
    UpdateAlone(update::UpdateAlone),
    Delete(delete::Delete),
    DeleteAlone(delete::Delete),
    Login(authenticate::Login),
    Verify(authenticate::Verify),
    Rehash(authenticate::Rehash),
}

/// The next step of a task.
#[derive(Debug)]
pub(crate) struct Step {
    /// What it needs.
    pub needs: Needs,
    /// The task.
    pub task: Task,
}

/// What a step has made of its task.
#[derive(Debug)]
pub(crate) enum Progress {
    /// The answer.
    Done(Response),
    /// There is a next step.
    Next(Step),
    /// It needs a lock that another session holds. Nothing was changed: the same step may be executed again later.
    Contended(Task),
}

/// An error is logged with the request that it concerns, and answered.
pub(crate) type Outcome = Result<Progress, Error>;

/// What has become of a request that was judged.
#[derive(Debug)]
pub(super) enum Judged {
    /// The database or a hash is needed.
    Step(Step),
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
        Ok(Judged::Step(match asked.endpoint {
            Endpoint::List => list::judge(request, self.max_per_page)?,
            Endpoint::Create => create::judge(request, self)?,
            Endpoint::Find => find::judge(request, user)?,
            Endpoint::Update => update::judge(request, user, json)?,
            Endpoint::Patch => {
                let body = |request: &Request| self.validation.patch(merge_patch(request)?);
                update::judge(request, user, body)?
            }
            Endpoint::Delete => delete::judge(request, user)?,
            Endpoint::Authenticate => authenticate::judge(request, self)?,
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

/// Hands an outcome of its own to the state that asked for it.
fn hand_back<S, T>(
    state: S,
    outcome: Result<T, Error>,
    again: impl FnOnce(S) -> Task,
    then: impl FnOnce(S, T) -> Outcome,
) -> Outcome {
    batch::shared(state, outcome, false, again, then)
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

    /// The task that a request becomes, or the status of its answer.
    fn judge(request: &Request) -> Result<Step, u16> {
        match Rules::new(&Config::default()).judge(request, None) {
            Ok(Judged::Step(step)) => Ok(step),
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
            let found = judge(&Request::new(method, target, &*body)).map(|step| step.needs.lane);
            assert_eq!(found, expected, "{method} {target} {body}");
        }
    }

    /// What needs no hash is decided by the statement that creates; before a hash, the key is looked up.
    #[test]
    fn lanes_of_creates_with_a_key() {
        let ada = json!({"name": "A", "email": "a@b.co"});
        let with_password = json!({"name": "A", "email": "a@b.co", "password": "long enough"});
        let keyed = |body| judge(&Request::post("/users", body).with("Idempotency-Key", "k")).unwrap();
        assert_eq!(keyed(&ada).needs.lane, Lane::Create);
        let step = keyed(&with_password);
        assert_eq!(step.needs.lane, Lane::Find);
        let Task::FindKept(create) = step.task else { panic!("{:?}", step.task) };
        match create.found(None) {
            Ok(Progress::Next(next)) => assert_eq!(next.needs.lane, Lane::Hash),
            other => panic!("{other:?}"),
        }
        let malformed = Request::post("/users", &ada).with("Idempotency-Key", "");
        assert_eq!(judge(&malformed).unwrap_err(), 400);
    }

    #[test]
    fn uploads_are_not_json() {
        let request = Request::post("/users", &json!({})).with("Content-Type", "Multipart/form-data; x");
        assert_eq!(judge(&request).unwrap_err(), 415);
    }
}
