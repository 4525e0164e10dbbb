//! Changes of many users in one statement: each has the outcome that it would have had alone, and what holds one up holds
//! up no other.

use crate::support::{Client, LONG, Service, eventually};
use serde_json::json;
use std::{
    sync::{
        Barrier,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Instant,
};
use userd::{
    Delete, Update,
    error::Error,
    users::{
        revision::{Condition, Revision},
        user::Values,
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
    let revision = service.server.app().users().find_many(&[id]).expect("an answer")[0].revision();
    Condition { only: Some(vec![revision]), except: Vec::new() }
}

fn stale(service: &Service, id: i64) -> Condition {
    let Revision { version, updated_at } = current(service, id).only.expect("one state")[0];
    Condition { only: Some(vec![Revision { version: version + 1, updated_at }]), except: Vec::new() }
}

fn name(client: &mut Client, id: usize) -> Option<String> {
    let found = client.get(&format!("/users/{id}"));
    (found.status == 200).then(|| found.json()["name"].as_str().unwrap_or_default().to_owned())
}

/// The users that are as they were created and that a transaction has locked or tried to change: their rows have its number.
fn locked(service: &Service) -> Vec<i64> {
    let query = "select id from users where xmax <> 0 and updated_at = created_at order by id";
    let rows = service.database.client().query(query, &[]).unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[test]
fn each_update_of_a_batch_has_its_outcome() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        users(&service, 10);
        let mut client = service.client();
        let before = client.get("/users").json();
        let mut sql = service.database.client();
        let mut other = sql.transaction().unwrap();
        other.batch_execute("update users set name = 'locked' where id in (5, 9, 10)").unwrap();
        let (any, now, old) = (Condition::default(), current(&service, 7), stale(&service, 8));
        let none = Condition { only: Some(Vec::new()), except: Vec::new() };
        let deadline = Instant::now() + LONG;
        let update = |id, name, email, condition| {
            let values = Values { name, email };
            Update { id, values, password: None, condition, deadline }
        };
        let batch = [
            update(8, Some("m8"), None, &old),
            update(1, Some("m1"), None, &any),
            update(99, Some("m"), None, &any),
            update(5, Some("m5"), None, &any),
            update(3, Some("m3"), Some("new@example.com"), &any),
            update(2, Some("n2"), Some("2@example.com"), &any),
            update(4, None, Some("4@EXAMPLE.com"), &any),
            update(7, Some("m7"), Some("7@example.com"), &now),
            update(6, Some("m6"), None, &none),
            // The users are as they were before the transaction that has locked them.
            update(9, Some("n9"), None, &any),
            update(10, Some("m10"), None, &none),
        ];
        let outcomes: Vec<String> = service
            .server
            .app()
            .users()
            .update_many(&batch)
            .into_iter()
            .map(|outcome| match outcome {
                Ok(Some(user)) => format!("{} {} {}", user.id, user.name, user.email),
                Ok(None) => "unbatched".to_owned(),
                Err(error) => format!("{error:?}"),
            })
            .collect();
        let expected = [
            "PreconditionFailed",
            "1 m1 1@example.com",
            "NotFound",
            "Contended",
            "unbatched",
            "2 n2 2@example.com",
            "4 n4 4@EXAMPLE.com",
            "7 m7 7@example.com",
            "PreconditionFailed",
            "9 n9 9@example.com",
            "PreconditionFailed",
        ];
        assert_eq!(outcomes, expected, "prepared: {prepared}");
        other.rollback().unwrap();
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
    }
}

#[test]
fn each_delete_of_a_batch_has_its_outcome() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        users(&service, 6);
        let mut sql = service.database.client();
        let mut other = sql.transaction().unwrap();
        other.batch_execute("select from users where id = 5 for key share").unwrap();
        let (any, now, old) = (Condition::default(), current(&service, 3), stale(&service, 4));
        let deadline = Instant::now() + LONG;
        let delete = |id, condition| Delete { id, condition, deadline };
        let batch = [delete(5, &any), delete(4, &old), delete(99, &any), delete(3, &now), delete(1, &any)];
        let outcomes = service.server.app().users().delete_many(&batch);
        let outcomes: Vec<String> = outcomes.into_iter().map(|outcome| format!("{outcome:?}")).collect();
        let expected = ["Err(Contended)", "Err(PreconditionFailed)", "Err(NotFound)", "Ok(())", "Ok(())"];
        assert_eq!(outcomes, expected, "prepared: {prepared}");
        other.rollback().unwrap();
        assert_eq!(locked(&service), [5], "by the other transaction");
        let list = service.client().get("/users").json();
        let left: Vec<&str> =
            list["data"].as_array().unwrap().iter().filter_map(|user| user["id"].as_str()).collect();
        assert_eq!((left, &list["total"]), (vec!["2", "4", "5", "6"], &json!(4)));
    }
}

