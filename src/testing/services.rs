//! The services of `userd test`, and their controls: requests to the first service, below paths that only its user
//! knows. A thread of its own executes each control.

use super::databases::{ScratchDatabase, small_config};
use super::{Fault, Refusal, requests::Interceptor, states::RunningService};
use crate::config::{Config, Database, Limits, PasswordHashing, SETTINGS, Scope};
use crate::http::{Method, Request, Response, reason_phrase};
use crate::server::{self, BoundServer};
use crate::transfer::{self, Import};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The most time that saving the users of the first service may take.
const MAX_START_TIME: Duration = Duration::from_secs(60);

/// The list of controls, one a line, for a GET of their URL.
const CONTROLS: &str = include_str!("controls.txt");

/// The body of `POST services`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ServiceBody {
    settings: BTreeMap<String, Value>,
    users: Vec<Value>,
}

/// The body of `POST faults`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultBody {
    fault: String,
    method: String,
    path: String,
    times: Option<u32>,
    seconds: Option<f64>,
    bytes: Option<usize>,
}

/// The body of `POST time`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeBody {
    advance: f64,
}

/// Checks that a test's service may have a setting. The first service may have more settings than a service that a
/// control starts.
fn check_setting(name: &str, is_first: bool) -> Result<(), String> {
    let known = SETTINGS.iter().find(|setting| setting.variable == name);
    match known.map(|setting| setting.scope) {
        None => Err(format!("{name:?} is no setting of userd: `userd --help` lists them")),
        Some(Scope::Database) => Err(format!(
            "{name}: a service of a test has a database of its own, made by the POSTGRES_BIN of the environment"
        )),
        Some(Scope::Machine) if !is_first => {
            Err(format!("{name}: a control sets what concerns requests and limits, and PORT"))
        }
        _ => Ok(()),
    }
}

/// Returns the configuration of a test's service. Blocks to read the files that `…_FILE` settings name. The error is
/// one line.
pub fn config(settings: &BTreeMap<String, OsString>, is_first: bool) -> Result<Config, String> {
    settings.keys().try_for_each(|name| check_setting(name, is_first))?;
    let base = Config {
        db_connect_timeout: Duration::from_secs(3),
        password_hashing: PasswordHashing::LeastCostForTests,
        limits: Limits { stop_timeout: Duration::from_secs(1), ..Limits::default() },
        ..small_config()
    };
    base.with_vars(|name| settings.get(name).cloned()).map_err(|error| error.to_string())
}

/// The services of a `userd test`, which run until the process ends.
pub struct Services {
    /// The settings of the first service. Every further service has its host and its migrations.
    config: Config,
    /// The name of the first service. The path of a service's controls begins with its name.
    first_name: String,
    /// Each service by its name.
    running: Mutex<HashMap<String, Arc<RunningService>>>,
}

