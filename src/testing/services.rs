//! The services of `userd test`, and their controls: requests to the first service, below a path that only its user knows.
//! Each control is executed on a thread of its own.

use super::Fault;
use super::control::{Control, Refused};
use super::databases::{ScratchDatabase, small};
use super::servers::{Controls, Running};
use crate::config::{Config, Database, PasswordHashing, SETTINGS, near_miss};
use crate::error::{ConfigError, StartError};
use crate::http::{Method, Request, Response, percent_decode};
use crate::server::{self, BoundServer};
use crate::transfer::{self, Format, Import};
use parking_lot::Mutex;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;
use uuid::Uuid;

/// Settings of a service whose settings do not say otherwise.
const DEFAULTS: [(&str, &str); 5] = [
    ("PORT", "0"),
    ("DB_POOL_SIZE", "2"),
    ("WORKERS", "2"),
    ("DB_CONNECT_TIMEOUT", "3"),
    ("STOP_TIMEOUT", "1"),
];

/// Sessions of the cluster that are free beside those of a new service, so that controls have one.
const FREE_SESSIONS: i64 = 40;

/// Time that saving the users of a start may take.
const START_TIME: Duration = Duration::from_secs(60);

/// The controls, a line each, as a GET of their URL lists them.
const CONTROLS: &str = include_str!("controls.txt");

/// The body of `POST services`.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Order {
    settings: BTreeMap<String, Value>,
    users: Vec<Value>,
}

/// The body of `POST faults`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Failure {
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
struct Time {
    advance: f64,
}

/// Checks that a service of a test may have a setting; the first one more than those that a control starts.
pub fn check_setting(name: &str, is_first: bool) -> Result<(), String> {
    const OF_DATABASE: &str =
        "DATABASE_ DB_HOST DB_PORT DB_NAME DB_USER DB_PASS DB_SSL PGPASSWORD POSTGRES_BIN";
    const OF_FIRST: &str = "DB_ HOST LOG_ MIGRATIONS_DIR";
    let is_one_of = |prefixes: &str| prefixes.split(' ').any(|prefix| name.starts_with(prefix));
    if !SETTINGS.iter().any(|setting| setting.variable == name) {
        let meant = near_miss(name).map(|meant| format!(": did you mean {meant}?")).unwrap_or_default();
        Err(format!("{name:?} is no setting of userd{meant}"))
    } else if is_one_of(OF_DATABASE) {
        Err(format!(
            "{name}: a service of a test has a database of its own, made by the POSTGRES_BIN of the environment"
        ))
    } else if !is_first && (is_one_of(OF_FIRST) || name.ends_with("_FILE")) {
        Err(format!(
            "{name}: a control sets what concerns requests and limits, and PORT; not paths, database and log"
        ))
    } else {
        Ok(())
    }
}

/// Returns the configuration of a service of a test. Blocks to read the files that `…_FILE` settings name.
pub fn config(given: impl Fn(&str) -> Option<OsString>) -> Result<Config, ConfigError> {
    let default = |name: &str| {
        DEFAULTS.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
    };
    let config = Config::from_vars(|name| given(name).or_else(|| default(name)))?;
    let hashing = PasswordHashing::LeastCostForTests;
    Ok(Config { password_hashing: hashing, find_pooler: small().find_pooler, ..config })
}

/// The services of a process.
pub struct Services {
    /// The first segment of every control's path.
    name: String,
    host: String,
    migrations_dir: Option<PathBuf>,
    /// The services by their numbers. The first one has the number 0.
    running: Mutex<BTreeMap<u32, Arc<Running>>>,
    count: AtomicU32,
}

impl Services {
    /// Starts the first service, which begins with the users of a file, if there is one. `name`: the first segment of every
    /// control's path; otherwise a random one. Blocks until it answers.
    pub fn start(
        config: &Config,
        users: Option<(&[u8], Format)>,
        name: Option<String>,
    ) -> Result<Arc<Services>, String> {
        // An address that cannot be used is told before a database is made.
        let bound = BoundServer::bind(config).map_err(|error| error.to_string())?;
        let services = Arc::new(Services {
            name: name.unwrap_or_else(|| Uuid::new_v4().simple().to_string()),
            host: config.host.clone(),
            migrations_dir: config.migrations_dir.clone(),
            running: Mutex::default(),
            count: AtomicU32::new(0),
        });
        let weak = Arc::downgrade(&services);
        let controls = Box::new(move |request: &Request| weak.upgrade()?.control(request));
        let first = begin(bound, config, users, Some(controls), Instant::now() + START_TIME);
        services.insert(first.map_err(|refused| refused.message)?);
        Ok(services)
    }

