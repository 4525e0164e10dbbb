//! Faults of the database and of the network: no acknowledged change is lost, every client is answered, and the service
//! recovers by itself.

use crate::support::{
    ADA, BUSY, Books, Client, DATABASE_PASSWORD, Database, LONG, Load, OTHER_PASSWORD, Own, PASSWORD,
    Process, Proxy, Service, TOKEN, Weather, check, eventually, free_port, keeps, pause, time_until,
};
use nix::sys::signal::Signal;
use serde_json::json;
use std::{
    fs, mem,
    process::Command,
    time::{Duration, Instant},
};
use userd::Server;

/// How long after the database is back the first success comes, for every client.
const BACK_WITHIN: Duration = Duration::from_secs(1);

/// Default of `REQUEST_TIMEOUT`.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// `REQUEST_TIMEOUT` where a test waits for it.
const DEADLINE: Duration = Duration::from_secs(1);
/// Users that are created before a fault.
const ENOUGH: usize = 50;

/// Waits until a read has an answer again, after a fault that ended a moment ago.
fn serves_again(client: &mut Client) {
    eventually(2 * BACK_WITHIN + BUSY, "it serves", || {
        matches!(client.call("GET", "/users", ""), Ok((200, _)))
    });
}

/// Ends a load whose service was broken until these moments, and holds it against what is stored: no acknowledged change
/// is lost, each request had an answer within the deadline, and each client was served soon after each fault.
fn ends_well(fault: &str, load: Load, backs: &[Instant], deadline: Duration, postgres: &Own) -> Books {
    pause(BACK_WITHIN);
    load.all_succeed_after(*backs.last().expect("a fault"));
    let books = load.stop();
    let outages: Vec<Duration> = backs.iter().map(|back| books.longest_outage(*back)).collect();
    println!("{fault}: {}, back after {outages:?}", books.check(&postgres.users()));
    keeps(2 * BACK_WITHIN, fault, &outages);
    let slowest = books.events.iter().flatten().map(|event| event.took).max();
    assert!(slowest < Some(deadline + BUSY), "{fault}: an answer took {slowest:?}");
    books
}

// Acknowledged writes

#[test]
fn acknowledged_writes_outlive_the_database() {
    let mut postgres = Own::start();
    let mut process = Process::at(&postgres.url(), &[]);
    let url = process.wait_for_url();
    let load = Load::start("kill", 4, &url);
    let mut backs = Vec::new();
    for round in 0..4 {
        load.creates(ENOUGH);
        match round {
            3 => postgres.stop(),
            _ => postgres.kill(),
        }
        // Long enough for clients to meet it; once longer than the service waits for its end.
        pause(Duration::from_millis(if round == 2 { 4000 } else { 50 }));
        postgres.restart();
        backs.push(Instant::now());
        serves_again(&mut Client::new(&url));
    }
    ends_well("PostgreSQL killed and restarted", load, &backs, REQUEST_TIMEOUT, &postgres);
    process.logs("cannot connect to the database: ");
}

#[test]
fn acknowledged_writes_outlive_userd() {
    let postgres = Own::start();
    // Clients keep sending to the old address: no other process may listen there.
    let start = || Process::at(&postgres.url(), &[("PORT", &free_port().to_string())]);
    let mut process = start();
    let load = Load::start("kill", 4, &process.wait_for_url());
    let mut backs = Vec::new();
    for _ in 0..3 {
        load.creates(ENOUGH);
        process.signal(Signal::SIGKILL);
        assert_eq!(process.wait(LONG), -9);
        process = start();
        load.moves_to(&process.wait_for_url());
        backs.push(Instant::now());
    }
    ends_well("userd killed and restarted", load, &backs, REQUEST_TIMEOUT, &postgres);
}

// Restarts

