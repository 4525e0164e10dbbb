//! Effects of a change, read back through other requests, where another transaction has changed the same user first or a
//! trigger alters it. (`model` has every combination of fields.)

use crate::support::{OTHER_PASSWORD, PASSWORD, Service, hash};
use userd::PasswordHashing;

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
    let (name, none, both) = (r#"{"name":"C"}"#, r#"{"password":null}"#, r#"{"name":"C","password":null}"#);
    let set_other = r#"{"password":"battery staple"}"#;
    let set_name = r#"{"name":"C","password":"correct horse"}"#;
    let (b, c) = (Some("B a@example.com"), Some("C a@example.com"));
    // A flag that says if there was a password; the other transaction; the change and its status; name and address of the
    // user then, and the password.
    let mut rows = vec![
        (false, RENAME, "PUT", name, 200, c, None),
        (false, RENAME, "PUT", r#"{"name":"B"}"#, 200, b, None),
        // A password that the other one has set is removed, replaced or kept.
        (false, set, "PUT", none, 200, b, None),
        (false, set, "PUT", both, 200, c, None),
        (false, set, "PUT", name, 200, c, Some(OTHER_PASSWORD)),
        (false, set, "PUT", r#"{"password":"correct horse"}"#, 200, b, Some(PASSWORD)),
        (true, set, "PUT", none, 200, b, None),
        (true, set, "PUT", r#"{"email":"c@b.co"}"#, 200, Some("B c@b.co"), Some(OTHER_PASSWORD)),
        // One that it has removed.
        (true, remove, "PUT", none, 200, b, None),
        (true, remove, "PUT", both, 200, c, None),
        (true, remove, "PUT", set_name, 200, c, Some(PASSWORD)),
        (true, DELETE, "PUT", set_name, 404, None, None),
        (true, DELETE, "PUT", none, 404, None, None),
    ];
    let all = r#"{"name":"C","email":"c@b.co","password":"battery staple"}"#;
    let a = Some("A a@example.com");
    for (change, body, then, opens) in [
        ("PUT If-Match", all, Some("C c@b.co"), Some(OTHER_PASSWORD)),
        ("PUT If-Match", none, a, None),
        ("PATCH If-Match", name, c, Some(PASSWORD)),
        ("PATCH If-Match", set_other, a, Some(OTHER_PASSWORD)),
        ("DELETE If-Match", "", None, None),
    ] {
        let done = if body.is_empty() { 204 } else { 200 };
        rows.push((true, RENAME, change, body, 412, b, Some(PASSWORD)));
        rows.push((true, DELETE, change, body, 404, None, None));
        rows.push((true, TOUCH, change, body, done, then, opens));
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
        let mut client = service.client();
        service.database.run(&format!(
            "truncate users, credentials restart identity; \
             insert into users (name, email) values ('A', 'a@example.com'); \
             insert into credentials select 1, '{old}' where {had_password}"
        ));
        let tag = client.get("/users/1").header("ETag").expect("a user has one").to_owned();
        let mut transaction = service.database.transaction(first);
        let (method, condition) = change.split_once(' ').unwrap_or((change, ""));
        let fields = [(condition, tag.as_str())];
        let fields = if condition.is_empty() { &[][..] } else { &fields };
        client.send_request(method, "/users/1", fields, body);
        service.database.waits_for_a_lock();
        transaction.batch_execute(if first == UNDONE { "rollback" } else { "commit" }).unwrap();
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
