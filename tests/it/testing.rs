//! The library as its users meet it: servers in this process, from nothing, side by side, within other runtimes.

use crate::support::{Client, Compared, LONG, MISSED, PASSWORD, eventually};
use serde_json::{Value, json};
use std::{env, fs, process::Command};
use userd::{App, Config, Database, Request, ScratchDatabase, Server, StartError, testing::TestServer};

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

#[test]
fn the_helpers_of_a_test_server() {
    let users = [(7, "Ada", "ada@example.com"), (3, "Grace", "grace@example.com")];
    let server = Compared(TestServer::with_users(users));
    assert_eq!(server.seed(2).len() + server.seed(1).len(), 3);
    let alan = server.user_with_password("Alan", "alan@example.com", PASSWORD);
    assert_eq!(server.url(&format!("/users/{}", alan.id)), format!("{}/users/11", server.base_url()));
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
        let database = Database::Url(server.database_url().into());
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