    /// Returns the URLs of the first service, of its controls and of its database.
    pub fn urls(&self) -> [String; 3] {
        let first = self.find(0).expect("no control ends it");
        let about = self.describe(0, &first, None);
        ["url", "control", "databaseUrl"].map(|name| about[name].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the last ten requests to the first service, a line of JSON each.
    pub fn last_requests(&self) -> String {
        self.find(0).expect("no control ends it").control.last_lines()
    }

    fn insert(&self, running: Running) -> (u32, Arc<Running>) {
        let (number, running) = (self.count.fetch_add(1, SeqCst), Arc::new(running));
        self.running.lock().insert(number, running.clone());
        (number, running)
    }

    /// Ends a service. Blocks until it has stopped, and locks nothing meanwhile.
    fn end(&self, number: u32) {
        let _ended = self.running.lock().remove(&number);
    }

    fn find(&self, number: u32) -> Option<Arc<Running>> {
        self.running.lock().get(&number).cloned()
    }

    /// Returns the control that a request is.
    fn control(self: Arc<Self>, request: &Request) -> Option<server::Control> {
        let name = request.path().split('/').nth(1).unwrap_or_default();
        let is_control: bool = name.as_bytes().ct_eq(self.name.as_bytes()).into();
        is_control.then(|| -> server::Control {
            Box::new(move |request, deadline, answer| self.execute(&request, deadline, answer))
        })
    }

    /// Executes a control and answers it. A service whose client was not told of it is ended.
    fn execute(&self, request: &Request, deadline: Instant, answer: &dyn Fn(Response) -> bool) {
        let segments = request.path().split('/').filter(|segment| !segment.is_empty());
        let path: Vec<&str> = segments.skip(1).collect();
        let (number, path) = match &path[..] {
            ["services", number, path @ ..] => (number.parse().ok(), path),
            path => (Some(0), path),
        };
        let Some((number, running)) = number.and_then(|number| Some((number, self.find(number)?))) else {
            answer(Refused::new(404, "this service has ended, or never was").answer());
            return;
        };
        let mut added = None;
        let done = match (request.method, path) {
            (Method::Get | Method::Head, []) => {
                let mut about = self.describe(number, &running, Some(request));
                about["controls"] = CONTROLS.lines().collect();
                Ok(Response::json(200, &about))
            }
            (Method::Post, ["services"]) => self.add(request, deadline).map(|(number, answer)| {
                added = Some(number);
                answer
            }),
            (Method::Delete, []) if number > 0 => {
                drop(running);
                self.end(number);
                Ok(Response::no_content())
            }
            (_, path) => execute(&running.control, request, path, deadline),
        };
        let is_told = answer(done.unwrap_or_else(|refused| refused.answer()));
        if let Some(number) = added.filter(|_| !is_told) {
            self.end(number);
        }
    }

    /// Starts a service, as a body orders it. Returns its number, and the answer.
    fn add(&self, request: &Request, deadline: Instant) -> Result<(u32, Response), Refused> {
        let order: Order = if request.body.is_empty() { Order::default() } else { body(request)? };
        let mut settings = BTreeMap::from([("HOST".to_owned(), self.host.clone())]);
        for (name, value) in order.settings {
            check_setting(&name, false).map_err(|problem| Refused::new(400, problem))?;
            let text = match value {
                Value::String(text) => text,
                Value::Number(_) | Value::Bool(_) => value.to_string(),
                _ => return Err(Refused::new(400, format!("{name} is a string, a number or a boolean"))),
            };
            settings.insert(name, text);
        }
        let config = config(|name| settings.get(name).map(OsString::from));
        let mut config = config.map_err(StartError::from)?;
        config.migrations_dir = self.migrations_dir.clone();
        let bound = BoundServer::bind(&config)?;
        if ScratchDatabase::free_sessions()? < FREE_SESSIONS {
            return Err(Refused::new(503, "the cluster has no sessions for another service: end some"));
        }
        let users = (!order.users.is_empty()).then(|| Value::from(order.users).to_string());
        let users = users.as_ref().map(|users| (users.as_bytes(), Format::Ndjson));
        let (number, running) = self.insert(begin(bound, &config, users, None, deadline)?);
        let answer = Response::json(201, &self.describe(number, &running, Some(request)));
        Ok((number, answer))
    }

    /// Returns the URLs of a service, of its controls and of its database, which a client of another machine cannot reach.
    fn describe(&self, number: u32, running: &Running, request: Option<&Request>) -> Value {
        let host = request.and_then(|request| request.header("host"));
        let first = self.find(0).map(|first| url(&first, host)).unwrap_or_default();
        let further = if number == 0 { String::new() } else { format!("/services/{number}") };
        let mut about =
            json!({"url": url(running, host), "control": format!("{first}/{}{further}", self.name)});
        let peer = request.and_then(|request| request.peer);
        if peer.is_none_or(|peer| peer.to_canonical().is_loopback()) {
            about["databaseUrl"] = running.database.url().into();
        }
        about
    }
}

/// Starts a server on a database that begins with these users. Blocks until it answers.
fn begin(
    bound: BoundServer,
    config: &Config,
    users: Option<(&[u8], Format)>,
    controls: Option<Controls>,
    deadline: Instant,
) -> Result<Running, Refused> {
    let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
    if let Some((users, format)) = users {
        store(database.url(), config, users, format).map_err(|problem| Refused::new(400, problem))?;
    }
    let running = Running::start(database, bound, config, controls)?;
    if users.is_some() {
        running.control.save(None, deadline)?;
    }
    Ok(running)
}

/// Executes a control of one service.
fn execute(
    control: &Control,
    request: &Request,
    path: &[&str],
    deadline: Instant,
) -> Result<Response, Refused> {
    match (request.method, path) {
        (Method::Post, ["reset"]) => control.restore(None, deadline)?,
        (Method::Put, ["states", name]) => control.save(Some(name), deadline)?,
        (Method::Post, ["states", name]) => control.restore(Some(name), deadline)?,
        (Method::Get | Method::Head, ["requests"]) => return requests(control, request),
        (Method::Post, ["faults"]) => fail(control, body(request)?)?,
        (Method::Get | Method::Head, ["faults"]) => {
            return Ok(Response::json(200, &json!({"left": control.faults_left()})));
        }
        (Method::Delete, ["faults"]) => control.fail_none(),
        (Method::Post, ["time"]) => control.advance(seconds(body::<Time>(request)?.advance)?, deadline)?,
        _ => return Err(Refused::new(404, "no such control: GET the URL of the controls lists them")),
    }
    Ok(Response::no_content())
}

/// Returns the journal, of requests that the query chooses.
fn requests(control: &Control, request: &Request) -> Result<Response, Refused> {
    let (mut method, mut path) = (None, None);
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let field = match name {
            "method" => &mut method,
            "path" => &mut path,
            _ => return Err(Refused::new(400, "requests are chosen by `method` and `path`")),
        };
        *field = Some(percent_decode(value).ok_or_else(|| Refused::new(400, "an escape is cut short"))?);
    }
    let (lines, gone) = control.find(method.as_deref(), path.as_deref())?;
    let body = format!("{{\"requests\":[{lines}],\"gone\":{gone}}}\n").into_bytes();
    Ok(Response { body, ..Response::json(200, &()) })
}

/// Has requests fail, as a body orders it.
fn fail(control: &Control, failure: Failure) -> Result<(), Refused> {
    const FAULTS: &str = "a fault is answer-lost, refused, 503, slow with seconds, cut with bytes";
    let Failure { fault, method, path, times, seconds: time, bytes } = failure;
    let fault = match (&*fault, time, bytes) {
        ("answer-lost", None, None) => Fault::AnswerLost,
        ("refused", None, None) => Fault::Refused,
        ("503", None, None) => Fault::Unavailable,
        ("slow", Some(time), None) => Fault::Slow(seconds(time)?),
        ("cut", None, Some(bytes)) => Fault::Cut(bytes),
        _ => return Err(Refused::new(400, FAULTS)),
    };
    control.fail(fault, &method, &path, times.unwrap_or(1))
}

fn seconds(number: f64) -> Result<Duration, Refused> {
    Duration::try_from_secs_f64(number).map_err(|error| Refused::new(400, format!("{number}: {error}")))
}

/// Parses the body of a control.
fn body<T: DeserializeOwned>(request: &Request) -> Result<T, Refused> {
    // serde would take an array for the members of a structure.
    let members: serde_json::Result<Map<String, Value>> = serde_json::from_slice(&request.body);
    let parsed = members.and_then(|members| serde_json::from_value(members.into()));
    parsed.map_err(|error| Refused::new(400, format!("the body: {error}")))
}

impl Refused {
    /// Returns its answer.
    pub(super) fn answer(&self) -> Response {
        let error = match self.status {
            404 => "Not found",
            409 => "Conflict",
            503 => "Service unavailable",
            _ => "Bad request",
        };
        let answer = Response::json(self.status, &json!({"error": error, "message": self.message}));
        if self.status == 503 { answer.with("Retry-After", "1") } else { answer }
    }
}

/// Returns the URL of a service. One that listens on every address is named as its client does, or by the loopback.
fn url(running: &Running, host: Option<&str>) -> String {
    let addr = running.server.addr().filter(|addr| addr.ip().is_unspecified());
    let Some(addr) = addr else { return running.server.base_url().to_owned() };
    let host = host.unwrap_or("127.0.0.1");
    let with_port = host.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
    format!("http://{}:{}", with_port.map_or(host, |(name, _)| name), addr.port())
}

/// Stores users in a database that begins with them: whatever their columns can hold, with their ids if they have some, and
/// with clear passwords. Blocks until that is done. The error names the first users that are refused.
fn store(url: &str, config: &Config, users: &[u8], format: Format) -> Result<(), String> {
    let config = Config { database: Database::Url(url.into()), ..config.clone() };
    let format = Some(format);
    let options = Import { format, as_is: true, keep_ids: true, clear_passwords: true, ..Import::default() };
    let imported =
        transfer::import(&config, &options, users, || ()).map_err(|error| error.to_string())?;
    let problems = imported.problems.iter();
    let problems = problems.map(|(number, problem)| format!("{} {number}: {problem}", imported.unit));
    let problems = problems.collect::<Vec<_>>().join("; ");
    if problems.is_empty() { Ok(()) } else { Err(format!("users refused: {}: {problems}", imported.refused)) }
}
