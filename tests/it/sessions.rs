//! Sessions of the database: what ends them, and for how long a request keeps one.

use crate::support::{ADA, Client, LONG, Service, eventually, pause};
use serde_json::json;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

#[test]
fn reads_outlive_their_sessions() {
    const READERS: usize = 6;
    /// How often all sessions are ended.
    const ROUNDS: usize = 20;
    let service = Service::start();
    let url = service.server.base_url();
    assert_eq!(Client::new(url).call("POST", "/users", ADA).unwrap().0, 201);
    let (ended, answered) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; READERS]);
    let mut killed = 0;
    thread::scope(|scope| {
        for answered in &answered {
            let ended = &ended;
            scope.spawn(move || {
                let mut caller = Client::new(url);
                while !ended.load(Ordering::Relaxed) {
                    for target in ["/users/1", "/users"] {
                        let (status, body) = caller.call("GET", target, "").unwrap();
                        assert_eq!(status, 200, "{target}: {body}");
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut admin = service.database.client();
        for _ in 0..ROUNDS {
            // So that each round ends sessions in use, and not those that a reader's read is repeated on.
            let counts = || answered.each_ref().map(|count| count.load(Ordering::Relaxed));
            let before = counts();
            eventually(LONG, "each reader is answered", || {
                counts().iter().zip(before).all(|(now, before)| *now >= before + 20)
            });
            let sql = "select pg_terminate_backend(pid) from pg_stat_activity \
                where datname = current_database() and application_name = 'userd'";
            killed += admin.query(sql, &[]).unwrap().len();
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(killed >= ROUNDS, "{killed} sessions were ended");
    assert_eq!(Client::new(url).call("GET", "/users/1", "").unwrap().1["name"], "Ada");
}

/// No statement of the service waits for a lock for long: its session is free for other requests.
#[test]
fn no_session_waits_for_a_lock_for_long() {
    let service = Service::with(|config| config.limits.request_timeout = LONG);
    let url = service.server.base_url();
    assert_eq!(Client::new(url).call("POST", "/users", ADA).unwrap().0, 201);
    for lock in ["select from users where id = 1 for update", "lock table users in share mode"] {
        let mut neighbour = service.database.client();
        let mut transaction = neighbour.transaction().unwrap();
        transaction.batch_execute(lock).unwrap();
        let name = json!({"name": lock}).to_string();
        thread::scope(|scope| {
            let changes: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| Client::new(url).call("PUT", "/users/1", &name).unwrap().0))
                .collect();
            eventually(LONG, "a change meets the lock", || waiting(&service, "0s") > 0);
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(3) {
                // Ten times as long as a statement waits.
                assert_eq!(waiting(&service, "1s"), 0, "{lock}");
                pause(Duration::from_millis(50));
            }
            assert!(changes.iter().all(|change| !change.is_finished()), "{lock}");
            transaction.rollback().unwrap();
            for change in changes {
                assert_eq!(change.join().unwrap(), 200, "{lock}");
            }
        });
        assert_eq!(Client::new(url).call("GET", "/users/1", "").unwrap().1["name"], lock);
    }
}

/// How many statements of the service have waited for a lock for longer.
fn waiting(service: &Service, longer_than: &str) -> i64 {
    let sql = format!(
        "select count(*) from pg_stat_activity where datname = current_database() \
         and application_name = 'userd' and wait_event_type = 'Lock' \
         and clock_timestamp() - query_start > '{longer_than}'"
    );
    service.database.client().query_one(&sql, &[]).unwrap().get(0)
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
