//! The requests of a service that is thrown away: the journal of those that came, and the choice of those that fail.

use super::{Fault, Refused};
use crate::app;
use crate::http::{Method, Request};
use crate::input::validation::object;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// Bytes of the journal's lines, at most.
const MAX_JOURNAL_BYTES: usize = 8 << 20;

/// Texts in the names of header fields, parameters and members whose values are not shown.
const SECRETS: [&str; 7] = ["api-key", "api_key", "authorization", "cookie", "password", "secret", "token"];

/// The value of a secret.
const HIDDEN: &str = "***";

/// The journal, and the requests that are to fail. Each request meets them before it is judged.
#[derive(Default)]
pub struct Watch {
    /// A line of JSON for each request since the start or the last reset.
    journal: VecDeque<String>,
    bytes: usize,
    /// The number of requests that have left the journal for newer ones.
    gone: usize,
    rules: Vec<Rule>,
}

/// Some of the next requests, which are to fail.
struct Rule {
    fault: Fault,
    method: Method,
    target: String,
    left: u32,
}

impl Watch {
    /// Has so many of the next requests with this method, and with this path or target, fail.
    pub fn fail(&mut self, fault: Fault, method: &str, target: &str, times: u32) -> Result<(), Refused> {
        check(Some(method), Some(target))?;
        self.rules.push(Rule { fault, method: method.into(), target: target.to_owned(), left: times });
        Ok(())
    }

    /// Forgets the faults that are left.
    pub fn fail_none(&mut self) {
        self.rules.clear();
    }

    /// Returns how many requests are yet to fail.
    pub fn faults_left(&self) -> u32 {
        self.rules.iter().map(|rule| rule.left).fold(0, u32::saturating_add)
    }

    /// Returns the requests of the journal.
    pub fn requests(&self) -> Vec<Value> {
        self.journal.iter().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    }

    /// Returns the requests with this method, and with this path or target, if one is given, and how many have left the
    /// journal.
    pub fn find(&self, method: Option<&str>, target: Option<&str>) -> Result<Value, Refused> {
        check(method, target)?;
        let mut requests = self.requests();
        requests.retain(|request| {
            let seen = request["target"].as_str().unwrap_or_default();
            method.is_none_or(|method| request["method"] == method)
                && target.is_none_or(|target| is_meant(target, seen))
        });
        Ok(json!({"requests": requests, "gone": self.gone}))
    }

    /// Returns the last ten lines of the journal.
    pub fn last_lines(&self) -> String {
        let first = self.journal.len().saturating_sub(10);
        self.journal.range(first..).map(|line| format!("{line}\n")).collect()
    }

    /// Notes a request. Returns the fault that the first rule has for it.
    pub fn choose(&mut self, request: &Request) -> Option<Fault> {
        self.note(request);
        let mut rules = self.rules.iter_mut().filter(|rule| rule.left > 0);
        let rule =
            rules.find(|rule| rule.method == request.method && is_meant(&rule.target, &request.target))?;
        rule.left -= 1;
        Some(rule.fault)
    }

    fn note(&mut self, request: &Request) {
        let joined = |name| Value::from(request.fields(name).collect::<Vec<_>>().join(", "));
        let headers: Map<_, _> =
            request.lines().map(|(name, _)| (name.to_ascii_lowercase(), joined(name))).collect();
        // The length alone: a body that is no object may hold a password, too.
        let body = object(&request.body).map_or(request.body.len().into(), Value::Object);
        let (path, query) = request.target.split_once('?').unwrap_or_default();
        let has_secret = query.split('&').any(|pair| is_secret(pair.split('=').next().unwrap_or_default()));
        let target = if has_secret { format!("{path}?{HIDDEN}") } else { request.target.clone() };
        let request =
            json!({"method": request.method_name, "target": target, "headers": headers, "body": body});
        let line = shown(request).to_string();
        self.bytes += line.len();
        self.journal.push_back(line);
        while self.bytes > MAX_JOURNAL_BYTES
            && let Some(oldest) = self.journal.pop_front()
        {
            self.bytes -= oldest.len();
            self.gone += 1;
        }
    }
}

/// Returns whether a path, or a target with its query, names the target of a request.
fn is_meant(named: &str, target: &str) -> bool {
    named == target || target.split('?').next() == Some(named)
}

/// Checks that the table of routes has a request of this method and target: with a misspelt one a test would wait for
/// requests that never come. The frontend answers some by itself, which are not watched.
fn check(method: Option<&str>, target: Option<&str>) -> Result<(), Refused> {
    let path = target.map(|target| target.split('?').next().unwrap_or_default());
    let found = |method: &str, path| app::find_endpoint(method.into(), path, true);
    let is_served = match (method, path) {
        (Some(method), Some(path)) => found(method, path).endpoint.is_ok(),
        (None, Some(path)) => found("GET", path).label != "other",
        (method, None) => method.is_none_or(|method| Method::from(method) != Method::Other),
    };
    if is_served && !path.is_some_and(app::is_answered_at_once) {
        return Ok(());
    }
    Err(Refused::new(400, "no such request is watched: the service has no route with this method and path"))
}

/// Returns whether the value of a name, which may be percent-encoded, is not shown.
fn is_secret(name: &str) -> bool {
    let name = percent_decode_str(name).decode_utf8_lossy().to_ascii_lowercase();
    SECRETS.iter().any(|secret| name.contains(secret))
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