impl Services {
    /// Starts the first service. `users` is a file with the users that the service begins with. The path of its
    /// controls begins with `name`, or with a random name if `name` is `None`. Blocks until the service answers.
    pub fn start(
        config: &Config,
        users: Option<&[u8]>,
        name: Option<String>,
    ) -> Result<&'static Services, String> {
        let services: &Services = Box::leak(Box::new(Services {
            config: config.clone(),
            first_name: name.unwrap_or_else(random_name),
            running: Mutex::default(),
        }));
        let controls = |request: &Request| services.find_control(request);
        let first = start_service(config, users, controls, Instant::now() + MAX_START_TIME);
        let first = first.map_err(|refused| refused.message)?;
        services.running.lock().insert(services.first_name.clone(), Arc::new(first));
        Ok(services)
    }

    /// Returns the URLs of the first service: `url`, `control` and `databaseUrl`.
    pub fn first_urls(&self) -> Value {
        self.urls(&self.first_name, &self.first_service(), None)
    }

    /// Returns the last ten requests to the first service, one line of JSON each.
    pub fn last_requests(&self) -> String {
        self.first_service().interceptor.lock().last_lines()
    }

    fn first_service(&self) -> Arc<RunningService> {
        self.running.lock()[&self.first_name].clone()
    }

    /// Ends a service. Blocks until the service has stopped, and does not hold the lock of the services meanwhile.
    fn end_service(&self, name: &str) {
        let _ended = self.running.lock().remove(name);
    }

    /// Returns the control that a request asks for, or `None` for a request of the API.
    fn find_control(&'static self, request: &Request) -> Option<server::HarnessHandler> {
        let name = request.path().split('/').nth(1)?.to_owned();
        let running = self.running.lock().get(&name)?.clone();
        Some(Box::new(move |request, deadline, answer| {
            if let (Method::Post, [_, "services"]) = (request.method, &*path_segments(&request)) {
                // Ends the new service if the answer could not be sent, because the client does not know the URLs by
                // which to end it.
                match self.add_service(&request, deadline) {
                    Ok((_, urls)) if answer(Response::json(201, &urls)) => {}
                    Ok((name, _)) => self.end_service(&name),
                    Err(refused) => _ = answer(refused.answer()),
                }
                return;
            }
            let done = self.execute_control(&name, running, &request, deadline);
            answer(done.unwrap_or_else(|refused| refused.answer()));
        }))
    }

    /// Executes a control of the service of this name.
    fn execute_control(
        &self,
        name: &str,
        running: Arc<RunningService>,
        request: &Request,
        deadline: Instant,
    ) -> Result<Response, Refusal> {
        match (request.method, &path_segments(request)[1..]) {
            (Method::Get | Method::Head, []) => {
                let mut answer = self.urls(name, &running, Some(request));
                answer["controls"] = CONTROLS.lines().collect();
                return Ok(Response::json(200, &answer));
            }
            (Method::Delete, []) if name != self.first_name => {
                drop(running);
                self.end_service(name);
            }
            (Method::Post, ["reset"]) => running.restore(None, deadline)?,
            (Method::Put, ["states", name]) => running.save(Some(name), deadline)?,
            (Method::Post, ["states", name]) => running.restore(Some(name), deadline)?,
            (Method::Get | Method::Head, ["requests"]) => {
                return Ok(Response::json(200, &find_requests(&running.interceptor.lock(), request)?));
            }
            (Method::Post, ["faults"]) => add_fault(&mut running.interceptor.lock(), parse_body(request)?)?,
            (Method::Get | Method::Head, ["faults"]) => {
                return Ok(Response::json(200, &json!({"left": running.interceptor.lock().faults_left()})));
            }
            (Method::Delete, ["faults"]) => running.interceptor.lock().remove_faults(),
            (Method::Post, ["time"]) => {
                running.advance(parse_seconds(parse_body::<TimeBody>(request)?.advance)?, deadline)?;
            }
            _ => return Err(Refusal::new(404, "no such control: GET the URL of the controls lists them")),
        }
        Ok(Response::no_content())
    }

    /// Starts the service that a `POST services` asks for. Returns its name and its URLs.
    fn add_service(&self, request: &Request, deadline: Instant) -> Result<(String, Value), Refusal> {
        let body = if request.body.is_empty() { ServiceBody::default() } else { parse_body(request)? };
        let text = |value| if let Value::String(text) = value { text } else { value.to_string() };
        let settings = body.settings.into_iter().map(|(name, value)| (name, text(value).into())).collect();
        let config = config(&settings, false).map_err(|problem| Refusal::new(400, problem))?;
        let Config { host, migrations_dir, .. } = self.config.clone();
        let config = Config { host, migrations_dir, ..config };
        let users = (!body.users.is_empty()).then(|| Value::from(body.users).to_string());
        let running = start_service(&config, users.as_ref().map(String::as_bytes), |_| None, deadline)?;
        let (name, running) = (random_name(), Arc::new(running));
        self.running.lock().insert(name.clone(), running.clone());
        let urls = self.urls(&name, &running, Some(request));
        Ok((name, urls))
    }

    /// Returns the URLs of a service and of its controls. Adds the URL of its database if the service listens on the
    /// loopback, because clients on other machines cannot reach the database.
    fn urls(&self, name: &str, running: &RunningService, request: Option<&Request>) -> Value {
        let host = request.and_then(|request| request.header("host"));
        let (url, control) = (service_url(running, host), service_url(&self.first_service(), host));
        let mut urls = json!({"url": url, "control": format!("{control}/{name}")});
        if running.server.addr().is_some_and(|addr| addr.ip().is_loopback()) {
            urls["databaseUrl"] = running.database.url().into();
        }
        urls
    }
}

fn random_name() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Returns the segments of a control's path. The first segment is the name of a service.
fn path_segments(request: &Request) -> Vec<&str> {
    request.path().split('/').filter(|segment| !segment.is_empty()).collect()
}

