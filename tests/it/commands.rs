//! States, failures, the journal and time on command: of a server in this process, and of the command.

use crate::support::{
    ADA, ADA_1, Answer, Client, Compared, GRACE, LONG, OTHER_PASSWORD, PASSWORD, TempDir, Tested,
    assert_no_secret, check, eventually,
};
use serde_json::{Value, json};
use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};
use userd::testing::{Fault, TestServer};

fn create(email: &str) -> String {
    format!("POST /users HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{email}", email.len())
}

/// Sends bytes on a connection of its own. Returns what comes until its end.
fn exchange(server: &TestServer, bytes: &str) -> String {
    let mut stream = TcpStream::connect(server.addr().unwrap()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut all = Vec::new();
    if let Err(error) = stream.read_to_end(&mut all) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "it is not closed");
    }
    String::from_utf8(all).unwrap()
}

/// Sets a flag at the end of its scope, also by a panic.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn total(server: &TestServer) -> serde_json::Value {
    Client::new(server.base_url()).get("/users").json()["total"].clone()
}

#[test]
fn faults_of_a_create() {
    for (fault, begins, length, users) in [
        (Fault::AnswerLost, "", Some(0), 1),
        (Fault::Refused, "", Some(0), 0),
        (Fault::Cut(0), "", Some(0), 1),
        (Fault::Cut(20), "HTTP/1.1 201 Created", Some(20), 1),
        // Longer than the answer: all of it, and the end of the connection.
        (Fault::Cut(usize::MAX), "HTTP/1.1 201 Created\r\n", None, 1),
    ] {
        let server = Compared(TestServer::start());
        server.fail(fault, "POST", "/users", 1);
        let answer = exchange(&server, &create(ADA));
        assert!(answer.starts_with(begins), "{fault:?}: {answer}");
        assert!(length.is_none_or(|length| answer.len() == length), "{fault:?}: {answer}");
        assert_eq!((server.faults_left(), total(&server)), (0, json!(users)), "{fault:?}");
        let status = Client::new(server.base_url()).post("/users", ADA).status;
        assert_eq!(status, if users == 1 { 409 } else { 201 }, "{fault:?}");
    }
}

/// Unavailable on command: the connection is kept, and nothing is changed.
#[test]
fn a_fault_meets_its_method_and_path_alone() {
    let server = Compared(TestServer::start());
    let mut client = Client::new(server.base_url());
    server.fail(Fault::Unavailable, "POST", "/users", 2);
    server.fail(Fault::Unavailable, "HEAD", "/users/1", 1);
    server.fail(Fault::Unavailable, "GET", "/users", 1);
    check(
        &mut client,
        &format!(
            r#"
            POST /users {ADA} => 503 <Connection: keep-alive> *
            HEAD /users => 200
            POST /users {ADA} => 503 <Connection: keep-alive> *
            POST /users {ADA} => 201 {ADA_1}
            GET /users/1 => 200 {ADA_1}
            HEAD /users/1 => 503
            HEAD /users/1 => 200
            GET /users?page=1 => 503 *
            GET /users?page=1 => 200 *
            "#
        ),
    );
    assert_eq!(server.faults_left(), 0);
}

#[test]
fn slow_answers_hold_no_worker_and_past_the_deadline_are_503() {
    const SLOW: usize = 20;
    let server = Compared(TestServer::with(|config| config.limits.request_timeout = Duration::from_secs(3)));
    server.fail(Fault::Slow(Duration::from_secs(1)), "POST", "/users", SLOW as u32);
    let answered = AtomicUsize::new(0);
    thread::scope(|scope| {
        for n in 0..SLOW {
            let (server, answered) = (&server, &answered);
            scope.spawn(move || {
                let body = json!({"name": "User", "email": format!("{n}@example.com")}).to_string();
                let start = Instant::now();
                assert_eq!(Client::new(server.base_url()).post("/users", body).status, 201);
                assert!(start.elapsed() >= Duration::from_secs(1));
                answered.fetch_add(1, Ordering::SeqCst);
            });
        }
        let mut client = Client::new(server.base_url());
        eventually(LONG, "all are executed", || client.get("/users").json()["total"] == SLOW);
        assert_eq!(server.faults_left(), 0);
    });
    assert_eq!(answered.into_inner(), SLOW);

    server.fail(Fault::Slow(Duration::from_secs(3600)), "DELETE", "/users/1", 1);
    let mut client = Client::new(server.base_url());
    assert_eq!(client.delete("/users/1").status, 503);
    assert_eq!(client.get("/users/1").status, 404, "it is executed");
}

