//! Clients that work at once on few users, and what breaks meanwhile: each user's history must be one that the model
//! has, too.
//!
//! Users are kept in groups, each with addresses of its own, so that no request in one affects another group.

use super::{
    exchange::{Cut, Outcome, exchange},
    explore,
    history::address,
    linearizable::{Call, check},
    rules::Rules,
    state::{Action, Answer, Body, Field},
};
use crate::support::{Client, Database, Dice, LONG, Process, Proxy, Weather, eventually, free_port, pause};
use nix::sys::signal::Signal;
use proptest::{array::uniform8, collection::vec, option::weighted, prelude::*};
use serde_json::Value;
use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use userd::{Config, Database as Target, Limits, PasswordHashing, Server};

/// The time in which a change that began before its answer ends: a lock is waited for 100 ms.
const BEGUN: Duration = Duration::from_secs(1);

const GROUPS: usize = 3;
const ADDRESSES: usize = 2;
const PASSWORDS: [&str; 2] = ["first password", "second password"];

/// A request of a client, about a user that is known when it is sent.
#[derive(Debug, Clone)]
enum Step {
    Create {
        address: usize,
        password: Option<usize>,
    },
    Get {
        user: usize,
        conditional: bool,
    },
    Put {
        user: usize,
        patch: bool,
        conditional: bool,
        rename: bool,
        address: Option<usize>,
        password: Option<Option<usize>>,
    },
    Delete {
        user: usize,
        conditional: bool,
    },
    Find(usize),
    Authenticate {
        address: usize,
        password: usize,
    },
    List,
}

#[derive(Debug, Clone)]
struct Turn {
    group: usize,
    step: Step,
    cut: Option<Cut>,
}

/// The turns of each client, and what decides on faults.
#[derive(Debug, Clone)]
struct Plan {
    clients: [Vec<Turn>; 8],
    seed: u64,
}

fn plan() -> impl Strategy<Value = Plan> {
    let password = || 0..PASSWORDS.len();
    let step = prop_oneof![
        4 => (0..6_usize, weighted(0.1, password()))
            .prop_map(|(address, password)| Step::Create { address, password }),
        4 => (0..3_usize, any::<bool>()).prop_map(|(user, conditional)| Step::Get { user, conditional }),
        // Most of them are batched: those without a password.
        12 => (
            (0..3_usize, any::<bool>(), any::<bool>()),
            any::<bool>(),
            weighted(0.25, 0..6_usize),
            weighted(0.2, weighted(0.3, password())),
        )
            .prop_map(|((user, patch, conditional), rename, address, password)| {
                Step::Put { user, patch, conditional, rename, address, password }
            }),
        4 => (0..3_usize, any::<bool>()).prop_map(|(user, conditional)| Step::Delete { user, conditional }),
        1 => (0..6_usize).prop_map(Step::Find),
        1 => (0..6_usize, password())
            .prop_map(|(address, password)| Step::Authenticate { address, password }),
        1 => Just(Step::List),
    ];
    let cut = prop_oneof![(0..100_usize).prop_map(Cut::Request), (0..400_usize).prop_map(Cut::Answer),];
    let turn = (0..GROUPS, step, weighted(0.1, cut));
    let turn = turn.prop_map(|(group, step, cut)| Turn { group, step, cut });
    let plan = (uniform8(vec(turn, 8..=10)), any::<u64>());
    plan.prop_map(|(clients, seed)| Plan { clients, seed })
}

/// Events of the service while its clients work.
type Fault<'a> = &'a (dyn Fn(&mut Dice) + Sync);

/// How many calls were made, and how many of them were not answered.
#[derive(Default)]
struct Figures {
    calls: AtomicUsize,
    open: AtomicUsize,
}

/// A history of eight clients of the services at these addresses, which must all be there in the end.
struct History<'a> {
    addresses: &'a [String],
    number: usize,
    /// Ids that are known, by group.
    known: [Mutex<Vec<String>>; GROUPS],
    /// The tags that were seen last, by id.
    tags: Mutex<HashMap<String, String>>,
    calls: [Mutex<Vec<Call>>; GROUPS],
    figures: &'a Figures,
}