/// No client sent a request while it was away: no client may notice.
#[test]
fn a_restart_without_requests_costs_no_error() {
    let mut postgres = Own::start();
    let mut process = Process::at(&postgres.url(), &[]);
    let url = process.wait_for_url();
    let mut client = Client::new(&url);
    for round in 0..3 {
        for n in 0..8 {
            let body = json!({"name": "n", "email": format!("{round}-{n}@example.com")}).to_string();
            assert_eq!(client.call("POST", "/users", &body).unwrap().0, 201, "{}", process.stderr());
            // Prepared before the restart: what is prepared after it is known not to have been sent.
            let (user, change) = (format!("/users/{}", n + 1), format!(r#"{{"name":"{round}"}}"#));
            assert_eq!(client.call("PUT", &user, &change).unwrap().0, 200);
            assert_eq!(client.call("GET", &user, "").unwrap().0, 200);
        }
        match round {
            0 => postgres.stop(),
            _ => postgres.kill(),
        }
        postgres.restart();
        // Before a write, a session is looked at that was idle for a second.
        pause(Duration::from_secs(1));
        // At once, on all sessions: first the writes, in the next round the reads.
        let (method, body, name) =
            if round == 1 { ("GET", "", "1") } else { ("PUT", r#"{"name":"m"}"#, "m") };
        let mut clients = [(); 8].map(|()| Client::new(&url));
        for (n, client) in clients.iter_mut().enumerate() {
            client.send_request(method, &format!("/users/{}", n + 1), &[], body);
        }
        for client in &mut clients {
            assert_eq!(client.answer(method).status, 200, "round {round}: {}", process.stderr());
        }
        for n in 0..8 {
            let (_, user) = client.call("GET", &format!("/users/{}", n + 1), "").unwrap();
            assert_eq!(user["name"], name, "round {round}");
        }
    }
}

/// While it is away, a request waits for a session as long as at any other time; what needs none is answered at once.
#[test]
fn answers_while_the_database_is_away() {
    let mut postgres = Own::start();
    let mut process = Process::at(&postgres.url(), &[("DB_ACQUIRE_TIMEOUT", "1.5")]);
    let url = process.wait_for_url();
    let load = Load::start("away", 12, &url);
    load.creates(ENOUGH);
    postgres.stop();
    let asked = [
        ("POST", "/users", "{}", 400),
        ("GET", "/nothing", "", 404),
        ("GET", "/users/1", "", 503),
        ("GET", "/users", "", 503),
        ("PUT", "/users/1", r#"{"name":"n"}"#, 503),
        ("DELETE", "/users/1", "", 503),
        ("POST", "/users", r#"{"name":"n","email":"n@example.com"}"#, 503),
        ("POST", "/users/authenticate", r#"{"email":"n@example.com","password":"correct horse"}"#, 503),
    ];
    let mut clients = asked.map(|_| Client::new(&url));
    let start = Instant::now();
    for (client, (method, target, body, _)) in clients.iter_mut().zip(asked) {
        client.send_request(method, target, &[], body);
    }
    let mut at_once = Vec::new();
    for (client, (method, target, _, expected)) in clients.iter_mut().zip(&asked) {
        assert_eq!(client.answer(method).status, *expected, "{method} {target}");
        at_once.extend((*expected != 503).then(|| start.elapsed()));
    }
    keeps(Duration::from_millis(500), "what needs no session", &at_once);
    let mut backs = Vec::new();
    for round in 0..3 {
        if round > 0 {
            postgres.stop();
        }
        postgres.restart();
        backs.push(Instant::now());
        serves_again(&mut Client::new(&url));
    }
    // After the first success, no request fails for what is left of the outage.
    let first = Instant::now();
    let books = ends_well("PostgreSQL stopped for seconds", load, &backs, REQUEST_TIMEOUT, &postgres);
    for event in books.events.iter().flatten().filter(|event| event.sent > first) {
        assert!(event.succeeded(), "{event:?}");
    }
}

// Hangs

/// `DB_POOL_SIZE`.
const SESSIONS: i64 = 8;

/// A service that gives up soon, and a way to it that may be broken.
struct Fragile {
    postgres: Own,
    proxy: Proxy,
    process: Process,
    url: String,
    size: (usize, usize),
}

impl Fragile {
    fn start() -> Fragile {
        let postgres = Own::start();
        let proxy = Proxy::start(&postgres.socket());
        let database =
            format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode=disable", proxy.port());
        let mut process = Process::at(&database, &[("REQUEST_TIMEOUT", "1"), ("DB_ACQUIRE_TIMEOUT", "1")]);
        let url = process.wait_for_url();
        assert_eq!(Client::new(&url).post("/users", ADA).status, 201);
        let mut fragile = Fragile { postgres, proxy, process, url, size: (0, 0) };
        eventually(LONG, "the pool is full", || fragile.count_sessions() == SESSIONS);
        fragile.size = fragile.process.size();
        fragile
    }

    fn count_sessions(&self) -> i64 {
        let sql = "select count(*) from pg_stat_activity where application_name = 'userd'";
        self.postgres.client().query_one(sql, &[]).unwrap().get(0)
    }

    /// Threads, descriptors and sessions are as many as before.
    fn assert_as_before(&self) {
        eventually(LONG, "as many sessions as before", || self.count_sessions() == SESSIONS);
        // The connections of clients that have left are closed soon after, and tiny_http's idle threads end.
        let (threads, descriptors) = self.size;
        let mut found = (0, 0);
        let deadline = Instant::now() + LONG;
        while found.0 == 0 || found.0 > threads || found.1 > descriptors {
            assert!(Instant::now() < deadline, "threads and descriptors: {found:?}, not {:?}", self.size);
            pause(Duration::from_millis(5));
            found = self.process.size();
        }
    }

    /// A fault under load: each client is answered in time, and is served soon after it.
    fn breaks(&self, fault: &str, time: Duration, set: impl Fn(&Proxy, bool)) {
        let name = fault.replace(|sign: char| !sign.is_ascii_alphanumeric(), "-");
        let load = Load::start(&name, 12, &self.url);
        load.creates(ENOUGH);
        let mut client = Client::new(&self.url);
        let (mut backs, mut took) = (Vec::new(), Vec::new());
        for time in [time, DEADLINE / 2, DEADLINE / 2] {
            set(&self.proxy, true);
            let start = Instant::now();
            while start.elapsed() < time {
                // It never depends on the database, so it is answered while any worker is free, else by the frontend.
                let asked = Instant::now();
                let (status, _) = client.call("GET", "/", "").unwrap();
                assert!(status == 200 || status == 503, "{status}");
                took.push(asked.elapsed());
                pause(Duration::from_millis(50));
            }
            set(&self.proxy, false);
            backs.push(Instant::now());
            serves_again(&mut client);
        }
        keeps(DEADLINE, fault, &took);
        ends_well(fault, load, &backs, DEADLINE, &self.postgres);
        drop(client);
        self.assert_as_before();
    }
}

/// Past the request deadline, and past the point where the workers that hang are freed.
const HANG: Duration = Duration::from_millis(3500);

/// One session of several is stopped: the others go on, and it does once its server goes on.
#[test]
fn a_session_that_is_stopped() {
    let fragile = Fragile::start();
    let session: i32 = {
        // The session that was used last is the one that is used next.
        let mut client = Client::new(&fragile.url);
        assert_eq!(client.call("GET", "/users", "").unwrap().0, 200);
        let sql = "select pid from pg_stat_activity where application_name = 'userd' \
            order by state_change desc limit 1";
        fragile.postgres.client().query_one(sql, &[]).unwrap().get(0)
    };
    let send = |signal| nix::sys::signal::kill(nix::unistd::Pid::from_raw(session), signal).unwrap();
    send(Signal::SIGSTOP);
    let load = Load::start("one", 8, &fragile.url);
    pause(HANG);
    ends_well("one session stopped", load, &[Instant::now()], DEADLINE, &fragile.postgres);
    send(Signal::SIGCONT);
    fragile.assert_as_before();
}

#[test]
fn a_network_that_stalls_cuts_resets_and_delays() {
    let fragile = Fragile::start();
    let weather =
        |weather| move |proxy: &Proxy, broken| proxy.set(if broken { weather } else { Weather::Fair });
    fragile.breaks("network stalled", HANG, weather(Weather::Stalled));
    let moment = Duration::from_millis(300);
    fragile.breaks("connections cut", moment, |proxy, _| proxy.cut());
    fragile.breaks("connections reset", moment, |proxy, _| proxy.reset());
    fragile.breaks("network slow by 300 ms", Duration::from_secs(2), weather(Weather::Slow(moment)));
}

// Statements

/// A read is repeated if its session ends while it is executed: here it waits for a lock.
#[test]
fn reads_outlive_their_sessions() {
    let service = Service::with(|config| config.limits.request_timeout = Duration::from_secs(100));
    service.check(format!("POST /users {ADA} => 201 *"));
    let mut client = service.client();
    for target in ["/users/1", "/users"] {
        let mut other = service.database.transaction("lock table users");
        client.send_request("GET", target, &[], "");
        let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity \
            where datname = current_database() and application_name = 'userd' and wait_event_type = 'Lock'";
        eventually(LONG, "a session is ended", || {
            other.batch_execute("select pg_stat_clear_snapshot()").unwrap();
            other.query_one(end, &[]).unwrap().get::<_, i64>(0) > 0
        });
        drop(other);
        let answer = client.answer("GET");
        assert!(answer.status == 200 && answer.body.contains("Ada"), "{answer:?}");
    }
}

/// A read whose sessions end, the second one, too, was not answered, and may be repeated. A change that was sent is 500.
#[test]
fn a_read_whose_sessions_end_twice() {
    const HIDE: &str =
        "alter table users rename to kept; create view users as select * from kept where (select ends())";
    const SHOW: &str = "drop view users; alter table kept rename to users";
    let service = Service::with(|config| config.auth_attempts = 0);
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    service.check(format!("POST /users {ada} => 201 *"));
    let ends = |how: &str| {
        let body = format!("$$ begin {how}; return true; end $$");
        format!("create or replace function ends() returns boolean language plpgsql as {body}")
    };
    let raise = |code: &str| format!("raise 'raised by the tests' using errcode = '{code}'");
    let end = "perform pg_terminate_backend(pg_backend_pid()), pg_sleep(20)".to_owned();
    // The server ends the session itself, and poolers report such an end.
    for ending in [end, raise("08006"), raise("08P01"), raise("57P01"), raise("57P02"), raise("57P03")] {
        service.database.run(&format!("{}; {HIDE}", ends(&ending)));
        let rows = r#"
            GET|HEAD /users/1 => LATER
            GET /users => LATER
            GET /users?email=ada@example.com => LATER
            POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => LATER
            PUT /users/1 {"unknown":1} => LATER
            PATCH /users/1 {"password":null} => LATER
            PUT /users/1 {"name":"Eve"} => 500 {"error":"Database error"}
            "#;
        service.check(rows.replace("LATER", r#"503 <Retry-After: 1> {"error":"Service unavailable"}"#));
        service.database.run(SHOW);
        service.check("GET /users/1 => 200 {\"id\":\"1\",\"name\":\"Ada\",*");
        assert!(service.client().opens("ada@example.com", PASSWORD), "{ending}");
    }
    // The network ends them without a word.
    let (proxy, config) = service.database.proxied();
    let server = Server::start(config).expect("a server starts");
    let mut client = Client::new(server.base_url());
    assert_eq!(client.get("/users/1").status, 200);
    service.database.run(&format!("{}; {HIDE}", ends("perform pg_sleep(60)")));
    client.send_request("GET", "/users/1", &[], "");
    for count in ["1", "2"] {
        let asleep = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and datname = current_database()";
        eventually(LONG, "a session executes the read", || service.database.value(asleep) == count);
        proxy.cut();
    }
    let answer = client.answer("GET");
    assert_eq!((answer.status, answer.header("Retry-After")), (503, Some("1")), "{answer:?}");
    service.database.end_sessions();
    service.database.run(SHOW);
    serves_again(&mut client);
}

/// The database ends a statement at half of the request's time: once the client has its 503, none is executed.
#[test]
fn a_slow_statement_has_ended_before_its_503() {
    const BOB: &str = r#"{"name":"Bob","email":"bob@example.com"}"#;
    let service = Service::with(|config| config.limits.request_timeout = Duration::from_secs(2));
    let mut client = service.client();
    let ada = client.post("/users", ADA);
    assert_eq!(ada.status, 201);
    service.database.run(
        "create function stay() returns trigger language plpgsql as
             $$ begin perform pg_sleep(60); return coalesce(new, old); end $$;
         create trigger stay before insert or update or delete on users for each row execute function stay()",
    );
    for (method, path) in [("POST", "/users"), ("PUT", "/users/1"), ("DELETE", "/users/1")] {
        let body = if method == "DELETE" { "" } else { BOB };
        assert_eq!(client.request(method, path, &[], body).status, 503, "{method}");
        let executed = "select count(*) from pg_stat_activity where datname = current_database()
            and state = 'active' and pid <> pg_backend_pid()";
        assert_eq!(service.database.value(executed), "0", "{method}");
    }
    let users = client.get("/users").json();
    assert_eq!((&users["total"], &users["data"][0]), (&json!(1), &ada.json()));
}

/// A statement that is prepared for the first time takes a round trip more. If that takes too long, the change is not sent.
#[test]
fn a_change_that_is_prepared_too_late_is_not_sent() {
    let database = Database::create();
    let (proxy, mut config) = database.proxied();
    config.db_pool_size = 1;
    config.limits.request_timeout = Duration::from_secs(2);
    let server = Server::start(config).expect("a server");
    let mut client = Client::new(server.base_url());
    assert_eq!(client.post("/users", ADA).status, 201);
    for (method, body) in [("PUT", r#"{"name":"Eve"}"#), ("DELETE", "")] {
        proxy.hold_next();
        assert_eq!(client.request(method, "/users/1", &[], body).status, 503, "{method}");
        proxy.release();
        // The only session executes the read after whatever was sent before.
        assert_eq!(client.get("/users/1").json()["name"], "Ada", "{method}");
    }
}

// Secrets

/// Passwords, hashes and tokens while everything fails, with all that the log can say. (The log of every other
/// process of the tests is read for them as well, when it ends.)
#[test]
fn secrets_are_kept_whatever_breaks() {
    let postgres = Own::start();
    let proxy = Proxy::start(&postgres.socket());
    let url = format!(
        "postgres://postgres:{DATABASE_PASSWORD}@127.0.0.1:{}/postgres?sslmode=disable",
        proxy.port()
    );
    let token = [("API_TOKEN", TOKEN), ("LOG_LEVEL", "trace"), ("DB_ACQUIRE_TIMEOUT", "0.3")];
    let mut process = Process::at(&url, &token);
    let mut client = Client::new(&process.wait_for_url());
    let bearer = format!("Bearer {TOKEN}");
    let wrong = format!("Bearer {TOKEN}-");
    let create =
        |n: u32| json!({"name": "n", "email": format!("{n}@example.com"), "password": PASSWORD}).to_string();
    let change = json!({"password": OTHER_PASSWORD}).to_string();
    let credentials = json!({"email": "0@example.com", "password": OTHER_PASSWORD}).to_string();
    let mut ask = |n: u32| {
        for token in [&bearer, &wrong] {
            let headers = [("Authorization", token.as_str())];
            client.request("POST", "/users", &headers, create(n));
            client.request("POST", "/users", &headers, format!("{{\"password\": \"{PASSWORD}\""));
            client.request("PUT", "/users/1", &headers, &change);
            client.request("POST", "/users/authenticate", &headers, &credentials);
            client.request("GET", "/users/1", &headers, "");
            client.request("GET", &format!("/users?page=0&token={TOKEN}"), &headers, "");
        }
    };
    ask(0);
    postgres.run("alter table credentials add check (length(password_hash) < 5) not valid");
    ask(1);
    postgres.run("alter table credentials rename to gone");
    ask(2);
    proxy.cut();
    ask(3);
    proxy.set(Weather::Stalled);
    proxy.cut();
    ask(4);
    process.logs("(23514)");
    process.logs("insert into credentials");
}

// Answers of the database

/// Raises the SQLSTATE that a new address begins with.
const RAISE: &str = "
    create function raise() returns trigger language plpgsql as $$ begin
        raise exception using errcode = upper(split_part(new.email, '@', 1)), message = 'raised by the tests';
    end $$;
    create trigger raise before insert on users for each row when (new.email like '%@raise.example') execute function raise()";

/// The error that a session of ours is refused with, when all that it can see is what it is told.
#[test]
fn errors_of_the_database() {
    let database = Database::create();
    database.run(RAISE);
    let mut process = Process::on(&database, &[("DB_POOL_SIZE", "1"), ("REQUEST_TIMEOUT", "1")]);
    let mut client = Client::new(&process.wait_for_url());
    let body = |email: &str| json!({"name": "n", "email": email}).to_string();
    assert_eq!(client.call("POST", "/users", &body("n@example.com")).unwrap().0, 201);
    let session = || {
        let sql = "select min(pid) from pg_stat_activity where application_name = 'userd' and datname = current_database()";
        database.value(sql)
    };
    let mut before = session();
    // Disk full, out of memory, a limit of the configuration, read-only. No privilege, a broken index. Serialization
    // failure, deadlock and lock not available: retried until the request's time is up. And a statement that was
    // cancelled.
    for (code, status) in [
        ("53100", 503),
        ("53200", 503),
        ("53400", 503),
        ("25006", 503),
        ("42501", 500),
        ("XX002", 500),
        ("40001", 503),
        ("40P01", 503),
        ("55P03", 503),
        ("57014", 503),
        ("23505", 409),
    ] {
        let answer = client.call("POST", "/users", &body(&format!("{code}@raise.example"))).unwrap();
        let text = match status {
            409 => "Already exists",
            503 => "Service unavailable",
            _ => "Database error",
        };
        assert_eq!(answer, (status, json!({"error": text})), "{code}");
        assert_eq!(client.call("GET", "/users/1", "").unwrap().0, 200, "after {code}");
        if status == 500 {
            process.logs(&format!("({code}); SQL: insert into users"));
        }
        if code == "25006" {
            // Another session might take the change.
            assert_ne!(mem::replace(&mut before, session()), before);
        }
        if code.starts_with("53") || code == "25006" {
            process.logs(&format!(
                "the database cannot execute a statement now: ERROR: raised by the tests ({code})"
            ));
        }
    }
    assert_eq!(session(), before, "the connection was usable all the time");
    assert!(!process.stderr().contains("@raise."), "the log tells values: {}", process.stderr());
}

/// The disk of a managed database fills up: every change gets 503, and reads go on.
#[test]
fn a_database_that_takes_no_changes() {
    let postgres = Own::start();
    let mut process = Process::at(&postgres.url(), &[]);
    let mut client = process.client();
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    assert_eq!(client.post("/users", &ada).status, 201);
    postgres.set("default_transaction_read_only", "on");
    eventually(LONG, "changes are refused", || client.put("/users/1", r#"{"name":"a"}"#).status != 200);
    // A replica that starts now needs nothing but what it reads.
    let mut replica = Process::at(&postgres.url(), &[]);
    check(&mut replica.client(), "GET /users/1 => 200 *\nPUT /users/1 {\"name\":\"b\"} => 503 *");
    let refused = r#"503 <Retry-After: 1> {"error":"Service unavailable"}"#;
    let rows = r#"
        POST /users {"name":"n","email":"n@example.com"} => REFUSED
        POST /users <Idempotency-Key: k> {"name":"n","email":"n@example.com"} => REFUSED
        POST /users {"name":"n","email":"n@example.com","password":"battery staple"} => REFUSED
        PUT|PATCH|DELETE /users/1 {"name":"b"} => REFUSED
        DELETE /users/1 <If-Match: *> => REFUSED
        "#;
    check(&mut client, &rows.replace("REFUSED", refused));
    let start = Instant::now();
    // For longer than it would take to become unready.
    while start.elapsed() < Duration::from_millis(2500) {
        let rows = r#"
            GET /users/1 => 200 {"id":"1","name":"Ada","email":"ada@example.com",*
            GET /users => 200 {"data":[{"id":"1","name":"Ada","email":"ada@example.com",<times>}],"total":1,*
            GET /readyz => 200 *
            "#;
        check(&mut client, rows);
        pause(Duration::from_millis(50));
    }
    assert!(client.opens("ada@example.com", PASSWORD));
    process.logs("(25006)");
    let tries = ["a", "b", "c"].map(|name| {
        postgres.set("default_transaction_read_only", "on");
        eventually(LONG, "changes are refused", || client.put("/users/1", r#"{"name":"d"}"#).status != 200);
        postgres.set("default_transaction_read_only", "off");
        let body = json!({ "name": name }).to_string();
        time_until("changes are taken", || client.put("/users/1", &body).status == 200)
    });
    keeps(BACK_WITHIN, "changes are taken", &tries);
    assert_eq!(client.get("/users/1").json()["name"], "c");
    // No refused request has made a change, and no key was kept.
    let rows = r#"
        GET /users => 200 {"data":[{"id":"1","name":"c","email":"ada@example.com",<times>}],"total":1,*
        POST /users <Idempotency-Key: k> {"name":"k","email":"k@example.com"} => 201 <!Idempotency-Replayed> *
        GET /users?email=k@example.com => 200 {"data":[{"id":"2","name":"k",*
        "#;
    check(&mut client, rows);
}

/// A role that may have two sessions, and then none.
#[test]
fn too_many_connections() {
    let postgres = Own::start();
    postgres.run("create role app login connection limit 2");
    postgres.run("create database app owner app");
    let url = postgres.url().replace("user=postgres", "user=app").replace("dbname='postgres'", "dbname=app");
    let mut process = Process::at(&url, &[("DB_ACQUIRE_TIMEOUT", "5")]);
    let url = process.wait_for_url();
    let load = Load::start("crowd", 12, &url);
    pause(BACK_WITHIN);
    process.logs("(53300)");
    load.all_succeed_after(Instant::now());
    let books = load.stop();
    assert!(books.events.iter().flatten().all(|event| event.succeeded()), "two sessions are enough");

    let mut client = Client::new(&url);
    let mut answers = |status| client.call("GET", "/users", "").unwrap().0 == status;
    let tries = [(); 3].map(|()| {
        postgres.run("alter role app connection limit 0");
        postgres.run("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'");
        eventually(LONG, "no client is served", || answers(503));
        postgres.run("alter role app connection limit 2");
        time_until("it serves", || answers(200))
    });
    keeps(BACK_WITHIN, "it serves", &tries);
}

/// A connect without a descriptor is an error like any other: nothing panics, and the pool is whole afterwards.
#[test]
fn no_descriptor_is_left() {
    let database = Database::create();
    let mut process = Process::on(&database, &[("DB_ACQUIRE_TIMEOUT", "0.5"), ("DB_POOL_SIZE", "2")]);
    let mut client = process.client();
    assert_eq!(client.post("/users", ADA).status, 201);
    let limit = |most: usize| {
        let program = Command::new("/usr/bin/prlimit")
            .args(["--pid", &process.id().to_string(), &format!("--nofile={most}:")])
            .status();
        assert!(program.expect("a program of every Debian").success());
    };
    database.has_sessions(2);
    // None at all, and then some, which suffice for a part of a connect.
    let numbers = || -> Vec<usize> {
        let files = fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap();
        files.filter_map(|file| file.unwrap().file_name().to_str()?.parse().ok()).collect()
    };
    database.end_sessions();
    for more in [0, 1, 3, 6, 10] {
        // The numbers of descriptors that are closed are free below the largest.
        let free = |most: usize| (0..most).filter(|number| !numbers().contains(number)).count();
        let most = (0..4096).find(|most| free(*most) >= more).unwrap();
        limit(most);
        database.end_sessions();
        eventually(LONG, "no session is left", || client.get("/users/1").status == 503);
        process.logs("cannot connect to the database: ");
        assert_eq!(client.get("/livez").status, 200);
    }
    process.logs("Too many open files");
    let tries = [(); 3].map(|()| {
        limit(0);
        database.end_sessions();
        eventually(LONG, "no session is left", || client.get("/users/1").status == 503);
        limit(1024);
        time_until("it serves", || client.get("/users/1").status == 200)
    });
    keeps(BACK_WITHIN, "it serves", &tries);
    let name = r#"{"name":"Ada Lovelace"}"#;
    assert_eq!(client.put("/users/1", name).status, 200);
    assert_eq!(client.get("/users/1").json()["name"], "Ada Lovelace");
    database.has_sessions(2);
    assert!(!process.stderr().contains("panicked"), "{}", process.stderr());
}

#[test]
fn deadlocks_and_conflicts_with_others() {
    let database = Database::create();
    let name = database.name();
    // Looked for once a wait, after this long: the other side has to wait as well by then.
    database.run(&format!("alter database {name} set deadlock_timeout = '4s'"));
    // So that it may try whatever the order in which both are woken.
    let mut process = Process::on(&database, &[("REQUEST_TIMEOUT", "60")]);
    let mut client = process.client();
    for name in ["a", "b"] {
        let body = json!({"name": name, "email": format!("{name}@example.com")}).to_string();
        assert_eq!(client.post("/users", &body).status, 201);
    }
    let mut other = database.transaction(
        "set deadlock_timeout = '1h'; insert into users (name, email) values ('c', 'c@example.com'); savepoint s",
    );
    client.send_request("PUT", "/users/1", &[], r#"{"email":"c@example.com"}"#);
    // More than once it holds user 1 and waits for the address, while we hold the address and wait for user 1.
    for _ in 0..2 {
        other.batch_execute("rollback to s").unwrap();
        eventually(LONG, "it holds user 1", || {
            let free = other.query("select from users where id = 1 for update skip locked", &[]).unwrap();
            other.batch_execute("rollback to s").unwrap();
            free.is_empty()
        });
        database.waits_for_a_lock();
        other.batch_execute("update users set name = 'd' where id = 1").unwrap();
    }
    other.batch_execute("commit").unwrap();
    // It lost each deadlock, and was retried.
    assert_eq!(client.answer("PUT").status, 409);
    let found = "select name || ' ' || email from users where id = 1";
    assert_eq!(database.value(found), "d a@example.com");

    // Its snapshot would be older than our change.
    database.run(&format!("alter database {name} set default_transaction_isolation = 'repeatable read'"));
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    let mut other = database.transaction("update users set name = 'e' where id = 1");
    client.send_request("PUT", "/users/1", &[], r#"{"name":"f"}"#);
    database.waits_for_a_lock();
    other.batch_execute("commit").unwrap();
    assert_eq!(client.answer("PUT").status, 200);
    assert_eq!(database.value(found), "f a@example.com");
}

// Panics

/// Panics on purpose where a line to be logged, or the id of its request, holds this: the one way into a handler that is
/// open to a test.
const PANIC: &str = "panic, please";
const PANIC_ID: &str = "panic-please";

struct PanickingLogger;

impl log::Log for PanickingLogger {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let line = record.args().to_string();
        let id = record.key_values().get(log::kv::Key::from("request_id"));
        // The line about the panic panics, too.
        let is_refusal = line.starts_with("503: too many connections");
        assert!(
            !is_refusal && !line.contains(PANIC) && id.is_none_or(|id| id.to_string() != PANIC_ID),
            "{PANIC}"
        );
    }

    fn flush(&self) {}
}

/// A panic loses one line or one answer, and neither a worker nor a place of one.
#[test]
fn handlers_and_lines_that_panic() {
    log::set_logger(&PanickingLogger).expect("no other test sets a logger");
    log::set_max_level(log::LevelFilter::Info);
    let service = Service::with(|config| config.auth_attempts = 0);
    service.database.run(&RAISE.replace("raised by the tests", PANIC));
    // More often than there are workers.
    for n in 0..20 {
        service.check(format!(
            r#"
            POST /users {{"name":"n","email":"XX000@raise.example"}} => 500 {{"error":"Internal server error"}}
            POST /users {{"name":"n","email":"{n}@example.com"}} => 201 *
            "#
        ));
        // The access line of what a receiver answers, of a read and of a change; each answer is sent before its line.
        let id = [("X-Request-Id", PANIC_ID)];
        let rows = [
            ("GET", "/metrics", "", 200),
            ("GET", "/other", "", 404),
            ("GET", "/users/7", "", 404),
            ("GET", "/users?perPage=1", "", 200),
            ("PUT", "/users/7", r#"{"name":"n"}"#, 404),
            ("POST", "/users/authenticate", r#"{"email":"n@example.com","password":"long enough"}"#, 401),
        ];
        let mut client = service.client();
        for (method, target, body, status) in rows {
            assert_eq!(client.request(method, target, &id, body).status, status, "{n}: {method} {target}");
        }
        // A refusal of the frontend's: its client gets no answer, and all others do.
        let malformed = [id[0], ("Content-Length", "x")];
        assert!(service.client().try_request("GET", "/", &malformed, "").is_err(), "{n}");
    }
    assert_eq!(service.client().get("/users").json()["total"], 20);
    service.server.stop();
    // The line about a client that is turned away: the client gets its answer.
    let service = Service::with(|config| config.limits.max_connections = 1);
    let mut client = service.client();
    client.send(b"GET /users HTTP/1.1\r\n");
    assert_eq!(service.client().get("/users").status, 503);
    client.send(b"Host: a\r\n\r\n");
    assert_eq!(client.answer("GET").status, 200);
}