#[test]
fn a_reset_is_a_new_beginning() {
    let server = Compared(TestServer::with(|config| config.auth_attempts = 1));
    let mut client = Client::new(server.base_url());
    for _ in 0..3 {
        let key = [("Idempotency-Key", "k")];
        assert_eq!(client.request("POST", "/users", &key, ADA).id(), "1");
        assert_eq!(client.post("/users", GRACE).status, 201);
        assert_eq!(client.request("POST", "/users", &key, GRACE).status, 422);
        let with_password = json!({"password": PASSWORD}).to_string();
        assert_eq!(client.put("/users/1", with_password).status, 200);
        assert_eq!(client.login("ada@example.com", PASSWORD).status, 200);
        assert_eq!(client.login("ada@example.com", OTHER_PASSWORD).status, 401);
        assert_eq!(client.login("ada@example.com", PASSWORD).status, 429);
        server.fail(Fault::Refused, "GET", "/users", 1);
        server.reset();
        assert_eq!(server.faults_left(), 0);
        assert_eq!(client.get("/users").json()["total"], 0);
        assert_eq!(client.login("ada@example.com", PASSWORD).status, 401);
        server.reset();
    }
}

/// Eight clients create users, each with a key of its own, and call `then` with each answer. Meanwhile `work` is called
/// eight times, once some users more are created.
fn while_users_are_created(
    server: &TestServer,
    then: impl Fn(&mut Client, &Answer) + Sync,
    work: impl Fn(usize),
) {
    let (ended, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        // The clients end if the work panics, too.
        let _end = SetWhenDropped(&ended);
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = Client::new(server.base_url());
                while !ended.load(Ordering::SeqCst) {
                    let n = count.fetch_add(1, Ordering::SeqCst);
                    let body = json!({"name": "User", "email": format!("{n}@example.com")}).to_string();
                    let key = [("Idempotency-Key", &*n.to_string())];
                    let created = client.request("POST", "/users", &key, body);
                    assert_eq!(created.status, 201, "{created:?}");
                    then(&mut client, &created);
                }
            });
        }
        for round in 1..=8 {
            let begun = count.load(Ordering::SeqCst);
            eventually(LONG, "some are created", || count.load(Ordering::SeqCst) > begun + 20);
            work(round);
        }
    });
}

#[test]
fn a_reset_while_requests_are_in_flight() {
    let server = Compared(TestServer::with(|config| (config.workers, config.db_pool_size) = (8, 8)));
    let read_and_delete = |client: &mut Client, created: &Answer| {
        let read = client.get(&format!("/users/{}", created.id()));
        assert!([200, 404].contains(&read.status), "{read:?}");
        let deleted = client.delete(&format!("/users/{}", created.id()));
        assert!([204, 404].contains(&deleted.status), "{deleted:?}");
        client.get("/users?page=1");
    };
    while_users_are_created(&server, read_and_delete, |_| server.reset());
    server.reset();
    let mut client = Client::new(server.base_url());
    assert_eq!(client.get("/users").json()["total"], 0);
    assert_eq!(client.request("POST", "/users", &[("Idempotency-Key", "0")], ADA).id(), "1");
}

/// Panics if the work does.
fn is_refused(work: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}

