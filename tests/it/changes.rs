//! What a change leaves behind, read back through other requests: of every combination of fields, and where another
//! transaction has changed the same user first.

use crate::support::{Answer, Client, LONG, OTHER_PASSWORD, PASSWORD, Service};
use postgres::Transaction;
use serde_json::{Value, json};
use std::{
    thread::{self, JoinHandle},
    time::Instant,
};
use userd::{New, PasswordHashing, error::Error, users::password::Hasher};

/// A hash to be stored behind the service's back.
fn hash(clear: &str) -> String {
    Hasher::new(PasswordHashing::LeastCostForTests).hash(&clear.into()).expect("a hash").as_phc().to_owned()
}

/// Creates that have time.
fn news<'a>(batch: &[(&'a str, &'a str)]) -> Vec<New<'a>> {
    let deadline = Instant::now() + LONG;
    batch.iter().map(|(name, email)| New { name, email, deadline }).collect()
}

fn authenticates(client: &mut Client, email: &str, password: &str) -> bool {
    let body = json!({"email": email, "password": password}).to_string();
    match client.post("/users/authenticate", body).status {
        200 => true,
        401 => false,
        status => panic!("{status}"),
    }
}

/// A PUT in a thread of its own.
fn puts(service: &Service, target: &'static str, body: &Value) -> JoinHandle<Answer> {
    let (mut client, body) = (service.client(), body.to_string());
    thread::spawn(move || client.put(target, body))
}

#[test]
fn every_combination_of_fields() {
    let service = Service::start();
    let mut client = service.client();
    let old = hash(PASSWORD);
    let mut sql = service.database.client();
    let mut id = 0;
    for had_password in [false, true] {
        for name in [None, Some("n"), Some("m")] {
            for email in [None, Some("same"), Some("other")] {
                for password in [None, Some(Value::Null), Some(json!(OTHER_PASSWORD))] {
                    id += 1;
                    let address = format!("{id}@example.com");
                    sql.execute("insert into users (name, email) values ('n', $1)", &[&address]).unwrap();
                    if had_password {
                        let insert = "insert into credentials values ($1, $2)";
                        sql.execute(insert, &[&i64::from(id), &old]).unwrap();
                    }
                    let path = format!("/users/{id}");
                    let before = client.get(&path).json();
                    let mut body = serde_json::Map::new();
                    let now = email.map(|variant| match variant {
                        "same" => address.clone(),
                        _ => format!("Other-{address}"),
                    });
                    for (key, value) in
                        [("name", name.map(Value::from)), ("email", now.clone().map(Value::from))]
                    {
                        body.extend(value.map(|value| (key.to_owned(), value)));
                    }
                    body.extend(password.clone().map(|value| ("password".to_owned(), value)));
                    let body = Value::from(body).to_string();
                    let shown = format!(
                        "{body} of a user {}",
                        if had_password { "with a password" } else { "without" }
                    );

                    let answer = client.put(&path, &body);
                    assert_eq!(answer.status, 200, "{shown}");
                    let after = answer.json();
                    assert_eq!(client.get(&path).json(), after, "{shown}");
                    assert_eq!(after["name"], name.unwrap_or("n"), "{shown}");
                    let now = now.unwrap_or(address);
                    assert_eq!(after["email"], now, "{shown}");
                    let changes = name == Some("m")
                        || email == Some("other")
                        || password == Some(json!(OTHER_PASSWORD))
                        || (password == Some(Value::Null) && had_password);
                    let (was, is) = (before["updatedAt"].as_str(), after["updatedAt"].as_str());
                    assert_eq!(is > was, changes, "{shown}: {was:?}, {is:?}");
                    assert_eq!(after["createdAt"], before["createdAt"], "{shown}");
                    let opens = match password {
                        None if had_password => Some(PASSWORD),
                        None | Some(Value::Null) => None,
                        Some(_) => Some(OTHER_PASSWORD),
                    };
                    // The one that opens the account now, or the one that might have remained.
                    let tried = opens.unwrap_or(PASSWORD);
                    assert_eq!(authenticates(&mut client, &now, tried), opens.is_some(), "{shown}");
                    if opens == Some(OTHER_PASSWORD) && had_password {
                        assert!(!authenticates(&mut client, &now, PASSWORD), "{shown}: the old password");
                    }
                }
            }
        }
    }
}

