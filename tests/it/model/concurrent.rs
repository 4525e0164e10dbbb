//! Clients that work at once on few users, and what breaks meanwhile: each user's history must be one that the model
//! has, too.
//!
//! Users are kept in groups, each with addresses of its own, so that no request in one affects another group.

use super::{
    exchange::{Cut, exchange},
    explore,
    history::address,
    linearizable::{Call, check},
    rules::Rules,
    settings,
    state::{Action, Answer, Body},
};
use crate::support::{Client, Database, Dice, LONG, Process, Proxy, Weather, eventually, free_port, pause};
use nix::sys::signal::Signal;
use proptest::{array::uniform8, bool::weighted as often, collection::vec, option::weighted, prelude::*};
use serde_json::Value;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use userd::Server;

const GROUPS: usize = 3;
const ADDRESSES: usize = 2;
const PASSWORDS: [&str; 2] = ["first password", "second password"];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Create,
    Get,
    Put,
    Patch,
    Delete,
    Find,
    Authenticate,
    List,
}

/// A request of a client, about a user or an address of a group.
#[derive(Debug, Clone)]
struct Turn {
    group: usize,
    kind: Kind,
    /// Number of the user, the one that was created last first.
    user: usize,
    /// The request depends on the tag of the user that was seen last.
    conditional: bool,
    /// A change is one of the name.
    renames: bool,
    /// A change is one of the address.
    moves: bool,
    address: usize,
    password: usize,
    /// A create or a change sets the password; a change removes it.
    protects: Option<bool>,
    cut: Option<Cut>,
}

/// The turns of each client, and what decides on faults.
#[derive(Debug, Clone)]
struct Plan {
    clients: [Vec<Turn>; 8],
    seed: u64,
}

fn plan() -> impl Strategy<Value = Plan> {
    use Kind::*;
    let cut = prop_oneof![(0..100_usize).prop_map(Cut::Request), (0..400_usize).prop_map(Cut::Answer)];
    let turn = (
        0..GROUPS,
        // Most changes are batched: those without a password.
        prop_oneof![
            4 => Just(Create), 4 => Just(Get), 6 => Just(Put), 6 => Just(Patch), 4 => Just(Delete),
            1 => Just(Find), 1 => Just(Authenticate), 1 => Just(List),
        ],
        0..3_usize,
        any::<[bool; 2]>(),
        often(0.25),
        (0..6_usize, 0..PASSWORDS.len()),
        weighted(0.2, often(0.4)),
        weighted(0.1, cut),
    );
    let turn = turn.prop_map(
        |(group, kind, user, [conditional, renames], moves, (address, password), protects, cut)| Turn {
            group,
            kind,
            user,
            conditional,
            renames,
            moves,
            address,
            password,
            protects,
            cut,
        },
    );
    let plan = (uniform8(vec(turn, 8..=10)), any::<u64>());
    plan.prop_map(|(clients, seed)| Plan { clients, seed })
}

/// Events of the service while its clients work.
type Fault<'a> = &'a (dyn Fn(&mut Dice) + Sync);

/// A history of eight clients of the services at these addresses, which must all be there in the end.
struct History<'a> {
    addresses: &'a [String],
    /// The network delivers statements as late as it likes: a change that was answered 503 may be made later.
    is_held_back: bool,
    number: usize,
    /// Ids that are known, by group.
    known: [Mutex<Vec<String>>; GROUPS],
    /// The tags that were seen last, by id.
    tags: Mutex<HashMap<String, String>>,
    calls: [Mutex<Vec<Call>>; GROUPS],
}

impl<'a> History<'a> {
    fn new(addresses: &'a [String], is_held_back: bool) -> History<'a> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (known, tags, calls) = Default::default();
        History { addresses, is_held_back, number, known, tags, calls }
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
        thread::scope(|scope| {
            // Faults are made as long as a client holds it.
            let at_work = Arc::new(());
            for (client, turns) in plan.clients.iter().enumerate() {
                let at_work = at_work.clone();
                scope.spawn(move || {
                    let _at_work = at_work;
                    turns.iter().enumerate().for_each(|(number, turn)| self.turn(client, number, turn));
                });
            }
            let (mut dice, clients) = (Dice(plan.seed | 1), Arc::downgrade(&at_work));
            drop(at_work);
            while let Some(fault) = fault
                && clients.strong_count() > 0
            {
                pause(Duration::from_millis(5 + dice.roll(40)));
                fault(&mut dice);
            }
        });
        self.look_around();
        for calls in &self.calls {
            let calls = calls.lock().unwrap();
            check(Rules::default(), &calls)?;
        }
        Ok(())
    }

