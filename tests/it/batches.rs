//! Creates, updates and deletes of many users in one statement: each has the outcome that it would have had alone, and
//! none is sent whose time is nearly up, so that its statement has ended before its request is answered.

use crate::support::{ADA, Database, LONG, Service, eventually};
use serde_json::{Value, json};
use std::time::Instant;
use userd::{
    Response,
    internals::{
        Command, Condition, Create, Delete, Error, NewUser, Outcome, Revision, Update, UserChanges,
        operations,
    },
};

/// Users 1 to `count`, without passwords.
fn users(service: &Service, count: usize) {
    service.database.run(&format!(
        "truncate users, credentials restart identity; \
         insert into users (name, email) select 'n' || i, i || '@example.com' from generate_series(1, {count}) i"
    ));
}

/// The condition of the state that a user has now.
fn current(service: &Service, id: i64) -> Condition {
    let user = operations(service.server.app()).find_by_ids(&[id]).expect("an answer").remove(0);
    let revision = Revision { version: user.version, updated_at: user.updated_at };
    Condition { if_match: Some(vec![revision]), ..Condition::default() }
}

fn stale(service: &Service, id: i64) -> Condition {
    let Revision { version, updated_at } = current(service, id).if_match.expect("one state")[0];
    Condition { if_match: Some(vec![Revision { version: version + 1, updated_at }]), ..Condition::default() }
}

/// A condition that no state fulfils.
fn none() -> Condition {
    Condition { if_match: Some(Vec::new()), ..Condition::default() }
}