#[test]
fn every_change_moves_updated_at() {
    let service = Service::start();
    let mut client = service.client();
    let rows = [
        // In a database whose clock is behind.
        ("2100-01-01T00:00:00Z", "2100-01-01T00:00:00.000001Z"),
        // The last moment that there is.
        ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59.999999Z"),
    ];
    for (n, (before, after)) in rows.into_iter().enumerate() {
        let insert = format!(
            "insert into users (name, email, updated_at) values ('n', '{n}@example.com', '{before}')"
        );
        service.database.run(&insert);
        let path = format!("/users/{}", n + 1);
        let changed = client.put(&path, r#"{"name":"m"}"#);
        assert_eq!((changed.status, changed.json()["updatedAt"].as_str()), (200, Some(after)));
        assert_eq!(client.get(&path).body, changed.body);
    }
}

/// What another transaction has done to user 1, with or without a password, before a PUT gets at it.
struct Race {
    had_password: bool,
    first: &'static str,
    put: Value,
    /// Name and address then; none: 404.
    then: Option<(&'static str, &'static str)>,
    opens: Option<&'static str>,
}

#[test]
fn a_change_that_waited_for_another_one() {
    const RENAME: &str = "update users set name = 'B', updated_at = clock_timestamp() where id = 1";
    const SET: &str = "insert into credentials values (1, HASH) \
        on conflict (user_id) do update set password_hash = excluded.password_hash";
    const REMOVE: &str = "delete from credentials where user_id = 1";
    let rename = |then: &str| format!("{RENAME}; {then}");
    let (set, remove): (&'static str, &'static str) =
        (String::leak(rename(SET)), String::leak(rename(REMOVE)));
    let race = |had_password, first, put, then, opens| Race { had_password, first, put, then, opens };
    let races = [
        // What was there before is a change now.
        race(false, RENAME, json!({"name": "A"}), Some(("A", "a@example.com")), None),
        race(false, RENAME, json!({"name": "B"}), Some(("B", "a@example.com")), None),
        race(false, RENAME, json!({}), Some(("B", "a@example.com")), None),
        // A password that the other one has set is removed, replaced or kept.
        race(false, set, json!({"password": null}), Some(("B", "a@example.com")), None),
        race(false, set, json!({"name": "C", "password": null}), Some(("C", "a@example.com")), None),
        race(false, set, json!({"name": "C"}), Some(("C", "a@example.com")), Some(OTHER_PASSWORD)),
        race(false, set, json!({"password": PASSWORD}), Some(("B", "a@example.com")), Some(PASSWORD)),
        race(true, set, json!({"password": null}), Some(("B", "a@example.com")), None),
        race(
            true,
            set,
            json!({"email": "c@example.com"}),
            Some(("B", "c@example.com")),
            Some(OTHER_PASSWORD),
        ),
        // One that it has removed.
        race(true, remove, json!({"password": null}), Some(("B", "a@example.com")), None),
        race(true, remove, json!({"name": "C", "password": null}), Some(("C", "a@example.com")), None),
        race(
            true,
            remove,
            json!({"name": "C", "password": PASSWORD}),
            Some(("C", "a@example.com")),
            Some(PASSWORD),
        ),
        race(true, "delete from users where id = 1", json!({"name": "C", "password": PASSWORD}), None, None),
        race(true, "delete from users where id = 1", json!({"password": null}), None, None),
    ];
    let (old, other) = (hash(PASSWORD), hash(OTHER_PASSWORD));
    for prepared in [true, false] {
        let service = Service::with(|config| {
            config.db_prepared = prepared;
            config.auth_attempts = 0;
        });
        let mut client = service.client();
        let mut sql = service.database.client();
        for race in &races {
            let what = format!("{}, then {}, prepared: {prepared}", race.first, race.put);
            sql.batch_execute(
                "truncate users, credentials restart identity; \
                 insert into users (name, email) values ('A', 'a@example.com')",
            )
            .unwrap();
            if race.had_password {
                sql.execute("insert into credentials values (1, $1)", &[&old]).unwrap();
            }
            let mut first: Transaction = sql.transaction().unwrap();
            first.batch_execute(&race.first.replace("HASH", &format!("'{other}'"))).unwrap();
            let put = puts(&service, "/users/1", &race.put);
            service.database.waits_for_locks(1);
            first.commit().unwrap();
            let answer = put.join().expect("an answer");
            let found = client.get("/users/1");
            let Some((name, email)) = race.then else {
                assert_eq!((answer.status, found.status), (404, 404), "{what}");
                assert_eq!(service.database.value("select count(*) from credentials"), "0", "{what}");
                continue;
            };
            assert_eq!(answer.status, 200, "{what}");
            assert_eq!(answer.body, found.body, "{what}");
            let user = found.json();
            assert_eq!((user["name"].as_str(), user["email"].as_str()), (Some(name), Some(email)), "{what}");
            for password in [PASSWORD, OTHER_PASSWORD] {
                let expected = race.opens == Some(password);
                assert_eq!(authenticates(&mut client, email, password), expected, "{what}: {password}");
            }
        }
    }
}

/// A removal that misses a concurrent change is retried, and succeeds among any number of other changes.
#[test]
fn removals_among_many_changes_of_one_user() {
    const CLIENTS: usize = 8;
    const CHANGES: usize = 25;
    let service = Service::with(|config| config.db_pool_size = 8);
    service.client().post("/users", r#"{"name":"Ada","email":"ada@example.com"}"#);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let mut connection = service.client();
            scope.spawn(move || {
                for change in 0..CHANGES {
                    let name = format!("{client}.{change}");
                    let body = json!({"name": name, "password": null}).to_string();
                    let answer = connection.put("/users/1", body);
                    assert_eq!((answer.status, answer.json()["name"].as_str()), (200, Some(name.as_str())));
                }
            });
        }
    });
    let last = service.client().get("/users/1").json();
    let last = last["name"].as_str().and_then(|name| name.split('.').nth(1)?.parse().ok());
    assert_eq!(last, Some(CHANGES - 1));
}