impl<'a> History<'a> {
    fn new(addresses: &'a [String], figures: &'a Figures) -> History<'a> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (known, tags, calls) = Default::default();
        History { addresses, number, known, tags, calls, figures }
    }

    /// An address of a group, in some spelling. Only this history uses it: the database may still execute a statement of a
    /// killed service during the next one.
    fn email(&self, group: usize, address_and_spelling: usize) -> String {
        let (number, spelling) = (address_and_spelling % ADDRESSES, address_and_spelling / ADDRESSES);
        address((self.number * GROUPS + group) * ADDRESSES + number, spelling)
    }

    fn emails(&self, group: usize) -> Vec<String> {
        (0..ADDRESSES).map(|number| self.email(group, number)).collect()
    }

    fn run(&self, plan: &Plan, fault: Option<Fault>) -> Result<(), String> {
        let at_work = AtomicBool::new(true);
        thread::scope(|scope| {
            let faults = scope.spawn(|| {
                let mut dice = Dice(plan.seed | 1);
                while let Some(fault) = fault
                    && at_work.load(Ordering::SeqCst)
                {
                    pause(Duration::from_millis(5 + dice.roll(40)));
                    fault(&mut dice);
                }
            });
            let mut clients = Vec::new();
            for (client, turns) in plan.clients.iter().enumerate() {
                clients.push(scope.spawn(move || {
                    for (number, turn) in turns.iter().enumerate() {
                        self.turn(client, number, turn);
                    }
                }));
            }
            let results: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
            at_work.store(false, Ordering::SeqCst);
            faults.join().expect("faults are made");
            results.into_iter().try_for_each(|result| result.map_err(|_| "a client failed".to_owned()))
        })?;
        self.look_around();
        for calls in &self.calls {
            let calls = calls.lock().unwrap();
            check(Rules::default(), &calls)?;
        }
        Ok(())
    }

    fn turn(&self, client: usize, number: usize, turn: &Turn) {
        let group = turn.group;
        let id = |back: usize| {
            let known = self.known[group].lock().unwrap();
            known.iter().rev().nth(back.min(known.len().saturating_sub(1))).cloned()
        };
        // Each change of a name is one of its own.
        let name = Value::from(format!("{client}.{number}"));
        let create = |address: usize, password: Option<usize>| {
            let mut body = Body::from_iter([
                ("name".to_owned(), name.clone()),
                ("email".to_owned(), self.email(group, address).into()),
            ]);
            body.extend(password.map(|password| ("password".to_owned(), PASSWORDS[password].into())));
            Action::Create(body)
        };
        let action = match &turn.step {
            Step::Create { address, password } => create(*address, *password),
            Step::List => Action::Some(Vec::new()),
            Step::Find(address) => Action::Email(self.email(group, *address)),
            Step::Authenticate { address, password } => Action::Authenticate {
                email: self.email(group, *address),
                password: PASSWORDS[*password].to_owned(),
            },
            Step::Get { user, conditional }
            | Step::Delete { user, conditional }
            | Step::Put { user, conditional, .. } => match (id(*user), &turn.step) {
                (None, _) => create(*user, None),
                (Some(id), Step::Get { .. }) => {
                    self.depending(*conditional, Field::NoneMatch, &id, Action::Get(id.clone()))
                }
                (Some(id), Step::Put { patch, rename, address, password, .. }) => {
                    let mut body = Body::new();
                    if *rename {
                        body.insert("name".to_owned(), name);
                    }
                    body.extend(
                        address.map(|address| ("email".to_owned(), self.email(group, address).into())),
                    );
                    body.extend(password.map(|password| {
                        (
                            "password".to_owned(),
                            password.map_or(Value::Null, |number| PASSWORDS[number].into()),
                        )
                    }));
                    let change = if *patch { Action::Patch } else { Action::Put };
                    self.depending(*conditional, Field::Match, &id, change(id.clone(), body))
                }
                (Some(id), _) => self.depending(*conditional, Field::Match, &id, Action::Delete(id.clone())),
            },
        };
        self.call(client, number, group, action, turn.cut);
    }

    /// An action that depends on the tag of its user that was seen last, if one was, or on none.
    fn depending(&self, conditional: bool, field: Field, id: &str, then: Action) -> Action {
        match self.tags.lock().unwrap().get(id) {
            Some(tag) if conditional => Action::If { field, tags: vec![tag.clone()], then: Box::new(then) },
            _ => then,
        }
    }

    fn call(&self, client: usize, number: usize, group: usize, action: Action, cut: Option<Cut>) {
        let address = &self.addresses[(client + number) % self.addresses.len()];
        let (sent, outcome) = exchange(address, &action, cut);
        self.figures.calls.fetch_add(1, Ordering::Relaxed);
        let (answer, until) = match outcome {
            Outcome::Answered(answer, end) => (Some((answer, end)), None),
            Outcome::Void => return,
            Outcome::Open | Outcome::Unavailable(_) => {
                self.figures.open.fetch_add(1, Ordering::Relaxed);
                if !action.changes() {
                    return;
                }
                match outcome {
                    Outcome::Unavailable(end) => (None, Some(end + BEGUN)),
                    _ => (None, None),
                }
            }
        };
        if let Some((Answer { status: 200 | 201, body, tag }, _)) = &answer
            && let Some(id) = body["id"].as_str()
        {
            if let Some(tag) = tag {
                self.tags.lock().unwrap().insert(id.to_owned(), tag.clone());
            }
            let mut known = self.known[group].lock().unwrap();
            if !known.iter().any(|other| other == id) {
                known.push(id.to_owned());
            }
        }
        // A list tells of all groups.
        let groups = if let Action::Some(_) = action { 0..GROUPS } else { group..group + 1 };
        for group in groups {
            let action = match &action {
                Action::Some(_) => Action::Some(self.emails(group)),
                action => action.clone(),
            };
            let call = Call { client, action, sent, answer: answer.clone(), until };
            self.calls[group].lock().unwrap().push(call);
        }
    }

    /// All that can be seen, when nothing breaks any more.
    fn look_around(&self) {
        const OBSERVER: usize = 8;
        eventually(LONG, "it serves", || {
            self.addresses.iter().all(|address| {
                matches!(exchange(address, &Action::Some(Vec::new()), None).1, Outcome::Answered(..))
            })
        });
        let mut client = Client::new(&format!("http://{}", self.addresses[0]));
        let list = client.get("/users?perPage=1000").json();
        assert_eq!(list["total"], list["data"].as_array().map(Vec::len).unwrap_or_default(), "{list}");
        for group in 0..GROUPS {
            self.call(OBSERVER, 0, group, Action::Some(Vec::new()), None);
            let known = self.known[group].lock().unwrap().clone();
            for id in known {
                self.call(OBSERVER, 0, group, Action::Get(id), None);
            }
            for email in self.emails(group) {
                let is_there = list["data"].as_array().into_iter().flatten().any(|user| {
                    user["email"].as_str().is_some_and(|other| other.eq_ignore_ascii_case(&email))
                });
                for password in PASSWORDS.iter().filter(|_| is_there) {
                    let (email, password) = (email.clone(), (*password).to_owned());
                    self.call(OBSERVER, 0, group, Action::Authenticate { email, password }, None);
                }
            }
        }
    }
}

