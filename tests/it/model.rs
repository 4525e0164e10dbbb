//! The service against a model of its contract: random histories of requests, of which every answer, and all that can
//! be seen afterwards, must be what the model has.
//!
//! `MODEL_SECONDS` is how long each of these tests goes on (default 3), `MODEL_SEED` what their histories are made
//! from (default: the time). Each test prints its seed; the same seed and number of seconds repeat the same histories. A
//! history that fails is shortened as far as possible first, except where several clients send at once.

mod concurrent;
mod exchange;
mod history;
mod linearizable;
mod rules;
mod state;

use crate::support::{Client, Database, Service};
use history::{Known, Step};
use proptest::test_runner::{
    Config as Settings, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};
use rules::Rules;
use state::{Action, Answer, State};
use std::{
    collections::HashMap,
    env,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use userd::{Config, PasswordHashing, Request, Schema, Server, Validation};

/// A number from the environment.
fn variable(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is a whole number, not {text:?}")))
}

/// Runs histories until the time is up, at least one; prints how many, and their seed.
fn explore<S: proptest::strategy::Strategy>(
    what: &str,
    histories: &S,
    shrinks: bool,
    mut check: impl FnMut(S::Value) -> Result<(), String>,
) {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
    let seed = variable("MODEL_SEED").unwrap_or(since_1970.subsec_nanos().into());
    let time = Duration::from_secs(variable("MODEL_SECONDS").unwrap_or(3));
    println!("{what}: MODEL_SEED={seed}");
    let settings = Settings {
        cases: 1,
        failure_persistence: None,
        max_shrink_iters: if shrinks { 500 } else { 0 },
        max_shrink_time: 120_000,
        ..Settings::default()
    };
    let (start, mut count) = (Instant::now(), 0);
    let check = std::cell::RefCell::new(&mut check);
    while count == 0 || start.elapsed() < time {
        count += 1;
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&u64::to_le_bytes(count));
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let mut runner = TestRunner::new_with_rng(settings.clone(), rng);
        let result =
            runner.run(histories, |history| (check.borrow_mut())(history).map_err(TestCaseError::fail));
        let failure = match result {
            Ok(()) => continue,
            Err(TestError::Abort(reason)) => reason.to_string(),
            Err(TestError::Fail(reason, history)) if shrinks => format!("{reason}\n{history:?}"),
            Err(TestError::Fail(reason, _)) => reason.to_string(),
        };
        panic!("{what}, MODEL_SEED={seed}, history {count} after {:?}: {failure}", start.elapsed());
    }
    println!("{what}: {count} histories in {:?}", start.elapsed());
}

/// Sends a request; returns its answer and the `Location` in it.
type Send<'a> = Box<dyn FnMut(&Action) -> (Answer, Option<String>) + 'a>;

/// The service, however it is reached.
struct Subject<'a> {
    database: &'a Database,
    rules: Rules,
    send: Send<'a>,
    /// Hashes that were found to be of this password, by user.
    verified: HashMap<i64, (String, String)>,
}

/// A line about a request and its answer.
fn told(action: &Action, answer: &Answer) -> String {
    let (method, target, fields, body) = action.request();
    let (status, tag) = (answer.status, answer.tag.as_deref().unwrap_or_default());
    format!("\n  {method} {target} {fields:?} {body} => {status} {tag} {}", answer.body)
}

