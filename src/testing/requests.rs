//! The journal of the requests to a test's service, and the faults: requests that are to fail.

use super::{Fault, Refusal};
use crate::app;
use crate::http::{Method, Request};
use crate::input::validation::parse_object;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// The most bytes of all lines of the journal.
const MAX_JOURNAL_BYTES: usize = 8 << 20;

/// Parts of names. The journal hides the value of a header field, a parameter or a member with such a name.
const SECRETS: [&str; 7] = ["api-key", "api_key", "authorization", "cookie", "password", "secret", "token"];

/// The text in the journal for a value that is hidden.
const HIDDEN_VALUE: &str = "***";

/// The journal and the faults. The service passes each request here before it judges the request.
#[derive(Default)]
pub struct Interceptor {
    /// A line of JSON for each request since the start or the last reset.
    journal: VecDeque<String>,
    journal_bytes: usize,
    /// The number of old requests that have left the full journal.
    gone: usize,
    rules: Vec<FaultRule>,
}

/// A rule for requests that are to fail: the next `left` requests with this method and this path or target.
struct FaultRule {
    fault: Fault,
    method: Method,
    target: String,
    left: u32,
}

impl Interceptor {
    /// Makes the next `times` requests with this method, and with this path or target, fail.
    pub fn add_fault(&mut self, fault: Fault, method: &str, target: &str, times: u32) -> Result<(), Refusal> {
        check_route(Some(method), Some(target))?;
        self.rules.push(FaultRule { fault, method: method.into(), target: target.to_owned(), left: times });
        Ok(())
    }

    /// Removes the faults that are left.
    pub fn remove_faults(&mut self) {
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

    /// Returns the requests of the journal that have this method and this path or target; `None` chooses any. Returns
    /// the number of requests that have left the journal, too.
    pub fn find(&self, method: Option<&str>, target: Option<&str>) -> Result<Value, Refusal> {
        check_route(method, target)?;
        let mut requests = self.requests();
        requests.retain(|request| {
            let requested = request["target"].as_str().unwrap_or_default();
            method.is_none_or(|method| request["method"] == method)
                && target.is_none_or(|target| matches_target(target, requested))
        });
        Ok(json!({"requests": requests, "gone": self.gone}))
    }

    /// Returns the last ten lines of the journal of received requests.
    pub fn last_lines(&self) -> String {
        let first = self.journal.len().saturating_sub(10);
        self.journal.range(first..).map(|line| format!("{line}\n")).collect()
    }

    /// Adds a request to the journal. Returns the fault of the first rule that matches the request.
    pub fn take_fault(&mut self, request: &Request) -> Option<Fault> {
        self.add_to_journal(request);
        let is_meant =
            |rule: &FaultRule| rule.method == request.method && matches_target(&rule.target, &request.target);
        let rule = self.rules.iter_mut().find(|rule| rule.left > 0 && is_meant(rule))?;
        rule.left -= 1;
        Some(rule.fault)
    }

    fn add_to_journal(&mut self, request: &Request) {
        let joined = |name| Value::from(request.header_values(name).collect::<Vec<_>>().join(", "));
        let headers: Map<_, _> =
            request.header_fields().map(|(name, _)| (name.to_ascii_lowercase(), joined(name))).collect();
        // The journal has only the length of a body that is no JSON object, because its secrets cannot be found.
        let body = parse_object(&request.body).map_or(request.body.len().into(), Value::Object);
        let (path, query) = request.target.split_once('?').unwrap_or_default();
        let has_secret = query.split('&').any(|pair| is_secret(pair.split('=').next().unwrap_or_default()));
        let target = if has_secret { format!("{path}?{HIDDEN_VALUE}") } else { request.target.clone() };
        let request =
            json!({"method": request.method_name, "target": target, "headers": headers, "body": body});
        let line = hide_secrets(request).to_string();
        self.journal_bytes += line.len();
        self.journal.push_back(line);
        while self.journal_bytes > MAX_JOURNAL_BYTES
            && let Some(oldest) = self.journal.pop_front()
        {
            self.journal_bytes -= oldest.len();
            self.gone += 1;
        }
    }
}

/// Returns whether the target of a request is `wanted`, or has the path `wanted`.
fn matches_target(wanted: &str, target: &str) -> bool {
    wanted == target || target.split('?').next() == Some(wanted)
}

/// Checks that a request of this method and target reaches the journal, so that a test with a misspelt path fails at
/// once. Refuses routes that the service has not, and routes that the frontend answers by itself.
fn check_route(method: Option<&str>, target: Option<&str>) -> Result<(), Refusal> {
    let path = target.map(|target| target.split('?').next().unwrap_or_default());
    let route = |method: &str, path| app::find_endpoint(method.into(), path, true);
    let is_served = match (method, path) {
        (Some(method), Some(path)) => route(method, path).endpoint.is_ok(),
        (None, Some(path)) => route("GET", path).metrics_label != "other",
        (method, None) => method.is_none_or(|method| Method::from(method) != Method::Other),
    };
    if is_served && !path.is_some_and(app::is_answered_at_once) {
        return Ok(());
    }
    Err(Refusal::new(400, "no such request is watched: the service has no route with this method and path"))
}

/// Returns whether the value with this name is secret. The name may be percent-encoded.
fn is_secret(name: &str) -> bool {
    let name = percent_decode_str(name).decode_utf8_lossy().to_ascii_lowercase();
    SECRETS.iter().any(|secret| name.contains(secret))
}

/// Replaces the secrets in a value by `***`.
fn hide_secrets(value: Value) -> Value {
    let hide_member = |(name, value): (String, Value)| {
        let value = if is_secret(&name) { HIDDEN_VALUE.into() } else { hide_secrets(value) };
        (name, value)
    };
    match value {
        Value::Object(members) => members.into_iter().map(hide_member).collect(),
        Value::Array(items) => items.into_iter().map(hide_secrets).collect(),
        other => other,
    }
}
