//! Changing safely: entity tags, requests that depend on them, and patches.

use crate::support::{Answer, Client, Database, OTHER_PASSWORD, PASSWORD, Service, check};
use serde_json::{Value, json};
use std::{
    sync::Barrier,
    thread::{self, JoinHandle},
};
use userd::{
    PasswordHashing, Server,
    config::{Schema, Validation},
};

const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;
const FAILED: &str = r#"{"error":"Precondition failed"}"#;

/// The strong tag of an answer with one user.
fn tag(answer: &Answer) -> String {
    let tag = answer.header("ETag").unwrap_or_else(|| panic!("no tag: {answer:?}"));
    let inner = tag.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    assert!(inner.is_some_and(|inner| !inner.is_empty() && !inner.contains('"')), "{tag}");
    tag.to_owned()
}

/// The tag of user 1 as it is now.
fn current(client: &mut Client) -> String {
    tag(&client.get("/users/1"))
}

fn if_match(client: &mut Client, method: &str, tag: &str, body: &str) -> Answer {
    client.request(method, "/users/1", &[("If-Match", tag)], body)
}

fn authenticates(client: &mut Client, password: &str) -> bool {
    let body = json!({"email": "ada@example.com", "password": password}).to_string();
    client.post("/users/authenticate", body).status == 200
}

// Tags

