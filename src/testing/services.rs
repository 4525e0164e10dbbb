//! The services of `userd test`, and their controls: requests that steer a service. Controls are sent to the first
//! service, at paths that begin with a secret name, and each is executed by a thread of its own.

use super::databases::{ScratchDatabase, test_config};
use super::{Fault, Refusal, requests::Interceptor, running_service::RunningService};
use crate::config::{Config, Database, Limits, PasswordHashing, SETTINGS, Scope};
use crate::http::{Method, Request, Response, reason_phrase};
use crate::server::{self, BoundServer};
use crate::transfer::{self, ImportOptions};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The most time from the start of the first service until the users that it starts with are saved for a reset.
const MAX_TIME_TO_SAVE_USERS: Duration = Duration::from_secs(60);

/// The description of each control, one a line, for the answer to a GET of the URL of the controls.
const CONTROLS_HELP: &str = include_str!("controls.txt");

/// The JSON body of `POST services`, which starts another service.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct ServiceBody {
    settings: BTreeMap<String, Value>,
    users: Vec<Value>,
}

/// The JSON body of `POST faults`, which makes requests fail.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultBody {
    /// The kind of fault, such as `slow`.
    fault: String,
    method: String,
    /// The path of the requests that fail, or their target, with the query.
    path: String,
    /// How many requests fail: one if this is missing.
    times: Option<u32>,
    /// How long the fault `slow` delays an answer.
    seconds: Option<f64>,
    /// How many bytes of an answer the fault `cut` lets through.
    bytes: Option<usize>,
}

/// The JSON body of `POST time`, which lets `advance` seconds pass.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TimeBody {
    advance: f64,
}

/// Refuses a setting that a test's service may not have. The first service may have more settings than the services
/// that a test starts later.
fn validate_setting(name: &str, for_first_service: bool) -> Result<(), String> {
    let known = SETTINGS.iter().find(|setting| setting.variable == name);
    match known.map(|setting| setting.scope) {
        None => Err(format!("{name:?} is no setting of userd: `userd --help` lists them")),
        Some(Scope::Database) => Err(format!(
            "{name}: a service of a test has a database of its own, made by the POSTGRES_BIN of the environment"
        )),
        Some(Scope::Machine) if !for_first_service => {
            Err(format!("{name}: a control sets what concerns requests and limits, and PORT"))
        }
        _ => Ok(()),
    }
}

/// Returns the configuration of a test's service with these settings: of the first service if `is_first` is true.
/// Blocks while it reads the files that `…_FILE` settings name. The error is one line.
pub fn service_config(settings: &BTreeMap<String, OsString>, is_first: bool) -> Result<Config, String> {
    settings.keys().try_for_each(|name| validate_setting(name, is_first))?;
    let base = Config {
        db_connect_timeout: Duration::from_secs(3),
        password_hashing: PasswordHashing::LeastCostForTests,
        limits: Limits { stop_timeout: Duration::from_secs(1), ..Limits::default() },
        ..test_config()
    };
    base.with_vars(|name| settings.get(name).cloned()).map_err(|error| error.to_string())
}

/// The services of a `userd test`, which run until the process ends.
pub struct Services {
    /// The configuration of the first service. Every further service has the same host and the same migrations.
    first_config: Config,
    /// The name of the first service. A service's name is the first segment in the path of its controls.
    first_service_name: String,
    services_by_name: Mutex<HashMap<String, Arc<RunningService>>>,
}

