//! `/metrics`: every figure moves when it should, and no other text of a client gets into it than by its number.

use crate::support::{ADA, ADA_1, Client, Database, LONG, Service, Weather, check, eventually};
use serde_json::json;
use std::{
    collections::{BTreeSet, HashMap},
    io::Write,
    net::TcpStream,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use userd::{PasswordHashing, Server};

/// Figures that do not move: limits, and facts of the start.
const FIXED: [&str; 6] = [
    "userd_build_info",
    "userd_http_connections_max",
    "userd_database_sessions_max",
    "userd_memory_budget_bytes",
    "process_max_fds",
    "process_start_time_seconds",
];

/// The figures of one scrape, by name and labels. One that has never been counted is not among them.
type Scrape = HashMap<String, f64>;

/// A client's view of the figures.
struct Figures {
    client: Client,
    /// Figures before the requests that are counted next.
    before: Scrape,
    /// Families that have been seen to move.
    moved: BTreeSet<String>,
}

impl Figures {
    fn of(client: Client) -> Figures {
        let mut figures = Figures { client, before: Scrape::new(), moved: BTreeSet::new() };
        figures.before = figures.scrape();
        figures
    }

    fn scrape(&mut self) -> Scrape {
        let answer = self.client.get("/metrics");
        assert_eq!(answer.status, 200);
        let mut scrape = Scrape::new();
        for line in answer.body.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            let value = value.parse().unwrap_or_else(|error| panic!("{error}: {line}"));
            assert!(scrape.insert(name.to_owned(), value).is_none(), "{name} is there twice");
        }
        scrape
    }

    fn get(&mut self, name: &str) -> f64 {
        self.scrape().get(name).copied().unwrap_or_default()
    }

    /// Asserts how much figures have grown since this was last asked, a line each.
    #[track_caller]
    fn grown(&mut self, rows: &str) {
        let (now, mut surprises) = (self.scrape(), String::new());
        for row in rows.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let (name, expected) = row.rsplit_once(' ').expect("a name and a number");
            let of = |scrape: &Scrape| scrape.get(name).copied().unwrap_or_default();
            let found = of(&now) - of(&self.before);
            if found.to_string() != expected {
                surprises += &format!("\n{row}, and not {found}");
            }
            self.moved.insert(family(name));
        }
        assert_eq!(surprises, "");
        self.before = now;
    }

    /// Polls until the figure is as it should be.
    fn becomes(&mut self, name: &str, is: impl Fn(f64) -> bool) {
        eventually(LONG, name, || is(self.get(name)));
        self.moved.insert(family(name));
    }
}

fn family(name: &str) -> String {
    let name = name.split('{').next().unwrap_or_default();
    let plain = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
    plain.unwrap_or(name).to_owned()
}

