//! `/metrics`: every figure moves when it should, and no other text of a client gets into it than by its number.

use crate::support::{ADA, ADA_1, Client, Database, LONG, Proxy, Service, TOKEN, Weather, check, eventually};
use serde_json::json;
use std::{
    collections::{BTreeSet, HashMap},
    io::Write,
    net::TcpStream,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use userd::{
    PasswordHashing,
    config::{Config, Database as Target},
    server::Server,
};

/// Figures that do not move: limits, and facts of the start.
const FIXED: [&str; 6] = [
    "userd_build_info",
    "userd_http_connections_max",
    "userd_database_sessions_max",
    "userd_memory_budget_bytes",
    "process_max_fds",
    "process_start_time_seconds",
];

/// The figures of one scrape, by name and labels.
#[derive(Clone)]
struct Figures(HashMap<String, f64>);

impl Figures {
    fn of(client: &mut Client) -> Figures {
        let answer = client.get("/metrics");
        assert_eq!(answer.status, 200);
        let lines = answer.body.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').expect("a name and a value");
            (name.to_owned(), value.parse().unwrap_or_else(|error| panic!("{error}: {line}")))
        };
        let samples: Vec<(String, f64)> = lines.map(sample).collect();
        let figures: HashMap<String, f64> = samples.iter().cloned().collect();
        assert_eq!(figures.len(), samples.len(), "a sample is there twice");
        Figures(figures)
    }

    /// Returns a figure; 0 if it has never been counted.
    fn get(&self, name: &str) -> f64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    fn families(&self) -> BTreeSet<String> {
        let family = |name: &String| {
            let name = name.split('{').next().unwrap_or_default();
            let plain = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            plain.unwrap_or(name).to_owned()
        };
        self.0.keys().map(family).collect()
    }
}

/// Figures that have been seen to move.
#[derive(Default)]
struct Moved(BTreeSet<String>);

impl Moved {
    /// Asserts how much each of these figures has grown since `before`.
    #[track_caller]
    fn grown(&mut self, before: &Figures, after: &Figures, rows: &[(&str, f64)]) {
        let mut surprises = String::new();
        for (name, expected) in rows {
            let found = after.get(name) - before.get(name);
            if found != *expected {
                surprises += &format!("\n{name}: {found}, not {expected}");
            }
            self.saw(name);
        }
        assert_eq!(surprises, "");
    }

    /// Polls until the figure is as it should be.
    fn becomes(&mut self, client: &mut Client, name: &str, is: impl Fn(f64) -> bool) {
        let mut last = f64::NAN;
        eventually(LONG, name, || {
            last = Figures::of(client).get(name);
            is(last)
        });
        self.saw(name);
    }

    fn saw(&mut self, name: &str) {
        self.0.extend(Figures([(name.to_owned(), 0.0)].into()).families());
    }
}

