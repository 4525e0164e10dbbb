//! The journal of the requests to a test's service, and the faults: failures that a test orders for some requests.

use super::{Fault, Refusal};
use crate::app;
use crate::http::{Method, Request};
use crate::input::validation::parse_object;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;

/// The most bytes that the lines of the journal have together. Beyond this, the oldest lines are dropped.
const MAX_JOURNAL_BYTES: usize = 8 << 20;

/// The text in the journal for a secret value.
const SECRET_MASK: &str = "***";

/// The journal of requests and the rules for faults. The service passes each request here before it executes or
/// refuses the request.
#[derive(Default)]
pub struct Interceptor {
    /// A line of JSON for each request since the start of the service or its last reset.
    journal: VecDeque<String>,
    journal_bytes: usize,
    /// Number of old requests that were dropped because the journal was full.
    dropped_requests: usize,
    fault_rules: Vec<FaultRule>,
}

/// A rule that makes requests fail: the next `times` requests with this method, and with this path or target.
struct FaultRule {
    fault: Fault,
    method: Method,
    /// The path of the requests, or their target, with the query.
    target: String,
    /// How many further requests fail.
    times: u32,
}

impl Interceptor {
    /// Makes the next `times` requests with this method, and with this path or target, fail.
    pub fn add_fault(&mut self, fault: Fault, method: &str, target: &str, times: u32) -> Result<(), Refusal> {
        validate_route(Some(method), Some(target))?;
        self.fault_rules.push(FaultRule { fault, method: method.into(), target: target.to_owned(), times });
        Ok(())
    }

    /// Removes all rules for faults, so that no further request fails.
    pub fn remove_faults(&mut self) {
        self.fault_rules.clear();
    }

    /// Returns how many further requests are to fail.
    pub fn faults_left(&self) -> u32 {
        self.fault_rules.iter().map(|rule| rule.times).fold(0, u32::saturating_add)
    }

    /// Returns the requests in the journal.
    pub fn requests(&self) -> Vec<Value> {
        self.journal.iter().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    }

    /// Returns the requests in the journal that have this method, and this path or target, and the number of requests
    /// that were dropped from the journal. `None` stands for any method or target.
    pub fn find_requests(&self, method: Option<&str>, target: Option<&str>) -> Result<Value, Refusal> {
        validate_route(method, target)?;
        let mut requests = self.requests();
        requests.retain(|request| {
            let requested = request["target"].as_str().unwrap_or_default();
            method.is_none_or(|method| request["method"] == method)
                && target.is_none_or(|target| matches_target(target, requested))
        });
        Ok(json!({"requests": requests, "gone": self.dropped_requests}))
    }

    /// Returns the last ten lines of the journal, which a failed test prints.
    pub fn last_journal_lines(&self) -> String {
        let first = self.journal.len().saturating_sub(10);
        self.journal.range(first..).map(|line| format!("{line}\n")).collect()
    }

    /// Adds a request to the journal. Returns the fault of the first rule that matches the request, and lowers the
    /// rule's `times` by one.
    pub fn intercept(&mut self, request: &Request) -> Option<Fault> {
        self.add_to_journal(request);
        let is_meant =
            |rule: &FaultRule| rule.method == request.method && matches_target(&rule.target, &request.target);
        let rule = self.fault_rules.iter_mut().find(|rule| rule.times > 0 && is_meant(rule))?;
        rule.times -= 1;
        Some(rule.fault)
    }

    fn add_to_journal(&mut self, request: &Request) {
        let joined = |name| Value::from(request.header_values(name).collect::<Vec<_>>().join(", "));
        let headers: Map<_, _> =
            request.header_fields().map(|(name, _)| (name.to_ascii_lowercase(), joined(name))).collect();
        // Stores only the length of a body that is no JSON object, because secrets in such a body cannot be found.
        let body = parse_object(&request.body).map_or(request.body.len().into(), Value::Object);
        let (path, query) = request.target.split_once('?').unwrap_or_default();
        let is_secret = query.split('&').any(|pair| names_secret(pair.split('=').next().unwrap_or_default()));
        let target = if is_secret { format!("{path}?{SECRET_MASK}") } else { request.target.clone() };
        let request =
            json!({"method": request.method_name, "target": target, "headers": headers, "body": body});
        let line = hide_secrets(request).to_string();
        self.journal_bytes += line.len();
        self.journal.push_back(line);
        while self.journal_bytes > MAX_JOURNAL_BYTES
            && let Some(oldest) = self.journal.pop_front()
        {
            self.journal_bytes -= oldest.len();
            self.dropped_requests += 1;
        }
    }
}

/// Returns whether `wanted` is the target of a request, or its path, however the client has percent-encoded it.
fn matches_target(wanted: &str, target: &str) -> bool {
    let is_wanted = |text: &str| percent_decode_str(text).eq(percent_decode_str(wanted));
    is_wanted(target) || target.split('?').next().is_some_and(is_wanted)
}

/// Refuses a method and a target if the service has no such route, if the frontend answers the request by itself, or
/// if the target has `:id` in place of an id. The journal never has such a request, so a test with a misspelt path
/// fails immediately.
fn validate_route(method: Option<&str>, target: Option<&str>) -> Result<(), Refusal> {
    let path = target.map(|target| target.split('?').next().unwrap_or_default());
    let route = |method: &str, path| app::find_route(method.into(), path, true);
    let is_served = match (method, path) {
        (Some(method), Some(path)) => route(method, path).endpoint.is_ok(),
        (None, Some(path)) => route("GET", path).route_label != "other",
        (method, None) => method.is_none_or(|method| Method::from(method) != Method::Other),
    };
    let is_template = |path: &str| path.contains(['{', ':']);
    if is_served && !path.is_some_and(|path| app::is_health_path(path) || is_template(path)) {
        return Ok(());
    }
    Err(Refusal::new(400, "the service has no route with this method and path; an id is a number: /users/1"))
}

/// Returns whether a header field, a parameter or a member of this name has a secret value. The name may be
/// percent-encoded.
fn names_secret(name: &str) -> bool {
    let name = percent_decode_str(name).decode_utf8_lossy().to_ascii_lowercase();
    let words = ["api-key", "api_key", "authorization", "cookie", "password", "secret", "token"];
    words.iter().any(|word| name.contains(word))
}

/// Replaces the secrets in a JSON value by `***`.
fn hide_secrets(value: Value) -> Value {
    let hide_member = |(name, value): (String, Value)| {
        let value = if names_secret(&name) { SECRET_MASK.into() } else { hide_secrets(value) };
        (name, value)
    };
    match value {
        Value::Object(members) => members.into_iter().map(hide_member).collect(),
        Value::Array(items) => items.into_iter().map(hide_secrets).collect(),
        other => other,
    }
}