/// All of one service's figures. What each is about is done, and read back.
#[test]
fn every_figure_moves() {
    let database = Database::create();
    let (proxy, mut config) = database.proxied();
    config.password_hashing = PasswordHashing::Owasp;
    config.auth_attempts = 0;
    config.db_pool_size = 2;
    config.db_acquire_timeout = Duration::from_secs(1);
    config.limits.head_timeout = Duration::from_secs(1);
    let server = Server::start(config).expect("a server starts");
    let new = || Client::new(server.base_url());
    let figures = &mut Figures::of(new());

    // Requests by method, route and status, and batches by lane.
    let rows = format!(
        r#"
        POST /users {ADA} => 201 {ADA_1}
        POST /users {ADA} => 409 {{"error":"Already exists"}}
        GET /users/1 => 200 {ADA_1}
        GET /users/%31 => 200 {ADA_1}
        GET /users/2 => 404 {{"error":"Not found"}}
        HEAD /users/1 => 200
        GET /nowhere => 404 {{"error":"Not found"}}
        GET /livez => 200 {{"status":"ok"}}
        GET /readyz => 200 {{"status":"ready"}}
        POST /users/authenticate {{"email":"ada@example.com","password":"x"}} => 401 {{"error":"Invalid credentials"}}
        DELETE /users/2 => 404 {{"error":"Not found"}}
        "#
    );
    check(&mut figures.client, &rows);
    assert_eq!(figures.client.get("/users?perPage=1").status, 200);
    figures.grown(
        r#"
        userd_http_requests_total{method="POST",route="/users",status="201"} 1
        userd_http_requests_total{method="POST",route="/users",status="409"} 1
        userd_http_requests_total{method="GET",route="/users/{id}",status="200"} 2
        userd_http_requests_total{method="GET",route="/users/{id}",status="404"} 1
        userd_http_requests_total{method="HEAD",route="/users/{id}",status="200"} 1
        userd_http_requests_total{method="GET",route="other",status="404"} 1
        userd_http_requests_total{method="GET",route="/livez",status="200"} 1
        userd_http_requests_total{method="GET",route="/readyz",status="200"} 1
        userd_http_requests_total{method="POST",route="/users/authenticate",status="401"} 1
        userd_http_requests_total{method="DELETE",route="/users/{id}",status="404"} 1
        userd_http_requests_total{method="GET",route="/users",status="200"} 1
        userd_http_requests_total{method="GET",route="/metrics",status="200"} 1
        userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="+Inf"} 3
        userd_http_request_duration_seconds_count{method="POST",route="/users"} 2
        userd_batch_size_count{lane="find"} 4
        userd_batch_size_count{lane="list"} 1
        userd_batch_size_count{lane="create"} 2
        userd_batch_size_count{lane="change"} 1
        userd_batch_size_count{lane="hash"} 1
        userd_batch_size_sum{lane="find"} 4
        "#,
    );
    let within = |figures: &mut Figures, name: &str, least: f64, most: f64| {
        let found = figures.get(name);
        assert!(found > least && found < most, "{name}: {found}");
    };
    // A hash.
    let seconds = r#"userd_http_request_duration_seconds_sum{method="POST",route="/users/authenticate"}"#;
    within(figures, seconds, 0.001, 60.0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    within(figures, "process_start_time_seconds", now - 24.0 * 3600.0, now + 1.0);
    figures.becomes("process_resident_memory_bytes", |bytes| bytes > (1 << 20) as f64);
    let cpu = "process_cpu_seconds_total";
    let before = figures.get(cpu);

    // Refusals by reason.
    figures.grown("");
    let long = "x".repeat(20_000);
    let (get, post) = ("GET / HTTP/1.1\r\nHost: a\r\n", "POST / HTTP/1.1\r\nHost: a\r\n");
    let refusals = [
        ("bad_request", 400, "GET / HTTP/1.1\r\n\r\n".to_owned()),
        ("content_too_large", 413, format!("{post}Content-Length: 99999999\r\n\r\n")),
        ("uri_too_long", 414, format!("GET /{long} HTTP/1.1\r\n")),
        ("head_too_large", 431, format!("{get}X: {long}\r\n")),
        ("expectation_failed", 417, format!("{get}Expect: tea\r\n\r\n")),
        ("version_not_supported", 505, "GET / HTTP/2.0\r\n\r\n".to_owned()),
        ("not_implemented", 501, format!("{post}Transfer-Encoding: gzip\r\n\r\n")),
        ("request_timeout", 408, "GET / HT".to_owned()),
    ];
    let mut rows = format!("userd_http_connections_accepted_total {}", refusals.len());
    for (reason, status, request) in &refusals {
        let mut client = new();
        client.send(request.as_bytes());
        assert_eq!(client.answer("GET").status, *status);
        rows += &format!("\nuserd_http_refusals_total{{reason=\"{reason}\"}} 1");
        rows +=
            &format!("\nuserd_http_requests_total{{method=\"none\",route=\"none\",status=\"{status}\"}} 1");
    }
    figures.grown(&rows);

    // Connections by state, and descriptors.
    let connections = |state: &str| format!(r#"userd_http_connections{{state="{state}"}}"#);
    let descriptors = figures.get("process_open_fds");
    let mut idle: Vec<Client> = (0..5).map(|_| new()).collect();
    for client in &mut idle {
        assert_eq!(client.get("/livez").status, 200);
    }
    figures.becomes(&connections("idle"), |count| count == 5.0);
    figures.becomes(&connections("working"), |count| count == 1.0);
    figures.becomes("process_open_fds", |count| count >= descriptors + 5.0);
    drop(idle);
    figures.becomes(&connections("idle"), |count| count == 0.0);
    let mut half = new();
    half.send(b"POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n");
    figures.becomes(&connections("reading"), |count| count == 1.0);
    drop(half);

    // Memory that is held for a body.
    let mut half = new();
    half.send(b"POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n");
    half.send(&[b' '; 30_000]);
    let held = "userd_memory_held_bytes";
    figures.becomes(held, |bytes| bytes >= 30_000.0);
    drop(half);
    figures.becomes(held, |bytes| bytes < 30_000.0);
    // A refused client that does not close.
    let mut refused = TcpStream::connect(server.addr().unwrap()).unwrap();
    refused.write_all(b"GET / HTTP/2.0\r\n\r\nx").unwrap();
    figures.becomes(&connections("closing"), |count| count == 1.0);
    drop(refused);
    figures.becomes(&connections("closing"), |count| count == 0.0);

    // Sessions, busy while a statement waits for a lock; the lock is retried.
    let transaction = database.transaction("update users set name = 'B' where id = 1");
    let mut changing = new();
    changing.send_request("PUT", "/users/1", &[], r#"{"name":"C"}"#);
    let mut changing_too = new();
    changing_too.send_request("PUT", "/users/1", &[], r#"{"name":"D"}"#);
    let sessions = |state: &str| format!(r#"userd_database_sessions{{state="{state}"}}"#);
    let retries = |reason: &str| format!(r#"userd_database_retries_total{{reason="{reason}"}}"#);
    figures.becomes(&sessions("busy"), |count| count == 1.0);
    figures.becomes(&retries("lock"), |count| count >= 2.0);
    figures.becomes("userd_commands_queued", |count| count >= 1.0);
    drop(transaction);
    assert_eq!((changing.answer("PUT").status, changing_too.answer("PUT").status), (200, 200));
    figures.becomes(&sessions("busy"), |count| count == 0.0);
    figures.becomes(&sessions("idle"), |count| count >= 1.0);
    figures.becomes("userd_commands_queued", |count| count == 0.0);

    // A session whose prepared statement does not fit the table any more: one of the two has it at least.
    assert_eq!(figures.client.get("/users/1").status, 200);
    database.run("alter table users alter column name type varchar(5000)");
    eventually(LONG, "each session is used", || {
        assert_eq!(figures.client.get("/users/1").status, 200);
        figures.get(&retries("session")) >= 1.0
    });

    // Connections that break, and a database that stays away, and takes no changes for a while then.
    let read_only = |value: &str| {
        let sql = format!("alter database {} set default_transaction_read_only = {value}", database.name());
        database.run(&format!("begin read write; {sql}; commit"));
    };
    read_only("on");
    proxy.shut();
    assert_eq!(figures.client.get("/users/1").status, 503);
    figures.becomes(&retries("connection"), |count| count >= 1.0);
    figures.becomes("userd_database_session_waits_total", |count| count >= 1.0);
    figures.becomes("userd_database_session_timeouts_total", |count| count >= 1.0);
    figures.becomes("userd_ready", |ready| ready == 0.0);
    proxy.set(Weather::Fair);
    figures.becomes("userd_ready", |ready| ready == 1.0);
    figures.becomes("userd_database_read_only", |read_only| read_only == 1.0);
    read_only("off");
    proxy.shut();
    proxy.set(Weather::Fair);
    figures.becomes("userd_database_read_only", |read_only| read_only == 0.0);
    eventually(LONG, "it is back", || figures.client.get("/users/1").status == 200);

    // Hashes that wait, and those that would have to wait for too long.
    let mut logins: Vec<Client> = (0..400).map(|_| new()).collect();
    for (n, login) in logins.iter_mut().enumerate() {
        let body = json!({"email": format!("{n}@example.com"), "password": "x"}).to_string();
        login.send_request("POST", "/users/authenticate", &[], body);
    }
    figures.becomes("userd_hashes_waiting", |count| count > 0.0);
    figures.becomes(r#"userd_http_refusals_total{reason="too_many_hashes"}"#, |count| count > 0.0);
    drop(logins);
    figures.becomes("userd_hashes_waiting", |count| count == 0.0);
    figures.becomes(cpu, |seconds| seconds > before);

    let mut still: BTreeSet<String> = figures.scrape().keys().map(|name| family(name)).collect();
    still.retain(|name| !figures.moved.contains(name) && !FIXED.contains(&name.as_str()));
    assert_eq!(still, BTreeSet::new(), "no test has seen them move");
    server.stop();
}

/// The refusals that need a service of their own: too few connections, too little time.
#[test]
fn refusals_of_a_service_that_is_short_of_everything() {
    let database = Database::create();
    let (proxy, mut config) = database.proxied();
    config.limits.max_connections = 3;
    config.limits.request_timeout = Duration::from_secs(1);
    config.limits.trusted_proxies = "127.0.0.1".parse().unwrap();
    let service = Service { server: Server::start(config).unwrap(), database };
    let mut client = service.client();
    client.post("/users", ADA);
    let mut figures = Figures::of(client);
    let (mut late, mut third, mut fourth) = (service.client(), service.client(), service.client());
    assert_eq!((late.get("/livez").status, third.get("/livez").status), (200, 200));
    fourth.send(b"");
    assert_eq!(fourth.answer("GET").status, 503);
    // Its statement does not get to the database.
    proxy.set(Weather::Stalled);
    assert_eq!(late.get("/users/1").status, 503);
    proxy.set(Weather::Fair);
    figures.grown(
        r#"
        userd_http_refusals_total{reason="not_answered_in_time"} 1
        userd_http_refusals_total{reason="too_many_connections"} 1
        userd_http_requests_total{method="none",route="none",status="503"} 2
        userd_http_requests_total{method="GET",route="/users/{id}",status="200"} 0
        userd_http_requests_total{method="GET",route="/users/{id}",status="503"} 0
        "#,
    );
    assert_eq!(figures.get("userd_http_connections_max"), 3.0);
}

#[test]
fn no_text_of_a_client_is_a_label() {
    let service = Service::start();
    let mut client = service.client();
    let mut figures_after = |labels: std::ops::Range<u32>| {
        for n in labels {
            for method in ["GET", &format!("LABEL{n}")] {
                client.request(method, &format!("/users/label{n}"), &[], "");
                client.request(method, &format!("/label{n}?label{n}"), &[], "");
            }
        }
        client.get("/metrics").body
    };
    figures_after(0..1);
    let (before, after) = (figures_after(1..2), figures_after(2..50));
    assert!(!after.to_lowercase().contains("label"), "{after}");
    assert_eq!(before.lines().count(), after.lines().count(), "{before}{after}");
}