#[test]
fn saved_states_come_back_as_they_were() {
    let server = Compared(TestServer::with(|config| config.auth_attempts = 1));
    let mut client = Client::new(server.base_url());
    let create = |client: &mut Client, key: &str, email: &str| {
        let body = json!({"name": "User", "email": email, "password": PASSWORD}).to_string();
        client.request("POST", "/users", &[("Idempotency-Key", key)], body)
    };
    let first = create(&mut client, "of-ada", "ada@example.com");
    assert_eq!((first.status, first.id()), (201, "1".to_owned()));
    server.seed(5000);
    // The next id is one that no user has had.
    assert_eq!(client.delete("/users/5001").status, 204);
    let page = client.get("/users?page=334").body;
    server.save("before");
    for round in 0..2 {
        let (journal, eve) = (server.requests().len(), &format!("{round}@example.com"));
        assert_eq!(client.put("/users/1", json!({"name": "Eve", "password": null}).to_string()).status, 200);
        assert_eq!(client.delete("/users/2").status, 204);
        assert_eq!(create(&mut client, "of-grace", "grace@example.com").id(), "5002");
        assert_eq!(client.login(eve, OTHER_PASSWORD).status, 401);
        server.fail(Fault::Refused, "GET", "/users", 1);
        // Refused, nothing is changed.
        for name in ["", "after", "Before", "a b", "a\nb", "é", "before;", &"a".repeat(41)] {
            assert!(is_refused(|| server.restore(name)), "{name}");
            assert!(name == "after" || is_refused(|| server.save(name)), "{name}");
        }
        assert_eq!((server.faults_left(), client.login(eve, OTHER_PASSWORD).status), (1, 429));
        assert_eq!(client.get("/users/1").json()["name"], "Eve");
        server.save(&"z".repeat(40));
        server.restore("before");
        assert_eq!(server.faults_left(), 0);
        assert_eq!(client.login(eve, OTHER_PASSWORD).status, 401, "no attempt was counted");
        let again = client.get("/users/1");
        assert_eq!((&again.body, again.header("ETag")), (&first.body, first.header("ETag")), "{round}");
        assert!(client.opens("ada@example.com", PASSWORD));
        assert_eq!(client.get("/users?page=334").body, page);
        let replayed = create(&mut client, "of-ada", "ada@example.com");
        assert_eq!((replayed.header("Idempotency-Replayed"), &replayed.body), (Some("true"), &first.body));
        assert_eq!(client.get("/users/2").status, 200);
        assert!(server.requests().len() > journal, "resets alone forget requests");
    }
    // Another state takes the name; a reset keeps both.
    assert_eq!(create(&mut client, "of-grace", "grace@example.com").id(), "5002");
    server.save("before");
    server.reset();
    assert_eq!((client.get("/users").json()["total"].clone(), server.requests().len()), (json!(0), 1));
    server.restore(&"z".repeat(40));
    assert_eq!(client.get("/users/1").json()["name"], "Eve");
    server.restore("before");
    assert_eq!(client.get("/users").json()["total"], 5001);
    assert_eq!(client.post("/users", GRACE).status, 409);
}

/// A key has the age in a state that it had when that was saved.
#[test]
fn the_time_of_a_saved_state() {
    let server = Compared(TestServer::start());
    let mut client = Client::new(server.base_url());
    let mut keys = Client::new(server.base_url());
    let mut keyed = |body: &str| keys.request("POST", "/users", &[("Idempotency-Key", "k")], body).status;
    assert_eq!(keyed(ADA), 201);
    server.save("fresh");
    server.advance(Duration::from_secs(23 * 3600));
    server.save("old");
    server.advance(Duration::from_secs(2 * 3600));
    for (name, kept_for) in [("fresh", 24), ("old", 1)] {
        server.restore(name);
        server.advance(Duration::from_secs(kept_for * 3600 - 60));
        assert_eq!(keyed(GRACE), 422, "{name}");
        server.advance(Duration::from_secs(60));
        assert_eq!(keyed(GRACE), 201, "{name}");
    }
    // A column that a migration adds has its default.
    let mut session = postgres::Client::connect(server.database_url(), postgres::NoTls).unwrap();
    session.batch_execute("alter table users add column rank int not null default 7").unwrap();
    server.restore("fresh");
    let ada = session.query_one("select name, rank from users", &[]).unwrap();
    assert_eq!((ada.get(0), ada.get(1)), ("Ada", 7));
    // Tables that a state does not fit are as they were.
    session.batch_execute("alter table users add column mood text; update users set mood = ''; alter table users alter column mood set not null").unwrap();
    assert!(is_refused(|| server.restore("fresh")));
    assert_eq!(client.get("/users/1").json()["name"], "Ada");
}

