//! `/livez`, `/readyz`, and what the service does at its end so that a load balancer loses no request.

use crate::support::{
    ADA, Client, Database, LONG, Own, Process, Proxy, Service, TOKEN, TempDir, Weather, free_port, keeps,
    pause,
};
use nix::sys::signal::Signal;
use std::{
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

const LIVE: &str = r#"{"status":"ok"}"#;
const READY: &str = r#"{"status":"ready"}"#;
const SILENT: &str = r#"{"status":"unready","reason":"the database does not answer"}"#;
const OTHER_SCHEMA: &str = r#"{"status":"unready","reason":"the database's schema is not the one expected"}"#;
const STOPPING: &str = r#"{"status":"unready","reason":"the service is stopping"}"#;

/// An answer that never takes a second, whatever the database does: the last one of three.
fn at_once(client: &mut Client, target: &str) -> (u16, String) {
    let mut answers = [(); 3].map(|()| {
        let start = Instant::now();
        (client.get(target), start.elapsed())
    });
    keeps(Duration::from_secs(1), target, &answers.each_ref().map(|(_, took)| *took));
    let (answer, _) = &mut answers[2];
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
    let blocker = service.database.transaction("lock table users");
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
    drop(blocker);
    assert!(blocked.into_iter().all(|client| client.join().unwrap() == 200));
}

/// One that hangs, one that is gone, and a blip.
#[test]
fn a_database_that_does_not_answer() {
    let postgres = Own::start();
    let proxy = Proxy::start(&postgres.socket());
    let url =
        format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable&connect_timeout=1", proxy.port());
    let mut process = Process::at(&url, &[("LOG_LEVEL", "debug")]);
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
    for (from, to, status, body) in
        [("credentials", "away", 503, OTHER_SCHEMA), ("away", "credentials", 200, READY)]
    {
        service.database.run(&format!("alter table {from} rename to {to}"));
        becomes(&mut client, status, body);
    }
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
}

/// It asks for what needs no token. While a service is not asked, it keeps no session of the database for that.
#[test]
fn healthchecks_over_tcp_and_unix_sockets() {
    let database = Database::create();
    let dir = TempDir::new();
    let socket = format!("unix:{}/http", dir.name());
    let token = ("API_TOKEN", TOKEN);
    // No other process gets the port once it is free.
    let places = [("127.0.0.1", free_port().to_string()), (&*socket, "1".to_owned())];
    let mut services = places.each_ref().map(|(host, port)| {
        let proxy = Proxy::start(&database.socket());
        let variables = [token, ("HOST", *host), ("PORT", port), ("DB_POOL_SIZE", "1")];
        let mut process = Process::at(&database.url_at(proxy.port()), &variables);
        process.wait_for_url();
        (proxy, process)
    });
    // Their starts are older then than what a health check takes for fresh.
    pause(Duration::from_secs(6));
    database.has_sessions(2);
    let ask = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut asked = Process::start(&[&["healthcheck"], arguments].concat(), variables);
        (asked.wait(LONG), asked.stderr())
    };
    for ((host, port), (proxy, process)) in places.iter().zip(&mut services) {
        let here = [("HOST", *host), ("PORT", port.as_str())];
        proxy.shut();
        let (code, said) = ask(&[], &here);
        assert!(code == 1 && said.contains("the database does not answer"), "{said}");
        proxy.set(Weather::Fair);
        let mut client = process.client();
        becomes(&mut client, 200, READY);
        let age = client.get("/readyz").header("Age").map(str::to_owned);
        assert!(age.as_deref().is_some_and(|age| age.parse::<u64>().is_ok_and(|age| age < 5)), "{age:?}");
        assert_eq!(ask(&[], &here), (0, String::new()));
        let elsewhere = [token, ("HOST", "192.0.2.1"), ("PORT", "1")];
        assert_eq!(ask(&["--host", host, "--port", port], &elsewhere), (0, String::new()));
    }
}
