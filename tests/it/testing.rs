//! The library as its users meet it: servers in this process, from nothing, side by side, within other runtimes.
//!
//! Tests that count a process's threads and files, or kill a process, use a separate process: this binary, run
//! as `the_helper`.

use crate::support::{Client, Compared, LONG, MISSED, eventually};
use serde_json::json;
use std::{
    env, fs,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
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
    embed::main().unwrap();
    faults::main().unwrap();
    in_process::main().unwrap();
    test_harness::main().unwrap();
}

fn names(client: &mut Client) -> Vec<String> {
    let page = client.get("/users?perPage=1000").json();
    let users = page["data"].as_array().unwrap().iter();
    users.map(|user| user["name"].as_str().unwrap().to_owned()).collect()
}

fn is_gone(database_url: &str) -> bool {
    match postgres::Client::connect(database_url, postgres::NoTls) {
        Ok(_) => false,
        Err(error) => {
            let code = error.code().map(postgres::error::SqlState::code);
            assert_eq!(code, Some("3D000"), "{database_url}: {error:?}");
            true
        }
    }
}

#[test]
fn a_server_can_be_shared_and_sent() {
    fn both<T: Send + Sync>() {}
    both::<(Server, App, TestServer, ScratchDatabase, Config, StartError)>();
}

/// Servers leave no database, and their end waits for nothing: a drop of a database that has sessions takes 100 ms by
/// itself.
#[test]
fn many_test_servers_leave_nothing() {
    let keep = TestServer::start();
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    for round in 0..30 {
        let start = Instant::now();
        let server = TestServer::start();
        assert_eq!(Client::new(server.base_url()).get("/users").status, 200);
        starts.push(start.elapsed());
        let url = server.database_url().to_owned();
        let end = Instant::now();
        if round % 2 == 0 {
            drop(server)
        } else {
            server.stop()
        }
        ends.push(end.elapsed());
        assert!(is_gone(&url));
    }
    starts.sort_unstable();
    println!("starts: median {:?}, slowest {:?}", starts[15], starts[29]);
    let quickest = ends.into_iter().min().unwrap();
    assert!(quickest < Duration::from_millis(90), "{quickest:?}");
    assert_eq!(keep.app().handle(&Request::get("/users")).status, 200);
}

#[test]
fn the_helpers_of_a_test_server() {
    let server = Compared(TestServer::start());
    assert_eq!(server.seed(2).len() + server.seed(1).len(), 3);
    let ada = server.user_with_password("Ada", "ada@example.com", "correct horse");
    assert_eq!(server.url(&format!("/users/{}", ada.id)), format!("{}/users/4", server.base_url()));
    let mut client = Client::new(server.base_url());
    assert_eq!(names(&mut client), ["User 1", "User 2", "User 3", "Ada"]);
    let proof = json!({"email": "ADA@example.com", "password": "correct horse"});
    let request = Request::post("/users/authenticate", &proof);
    assert_eq!(server.app().handle(&request).status, 200);
}

/// The client of the database runs a runtime of its own, which panics where another one is.
#[test]
fn within_an_async_runtime() {
    let use_one = || {
        let server = Compared(TestServer::start());
        server.seed(3);
        let app =
            App::open(&Config { database: Database::Url(server.database_url().into()), ..Config::default() });
        let app = app.unwrap();
        assert_eq!(app.handle(&Request::get("/users")).value()["total"], 3);
        assert_eq!(Client::new(server.base_url()).get("/users/1").status, 200);
        let wrong = Config {
            database: Database::Url("postgresql://someone@/nothing?host=/nowhere".into()),
            db_connect_timeout: Duration::from_millis(10),
            ..Config::default()
        };
        assert!(matches!(Server::start(wrong), Err(StartError::Database(_))));
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async { use_one() });
    runtime.block_on(async { tokio::task::spawn_blocking(use_one).await }).unwrap();
}

#[test]
fn starts_and_stops_leak_nothing() {
    let mut helper = Helper::start("leak");
    helper.line("no more than before");
    assert!(helper.child.wait().unwrap().success());
}