/// Each create of a batch has the user that it has stored for an outcome, whatever a trigger makes of the values.
#[test]
fn a_trigger_that_changes_what_is_created() {
    let service = Service::start();
    let mut client = service.client();
    service.database.run(
        "create function clean() returns trigger language plpgsql as $$
         begin new.email = trim(lower(new.email), '!'); new.name = 'Dr. ' || new.name; return new; end $$;
         create trigger clean before insert on users for each row execute function clean()",
    );
    let created = client.post("/users", r#"{"name":"Ada","email":"ADA@example.com"}"#);
    assert_eq!((created.status, created.json()["email"].as_str()), (201, Some("ada@example.com")));
    assert_eq!(client.get("/users/1").body, created.body);
    let batch = [
        ("Zoe", "ZOE@Example.com"),
        ("Eve", "eve@example.com"),
        // The same address for the service, and then one that the trigger makes the same.
        ("Other Zoe", "zoe@example.com"),
        ("Other Eve", "EVE@example.com!"),
        ("Other Ada", "!ada@example.com"),
        ("Bob", "BOB@example.com"),
    ];
    let outcomes = service.server.app().users().create_many(&news(&batch));
    let expected = [
        Some(("Dr. Zoe", "zoe@example.com")),
        Some(("Dr. Eve", "eve@example.com")),
        None,
        None,
        None,
        Some(("Dr. Bob", "bob@example.com")),
    ];
    assert_eq!(outcomes.len(), expected.len());
    for (outcome, expected) in outcomes.into_iter().zip(expected) {
        match (outcome, expected) {
            (Ok(user), Some((name, email))) => {
                assert_eq!((user.name.as_str(), user.email.as_str()), (name, email));
                let found = client.get(&format!("/users/{}", user.id)).json();
                assert_eq!((found["name"].as_str(), found["email"].as_str()), (Some(name), Some(email)));
            }
            (Err(Error::AlreadyExists), None) => {}
            (outcome, expected) => panic!("{outcome:?} instead of {expected:?}"),
        }
    }
    assert_eq!(client.get("/users").json()["total"], 4);
}

/// A trigger that leaves out what it does not want, and changes another name: the others have their users.
#[test]
fn a_trigger_that_leaves_out_what_is_created() {
    let service = Service::start();
    let mut client = service.client();
    service.database.run(
        "create function refuse() returns trigger language plpgsql as $$
         begin
             if new.name = 'Mallory' then return null; end if;
             if new.name = 'Eve' then new.name = 'Dr. Eve'; end if;
             return new;
         end $$;
         create trigger refuse before insert on users for each row execute function refuse()",
    );
    for round in 1..=2 {
        let emails: Vec<_> =
            ["z", "m", "e", "a", "n"].iter().map(|name| format!("{name}{round}@example.com")).collect();
        let names = ["Zoe", "Mallory", "Eve", "Ada", "Mallory"];
        let batch: Vec<_> = names.into_iter().zip(emails.iter().map(String::as_str)).collect();
        let outcomes = service.server.app().users().create_many(&news(&batch));
        for ((name, email), outcome) in batch.into_iter().zip(outcomes) {
            let user = match outcome {
                Ok(user) => user,
                Err(Error::AlreadyExists) if name == "Mallory" => continue,
                Err(error) => panic!("{name}: {error:?}"),
            };
            let stored = name.replace("Eve", "Dr. Eve");
            let found = client.get(&format!("/users/{}", user.id)).json();
            assert_eq!(
                (found["name"].as_str(), found["email"].as_str()),
                (Some(stored.as_str()), Some(email))
            );
        }
    }
    assert_eq!(client.get("/users").json()["total"], 6);
}
