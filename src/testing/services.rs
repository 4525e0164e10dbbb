//! The services of `userd test`, and their controls: requests to the first service, below paths that only its user knows.
//! Each control is executed on a thread of its own.

use super::databases::{ScratchDatabase, small};
use super::{Fault, Refused, requests::Watch, states::Running};
use crate::config::{Config, Database, Limits, PasswordHashing, SETTINGS, Scope, near_miss};
use crate::http::{Method, Request, Response, phrase};
use crate::server::{self, BoundServer};
use crate::transfer::{self, Import};
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time that the start of the first service may take.
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
fn check_setting(name: &str, is_first: bool) -> Result<(), String> {
    let known = SETTINGS.iter().find(|setting| setting.variable == name);
    match known.map(|setting| setting.scope) {
        None => {
            let meant = near_miss(name).unwrap_or("one that `userd --help` lists");
            Err(format!("{name:?} is no setting of userd: did you mean {meant}?"))
        }
        Some(Scope::Database) => Err(format!(
            "{name}: a service of a test has a database of its own, made by the POSTGRES_BIN of the environment"
        )),
        Some(Scope::Machine) if !is_first => {
            Err(format!("{name}: a control sets what concerns requests and limits, and PORT"))
        }
        _ => Ok(()),
    }
}

/// Returns the configuration of a service of a test. Blocks to read the files that `…_FILE` settings name. The error is a
/// line.
pub fn config(settings: &BTreeMap<String, OsString>, is_first: bool) -> Result<Config, String> {
    settings.keys().try_for_each(|name| check_setting(name, is_first))?;
    let base = Config {
        db_connect_timeout: Duration::from_secs(3),
        password_hashing: PasswordHashing::LeastCostForTests,
        limits: Limits { stop_timeout: Duration::from_secs(1), ..Limits::default() },
        ..small()
    };
    base.with_vars(|name| settings.get(name).cloned()).map_err(|error| error.to_string())
}

/// The services of a process, which last as long as that does.
pub struct Services {
    host: String,
    migrations_dir: Option<PathBuf>,
    /// The first segment of the path of the first service's controls.
    first: String,
    /// Each service by the first segment of its controls' path.
    running: Mutex<HashMap<String, Arc<Running>>>,
}

impl Services {
    /// Starts the first service, which begins with the users of a file, if there is one. `name`: the first segment of its
    /// controls' path; otherwise a random one. Blocks until it answers.
    pub fn start(
        config: &Config,
        users: Option<&[u8]>,
        name: Option<String>,
    ) -> Result<&'static Services, String> {
        let services: &Services = Box::leak(Box::new(Services {
            host: config.host.clone(),
            migrations_dir: config.migrations_dir.clone(),
            first: name.unwrap_or_else(random_name),
            running: Mutex::default(),
        }));
        let controls = |request: &Request| services.control(request);
        let first = begin(config, users, controls, Instant::now() + START_TIME);
        let first = first.map_err(|refused| refused.message)?;
        services.running.lock().insert(services.first.clone(), Arc::new(first));
        Ok(services)
    }

    /// Returns what is told of the first service: its `url`, its `control` and its `databaseUrl`.
    pub fn about(&self) -> Value {
        self.describe(&self.first, &self.first(), None)
    }

    /// Returns the last ten requests to the first service, a line of JSON each.
    pub fn last_requests(&self) -> String {
        self.first().watch.lock().last_lines()
    }

    fn first(&self) -> Arc<Running> {
        self.running.lock()[&self.first].clone()
    }

    /// Ends a service. Blocks until it has stopped, and locks nothing meanwhile.
    fn end(&self, name: &str) {
        let _ended = self.running.lock().remove(name);
    }

    /// Returns the control that a request is.
    fn control(&'static self, request: &Request) -> Option<server::Control> {
        let name = request.path().split('/').nth(1)?.to_owned();
        let running = self.running.lock().get(&name)?.clone();
        Some(Box::new(move |request, deadline, answer| {
            if let (Method::Post, [_, "services"]) = (request.method, &*segments(&request)) {
                // A service whose client was not told of it is ended.
                match self.add(&request, deadline) {
                    Ok((_, about)) if answer(Response::json(201, &about)) => {}
                    Ok((name, _)) => self.end(&name),
                    Err(refused) => _ = answer(refused.answer()),
                }
                return;
            }
            let done = self.execute(&name, running, &request, deadline);
            answer(done.unwrap_or_else(|refused| refused.answer()));
        }))
    }

    /// Executes a control of one service.
    fn execute(
        &self,
        name: &str,
        running: Arc<Running>,
        request: &Request,
        deadline: Instant,
    ) -> Result<Response, Refused> {
        match (request.method, &segments(request)[1..]) {
            (Method::Get | Method::Head, []) => {
                let mut about = self.describe(name, &running, Some(request));
                about["controls"] = CONTROLS.lines().collect();
                return Ok(Response::json(200, &about));
            }
            (Method::Delete, []) if name != self.first => {
                drop(running);
                self.end(name);
            }
            (Method::Post, ["reset"]) => running.restore(None, deadline)?,
            (Method::Put, ["states", name]) => running.save(Some(name), deadline)?,
            (Method::Post, ["states", name]) => running.restore(Some(name), deadline)?,
            (Method::Get | Method::Head, ["requests"]) => {
                return Ok(Response::json(200, &requests(&running.watch.lock(), request)?));
            }
            (Method::Post, ["faults"]) => fail(&mut running.watch.lock(), body(request)?)?,
            (Method::Get | Method::Head, ["faults"]) => {
                return Ok(Response::json(200, &json!({"left": running.watch.lock().faults_left()})));
            }
            (Method::Delete, ["faults"]) => running.watch.lock().fail_none(),
            (Method::Post, ["time"]) => {
                running.advance(seconds(body::<Time>(request)?.advance)?, deadline)?;
            }
            _ => return Err(Refused::new(404, "no such control: GET the URL of the controls lists them")),
        }
        Ok(Response::no_content())
    }

    /// Starts a service, as a body orders it. Returns its name, and what its client is told.
    fn add(&self, request: &Request, deadline: Instant) -> Result<(String, Value), Refused> {
        let order: Order = if request.body.is_empty() { Order::default() } else { body(request)? };
        let text = |value| if let Value::String(text) = value { text } else { value.to_string() };
        let settings = order.settings.into_iter().map(|(name, value)| (name, text(value).into())).collect();
        let config = config(&settings, false).map_err(|problem| Refused::new(400, problem))?;
        let (host, migrations_dir) = (self.host.clone(), self.migrations_dir.clone());
        let config = Config { host, migrations_dir, ..config };
        let users = (!order.users.is_empty()).then(|| Value::from(order.users).to_string());
        let running = begin(&config, users.as_ref().map(String::as_bytes), |_| None, deadline)?;
        let (name, running) = (random_name(), Arc::new(running));
        self.running.lock().insert(name.clone(), running.clone());
        let about = self.describe(&name, &running, Some(request));
        Ok((name, about))
    }

    /// Returns the URLs of a service, of its controls, and of its database, unless other machines use the service.
    fn describe(&self, name: &str, running: &Running, request: Option<&Request>) -> Value {
        let host = request.and_then(|request| request.header("host"));
        let mut about =
            json!({"url": url(running, host), "control": format!("{}/{name}", url(&self.first(), host))});
        if running.server.addr().is_some_and(|addr| addr.ip().is_loopback()) {
            about["databaseUrl"] = running.database.url().into();
        }
        about
    }
}

