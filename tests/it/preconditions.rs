//! Changing safely: entity tags, and requests that depend on them.

use crate::support::{ADA, Answer, Client, Database, PASSWORD, Service};
use serde_json::{Value, json};
use userd::{PasswordHashing, Server};

/// The strong tag of an answer with one user.
fn tag(answer: &Answer) -> String {
    let tag = answer.header("ETag").unwrap_or_else(|| panic!("no tag: {answer:?}"));
    let inner = tag.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    assert!(inner.is_some_and(|inner| !inner.is_empty() && !inner.contains('"')), "{tag}");
    tag.to_owned()
}

// Tags

/// A change that the service makes moves the tag and `updatedAt`; one that changes nothing writes nothing.
#[test]
fn changes_by_the_service_move_the_tag() {
    let service = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    let mut client = service.client();
    let created = client.post("/users", ADA).json();
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
        (ADA, true),
    ];
    // A moment that the clock is past, one that it has not reached, and the last one that there is.
    for now in ["2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"] {
        for method in ["PUT", "PATCH"] {
            service.database.run(&format!(
                "update users set name = 'Ada', email = 'ada@example.com', updated_at = '{now}'; delete from credentials"
            ));
            let mut tags = vec![tag(&client.get("/users/1"))];
            for (body, changes) in rows {
                let what = format!("{now} {method} {body}");
                let row = || service.database.value("select xmin || ' ' || ctid from users");
                let (before, row_before) = (client.get("/users/1"), row());
                let answer = client.request(method, "/users/1", &[], body);
                assert_eq!(answer.status, 200, "{what}");
                let new = tag(&answer);
                let found = client.get("/users/1");
                assert_eq!((&found.body, tag(&found)), (&answer.body, new.clone()), "{what}");
                assert_eq!(answer.json()["createdAt"], created["createdAt"], "{what}");
                assert_eq!((tags.last() != Some(&new), row() != row_before), (changes, changes), "{what}");
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
    // In `public`, an operator of a row type is found before that of `pg_catalog`.
    const DECOYS: &str = "\
        create function decoy(users, users) returns boolean language plpgsql as $$ begin raise 'a decoy was used'; end $$; \
        create operator = (leftarg = users, rightarg = users, function = decoy); \
        create operator <> (leftarg = users, rightarg = users, function = decoy); \
        create operator *<> (leftarg = users, rightarg = users, function = decoy); \
        create function decoy(bigint, int) returns bigint language plpgsql as $$ begin raise 'a decoy was used'; end $$; \
        create operator + (leftarg = bigint, rightarg = int, function = decoy)";
    let service = Service::start();
    let mut client = service.client();
    client
        .post("/users", json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string());
    let rows = [
        ("alter table users add note text, add doc json", false),
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
        (DECOYS, false),
        ("set search_path = public, pg_catalog; update users set name = 'G'", true),
        ("set search_path = public, pg_catalog; update users set name = 'G'", false),
        // PostgreSQL computes it after the trigger.
        ("alter table users add twice text generated always as (name || name) stored", false),
        ("update users set name = 'H'", true),
        ("alter table users drop twice; update users set name = 'H'", false),
        // An id that is used again.
        (
            "delete from users; insert into users (id, name, email) overriding system value \
             values (1, 'Eve', 'eve@example.com')",
            true,
        ),
        ("update users set updated_at = timestamptz '2020-01-01T00:00:00Z'", true),
        // A copy, as one that is restored, has the times of the original.
        (
            "create table copy as select * from users; delete from users; \
             insert into users (id, name, email, created_at, updated_at) overriding system value \
             select id, 'Zoe', email, created_at, updated_at from copy",
            true,
        ),
        // Two changes of one restored record.
        (
            "delete from users; insert into users overriding system value select * from copy; \
             update users set name = 'Ida'",
            true,
        ),
        (
            "delete from users; insert into users overriding system value select * from copy; \
             update users set name = 'Joe'",
            true,
        ),
    ];
    let mut tags = vec![tag(&client.get("/users/1"))];
    for (sql, changes) in rows {
        service.database.run(sql);
        let new = tag(&client.get("/users/1"));
        assert_eq!(tags.last() != Some(&new), changes, "{sql}");
        assert_eq!(tags.contains(&new), !changes, "{sql}");
        tags.extend(changes.then_some(new));
        // A record that is answered as not modified is not.
        let last = tags.last().expect("one");
        let unmodified = client.request("GET", "/users/1", &[("If-None-Match", last)], "");
        assert_eq!(unmodified.status, 304, "{sql}");
    }
}

// Requests that depend on tags

#[test]
fn reads_that_depend_on_tags() {
    Service::start().check(
        r#"
        POST /users {"name":"Ada","email":"ada@example.com"} => 201 <ETag: $old> *
        PUT /users/1 {"name":"A"} => 200 <ETag: $new> *
        GET|HEAD /users/1 <If-None-Match: $new> => 304 <ETag: $new>
        GET|HEAD /users/1 <if-none-match: $old, $new> => 304 <ETag: $new>
        GET /users/1 <If-None-Match: "x", W/"a,b", $new, ""> => 304 <ETag: $new>
        GET /users/1 <If-None-Match: $old> <If-None-Match: $new> => 304 <ETag: $new>
        GET|HEAD /users/1 <If-None-Match: W/$new> => 304 <ETag: $new>
        GET|HEAD /users/1 <If-None-Match: *> => 304 <ETag: $new>
        GET|HEAD /users/1 <If-None-Match: $old> => 200 <ETag: $new> *
        GET /users/1 <If-None-Match:> => 200 *
        GET|HEAD /users/1 <If-Match: $new> => 200 <ETag: $new> *
        GET /users/1 <If-Match: *> => 200 *
        GET|HEAD /users/1 <If-Match: $old> => 412 <!ETag> {"error":"Precondition failed"}
        GET /users/1 <If-Match: W/$new> => 412 <!ETag> {"error":"Precondition failed"}
        GET /users/1 <If-Match:> => 412 *
        GET|HEAD /users/1 <If-None-Match: 1> => 400 <!ETag> *
        GET /users/1 <If-Match: x> => 400 *
        GET /users/1 <If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT> => 200 *
        GET /users/2 <If-None-Match: *> => 404 *
        GET /users/abc <If-None-Match: *> => 404 *
        GET /users/2 <If-None-Match: x> => 400 *
        GET /users/abc <If-None-Match: x> => 400 *
        GET /users <If-None-Match: *> => 200 *
        GET /users?after=0 <If-None-Match: *> => 200 *
        GET /users?email=ada@example.com <If-None-Match: *> => 200 *
        "#,
    );
}

/// Order: a malformed field, a missing user, the body, the tag, the address. What is refused changes nothing.
#[test]
fn changes_that_depend_on_tags() {
    let service = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    service.check(
        r#"
        POST /users {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 201 <ETag: $old> *
        POST /users {"name":"Bob","email":"bob@example.com"} => 201 *
        PUT /users/1 {"name":"A"} => 200 <ETag: $new> *
        PUT|PATCH|DELETE /users/1 <If-Match: x> {"name":"B"} => 400 *
        PUT|PATCH|DELETE /users/7 <If-Match: x> {"name":"B"} => 400 *
        PUT|PATCH /users/abc <If-Match: "x> {"name":"B"} => 400 *
        PUT|PATCH|DELETE /users/7 <If-Match:> {"name":"B"} => 404 *
        PUT|PATCH|DELETE /users/7 <If-Match: *> {"name":"B"} => 404 *
        PUT|PATCH|DELETE /users/7 <If-Match: "x"> { => 404 *
        PUT|PATCH /users/7 <If-Match: "x"> {"password":"battery staple"} => 404 *
        PUT|PATCH|DELETE /users/abc <If-Match: $new> {"name":"B"} => 404 *
        PUT|PATCH /users/7 <If-None-Match: *> {} => 404 *
        PUT|PATCH /users/1 <If-Match:> { => 400 *
        PUT|PATCH /users/1 <If-Match: "x"> { => 400 *
        PUT|PATCH /users/1 <If-Match: $new> { => 400 *
        PUT|PATCH /users/1 <If-Match: "x"> {"isAdmin":true} => 422 *
        PUT|PATCH /users/1 <If-Match: $new> {"id":"7"} => 422 *
        PUT|PATCH|DELETE /users/1 <If-Match:> {"name":"B"} => 412 {"error":"Precondition failed"}
        PUT|PATCH|DELETE /users/1 <If-Match: , ,> {"password":"battery staple"} => 412 {"error":"Precondition failed"}
        PUT|PATCH|DELETE /users/1 <If-Match: $old> {"name":"B"} => 412 {"error":"Precondition failed"}
        PUT|PATCH|DELETE /users/1 <If-Match: W/$new> {"name":"B"} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-Match: "x", "y"> {"email":"BOB@example.com"} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-Match: ""> {"password":null} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-Match: $old> {"password":"battery staple"} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-Match: "x"> {} => 412 {"error":"Precondition failed"}
        PUT|PATCH|DELETE /users/1 <If-None-Match: *> {} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-None-Match: $new> {} => 412 {"error":"Precondition failed"}
        PUT|PATCH /users/1 <If-None-Match: x> {} => 400 *
        PUT|PATCH /users/1 <If-Match: $new> {"email":"BOB@example.com"} => 409 {"error":"Already exists"}
        PUT|PATCH /users/1 <If-Match: *> {"email":"BOB@example.com"} => 409 {"error":"Already exists"}
        GET /users/1 => 200 <ETag: $new> {"id":"1","name":"A","email":"ada@example.com",<times>}
        POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => 200 *
        PUT|PATCH /users/1 <If-Match: $new> {} => 200 <ETag: $new> *
        PUT|PATCH /users/1 <If-Match: $new> {"email":"ada@example.com"} => 200 <ETag: $new> *
        PUT|PATCH /users/1 <If-None-Match: "x", $old> {} => 200 <ETag: $new> *
        PUT /users/1 <If-Match: $new> {"name":"B"} => 200 <ETag: $b> {"id":"1","name":"B","email":"ada@example.com",<times>}
        PATCH /users/1 <If-Match: "x", $b> {"name":"C"} => 200 <ETag: $c> {"id":"1","name":"C","email":"ada@example.com",<times>}
        PUT /users/1 <If-Match: *> {"password":"battery staple"} => 200 <ETag: $d> *
        POST /users/authenticate {"email":"ada@example.com","password":"battery staple"} => 200 *
        PATCH /users/1 <If-Match: $d> {"password":"correct horse"} => 200 <ETag: $e> *
        POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => 200 *
        GET /users/1 => 200 <ETag: $e> {"id":"1","name":"C","email":"ada@example.com",<times>}
        DELETE /users/1 <If-Match: $new> => 412 {"error":"Precondition failed"}
        DELETE /users/1 <If-Match: "x", $e> => 204
        DELETE /users/1 <If-Match: $e> => 404 {"error":"Not found"}
        sql select count(*) from credentials => 0
        DELETE /users/2 <If-Match: *> => 204
        GET /users => 200 {"data":[],"total":0,*
        "#,
    );
}

/// One of several clients that send one tag and change something succeeds, whichever replica each of them asks.
#[test]
fn one_of_many_changes_is_made() {
    const CLIENTS: usize = 16;
    let database = Database::create();
    let replicas: [Server; 2] = database.replicas();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|n| Client::new(replicas[n % 2].base_url())).collect();
    let mut client = Client::new(replicas[0].base_url());
    let change = |kind: &str, n: usize| match (kind, n % 4) {
        ("one body", _) => ("PUT", json!({"name": "one body"})),
        ("names", _) => ("PATCH", json!({"name": format!("{n}"), "email": format!("{n}@example.com")})),
        ("passwords", _) => ("PATCH", json!({"password": format!("password {n}")})),
        ("deletions", _) | (_, 0) => ("DELETE", Value::Null),
        (_, 1) => ("PATCH", json!({"password": format!("password {n}"), "name": format!("{n}")})),
        (_, 2) => ("PUT", json!({"password": null, "name": format!("{n}")})),
        (_, _) => ("PUT", json!({"name": format!("{n}"), "email": format!("{n}@example.com")})),
    };
    // Notes each step of a record.
    database.run(
        "create table steps (id bigint);
         create function step() returns trigger language plpgsql as
             $$ begin insert into steps values (new.id); return null; end $$;
         create trigger step after update on users for each row execute function step()",
    );
    for kind in ["one body", "names", "passwords", "deletions", "all of them"] {
        let ada = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
        let created = client.post("/users", ada);
        let (path, tag) = (format!("/users/{}", created.id()), tag(&created));
        for (n, client) in clients.iter_mut().enumerate() {
            let (method, body) = change(kind, n);
            let body = if body.is_null() { String::new() } else { body.to_string() };
            client.send_request(method, &path, &[("If-Match", &tag)], body);
        }
        let answers = clients.iter_mut().enumerate().map(|(n, client)| client.answer(change(kind, n).0));
        let answers: Vec<Answer> = answers.collect();
        let done: Vec<usize> = (0..CLIENTS).filter(|n| answers[*n].status < 300).collect();
        let [winner] = done[..] else { panic!("{kind}: {done:?} were told that theirs is done") };
        let (method, body) = change(kind, winner);
        for answer in answers.iter().filter(|answer| answer.status >= 300) {
            assert!(answer.status == 412 || method == "DELETE" && answer.status == 404, "{kind}: {answer:?}");
        }
        let now = client.get(&path);
        if method == "DELETE" {
            assert_eq!((answers[winner].status, now.status), (204, 404), "{kind}");
            assert_eq!(database.value("select count(*) from credentials"), "0", "{kind}");
            continue;
        }
        let won = &answers[winner];
        assert_eq!((&won.body, won.header("ETag")), (&now.body, now.header("ETag")), "{kind}");
        let user = now.json();
        assert_eq!(user["name"], body.get("name").cloned().unwrap_or("Ada".into()), "{kind}");
        assert_eq!(user["email"], body.get("email").cloned().unwrap_or("ada@example.com".into()), "{kind}");
        let steps = format!("select count(*) from steps where id = {}", created.id());
        assert_eq!(database.value(&steps), "1", "{kind}");
        let expected = body.get("password").cloned().unwrap_or(PASSWORD.into());
        let passwords = (0..CLIENTS).map(|n| format!("password {n}")).chain([PASSWORD.to_owned()]);
        let accepted: Vec<String> = passwords
            .filter(|password| client.opens(user["email"].as_str().expect("an address"), password))
            .collect();
        assert_eq!(accepted, expected.as_str().into_iter().collect::<Vec<_>>(), "{kind}");
        assert_eq!(client.delete(&path).status, 204);
    }
}