impl Services {
    /// Starts the first service with the users of a file, whose content is `users`. The name of the service is `name`,
    /// or a random one if `name` is `None`. Blocks until the service answers.
    pub fn start_first(
        config: &Config,
        users: Option<&[u8]>,
        name: Option<String>,
    ) -> Result<&'static Services, String> {
        let services: &Services = Box::leak(Box::new(Services {
            first_config: config.clone(),
            first_service_name: name.unwrap_or_else(random_service_name),
            services_by_name: Mutex::default(),
        }));
        let find_control = |request: &Request| services.find_control_handler(request);
        let first = start_service(config, users, find_control, Instant::now() + MAX_TIME_TO_SAVE_USERS);
        let first = first.map_err(|refused| refused.message)?;
        services.services_by_name.lock().insert(services.first_service_name.clone(), Arc::new(first));
        Ok(services)
    }

    /// Returns the URLs of the first service as JSON: `url`, `control` and `databaseUrl`.
    pub fn first_service_urls(&self) -> Value {
        self.service_urls(&self.first_service_name, &self.first_service(), None)
    }

    /// Returns the last ten requests to the first service, one line of JSON each.
    pub fn last_requests(&self) -> String {
        self.first_service().interceptor.lock().last_journal_lines()
    }

    fn first_service(&self) -> Arc<RunningService> {
        self.services_by_name.lock()[&self.first_service_name].clone()
    }

    /// Ends a service. Blocks until the service has stopped, but leaves the map of services unlocked meanwhile.
    fn end_service(&self, name: &str) {
        let _ended = self.services_by_name.lock().remove(name);
    }

    /// Returns the function that executes the control which a request asks for, or `None` for a request of the API.
    fn find_control_handler(&'static self, request: &Request) -> Option<server::ControlHandler> {
        let name = request.path().split('/').nth(1)?.to_owned();
        let running = self.services_by_name.lock().get(&name)?.clone();
        Some(Box::new(move |request, deadline, answer| {
            if let (Method::Post, [_, "services"]) = (request.method, &*path_segments(&request)) {
                // Ends the new service if its URLs could not be sent, because the client cannot end it without them.
                match self.add_service(&request, deadline) {
                    Ok((_, urls)) if answer(Response::json(201, &urls)) => {}
                    Ok((name, _)) => self.end_service(&name),
                    Err(refused) => _ = answer(refused.to_response()),
                }
                return;
            }
            let done = self.execute_control(&name, running, &request, deadline);
            answer(done.unwrap_or_else(|refused| refused.to_response()));
        }))
    }

    /// Executes a control of the service `service_name`, except `POST services`.
    fn execute_control(
        &self,
        service_name: &str,
        running: Arc<RunningService>,
        request: &Request,
        deadline: Instant,
    ) -> Result<Response, Refusal> {
        match (request.method, &path_segments(request)[1..]) {
            (Method::Get | Method::Head, []) => {
                let mut answer = self.service_urls(service_name, &running, Some(request));
                answer["controls"] = CONTROLS_HELP.lines().collect();
                return Ok(Response::json(200, &answer));
            }
            (Method::Delete, []) if service_name != self.first_service_name => {
                drop(running);
                self.end_service(service_name);
            }
            (Method::Post, ["reset"]) => running.restore_state(None, deadline)?,
            (Method::Put, ["states", name]) => running.save_state(Some(name), deadline)?,
            (Method::Post, ["states", name]) => running.restore_state(Some(name), deadline)?,
            (Method::Get | Method::Head, ["requests"]) => {
                return Ok(Response::json(200, &find_requests(&running.interceptor.lock(), request)?));
            }
            (Method::Post, ["faults"]) => add_fault(&mut running.interceptor.lock(), parse_body(request)?)?,
            (Method::Get | Method::Head, ["faults"]) => {
                return Ok(Response::json(200, &json!({"left": running.interceptor.lock().faults_left()})));
            }
            (Method::Delete, ["faults"]) => running.interceptor.lock().remove_faults(),
            (Method::Post, ["time"]) => {
                running.advance_time(parse_seconds(parse_body::<TimeBody>(request)?.advance)?, deadline)?;
            }
            _ => return Err(Refusal::new(404, "no such control: GET the URL of the controls lists them")),
        }
        Ok(Response::no_content())
    }

    /// Starts one more service, as the control request `POST services` asks. Returns the name and the URLs of the
    /// service.
    fn add_service(&self, request: &Request, deadline: Instant) -> Result<(String, Value), Refusal> {
        let body = if request.body.is_empty() { ServiceBody::default() } else { parse_body(request)? };
        let text = |value| if let Value::String(text) = value { text } else { value.to_string() };
        let settings = body.settings.into_iter().map(|(name, value)| (name, text(value).into())).collect();
        let config = service_config(&settings, false).map_err(|problem| Refusal::new(400, problem))?;
        let Config { host, migrations_dir, .. } = self.first_config.clone();
        let config = Config { host, migrations_dir, ..config };
        let users = (!body.users.is_empty()).then(|| Value::from(body.users).to_string());
        let running = start_service(&config, users.as_ref().map(String::as_bytes), |_| None, deadline)?;
        let (name, running) = (random_service_name(), Arc::new(running));
        self.services_by_name.lock().insert(name.clone(), running.clone());
        let urls = self.service_urls(&name, &running, Some(request));
        Ok((name, urls))
    }

    /// Returns the URLs of a service and of its controls. Adds the URL of its database if the service listens on the
    /// loopback: clients on other machines cannot reach the database.
    fn service_urls(&self, name: &str, running: &RunningService, request: Option<&Request>) -> Value {
        let host = request.and_then(|request| request.header("host"));
        let (url, control) = (service_url(running, host), service_url(&self.first_service(), host));
        let mut urls = json!({"url": url, "control": format!("{control}/{name}")});
        if running.server.addr().is_some_and(|addr| addr.ip().is_loopback()) {
            urls["databaseUrl"] = running.database.url().into();
        }
        urls
    }
}

