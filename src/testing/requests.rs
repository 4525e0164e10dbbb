//! The requests of a service that is thrown away: the journal of those that came, and the choice of those that fail.

use super::control::{Control, Refused};
use crate::app;
use crate::http::{Method, Request};
use crate::input::validation::object;
use crate::server::Fault;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// Bytes of the journal's lines, at most.
const JOURNAL_BYTES: usize = 8 << 20;

/// Texts in the names of header fields, parameters and members whose values are not shown.
const SECRETS: [&str; 5] = ["authorization", "cookie", "password", "secret", "token"];

/// The value of a secret.
const HIDDEN: &str = "***";

/// The journal, and the requests that are to fail. Each request meets them before it is judged.
#[derive(Default)]
pub struct Watch {
    journal: VecDeque<Noted>,
    bytes: usize,
    /// The number of requests that have left the journal for newer ones.
    gone: usize,
    rules: Vec<Rule>,
}

/// A request in the journal.
#[cfg_attr(not(feature = "command"), allow(dead_code, reason = "`TestServer` returns all requests"))]
struct Noted {
    method: String,
    target: String,
    /// The line of JSON that shows it.
    line: String,
}

/// Some of the next requests, which are to fail.
struct Rule {
    fault: Fault,
    method: Method,
    path: String,
    left: u32,
}

impl Control {
    /// Has so many of the next requests with this method and path fail.
    pub fn fail(&self, fault: Fault, method: &str, path: &str, times: u32) -> Result<(), Refused> {
        if path.contains('?') {
            return Err(Refused::new(400, "the path of a fault goes without a query"));
        }
        check(Some(method), Some(path))?;
        let rule = Rule { fault, method: method.into(), path: path.to_owned(), left: times };
        self.watch.lock().rules.push(rule);
        Ok(())
    }

    /// Forgets the faults that are left.
    pub fn fail_none(&self) {
        self.watch.lock().rules.clear();
    }

    /// Returns how many requests are yet to fail.
    pub fn faults_left(&self) -> u32 {
        self.watch.lock().rules.iter().map(|rule| rule.left).fold(0, u32::saturating_add)
    }

    /// Returns the journal: a line of JSON for each request since the start or the last reset.
    pub fn lines(&self) -> Vec<String> {
        self.watch.lock().journal.iter().map(|noted| noted.line.clone()).collect()
    }

    /// Returns the last ten lines of the journal.
    pub fn last_lines(&self) -> String {
        let lines = self.lines();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }

    /// Returns the lines of requests with this method, and with this path or target, if one is given, and how many requests
    /// have left the journal.
    #[cfg(feature = "command")]
    pub fn find(&self, method: Option<&str>, target: Option<&str>) -> Result<(String, usize), Refused> {
        check(method, target)?;
        let watch = self.watch.lock();
        let is_meant = |noted: &&Noted| {
            let path = noted.target.split('?').next();
            method.is_none_or(|method| method == noted.method)
                && target.is_none_or(|target| target == noted.target || Some(target) == path)
        };
        let lines: Vec<&str> =
            watch.journal.iter().filter(is_meant).map(|noted| noted.line.as_str()).collect();
        Ok((lines.join(","), watch.gone))
    }
}

/// Checks that the table of routes has a request of this method and target: with a misspelt one a test would wait for
/// requests that never come. The frontend answers some by itself, which are not watched.
fn check(method: Option<&str>, target: Option<&str>) -> Result<(), Refused> {
    let path = target.map(|target| target.split('?').next().unwrap_or_default());
    let found = |method: &str, path| app::find(method.into(), path, true);
    let is_served = match (method, path) {
        (Some(method), Some(path)) => found(method, path).endpoint.is_ok(),
        (None, Some(path)) => found("GET", path).label != "other",
        (method, None) => method.is_none_or(|method| Method::from(method) != Method::Other),
    };
    if is_served && !path.is_some_and(app::is_answered_at_once) {
        return Ok(());
    }
    let (method, target) = (method.unwrap_or_default(), target.unwrap_or_default());
    let problem = format!("{method:.20} {target:.100}");
    Err(Refused::new(
        400,
        format!("no request like {:?} is watched: the service has no such route", problem.trim()),
    ))
}

impl Watch {
    /// Notes a request. Returns the fault that the first rule has for it.
    pub fn choose(&mut self, request: &Request) -> Option<Fault> {
        self.note(request);
        let is_meant =
            |rule: &&mut Rule| rule.left > 0 && rule.method == request.method && rule.path == request.path();
        let rule = self.rules.iter_mut().find(is_meant)?;
        rule.left -= 1;
        Some(rule.fault)
    }

    fn note(&mut self, request: &Request) {
        let joined = |name| Value::from(request.fields(name).collect::<Vec<_>>().join(", "));
        let headers: Map<_, _> =
            request.lines().map(|(name, _)| (name.to_ascii_lowercase(), joined(name))).collect();
        // The length alone: a body that is no object may hold a password, too.
        let body = object(&request.body).map_or(request.body.len().into(), Value::Object);
        let (method, target) = (&request.method_name, shown_target(&request.target));
        let line = json!({"method": method, "target": target, "headers": headers, "body": body});
        let line = shown(line).to_string();
        self.bytes += line.len();
        let (method, target) = (method.to_string(), request.target.clone());
        self.journal.push_back(Noted { method, target, line });
        while self.bytes > JOURNAL_BYTES
            && let Some(oldest) = self.journal.pop_front()
        {
            self.bytes -= oldest.line.len();
            self.gone += 1;
        }
    }

    /// Forgets the faults, and the requests if that is told.
    pub fn forget(&mut self, requests: bool) {
        self.rules.clear();
        if requests {
            *self = Watch::default();
        }
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRETS.iter().any(|secret| name.contains(secret))
}

/// Returns a target without the secrets in its query.
fn shown_target(target: &str) -> String {
    let shown = |part: &str| match part.split_once('=') {
        Some((name, _)) if is_secret(&percent_decode_str(name).decode_utf8_lossy()) => {
            format!("{name}={HIDDEN}")
        }
        _ => part.to_owned(),
    };
    let (path, query) = target.split_at(target.find('?').unwrap_or(target.len()));
    path.to_owned() + &query.split('&').map(shown).collect::<Vec<_>>().join("&")
}

/// Returns a value without the secrets in it.
fn shown(value: Value) -> Value {
    let member = |(name, value): (String, Value)| {
        let shown = if is_secret(&name) { HIDDEN.into() } else { shown(value) };
        (name, shown)
    };
    match value {
        Value::Object(members) => members.into_iter().map(member).collect(),
        Value::Array(items) => items.into_iter().map(shown).collect(),
        other => other,
    }
}