/// The users that are as they were created and that a transaction has locked or tried to change: their rows have its number.
fn locked(service: &Service) -> Vec<i64> {
    let query = "select id from users where xmax <> 0 and updated_at = created_at order by id";
    let rows = service.database.client().query(query, &[]).unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// Executes commands in one batch. Returns each outcome as a text: of a user, if the answer has one, or of an error.
fn execute(service: &Service, commands: impl IntoIterator<Item = (Command, Instant)>) -> Vec<String> {
    let mut commands: Vec<(Command, Instant)> = commands.into_iter().collect();
    let commands = commands.iter_mut().map(|(command, deadline)| (command, *deadline)).collect();
    let text = |outcome| match outcome {
        Outcome::Answer(Ok(Response { status: 200 | 201, body, .. })) => {
            let user: Value = serde_json::from_slice(&body).expect("a user");
            format!("{} {}", user["name"].as_str().unwrap(), user["email"].as_str().unwrap())
        }
        Outcome::Answer(Ok(_)) => "done".to_owned(),
        Outcome::Answer(Err(Error::Database { .. })) => "Database".to_owned(),
        Outcome::Answer(Err(Error::Unavailable(_))) => "Unavailable".to_owned(),
        Outcome::Answer(Err(error)) => format!("{error:?}"),
        outcome => format!("{outcome:?}"),
    };
    operations(service.server.app()).execute(commands).into_iter().map(text).collect()
}

/// Names and addresses, and the moment until which each may take.
fn create(service: &Service, rows: &[(&str, &str, Instant)]) -> Vec<String> {
    let create = |(name, email, deadline): &(&str, &str, Instant)| {
        let user = NewUser { name: (*name).to_owned(), email: (*email).to_owned(), password: None };
        (Command::Create(Create { user, key: None, hash: None, peer: None }), *deadline)
    };
    execute(service, rows.iter().map(create))
}

/// Ids, new names and addresses, and conditions. An update that is for another statement is `Continue`.
type Updates<'a> = &'a [(i64, Option<&'a str>, Option<&'a str>, &'a Condition)];

fn update(service: &Service, rows: Updates, deadline: Instant) -> Vec<String> {
    let update = rows.iter().map(|(id, name, email, condition)| {
        let [name, email] = [name, email].map(|text| text.map(str::to_owned));
        let (changes, condition) = (UserChanges { name, email, password: None }, Condition::clone(condition));
        (Command::Update(Update { id: *id, changes, condition, hash: None, is_unbatched: false }), deadline)
    });
    execute(service, update)
}

fn delete(service: &Service, rows: &[(i64, &Condition)], deadline: Instant) -> Vec<String> {
    let delete = |(id, condition): &(i64, &Condition)| {
        (Command::Delete(Delete { id: *id, condition: Condition::clone(condition) }), deadline)
    };
    execute(service, rows.iter().map(delete))
}

#[test]
fn each_change_of_a_batch_has_its_outcome() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        users(&service, 10);
        let mut client = service.client();
        let before = client.get("/users").json();
        let lock = "update users set name = 'locked' where id in (5, 9, 10)";
        let mut other = service.database.transaction(lock);
        let (any, now, old) = (Condition::default(), current(&service, 7), stale(&service, 8));
        let batch: Updates = &[
            (8, Some("m8"), None, &old),
            (1, Some("m1"), None, &any),
            (99, Some("m"), None, &any),
            (5, Some("m5"), None, &any),
            (3, Some("m3"), Some("new@example.com"), &any),
            (2, Some("n2"), Some("2@example.com"), &any),
            (4, None, Some("4@EXAMPLE.com"), &any),
            (7, Some("m7"), Some("7@example.com"), &now),
            (6, Some("m6"), None, &none()),
            // Values that the committed record has already, or refuses, wait for no lock.
            (9, Some("n9"), None, &any),
            (10, Some("m10"), None, &none()),
        ];
        let expected = [
            "PreconditionFailed",
            "m1 1@example.com",
            "NotFound",
            "RetryLater",
            "Continue",
            "n2 2@example.com",
            "n4 4@EXAMPLE.com",
            "m7 7@example.com",
            "PreconditionFailed",
            "n9 9@example.com",
            "PreconditionFailed",
        ];
        assert_eq!(update(&service, batch, Instant::now() + LONG), expected, "prepared: {prepared}");
        other.batch_execute("rollback").unwrap();
        assert_eq!(locked(&service), [5, 9, 10], "by the other transaction");
        let after = client.get("/users").json();
        for id in 1..=10 {
            let (before, after) = (&before["data"][id - 1], &after["data"][id - 1]);
            match id {
                1 | 7 => assert_eq!(after["name"], format!("m{id}")),
                4 => assert_eq!(after["email"], "4@EXAMPLE.com"),
                _ => assert_eq!(before, after),
            }
            assert_eq!(before["updatedAt"] != after["updatedAt"], [1, 4, 7].contains(&id), "{id}");
        }
        // Deletes.
        users(&service, 6);
        let (now, old) = (current(&service, 3), stale(&service, 4));
        let mut other = service.database.transaction("select from users where id = 5 for key share");
        let batch = [(5, &any), (4, &old), (99, &any), (3, &now), (1, &any)];
        let expected = ["RetryLater", "PreconditionFailed", "NotFound", "done", "done"];
        assert_eq!(delete(&service, &batch, Instant::now() + LONG), expected, "prepared: {prepared}");
        other.batch_execute("rollback").unwrap();
        assert_eq!(locked(&service), [5], "by the other transaction");
        let left = "select string_agg(id::text, ' ' order by id) from users";
        assert_eq!(service.database.value(left), "2 4 5 6");
        assert_eq!(client.get("/users").json()["total"], 4);
    }
}

/// Triggers that refuse a row, leave it out, or make two addresses equal: each other change is made, and has the user that
/// is stored for an outcome.
#[test]
fn what_a_trigger_refuses_is_refused_alone() {
    let service = Service::start();
    service.database.run(
        "create function judge() returns trigger language plpgsql as $$
         begin
             if new.name = 'bad' then raise exception 'no' using errcode = 'U0001'; end if;
             if new.name = 'left out' then return null; end if;
             if new.name = 'moved' then new.email = 'taken@example.com'; end if;
             new.email = trim(lower(new.email), '!');
             return new;
         end $$;
         create trigger judge before insert or update on users for each row execute function judge();
         create function keep() returns trigger language plpgsql as $$
         begin
             if old.id = 2 then raise exception 'no'; end if;
             if old.id = 4 then return null; end if;
             return old;
         end $$;
         create trigger keep before delete on users for each row execute function keep()",
    );
    let stored = "select string_agg(name || ' ' || email, ', ' order by id) from users";
    let soon = Instant::now() + LONG;
    assert_eq!(
        service.client().post("/users", ADA.replace("ada@", "ADA@")).json()["email"],
        "ada@example.com"
    );
    let batch = [
        ("Zoe", "ZOE@Example.com", soon),
        ("left out", "mallory@example.com", soon),
        ("Eve", "eve@example.com", soon),
        ("bad", "bad@example.com", soon),
        // An address that is equal for the service, and then some that the trigger makes equal.
        ("Other Zoe", "zoe@example.com", soon),
        ("Other Eve", "EVE@example.com!", soon),
        ("Other Ada", "!ada@example.com", soon),
        ("Bob", "BOB@example.com", soon),
    ];
    let [zoe, eve, bob] = ["Zoe zoe@example.com", "Eve eve@example.com", "Bob bob@example.com"];
    let taken = "AlreadyExists";
    assert_eq!(create(&service, &batch), [zoe, taken, eve, "Database", taken, taken, taken, bob]);
    let mut found: Vec<String> = service.database.value(stored).split(", ").map(str::to_owned).collect();
    found.sort_unstable();
    assert_eq!(found, ["Ada ada@example.com", bob, eve, zoe]);

    users(&service, 8);
    let any = &Condition::default();
    let batch: Updates = &[
        (1, Some("m1"), None, any),
        (3, Some("bad"), None, any),
        (5, Some("left out"), None, any),
        (6, Some("moved"), None, any),
        (7, Some("moved"), None, any),
        (8, Some("m8"), None, any),
    ];
    let [first, left_out, moved, last] =
        ["m1 1@example.com", "n5 5@example.com", "moved taken@example.com", "m8 8@example.com"];
    assert_eq!(update(&service, batch, soon), [first, "Database", "Database", moved, taken, last]);
    let unchanged = "n2 2@example.com, n3 3@example.com, n4 4@example.com";
    let expected = format!("{first}, {unchanged}, {left_out}, {moved}, n7 7@example.com, {last}");
    assert_eq!(service.database.value(stored), expected);

    let batch = [(1, any), (2, any), (4, any), (5, any), (6, any), (7, any), (8, any)];
    let expected = ["done", "Database", "Database", "done", "done", "done", "done"];
    assert_eq!(delete(&service, &batch, soon), expected);
    assert_eq!(service.database.value(stored), unchanged);
    assert_eq!(service.client().get("/users").json()["total"], 3);

    // Alone, too: no answer says that what a trigger prevented was done.
    let mut client = service.client();
    assert_eq!(client.patch("/users/4", r#"{"name":"left out","password":"not stored"}"#).status, 500);
    assert_eq!(client.patch("/users/4", r#"{"name":"left out","password":null}"#).status, 500);
    assert_eq!(client.put("/users/4", r#"{"name":"left out"}"#).status, 500);
    assert_eq!(client.delete("/users/4").status, 500);
    assert_eq!(client.delete("/users/1").status, 404);
    let login = r#"{"email":"4@example.com","password":"not stored"}"#;
    assert_eq!(client.post("/users/authenticate", login).status, 401);
    assert_eq!(service.database.value(stored), unchanged);
}

/// A change that is late is not sent, whatever is stored. Each create of a batch has a deadline of its own.
#[test]
fn a_change_that_is_late_is_not_sent() {
    let service = Service::with(|config| config.limits.request_timeout = LONG);
    users(&service, 2);
    // Less is left than the half of a request's time in which a statement may be executed.
    let (late, soon) = (Instant::now() + LONG / 3, Instant::now() + LONG);
    let batch = [
        ("a", "a@example.com", late),
        ("b", "b@example.com", soon),
        ("c", "1@example.com", late),
        ("d", "1@EXAMPLE.com", soon),
        ("e", "e@example.com", soon),
    ];
    let expected = ["Unavailable", "b b@example.com", "Unavailable", "AlreadyExists", "e e@example.com"];
    assert_eq!(create(&service, &batch), expected);
    for only in [&batch[..1], &batch[2..3]] {
        assert_eq!(create(&service, only), ["Unavailable"]);
    }
    for condition in [&Condition::default(), &none()] {
        let updates: Updates = &[(1, Some("m"), None, condition), (2, Some("m"), None, condition)];
        let deletes = [(1, condition), (2, condition)];
        for count in [1, 2] {
            let expected = &["Unavailable"; 2][..count];
            assert_eq!(update(&service, &updates[..count], late), expected);
            assert_eq!(delete(&service, &deletes[..count], late), expected);
        }
    }
    let names = "select string_agg(name, ' ' order by id) from users";
    assert_eq!(service.database.value(names), "n1 n2 b e");
    assert_eq!(service.client().get("/users").json()["total"], json!(4));
}

/// A batch has commands of few kinds; a kind without one costs it no round trip.
#[test]
fn without_commands_there_is_no_statement() {
    let service = Service::start();
    let users = operations(service.server.app());
    let name = service.database.name();
    Database::empty().run(&format!("alter database {name} allow_connections false"));
    Database::empty()
        .run(&format!("select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"));
    eventually(LONG, "the database is gone", || users.find_by_ids(&[1]).is_err());
    assert!(users.find_by_ids(&[]).unwrap().is_empty() && users.find_by_email(&[]).unwrap().is_empty());
    assert!(users.find_pages(&[]).unwrap().is_empty() && users.find_after_ids(&[]).unwrap().is_empty());
    assert!(users.execute(Vec::new()).is_empty());
}
