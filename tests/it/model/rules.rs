//! Which bodies are refused whatever the state, and how.

use super::state::{Answer, Body};
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
    pub fn refuses_create(self, body: &Body) -> Option<Refusal> {
        let short = |text: &Value| self.strict && text == "";
        let wrong = [
            ("name", body.get("name").is_none_or(|name| !is_text(name) || short(name))),
            ("email", body.get("email").is_none_or(|email| !is_address(email))),
            ("password", body.get("password").map_or(self.strict, |password| !is_password(password))),
        ];
        let wrong = wrong.into_iter().filter(|(_, wrong)| *wrong).map(|(field, _)| format!("/{field}"));
        let wrong: BTreeSet<_> = wrong.collect();
        match wrong.is_empty() {
            false if self.parser => Some(Refusal::Values(422, false, wrong)),
            false => Some(Refusal::Values(400, true, wrong)),
            true => is_mass_assignment(body).then_some(Refusal::MassAssignment),
        }
    }

    /// The fields of a patch are those of a create, of which each may be missing, and a password null.
    pub fn refuses_patch(self, body: &Body) -> Option<Refusal> {
        let is_wrong = |(field, value): &(&String, &Value)| match field.as_str() {
            "name" => !is_text(value) || (self.strict && *value == ""),
            "email" => !is_address(value),
            "password" => !value.is_null() && !is_password(value),
            _ => false,
        };
        let wrong: BTreeSet<_> = body.iter().filter(is_wrong).map(|(field, _)| format!("/{field}")).collect();
        match wrong.is_empty() {
            false if self.parser => Some(Refusal::Values(422, false, wrong)),
            false => Some(Refusal::Values(400, true, wrong)),
            true => is_mass_assignment(body).then_some(Refusal::MassAssignment),
        }
    }

    pub fn refuses_put(self, body: &Body) -> Option<Refusal> {
        if is_mass_assignment(body) {
            return Some(Refusal::MassAssignment);
        }
        let is_wrong = |(field, value): &(&String, &Value)| match field.as_str() {
            "password" => !value.is_null() && !is_password(value),
            "email" => !is_text(value) || value.as_str().is_some_and(|text| text.chars().count() > 254),
            _ => !is_text(value),
        };
        let wrong: BTreeSet<_> = body.iter().filter(is_wrong).map(|(field, _)| format!("/{field}")).collect();
        (!wrong.is_empty()).then_some(Refusal::Values(422, false, wrong))
    }
}
