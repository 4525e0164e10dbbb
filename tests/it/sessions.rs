//! Sessions of the database that end while requests use them.

use crate::support::{ADA, LONG, Service, eventually};
use serde_json::json;
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

#[test]
fn reads_outlive_their_sessions() {
    const READERS: usize = 6;
    /// How often all sessions are ended.
    const ROUNDS: usize = 20;
    let service = Service::start();
    assert_eq!(service.client().post("/users", ADA).status, 201);
    let (ended, answered) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; READERS]);
    let mut killed = 0;
    thread::scope(|scope| {
        for answered in &answered {
            let (ended, mut client) = (&ended, service.client());
            scope.spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    for target in ["/users/1", "/users"] {
                        assert_eq!(client.get(target).status, 200, "{target}");
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
    assert_eq!(service.client().get("/users/1").json()["name"], "Ada");
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
