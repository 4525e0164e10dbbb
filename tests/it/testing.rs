//! The library as its users meet it: servers in this process, from nothing, side by side, within other runtimes.

use crate::support::{
    ADA, ADA_1, Client, Compared, Database, LONG, MISSED, PASSWORD, Service, check, eventually, free_port,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    env, fs,
    net::TcpStream,
    panic,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use userd::{
    App, Config, Database as Target, Request, ScratchDatabase, Server, StartError, testing::TestServer,
};

#[path = "../../examples/embed.rs"]
mod embed;
#[path = "../../examples/faults.rs"]
mod faults;
#[path = "../../examples/in_process.rs"]
mod in_process;
#[path = "../../examples/test_harness.rs"]
mod test_harness;

#[test]
fn the_examples() {
    fn can_be_shared_and_sent<T: Send + Sync>() {}
    can_be_shared_and_sent::<(Server, App, TestServer, ScratchDatabase, Config, StartError)>();
    embed::main().unwrap();
    faults::main().unwrap();
    in_process::main().unwrap();
    test_harness::main().unwrap();
}

/// The words of a text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Files of Rust in a directory, and in those within it.
fn sources(dir: &Path) -> Vec<String> {
    let read = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false if path.extension().is_some_and(|end| end == "rs") => vec![fs::read_to_string(path).unwrap()],
        false => Vec::new(),
    };
    fs::read_dir(dir).unwrap().flat_map(|entry| read(entry.unwrap().path())).collect()
}

/// The hidden module is small, and each item of it is named by a test, a benchmark or the fuzz target.
#[test]
fn the_internals_are_in_use() {
    let library = include_str!("../../src/lib.rs");
    let module =
        library.split("pub mod internals {").nth(1).and_then(|rest| rest.split("\n}\n").next()).unwrap();
    let mut items: Vec<&str> = Vec::new();
    for line in module.lines().map(str::trim) {
        if let Some(path) = line.strip_prefix("pub use ") {
            items.extend(path.rsplit("::").next().into_iter().flat_map(words));
        } else if let Some(function) = line.strip_prefix("pub fn ") {
            items.extend(words(function).next());
        }
    }
    assert!((20..=25).contains(&items.len()), "{}: {items:?}", items.len());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files: Vec<String> =
        ["tests", "benches", "fuzz"].iter().flat_map(|dir| sources(&root.join(dir))).collect();
    let uses = files.iter().flat_map(|text| text.split("internals::").skip(1));
    let named: BTreeSet<&str> = uses
        .flat_map(|rest| match rest.strip_prefix('{') {
            Some(list) => words(list.split('}').next().unwrap()).collect(),
            None => words(rest).take(1).collect::<Vec<_>>(),
        })
        .collect();
    assert_eq!(items.iter().filter(|item| !named.contains(**item)).collect::<Vec<_>>(), [&""; 0]);
}

/// Servers leave no database, however they end.
#[test]
fn test_servers_leave_nothing() {
    let keep = TestServer::start();
    for end in [drop, TestServer::stop] {
        let server = TestServer::start();
        assert_eq!(Client::new(server.base_url()).get("/users").status, 200);
        let url = server.database_url().to_owned();
        end(server);
        let error = postgres::Client::connect(&url, postgres::NoTls).err().expect("there is no database");
        assert_eq!(error.code(), Some(&postgres::error::SqlState::UNDEFINED_DATABASE), "{error:?}");
    }
    assert_eq!(keep.app().handle(&Request::get("/users")).status, 200);
}

/// Addresses are stored as by the service: in Unicode's form NFC.
#[test]
fn addresses_of_test_servers() {
    let server = TestServer::start();
    server.user("José", "jose\u{301}@x.org");
    assert_eq!(server.user("Zoë", "zoe\u{308}@x.org").email, "zo\u{eb}@x.org");
    let mut client = Client::new(server.base_url());
    for (address, id) in [("jos%C3%A9@x.org", "1"), ("zo%C3%AB@x.org", "2")] {
        assert_eq!(client.get(&format!("/users?email={address}")).json()["data"][0]["id"], id);
    }
}

