//! The service without a socket: a function from a [`Request`] to a [`Response`].
//!
//! [`App`] judges each request: it finds the route, checks the access, and validates the body. The result is an answer,
//! or a `Command` that the caller queues and executes in batches. The module knows the operations and the database
//! behind them, but no socket and no queue. Opening an [`App`] starts a thread that probes whether the database is
//! ready.

mod access;
mod pages;
mod routes;

pub(crate) use routes::{FoundRoute, find_route, is_health_path};

use crate::config::Config;
use crate::db::blocking::run_outside_of_runtimes;
use crate::db::{Pool, connect::DbHosts, migrate::Migrations, probe::Prober};
use crate::error::{Error, StartError};
use crate::http::{Cors, Request, RequestId, Response, log_line};
use crate::input::refuse_parameters;
use crate::metrics::Metrics;
use crate::operations::{Authenticate, Command, Create, Delete, Find, Lane, List, Operations, Update};
use access::AccessRules;
use log::Level;
use parking_lot::Mutex;
use routes::{Endpoint, Rights};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use strum::VariantNames;

/// The result of judging a request: a command for the database, or an answer that needs no command.
pub(crate) enum Verdict {
    /// The request is valid, and its answer is the result of this command.
    Execute(Command),
    /// The answer to a request that is refused, or that needs no database.
    Answer(Response),
}

/// The service without a server: a function from a request to a response, which several threads may call at once.
pub struct App {
    pub(crate) operations: Operations,
    pub(crate) access: AccessRules,
    /// True if the service has the page for the browser (`/ui`).
    pub(crate) has_ui: bool,
    /// Probes the database, so that `/readyz` can tell whether the database is ready.
    prober: Prober,
    /// The answer to `GET /openapi.json`, made at the first such request.
    openapi_answer: OnceLock<Response>,
    /// True once a stop has begun. `/readyz` then says that the service is not ready, so that load balancers send no
    /// more requests.
    is_stopping: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
    /// Locked while a large body is parsed. A parsed body may take many times the memory of its text, so several large
    /// bodies at once could use up the memory.
    large_body_lock: Mutex<()>,
}

impl App {
    /// Opens the service without a server: connects to the database and migrates it. The settings `host`, `port` and
    /// `workers` have no effect.
    ///
    /// Blocks for up to `db_connect_timeout`, and as long as the migrations take, also while another replica migrates.
    /// May be called from within an async runtime, whose thread it blocks as well. After an error nothing is left
    /// running.
    pub fn open(config: &Config) -> Result<App, StartError> {
        App::open_for_server(config, false)
    }

    /// Opens the service for a server, as [`App::open`] does. `is_loopback_only`: the server listens on
    /// the loopback alone.
    pub(crate) fn open_for_server(config: &Config, is_loopback_only: bool) -> Result<App, StartError> {
        run_outside_of_runtimes(|| {
            let hosts = DbHosts::new(config)?;
            let migrations = Migrations::load(config.migrations_dir.as_deref())?;
            log::info!("connecting to {}", hosts.target);
            migrations.apply_missing(&hosts, config.migrate, false)?;
            let prober = Prober::start(hosts.clone(), migrations).map_err(StartError::System)?;
            Ok(App {
                operations: Operations::new(Pool::new(hosts, config), config),
                access: AccessRules::new(config),
                has_ui: config.serves_ui(is_loopback_only),
                prober,
                openapi_answer: OnceLock::new(),
                is_stopping: AtomicBool::default(),
                metrics: Arc::new(Metrics::new(Lane::VARIANTS)),
                large_body_lock: Mutex::default(),
            })
        })
    }

    /// Answers a request. A request that fails gets an answer, too. If that answer does not tell the cause, as with
    /// status 500, the cause is logged.
    ///
    /// Blocks for the database: up to `db_acquire_timeout` for a connection, and up to `request_timeout` for each
    /// statement. If the request has a password, also blocks until the password is hashed. Does not hold the request
    /// against the [`Limits`](crate::Limits) of sizes and times: a server does so while it reads the request.
    pub fn handle(&self, request: &Request) -> Response {
        let cors = self.access.cors_for(request);
        let mut response = self.answer(self.judge(request, self.find_route(request, &cors), &cors, None));
        cors.add_fields_to(&mut response);
        response
    }

    /// Returns the answer to a judged request. Executes its command, if it has one, on the calling thread.
    pub(crate) fn answer(&self, verdict: Verdict) -> Response {
        match verdict {
            Verdict::Execute(command) => run_outside_of_runtimes(|| self.operations.execute_to_end(command))
                .unwrap_or_else(|error| error.log_and_answer(None)),
            Verdict::Answer(answer) => answer,
        }
    }

    /// Finds the route of a request, and the rights that the token of the request gives.
    pub(crate) fn find_route(&self, request: &Request, cors: &Cors) -> FoundRoute {
        let mut route = routes::find_route(request.method, request.path(), self.has_ui);
        // Answers a CORS preflight for `//users/` like one for `/users`. If it were refused, the browser would not send
        // the request itself, whose refusal names the right path.
        if matches!(route.endpoint, Err(Error::SurplusSlash(_))) && cors.is_preflight(request) {
            let path = routes::without_surplus_slashes(request.path());
            let meant = find_route(request.method, &path, self.has_ui);
            route = FoundRoute { route_label: route.route_label, ..meant };
        }
        FoundRoute { token_rights: self.access.find_token_rights(request), ..route }
    }

