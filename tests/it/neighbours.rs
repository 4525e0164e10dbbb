//! Locks of other clients of the database: a request that they block waits; no other request does.

use crate::support::{Client, Service};
use serde_json::json;
use std::time::{Duration, Instant};

/// Longer than any of these tests: a request that waits for a lock waits until it is released.
const AGES: Duration = Duration::from_secs(100);

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
    let service = Service::with(|config| {
        config.limits.request_timeout = AGES;
        config.db_pool_size = 8;
    });
    let sql = "insert into users (name, email) values ('n', 'locked@example.com')";
    let other = service.database.transaction(sql);
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
    drop(other);
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
    let _other = service.database.transaction("lock table users");
    let mut stuck = asks(&service, "GET", "/users/1", "");
    service.database.waits_for_a_lock();
    let start = Instant::now();
    service.server.stop();
    let took = start.elapsed();
    assert!(took >= TIME && took < TIME * 2, "{took:?}");
    assert_eq!(stuck.answer("GET").status, 503);
}