/// Each user is created with a key, so a state of one snapshot has as many of both.
#[test]
fn a_state_that_is_saved_while_requests_are_in_flight() {
    let server = Compared(TestServer::with(|config| (config.workers, config.db_pool_size) = (8, 8)));
    let save_twice_at_once = |round| {
        thread::scope(|saves| {
            saves.spawn(|| server.save("same"));
            saves.spawn(|| server.save(&format!("round_{round}")));
        });
    };
    while_users_are_created(&server, |_, _| (), save_twice_at_once);
    let mut session = postgres::Client::connect(server.database_url(), postgres::NoTls).unwrap();
    let mut client = Client::new(server.base_url());
    for name in (1..=8).map(|round| format!("round_{round}")).chain(["same".to_owned()]) {
        server.restore(&name);
        let counted = "select count(*), (select count(*) from idempotency_keys), max(id) from users";
        let row = session.query_one(counted, &[]).unwrap();
        let [users, keys, last]: [i64; 3] = [row.get(0), row.get(1), row.get(2)];
        assert_eq!((users > 0, users), (true, keys), "{name}");
        assert_eq!(client.get("/users").json()["total"], users);
        let next: i64 = client.post("/users", ADA).id().parse().unwrap();
        assert!(next > last, "{next} > {last}");
    }
}