/// `cargo nextest` runs each test in a process of its own; here four run at a time.
#[test]
fn processes_share_one_cluster() {
    let mut helpers: Vec<Helper> = (0..4).map(|_| Helper::start("wait")).collect();
    let urls: Vec<String> = helpers.iter_mut().map(|helper| helper.line("url ")).collect();
    let cluster = |url: &str| url.rsplit_once('/').unwrap().0.to_owned();
    assert!(urls.iter().all(|url| cluster(url) == cluster(&urls[0])), "{urls:?}");
    for url in &urls {
        assert_eq!(urls.iter().filter(|other| *other == url).count(), 1, "{urls:?}");
    }
}

/// This binary, doing one thing in a process of its own. Killed when dropped.
struct Helper {
    child: Child,
    output: BufReader<Box<dyn Read>>,
}

impl Helper {
    fn start(what: &str) -> Helper {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "testing::the_helper", "--nocapture"])
            .env("USERD_HELPER", what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = child.stdout.take().unwrap();
        Helper { child, output: BufReader::new(Box::new(output)) }
    }

    /// The rest of the first line with this in it.
    fn line(&mut self, sign: &str) -> String {
        let mut lines = self.output.by_ref().lines().map(Result::unwrap);
        let found = lines.find_map(|line| Some(line.split_once(sign)?.1.to_owned()));
        found.unwrap_or_else(|| panic!("the helper ended before it said {sign:?}"))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_helper() {
    match env::var("USERD_HELPER").as_deref() {
        Ok("wait") => {
            let server = TestServer::start();
            println!("url {}", server.database_url());
            let _ = std::io::stdin().read(&mut [0]);
        }
        Ok("leak") => leak(),
        _ => {}
    }
}

fn leak() {
    let count = |what: &str| fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
    let ours = format!("userd-{}-", std::process::id());
    let files = || -> Vec<PathBuf> {
        let entries = fs::read_dir(env::temp_dir()).unwrap().flatten();
        let named = |path: &PathBuf| path.to_string_lossy().contains(&ours);
        entries.map(|entry| entry.path()).filter(named).collect()
    };
    let database = ScratchDatabase::create().unwrap();
    let start = || Server::start(database.config()).unwrap();
    start().stop();
    let settled = || (count("task"), count("fd"));
    let mut before = settled();
    eventually(LONG, "the threads of the first server end", || {
        let now = settled();
        std::mem::replace(&mut before, now) == now && now.0 <= 4
    });
    let mut ports = Vec::new();
    for round in 0..60 {
        let server = start();
        ports.push(server.addr().unwrap());
        match round % 3 {
            0 => drop(server),
            1 => server.stop(),
            _ => {
                let client = Client::new(server.base_url());
                drop(server);
                drop(client);
            }
        }
    }
    eventually(LONG, "all threads and descriptors are given back", || {
        let now = settled();
        now.0 <= before.0 + MISSED && now.1 <= before.1
    });
    assert!(files().is_empty());
    // Other tests may have been given some of them since.
    let free = ports.iter().filter(|port| TcpListener::bind(port).is_ok()).count();
    assert!(free * 10 >= ports.len() * 9, "{free} ports are free");
    println!("no more than before: {before:?}");
}

#[test]
fn a_server_that_begins_with_users() {
    let users = [(7, "Ada", "ada@example.com"), (3, "Grace", "grace@example.com")];
    let server = Compared(TestServer::with_users(users));
    assert_eq!(server.user("Alan", "alan@example.com").id, 8);
    let mut client = Client::new(server.base_url());
    assert_eq!(names(&mut client), ["Grace", "Ada", "Alan"]);
    assert_eq!(client.get("/users/3").json()["email"], "grace@example.com");
    assert_eq!(client.get("/users?page=1").json()["total"], 3);
    let none = Compared(TestServer::with_users([]));
    assert_eq!(none.user("Ada", "ada@example.com").id, 1);
}
