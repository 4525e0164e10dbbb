//! `/livez`, `/readyz`, and what the service does at its end so that a load balancer loses no request.

use crate::support::{
    ADA, BUSY, Client, Database, LONG, Own, Process, Proxy, Service, TOKEN, Weather, eventually, pause,
    running,
};
use nix::sys::signal::Signal;
use std::{
    fs,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

const LIVE: &str = r#"{"status":"ok"}"#;
const READY: &str = r#"{"status":"ready"}"#;
const SILENT: &str = r#"{"status":"unready","reason":"the database does not answer"}"#;
const OTHER_SCHEMA: &str = r#"{"status":"unready","reason":"the database's schema is not the one expected"}"#;
const STOPPING: &str = r#"{"status":"unready","reason":"the service is stopping"}"#;

/// An answer that never takes a second, whatever the database does.
fn at_once(client: &mut Client, target: &str) -> (u16, String) {
    let start = Instant::now();
    let answer = client.get(target);
    assert!(start.elapsed() < BUSY, "{target} took {:?}", start.elapsed());
    (answer.status, answer.body.trim_end().to_owned())
}

fn becomes(client: &mut Client, status: u16, body: &str) {
    let mut last = (0, String::new());
    let deadline = Instant::now() + LONG;
    while last != (status, body.to_owned()) {
        assert!(Instant::now() < deadline, "{last:?}, not {body}");
        pause(Duration::from_millis(20));
        last = at_once(client, "/readyz");
        assert_eq!(at_once(client, "/livez"), (200, LIVE.to_owned()));
    }
}

#[test]
fn what_the_routes_answer() {
    // They need no token, and no name that browsers may use.
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    service.check(
        r#"
        GET|HEAD /livez <Origin: http://evil.example> => 200 <Cache-Control: no-store> <Content-Type: application/json> <Content-Length: 16> {"status":"ok"}
        GET|HEAD /readyz <Origin: http://evil.example> => 200 <Cache-Control: no-store> <Content-Length: 19> {"status":"ready"}
        GET /readyz?verbose=1 => 200 {"status":"ready"}
        GET /%72eadyz => 200 {"status":"ready"}
        POST|DELETE|BREW /livez {"a":1} => 405 <Allow: GET, HEAD, OPTIONS> {"error":"Method not allowed"}
        OPTIONS /readyz => 204 <Allow: GET, HEAD, OPTIONS>
        GET /Livez => 404 {"error":"Not found"}
        GET /users => 401 {"error":"Unauthorized"}
        "#,
    );
}

/// Every worker is inside a statement, and every session of the pool in use.
#[test]
fn a_busy_service_is_ready() {
    let service = Service::start();
    let mut client = service.client();
    client.post("/users", ADA);
    let mut blocker = service.database.client();
    let mut transaction = blocker.transaction().unwrap();
    transaction.execute("lock table users in access exclusive mode", &[]).unwrap();
    let blocked: Vec<_> = (0..64)
        .map(|_| {
            let mut client = service.client();
            thread::spawn(move || client.get("/users/1").status)
        })
        .collect();
    service.database.waits_for_a_lock();
    let start = Instant::now();
    // For longer than it would take to notice a database that does not answer.
    while start.elapsed() < Duration::from_millis(2500) {
        assert_eq!(at_once(&mut client, "/readyz"), (200, READY.to_owned()));
        assert_eq!(at_once(&mut client, "/livez"), (200, LIVE.to_owned()));
        assert_eq!(at_once(&mut client, "/metrics").0, 200);
        pause(Duration::from_millis(20));
    }
    drop(transaction);
    assert!(blocked.into_iter().all(|client| client.join().unwrap() == 200));
}

/// One that hangs, one that is gone, and a blip.
#[test]
fn a_database_that_does_not_answer() {
    let postgres = Own::start();
    let proxy = Proxy::start(&postgres.socket());
    let url =
        format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable&connect_timeout=1", proxy.port());
    let mut process = Process::start(
        &[],
        &[("DATABASE_URL", &url), ("HOST", "127.0.0.1"), ("PORT", "0"), ("LOG_LEVEL", "debug")],
    );
    let url = process.wait_for_url();
    let mut client = Client::new(&url);
    becomes(&mut client, 200, READY);
    // Sessions that end are opened again, and mean nothing.
    for _ in 0..2 {
        proxy.cut();
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(700) {
            assert_eq!(at_once(&mut client, "/readyz"), (200, READY.to_owned()), "{}", process.stderr());
            pause(Duration::from_millis(20));
        }
    }
    // It hangs: every session, and every new one. Requests wait meanwhile.
    proxy.set(Weather::Stalled);
    let mut waiting = Client::new(&url);
    waiting.send_request("GET", "/users/1", &[], "");
    let start = Instant::now();
    becomes(&mut client, 503, SILENT);
    // Two failures are none.
    assert!(start.elapsed() > Duration::from_secs(1), "{:?}", start.elapsed());
    process.logs("[WARN] unready: the database does not answer");
    proxy.set(Weather::Fair);
    becomes(&mut client, 200, READY);
    process.logs("[INFO] ready again");
    assert!(waiting.answer("GET").status != 200);
}

#[test]
fn a_schema_that_is_not_the_one_expected() {
    let service = Service::start();
    let mut client = service.client();
    becomes(&mut client, 200, READY);
    let last = service.database.value("select max(version) from refinery_schema_history");
    service
        .database
        .run(&format!("update refinery_schema_history set checksum = '1' where version = {last}"));
    becomes(&mut client, 503, OTHER_SCHEMA);
    // Requests are served as far as they can be.
    assert_eq!(client.get("/users").status, 200);
    service.database.run(&format!("delete from refinery_schema_history where version = {last}"));
    pause(Duration::from_millis(600));
    becomes(&mut client, 503, OTHER_SCHEMA);
}

/// How often the threads of a process have gone to sleep.
fn switches(process: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let count = |thread: fs::DirEntry| -> Option<u64> {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse().ok()
    };
    threads.flatten().filter_map(count).sum()
}

/// While it is not asked, no session of the database is kept for it, and no thread wakes.
#[test]
fn an_idle_service_asks_nothing() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("DB_POOL_SIZE", "1")]);
    process.wait_for_url();
    let sessions = || {
        database.value(
            "select count(*) from pg_stat_activity where application_name = 'userd' and datname = current_database()",
        )
    };
    // The wake-ups of a start end within a second or two.
    eventually(LONG, "no thread wakes", || {
        let before = switches(process.id());
        pause(Duration::from_secs(1));
        switches(process.id()) == before
    });
    assert_eq!(sessions(), "1", "the pool's");
    let mut client = process.client();
    assert_eq!(client.get("/readyz").status, 200);
    eventually(LONG, "the prober has one, too", || sessions() == "2");
}

