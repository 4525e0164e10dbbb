//! The service as a function, without a socket: `cargo run --example in_process`.

use serde_json::json;
use std::error::Error;
use userd::{App, Request, ScratchDatabase};

pub fn main() -> Result<(), Box<dyn Error>> {
    let database = ScratchDatabase::create()?;
    let app = App::open(&database.config())?;

    let ada = json!({"name": "Ada Lovelace", "email": "ada@example.com"});
    let created = app.handle(&Request::post("/users", &ada));
    assert_eq!(created.status, 201);
    let location = created.header("Location").expect("201 says where");

    let found = app.handle(&Request::get(location));
    assert_eq!(found.value()["name"], "Ada Lovelace");

    let again = app.handle(&Request::post("/users", &ada));
    assert_eq!((again.status, again.value()), (409, json!({"error": "Already exists"})));

    assert_eq!(app.handle(&Request::delete(location)).status, 204);
    println!("{} came and went", found.value()["email"]);
    Ok(())
}