/// A database whose changes keep their locks for some milliseconds, so that other requests meet them.
fn slow_database() -> Database {
    let database = Database::create();
    database.linger("random() * 0.02");
    database
}

/// Waits for a fault to meet a client; not for long, as a history that has ended sends nothing more.
fn reached(is: impl Fn() -> bool) {
    let since = Instant::now();
    while !is() && since.elapsed() < Duration::from_millis(100) {
        pause(Duration::from_millis(1));
    }
}

fn explore_concurrent(
    what: &str,
    database: &Database,
    addresses: &[String],
    fault: Option<Fault>,
    heal: &dyn Fn(),
) {
    let figures = Figures::default();
    explore(what, &plan(), false, |plan| {
        let result = History::new(addresses, &figures).run(&plan, fault);
        heal();
        // A page holds a thousand users at the most.
        database.run("delete from users");
        result
    });
    let (calls, open) = (figures.calls.into_inner(), figures.open.into_inner());
    println!("{what}: {calls} requests, {open} of them without an answer");
}

fn host(url: &str) -> String {
    url.strip_prefix("http://").expect("a base URL").to_owned()
}

#[test]
fn concurrent_histories_of_three_replicas() {
    let database = slow_database();
    let servers: [Server; 3] = database.replicas();
    let addresses = servers.each_ref().map(|server| host(server.base_url()));
    explore_concurrent("three replicas at once", &database, &addresses, None, &|| ());
}

/// Requests that meet in one service are batched: histories without batches would say nothing of them.
#[test]
fn concurrent_histories_of_batches() {
    let database = slow_database();
    let [server] = database.replicas();
    let addresses = [host(server.base_url())];
    explore_concurrent("batches", &database, &addresses, None, &|| ());
    let figures = Client::new(server.base_url()).get("/metrics").body;
    let value = |name: &str| {
        let line =
            figures.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("{lane=\"change\"} "));
        line.and_then(|value| value.parse::<f64>().ok()).expect("a figure")
    };
    let (changes, batches) = (value("userd_batch_size_sum"), value("userd_batch_size_count"));
    println!("batches: {changes} changes in {batches}");
    assert!(changes > 1.1 * batches, "{changes} changes in {batches} batches");
}