fn random_service_name() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Returns the segments in the path of a control's request. The first segment is the name of a service.
fn path_segments(request: &Request) -> Vec<&str> {
    request.path().split('/').filter(|segment| !segment.is_empty()).collect()
}

/// Starts a service on a new database with these users. Blocks until the service answers.
fn start_service(
    config: &Config,
    users: Option<&[u8]>,
    find_control: impl Fn(&Request) -> Option<server::ControlHandler> + Send + Sync + 'static,
    deadline: Instant,
) -> Result<RunningService, Refusal> {
    // Binds the address first, so that a bad address is reported before a database is made.
    let bound = BoundServer::bind(config)?;
    let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
    if let Some(users) = users {
        import_initial_users(database.url(), config, users).map_err(|problem| Refusal::new(400, problem))?;
    }
    let running = RunningService::start(database, bound, config, find_control)?;
    if users.is_some() {
        running.save_state(None, deadline)?;
    }
    Ok(running)
}

/// Executes the control `GET requests`: returns the requests in the journal that its query chooses.
fn find_requests(interceptor: &Interceptor, control_request: &Request) -> Result<Value, Refusal> {
    let (mut method, mut path) = (None, None);
    let query = control_request.target.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let field = match name {
            "method" => &mut method,
            "path" => &mut path,
            _ => return Err(Refusal::new(400, "requests are chosen by `method` and `path`")),
        };
        if field.replace(percent_decode_str(value).decode_utf8_lossy()).is_some() {
            return Err(Refusal::new(400, format!("`{name}` is there twice")));
        }
    }
    interceptor.find_requests(method.as_deref(), path.as_deref())
}

/// Executes the control `POST faults`: makes requests fail as its body says.
fn add_fault(interceptor: &mut Interceptor, body: FaultBody) -> Result<(), Refusal> {
    const BAD_FAULT: &str = "a fault is answer-lost, refused, 503, slow with seconds, cut with bytes";
    let FaultBody { fault, method, path, times, seconds, bytes } = body;
    let fault = match (&*fault, seconds, bytes) {
        ("answer-lost", None, None) => Fault::AnswerLost,
        ("refused", None, None) => Fault::Refused,
        ("503", None, None) => Fault::Unavailable,
        ("slow", Some(seconds), None) => Fault::Slow(parse_seconds(seconds)?),
        ("cut", None, Some(bytes)) => Fault::Cut(bytes),
        _ => return Err(Refusal::new(400, BAD_FAULT)),
    };
    interceptor.add_fault(fault, &method, &path, times.unwrap_or(1))
}

fn parse_seconds(number: f64) -> Result<Duration, Refusal> {
    Duration::try_from_secs_f64(number).map_err(|error| Refusal::new(400, format!("{number}: {error}")))
}

/// Parses the JSON body of a control, or refuses it with 400.
fn parse_body<T: DeserializeOwned>(request: &Request) -> Result<T, Refusal> {
    // Parses an object first, because serde would also accept an array with the values of the members.
    let members: serde_json::Result<Map<String, Value>> = serde_json::from_slice(&request.body);
    let parsed = members.and_then(|members| serde_json::from_value(members.into()));
    parsed.map_err(|error| Refusal::new(400, format!("the body: {error}")))
}

impl Refusal {
    /// Returns the HTTP answer to a refused control, with the message that says why.
    fn to_response(&self) -> Response {
        Response::json(self.status, &json!({"error": reason_phrase(self.status), "message": self.message}))
    }
}

/// Returns the URL of a service. If the service listens on every address, the URL has `host`, from the client's Host
/// field, or else the loopback.
fn service_url(running: &RunningService, host: Option<&str>) -> String {
    let addr = running.server.addr().filter(|addr| addr.ip().is_unspecified());
    let Some(addr) = addr else { return running.server.base_url().to_owned() };
    let host = host.unwrap_or("127.0.0.1");
    format!("http://{}:{}", host.rsplit_once(':').map_or(host, |(name, _)| name), addr.port())
}

/// Imports the users that a service begins with into its database. Accepts every value that a column can hold, ids, and clear passwords.
/// Blocks until the users are stored. The error names the first users that are refused.
fn import_initial_users(database_url: &str, config: &Config, users: &[u8]) -> Result<(), String> {
    let config = Config { database: Database::Url(database_url.into()), ..config.clone() };
    let options = ImportOptions { as_is: true, keep_ids: true, hash_passwords: true, ..Default::default() };
    let outcome = transfer::import(&config, &options, users, || ()).map_err(|error| error.to_string())?;
    let problems = outcome.problems_by_record.iter();
    let problems = problems.map(|(number, problem)| format!("{} {number}: {problem}", outcome.record_word));
    let problems = problems.collect::<Vec<_>>().join("; ");
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}
