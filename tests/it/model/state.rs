//! The contract as a value: which users there are, and whether an answer to a request is one that this value allows.
//!
//! Knows nothing of how requests are sent. What no client can know (an id that was never answered) stays open until an
//! answer tells it.

use super::rules::Rules;
use crate::support::{self, is_timestamp};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

pub type Body = Map<String, Value>;

/// A request, with its values as they are sent.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Create(Body),
    /// The last segment of its path.
    Get(String),
    /// A page by its number, of this size.
    List(usize, usize),
    /// The users that follow an id, so many.
    Walk(i64, usize),
    /// The user with this address.
    Email(String),
    /// All users whose addresses are among these, from one page.
    Some(Vec<String>),
    Put(String, Body),
    Patch(String, Body),
    Delete(String),
    /// A read or a change of one user that depends on tags in this field; without any: `*`.
    If(&'static str, Vec<String>, Box<Action>),
    /// An address and a password.
    Authenticate(String, String),
}

/// A request: method, target, header fields, body.
pub type Sent = (&'static str, String, Vec<(&'static str, String)>, String);

impl Action {
    pub fn request(&self) -> Sent {
        if let Action::If(field, tags, then) = self {
            let (method, target, _, body) = then.request();
            let value = if tags.is_empty() { "*".to_owned() } else { tags.join(", ") };
            return (method, target, vec![(*field, value)], body);
        }
        let (method, target, body) = self.plain();
        (method, target, Vec::new(), body)
    }

    /// Method, target and body.
    fn plain(&self) -> (&'static str, String, String) {
        let empty = String::new;
        let text = |body: &Body| Value::from(body.clone()).to_string();
        match self {
            Action::Create(body) => ("POST", "/users".into(), text(body)),
            Action::Get(id) => ("GET", format!("/users/{id}"), empty()),
            Action::List(page, size) => ("GET", format!("/users?page={page}&perPage={size}"), empty()),
            Action::Walk(after, size) => ("GET", format!("/users?after={after}&perPage={size}"), empty()),
            Action::Email(email) => ("GET", format!("/users?email={email}"), empty()),
            Action::Some(_) => ("GET", "/users?perPage=1000".into(), empty()),
            Action::Put(id, body) => ("PUT", format!("/users/{id}"), text(body)),
            Action::Patch(id, body) => ("PATCH", format!("/users/{id}"), text(body)),
            Action::Delete(id) => ("DELETE", format!("/users/{id}"), empty()),
            Action::Authenticate(email, password) => {
                let body = json!({"email": email, "password": password});
                ("POST", "/users/authenticate".into(), body.to_string())
            }
            Action::If(.., then) => then.plain(),
        }
    }

    /// The last segment of its path, where it is one user's.
    pub fn id(&self) -> Option<&str> {
        match self {
            Action::Get(id) | Action::Put(id, _) | Action::Patch(id, _) | Action::Delete(id) => Some(id),
            Action::If(.., then) => then.id(),
            _ => None,
        }
    }

    /// Returns true if it may change anything.
    pub fn changes(&self) -> bool {
        match self {
            Action::If(.., then) => then.changes(),
            Action::Create(_) | Action::Put(..) | Action::Patch(..) | Action::Delete(_) => true,
            _ => false,
        }
    }
}

/// The answer. No body: null.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub body: Value,
    /// The field `ETag`.
    pub tag: Option<String>,
}