/// The service as a process, with a proxy on its way to the database.
struct Breakable {
    database: Database,
    proxy: Proxy,
    process: Mutex<Process>,
    address: String,
}

impl Breakable {
    fn start() -> Breakable {
        let database = slow_database();
        let proxy = Proxy::start(&database.socket());
        let port = free_port();
        let process = Breakable::spawn(&database, &proxy, port);
        let address = format!("127.0.0.1:{port}");
        Breakable { database, proxy, process: Mutex::new(process), address }
    }

    fn spawn(database: &Database, proxy: &Proxy, port: u16) -> Process {
        let url = database.url_at(proxy.port());
        let port = port.to_string();
        let variables = [("PORT", &*port), ("DB_POOL_SIZE", "4"), ("AUTH_ATTEMPTS", "0")];
        let mut process = Process::at(&url, &variables);
        process.wait_for_url();
        process
    }

    fn port(&self) -> u16 {
        self.address.rsplit(':').next().and_then(|port| port.parse().ok()).expect("an address")
    }

    fn explore(&self, what: &str, fault: Fault) {
        let addresses = [self.address.clone()];
        let heal = || self.proxy.set(Weather::Fair);
        explore_concurrent(what, &self.database, &addresses, Some(fault), &heal);
    }
}

#[test]
fn concurrent_histories_with_cut_connections() {
    let service = Breakable::start();
    service.explore("connections cut", &|dice| {
        match dice.roll(4) {
            0 => service.proxy.cut(),
            1 => service.proxy.reset(),
            _ => {
                let (from_server, bytes) = (dice.roll(2) == 0, dice.roll(300) as usize);
                let cuts = service.proxy.cuts();
                service.proxy.set(Weather::CutAfter { from_server, bytes });
                reached(|| service.proxy.cuts() > cuts);
                service.proxy.set(Weather::Fair);
            }
        }
        // Long enough for something to be done in between.
        pause(Duration::from_millis(dice.roll(200)));
    });
    assert!(service.proxy.cuts() > 0, "no connection was cut");
}

/// Statements come to the database long after their requests were answered 503.
#[test]
fn concurrent_histories_with_statements_that_are_held_back() {
    let database = slow_database();
    let proxy = Proxy::start(&database.socket());
    let server = Server::start(Config {
        database: Target::Url(database.url_at(proxy.port()).into()),
        password_hashing: PasswordHashing::LeastCostForTests,
        auth_attempts: 0,
        limits: Limits { request_timeout: Duration::from_secs(1), ..Limits::default() },
        ..database.config()
    })
    .expect("a server starts");
    let addresses = [host(server.base_url())];
    let fault = |dice: &mut Dice| {
        let held = proxy.held();
        proxy.hold_next();
        reached(|| proxy.held() > held);
        pause(Duration::from_millis(500 + dice.roll(3000)));
        proxy.release();
        pause(Duration::from_millis(dice.roll(500)));
    };
    explore_concurrent("statements held back", &database, &addresses, Some(&fault), &|| proxy.release());
    assert!(proxy.held() > 0, "no statement was held back");
}

#[test]
fn concurrent_histories_with_terminated_sessions() {
    let service = Breakable::start();
    let admin = Mutex::new(service.database.client());
    service.explore("sessions terminated", &|dice| {
        let terminate = "select pg_terminate_backend(pid) from (select pid from pg_stat_activity \
            where datname = current_database() and application_name = 'userd' order by random() limit $1) chosen";
        let count = 1 + dice.roll(3).cast_signed();
        admin.lock().unwrap().execute(terminate, &[&count]).expect("our own sessions");
    });
}

#[test]
fn concurrent_histories_of_a_service_that_is_killed() {
    let service = Breakable::start();
    service.explore("service killed", &|dice| {
        // Long enough for something to be done in between.
        pause(Duration::from_millis(50 + dice.roll(200)));
        let mut process = service.process.lock().unwrap();
        process.signal(Signal::SIGKILL);
        assert_eq!(process.wait(LONG), -9);
        *process = Breakable::spawn(&service.database, &service.proxy, service.port());
    });
}
