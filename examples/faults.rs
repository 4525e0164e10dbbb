//! States, requests, failures and time on command: `cargo run --example faults`. In your `Cargo.toml`, userd and ureq are
//! dev-dependencies, and these are `#[test]`s.

use std::time::Duration;
use userd::testing::{Fault, TestServer};

/// Creates a user under a key, and returns the id.
fn create(server: &TestServer, name: &str) -> Result<serde_json::Value, ureq::Error> {
    let user = serde_json::json!({"name": name, "email": format!("{name}@example.com")});
    let mut answer = ureq::post(server.url("/users")).header("Idempotency-Key", "a-key").send_json(user)?;
    Ok(answer.body_mut().read_json::<serde_json::Value>()?["id"].clone())
}

pub fn main() -> Result<(), ureq::Error> {
    let server = TestServer::start();
    create(&server, "ada")?;
    server.reset();
    server.fail(Fault::AnswerLost, "POST", "/users", 1);
    assert!(create(&server, "ada").is_err());
    assert_eq!(create(&server, "ada")?, "1");
    let tried = server.requests();
    assert_eq!((tried.len(), &tried[1]["body"]["name"]), (2, &"ada".into()));
    server.save("one_user");
    server.advance(Duration::from_secs(24 * 3600));
    assert_eq!(create(&server, "grace")?, "2");
    let both =
        ureq::get(server.url("/users?id=2&id=1")).call()?.body_mut().read_json::<serde_json::Value>()?;
    assert_eq!(both["data"][1]["name"], "grace");
    server.restore("one_user");
    server.fail(Fault::Unavailable, "GET", "/users/1", 2);
    assert!(ureq::get(server.url("/users/1")).call().is_err());
    server.fail_none();
    ureq::get(server.url("/users/1")).call()?;
    println!("{} passed", server.base_url());
    Ok(())
}