/// The values of secrets are hidden, whatever the case of their names and wherever they are in a body.
#[test]
fn requests_are_remembered_without_secrets() {
    let server = Compared(TestServer::start());
    let mut client = Client::new(server.base_url());
    let secrets = [
        ("Authorization", "Bearer t0ken-0f-the-tests"),
        ("COOKIE", PASSWORD),
        ("proxy-authorization", PASSWORD),
        ("X-Api-Key", PASSWORD),
    ];
    let keyed = [&secrets[..], &[("Idempotency-Key", "a-key")]].concat();
    let nested = r#"{"name":"Ada","x":[{"Password":"battery staple"}],"passw\u006frd":null,"password":7}"#;
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], &'a [u8], &'a str, Value);
    let rows: [Row; 9] = [
        ("GET", "/users", &[], b"", "/users", json!(0)),
        (
            "POST",
            "/users",
            &keyed,
            ADA.as_bytes(),
            "/users",
            json!({"name": "Ada", "email": "ada@example.com"}),
        ),
        (
            "PUT",
            "/users/1",
            &[],
            nested.as_bytes(),
            "/users/1",
            json!({"name": "Ada", "x": [{"Password": "***"}], "password": "***"}),
        ),
        ("PATCH", "/users/1", &[], br#"{"password":"battery staple""#, "/users/1", json!(28)),
        ("POST", "/users", &[], br#"["battery staple"]"#, "/users", json!(18)),
        ("POST", "/users", &[], b"\xffpassword=battery staple", "/users", json!(24)),
        ("HEAD", "/users?page=2", &[], b"", "/users?page=2", json!(0)),
        ("GET", "/users?access_%74oken=battery&page=1&Password=a?b=c&&x", &[], b"", "/users?***", json!(0)),
        (
            "BREW",
            "/nowhere",
            &[("X-Auth-Token", PASSWORD), ("X-Own", "Ünï"), ("If-Match", "\"1\""), ("if-match", "\"2\"")],
            b"",
            "/nowhere",
            json!(0),
        ),
    ];
    for (method, target, headers, body, ..) in &rows {
        client.request(method, target, headers, body);
    }
    // The frontend answers these by itself.
    client.get("/livez");
    let requests = server.requests();
    assert_eq!(requests.len(), rows.len());
    for (request, (method, _, headers, _, target, body)) in requests.iter().zip(&rows) {
        let seen = (&request["method"], &request["target"], &request["body"]);
        assert_eq!(seen, (&json!(method), &json!(target), body));
        assert_eq!(request.as_object().unwrap().len(), 4);
        assert!(headers.is_empty() || !request["headers"].as_object().unwrap().is_empty());
        assert_no_secret(&request.to_string());
    }
    assert_eq!(requests[1]["headers"]["authorization"], "***");
    assert_eq!(requests[1]["headers"]["idempotency-key"], "a-key");
    assert_eq!(requests[8]["headers"]["x-own"], "Ünï");
    assert_eq!(requests[8]["headers"]["x-auth-token"], "***");
    assert_eq!(requests[8]["headers"]["if-match"], "\"1\", \"2\"");
    server.reset();
    assert!(server.requests().is_empty());
}

#[test]
fn time_passes_on_command() {
    let server = Compared(TestServer::with(|config| config.auth_attempts = 1));
    let mut client = Client::new(server.base_url());
    let mut login =
        |expected: u16| assert_eq!(client.login("ada@example.com", OTHER_PASSWORD).status, expected);
    login(401);
    server.advance(Duration::from_secs(30));
    login(429);
    server.advance(Duration::from_secs(31));
    login(401);

    let mut keyed = |body: &str| client.request("POST", "/users", &[("Idempotency-Key", "k")], body);
    assert_eq!(keyed(ADA).status, 201);
    server.advance(Duration::from_secs(23 * 3600));
    assert_eq!(keyed(GRACE).status, 422, "the key is kept");
    server.advance(Duration::from_secs(2 * 3600));
    assert_eq!(keyed(GRACE).status, 201, "a day has passed");
    server.advance(Duration::from_secs(366 * 24 * 3600));
}

#[test]
fn what_cannot_be_asked_for_panics_and_a_fault_that_is_left_does() {
    let panics = |work: fn(&TestServer)| {
        let work = move || {
            let server = TestServer::start();
            work(&server);
        };
        thread::spawn(work).join().is_err()
    };
    assert!(!panics(|_| ()));
    assert!(panics(|server| server.fail(Fault::Refused, "GET", "/livez", 1)));
    assert!(panics(|server| server.advance(Duration::MAX)));
    assert!(panics(|server| server.fail(Fault::AnswerLost, "POST", "/users", 2)));
}

#[test]
fn controls_of_the_command() {
    let dir = TempDir::new();
    // They need not be what the create schema takes.
    dir.write("users.csv", "id,name,email,password\n7,Ada,ada@example.com,correct horse\n6,,no address,\n");
    let userd = Tested::start(&[&format!("--seed={}/users.csv", dir.name())]);
    let does = |request: &str, body: &str| {
        let answer = userd.control(request, body);
        assert_eq!((answer.status, answer.body.as_str()), (204, ""), "{request} {body}: {answer:?}");
    };
    let left = || userd.control("GET /faults", "").json()["left"].clone();
    let mut client = userd.client();
    let first = client.get("/users/7");
    for _ in 0..2 {
        does("POST /reset", "");
        let again = client.get("/users/7");
        assert_eq!((again.json(), again.header("ETag")), (first.json(), first.header("ETag")));
        assert_eq!(client.get("/users/6").json()["email"], "no address");
        assert!(client.opens("ada@example.com", PASSWORD));
        assert_eq!(client.post("/users", GRACE).id(), "8");
        assert_eq!(client.delete("/users/7").status, 204);
    }
    does("PUT /states/a_1", "");
    does("POST /reset", "");
    does("POST /states/a_1", "");
    assert_eq!(client.get("/users?order=desc").json()["data"][0]["id"], "8");
    does("POST /reset", "");
    for body in [
        r#"{"fault":"503","method":"GET","path":"/users/7"}"#,
        r#"{"fault":"slow","seconds":0.1,"method":"GET","path":"/users/7","times":2}"#,
        r#"{"fault":"cut","bytes":15,"method":"DELETE","path":"/users/8","times":1}"#,
        r#"{"fault":"answer-lost","method":"PUT","path":"/users/7","times":4294967295}"#,
        r#"{"fault":"refused","method":"GET","path":"/openapi.json","times":4294967295}"#,
    ] {
        does("POST /faults", body);
    }
    assert_eq!(left(), 4_294_967_295_u32);
    does("DELETE /faults", "");
    assert_eq!(left(), 0);
    does("POST /time", r#"{"advance":61}"#);
    does("POST /faults", r#"{"fault":"503","method":"GET","path":"/users/7","times":2}"#);
    for (left_before, status) in [(2, 503), (1, 503), (0, 200)] {
        assert_eq!((left(), client.get("/users/7").status), (json!(left_before), status));
    }
    client.get("/users?page=1");
    for (query, targets) in [
        ("", vec!["/users/7", "/users/7", "/users/7", "/users?page=1"]),
        ("?method=GET&path=/users/7", vec!["/users/7"; 3]),
        ("?path=%2Fusers", vec!["/users?page=1"]),
        ("?path=/users%3Fpage%3D1", vec!["/users?page=1"]),
        ("?method=POST", vec![]),
        ("?method=DELETE&path=/users/7", vec![]),
        ("?path=/users/%2537", vec!["/users/7"; 3]),
    ] {
        let journal = userd.control(&format!("GET /requests{query}"), "").json();
        let requests = journal["requests"].as_array().unwrap().iter();
        let found: Vec<&str> = requests.map(|request| request["target"].as_str().unwrap()).collect();
        assert_eq!((found, &journal["gone"]), (targets, &json!(0)), "{query}");
    }
    // Clients encode an address in different ways.
    does("POST /faults", r#"{"fault":"503","method":"GET","path":"/users?email=ada@example.com"}"#);
    assert_eq!(client.get("/users?email=ada%40example.com").status, 503);
    for address in ["ada@example.com", "ada%40example.com", "ada%2540example.com"] {
        let journal = userd.control(&format!("GET /requests?path=/users?email={address}"), "").json();
        assert_eq!(journal["requests"][0]["target"], "/users?email=ada%40example.com", "{address}");
    }
}

/// A control that cannot be executed changes nothing, and says why.
#[test]
fn controls_that_cannot_be() {
    let userd = Tested::start(&[]);
    let fault =
        |more: &str| ("POST /faults".to_owned(), format!(r#"{{"method":"POST","path":"/users",{more}}}"#));
    let of = |fault: &str, method: &str, path: &str| {
        ("POST /faults".to_owned(), json!({"fault": fault, "method": method, "path": path}).to_string())
    };
    let plain = |request: &str| (request.to_owned(), String::new());
    let time = |body: &str| ("POST /time".to_owned(), body.to_owned());
    let services = |body: &str| ("POST /services".to_owned(), body.to_owned());
    for (status, (request, body)) in [
        (404, plain("GET /reset")),
        (404, plain("POST /reset/now")),
        (404, plain("POST /")),
        (404, plain("DELETE /")),
        (404, plain("GET /nothing")),
        (404, plain("GET /services")),
        (404, plain("DELETE /services/x")),
        (404, plain("POST /states/a_2")),
        (400, plain("PUT /states/A")),
        (400, plain("PUT /states/%1b")),
        (400, plain("POST /time")),
        (400, time("{}")),
        (400, time(r#"{"advance":-1}"#)),
        (400, time(r#"{"advance":1e300}"#)),
        (400, time(r#"{"advance":"1"}"#)),
        (400, time(r#"{"advance":1,"more":1}"#)),
        (400, plain("GET /requests?path=/usres")),
        (400, plain("GET /requests?method=GTE&path=/users")),
        (400, plain("GET /requests?method=GTE")),
        (400, plain("GET /requests?method=post&path=/users")),
        (400, plain("GET /requests?method=POST&path=/users/")),
        (400, plain("GET /requests?method=DELETE&path=/users")),
        (400, plain("GET /requests?path=/livez")),
        (400, plain("GET /requests?mehtod=POST")),
        (400, plain("GET /requests?path=%")),
        (400, plain("GET /requests?path=/users/:id")),
        (400, plain("GET /requests?path=/users/%7Bid%7D")),
        (400, plain("GET /requests?method=GET&method=POST")),
        (400, of("503", "GET", "/users/:id")),
        (400, of("nothing", "POST", "/users")),
        (400, of("answer-lost", "GET", "/livez")),
        (400, of("answer-lost", "GTE", "/users")),
        (400, of("answer-lost", "GET", "/usres")),
        (400, of("slow", "POST", "/users")),
        (400, of("cut", "POST", "/users")),
        (400, fault(r#""fault":"503","times":-1"#)),
        (400, fault(r#""fault":"503","times":"10%"#)),
        (400, fault(r#""fault":503"#)),
        (400, fault(r#""fault":"slow","seconds":-1"#)),
        (400, fault(r#""fault":"cut","bytes":1,"seconds":1"#)),
        (400, fault(r#""fault":"503","sedonds":1"#)),
        (400, services("[]")),
        (400, services(r#"{"setings":{}}"#)),
        (400, services(r#"{"settings":{"SCHMEA":"strict"}}"#)),
        (400, services(r#"{"settings":{"SCHEMA":"strcit"}}"#)),
        (400, services(r#"{"settings":{"SCHEMA":["strict"]}}"#)),
        (400, services(r#"{"settings":{"DATABASE_URL":"postgres:///x"}}"#)),
        (400, services(r#"{"settings":{"DB_POOL_SIZE":1}}"#)),
        (400, services(r#"{"settings":{"PGPASSWORD":"x"}}"#)),
        (400, services(r#"{"settings":{"HOST":"0.0.0.0"}}"#)),
        (400, services(r#"{"settings":{"API_TOKEN_FILE":"/etc/passwd"}}"#)),
        (400, services(r#"{"settings":{"MIGRATIONS_DIR":"/"}}"#)),
        (400, services(r#"{"settings":{"POSTGRES_BIN":"/"}}"#)),
        (400, services(r#"{"settings":{"LOG_LEVEL":"info"}}"#)),
        (400, services(r#"{"users":[{"name":"Ada"}]}"#)),
        (400, services(r#"{"users":[1]}"#)),
    ] {
        let answer = userd.control(&request, &body);
        assert_eq!(answer.status, status, "{request} {body}: {answer:?}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(!message.is_empty() && !answer.body.contains('\u{1b}'), "{request}: {answer:?}");
    }
    assert_eq!(userd.control("GET /faults", "").json()["left"], 0);
    assert_eq!(userd.control("GET /requests", "").json(), json!({"requests": [], "gone": 0}));
}

/// The newest requests that fit into 8 MiB, oldest first.
#[test]
fn the_journal_is_bounded() {
    let userd = Tested::start(&[]);
    let mut client = userd.client();
    for n in 0..150 {
        let body = json!({"n": n, "line\nend": "\u{2028}\u{1b}".repeat(7_000)}).to_string();
        assert_eq!(client.post(&format!("/users?n={n}"), body).status, 400);
    }
    client.get("/users?page=1");
    let answer = userd.control("GET /requests?method=POST&path=/users", "");
    let journal = answer.json();
    let (requests, gone) = (journal["requests"].as_array().unwrap(), journal["gone"].as_u64().unwrap());
    assert_eq!(requests.len() as u64 + gone, 150);
    assert!((7 << 20..=8 << 20).contains(&answer.body.len()), "{} of {}", answer.body.len(), requests.len());
    for (request, n) in requests.iter().zip(gone..) {
        assert_eq!(request["body"]["n"], n);
    }
    assert_eq!(userd.control("POST /reset", "").status, 204);
    assert_eq!(userd.control("GET /requests", "").json(), json!({"requests": [], "gone": 0}));
}