    /// Judges a request by its path, its method, its access and its content, in this order. Returns its command, or its
    /// answer if it is refused or needs no database. `id` is the request's id for the log, if it has one. Blocks only
    /// if the body is large, while another large body is parsed.
    pub(crate) fn judge(
        &self,
        request: &Request,
        route: FoundRoute,
        cors: &Cors,
        id: Option<&RequestId>,
    ) -> Verdict {
        /// The most bytes of a small body. Small bodies are parsed on several threads at once, large ones one after the
        /// other, because a parsed body may take many times the memory of its text.
        const MAX_SMALL_BODY_BYTES: usize = 8 << 10;
        let _turn = (request.body.len() > MAX_SMALL_BODY_BYTES).then(|| self.large_body_lock.lock());
        let verdict = self.try_judge(request, route, cors, id);
        verdict.unwrap_or_else(|error| Verdict::Answer(error.log_and_answer(id)))
    }

    /// Makes `/readyz` answer 503 from now on, because the service is about to stop.
    pub(crate) fn announce_stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
    }

    /// Returns the operations, for tests that need more than HTTP offers.
    pub(crate) fn operations(&self) -> &Operations {
        &self.operations
    }

    /// Judges a request to this route. Fails if the request is refused: for its access, its query, the media type of
    /// its body, its JSON, the body's schema, or a field that clients may not set, in this order.
    fn try_judge(
        &self,
        request: &Request,
        route: FoundRoute,
        cors: &Cors,
        id: Option<&RequestId>,
    ) -> Result<Verdict, Error> {
        let FoundRoute { endpoint, required_rights, user_id, token_rights, .. } = route;
        let endpoint = endpoint?;
        if required_rights != Rights::Public {
            self.access.admit(request, required_rights, cors, token_rights)?;
            // Accepts any query in a preflight, because its query is that of the request that the browser wants to
            // send.
            if !matches!(endpoint, Endpoint::List | Endpoint::Page(_)) && !cors.is_preflight(request) {
                refuse_parameters(request)?;
            }
        }
        let operations = &self.operations;
        Ok(Verdict::Execute(match endpoint {
            Endpoint::List => Command::List(List::parse(request, operations.max_per_page)?),
            Endpoint::Create => Command::Create(Create::parse(request, &operations.schemas.create)?),
            Endpoint::Find => Command::Find(Find::parse(request, user_id)?),
            Endpoint::Update => Update::parse(request, user_id, None)?,
            Endpoint::Patch => Update::parse(request, user_id, Some(&operations.schemas.patch))?,
            Endpoint::Delete => Command::Delete(Delete::parse(request, user_id)?),
            Endpoint::Authenticate => Command::Authenticate(Authenticate::parse(request, operations)?),
            Endpoint::Page(page) => return Ok(Verdict::Answer(page(self))),
            Endpoint::ListMethods(routes) => {
                if let Some(origin) = request.header("origin").filter(|_| !cors.is_origin_allowed()) {
                    // Logs the origin of a refused preflight. Otherwise the operator would not learn which page was
                    // refused, because the browser does not send the page's request itself.
                    let origin: String = origin.chars().take(100).collect();
                    let line = format_args!("ALLOWED_ORIGINS does not name the origin {origin:?}");
                    log_line(Level::Info, id, line);
                }
                return Ok(Verdict::Answer(cors.add_permissions(request, routes::answer_options(routes))));
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScratchDatabase;
    use serde_json::json;

    /// Judges requests. Returns the command of each, or the status of its answer.
    fn judge(requests: impl IntoIterator<Item = Request>) -> Vec<Result<Command, u16>> {
        let database = ScratchDatabase::create().expect("PostgreSQL is installed");
        let app = App::open(&database.config()).unwrap();
        let judged = requests.into_iter().map(|request| {
            match app.judge(&request, app.find_route(&request, &Cors::Off), &Cors::Off, None) {
                Verdict::Execute(command) => Ok(command),
                Verdict::Answer(answer) => Err(answer.status),
            }
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
            // Looks the user up before the body is refused.
            ("PUT", "/users/1", r#"{"name":1}"#.to_owned(), Ok(Lane::Find)),
            ("PUT", "/users/1", "{".to_owned(), Ok(Lane::Find)),
            ("DELETE", "/users/1", String::new(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"name":"A"}"#.to_owned(), Ok(Lane::Change)),
            ("PATCH", "/users/1", r#"{"password":null}"#.to_owned(), Ok(Lane::Single)),
            ("PATCH", "/users/1", r#"{"password":"long enough"}"#.to_owned(), Ok(Lane::Hash)),
            // Refuses an address that a PUT may set, because the create schema holds for a PATCH.
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
            // Refuses the query after the path, and before the database is asked.
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
            assert_eq!(found.map(|command| command.next_step().lane), expected, "{method} {target} {body}");
        }
    }

    #[test]
    fn lanes_of_creates_with_a_key() {
        let ada = json!({"name": "A", "email": "a@b.co"});
        let with_password = json!({"name": "A", "email": "a@b.co", "password": "long enough"});
        let keyed = |body, key| Request::post("/users", body).with("Idempotency-Key", key);
        let judged = judge([keyed(&ada, "k"), keyed(&with_password, "k"), keyed(&ada, "")]);
        let lanes = judged.into_iter().map(|found| found.map(|command| command.next_step().lane));
        assert_eq!(lanes.collect::<Vec<_>>(), [Ok(Lane::Create), Ok(Lane::Hash), Err(400)]);
    }

    #[test]
    fn uploads_are_not_json() {
        let request = Request::post("/users", &json!({})).with("Content-Type", "Multipart/form-data; x");
        assert_eq!(judge([request]).remove(0).unwrap_err(), 415);
    }
}