#[test]
fn answers_of_one_user_have_a_tag() {
    let service = Service::start();
    let mut client = service.client();
    let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    let created = client.post("/users", ada);
    let mut tags = vec![tag(&created)];
    for (method, body, changes) in [
        ("GET", "", false),
        ("HEAD", "", false),
        ("PUT", "{}", false),
        ("PUT", r#"{"name":"A"}"#, true),
        ("GET", "", false),
        ("PATCH", "{}", false),
        ("PATCH", r#"{"name":"B"}"#, true),
        ("HEAD", "", false),
    ] {
        let answer = client.request(method, "/users/1", &[], body);
        assert_eq!(answer.status, 200, "{method} {body}");
        assert_eq!(tags.last() != Some(&tag(&answer)), changes, "{method} {body}");
        if changes {
            assert!(!tags.contains(&tag(&answer)), "{method} {body}");
            tags.push(tag(&answer));
        }
        assert!(!answer.body.contains("version") && !answer.body.to_lowercase().contains("etag"));
    }
    // No other answer has one.
    let credentials = json!({"email": "ada@example.com", "password": PASSWORD}).to_string();
    for (method, target, body, status) in [
        ("POST", "/users/authenticate", credentials.as_str(), 200),
        ("GET", "/users", "", 200),
        ("GET", "/users?email=ada@example.com", "", 200),
        ("GET", "/users/2", "", 404),
        ("PUT", "/users/1", r#"{"name":7}"#, 422),
        ("POST", "/users", ADA, 409),
        ("OPTIONS", "/users/1", "", 204),
        ("DELETE", "/users/1", "", 204),
    ] {
        let answer = client.request(method, target, &[], body);
        assert_eq!((answer.status, answer.header("ETag")), (status, None), "{method} {target}");
    }
}

/// A change that the service makes moves the tag, one that changes nothing keeps it.
#[test]
fn changes_by_the_service_move_the_tag() {
    let service = Service::start();
    let mut client = service.client();
    client.post("/users", ADA);
    let rows = [
        (r#"{}"#, false),
        (r#"{"name":"Ada"}"#, false),
        (r#"{"name":"Ada","email":"ada@example.com","password":null}"#, false),
        (r#"{"name":"A"}"#, true),
        (r#"{"email":"ADA@example.com"}"#, true),
        (r#"{"email":"ADA@example.com"}"#, false),
        (r#"{"password":"correct horse"}"#, true),
        // The password is equal, with another salt.
        (r#"{"password":"correct horse"}"#, true),
        (r#"{"password":null}"#, true),
        (r#"{"password":null}"#, false),
        (r#"{"name":"Ada","password":"battery staple"}"#, true),
        (r#"{"name":"Ada","email":"ada@example.com"}"#, true),
    ];
    // A moment that the clock is past, one that it has not reached, and the last one that there is.
    for now in ["2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"] {
        for method in ["PUT", "PATCH"] {
            service
                .database
                .run("update users set name = 'Ada', email = 'ada@example.com'; delete from credentials");
            service.database.run(&format!("update users set updated_at = '{now}'"));
            let mut tags = vec![current(&mut client)];
            for (body, changes) in rows {
                let before = client.get("/users/1");
                let answer = client.request(method, "/users/1", &[], body);
                let what = format!("{now} {method} {body}");
                assert_eq!(answer.status, 200, "{what}");
                let new = tag(&answer);
                assert_eq!(client.get("/users/1").header("ETag"), Some(new.as_str()), "{what}");
                assert_eq!(tags.last() != Some(&new), changes, "{what}");
                if changes {
                    assert!(!tags.contains(&new), "{what}");
                    tags.push(new);
                    let (was, is) = (before.json()["updatedAt"].take(), answer.json()["updatedAt"].take());
                    assert!(is.as_str() > was.as_str() || now.starts_with("9999"), "{what}: {was} {is}");
                } else {
                    assert_eq!(before.body, answer.body, "{what}");
                }
            }
        }
    }
}

/// Every change of a record moves its tag, by any statement and any client.
#[test]
fn changes_by_others_move_the_tag() {
    let service = Service::start();
    let mut client = service.client();
    client
        .post("/users", json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string());
    service.database.run("alter table users add note text, add doc json");
    let rows = [
        ("update users set name = 'A' where id = 1", true),
        ("update users set name = 'A' where id = 1", false),
        ("update users set name = name", false),
        ("update users set email = upper(email)", true),
        ("update users set email = lower(email), name = 'A'", true),
        ("update users set updated_at = now()", true),
        ("update users set created_at = created_at - interval '1 day'", true),
        // Columns of others, also of types without an equality.
        ("update users set note = 'x'", true),
        ("update users set doc = '{\"a\": 1}'", true),
        ("update users set doc = '{\"a\": 1}'", false),
        // Not part of the record.
        ("update credentials set password_hash = 'x'", false),
        ("delete from credentials", false),
        // No change takes an old tag back.
        ("update users set version = 1", true),
        ("update users set version = version - 1", true),
        ("update users set version = version", false),
        (
            "insert into users (id, name, email) overriding system value values (1, 'B', 'ada@example.com') \
             on conflict (id) do update set name = excluded.name",
            true,
        ),
        ("begin; update users set name = 'C'; update users set name = 'D'; commit", true),
        ("begin; update users set name = 'E'; rollback", false),
        // There and back again.
        ("update users set name = 'F'; update users set name = 'D'", true),
        (
            "create function z() returns trigger language plpgsql as $$ begin new.name := new.name || '!'; return new; end $$;
             create trigger z_last before update on users for each row execute function z(); \
             update users set name = name",
            true,
        ),
        ("drop trigger z_last on users; update users set name = name", false),
    ];
    let mut tags = vec![current(&mut client)];
    for (sql, changes) in rows {
        service.database.run(sql);
        let answer = client.get("/users/1");
        assert_eq!(answer.status, 200, "{sql}");
        let new = tag(&answer);
        assert_eq!(tags.last() != Some(&new), changes, "{sql}");
        assert_eq!(tags.contains(&new), !changes, "{sql}");
        tags.extend(changes.then_some(new));
        // A record that is answered as not modified is not.
        let last = tags.last().expect("one");
        let unmodified = client.request("GET", "/users/1", &[("If-None-Match", last)], "");
        assert_eq!(unmodified.status, 304, "{sql}");
    }
    // An id that is used again.
    service.database.run(
        "delete from users; insert into users (id, name, email) overriding system value \
         values (1, 'Eve', 'eve@example.com')",
    );
    assert!(!tags.contains(&current(&mut client)));
    // Rows of COPY and of restores, with the version of the dump and without, as old releases made it.
    let mut sql = service.database.client();
    sql.batch_execute("delete from users").unwrap();
    let time = "2026-01-01 00:00:00+00";
    for (columns, row) in [
        ("id, name, email", "11\tn\t1@example.com\n".to_owned()),
        ("id, name, email, created_at, updated_at", format!("12\tn\t2@example.com\t{time}\t{time}\n")),
        (
            "id, name, email, created_at, updated_at, version",
            format!("13\tn\t3@example.com\t{time}\t{time}\t7\n"),
        ),
    ] {
        use std::io::Write;
        let mut copy = sql.copy_in(&format!("copy users ({columns}) from stdin")).unwrap();
        copy.write_all(row.as_bytes()).unwrap();
        copy.finish().unwrap();
    }
    for (id, version) in [(11, "1-"), (12, "1-"), (13, "7-")] {
        let path = format!("/users/{id}");
        let found = tag(&client.get(&path));
        assert!(found.starts_with(&format!("\"{version}")), "{id}: {found}");
        let changed = client.request("PUT", &path, &[("If-Match", &found)], r#"{"name":"m"}"#);
        assert_eq!(changed.status, 200, "{id}");
        assert_ne!(tag(&changed), found);
    }
}

/// Columns and operators of others: of a row type, one in `public` is found before that of `pg_catalog`.
#[test]
fn what_others_have_made_keeps_no_tag() {
    const DECOYS: &str = "\
        create function decoy(users, users) returns boolean language plpgsql as \
            $$ begin raise 'a decoy was used'; end $$; \
        create operator = (leftarg = users, rightarg = users, function = decoy); \
        create operator <> (leftarg = users, rightarg = users, function = decoy); \
        create operator *<> (leftarg = users, rightarg = users, function = decoy); \
        create function decoy(bigint, int) returns bigint language plpgsql as \
            $$ begin raise 'a decoy was used'; end $$; \
        create operator + (leftarg = bigint, rightarg = int, function = decoy)";
    let service = Service::start();
    let mut client = service.client();
    client.post("/users", r#"{"name":"Ada","email":"ada@example.com"}"#);
    service.database.run(DECOYS);
    let rows = [
        ("set search_path = public, pg_catalog; update users set name = 'A'", true),
        ("set search_path = public, pg_catalog; update users set name = 'A'", false),
        ("alter table users add twice text generated always as (name || name) stored", false),
        ("update users set name = 'B'", true),
        // PostgreSQL computes it after the trigger.
        ("update users set name = 'B'", true),
        ("alter table users drop twice; update users set name = 'B'", false),
    ];
    let mut last = current(&mut client);
    for (sql, changes) in rows {
        service.database.run(sql);
        let new = current(&mut client);
        assert_eq!(new != last, changes, "{sql}");
        last = new;
    }
    let answer = if_match(&mut client, "PUT", &last, r#"{"name":"C"}"#);
    assert_eq!((answer.status, &client.get("/users/1").json()["name"]), (200, &json!("C")));
    assert_eq!(if_match(&mut client, "PUT", &last, r#"{"name":"D"}"#).status, 412);
}

// Reads that depend on tags

#[test]
fn reads_that_depend_on_tags() {
    let service = Service::start();
    let mut client = service.client();
    let old = tag(&client.post("/users", ADA));
    let new = tag(&client.put("/users/1", r#"{"name":"A"}"#));
    let list = |tags: &[&str]| tags.join(", ");
    let weak = format!("W/{new}");
    // The field, its value, and the status.
    let rows = [
        ("If-None-Match", new.clone(), 304),
        ("if-none-match", list(&[&old, &new]), 304),
        ("If-None-Match", list(&["\"x\"", "W/\"a,b\"", &new, "\"\""]), 304),
        ("If-None-Match", format!("{old},{new}"), 304),
        ("If-None-Match", weak.clone(), 304),
        ("If-None-Match", "*".to_owned(), 304),
        ("If-None-Match", old.clone(), 200),
        ("If-None-Match", list(&[&old, "\"x\""]), 200),
        ("If-None-Match", "\"1\"".to_owned(), 200),
        ("If-None-Match", new.to_uppercase(), if new.to_uppercase() == new { 304 } else { 200 }),
        ("If-Match", new.clone(), 200),
        ("If-Match", "*".to_owned(), 200),
        ("If-Match", old.clone(), 412),
        ("If-Match", weak.clone(), 412),
        // An empty list is a list, and matches nothing.
        ("If-None-Match", String::new(), 200),
        ("If-None-Match", " , ,".to_owned(), 200),
        ("If-Match", String::new(), 412),
        ("If-Match", ",".to_owned(), 412),
        ("If-None-Match", new.trim_matches('"').to_owned(), 400),
        ("If-None-Match", "\"x".to_owned(), 400),
        ("If-None-Match", list(&[&new, "*"]), 400),
        ("If-Match", "x".to_owned(), 400),
        ("If-Unmodified-Since", "Thu, 01 Jan 1970 00:00:00 GMT".to_owned(), 200),
    ];
    for (name, value, status) in rows {
        for method in ["GET", "HEAD"] {
            let answer = client.request(method, "/users/1", &[(name, &value)], "");
            assert_eq!(answer.status, status, "{method} {name}: {value}");
            let tag = matches!(status, 200 | 304).then_some(new.as_str());
            assert_eq!(answer.header("ETag"), tag, "{method} {name}: {value}");
        }
    }
    // Several lines are one list.
    let both = [("If-None-Match", old.as_str()), ("If-None-Match", new.as_str())];
    assert_eq!(client.request("GET", "/users/1", &both, "").status, 304);
    // A missing user is not found, and the malformed field comes first.
    for (value, status) in [("*", 404), ("x", 400)] {
        for target in ["/users/2", "/users/abc"] {
            let answer = client.request("GET", target, &[("If-None-Match", value)], "");
            assert_eq!(answer.status, status, "{target} {value}");
        }
    }
    // Other routes know no tags.
    for target in ["/users", "/users?after=0", "/users?email=ada@example.com"] {
        assert_eq!(client.request("GET", target, &[("If-None-Match", "*")], "").status, 200, "{target}");
    }
}

/// Reads that wait together: each has its own condition.
#[test]
fn conditional_reads_that_wait_together() {
    const CLIENTS: usize = 32;
    let service = Service::start();
    let mut client = service.client();
    service
        .database
        .run("insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 8) n");
    let tags: Vec<String> = (1..=8).map(|id| tag(&client.get(&format!("/users/{id}")))).collect();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| service.client()).collect();
    for _ in 0..20 {
        for (n, client) in clients.iter_mut().enumerate() {
            let path = format!("/users/{}", n % 10 + 1);
            let tag = tags.get(n % 10).map_or("\"x\"", String::as_str);
            let fields: &[(&str, &str)] = match n % 3 {
                0 => &[("If-None-Match", tag)],
                1 => &[],
                _ => &[("If-Match", tag)],
            };
            client.send_request("GET", &path, fields, "");
        }
        for (n, client) in clients.iter_mut().enumerate() {
            let expected = match n % 3 {
                _ if n % 10 >= 8 => 404,
                0 => 304,
                _ => 200,
            };
            assert_eq!(client.answer("GET").status, expected, "{n}");
        }
    }
}

// Changes that depend on tags

/// Order: a malformed field, a missing user, the body, the tag, the address. What is refused changes nothing.
#[test]
fn changes_that_depend_on_tags() {
    let service = Service::start();
    let mut client = service.client();
    let old = tag(&client.post("/users", ADA));
    client.post("/users", r#"{"name":"Bob","email":"bob@example.com"}"#);
    client.put("/users/1", json!({"name": "A", "password": PASSWORD}).to_string());
    let (name, taken, set) =
        (r#"{"name":"B"}"#, r#"{"email":"BOB@example.com"}"#, r#"{"password":"battery staple"}"#);
    let foreign = [&old, "\"x\"", "W/\"x\"", "\"x\", \"y\"", "\"\""];
    for method in ["PUT", "PATCH"] {
        let before = client.get("/users/1");
        let new = tag(&before);
        let weak = format!("W/{new}");
        let mut rows = vec![
            ("/users/1", "x", name, 400),
            ("/users/1", "", name, 412),
            ("/users/1", " , ", set, 412),
            ("/users/7", "", name, 404),
            ("/users/1", "", "{", 400),
            ("/users/1", "*, \"x\"", "{", 400),
            ("/users/7", "x", name, 400),
            ("/users/abc", "\"x", name, 400),
            ("/users/7", "*", name, 404),
            ("/users/7", "\"x\"", "{", 404),
            ("/users/7", "\"x\"", set, 404),
            ("/users/abc", &new, name, 404),
            ("/users/1", "\"x\"", "{", 400),
            ("/users/1", "\"x\"", "[]", 400),
            ("/users/1", "\"x\"", r#"{"isAdmin":true}"#, 422),
            ("/users/1", &new, "{", 400),
            ("/users/1", &new, r#"{"id":"7"}"#, 422),
            ("/users/1", &weak, name, 412),
            ("/users/1", &weak, set, 412),
            ("/users/1", &new, taken, 409),
            ("/users/1", "*", taken, 409),
        ];
        for foreign in &foreign {
            for body in [name, taken, set, r#"{"password":null}"#, "{}"] {
                rows.push(("/users/1", foreign, body, 412));
            }
        }
        for (target, tags, body, status) in rows {
            let answer = client.request(method, target, &[("If-Match", tags)], body);
            assert_eq!(answer.status, status, "{method} {target} {tags} {body}");
            if status == 412 {
                assert_eq!(answer.body.trim_end(), FAILED);
            }
            let now = client.get("/users/1");
            assert_eq!(
                (&now.body, tag(&now)),
                (&before.body, tag(&before)),
                "{method} {target} {tags} {body}"
            );
        }
        assert!(authenticates(&mut client, PASSWORD), "{method}");
        assert!(!authenticates(&mut client, OTHER_PASSWORD), "{method}");
        // A change that is allowed is made, with one of several tags and with none that matters.
        for (n, tags) in [new.clone(), format!("\"x\", {new}"), "*".to_owned()].into_iter().enumerate() {
            let tags = tags.replace(&new, &current(&mut client));
            let body = json!({"name": format!("{method} {n}")}).to_string();
            let answer = if_match(&mut client, method, &tags, &body);
            assert_eq!(answer.status, 200, "{method} {tags}");
            assert_eq!(client.get("/users/1").body, answer.body);
            assert_eq!(answer.json()["name"], format!("{method} {n}"));
        }
        // One that changes nothing is done as well, and keeps the tag.
        let now = current(&mut client);
        for body in ["{}", r#"{"email":"ada@example.com"}"#] {
            let answer = if_match(&mut client, method, &now, body);
            assert_eq!((answer.status, tag(&answer)), (200, now.clone()), "{method} {body}");
        }
        // A password.
        let answer = if_match(&mut client, method, &now, set);
        assert_eq!(answer.status, 200, "{method}");
        assert!(authenticates(&mut client, OTHER_PASSWORD));
        let answer = if_match(&mut client, method, &tag(&answer), r#"{"password":"correct horse"}"#);
        assert_eq!(answer.status, 200, "{method}");
        assert!(authenticates(&mut client, PASSWORD));
        // If-None-Match allows what it does not name.
        let now = current(&mut client);
        for (tags, status) in
            [("*", 412), (now.as_str(), 412), ("\"x\"", 200), (old.as_str(), 200), ("", 200), ("x", 400)]
        {
            let answer = client.request(method, "/users/1", &[("If-None-Match", tags)], "{}");
            assert_eq!(answer.status, status, "{method} {tags}");
        }
        assert_eq!(client.request(method, "/users/7", &[("If-None-Match", "*")], "{}").status, 404);
    }

    let new = current(&mut client);
    let rows = [
        ("/users/1", "x", 400),
        ("/users/7", "x", 400),
        ("/users/1", "", 412),
        ("/users/7", "\"x\"", 404),
        ("/users/7", "*", 404),
        ("/users/abc", "\"x\"", 404),
        ("/users/1", "\"x\"", 412),
        ("/users/1", old.as_str(), 412),
    ];
    for (target, tags, status) in rows {
        let answer = client.request("DELETE", target, &[("If-Match", tags)], "");
        assert_eq!(answer.status, status, "{target} {tags}");
        assert_eq!(current(&mut client), new, "{target} {tags}");
    }
    assert_eq!(client.request("DELETE", "/users/1", &[("If-None-Match", "*")], "").status, 412);
    assert_eq!(if_match(&mut client, "DELETE", &format!("\"x\", {new}"), "").status, 204);
    assert_eq!(client.get("/users/1").status, 404);
    assert_eq!(if_match(&mut client, "DELETE", &new, "").status, 404);
    assert_eq!(service.database.value("select count(*) from credentials"), "0");
    assert_eq!(client.request("DELETE", "/users/2", &[("If-Match", "*")], "").status, 204);
    assert_eq!(client.get("/users").json()["total"], 0);
}

/// A transaction of others that holds the row has changed it, or has not, when the statement gets at it.
#[test]
fn changes_that_waited_for_another_one() {
    let rows = [
        ("PUT", json!({"name": "C", "email": "c@example.com", "password": OTHER_PASSWORD})),
        ("PUT", json!({"password": null})),
        ("PATCH", json!({"name": "C"})),
        ("PATCH", json!({"password": OTHER_PASSWORD})),
        ("DELETE", Value::Null),
    ];
    for prepared in [true, false] {
        let service = Service::with(|config| {
            config.db_prepared = prepared;
            config.password_hashing = PasswordHashing::LeastCostForTests;
            config.auth_attempts = 0;
        });
        let mut client = service.client();
        let mut sql = service.database.client();
        for (method, body) in &rows {
            for first in [
                Some("update users set name = 'B' where id = 1"),
                Some("update users set name = name where id = 1"),
                Some("delete from users where id = 1"),
                None,
            ] {
                let what = format!("{method} {body} after {first:?}, prepared: {prepared}");
                sql.batch_execute("truncate users, credentials restart identity").unwrap();
                let ada = json!({"name": "A", "email": "ada@example.com", "password": PASSWORD});
                let tag = tag(&client.post("/users", ada.to_string()));
                let mut other = sql.transaction().unwrap();
                other.batch_execute(first.unwrap_or("update users set name = 'B' where id = 1")).unwrap();
                let request = sends(&service, method, &tag, body);
                service.database.waits_for_locks(1);
                match first {
                    Some(_) => other.commit().unwrap(),
                    None => other.rollback().unwrap(),
                }
                let answer = request.join().expect("an answer");
                let now = client.get("/users/1");
                let hashes = service.database.value("select count(*) from credentials");
                match first {
                    Some(first) if first.starts_with("delete") => {
                        assert_eq!((answer.status, now.status), (404, 404), "{what}");
                        assert_eq!(hashes, "0", "{what}");
                    }
                    Some(first) if first.contains("'B'") => {
                        assert_eq!(answer.status, 412, "{what}");
                        assert_eq!(now.json()["name"], "B", "{what}");
                        assert_eq!(now.json()["email"], "ada@example.com", "{what}");
                        assert!(authenticates(&mut client, PASSWORD), "{what}");
                    }
                    _ if *method == "DELETE" => {
                        assert_eq!((answer.status, now.status), (204, 404), "{what}");
                        assert_eq!(hashes, "0", "{what}");
                    }
                    _ => {
                        assert_eq!((answer.status, &answer.body), (200, &now.body), "{what}");
                        assert_eq!(answer.header("ETag"), now.header("ETag"), "{what}");
                        assert_eq!(
                            hashes,
                            if body["password"].is_null() && body.get("password").is_some() {
                                "0"
                            } else {
                                "1"
                            },
                            "{what}"
                        );
                    }
                }
            }
        }
    }
}

/// A change of user 1 with `If-Match`, in a thread of its own.
fn sends(service: &Service, method: &'static str, tag: &str, body: &Value) -> JoinHandle<Answer> {
    let (mut client, tag) = (service.client(), tag.to_owned());
    let body = if body.is_null() { String::new() } else { body.to_string() };
    thread::spawn(move || if_match(&mut client, method, &tag, &body))
}

/// One of several clients that send one tag and change something succeeds, whichever replica each of them asks.
#[test]
fn one_of_many_changes_is_made() {
    const CLIENTS: usize = 64;
    let database = Database::create();
    let replicas: [Server; 2] = [(); 2].map(|()| {
        let mut config = database.config();
        config.password_hashing = PasswordHashing::LeastCostForTests;
        config.auth_attempts = 0;
        Server::start(config).expect("a server")
    });
    let mut clients: Vec<Client> = (0..CLIENTS).map(|n| Client::new(replicas[n % 2].base_url())).collect();
    let mut client = Client::new(replicas[0].base_url());
    type Change = fn(usize) -> (&'static str, Value);
    let kinds: [(&str, Change); 6] = [
        ("names", |n| ("PUT", json!({"name": format!("{n}")}))),
        ("patches", |n| ("PATCH", json!({"name": format!("{n}"), "email": format!("{n}@example.com")}))),
        ("passwords", |n| ("PATCH", json!({"password": format!("password {n}")}))),
        ("the same", |_| ("PUT", json!({"name": "the same"}))),
        ("deletions", |_| ("DELETE", Value::Null)),
        ("all of them", |n| match n % 4 {
            0 => ("DELETE", Value::Null),
            1 => ("PATCH", json!({"password": format!("password {n}"), "name": format!("{n}")})),
            2 => ("PUT", json!({"password": null, "name": format!("{n}")})),
            _ => ("PUT", json!({"name": format!("{n}"), "email": format!("{n}@example.com")})),
        }),
    ];
    for (kind, change) in kinds {
        let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
        let created = client.post("/users", ada);
        let (path, tag) = (format!("/users/{}", created.id()), tag(&created));
        let barrier = Barrier::new(CLIENTS);
        let answers: Vec<Answer> = thread::scope(|scope| {
            let threads: Vec<_> = clients
                .iter_mut()
                .enumerate()
                .map(|(n, client)| {
                    let (path, tag, barrier) = (&path, &tag, &barrier);
                    scope.spawn(move || {
                        let (method, body) = change(n);
                        let body = if body.is_null() { String::new() } else { body.to_string() };
                        barrier.wait();
                        client.request(method, path, &[("If-Match", tag)], body)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
        });
        let done: Vec<usize> = (0..CLIENTS).filter(|n| answers[*n].status < 300).collect();
        let [winner] = done[..] else { panic!("{kind}: {done:?} were told that theirs is done") };
        let (method, body) = change(winner);
        for (n, answer) in answers.iter().enumerate().filter(|(n, _)| *n != winner) {
            let expected: &[u16] = if method == "DELETE" { &[404, 412] } else { &[412] };
            assert!(expected.contains(&answer.status), "{kind}: {n}: {answer:?}");
        }
        let now = client.get(&path);
        if method == "DELETE" {
            assert_eq!((answers[winner].status, now.status), (204, 404), "{kind}");
            assert_eq!(database.value("select count(*) from credentials"), "0", "{kind}");
            continue;
        }
        assert_eq!(
            (answers[winner].body.as_str(), answers[winner].header("ETag")),
            (now.body.as_str(), now.header("ETag")),
            "{kind}"
        );
        let user = now.json();
        assert_eq!(user["name"], body.get("name").cloned().unwrap_or("Ada".into()), "{kind}");
        assert_eq!(user["email"], body.get("email").cloned().unwrap_or("ada@example.com".into()), "{kind}");
        // Exactly one step: the versions are whole numbers.
        assert_eq!(database.value("select version from users"), "2", "{kind}");
        let expected = match body.get("password") {
            None => Some(PASSWORD.to_owned()),
            Some(password) => password.as_str().map(str::to_owned),
        };
        let accepted =
            (0..CLIENTS).map(|n| format!("password {n}")).chain([PASSWORD.to_owned()]).find(|password| {
                let body = json!({"email": user["email"], "password": password}).to_string();
                client.post("/users/authenticate", body).status == 200
            });
        assert_eq!(accepted, expected, "{kind}");
        assert_eq!(client.delete(&path).status, 204);
    }
}

// Patches

#[test]
fn patches() {
    let service = Service::start();
    check(
        &mut service.client(),
        r#"
        POST /users {"name":"Ada","email":"ada@example.com"} => 201 {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        POST /users {"name":"Bob","email":"bob@example.com"} => 201 {"id":"2","name":"Bob","email":"bob@example.com",<times>}
        PATCH /users/1 {"name":"A"} => 200 {"id":"1","name":"A","email":"ada@example.com",<times>}
        GET /users/1 => 200 {"id":"1","name":"A","email":"ada@example.com",<times>}
        PATCH /users/1 {"email":"ADA@example.com","name":""} => 200 {"id":"1","name":"","email":"ADA@example.com",<times>}
        PATCH /users/1 {} => 200 {"id":"1","name":"","email":"ADA@example.com",<times>}
        PATCH /users/1 {"email":"bob@EXAMPLE.com"} => 409 {"error":"Already exists"}
        PATCH /users/1 {"name":null} => 400 {"error":"Validation failed","errors":[{"path":"/name","keyword":"type","message":"value is not of type \"string\""}]}
        PATCH /users/1 {"email":null} => 400 {"error":"Validation failed","errors":[{"path":"/email","keyword":"type","message":"value is not of type \"string\""}]}
        PATCH /users/1 {"email":"no address"} => 400 {"error":"Validation failed","errors":[{"path":"/email","keyword":"format","message":"value is not an e-mail address: it has white space in it"}]}
        PATCH /users/1 {"name":{"first":"Ada"}} => 400 {"error":"Validation failed","errors":[{"path":"/name","keyword":"type","message":"value is not of type \"string\""}]}
        PATCH /users/1 {"password":"1234567"} => 400 {"error":"Validation failed","errors":[{"path":"/password","keyword":"minLength","message":"value is shorter than 8 characters"}]}
        PATCH /users/1 {"isAdmin":true,"name":null} => 400 {"error":"Validation failed","errors":[{"path":"/name","keyword":"type","message":"value is not of type \"string\""}]}
        PATCH /users/1 {"isAdmin":true} => 422 {"error":"These fields may not be mass assigned: \"isAdmin\""}
        PATCH /users/1 {"id":null} => 422 {"error":"These fields may not be mass assigned: \"id\""}
        PATCH /users/1 [] => 400 {"error":"Invalid JSON","message":"the body must be a JSON object"}
        PATCH /users/1 null => 400 {"error":"Invalid JSON","message":"the body must be a JSON object"}
        PATCH /users/1 => 400 {"error":"Invalid JSON","message":"the body is empty"}
        PATCH /users/3 {"name":"A"} => 404 {"error":"Not found"}
        PATCH /users/3 { => 404 {"error":"Not found"}
        PATCH /users/3 {"password":"correct horse"} => 404 {"error":"Not found"}
        PATCH /users/abc {"name":null} => 404 {"error":"Not found"}
        PATCH /users {"name":"A"} => 405 {"error":"Method not allowed"}
        PATCH /users/authenticate {"name":"A"} => 405 {"error":"Method not allowed"}
        GET /users/1 => 200 {"id":"1","name":"","email":"ADA@example.com",<times>}
        "#,
    );
}

#[test]
fn patches_of_passwords_under_every_variant() {
    use {Schema::*, Validation::*};
    for (schema, validation) in
        [(Basic, Declarative), (Basic, Parser), (Strict, Declarative), (Strict, Parser)]
    {
        let service = Service::with(|config| {
            config.schema = schema;
            config.validation = validation;
            config.password_hashing = PasswordHashing::LeastCostForTests;
            config.auth_attempts = 0;
        });
        let mut client = service.client();
        let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
        assert_eq!(client.post("/users", ada).status, 201);
        let refused = if validation == Parser { 422 } else { 400 };
        let empty = if schema == Strict { refused } else { 200 };
        // The patch, its status, and the password then.
        let rows = [
            (json!({"name": "A"}), 200, Some(PASSWORD)),
            (json!({"name": ""}), empty, Some(PASSWORD)),
            (json!({"name": null}), refused, Some(PASSWORD)),
            (json!({"email": null}), refused, Some(PASSWORD)),
            (json!({"password": ""}), refused, Some(PASSWORD)),
            (json!({"password": 12345678}), refused, Some(PASSWORD)),
            (json!({"password": OTHER_PASSWORD}), 200, Some(OTHER_PASSWORD)),
            (json!({"password": null}), 200, None),
            (json!({"password": null}), 200, None),
            (json!({"password": null, "name": null}), refused, None),
            (json!({"password": PASSWORD, "name": "B"}), 200, Some(PASSWORD)),
            (json!({"password": null, "admin": 1}), 422, Some(PASSWORD)),
        ];
        for (patch, status, password) in rows {
            let what = format!("{schema:?} {validation:?} {patch}");
            let answer = client.patch("/users/1", patch.to_string());
            assert_eq!(answer.status, status, "{what}: {answer:?}");
            if status == refused && patch.get("admin").is_none() {
                assert!(answer.json()["errors"][0]["path"].is_string(), "{what}: {answer:?}");
            }
            for tried in [PASSWORD, OTHER_PASSWORD] {
                assert_eq!(authenticates(&mut client, tried), password == Some(tried), "{what}: {tried}");
            }
        }
    }
}

#[test]
fn media_types_of_patches() {
    const ACCEPTED: &str = "application/merge-patch+json, application/json";
    let service = Service::start();
    let mut client = service.client();
    client.post("/users", ADA);
    let rows = [
        (None, 200),
        (Some("application/merge-patch+json"), 200),
        (Some("application/json"), 200),
        (Some("Application/JSON; charset=utf-8"), 200),
        (Some("application/merge-patch+json ;x=y"), 200),
        (Some("application/x-www-form-urlencoded"), 200),
        (Some("application/json-patch+json"), 415),
        (Some("application/xml"), 415),
        (Some("text/plain"), 415),
        (Some("multipart/form-data; boundary=x"), 415),
        (Some("application/jsonx"), 415),
    ];
    for (n, (media_type, status)) in rows.into_iter().enumerate() {
        let headers: Vec<_> = media_type.iter().map(|value| ("Content-Type", *value)).collect();
        let before = client.get("/users/1").body;
        let name = json!({"name": format!("{n}")}).to_string();
        let answer = client.request("PATCH", "/users/1", &headers, &name);
        assert_eq!(answer.status, status, "{media_type:?}");
        assert_eq!(client.get("/users/1").body != before, status == 200, "{media_type:?}");
        if status == 415 {
            let message = "the Content-Type of a patch is application/merge-patch+json or application/json";
            assert_eq!(answer.json(), json!({"error": "Unsupported media type", "message": message}));
            assert_eq!(answer.header("Accept-Patch"), Some(ACCEPTED));
            assert_eq!((answer.header("Accept"), answer.header("Accept-Encoding")), (Some(ACCEPTED), None));
        }
        // A missing user comes first.
        assert_eq!(client.request("PATCH", "/users/7", &headers, &name).status, 404, "{media_type:?}");
    }
    let refused = client.request("PUT", "/users/1", &[("Content-Type", "multipart/mixed")], "{}");
    assert_eq!((refused.status, refused.header("Accept-Patch")), (415, None));
    assert_eq!(refused.header("Accept"), Some("application/json"));
}