/// Sends requests at once, each on a connection of its own, and calls `meanwhile` when `answered` of them were answered;
/// their statuses.
fn at_once(
    service: &Service,
    requests: &[(&str, String, String)],
    answered: usize,
    meanwhile: impl FnOnce(),
) -> Vec<u16> {
    let (barrier, count) = (Barrier::new(requests.len()), AtomicUsize::new(0));
    thread::scope(|scope| {
        let threads: Vec<_> = requests
            .iter()
            .map(|(method, target, body)| {
                let (mut client, barrier, count) = (service.client(), &barrier, &count);
                scope.spawn(move || {
                    barrier.wait();
                    let status = client.request(method, target, &[], body.as_str()).status;
                    count.fetch_add(1, Ordering::Relaxed);
                    status
                })
            })
            .collect();
        eventually(LONG, "they are answered", || count.load(Ordering::Relaxed) >= answered);
        meanwhile();
        threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    })
}

/// Another session holds every other row, or a credential that a delete cascades to.
#[test]
fn what_is_locked_holds_up_no_other_change() {
    const USERS: usize = 40;
    let service = Service::start();
    let mut client = service.client();
    let mut sql = service.database.client();
    let path = |id: usize| format!("/users/{id}");
    let puts: Vec<_> = (1..=USERS)
        .map(|id| {
            (
                "PUT",
                path(id),
                json!({"name": format!("m{id}"), "email": format!("{id}@example.com")}).to_string(),
            )
        })
        .collect();
    let deletes: Vec<_> = (1..=USERS).map(|id| ("DELETE", path(id), String::new())).collect();
    let rows = [
        (&puts, "select from users where id % 2 = 0 for no key update", USERS / 2),
        (&deletes, "select from users where id % 2 = 0 for key share", USERS / 2),
        (&deletes, "select from credentials where user_id = 7 for update", USERS - 1),
    ];
    for (requests, lock, free) in rows {
        users(&service, USERS);
        service.database.run("insert into credentials select id, 'hash' from users where id < 10");
        let mut other = sql.transaction().unwrap();
        other.batch_execute(lock).unwrap();
        // The lock is given back only when all are answered that do not need it.
        let statuses = at_once(&service, requests, free, || other.commit().unwrap());
        for (at, status) in statuses.into_iter().enumerate() {
            let found = name(&mut client, at + 1);
            match requests[0].0 {
                "PUT" => assert_eq!((status, found), (200, Some(format!("m{}", at + 1))), "{lock}"),
                _ => assert_eq!((status, found), (204, None), "{lock}"),
            }
        }
    }
}

/// A trigger that refuses one row, and one that makes two addresses the same: the others are changed.
#[test]
fn what_a_trigger_refuses_is_refused_alone() {
    let service = Service::start();
    users(&service, 30);
    service.database.run(
        "create function judge() returns trigger language plpgsql as $$
         begin
             if new.name = 'bad' then raise exception 'no'; end if;
             if new.name = 'left out' then return null; end if;
             if new.name = 'moved' then new.email = 'taken@example.com'; end if;
             new.email = lower(new.email);
             return new;
         end $$;
         create trigger judge before update on users for each row execute function judge();
         create function keep() returns trigger language plpgsql as $$
         begin
             if old.id = 21 then raise exception 'no'; end if;
             if old.id = 22 then return null; end if;
             return old;
         end $$;
         create trigger keep before delete on users for each row execute function keep()",
    );
    let condition = Condition::default();
    let names: Vec<String> = (1..=20)
        .map(|id| match id {
            3 => "bad".to_owned(),
            5 => "left out".to_owned(),
            7 | 9 => "moved".to_owned(),
            _ => format!("m{id}"),
        })
        .collect();
    let deadline = Instant::now() + LONG;
    let batch: Vec<Update> = names
        .iter()
        .enumerate()
        .map(|(at, name)| Update {
            id: at as i64 + 1,
            values: Values { name: Some(name), email: None },
            password: None,
            condition: &condition,
            deadline,
        })
        .collect();
    let app = service.server.app();
    let mut client = service.client();
    for (at, outcome) in app.users().update_many(&batch).into_iter().enumerate() {
        let (id, found) = (at + 1, client.get(&format!("/users/{}", at + 1)).json());
        match (id, outcome) {
            (3, Err(Error::Database { .. })) => assert_eq!(found["name"], "n3"),
            // The answer is that of a lone request.
            (5, Ok(Some(user))) => {
                assert_eq!((user.name.as_str(), &found["name"]), ("n5", &json!("n5")))
            }
            (7, Ok(Some(user))) => {
                assert_eq!(
                    (user.email.as_str(), &found["email"]),
                    ("taken@example.com", &json!("taken@example.com"))
                );
            }
            (9, Err(Error::AlreadyExists)) => assert_eq!(found["name"], "n9"),
            (3 | 5 | 7 | 9, outcome) => panic!("{id}: {outcome:?}"),
            (_, Ok(Some(user))) => assert_eq!(found["name"], user.name, "{id}"),
            (_, outcome) => panic!("{id}: {outcome:?}"),
        }
    }
    let deletes: Vec<Delete> = (21..=25).map(|id| Delete { id, condition: &condition, deadline }).collect();
    for (at, outcome) in app.users().delete_many(&deletes).into_iter().enumerate() {
        let (id, found) = (at + 21, name(&mut client, at + 21));
        match (id, outcome) {
            (21, Err(Error::Database { .. })) | (22, Err(Error::NotFound)) => {
                assert_eq!(found, Some(format!("n{id}")));
            }
            (23.., Ok(())) => assert_eq!(found, None),
            (id, outcome) => panic!("{id}: {outcome:?}"),
        }
    }
    assert_eq!(client.get("/users").json()["total"], 27);
}
