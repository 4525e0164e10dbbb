//! Which bodies are refused whatever the state, and how.

use super::state::{Action, Answer, Body};
use serde_json::Value;
use std::collections::BTreeSet;

/// The variant of the contract that is served.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rules {
    pub strict: bool,
    pub parser: bool,
}

/// The answer that a request is refused with, whatever the state.
pub enum Refusal {
    /// Status, whether it has an `error` besides its `errors`, and the paths of those.
    Values(u16, bool, BTreeSet<String>),
    MassAssignment,
}

impl Refusal {
    pub fn allows(&self, answer: &Answer) -> bool {
        match self {
            Refusal::Values(status, with_error, paths) => {
                let entries = answer.body["errors"].as_array().map(Vec::as_slice).unwrap_or_default();
                let found = entries.iter().filter_map(|entry| entry["path"].as_str().map(str::to_owned));
                answer.status == *status
                    && answer.body.get("error").is_some() == *with_error
                    && found.collect::<BTreeSet<_>>() == *paths
            }
            Refusal::MassAssignment => {
                let text = answer.body["error"].as_str().unwrap_or_default();
                answer.status == 422 && text.starts_with("These fields may not be mass assigned: ")
            }
        }
    }
}

fn is_mass_assignment(body: &Body) -> bool {
    body.keys().any(|key| !["name", "email", "password"].contains(&key.as_str()))
}

fn is_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.contains('\0'))
}

fn is_password(value: &Value) -> bool {
    is_text(value) && value.as_str().is_some_and(|text| text.chars().count() >= 8)
}

/// Rules of the addresses that the histories use.
fn is_address(value: &Value) -> bool {
    let text = value.as_str().unwrap_or_default();
    let plain = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '.');
    text.split_once('@').is_some_and(|(local, domain)| plain(local) && plain(domain) && domain.contains('.'))
}

impl Rules {
    /// Returns how a request is refused for its body.
    pub fn refuses(self, action: &Action) -> Option<Refusal> {
        let (body, creates, puts) = match action {
            Action::Create(body) => (body, true, false),
            Action::Patch(_, body) => (body, false, false),
            Action::Put(_, body) => (body, false, true),
            _ => return None,
        };
        let mass_assignment = is_mass_assignment(body).then_some(Refusal::MassAssignment);
        if puts && mass_assignment.is_some() {
            return mass_assignment;
        }
        let is_wrong = |field: &&str| match (*field, body.get(*field)) {
            (field, None) => creates && (field != "password" || self.strict),
            ("name", Some(name)) => !is_text(name) || (!puts && self.strict && name == ""),
            ("email", Some(email)) if puts => {
                !is_text(email) || email.as_str().unwrap().chars().count() > 254
            }
            ("email", Some(email)) => !is_address(email),
            (_, Some(password)) => !is_password(password) && (creates || !password.is_null()),
        };
        let wrong = ["name", "email", "password"].into_iter().filter(is_wrong);
        let wrong: BTreeSet<_> = wrong.map(|field| format!("/{field}")).collect();
        if wrong.is_empty() {
            return mass_assignment;
        }
        let is_late = puts || self.parser;
        Some(Refusal::Values(if is_late { 422 } else { 400 }, !is_late, wrong))
    }
}