fn requests(method: &str, route: &str, status: u16) -> String {
    format!(r#"userd_http_requests_total{{method="{method}",route="{route}",status="{status}"}}"#)
}

/// All of one service's figures. What each is about is done, and read back.
#[test]
fn every_figure_moves() {
    let database = Database::create();
    let proxy = Proxy::start(&database.socket());
    let mut config = database.config();
    config.database = userd::Database::Url(database.url_at(proxy.port()).into());
    config.password_hashing = PasswordHashing::Owasp;
    config.auth_attempts = 0;
    config.db_pool_size = 2;
    config.db_acquire_timeout = Duration::from_secs(1);
    config.limits.head_timeout = Duration::from_secs(1);
    let server = Server::start(config).expect("a server starts");
    let new = || Client::new(server.base_url());
    let mut client = new();
    let moved = &mut Moved::default();
    let before = Figures::of(&mut client);

    // Requests by method, route and status, and batches by lane.
    let rows = format!(
        r#"
        POST /users {ADA} => 201 {ADA_1}
        POST /users {ADA} => 409 {{"error":"Already exists"}}
        GET /users/1 => 200 {ADA_1}
        GET /users/%31 => 200 {ADA_1}
        GET /users/2 => 404 {{"error":"Not found"}}
        HEAD /users/1 => 200
        DELETE /users => 405 {{"error":"Method not allowed"}}
        OPTIONS /users => 204
        GET /nowhere => 404 {{"error":"Not found"}}
        GET /livez => 200 {{"status":"ok"}}
        GET /readyz => 200 {{"status":"ready"}}
        POST /readyz => 405 {{"error":"Method not allowed"}}
        POST /users/authenticate {{"email":"ada@example.com","password":"x"}} => 401 {{"error":"Invalid credentials"}}
        DELETE /users/2 => 404 {{"error":"Not found"}}
        "#
    );
    check(&mut client, &rows);
    assert_eq!(client.get("/users?perPage=1").status, 200);
    let after = Figures::of(&mut client);
    let rows = [
        (requests("POST", "/users", 201), 1.0),
        (requests("POST", "/users", 409), 1.0),
        (requests("GET", "/users/{id}", 200), 2.0),
        (requests("GET", "/users/{id}", 404), 1.0),
        (requests("HEAD", "/users/{id}", 200), 1.0),
        (requests("DELETE", "/users", 405), 1.0),
        (requests("OPTIONS", "/users", 204), 1.0),
        (requests("GET", "other", 404), 1.0),
        (requests("GET", "/livez", 200), 1.0),
        (requests("GET", "/readyz", 200), 1.0),
        (requests("POST", "/readyz", 405), 1.0),
        (requests("POST", "/users/authenticate", 401), 1.0),
        (requests("DELETE", "/users/{id}", 404), 1.0),
        (requests("GET", "/users", 200), 1.0),
        // The scrape before this one.
        (requests("GET", "/metrics", 200), 1.0),
        (
            r#"userd_http_request_duration_seconds_bucket{method="GET",route="/users/{id}",le="+Inf"}"#
                .to_owned(),
            3.0,
        ),
        (r#"userd_http_request_duration_seconds_count{method="POST",route="/users"}"#.to_owned(), 2.0),
        (r#"userd_batch_size_count{lane="find"}"#.to_owned(), 4.0),
        (r#"userd_batch_size_count{lane="list"}"#.to_owned(), 1.0),
        (r#"userd_batch_size_count{lane="create"}"#.to_owned(), 2.0),
        (r#"userd_batch_size_count{lane="change"}"#.to_owned(), 1.0),
        (r#"userd_batch_size_count{lane="hash"}"#.to_owned(), 1.0),
        (r#"userd_batch_size_sum{lane="find"}"#.to_owned(), 4.0),
    ];
    let rows: Vec<(&str, f64)> = rows.iter().map(|(name, count)| (name.as_str(), *count)).collect();
    moved.grown(&before, &after, &rows);
    let seconds = r#"userd_http_request_duration_seconds_sum{method="POST",route="/users/authenticate"}"#;
    // A hash.
    assert!(after.get(seconds) > 0.001 && after.get(seconds) < 60.0, "{}", after.get(seconds));
    let cpu = "process_cpu_seconds_total";
    assert!(after.get(cpu) > 0.0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let started = after.get("process_start_time_seconds");
    assert!(started > now - 24.0 * 3600.0 && started < now + 1.0, "{started} {now}");
    assert!(after.get("process_resident_memory_bytes") > (1 << 20) as f64);
    moved.saw("process_resident_memory_bytes");

    // Refusals by reason.
    let before = Figures::of(&mut client);
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
    for (_, status, request) in &refusals {
        let mut client = new();
        client.send(request.as_bytes());
        assert_eq!(client.answer("GET").status, *status);
    }
    let after = Figures::of(&mut client);
    for (reason, status, _) in &refusals {
        let reason = format!(r#"userd_http_refusals_total{{reason="{reason}"}}"#);
        moved.grown(&before, &after, &[(&reason, 1.0), (&requests("none", "none", *status), 1.0)]);
    }
    moved.grown(&before, &after, &[("userd_http_connections_accepted_total", refusals.len() as f64)]);

    // Connections by state, and descriptors.
    let connections = |state: &str| format!(r#"userd_http_connections{{state="{state}"}}"#);
    let descriptors = Figures::of(&mut client).get("process_open_fds");
    let mut idle: Vec<Client> = (0..5).map(|_| new()).collect();
    for client in &mut idle {
        assert_eq!(client.get("/livez").status, 200);
    }
    moved.becomes(&mut client, &connections("idle"), |count| count == 5.0);
    moved.becomes(&mut client, &connections("working"), |count| count == 1.0);
    moved.becomes(&mut client, "process_open_fds", |count| count >= descriptors + 5.0);
    drop(idle);
    moved.becomes(&mut client, &connections("idle"), |count| count == 0.0);
    let mut half = new();
    half.send(b"POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n");
    moved.becomes(&mut client, &connections("reading"), |count| count == 1.0);
    drop(half);

    // Memory that is held for a body.
    let mut half = new();
    half.send(b"POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n");
    half.send(&[b' '; 30_000]);
    let held = "userd_memory_held_bytes";
    moved.becomes(&mut client, held, |bytes| bytes >= 30_000.0);
    drop(half);
    moved.becomes(&mut client, held, |bytes| bytes < 30_000.0);
    // A refused client that does not close.
    let mut refused = TcpStream::connect(server.addr().unwrap()).unwrap();
    refused.write_all(b"GET / HTTP/2.0\r\n\r\nx").unwrap();
    moved.becomes(&mut client, &connections("closing"), |count| count == 1.0);
    drop(refused);
    moved.becomes(&mut client, &connections("closing"), |count| count == 0.0);

    // Sessions, busy while a statement waits for a lock; the lock is retried.
    let mut blocker = database.client();
    let mut transaction = blocker.transaction().unwrap();
    transaction.execute("update users set name = 'B' where id = 1", &[]).unwrap();
    let mut changing = new();
    changing.send_request("PUT", "/users/1", &[], r#"{"name":"C"}"#);
    let mut changing_too = new();
    changing_too.send_request("PUT", "/users/1", &[], r#"{"name":"D"}"#);
    let sessions = |state: &str| format!(r#"userd_database_sessions{{state="{state}"}}"#);
    let retries = |reason: &str| format!(r#"userd_database_retries_total{{reason="{reason}"}}"#);
    moved.becomes(&mut client, &sessions("busy"), |count| count == 1.0);
    moved.becomes(&mut client, &retries("lock"), |count| count >= 2.0);
    moved.becomes(&mut client, "userd_commands_queued", |count| count >= 1.0);
    transaction.commit().unwrap();
    assert_eq!((changing.answer("PUT").status, changing_too.answer("PUT").status), (200, 200));
    moved.becomes(&mut client, &sessions("busy"), |count| count == 0.0);
    moved.becomes(&mut client, &sessions("idle"), |count| count >= 1.0);
    moved.becomes(&mut client, "userd_commands_queued", |count| count == 0.0);

    // A session whose prepared statement does not fit the table any more: one of the two has it at least.
    assert_eq!(client.get("/users/1").status, 200);
    database.run("alter table users alter column name type varchar(5000)");
    eventually(LONG, "each session is used", || {
        assert_eq!(client.get("/users/1").status, 200);
        Figures::of(&mut client).get(&retries("session")) >= 1.0
    });
    moved.saw(&retries("session"));

    // Connections that break, and a database that stays away, and takes no changes for a while then.
    let read_only = |value: &str| {
        let sql = format!("alter database {} set default_transaction_read_only = {value}", database.name());
        database.run(&format!("begin read write; {sql}; commit"));
    };
    read_only("on");
    proxy.shut();
    assert_eq!(client.get("/users/1").status, 503);
    moved.becomes(&mut client, &retries("connection"), |count| count >= 1.0);
    moved.becomes(&mut client, "userd_database_session_waits_total", |count| count >= 1.0);
    moved.becomes(&mut client, "userd_database_session_wait_seconds_total", |seconds| seconds > 0.1);
    moved.becomes(&mut client, "userd_database_session_timeouts_total", |count| count >= 1.0);
    moved.becomes(&mut client, "userd_ready", |ready| ready == 0.0);
    proxy.set(Weather::Fair);
    moved.becomes(&mut client, "userd_ready", |ready| ready == 1.0);
    moved.becomes(&mut client, "userd_database_read_only", |read_only| read_only == 1.0);
    read_only("off");
    proxy.shut();
    proxy.set(Weather::Fair);
    moved.becomes(&mut client, "userd_database_read_only", |read_only| read_only == 0.0);
    eventually(LONG, "it is back", || client.get("/users/1").status == 200);

    // Hashes that wait, and those that would have to wait for too long.
    let mut logins: Vec<Client> = (0..400).map(|_| new()).collect();
    for (n, login) in logins.iter_mut().enumerate() {
        let body = json!({"email": format!("{n}@example.com"), "password": "x"}).to_string();
        login.send_request("POST", "/users/authenticate", &[], body);
    }
    moved.becomes(&mut client, "userd_hashes_waiting", |count| count > 0.0);
    moved.becomes(&mut client, r#"userd_http_refusals_total{reason="too_many_hashes"}"#, |count| count > 0.0);
    drop(logins);
    moved.becomes(&mut client, "userd_hashes_waiting", |count| count == 0.0);
    moved.becomes(&mut client, cpu, |seconds| seconds > after.get(cpu));

    let all = Figures::of(&mut client).families();
    let still: Vec<_> =
        all.iter().filter(|name| !moved.0.contains(*name) && !FIXED.contains(&name.as_str())).collect();
    assert_eq!(still, Vec::<&String>::new(), "no test has seen them move");
    server.stop();
}

/// The refusals that need a service of their own: too few connections, too little time.
#[test]
fn refusals_of_a_service_that_is_short_of_everything() {
    let database = Database::create();
    let proxy = Proxy::start(&database.socket());
    let mut config =
        Config { database: Target::Url(database.url_at(proxy.port()).into()), ..database.config() };
    config.limits.max_connections = 3;
    config.limits.request_timeout = Duration::from_secs(1);
    config.limits.trusted_proxies = "127.0.0.1".parse().unwrap();
    let service = Service { server: Server::start(config).unwrap(), database };
    let mut client = service.client();
    client.post("/users", ADA);
    let before = Figures::of(&mut client);
    let (mut late, mut third, mut fourth) = (service.client(), service.client(), service.client());
    assert_eq!((late.get("/livez").status, third.get("/livez").status), (200, 200));
    fourth.send(b"");
    assert_eq!(fourth.answer("GET").status, 503);
    // Its statement does not get to the database.
    proxy.set(Weather::Stalled);
    assert_eq!(late.get("/users/1").status, 503);
    proxy.set(Weather::Fair);
    let after = Figures::of(&mut client);
    Moved::default().grown(
        &before,
        &after,
        &[
            (r#"userd_http_refusals_total{reason="not_answered_in_time"}"#, 1.0),
            (r#"userd_http_refusals_total{reason="too_many_connections"}"#, 1.0),
            (&requests("none", "none", 503), 2.0),
            // It was answered before it was done.
            (&requests("GET", "/users/{id}", 200), 0.0),
            (&requests("GET", "/users/{id}", 503), 0.0),
        ],
    );
    assert_eq!(after.get("userd_http_connections_max"), 3.0);
}

#[test]
fn no_text_of_a_client_is_a_label() {
    let service = Service::with(|config| config.api_token = Some(TOKEN.into()));
    let mut client = service.client();
    let bearer = format!("Bearer {TOKEN}");
    let headers = [("Authorization", bearer.as_str())];
    let lines = |client: &mut Client| {
        let answer = client.request("GET", "/metrics", &headers, "");
        assert_eq!(answer.status, 200);
        answer.body
    };
    for (method, target) in [("BREW", "/users/x"), ("BREW", "/x"), ("GET", "/users/x"), ("GET", "/x")] {
        client.request(method, target, &headers, "");
    }
    lines(&mut client);
    let before = lines(&mut client);
    for n in 0..50 {
        client.request("GET", &format!("/users/label{n}"), &headers, "");
        client.request("GET", &format!("/label{n}?label{n}"), &headers, "");
        client.request(&format!("LABEL{n}"), &format!("/users/label{n}"), &headers, "");
        client.request(&format!("LABEL{n}"), &format!("/label{n}"), &headers, "");
    }
    let after = lines(&mut client);
    assert!(!after.to_lowercase().contains("label"), "{after}");
    assert_eq!(before.lines().count(), after.lines().count(), "{before}{after}");
}
