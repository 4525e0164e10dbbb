//! A request waits only for its own kind: whatever locks are held, whatever is hashed, with any number of workers and
//! of sessions.

use crate::support::{
    Answer, BUSY, Client, Database, LONG, OTHER_PASSWORD, PASSWORD, Proxy, Service, TOKEN, Weather,
    eventually,
};
use serde_json::json;
use std::{
    panic::{self, AssertUnwindSafe},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};
use userd::{
    config::{Config, Database as Target},
    server::Server,
};

/// Longer than any of these tests: a change waits for a lock until it is released.
const AGES: Duration = Duration::from_secs(100);

/// Far longer than a request takes that waits for nothing, and shorter than what waits for a lock.
const SOON: Duration = BUSY;

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

/// Its answer comes soon; its status.
fn soon(caller: &mut Client, method: &str, target: &str, body: &str) -> u16 {
    let start = Instant::now();
    let status = caller.call(method, target, body).unwrap().0;
    let took = start.elapsed();
    assert!(took < SOON, "{method} {target} took {took:?}");
    status
}

fn name_of(caller: &mut Client, id: u32) -> String {
    let (status, body) = caller.call("GET", &format!("/users/{id}"), "").unwrap();
    assert_eq!(status, 200, "{body}");
    body["name"].as_str().unwrap().to_owned()
}

/// Takes a lock and sends these changes, which wait for it; meanwhile, `free` asks for what does not. Returns the statuses
/// of the changes once the lock is given back.
fn with_changes_that_wait(
    service: &Service,
    lock: &str,
    changes: &[(&str, String, String)],
    free: impl FnOnce(),
) -> Vec<u16> {
    let mut other = service.database.client();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute(lock).unwrap();
    let url = service.server.base_url();
    thread::scope(|scope| {
        let change = |(method, target, body): &'_ (&str, String, String)| {
            let (method, target, body) = (method.to_string(), target.clone(), body.clone());
            scope.spawn(move || Client::new(url).call(&method, &target, &body).unwrap().0)
        };
        let changes: Vec<_> = changes.iter().map(change).collect();
        service.database.waits_for_a_lock();
        free();
        assert!(changes.iter().all(|change| !change.is_finished()), "{lock}");
        transaction.rollback().unwrap();
        changes.into_iter().map(|change| change.join().unwrap()).collect()
    })
}

fn put(id: u32, name: &str) -> (&'static str, String, String) {
    ("PUT", format!("/users/{id}"), named(name))
}

#[test]
fn changes_of_a_locked_row_hold_up_nothing_else() {
    for size in SIZES {
        let service = service(size);
        let mut caller = Client::new(service.server.base_url());
        for name in ["ada", "bob", "eve"] {
            assert_eq!(caller.call("POST", "/users", &user(name)).unwrap().0, 201);
        }
        let changes: Vec<_> = (0..12).map(|n| put(1, &n.to_string())).collect();
        let lock = "select from users where id = 1 for update";
        let statuses = with_changes_that_wait(&service, lock, &changes, || {
            for round in 0..3 {
                let name = format!("name-{round}");
                for (method, target, body, expected) in [
                    ("OPTIONS", "/users", String::new(), 204),
                    ("GET", "/nothing", String::new(), 404),
                    ("GET", "/users/x", String::new(), 404),
                    ("DELETE", "/users", String::new(), 405),
                    ("POST", "/users", "{".to_owned(), 400),
                    ("GET", "/users/2", String::new(), 200),
                    ("GET", "/users", String::new(), 200),
                    ("PUT", "/users/2", named(&name), 200),
                    ("POST", "/users", user(&name), 201),
                    ("PUT", "/users/999", named(&name), 404),
                ] {
                    let found = soon(&mut caller, method, target, &body);
                    assert_eq!(found, expected, "{size:?}: {method} {target}");
                }
                assert_eq!(name_of(&mut caller, 2), name, "{size:?}");
            }
            assert_eq!(soon(&mut caller, "DELETE", "/users/3", ""), 204, "{size:?}");
            assert_eq!(soon(&mut caller, "GET", "/users/3", ""), 404, "{size:?}");
            assert_eq!(name_of(&mut caller, 1), "ada", "{size:?}");
        });
        assert_eq!(statuses, [200; 12], "{size:?}");
        let name = name_of(&mut caller, 1);
        assert!(name.parse::<u32>().is_ok_and(|n| n < 12), "{size:?}: {name}");
        assert_eq!(caller.call("GET", "/users?perPage=10", "").unwrap().1["total"], 5, "{size:?}");
    }
}

