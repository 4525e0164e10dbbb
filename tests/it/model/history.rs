//! Random histories: requests that refer to what came before them, so that any part of a history is one, too.

use super::state::{Action, Body, FOREIGN, State, canonical};
use proptest::{collection::vec, prelude::*};
use serde_json::{Value, json};
use std::collections::HashMap;

/// A request whose user is yet to be looked up.
#[derive(Debug, Clone)]
pub enum Step {
    Create(Body),
    Get(Id),
    /// A page by its number, of this size.
    List(usize, usize),
    /// The users that follow one of those that there were, so many.
    Walk(usize, usize),
    /// An address by its number, in a spelling.
    Email(usize, usize),
    Put(Id, Body),
    Patch(Id, Body),
    Delete(Id),
    Authenticate(Id, Attempt),
    /// One of those that concern one user, which depends on tags.
    If(&'static str, Vec<Tag>, Box<Step>),
}

/// Which tag is sent.
#[derive(Debug, Clone, Copy)]
pub enum Tag {
    Current,
    Former,
    Weak,
    Foreign,
}

/// How a path names a user.
#[derive(Debug, Clone)]
pub enum Id {
    /// One of those that there were, the last one first.
    Known(usize),
    /// The id with its digits percent-encoded.
    Encoded(usize),
    /// None of those.
    Odd(&'static str),
}

/// The password that is tried to authenticate a user.
#[derive(Debug, Clone, Copy)]
pub enum Attempt {
    Right,
    Old,
    Wrong,
    Empty,
}

const ODD_IDS: [&str; 10] =
    ["0", "-1", "01", "999999", "9223372036854775807", "9223372036854775808", "abc", "%zz", "1%00", "%D9%A1"];

const NAMES: [&str; 4] = ["Ada", "Bob", "", "Zoë 👩\u{200d}👧 '); --"];

/// Passwords that a user may have.
pub const PASSWORDS: [&str; 3] = ["first password", "second password", "éééééééé"];

/// An address in one of three spellings that are the same.
pub fn address(number: usize, spelling: usize) -> String {
    let address = format!("user.{number}@example.com");
    match spelling % 3 {
        0 => address,
        1 => address.to_uppercase(),
        _ => address.replacen('u', "U", 1),
    }
}

fn id() -> impl Strategy<Value = Id> {
    prop_oneof![
        10 => (0..6_usize).prop_map(Id::Known),
        1 => (0..6_usize).prop_map(Id::Encoded),
        1 => proptest::sample::select(&ODD_IDS[..]).prop_map(Id::Odd),
    ]
}

fn name() -> impl Strategy<Value = Value> {
    prop_oneof![
        12 => proptest::sample::select(&NAMES[..]).prop_map(Value::from),
        1 => proptest::sample::select(vec![json!(null), json!(7), json!("a\0b"), json!(["Ada"])]),
    ]
}

fn email() -> impl Strategy<Value = Value> {
    prop_oneof![
        16 => (0..5_usize, 0..3_usize).prop_map(|(number, spelling)| address(number, spelling).into()),
        1 => proptest::sample::select(vec![
            json!("no address"), json!(""), json!("a\0@b.co"), json!(null), json!(7), json!("é".repeat(255)),
        ]),
    ]
}

/// A password, null, or what is none.
fn password() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => proptest::sample::select(&PASSWORDS[..]).prop_map(Value::from),
        3 => Just(Value::Null),
        1 => proptest::sample::select(vec![json!(""), json!("1234567"), json!("12345678\0"), json!(12345678)]),
    ]
}

/// Any of the fields, each as often as `weights` has it (of 10), and rarely one that there is not.
fn body(weights: [f64; 3]) -> impl Strategy<Value = Body> {
    use proptest::option::weighted;
    let fields = (
        weighted(weights[0], name()),
        weighted(weights[1], email()),
        weighted(weights[2], password()),
        weighted(0.03, Just(json!(true))),
    );
    fields.prop_map(|(name, email, password, other)| {
        let fields = [("name", name), ("email", email), ("password", password), ("isAdmin", other)];
        fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    })
}

/// A read or a change of one user.
fn of_one() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => id().prop_map(Step::Get),
        5 => (id(), body([0.5, 0.4, 0.4])).prop_map(|(id, body)| Step::Put(id, body)),
        4 => (id(), body([0.5, 0.4, 0.4])).prop_map(|(id, body)| Step::Patch(id, body)),
        1 => id().prop_map(Step::Delete),
    ]
}