#[test]
fn the_helpers_of_a_test_server() {
    let server = Compared(TestServer::start());
    server.user("Grace", "grace@example.com");
    server.user("Ada", "ada@example.com");
    assert_eq!(server.seed(2).len() + server.seed(1).len(), 3);
    let alan = server.user_with_password("Alan", "alan@example.com", PASSWORD);
    assert_eq!(server.url(&format!("/users/{}", alan.id)), format!("{}/users/6", server.base_url()));
    let page = Client::new(server.base_url()).get("/users?page=1").json();
    let names: Vec<&Value> = page["data"].as_array().unwrap().iter().map(|user| &user["name"]).collect();
    assert_eq!(json!(names), json!(["Grace", "Ada", "User 1", "User 2", "User 3", "Alan"]));
    assert_eq!(page["total"], 6);
    assert!(Client::new(server.base_url()).opens("ALAN@example.com", PASSWORD));
}

/// The client of the database runs a runtime of its own, which panics where another one is.
#[test]
fn within_an_async_runtime() {
    let use_one = || {
        let server = Compared(TestServer::start());
        server.seed(3);
        let database = Target::Url(server.database_url().into());
        let app = App::open(&Config { database, ..Config::default() }).unwrap();
        assert_eq!(app.handle(&Request::get("/users")).value()["total"], 3);
        assert_eq!(Client::new(server.base_url()).get("/users/1").status, 200);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { use_one() });
    runtime.block_on(async { tokio::task::spawn_blocking(use_one).await }).unwrap();
}

/// Counted in a process of its own, which is this test of this binary again.
#[test]
fn starts_and_stops_leak_nothing() {
    const ALONE: &str = "USERD_TEST_ALONE";
    if env::var_os(ALONE).is_none() {
        let mut again = Command::new(env::current_exe().unwrap());
        again.args(["--exact", "testing::starts_and_stops_leak_nothing", "--nocapture"]).env(ALONE, "1");
        assert!(again.status().unwrap().success());
        return;
    }
    let count = |what: &str| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let settled = || (count("task"), count("fd"));
    let database = ScratchDatabase::create().unwrap();
    let start = || Server::start(database.config()).unwrap();
    start().stop();
    let mut before = settled();
    eventually(LONG, "the threads of the first server end", || {
        let now = settled();
        std::mem::replace(&mut before, now) == now && now.0 <= 4
    });
    for round in 0..20 {
        let server = start();
        let _client = (round % 3 == 0).then(|| Client::new(server.base_url()));
        if round % 2 == 0 { drop(server) } else { server.stop() }
    }
    eventually(LONG, "all threads and descriptors are given back", || {
        let now = settled();
        now.0 <= before.0 + MISSED && now.1 <= before.1
    });
}

// Servers and their settings

#[test]
fn several_servers_side_by_side() {
    let services: Vec<Service> =
        (0..4).map(|n| Service::with(|config| config.max_per_page = 100 + n)).collect();
    for (n, service) in services.iter().enumerate() {
        assert!(service.server.addr().unwrap().ip().is_loopback(), "the default");
        for user in 0..=n {
            let body = json!({"name": "n", "email": format!("{user}@example.com")}).to_string();
            assert_eq!(service.client().post("/users", body).status, 201);
        }
    }
    for (n, service) in services.iter().enumerate() {
        // Each has users and settings of its own.
        assert_eq!(service.client().get(&format!("/users?perPage={}", 100 + n)).json()["total"], n + 1);
        assert_eq!(service.client().get(&format!("/users?perPage={}", 101 + n)).status, 400);
    }
    // Two on one database see the same, and ending one ends no other.
    let twin = Server::start(services[3].database.config()).unwrap();
    assert_eq!(Client::new(twin.base_url()).get("/users").json()["total"], 4);
    twin.stop();
    assert_eq!(services[3].client().get("/users").json()["total"], 4);
}