/// Starts a service on a database that begins with these users. Blocks until the service answers.
fn start_service(
    config: &Config,
    users: Option<&[u8]>,
    controls: impl Fn(&Request) -> Option<server::HarnessHandler> + Send + Sync + 'static,
    deadline: Instant,
) -> Result<RunningService, Refusal> {
    // Binds the address first, so that an address that cannot be used is reported before a database is made.
    let bound = BoundServer::bind(config)?;
    let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
    if let Some(users) = users {
        store_users(database.url(), config, users).map_err(|problem| Refusal::new(400, problem))?;
    }
    let running = RunningService::start(database, bound, config, controls)?;
    if users.is_some() {
        running.save(None, deadline)?;
    }
    Ok(running)
}

/// Returns the requests of the journal that the query of a `GET requests` chooses.
fn find_requests(interceptor: &Interceptor, request: &Request) -> Result<Value, Refusal> {
    let (mut method, mut path) = (None, None);
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let field = match name {
            "method" => &mut method,
            "path" => &mut path,
            _ => return Err(Refusal::new(400, "requests are chosen by `method` and `path`")),
        };
        *field = Some(percent_decode_str(value).decode_utf8_lossy());
    }
    interceptor.find(method.as_deref(), path.as_deref())
}

/// Makes requests fail as the body of a `POST faults` says.
fn add_fault(interceptor: &mut Interceptor, body: FaultBody) -> Result<(), Refusal> {
    const FAULTS: &str = "a fault is answer-lost, refused, 503, slow with seconds, cut with bytes";
    let FaultBody { fault, method, path, times, seconds, bytes } = body;
    let fault = match (&*fault, seconds, bytes) {
        ("answer-lost", None, None) => Fault::AnswerLost,
        ("refused", None, None) => Fault::Refused,
        ("503", None, None) => Fault::Unavailable,
        ("slow", Some(seconds), None) => Fault::Slow(parse_seconds(seconds)?),
        ("cut", None, Some(bytes)) => Fault::Cut(bytes),
        _ => return Err(Refusal::new(400, FAULTS)),
    };
    interceptor.add_fault(fault, &method, &path, times.unwrap_or(1))
}

fn parse_seconds(number: f64) -> Result<Duration, Refusal> {
    Duration::try_from_secs_f64(number).map_err(|error| Refusal::new(400, format!("{number}: {error}")))
}

/// Parses the body of a control.
fn parse_body<T: DeserializeOwned>(request: &Request) -> Result<T, Refusal> {
    // Parses an object first, because serde would accept an array as the members of a structure.
    let members: serde_json::Result<Map<String, Value>> = serde_json::from_slice(&request.body);
    let parsed = members.and_then(|members| serde_json::from_value(members.into()));
    parsed.map_err(|error| Refusal::new(400, format!("the body: {error}")))
}

impl Refusal {
    /// Returns the answer that says the reason.
    fn answer(&self) -> Response {
        Response::json(self.status, &json!({"error": reason_phrase(self.status), "message": self.message}))
    }
}

/// Returns the URL of a service. If the service listens on every address, the URL has the host that the client has
/// sent, or else the loopback.
fn service_url(running: &RunningService, host: Option<&str>) -> String {
    let addr = running.server.addr().filter(|addr| addr.ip().is_unspecified());
    let Some(addr) = addr else { return running.server.base_url().to_owned() };
    let host = host.unwrap_or("127.0.0.1");
    format!("http://{}:{}", host.rsplit_once(':').map_or(host, |(name, _)| name), addr.port())
}

/// Imports the first users of a database. Accepts every value that a column can hold, ids, and clear passwords. Blocks
/// until the users are stored. The error names the first users that are refused.
fn store_users(url: &str, config: &Config, users: &[u8]) -> Result<(), String> {
    let config = Config { database: Database::Url(url.into()), ..config.clone() };
    let options = Import { as_is: true, keep_ids: true, clear_passwords: true, ..Import::default() };
    let imported = transfer::import(&config, &options, users, || ()).map_err(|error| error.to_string())?;
    let problems = imported.problems.iter();
    let problems = problems.map(|(number, problem)| format!("{} {number}: {problem}", imported.unit));
    let problems = problems.collect::<Vec<_>>().join("; ");
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}