/// Locks as many rows as there are sessions, and more: no change of another row waits for the retries of all of them.
#[test]
fn changes_of_many_locked_rows_hold_up_no_other_row() {
    const LOCKED: u32 = 20;
    for size in SIZES {
        let service = service(size);
        service.database.run(&format!(
            "insert into users (name, email) select n, n || '@example.com' from generate_series(1, {LOCKED} + 1) n"
        ));
        let mut caller = Client::new(service.server.base_url());
        let changes: Vec<_> = (1..=LOCKED).map(|id| put(id, "held")).collect();
        let lock = format!("select from users where id <= {LOCKED} for update");
        let statuses = with_changes_that_wait(&service, &lock, &changes, || {
            // All of them are queued by the time that changes of others overtake them.
            let target = format!("/users/{}", LOCKED + 1);
            eventually(AGES, "retries are all that is left", || {
                let start = Instant::now();
                assert_eq!(caller.call("PUT", &target, &named("free")).unwrap().0, 200);
                start.elapsed() < SOON / 2
            });
            for n in 0..5 {
                let name = n.to_string();
                assert_eq!(soon(&mut caller, "PUT", &target, &named(&name)), 200, "{size:?}");
                assert_eq!(name_of(&mut caller, LOCKED + 1), name, "{size:?}");
                assert_eq!(soon(&mut caller, "POST", "/users", &user(&format!("new-{n}"))), 201, "{size:?}");
            }
        });
        assert_eq!(statuses, [200; LOCKED as usize], "{size:?}");
        for id in 1..=LOCKED {
            assert_eq!(name_of(&mut caller, id), "held", "{size:?}");
        }
    }
}

#[test]
fn writes_that_a_lock_of_the_table_blocks_hold_up_no_read() {
    for size in SIZES {
        let service = service(size);
        let mut caller = Client::new(service.server.base_url());
        assert_eq!(caller.call("POST", "/users", &user("ada")).unwrap().0, 201);
        let creates = (0..4).map(|n| ("POST", "/users".to_owned(), user(&format!("n{n}"))));
        let changes: Vec<_> = creates.chain((0..4).map(|n| put(1, &n.to_string()))).collect();
        let lock = "lock table users in share mode";
        let statuses = with_changes_that_wait(&service, lock, &changes, || {
            for _ in 0..5 {
                for target in ["/users/1", "/users"] {
                    assert_eq!(soon(&mut caller, "GET", target, ""), 200, "{size:?}: {target}");
                }
            }
        });
        assert_eq!(statuses, [[201; 4], [200; 4]].concat(), "{size:?}");
        let name = name_of(&mut caller, 1);
        assert!(name.parse::<u32>().is_ok_and(|n| n < 4), "{size:?}: {name}");
        let names = "select string_agg(name, ' ' order by name) from users where id > 1";
        assert_eq!(service.database.value(names), "n0 n1 n2 n3", "{size:?}");
    }
}

/// However many requests come that a worker answers by itself.
#[test]
fn what_is_answered_at_once_holds_up_nothing_behind_it() {
    let service = service((2, 2));
    let mut caller = Client::new(service.server.base_url());
    assert_eq!(caller.call("POST", "/users", &user("ada")).unwrap().0, 201);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..16 {
            let (mut client, over) = (service.client(), &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(client.get("/metrics").status, 200);
                }
            });
        }
        let done = panic::catch_unwind(AssertUnwindSafe(|| {
            for round in 0..3 {
                let name = format!("bob{round}");
                // However busy the machine is: it would wait for as long as the others go on.
                assert_eq!(caller.call("PUT", "/users/1", &named(&name)).unwrap().0, 200);
                assert_eq!(name_of(&mut caller, 1), name);
            }
        }));
        over.store(true, Ordering::Relaxed);
        done.unwrap_or_else(|panic| panic::resume_unwind(panic));
    });
}