#[test]
fn a_stop_is_announced() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("DRAIN_DELAY", "2"), ("LOG_LEVEL", "warn")]);
    let url = process.wait_for_url();
    let mut client = Client::new(&url);
    becomes(&mut client, 200, READY);
    let start = Instant::now();
    process.signal(Signal::SIGTERM);
    becomes(&mut client, 503, STOPPING);
    // New connections are accepted, and requests served.
    let created = Client::new(&url).post("/users", ADA);
    assert_eq!(created.status, 201);
    assert_eq!(Client::new(&url).get("/users/1").body, created.body);
    assert_eq!(process.wait(LONG), 0);
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    let address = url.strip_prefix("http://").unwrap();
    assert!(TcpStream::connect(address).is_err());
    assert_eq!(database.value("select count(*) from users"), "1");

    // A second signal does not wait for the delay. Within a second of the first one it is a repetition.
    let mut process = Process::on(&database, &[("DRAIN_DELAY", "600")]);
    becomes(&mut process.client(), 200, READY);
    eventually(LONG, "it ends", || {
        process.signal(Signal::SIGTERM);
        !running(process.id())
    });
    assert_eq!(process.wait(LONG), 128 + Signal::SIGTERM as i32);
}

/// It was never asked before, and the database has been away since.
#[test]
fn a_healthcheck_of_a_service_that_was_not_asked_for_long() {
    let database = Database::create();
    let proxy = Proxy::start(&database.socket());
    let url = database.url_at(proxy.port());
    let mut process = Process::start(&[], &[("DATABASE_URL", &url), ("HOST", "127.0.0.1"), ("PORT", "0")]);
    let address = process.wait_for_url();
    let port = address.rsplit(':').next().unwrap();
    let ask = || {
        let mut asked = Process::start(&["healthcheck", "--host", "127.0.0.1", "--port", port], &[]);
        (asked.wait(LONG), asked.stderr())
    };
    proxy.shut();
    // Older than what a health check takes for fresh.
    pause(Duration::from_secs(6));
    let (code, said) = ask();
    assert!(code == 1 && said.contains("the database does not answer"), "{said}");
    proxy.set(Weather::Fair);
    let mut client = Client::new(&address);
    becomes(&mut client, 200, READY);
    let age = client.get("/readyz").header("Age").map(str::to_owned);
    assert!(age.as_deref().is_some_and(|age| age.parse::<u64>().is_ok_and(|age| age < 5)), "{age:?}");
    assert_eq!(ask(), (0, String::new()));
}