    fn turn(&self, client: usize, number: usize, turn: &Turn) {
        let known = self.known[turn.group].lock().unwrap().clone();
        let id = known.iter().rev().nth(turn.user.min(known.len().saturating_sub(1))).cloned();
        let email = self.email(turn.group, turn.address);
        let password = PASSWORDS[turn.password].to_owned();
        let body = |creates: bool| {
            let fields = [
                // Each change of a name is one of its own.
                (creates || turn.renames).then(|| ("name", format!("{client}.{number}").into())),
                (creates || turn.moves).then(|| ("email", Value::from(&*email))),
                match turn.protects {
                    Some(true) => Some(("password", Value::from(&*password))),
                    Some(false) if !creates => Some(("password", Value::Null)),
                    _ => None,
                },
            ];
            fields.into_iter().flatten().map(|(key, value)| (key.to_owned(), value)).collect::<Body>()
        };
        let action = match (turn.kind, id) {
            (Kind::List, _) => Action::Some(Vec::new()),
            (Kind::Find, _) => Action::Email(email),
            (Kind::Authenticate, _) => Action::Authenticate(email, password),
            (Kind::Create, _) | (_, None) => Action::Create(body(true)),
            (Kind::Get, Some(id)) => Action::Get(id),
            (Kind::Put, Some(id)) => Action::Put(id, body(false)),
            (Kind::Patch, Some(id)) => Action::Patch(id, body(false)),
            (Kind::Delete, Some(id)) => Action::Delete(id),
        };
        let tag = action.id().and_then(|id| self.tags.lock().unwrap().get(id).cloned());
        let action = match tag.filter(|_| turn.conditional) {
            Some(tag) => {
                let field = if turn.kind == Kind::Get { "If-None-Match" } else { "If-Match" };
                Action::If(field, vec![tag], Box::new(action))
            }
            None => action,
        };
        self.call(client, number, turn.group, action, turn.cut);
    }

    fn call(&self, client: usize, number: usize, group: usize, action: Action, cut: Option<Cut>) {
        let address = &self.addresses[(client + number) % self.addresses.len()];
        let Some(mut call) = exchange(address, client, action, cut) else { return };
        call.until = call.until.filter(|_| !self.is_held_back);
        if call.answer.is_none() && !call.action.changes() {
            return;
        }
        if let Some((Answer { status: 200 | 201, body, tag }, _)) = &call.answer
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
        let is_list = matches!(call.action, Action::Some(_));
        for group in if is_list { 0..GROUPS } else { group..group + 1 } {
            let mut call = call.clone();
            if is_list {
                call.action = Action::Some(self.emails(group));
            }
            self.calls[group].lock().unwrap().push(call);
        }
    }

    /// All that can be seen, when nothing breaks any more.
    fn look_around(&self) {
        const OBSERVER: usize = 8;
        eventually(LONG, "it serves", || {
            let list = |address| exchange(address, OBSERVER, Action::Some(Vec::new()), None);
            self.addresses.iter().all(|address| list(address).is_some_and(|call| call.answer.is_some()))
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
                    let login = Action::Authenticate(email.clone(), (*password).to_owned());
                    self.call(OBSERVER, 0, group, login, None);
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
    is_held_back: bool,
    heal: &dyn Fn(),
) {
    explore(what, &plan(), false, |plan| {
        let result = History::new(addresses, is_held_back).run(&plan, fault);
        heal();
        // A page holds a thousand users at the most.
        database.run("delete from users");
        result
    });
}

fn host(url: &str) -> String {
    url.strip_prefix("http://").expect("a base URL").to_owned()
}

#[test]
fn concurrent_histories_of_three_replicas() {
    let database = slow_database();
    let servers: [Server; 3] = database.replicas();
    let addresses = servers.each_ref().map(|server| host(server.base_url()));
    explore_concurrent("three replicas at once", &database, &addresses, None, false, &|| ());
}

/// Requests that meet in one service are batched: histories without batches would say nothing of them.
#[test]
fn concurrent_histories_of_batches() {
    let database = slow_database();
    let [server] = database.replicas();
    let addresses = [host(server.base_url())];
    explore_concurrent("batches", &database, &addresses, None, false, &|| ());
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
    port: String,
    process: Mutex<Option<Process>>,
}

impl Breakable {
    fn start() -> Breakable {
        let database = slow_database();
        let (proxy, port) = (Proxy::start(&database.socket()), free_port().to_string());
        let service = Breakable { database, proxy, port, process: Mutex::default() };
        service.spawn();
        service
    }

    fn spawn(&self) {
        let url = self.database.url_at(self.proxy.port());
        let variables = [("PORT", &*self.port), ("DB_POOL_SIZE", "4"), ("AUTH_ATTEMPTS", "0")];
        let mut process = Process::at(&url, &variables);
        process.wait_for_url();
        *self.process.lock().unwrap() = Some(process);
    }

    fn explore(&self, what: &str, fault: Fault) {
        let addresses = [format!("127.0.0.1:{}", self.port)];
        let heal = || self.proxy.set(Weather::Fair);
        explore_concurrent(what, &self.database, &addresses, Some(fault), false, &heal);
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
    let (proxy, mut config) = database.proxied();
    settings(&mut config);
    config.limits.request_timeout = Duration::from_secs(1);
    let server = Server::start(config).expect("a server starts");
    let addresses = [host(server.base_url())];
    let fault = |dice: &mut Dice| {
        let held = proxy.held();
        proxy.hold_next();
        reached(|| proxy.held() > held);
        pause(Duration::from_millis(500 + dice.roll(3000)));
        proxy.release();
        pause(Duration::from_millis(dice.roll(500)));
    };
    explore_concurrent("statements held back", &database, &addresses, Some(&fault), true, &|| {
        proxy.release()
    });
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
        let mut process = service.process.lock().unwrap().take().expect("it runs");
        process.signal(Signal::SIGKILL);
        assert_eq!(process.wait(LONG), -9);
        service.spawn();
    });
}