fn step(strict: bool) -> impl Strategy<Value = Step> {
    let password_of_create = if strict { 0.95 } else { 0.2 };
    let field = prop_oneof![3 => Just("If-Match"), 2 => Just("If-None-Match")];
    let tag = prop_oneof![
        4 => Just(Tag::Current),
        1 => Just(Tag::Former),
        1 => Just(Tag::Weak),
        1 => Just(Tag::Foreign),
    ];
    let attempts = [Attempt::Right, Attempt::Old, Attempt::Wrong, Attempt::Empty];
    prop_oneof![
        4 => body([0.98, 0.98, password_of_create]).prop_map(Step::Create),
        8 => of_one(),
        8 => (field, vec(tag, 0..3), of_one()).prop_map(|(field, tags, then)| Step::If(field, tags, Box::new(then))),
        1 => (1..4_usize, 1..5_usize).prop_map(|(page, size)| Step::List(page, size)),
        1 => (0..5_usize, 1..5_usize).prop_map(|(after, size)| Step::Walk(after, size)),
        1 => (0..5_usize, 0..3_usize).prop_map(|(number, spelling)| Step::Email(number, spelling)),
        2 => (id(), proptest::sample::select(attempts.to_vec()))
            .prop_map(|(id, attempt)| Step::Authenticate(id, attempt)),
    ]
}

/// Histories of up to 24 requests.
pub fn history(strict: bool) -> impl Strategy<Value = Vec<Step>> {
    vec(step(strict), 1..24)
}

/// The users that a history refers to.
#[derive(Default)]
pub struct Known {
    pub ids: Vec<i64>,
    /// Passwords that users had, by their ids.
    pub old: HashMap<i64, String>,
}

impl Known {
    fn id(&self, back: usize) -> i64 {
        let last = self.ids.len().checked_sub(1);
        last.map_or(1, |last| self.ids[last - back % self.ids.len()])
    }

    fn segment(&self, id: &Id) -> String {
        match id {
            Id::Known(back) => self.id(*back).to_string(),
            Id::Encoded(back) => {
                self.id(*back).to_string().bytes().map(|byte| format!("%{byte:02X}")).collect()
            }
            Id::Odd(text) => (*text).to_owned(),
        }
    }

    /// The request that a step is, in this state.
    pub fn action(&self, step: &Step, state: &State) -> Action {
        match step {
            Step::Create(body) => Action::Create(body.clone()),
            Step::Get(id) => Action::Get(self.segment(id)),
            Step::List(page, size) => Action::List(*page, *size),
            Step::Walk(_, size) if self.ids.is_empty() => Action::Walk(0, *size),
            Step::Walk(after, size) => Action::Walk(self.id(*after), *size),
            Step::Email(number, spelling) => Action::Email(address(*number, *spelling)),
            Step::Put(id, body) => Action::Put(self.segment(id), body.clone()),
            Step::Patch(id, body) => Action::Patch(self.segment(id), body.clone()),
            Step::If(field, tags, then) => {
                let then = self.action(then, state);
                let id = then.id().and_then(canonical);
                let user = state.users.iter().find(|user| user.id == id && id.is_some());
                let current = user.and_then(|user| user.tag.as_deref()).unwrap_or(FOREIGN);
                let former = user.and_then(|user| user.former_tags.last()).map_or(FOREIGN, String::as_str);
                let tag = |tag: &Tag| match tag {
                    Tag::Current => current.to_owned(),
                    Tag::Former => former.to_owned(),
                    Tag::Weak => format!("W/{current}"),
                    Tag::Foreign => FOREIGN.to_owned(),
                };
                let tags = tags.iter().map(tag).collect();
                Action::If(field, tags, Box::new(then))
            }
            Step::Delete(id) => Action::Delete(self.segment(id)),
            Step::Authenticate(id, attempt) => {
                let (Id::Known(back) | Id::Encoded(back)) = id else {
                    return Action::Authenticate("nobody@example.com".to_owned(), PASSWORDS[0].to_owned());
                };
                let id = self.id(*back);
                let user = state.users.iter().find(|user| user.id == Some(id));
                let right = user.and_then(|user| user.password.as_deref());
                let password = match attempt {
                    Attempt::Right => right.unwrap_or(PASSWORDS[0]),
                    Attempt::Old => self.old.get(&id).map_or(PASSWORDS[1], String::as_str),
                    Attempt::Wrong => "wrong password",
                    Attempt::Empty => "",
                };
                // In another spelling, which is the same address.
                let email = user.map_or(address(0, 0), |user| user.email.to_uppercase());
                Action::Authenticate(email, password.to_owned())
            }
        }
    }
}