#[test]
fn without_the_token_no_client_reaches_the_database() {
    for workers in [1, 8] {
        let database = Database::create();
        let proxy = Proxy::start(&database.socket());
        let url = database.url_at(proxy.port());
        let config = Config {
            database: Target::Url(url.into()),
            workers,
            db_pool_size: 2,
            api_token: Some(TOKEN.into()),
            ..Config::default()
        };
        let server = Server::start(config).expect("the proxy is open");
        let mut client = Client::new(server.base_url());
        let authorization = format!("Bearer {TOKEN}");
        let token = [("Authorization", authorization.as_str())];
        assert_eq!(client.request("POST", "/users", &token, user("ada")).status, 201);
        database.has_sessions(2);
        proxy.shut();
        let start = Instant::now();
        let before = proxy.refused();
        for n in 0..20 {
            assert_eq!(client.post("/users", user(&n.to_string())).status, 401, "{workers}");
        }
        let (took, refused) = (start.elapsed(), proxy.refused() - before);
        assert!(took < SOON, "{workers}: {took:?}");
        assert_eq!(refused, 0, "{workers}: a refused request opens no connection");
        // Shows that the count works, and that no user was created.
        let answer = client.request("POST", "/users", &token, user("eve"));
        assert!([500, 503].contains(&answer.status), "{workers}: {answer:?}");
        eventually(LONG, "connections are tried", || proxy.refused() > before);
        proxy.set(Weather::Fair);
        eventually(LONG, "the database is back", || {
            client.request("GET", "/users", &token, "").status == 200
        });
        assert_eq!(client.request("GET", "/users", &token, "").json()["total"], 1, "{workers}");
    }
}

fn login(email: &str, password: &str) -> String {
    json!({"email": email, "password": password}).to_string()
}

fn with_password(name: &str) -> String {
    json!({"name": name, "email": format!("{name}@example.com"), "password": PASSWORD}).to_string()
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
        assert_eq!(client.post("/users", with_password("ada")).status, 201);
        let mut guessers: Vec<_> = (0..GUESSES).map(|_| service.client()).collect();
        for (n, guesser) in guessers.iter_mut().enumerate() {
            let guess = login(&format!("{n}@example.com"), OTHER_PASSWORD);
            guesser.send_request("POST", "/users/authenticate", &[], guess);
        }
        let start = Instant::now();
        assert_eq!(client.get("/users/1").status, 200);
        let read = start.elapsed();
        assert!(read < SOON, "{workers}: {read:?}");
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
    let mut client = service.client();
    for name in ["ada", "bob", "eve"] {
        assert_eq!(client.post("/users", with_password(name)).status, 201);
    }
    let mut tries = |email: &str, password| client.login(email, password);
    let mut refusals = Vec::new();
    for email in ["ada@example.com", "nobody@example.com"] {
        for _ in 0..3 {
            let answer = tries(email, OTHER_PASSWORD);
            assert_eq!((answer.status, answer.header("Retry-After")), (401, None), "{email}");
        }
        let answer = tries(email, OTHER_PASSWORD);
        assert!(answer.status == 429 && is_refused(&answer), "{answer:?}");
        refusals.push(answer.body);
    }
    assert_eq!(refusals, ["{\"error\":\"Too many attempts\"}\n"; 2]);
    // The right password, in whatever case the address is.
    for email in ["ada@example.com", "ADA@Example.com"] {
        assert_eq!(tries(email, PASSWORD).status, 429, "{email}");
    }
    assert_eq!(tries("bob@example.com", PASSWORD).status, 200);
    // A right password gives its attempt back, and not those before it.
    for password in [OTHER_PASSWORD, OTHER_PASSWORD, PASSWORD, PASSWORD, PASSWORD, PASSWORD, OTHER_PASSWORD] {
        let expected = if password == PASSWORD { 200 } else { 401 };
        assert_eq!(tries("eve@example.com", password).status, expected);
    }
    assert_eq!(tries("eve@example.com", PASSWORD).status, 429);
    // A login is refused, not the account.
    assert_eq!(client.get("/users/1").status, 200);
    // An attempt that succeeded is given back before its answer.
    let service = Service::with(|config| config.auth_attempts = 1);
    let mut client = service.client();
    assert_eq!(client.post("/users", with_password("ada")).status, 201);
    for attempt in 0..30 {
        assert_eq!(client.login("ada@example.com", PASSWORD).status, 200, "{attempt}");
    }
}