impl<'a> Subject<'a> {
    /// Over HTTP, in turns through these base URLs.
    fn over_http(database: &'a Database, urls: &[&str], rules: Rules) -> Subject<'a> {
        let mut clients: Vec<Client> = urls.iter().map(|url| Client::new(url)).collect();
        let mut turn = 0;
        let send = move |action: &Action| {
            let (method, target, fields, body) = action.request();
            let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
            turn += 1;
            let index = turn % clients.len();
            let answer = clients[index].request(method, &target, &fields, body);
            let location = answer.header("Location").map(str::to_owned);
            (answer.into(), location)
        };
        Subject { database, rules, send: Box::new(send), verified: HashMap::new() }
    }

    /// Without a socket.
    fn in_process(service: &'a Service) -> Subject<'a> {
        let send = |action: &Action| {
            let (method, target, fields, body) = action.request();
            let request = Request::new(method, target, body);
            let request =
                fields.into_iter().fold(request, |request, (name, value)| request.with(name, value));
            let response = service.server.app().handle(&request);
            let body = if response.body.is_empty() { serde_json::Value::Null } else { response.value() };
            let field = |name| response.header(name).map(str::to_owned);
            (Answer { status: response.status, body, tag: field("ETag") }, field("Location"))
        };
        let (database, rules) = (&service.database, Rules::default());
        Subject { database, rules, send: Box::new(send), verified: HashMap::new() }
    }

    fn ask(&mut self, state: &State, action: &Action, story: &mut String) -> Result<(State, Answer), String> {
        let (answer, location) = (self.send)(action);
        *story += &told(action, &answer);
        let Some(next) = state.step(self.rules, action, Some(&answer)) else {
            return Err(format!("not an answer of {state:?}{story}"));
        };
        let created = answer.body["id"].as_str().filter(|_| answer.status == 201);
        if location != created.map(|id| format!("/users/{id}")) {
            return Err(format!("Location: {location:?}{story}"));
        }
        Ok((next, answer))
    }

    /// One history, from an empty table on.
    fn run(&mut self, steps: &[Step]) -> Result<(), String> {
        self.database.run("truncate users, credentials restart identity");
        self.verified.clear();
        let (mut state, mut known, mut story) = (State::default(), Known::default(), String::new());
        for (number, step) in steps.iter().enumerate() {
            let action = known.action(step, &state);
            let (next, answer) = self.ask(&state, &action, &mut story)?;
            if answer.status == 201 {
                let id = next.users.iter().filter_map(|user| user.id).max().expect("it was created");
                if known.ids.last() >= Some(&id) {
                    return Err(format!("an id that was there before{story}"));
                }
                known.ids.push(id);
            }
            for user in &state.users {
                if let (Some(id), Some(password)) = (user.id, &user.password)
                    && next.users.iter().all(|other| other.id != user.id || other.password != user.password)
                {
                    known.old.insert(id, password.clone());
                }
            }
            state = next;
            if number % 4 == 3 || number + 1 == steps.len() {
                state = self.look_around(state, &known, &mut story)?;
            }
        }
        Ok(())
    }

    /// All that can be seen: pages of every kind, each user that there was, and who can be authenticated.
    fn look_around(&mut self, mut state: State, known: &Known, story: &mut String) -> Result<State, String> {
        let count = state.users.len();
        let pages = (1..=count / 2 + 2).map(|page| Action::List(page, 2));
        let pages = pages.chain([Action::List(1, 1000)]);
        let walk = [0].iter().chain(&known.ids).map(|id| Action::Walk(*id, 2));
        let emails = state.users.iter().filter(|user| user.email.is_ascii() && !user.email.contains(' '));
        let emails = emails.filter(|user| !user.email.is_empty());
        let emails: Vec<_> = emails.map(|user| Action::Email(user.email.to_lowercase())).collect();
        let users = known.ids.iter().map(|id| Action::Get(id.to_string()));
        for action in pages.chain(walk).chain(users).chain(emails) {
            state = self.ask(&state, &action, story)?.0;
        }
        // A password that was found right stays right as long as its hash stays.
        let hashes = "select user_id, password_hash from credentials";
        let hashes = self.database.client().query(hashes, &[]).expect("there is a table");
        let mut hashes: HashMap<i64, String> = hashes.iter().map(|row| (row.get(0), row.get(1))).collect();
        for user in state.users.clone() {
            let id = user.id.expect("each create was answered");
            let (hash, password) = match (hashes.remove(&id), user.password) {
                (None, None) => continue,
                (Some(hash), Some(password)) => (hash, password),
                (hash, _) => return Err(format!("user {id} has a credential: {}{story}", hash.is_some())),
            };
            let verified = (hash, password.clone());
            if self.verified.get(&id) != Some(&verified) {
                let action = Action::Authenticate(user.email, password);
                state = self.ask(&state, &action, story)?.0;
                self.verified.insert(id, verified);
            }
        }
        if hashes.is_empty() { Ok(state) } else { Err(format!("credentials without a user{story}")) }
    }
}

/// Passwords are quick to hash, and may be guessed at: what a history does with them depends on no other one.
fn settings(config: &mut Config) {
    config.password_hashing = PasswordHashing::LeastCostForTests;
    config.auth_attempts = 0;
}

fn over_http(what: &str, change: impl FnOnce(&mut Config)) {
    let mut rules = Rules::default();
    let service = Service::with(|config| {
        settings(config);
        change(config);
        rules.strict = config.schema == Schema::Strict;
        rules.parser = config.validation == Validation::Parser;
    });
    explore(what, &history::history(rules.strict), true, |steps| {
        Subject::over_http(&service.database, &[service.server.base_url()], rules).run(&steps)
    });
}

#[test]
fn histories_over_http() {
    over_http("over HTTP", |_| ());
}

#[test]
fn histories_of_the_parser_variant() {
    over_http("parser variant", |config| config.validation = Validation::Parser);
}

#[test]
fn histories_of_the_strict_schema() {
    over_http("strict schema", |config| config.schema = Schema::Strict);
}

#[test]
fn histories_without_prepared_statements() {
    over_http("without prepared statements", |config| config.db_prepared = false);
}

#[test]
fn histories_without_a_socket() {
    let service = Service::with(settings);
    explore("without a socket", &history::history(false), true, |steps| {
        Subject::in_process(&service).run(&steps)
    });
}

#[test]
fn histories_of_three_replicas() {
    let database = Database::create();
    let servers: [Server; 3] = database.replicas();
    let urls = servers.each_ref().map(Server::base_url);
    explore("three replicas", &history::history(false), true, |steps| {
        Subject::over_http(&database, &urls, Rules::default()).run(&steps)
    });
}
