//! A test of a client against a real service, from nothing: `cargo run --example test_harness`. In your
//! `Cargo.toml`, userd and ureq are dev-dependencies, and this is a `#[test]`.

use serde_json::{Value, json};
use userd::testing::TestServer;

/// Your own client, which is the code under test: returns the names of the users.
fn names(base_url: &str) -> Result<Vec<String>, ureq::Error> {
    let page: Value = ureq::get(format!("{base_url}/users?perPage=100")).call()?.body_mut().read_json()?;
    let users = page["data"].as_array().into_iter().flatten();
    Ok(users.filter_map(|user| user["name"].as_str().map(str::to_owned)).collect())
}

pub fn main() -> Result<(), ureq::Error> {
    let server = TestServer::start();
    server.seed(2);
    server.user("Ada Lovelace", "ada@example.com");
    assert_eq!(names(server.base_url())?, ["User 1", "User 2", "Ada Lovelace"]);

    let grace = json!({"name": "Grace Hopper", "email": "grace@example.com"});
    let created = ureq::post(server.url("/users")).send_json(&grace)?;
    assert_eq!(created.status(), 201);

    match ureq::post(server.url("/users")).send_json(&grace) {
        Err(ureq::Error::StatusCode(409)) => {}
        other => panic!("the address is taken: {other:?}"),
    }
    println!("{} passed", server.base_url());
    Ok(())
}
