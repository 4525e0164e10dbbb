//! Effects of a change, read back through other requests, where another transaction has changed the same user first or a
//! trigger alters it. (`model` has every combination of fields.)

use crate::support::{OTHER_PASSWORD, PASSWORD, Service};
use serde_json::{Value, json};
use userd::{PasswordHashing, users::password::Hasher};

/// A hash to be stored behind the service's back.
fn hash(clear: &str) -> String {
    Hasher::new(PasswordHashing::LeastCostForTests).hash(&clear.into()).expect("a hash").as_phc().to_owned()
}

/// Another transaction that holds user 1 has changed it, or has not, when a change gets at it.
#[test]
fn a_change_that_waited_for_another_one() {
    const RENAME: &str = "update users set name = 'B', updated_at = clock_timestamp() where id = 1";
    const UNDONE: &str = "/* undone */ update users set name = 'B' where id = 1";
    const TOUCH: &str = "update users set name = name where id = 1";
    const DELETE: &str = "delete from users where id = 1";
    let (old, other) = (hash(PASSWORD), hash(OTHER_PASSWORD));
    let set = &*format!(
        "{RENAME}; insert into credentials values (1, '{other}') \
         on conflict (user_id) do update set password_hash = excluded.password_hash"
    );
    let remove = &*format!("{RENAME}; delete from credentials where user_id = 1");
    let (name, none) = (|name: &str| json!({ "name": name }), json!({"password": null}));
    let name_and = |password: Value| json!({"name": "C", "password": password});
    let (b, c) = (Some("B a@example.com"), Some("C a@example.com"));
    // A flag that says if there was a password; the other transaction; the change and its status; name and address of the
    // user then, and the password.
    let mut rows = vec![
        (false, RENAME, "PUT", name("C"), 200, c, None),
        (false, RENAME, "PUT", name("B"), 200, b, None),
        // A password that the other one has set is removed, replaced or kept.
        (false, set, "PUT", none.clone(), 200, b, None),
        (false, set, "PUT", name_and(Value::Null), 200, c, None),
        (false, set, "PUT", name("C"), 200, c, Some(OTHER_PASSWORD)),
        (false, set, "PUT", json!({"password": PASSWORD}), 200, b, Some(PASSWORD)),
        (true, set, "PUT", none.clone(), 200, b, None),
        (true, set, "PUT", json!({"email": "c@b.co"}), 200, Some("B c@b.co"), Some(OTHER_PASSWORD)),
        // One that it has removed.
        (true, remove, "PUT", none.clone(), 200, b, None),
        (true, remove, "PUT", name_and(Value::Null), 200, c, None),
        (true, remove, "PUT", name_and(PASSWORD.into()), 200, c, Some(PASSWORD)),
        (true, DELETE, "PUT", name_and(PASSWORD.into()), 404, None, None),
        (true, DELETE, "PUT", none.clone(), 404, None, None),
    ];
    let all = json!({"name": "C", "email": "c@b.co", "password": OTHER_PASSWORD});
    for (change, body, then, opens) in [
        ("PUT If-Match", all, Some("C c@b.co"), Some(OTHER_PASSWORD)),
        ("PUT If-Match", none, Some("A a@example.com"), None),
        ("PATCH If-Match", name("C"), c, Some(PASSWORD)),
        (
            "PATCH If-Match",
            json!({"password": OTHER_PASSWORD}),
            Some("A a@example.com"),
            Some(OTHER_PASSWORD),
        ),
        ("DELETE If-Match", Value::Null, None, None),
    ] {
        let done = if body.is_null() { 204 } else { 200 };
        rows.push((true, RENAME, change, body.clone(), 412, b, Some(PASSWORD)));
        rows.push((true, DELETE, change, body.clone(), 404, None, None));
        rows.push((true, TOUCH, change, body.clone(), done, then, opens));
        rows.push((true, UNDONE, change, body, done, then, opens));
    }
    let services = [true, false].map(|prepared| {
        Service::with(|config| {
            config.db_prepared = prepared;
            config.password_hashing = PasswordHashing::LeastCostForTests;
            config.auth_attempts = 0;
        })
    });
    for (n, (had_password, first, change, body, status, then, opens)) in rows.into_iter().enumerate() {
        let service = &services[usize::from(n % 3 == 0)];
        let what = format!("{first}, then {change} {body}");
        let (mut client, mut sql) = (service.client(), service.database.client());
        sql.batch_execute(
            "truncate users, credentials restart identity; \
             insert into users (name, email) values ('A', 'a@example.com')",
        )
        .unwrap();
        if had_password {
            sql.execute("insert into credentials values (1, $1)", &[&old]).unwrap();
        }
        let tag = client.get("/users/1").header("ETag").expect("a user has one").to_owned();
        let mut transaction = sql.transaction().unwrap();
        transaction.batch_execute(first).unwrap();
        let (method, condition) = change.split_once(' ').unwrap_or((change, ""));
        let fields = [(condition, tag.as_str())];
        let fields = if condition.is_empty() { &[][..] } else { &fields };
        let sent = if body.is_null() { String::new() } else { body.to_string() };
        client.send_request(method, "/users/1", fields, sent);
        service.database.waits_for_a_lock();
        match first {
            UNDONE => transaction.rollback().unwrap(),
            _ => transaction.commit().unwrap(),
        }
        let answer = client.answer(method);
        assert_eq!(answer.status, status, "{what}");
        let found = client.get("/users/1");
        let Some(then) = then else {
            assert_eq!(found.status, 404, "{what}");
            assert_eq!(service.database.value("select count(*) from credentials"), "0", "{what}");
            continue;
        };
        if status == 200 {
            assert_eq!((&answer.body, answer.header("ETag")), (&found.body, found.header("ETag")), "{what}");
        }
        let user = found.json();
        let email = user["email"].as_str().expect("an address");
        assert_eq!(format!("{} {email}", user["name"].as_str().expect("a name")), then, "{what}");
        for password in [PASSWORD, OTHER_PASSWORD] {
            let expected = opens == Some(password);
            assert_eq!(client.opens(email, password), expected, "{what}: {password}");
        }
    }
}
