//! The requests of a service that is thrown away: the journal of those that came, and the choice of those that fail.

use super::Control;
use crate::http::{Method, Request};
use crate::input::validation::object;
use crate::server::Fault;
use percent_encoding::percent_decode_str;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

/// Bytes of the journal's lines, at most.
const JOURNAL_BYTES: usize = 8 << 20;

/// Texts in the names of header fields, parameters and members whose values are not shown.
const SECRETS: [&str; 5] = ["authorization", "cookie", "password", "secret", "token"];

/// The value of a secret.
const HIDDEN: &str = "***";

/// The journal, and the requests that are to fail. Each request meets them before it is judged.
#[derive(Default)]
pub struct Watch {
    /// Method and target of each request, and the line that shows it.
    journal: VecDeque<(String, String)>,
    bytes: usize,
    /// The number of requests that have left the journal for newer ones.
    gone: usize,
    rules: Vec<Rule>,
    /// Seed of the choices by chance.
    pub seed: u64,
}

/// Requests that are to fail: some of the next ones, or each by chance.
struct Rule {
    fault: Fault,
    method: Method,
    path: String,
    left: Option<u32>,
    percent: Option<f64>,
    /// The number of choices that were made.
    chosen: u64,
}

impl Control {
    /// Has requests with this method and path fail: so many of the next ones, or each with a chance, as in `10%`.
    pub fn fail(&self, fault: Fault, method: &str, path: &str, often: &str) -> Result<(), String> {
        const CAN: &str = "requests can fail whose method is GET, HEAD, POST, PUT, PATCH or DELETE and whose path, \
                           without a query, is /users or below: a number of them, or each by a chance from 0% to 100%";
        let is_of_users = path == "/users" || path.starts_with("/users/") && !path.contains('?');
        let method = Method::from(method);
        let (left, percent) =
            (often.parse().ok(), often.strip_suffix('%').and_then(|text| text.parse().ok()));
        let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
        let is_told = left.is_some() || percent.is_some();
        if !is_of_users || matches!(method, Method::Options | Method::Other) || !is_told {
            return Err(CAN.to_owned());
        }
        let rule = Rule { fault, method, path: path.to_owned(), left, percent, chosen: 0 };
        self.watch.lock().rules.push(rule);
        Ok(())
    }

    /// Begins the choices by chance anew. Equal seeds make equal choices.
    pub fn chance(&self, seed: u64) {
        let mut watch = self.watch.lock();
        watch.seed = seed;
        watch.rules.iter_mut().for_each(|rule| rule.chosen = 0);
    }

    /// Forgets the faults that are left.
    pub fn fail_none(&self) {
        self.watch.lock().rules.clear();
    }

    /// Returns how many requests are yet to fail. Those that fail by chance are not counted.
    pub fn faults_left(&self) -> u32 {
        self.watch.lock().rules.iter().filter_map(|rule| rule.left).fold(0, u32::saturating_add)
    }

    /// Returns a line of JSON for each request since the start or the last reset, and how many have left the journal. Of
    /// requests with this method and path alone, if `on` is given, as in `POST /users`.
    pub fn requests(&self, on: Option<&str>) -> (Vec<String>, usize) {
        let watch = self.watch.lock();
        let is_meant = |of: &str| on.is_none_or(|on| of == on || of.split('?').next() == Some(on));
        let lines = watch.journal.iter().filter(|(of, _)| is_meant(of)).map(|(_, line)| line.clone());
        (lines.collect(), watch.gone)
    }
}

impl Watch {
    /// Notes a request. Returns the fault that the first rule has for it.
    pub fn choose(&mut self, request: &Request) -> Option<Fault> {
        self.note(request);
        let seed = self.seed;
        self.rules.iter_mut().enumerate().find_map(|(number, rule)| {
            if rule.left == Some(0) || rule.method != request.method || rule.path != request.path() {
                return None;
            }
            rule.chosen += 1;
            let drawn = BuildHasherDefault::<DefaultHasher>::new().hash_one((seed, number, rule.chosen));
            let fails = rule.percent.is_none_or(|percent| ((drawn % 1_000_000) as f64) < percent * 10_000.0);
            rule.left = rule.left.map(|left| left - 1);
            fails.then_some(rule.fault)
        })
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
        self.journal.push_back((format!("{method} {}", request.target), line));
        while self.bytes > JOURNAL_BYTES
            && let Some((_, oldest)) = self.journal.pop_front()
        {
            self.bytes -= oldest.len();
            self.gone += 1;
        }
    }

    /// Forgets the faults, and the requests if that is told.
    pub fn forget(&mut self, requests: bool) {
        self.rules.clear();
        if requests {
            *self = Watch { seed: self.seed, ..Watch::default() };
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
