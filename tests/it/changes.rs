//! Effects of a change, read back through other requests: of every combination of fields, and where another
//! transaction has changed the same user first.

use crate::support::{Answer, Client, LONG, OTHER_PASSWORD, PASSWORD, Service};
use postgres::Transaction;
use serde_json::{Value, json};
use std::{
    thread::{self, JoinHandle},
    time::Instant,
};
use userd::{
    New, PasswordHashing,
    error::Error,
    users::{password::Hasher, user::Values},
};

/// A hash to be stored behind the service's back.
fn hash(clear: &str) -> String {
    Hasher::new(PasswordHashing::LeastCostForTests).hash(&clear.into()).expect("a hash").as_phc().to_owned()
}

/// Creates that have time.
fn news<'a>(batch: &[(&'a str, &'a str)]) -> Vec<New<'a>> {
    let deadline = Instant::now() + LONG;
    batch.iter().map(|(name, email)| New { values: Values::new(name, email), deadline }).collect()
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

/// A PUT of some of the fields, of a user with or without a password.
#[derive(Debug, Clone)]
struct Combination {
    id: usize,
    had_password: bool,
    name: Option<&'static str>,
    email: Option<String>,
    password: Option<Value>,
}

impl Combination {
    /// All of them; that of a new address has another case first.
    fn all() -> Vec<Combination> {
        let mut all = Vec::new();
        for had_password in [false, true] {
            for name in [None, Some("n"), Some("m")] {
                for email in [None, Some(""), Some("Other-")] {
                    for password in [None, Some(Value::Null), Some(json!(OTHER_PASSWORD))] {
                        let id = all.len() + 1;
                        let email = email.map(|prefix| format!("{prefix}{}", address(id)));
                        all.push(Combination { id, had_password, name, email, password });
                    }
                }
            }
        }
        all
    }

    fn path(&self) -> String {
        format!("/users/{}", self.id)
    }

    fn body(&self) -> String {
        let fields = [
            ("name", self.name.map(Value::from)),
            ("email", self.email.clone().map(Value::from)),
            ("password", self.password.clone()),
        ];
        let present = fields.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Value::from(present.collect::<serde_json::Map<_, _>>()).to_string()
    }

    /// The user is then as it was asked for and answered.
    fn check(&self, client: &mut Client, before: &Value, answer: &Answer, how: &str) {
        let shown = format!("{} of {self:?}, {how}", self.body());
        assert_eq!(answer.status, 200, "{shown}: {}", answer.body);
        let after = answer.json();
        assert_eq!(client.get(&self.path()).json(), after, "{shown}");
        assert_eq!(after["name"], self.name.unwrap_or("n"), "{shown}");
        let now = self.email.clone().unwrap_or(address(self.id));
        assert_eq!(after["email"], now, "{shown}");
        let sets = self.password == Some(json!(OTHER_PASSWORD));
        let removes = self.password == Some(Value::Null);
        let changes =
            self.name == Some("m") || now != address(self.id) || sets || removes && self.had_password;
        let (was, is) = (before["updatedAt"].as_str(), after["updatedAt"].as_str());
        assert_eq!(is > was, changes, "{shown}: {was:?}, {is:?}");
        assert_eq!(after["createdAt"], before["createdAt"], "{shown}");
        let opens = match &self.password {
            None if self.had_password => Some(PASSWORD),
            None | Some(Value::Null) => None,
            Some(_) => Some(OTHER_PASSWORD),
        };
        // The one that opens the account now, or the one that might have remained.
        let tried = opens.unwrap_or(PASSWORD);
        assert_eq!(authenticates(client, &now, tried), opens.is_some(), "{shown}");
        if opens == Some(OTHER_PASSWORD) && self.had_password {
            assert!(!authenticates(client, &now, PASSWORD), "{shown}: the old password");
        }
    }
}

fn address(id: usize) -> String {
    format!("{id}@example.com")
}

/// Alone, all at once, and all at once among deletes and creates.
#[test]
fn every_combination_of_fields() {
    let (all, old) = (Combination::all(), hash(PASSWORD));
    assert_eq!(all.len(), 54);
    for (sessions, prepared) in [(1, true), (2, true), (8, true), (1, false), (2, false), (8, false)] {
        let service = Service::with(|config| {
            config.db_pool_size = sessions;
            config.db_prepared = prepared;
            config.password_hashing = PasswordHashing::LeastCostForTests;
        });
        let mut client = service.client();
        let mut sql = service.database.client();
        for (way, others) in [("alone", 0), ("together", 0), ("among others", 20)] {
            let how = format!("{way}, {sessions} sessions, prepared: {prepared}");
            sql.batch_execute("truncate users, credentials restart identity").unwrap();
            sql.execute(
                "insert into users (name, email) select 'n', i || '@example.com' from generate_series(1, $1) i",
                &[&((all.len() + others) as i32)],
            )
            .unwrap();
            for combination in all.iter().filter(|combination| combination.had_password) {
                let insert = "insert into credentials values ($1, $2)";
                sql.execute(insert, &[&(combination.id as i64), &old]).unwrap();
            }
            let before: Vec<Value> = all.iter().map(|one| client.get(&one.path()).json()).collect();
            let answers: Vec<Answer> = match way {
                "alone" => all.iter().map(|one| client.put(&one.path(), one.body())).collect(),
                _ => thread::scope(|scope| {
                    let puts: Vec<_> = all
                        .iter()
                        .map(|one| (service.client(), one))
                        .map(|(mut client, one)| scope.spawn(move || client.put(&one.path(), one.body())))
                        .collect();
                    for id in all.len() + 1..=all.len() + others {
                        let (mut deletes, mut creates) = (service.client(), service.client());
                        scope.spawn(move || {
                            assert_eq!(deletes.delete(&format!("/users/{id}")).status, 204);
                        });
                        scope.spawn(move || {
                            let body = json!({"name": "new", "email": format!("new{id}@example.com")});
                            assert_eq!(creates.post("/users", body.to_string()).status, 201);
                        });
                    }
                    puts.into_iter().map(|put| put.join().expect("an answer")).collect()
                }),
            };
            for ((combination, before), answer) in all.iter().zip(&before).zip(&answers) {
                combination.check(&mut client, before, answer, &how);
            }
            assert_eq!(client.get("/users").json()["total"], all.len() + others, "{how}");
            for id in all.len() + 1..=all.len() + others {
                assert_eq!(client.get(&format!("/users/{id}")).status, 404, "{how}");
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

/// Changes of user 1 by another transaction, with or without a password, before a PUT gets at it.
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
        race(false, RENAME, json!({"name": "C"}), Some(("C", "a@example.com")), None),
        race(false, RENAME, json!({"name": "B"}), Some(("B", "a@example.com")), None),
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

/// A refusal by the committed record is answered at once: that nothing changes, that its state does not allow the change.
#[test]
fn what_changes_nothing_waits_for_no_lock() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        let mut client = service.client();
        let before = client.post("/users", r#"{"name":"A","email":"a@example.com"}"#);
        let tag = before.header("ETag").unwrap().to_owned();
        let mut sql = service.database.client();
        let mut other = sql.transaction().unwrap();
        other.batch_execute("update users set name = 'B'").unwrap();
        let rows = [
            (None, json!({"name": "A"}), 200),
            (None, json!({"name": "A", "email": "a@example.com"}), 200),
            (None, json!({}), 200),
            (Some(tag.as_str()), json!({"name": "A"}), 200),
            (Some("\"x\""), json!({"name": "C"}), 412),
        ];
        for (tag, body, status) in rows {
            for method in ["PUT", "PATCH"] {
                let field = tag.map(|tag| ("If-Match", tag));
                let answer = client.request(method, "/users/1", field.as_slice(), body.to_string());
                assert_eq!(answer.status, status, "{method} {body}");
                assert!(status != 200 || answer.body == before.body, "{method} {body}");
            }
        }
        other.commit().unwrap();
        let found = client.get("/users/1");
        assert_eq!((found.status, found.json()["name"].as_str()), (200, Some("B")));
        assert_ne!(found.header("ETag"), Some(tag.as_str()));
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
        // An address that is equal for the service, and then one that the trigger makes equal.
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
