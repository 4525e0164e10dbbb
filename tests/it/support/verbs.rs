//! Every kind of request, alone and in batches, of one service.

use super::{Answer, Client, OTHER_PASSWORD, PASSWORD};
use serde_json::json;
use std::thread;

/// How many clients send requests at once: more than the service has sessions, so that batches form.
const CLIENTS: usize = 8;

/// Sends every kind of request, batched and unbatched, and reads back what each change did. `round`: a word that is in
/// each address.
pub fn every_verb(url: &str, round: &str) {
    thread::scope(|scope| {
        for n in 0..CLIENTS {
            scope.spawn(move || (0..2).for_each(|i| of_batches(url, &format!("{round}-{n}-{i}"))));
        }
    });
    of_one(url, round);
}

#[track_caller]
fn expect(answer: Answer, status: u16) -> Answer {
    assert_eq!(answer.status, status, "{answer:?}");
    answer
}

fn user(word: &str, password: Option<&str>) -> String {
    let mut user = json!({"name": word, "email": format!("{word}@example.com")});
    if let Some(password) = password {
        user["password"] = password.into();
    }
    user.to_string()
}

fn keyed(client: &mut Client, word: &str, password: Option<&str>) -> Answer {
    let word = &format!("{word}-keyed");
    client.request("POST", "/users", &[("Idempotency-Key", word)], user(word, password))
}

fn of_batches(url: &str, word: &str) {
    let mut client = Client::new(url);
    let created = expect(client.post("/users", user(word, None)), 201);
    let path = format!("/users/{}", created.id());
    assert_eq!(expect(client.get(&path), 200).body, created.body);
    let first = expect(keyed(&mut client, word, None), 201);
    assert_eq!(expect(keyed(&mut client, word, None), 201).body, first.body);
    expect(client.post("/users", user(&word.to_uppercase(), None)), 409);

    let list = expect(client.get(&format!("/users?email={word}@EXAMPLE.com")), 200).json();
    assert_eq!(list["data"], json!([created.json()]));
    let id: i64 = created.id().parse().expect("a number");
    let walk = expect(client.get(&format!("/users?after={}&perPage=3", id - 1)), 200).json();
    assert_eq!(walk["data"][0], created.json());
    let prefix = expect(client.get(&format!("/users?emailPrefix={word}@&perPage=3")), 200).json();
    assert_eq!(prefix["data"], json!([created.json()]));
    let newest = expect(client.get("/users?order=desc&perPage=5"), 200).json();
    assert!(newest["data"].as_array().is_some_and(|users| !users.is_empty()), "{newest}");
    let page = expect(client.get("/users?page=1&perPage=5"), 200).json();
    let last = expect(client.get(&format!("/users?perPage=5&page={}", page["lastPage"])), 200).json();
    assert_eq!(last["currentPage"], page["lastPage"]);

    let named = expect(client.put(&path, r#"{"name":"Put"}"#), 200);
    assert_eq!(expect(client.get(&path), 200).body, named.body);
    let moved = json!({"email": format!("{word}@patched.example")}).to_string();
    let moved = expect(client.patch(&path, moved), 200);
    assert_eq!(expect(client.get(&path), 200).body, moved.body);
    let kept = format!("/users/{}", first.id());
    expect(client.delete(&kept), 204);
    expect(client.get(&kept), 404);
    expect(keyed(&mut client, word, None), 410);
}

fn of_one(url: &str, word: &str) {
    let client = &mut Client::new(url);
    let email = format!("{word}@example.com");
    let login =
        |client: &mut Client, password: &str, status| drop(expect(client.login(&email, password), status));
    let created = expect(client.post("/users", user(word, Some(PASSWORD))), 201);
    let path = format!("/users/{}", created.id());
    login(client, PASSWORD, 200);
    expect(client.put(&path, json!({"password": OTHER_PASSWORD}).to_string()), 200);
    login(client, PASSWORD, 401);
    login(client, OTHER_PASSWORD, 200);
    expect(client.put(&path, r#"{"password":null}"#), 200);
    login(client, OTHER_PASSWORD, 401);

    let first = expect(keyed(client, word, Some(PASSWORD)), 201);
    assert_eq!(expect(keyed(client, word, Some(PASSWORD)), 201).body, first.body);
    let tag = expect(client.get(&path), 200).header("ETag").expect("a user has one").to_owned();
    let changed = expect(client.request("PUT", &path, &[("If-Match", &tag)], r#"{"name":"If"}"#), 200);
    assert_eq!(expect(client.get(&path), 200).body, changed.body);
    expect(client.request("DELETE", &path, &[("If-Match", &tag)], ""), 412);
    let tag = changed.header("ETag").expect("a user has one").to_owned();
    expect(client.request("DELETE", &path, &[("If-Match", &tag)], ""), 204);
    expect(client.get(&path), 404);
}
