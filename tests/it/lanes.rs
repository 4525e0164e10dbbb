//! A request waits only for its own kind: whatever locks are held, whatever is hashed, with any number of workers and
//! of sessions.

use crate::support::{Answer, Client, OTHER_PASSWORD, PASSWORD, Service, check, eventually, keeps};
use serde_json::json;
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Longer than any of these tests: a change waits for a lock until it is released.
const AGES: Duration = Duration::from_secs(100);

/// Far longer than a request takes that waits for nothing, and shorter than what waits for a lock.
const SOON: Duration = Duration::from_secs(1);

/// Workers and sessions.
const SIZES: [(usize, u32); 3] = [(1, 1), (3, 3), (8, 2)];

fn service((workers, sessions): (usize, u32)) -> Service {
    Service::with(|config| {
        config.workers = workers;
        config.db_pool_size = sessions;
        config.limits.request_timeout = AGES;
    })
}

fn user(name: &str) -> String {
    json!({"name": name, "email": format!("{name}@example.com")}).to_string()
}

fn named(name: &str) -> String {
    json!({ "name": name }).to_string()
}

/// A request and the status of its answer.
type Row<'a> = (&'a str, &'a str, &'a str, u16);

/// Sends the requests of some tables, each of which is answered soon. Equal rows of the tables are tries of one request.
fn soon<T: AsRef<str>>(client: &mut Client, tables: &[T]) {
    let mut tries: Vec<Vec<Duration>> = Vec::new();
    for table in tables {
        for (at, row) in table.as_ref().lines().enumerate() {
            let start = Instant::now();
            check(client, row);
            tries.resize_with(tries.len().max(at + 1), Vec::new);
            tries[at].push(start.elapsed());
        }
    }
    for (row, tries) in tables[0].as_ref().lines().zip(&tries) {
        keeps(SOON, row, tries);
    }
}

fn name_of(client: &mut Client, id: usize) -> String {
    let user = client.get(&format!("/users/{id}")).json();
    user["name"].as_str().expect("a name").to_owned()
}

/// Takes a lock and sends these changes, which wait for it; meanwhile, `free` asks for what does not. Then the lock is
/// given back, and all changes are made.
fn with_changes_that_wait(service: &Service, lock: &str, changes: &[Row], free: impl FnOnce(&mut Client)) {
    let transaction = service.database.transaction(lock);
    let mut waiting: Vec<Client> = changes.iter().map(|_| service.client()).collect();
    for (client, (method, target, body, _)) in waiting.iter_mut().zip(changes) {
        client.send_request(method, target, &[], body);
    }
    service.database.waits_for_a_lock();
    free(&mut service.client());
    service.database.waits_for_a_lock();
    drop(transaction);
    for (client, (method, target, _, status)) in waiting.iter_mut().zip(changes) {
        assert_eq!(client.answer(method).status, *status, "{lock}: {method} {target}");
    }
}

