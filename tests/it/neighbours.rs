//! Other clients of the same database: their locks, their settings for a role, the tables that they change. A request
//! that they block waits; no other request does.

use crate::support::{Client, Database, Process, Service, TempDir};
use serde_json::json;
use std::time::{Duration, Instant};
use userd::Server;

/// Longer than any of these tests: a request that waits for a lock waits until it is released.
const AGES: Duration = Duration::from_secs(100);

fn long_timeouts() -> Service {
    Service::with(|config| {
        config.limits.request_timeout = AGES;
        config.db_pool_size = 8;
    })
}

fn post(name: &str) -> String {
    json!({"name": name, "email": format!("{name}@example.com")}).to_string()
}

/// Sends a request, whose answer is still to be read.
fn asks(service: &Service, method: &str, target: &str, body: &str) -> Client {
    let mut client = service.client();
    client.send_request(method, target, &[], body);
    client
}

#[test]
fn an_address_that_is_not_committed_yet() {
    let service = long_timeouts();
    let mut other = service.database.client();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute("insert into users (name, email) values ('n', 'locked@example.com')").unwrap();
    let mut contended = vec![asks(&service, "POST", "/users", &post("locked"))];
    service.database.waits_for_a_lock();
    // Beside creates that no lock blocks, so that some share a batch with a contended one.
    let free: Vec<_> =
        (0..40).map(|n| asks(&service, "POST", "/users", &post(&format!("free-{n}")))).collect();
    contended.extend((0..4).map(|_| asks(&service, "POST", "/users", &post("LOCKED"))));
    for mut free in free {
        assert_eq!(free.answer("POST").status, 201);
    }
    // One more create and a read are answered while the contended creates wait.
    let mut client = service.client();
    assert_eq!(client.post("/users", post("one-more")).status, 201);
    assert_eq!(client.get("/users/999999999").status, 404);
    service.database.waits_for_a_lock();
    transaction.rollback().unwrap();
    let mut all: Vec<u16> = contended.iter_mut().map(|client| client.answer("POST").status).collect();
    all.sort_unstable();
    assert_eq!(all, [201, 409, 409, 409, 409]);
    assert_eq!(client.get("/users").json()["total"], 42);
}

/// The frontend and the workers share the time that a stop has.
#[test]
fn a_stop_that_waits_for_a_lock() {
    const TIME: Duration = Duration::from_secs(4);
    let service = Service::with(|config| {
        config.limits.request_timeout = AGES;
        config.limits.stop_timeout = TIME;
    });
    let mut other = service.database.client();
    let mut transaction = other.transaction().unwrap();
    transaction.batch_execute("lock table users").unwrap();
    let mut stuck = asks(&service, "GET", "/users/1", "");
    service.database.waits_for_a_lock();
    let start = Instant::now();
    service.server.stop();
    let took = start.elapsed();
    assert!(took >= TIME && took < TIME * 2, "{took:?}");
    assert_eq!(stuck.answer("GET").status, 503);
}

/// Statements that were prepared before do not fit the table any more.
#[test]
fn a_table_that_is_altered_meanwhile() {
    let service = long_timeouts();
    service.database.has_sessions(8);
    let all = |n: u32| {
        let created = post(&format!("user-{n}"));
        service.check(format!(
            r#"
            POST /users {created} => 201 *
            GET /users => 200 {{"data":[{{"id":"1",*
            PUT /users/1 {{"name":"{n}"}} => 200 {{"id":"1","name":"{n}",*
            GET /users/1 => 200 {{"id":"1","name":"{n}",*
            "#
        ));
    };
    for n in 0..3 {
        all(n);
    }
    service.database.run("alter table users alter column email type varchar(300)");
    for n in 3..9 {
        all(n);
    }
}

/// The bounds that a role has for statements are not for migrations.
#[test]
fn a_role_with_short_time_outs() {
    let database = Database::empty();
    let name = database.name();
    let dir = TempDir::new();
    dir.write("V1__slow.sql", "select pg_sleep(1.5); create table slow (n int);");
    database.run(&format!("alter database {name} set statement_timeout = '1s'"));
    database.run(&format!("alter database {name} set idle_in_transaction_session_timeout = '1s'"));
    let mut process = Process::on(&database, &[("MIGRATIONS_DIR", dir.path().to_str().unwrap())]);
    process.wait_for_url();
    assert_eq!(database.value("select to_regclass('slow')"), "slow");
}

/// A replica that reads only, such as one on a standby, needs nothing but what it reads.
#[test]
fn a_database_that_is_up_to_date_is_only_read() {
    let database = Database::create();
    database.run("insert into users (name, email) values ('Ada', 'ada@example.com')");
    database.run(&format!("alter database {} set default_transaction_read_only = on", database.name()));
    let server = Server::start(database.config()).expect("nothing is to be migrated");
    let mut client = Client::new(server.base_url());
    assert_eq!(client.get("/users/1").status, 200);
    assert_eq!(client.post("/users", post("bob")).status, 503);
    assert_eq!(client.get("/users").json()["total"], 1);
}