fn random_name() -> String {
    Uuid::new_v4().simple().to_string()
}

/// Returns the segments of a control's path. The first one names the service.
fn segments(request: &Request) -> Vec<&str> {
    request.path().split('/').filter(|segment| !segment.is_empty()).collect()
}

/// Starts a server on a database that begins with these users. Blocks until it answers.
fn begin(
    config: &Config,
    users: Option<&[u8]>,
    controls: impl Fn(&Request) -> Option<server::Control> + Send + Sync + 'static,
    deadline: Instant,
) -> Result<Running, Refused> {
    // An address that cannot be used is told before a database is made.
    let bound = BoundServer::bind(config)?;
    let database = ScratchDatabase::with_migrations(config.migrations_dir.as_deref())?;
    if let Some(users) = users {
        store(database.url(), config, users).map_err(|problem| Refused::new(400, problem))?;
    }
    let running = Running::start(database, bound, config, controls)?;
    if users.is_some() {
        running.save(None, deadline)?;
    }
    Ok(running)
}

/// Returns the journal, of requests that the query chooses.
fn requests(watch: &Watch, request: &Request) -> Result<Value, Refused> {
    let (mut method, mut path) = (None, None);
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let field = match name {
            "method" => &mut method,
            "path" => &mut path,
            _ => return Err(Refused::new(400, "requests are chosen by `method` and `path`")),
        };
        *field = Some(percent_decode_str(value).decode_utf8_lossy());
    }
    watch.find(method.as_deref(), path.as_deref())
}

/// Has requests fail, as a body orders it.
fn fail(watch: &mut Watch, failure: Failure) -> Result<(), Refused> {
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
    watch.fail(fault, &method, &path, times.unwrap_or(1))
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
    fn answer(&self) -> Response {
        Response::json(self.status, &json!({"error": phrase(self.status), "message": self.message}))
    }
}

/// Returns the URL of a service. One that listens on every address is named as its client does, or by the loopback.
fn url(running: &Running, host: Option<&str>) -> String {
    let addr = running.server.addr().filter(|addr| addr.ip().is_unspecified());
    let Some(addr) = addr else { return running.server.base_url().to_owned() };
    let host = host.unwrap_or("127.0.0.1");
    format!("http://{}:{}", host.rsplit_once(':').map_or(host, |(name, _)| name), addr.port())
}

/// Stores users in a database that begins with them: whatever their columns can hold, with their ids if they have some, and
/// with clear passwords. Blocks until that is done. The error names the first users that are refused.
fn store(url: &str, config: &Config, users: &[u8]) -> Result<(), String> {
    let config = Config { database: Database::Url(url.into()), ..config.clone() };
    let options = Import { as_is: true, keep_ids: true, clear_passwords: true, ..Import::default() };
    let imported = transfer::import(&config, &options, users, || ()).map_err(|error| error.to_string())?;
    let problems = imported.problems.iter();
    let problems = problems.map(|(number, problem)| format!("{} {number}: {problem}", imported.unit));
    let problems = problems.collect::<Vec<_>>().join("; ");
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}