#[test]
fn changes_that_meet_a_lock_hold_up_nothing_else() {
    /// Users that are locked, of one more: as many as there are sessions, and more.
    const LOCKED: usize = 20;
    let paths: Vec<String> = (0..=LOCKED + 1).map(|id| format!("/users/{id}")).collect();
    let (free, held) = (paths[LOCKED + 1].as_str(), named("held"));
    for size in SIZES {
        println!("{size:?}");
        let service = service(size);
        service.database.run(&format!(
            "insert into users (name, email) select n, n || '@example.com' from generate_series(1, {LOCKED} + 1) n"
        ));
        // One row.
        let names: Vec<String> = (0..12).map(|n| named(&format!("m{n}"))).collect();
        let changes: Vec<Row> = names.iter().map(|body| ("PUT", "/users/1", body.as_str(), 200)).collect();
        with_changes_that_wait(&service, "select from users where id = 1 for update", &changes, |client| {
            let tables = [0, 1, 2].map(|round| {
                let rows = r#"
                    OPTIONS /users => 204
                    GET /nothing => 404 *
                    GET /users/x => 404 *
                    DELETE /users => 405 *
                    POST /users { => 400 *
                    GET /users/1 => 200 {"id":"1","name":"1",*
                    GET /users => 200 *
                    PUT /users/2 {"name":"ROUND"} => 200 *
                    GET /users/2 => 200 {"id":"2","name":"ROUND",*
                    POST /users {"name":"n","email":"ROUND@example.com"} => 201 *
                    PUT /users/999 {"name":"ROUND"} => 404 *
                    "#;
                rows.replace("ROUND", &format!("name-{round}"))
            });
            soon(client, &tables);
            let [deleted, missing] =
                ["204", "404 *"].map(|status| format!("DELETE /users/3 => {status}\nGET /users/3 => 404 *"));
            soon(client, &[&deleted, &missing, &missing]);
        });
        let mut client = service.client();
        assert!(name_of(&mut client, 1).starts_with('m'));
        // Many rows: no change of another one waits for the retries of all of them.
        let changes: Vec<Row> =
            (4..=LOCKED).map(|id| ("PUT", paths[id].as_str(), held.as_str(), 200)).collect();
        let lock = format!("select from users where id <= {LOCKED} for update");
        with_changes_that_wait(&service, &lock, &changes, |client| {
            // All of them are queued by the time that changes of others overtake them.
            eventually(AGES, "retries are all that is left", || {
                let start = Instant::now();
                assert_eq!(client.put(free, named("free")).status, 200);
                start.elapsed() < SOON / 2
            });
            let tables = [0, 1, 2, 3, 4].map(|n| {
                let (put, create) = (named(&n.to_string()), user(&format!("new-{n}")));
                let get = format!(r#"GET {free} => 200 {{"id":"{}","name":"{n}",*"#, LOCKED + 1);
                format!("PUT {free} {put} => 200 *\n{get}\nPOST /users {create} => 201 *")
            });
            soon(client, &tables);
        });
        for id in 4..=LOCKED {
            assert_eq!(name_of(&mut client, id), "held");
        }
        // The whole table.
        let creates: Vec<String> = (0..4).map(|n| user(&format!("locked-{n}"))).collect();
        let creates = creates.iter().map(|body| ("POST", "/users", body.as_str(), 201));
        let changes: Vec<Row> = creates.chain([("PUT", "/users/1", &*held, 200); 4]).collect();
        with_changes_that_wait(&service, "lock table users in share mode", &changes, |client| {
            soon(client, &["GET /users/1 => 200 *\nGET /users => 200 *"; 5]);
        });
        assert_eq!(name_of(&mut client, 1), "held");
        let names = "select string_agg(name, ' ' order by name) from users where name like 'locked-%'";
        assert_eq!(service.database.value(names), "locked-0 locked-1 locked-2 locked-3");
        assert_eq!(client.get("/users").json()["total"], LOCKED + 3 + 5 + 4);
    }
}

/// However many requests come that a worker answers by itself.
#[test]
fn what_is_answered_at_once_holds_up_nothing_behind_it() {
    let service = service((2, 2));
    let mut client = service.client();
    assert_eq!(client.post("/users", user("ada")).status, 201);
    thread::scope(|scope| {
        // The end of the test, or its failure, ends it.
        let at_work = Arc::new(());
        for _ in 0..16 {
            let (mut client, at_work) = (service.client(), Arc::downgrade(&at_work));
            scope.spawn(move || {
                while at_work.strong_count() > 0 {
                    assert_eq!(client.get("/metrics").status, 200);
                }
            });
        }
        for round in 0..3 {
            let name = format!("bob{round}");
            // However busy the machine is: it would wait for as long as the others go on.
            assert_eq!(client.put("/users/1", named(&name)).status, 200);
            assert_eq!(name_of(&mut client, 1), name);
        }
    });
}

fn is_refused(answer: &Answer) -> bool {
    let seconds: u64 = answer.header("Retry-After").map_or(0, |seconds| seconds.parse().unwrap());
    (answer.status == 429 || answer.status == 503) && (1..=60).contains(&seconds)
}

#[test]
fn many_wrong_passwords_hold_up_no_login_for_long() {
    const GUESSES: usize = 300;
    for workers in [1, 8] {
        let service = Service::with(|config| {
            config.workers = workers;
            config.auth_attempts = 0;
            config.limits.request_timeout = AGES;
        });
        let mut client = service.client();
        let ada = user("ada").replace('}', r#","password":"correct horse"}"#);
        assert_eq!(client.post("/users", ada).status, 201);
        let mut guessers: Vec<_> = (0..GUESSES).map(|_| service.client()).collect();
        for (n, guesser) in guessers.iter_mut().enumerate() {
            let guess = json!({"email": format!("{n}@example.com"), "password": OTHER_PASSWORD});
            guesser.send_request("POST", "/users/authenticate", &[], guess.to_string());
        }
        soon(&mut client, &["GET /users/1 => 200 *"; 3]);
        let mut other = Client::from_peer(service.server.base_url(), 2);
        let answer = other.login("ada@example.com", PASSWORD);
        assert_eq!(answer.status, 200, "{workers}: {answer:?}");
        let answers: Vec<_> = guessers.iter_mut().map(|guesser| guesser.answer("POST")).collect();
        let refused = answers.iter().filter(|answer| is_refused(answer)).count();
        let wrong = answers.iter().filter(|answer| answer.status == 401).count();
        assert_eq!(refused + wrong, GUESSES, "{workers}: {refused} refused, {wrong} wrong");
        assert!(wrong > 0 && refused > 0, "{workers}: {refused} refused, {wrong} wrong");
        // The first client's connection may have been idle for too long.
        let answer = service.client().login("ada@example.com", PASSWORD);
        assert_eq!(answer.status, 200, "{workers}: once they are done");
    }
}

#[test]
fn a_guesser_is_refused_and_no_other_account() {
    let service = Service::with(|config| config.auth_attempts = 3);
    let rows = r#"
        POST /users {"name":"n","email":"ada@example.com","password":"correct horse"} => 201 *
        POST /users {"name":"n","email":"bob@example.com","password":"correct horse"} => 201 *
        POST /users {"name":"n","email":"eve@example.com","password":"correct horse"} => 201 *
        POST|POST|POST LOGIN {"email":"ada@example.com","password":"battery staple"} => 401 <!Retry-After> *
        POST LOGIN {"email":"ada@example.com","password":"battery staple"} => 429 {"error":"Too many attempts"}
        POST|POST|POST LOGIN {"email":"nobody@example.com","password":"battery staple"} => 401 <!Retry-After> *
        POST LOGIN {"email":"nobody@example.com","password":"battery staple"} => 429 {"error":"Too many attempts"}
        POST LOGIN {"email":"ada@example.com","password":"correct horse"} => 429 *
        POST LOGIN {"email":"ADA@Example.com","password":"correct horse"} => 429 *
        POST LOGIN {"email":"bob@example.com","password":"correct horse"} => 200 *
        POST|POST LOGIN {"email":"eve@example.com","password":"battery staple"} => 401 *
        POST|POST|POST|POST|POST|POST LOGIN {"email":"eve@example.com","password":"correct horse"} => 200 *
        POST LOGIN {"email":"eve@example.com","password":"battery staple"} => 401 *
        POST LOGIN {"email":"eve@example.com","password":"correct horse"} => 429 *
        GET /users/1 => 200 *
        "#;
    // A right password gives its attempt back before its answer, and none before it. A login is refused, not the account.
    service.check(rows.replace("LOGIN", "/users/authenticate"));
    assert!(is_refused(&service.client().login("ada@example.com", PASSWORD)));
}

/// Sends logins to one account at once, and returns the statuses in their order.
fn logins(service: &Service, password: &str, count: usize) -> Vec<u16> {
    let mut clients: Vec<_> = (0..count).map(|_| service.client()).collect();
    let body = json!({"email": "ada@example.com", "password": password}).to_string();
    for client in &mut clients {
        client.send_request("POST", "/users/authenticate", &[], body.clone());
    }
    clients.iter_mut().map(|client| client.answer("POST").status).collect()
}

/// An account of which many right logins are under way is not locked, and one of which many are guessed has its limit.
#[test]
fn only_wrong_passwords_lock_an_account() {
    for limit in [1, 10] {
        let service = Service::with(|config| {
            config.auth_attempts = limit;
            config.limits.request_timeout = AGES;
        });
        let ada = user("ada").replace('}', r#","password":"correct horse"}"#);
        assert_eq!(service.client().post("/users", ada).status, 201);
        let mut succeeded = 0;
        while succeeded <= 20 {
            let statuses = logins(&service, PASSWORD, 32);
            // On a busy machine, many may wait too long for their hash.
            assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{limit}: {statuses:?}");
            succeeded += statuses.iter().filter(|status| **status == 200).count();
        }
        let guesses = logins(&service, OTHER_PASSWORD, 90);
        let answered = |status: u16| guesses.iter().filter(|found| **found == status).count();
        assert_eq!(answered(401), limit as usize, "{guesses:?}");
        assert_eq!(answered(401) + answered(429) + answered(503), 90, "{guesses:?}");
        assert!(answered(429) > 0, "{guesses:?}");
        assert_eq!(logins(&service, PASSWORD, 1), [429], "{limit}");
        assert_eq!(service.client().get("/users/1").status, 200);
    }
}

/// WordPress hashes all of a password in each of its rounds. Over 4,096 bytes, a password is not hashed so.
#[test]
fn a_long_password_holds_up_no_login() {
    let service = Service::with(|config| config.auth_attempts = 0);
    let ada = user("ada").replace('}', r#","password":"correct horse"}"#);
    assert_eq!(service.client().post("/users", ada).status, 201);
    service.database.run("insert into users (name, email) values ('Bob', 'bob@example.com')");
    service.database.run("insert into credentials values (2, '$P$EabcdefghRJFCMvnAbZH2hCiFPRxpk.')");
    let mut clients: Vec<_> = (0..3).map(|_| service.client()).collect();
    for client in &mut clients {
        let body = json!({"email": "bob@example.com", "password": "\u{340}x".repeat(20_000)}).to_string();
        client.send_request("POST", "/users/authenticate", &[], body);
    }
    assert_eq!(logins(&service, PASSWORD, 5), [200; 5]);
    assert!(clients.iter_mut().all(|client| client.answer("POST").status == 401));
}