impl From<support::Answer> for Answer {
    fn from(answer: support::Answer) -> Answer {
        let tag = answer.header("ETag").map(str::to_owned);
        Answer { status: answer.status, body: answer.value(), tag }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Moment {
    Exactly(String),
    /// Later than this one, which may be empty.
    After(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct User {
    /// Not known where the create was not answered.
    pub id: Option<i64>,
    pub name: String,
    pub email: String,
    pub password: Option<String>,
    created_at: Option<String>,
    updated_at: Moment,
    /// The tag of its state, where an answer has told it, and those of its states before.
    pub tag: Option<String>,
    pub former_tags: BTreeSet<String>,
}

/// All users, in no particular order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct State {
    pub users: Vec<User>,
}

/// A user as it is answered.
struct Seen<'a> {
    id: i64,
    name: &'a str,
    email: &'a str,
    created_at: &'a str,
    updated_at: &'a str,
    tag: Option<&'a str>,
}

impl<'a> Seen<'a> {
    /// In an answer with one user, which has a strong tag.
    fn one(answer: &'a Answer) -> Option<Seen<'a>> {
        let tag = answer.tag.as_deref().filter(|tag| tag.starts_with('"') && tag.len() > 2)?;
        Some(Seen { tag: Some(tag), ..Seen::read(&answer.body)? })
    }

    fn read(body: &'a Value) -> Option<Seen<'a>> {
        let text = |key| body.get(key).and_then(Value::as_str);
        let moment = |key| text(key).filter(|text| is_timestamp(text));
        let seen = Seen {
            id: text("id").and_then(canonical)?,
            name: text("name")?,
            email: text("email")?,
            created_at: moment("createdAt")?,
            updated_at: moment("updatedAt")?,
            tag: None,
        };
        (body.as_object()?.len() == 5 && seen.created_at <= seen.updated_at).then_some(seen)
    }
}

/// The id that a segment of a path names, percent-decoded.
pub fn canonical(segment: &str) -> Option<i64> {
    let decoded = percent_encoding::percent_decode_str(segment).decode_utf8().ok()?;
    let id: i64 = decoded.parse().ok()?;
    (id > 0 && id.to_string() == decoded).then_some(id)
}

impl User {
    /// With what an answer tells about it, or `None` where it tells of another user or state.
    fn seen(&self, seen: &Seen) -> Option<User> {
        let fits = self.id.is_none_or(|id| id == seen.id)
            && self.name == seen.name
            && self.email == seen.email
            && self.created_at.as_ref().is_none_or(|moment| moment == seen.created_at)
            && match &self.updated_at {
                Moment::Exactly(moment) => moment == seen.updated_at,
                Moment::After(moment) => seen.updated_at > moment.as_str(),
            }
            && seen.tag.is_none_or(|seen| match &self.tag {
                Some(tag) => tag == seen,
                None => !self.former_tags.contains(seen),
            });
        fits.then(|| User {
            id: Some(seen.id),
            created_at: Some(seen.created_at.to_owned()),
            updated_at: Moment::Exactly(seen.updated_at.to_owned()),
            tag: seen.tag.map(str::to_owned).or_else(|| self.tag.clone()),
            ..self.clone()
        })
    }

    /// Returns true if one of these tags, or any if there are none, is that of its state; `None` if that is not known.
    fn matches(&self, field: &str, tags: &[String]) -> Option<bool> {
        let mut opaque = tags.iter().filter_map(|tag| match (tag.strip_prefix("W/"), field) {
            (None, _) => Some(tag.as_str()),
            (Some(weak), "If-None-Match") => Some(weak),
            (Some(_), _) => None,
        });
        match &self.tag {
            _ if tags.is_empty() => Some(true),
            Some(own) => Some(opaque.any(|tag| tag == own)),
            // A tag that is none of ours.
            None if opaque.all(|tag| self.former_tags.contains(tag) || tag == FOREIGN) => Some(false),
            None => None,
        }
    }

    /// Returns the user as it is answered; `None` while something of it is not known.
    pub fn json(&self) -> Option<Value> {
        let Moment::Exactly(updated_at) = &self.updated_at else {
            return None;
        };
        Some(json!({
            "id": self.id?.to_string(), "name": self.name, "email": self.email,
            "createdAt": self.created_at.as_ref()?, "updatedAt": updated_at,
        }))
    }
}

/// A tag that no state has.
pub const FOREIGN: &str = "\"foreign,with,commas\"";

fn same_address(a: &str, b: &str) -> bool {
    a.eq_ignore_ascii_case(b)
}

impl State {
    /// The state after a request that this state is asked for, or `None` where it does not allow the answer. Without an
    /// answer: the state after the request, whatever would have been answered.
    pub fn step(&self, rules: Rules, action: &Action, answer: Option<&Answer>) -> Option<State> {
        let unchanged = |is_allowed: bool| is_allowed.then(|| self.clone());
        let refused = |status, text: &str| match answer {
            None => true,
            Some(answer) => answer.status == status && answer.body == json!({"error": text}),
        };
        let not_found = || unchanged(refused(404, "Not found"));
        let is_body = |body: Option<Value>| {
            unchanged(answer.is_none_or(|answer| answer.status == 200 && Some(&answer.body) == body.as_ref()))
        };
        let refusal = rules.refuses(action).filter(|_| action.id().is_none_or(|id| self.find(id).is_some()));
        if let Some(refusal) = refusal {
            return unchanged(answer.is_none_or(|answer| refusal.allows(answer)));
        }
        match action {
            Action::Create(body) => {
                let text = |key: &str| body.get(key).and_then(Value::as_str).map(str::to_owned);
                let email = text("email")?;
                if self.users.iter().any(|user| same_address(&user.email, &email)) {
                    return unchanged(refused(409, "Already exists"));
                }
                let user = User {
                    id: None,
                    name: text("name")?,
                    email,
                    password: text("password"),
                    created_at: None,
                    updated_at: Moment::After(String::new()),
                    tag: None,
                    former_tags: BTreeSet::new(),
                };
                let is_new = |seen: &Seen| {
                    seen.created_at == seen.updated_at
                        && self.users.iter().all(|user| user.id != Some(seen.id))
                };
                match answer {
                    None => Some(self.with(None, user)),
                    Some(answer) if answer.status == 201 => {
                        let seen = Seen::one(answer).filter(is_new)?;
                        Some(self.with(None, user.seen(&seen)?))
                    }
                    Some(_) => None,
                }
            }
            Action::Get(id) => match answer {
                Some(answer) if answer.status == 200 => {
                    let seen = Seen::one(answer).filter(|seen| canonical(id) == Some(seen.id))?;
                    self.with_seen(&seen)
                }
                _ if self.find(id).is_none() => not_found(),
                _ => unchanged(answer.is_none()),
            },
            Action::List(page, size) => is_body(self.page(*page, *size)),
            Action::Walk(after, size) => is_body(self.walk(*after, *size)),
            Action::Email(_) | Action::Some(_) => {
                let Some(answer) = answer else {
                    return unchanged(true);
                };
                let data = answer.body["data"].as_array().filter(|_| answer.status == 200)?;
                let all: Vec<_> = data.iter().map(Seen::read).collect::<Option<_>>()?;
                let is_meant = |email: &str| match action {
                    Action::Some(addresses) => addresses.iter().any(|address| same_address(address, email)),
                    Action::Email(address) => same_address(address, email),
                    _ => false,
                };
                let found: Vec<_> = all.iter().filter(|seen| is_meant(seen.email)).collect();
                let mut state = self.clone();
                for seen in &found {
                    state = state.with_seen(seen)?;
                }
                let count = self.users.iter().filter(|user| is_meant(&user.email)).count();
                // A page tells of other users, too.
                let is_all = answer.body["total"] == count && all.len() == count;
                let is_whole = matches!(action, Action::Some(_)) || is_all;
                (found.len() == count && is_whole).then_some(state)
            }
            Action::If(field, tags, then) => {
                let user = then.id().and_then(|id| self.find(id)).map(|index| &self.users[index]);
                let (Some(user), None) = (user, rules.refuses(then)) else {
                    return self.step(rules, then, answer);
                };
                let is_refused = |answer: &Answer| match (&**then, *field) {
                    (Action::Get(_), "If-None-Match") => {
                        answer.status == 304
                            && answer.body.is_null()
                            && (user.tag.is_none() || user.tag == answer.tag)
                    }
                    _ => answer.status == 412 && answer.body == json!({"error": "Precondition failed"}),
                };
                let allowed = user.matches(field, tags).map(|matches| matches == (*field == "If-Match"));
                match (allowed, answer) {
                    (Some(false), None) => unchanged(true),
                    (Some(false), Some(answer)) => unchanged(is_refused(answer)),
                    // The tag is not known, and either is possible.
                    (None, Some(answer)) if is_refused(answer) => unchanged(true),
                    _ => self.step(rules, then, answer),
                }
            }
            Action::Put(id, body) | Action::Patch(id, body) => {
                let Some(index) = self.find(id) else {
                    return not_found();
                };
                let old = &self.users[index];
                let mut user = old.clone();
                let text = |key: &str| body.get(key).and_then(Value::as_str).map(str::to_owned);
                user.name = text("name").unwrap_or(user.name);
                user.email = text("email").unwrap_or(user.email);
                if body.contains_key("password") {
                    user.password = text("password");
                }
                let mut others = self.users.iter().enumerate().filter(|(other, _)| *other != index);
                if others.any(|(_, other)| same_address(&other.email, &user.email)) {
                    return unchanged(refused(409, "Already exists"));
                }
                if user != *old || text("password").is_some() {
                    let (Moment::Exactly(before) | Moment::After(before)) = &old.updated_at;
                    user.updated_at = Moment::After(before.clone());
                    let former = user.tag.take();
                    user.former_tags.extend(former);
                }
                match answer {
                    None => Some(self.with(Some(index), user)),
                    Some(answer) if answer.status == 200 => {
                        Some(self.with(Some(index), user.seen(&Seen::one(answer)?)?))
                    }
                    Some(_) => None,
                }
            }
            Action::Delete(id) => {
                let Some(index) = self.find(id) else {
                    return not_found();
                };
                let mut state = self.clone();
                state.users.remove(index);
                let is_deleted = |answer: &Answer| answer.status == 204 && answer.body.is_null();
                answer.is_none_or(is_deleted).then_some(state)
            }
            Action::Authenticate(email, password) => {
                let user = self.users.iter().find(|user| same_address(&user.email, email));
                let user = user.filter(|user| user.password.as_ref() == Some(password));
                match (user, answer) {
                    (None, _) => unchanged(refused(401, "Invalid credentials")),
                    (Some(_), None) => unchanged(true),
                    (Some(user), Some(answer)) if answer.status == 200 && answer.tag.is_none() => {
                        let seen = Seen::read(&answer.body).filter(|seen| seen.email == user.email)?;
                        self.with_seen(&seen)
                    }
                    (Some(_), Some(_)) => None,
                }
            }
        }
    }

    /// The user whose id this segment of a path names.
    fn find(&self, segment: &str) -> Option<usize> {
        let id = canonical(segment)?;
        self.users.iter().position(|user| user.id == Some(id))
    }

    /// With this user in the place of another one, or as one more.
    fn with(&self, index: Option<usize>, user: User) -> State {
        let mut state = self.clone();
        match index {
            Some(index) => state.users[index] = user,
            None => state.users.push(user),
        }
        // Equal states are equal values, whatever led to them.
        state.users.sort_unstable();
        state
    }

    /// With what an answer tells about one of the users.
    fn with_seen(&self, seen: &Seen) -> Option<State> {
        let index = self.users.iter().position(|user| same_address(&user.email, seen.email))?;
        // An id has one user.
        let others = self.users.iter().enumerate().filter(|(other, _)| *other != index);
        if others.into_iter().any(|(_, other)| other.id == Some(seen.id)) {
            return None;
        }
        Some(self.with(Some(index), self.users[index].seen(seen)?))
    }

    /// Returns the users that follow an id as they are answered, if all of it is known.
    fn walk(&self, after: i64, per_page: usize) -> Option<Value> {
        let mut users: Vec<_> = self.users.iter().filter(|user| user.id > Some(after)).collect();
        users.sort_by_key(|user| user.id);
        let more = users.len() > per_page;
        let data: Vec<_> = users.into_iter().take(per_page).map(User::json).collect::<Option<_>>()?;
        Some(json!({"data": data, "perPage": per_page, "hasMorePages": more}))
    }

    /// A page as it is answered, where everything is known.
    fn page(&self, page: usize, per_page: usize) -> Option<Value> {
        let mut users: Vec<_> = self.users.iter().collect();
        users.sort_by_key(|user| user.id);
        let total = users.len();
        let (start, end) = (((page - 1) * per_page).min(total), (page * per_page).min(total));
        let data: Vec<_> = users[start..end].iter().map(|user| user.json()).collect::<Option<_>>()?;
        let (from, to) = if start < end { (start + 1, end) } else { (0, 0) };
        let last_page = total.div_ceil(per_page).max(1);
        Some(json!({
            "data": data, "total": total, "perPage": per_page, "currentPage": page, "lastPage": last_page,
            "from": from, "to": to, "hasMorePages": page < last_page,
        }))
    }
}