#[test]
fn a_stopped_server_frees_its_port() {
    let database = Database::create();
    let start = |port| Server::start(Config { port, ..database.config() });
    // No other process gets it once it is free.
    let port = free_port();
    let server = start(port).unwrap();
    let addr = server.addr().unwrap();
    assert_eq!(addr.port(), port);
    assert_eq!(server.base_url(), format!("http://{addr}"));
    assert_eq!(Client::new(server.base_url()).post("/users", ADA).status, 201);
    assert!(matches!(start(port), Err(StartError::Listen(address, _)) if address == addr.to_string()));
    server.stop();
    assert!(TcpStream::connect(addr).is_err(), "it still listens");
    let server = start(port).unwrap();
    check(&mut Client::new(server.base_url()), &format!("GET /users/1 => 200 {ADA_1}"));
    drop(server);
    assert!(TcpStream::connect(addr).is_err(), "it still listens");
}

/// A server that is dropped, by a panic, too, does not announce its stop for `drain_delay`.
#[test]
fn only_a_stop_that_is_asked_for_waits() {
    let start = |delay| TestServer::with(|config| config.limits.drain_delay = Duration::from_secs(delay));
    let panics = || {
        let _server = start(60);
        panic::resume_unwind(Box::new("a failed test"));
    };
    let begin = Instant::now();
    drop(start(60));
    assert!(panic::catch_unwind(panics).is_err());
    assert!(begin.elapsed() < LONG, "{:?}", begin.elapsed());
    let begin = Instant::now();
    start(1).stop();
    assert!(begin.elapsed() >= Duration::from_secs(1), "{:?}", begin.elapsed());
}

/// Errors of a start are values: one line, and the variable that a setting is known by.
#[test]
fn what_keeps_a_server_from_starting() {
    let (database, missing) = (Database::create(), Database::unmade());
    let taken = Server::start(database.config()).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Config);
    let rows: [(&str, Change); 13] = [
        ("cannot connect to the database: ", &|config| *config = missing.config()),
        ("cannot connect to the database: ", &|config| {
            config.database = Target::Url("postgresql://someone@/x?host=/nowhere".into());
            config.db_connect_timeout = Duration::from_millis(500);
        }),
        ("cannot listen on 127.0.0.1:", &|config| config.port = taken.addr().unwrap().port()),
        ("cannot listen on unix:/nowhere/socket: ", &|config| {
            config.host = "unix:/nowhere/socket".to_owned()
        }),
        ("DATABASE_URL: ", &|config| config.database = Target::Url("mysql://localhost".into())),
        ("MIGRATIONS_DIR: ", &|config| config.migrations_dir = Some("/nowhere".into())),
        // Settings that a variable could not have.
        ("WORKERS", &|config| config.workers = 0),
        ("IDLE_TIMEOUT", &|config| config.limits.idle_timeout = Duration::MAX),
        ("REQUEST_TIMEOUT", &|config| config.limits.request_timeout = Duration::ZERO),
        // Settings that no variable sets.
        ("max_header_fields: must be a whole number from 1 to 128, not \"129\"", &|config| {
            config.limits.max_header_fields = 129;
        }),
        ("max_header_fields", &|config| config.limits.max_header_fields = 0),
        ("max_head_bytes", &|config| config.limits.max_head_bytes = 0),
        ("max_request_line_bytes", &|config| config.limits.max_request_line_bytes = usize::MAX),
    ];
    for (line, change) in rows {
        let mut config = database.config();
        change(&mut config);
        let error = Server::start(config).err().expect(line);
        if let StartError::Config(error) = &error {
            assert!(line.starts_with(error.variable), "{error:?}");
        }
        let error = error.to_string();
        assert!(error.starts_with(line) && !error.contains('\n'), "{error}");
    }
}
