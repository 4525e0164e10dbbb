//! Changes that a network or a stopped server process holds back: none begins after its request was answered.

use crate::support::{Client, LONG, OTHER_PASSWORD, Own, PASSWORD, Relay, Service, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use postgres::{Client as Sql, NoTls};
use serde_json::json;
use std::{
    thread,
    time::{Duration, Instant},
};
use userd::{Config, Database, New, PasswordHashing, Server, error::Error, users::user::Values};

/// `REQUEST_TIMEOUT`.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A change that is held back.
struct Held {
    method: &'static str,
    target: &'static str,
    field: Option<(&'static str, &'static str)>,
    body: String,
    /// What its statement, and none before it, has in it.
    marker: &'static str,
    /// A change that is made meanwhile, and succeeds.
    meanwhile: Option<String>,
}

/// What is stored of users and keys.
fn stored(sql: &mut Sql) -> String {
    let all = "select (select coalesce(string_agg(u::text, ';' order by id), '') from users u) \
        || (select coalesce(string_agg(c::text, ';' order by user_id), '') from credentials c) \
        || (select count(*) from idempotency_keys)";
    sql.query_one(all, &[]).expect("there are tables").get(0)
}

fn changes() -> Vec<Held> {
    let held = |method, target, field, body: serde_json::Value, marker| Held {
        method,
        target,
        field,
        body: body.to_string(),
        marker,
        meanwhile: None,
    };
    let user = || json!({"name": "Held", "email": "held@example.com"});
    let with_password = || json!({"name": "Held", "email": "held@example.com", "password": PASSWORD});
    let key = Some(("Idempotency-Key", "held"));
    let renamed = || Some(json!({"name": "later"}).to_string());
    vec![
        held("POST", "/users", None, user(), "held@"),
        held("POST", "/users", None, with_password(), "held@"),
        held("POST", "/users", key, user(), "held@"),
        held("POST", "/users", key, with_password(), "held@"),
        Held { meanwhile: renamed(), ..held("PUT", "/users/1", None, json!({"name": "Held"}), "Held") },
        Held { meanwhile: renamed(), ..held("PATCH", "/users/1", None, json!({"name": "Held"}), "Held") },
        Held {
            meanwhile: Some(json!({"password": OTHER_PASSWORD}).to_string()),
            ..held("PUT", "/users/1", None, json!({"password": PASSWORD}), "$argon2")
        },
        held("PUT", "/users/1", Some(("If-Match", "*")), json!({"password": null}), ""),
        Held { meanwhile: renamed(), ..held("DELETE", "/users/1", None, json!({}), "") },
        held("DELETE", "/users/1", Some(("If-None-Match", "\"other\"")), json!({}), ""),
        // The look-up before it has no hash in it.
        held(
            "POST",
            "/users/authenticate",
            None,
            json!({"email": "ada@example.com", "password": PASSWORD}),
            "$argon2",
        ),
    ]
}

/// Statements are held back by the network, or wait in front of a stopped server process.
#[test]
fn no_change_begins_after_its_request_was_answered() {
    let postgres = Own::start();
    thread::scope(|scope| {
        for (prepared, stopped) in [(true, true), (true, false), (false, true), (false, false)] {
            let postgres = &postgres;
            scope.spawn(move || hold_back(postgres, prepared, stopped));
        }
    });
}

fn hold_back(postgres: &Own, prepared: bool, stopped: bool) {
    /// The bcrypt hash of [`PASSWORD`], which is replaced at the first login.
    const OUTDATED: &str = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    let relay = Relay::before_socket(postgres.socket());
    let database = format!("late_{prepared}_{stopped}");
    postgres.run(&format!("create database {database}"));
    let target: postgres::Config = postgres.url().parse().expect("our own connection string");
    let user = target.get_user().expect("it names one");
    let url = format!("postgres://{user}@127.0.0.1:{}/{database}?sslmode=disable", relay.port());
    let mut config = Config {
        database: Database::Url(url.into()),
        db_prepared: prepared,
        // The session that is held back is the one that was used before.
        db_pool_size: 1,
        auth_attempts: 0,
        password_hashing: PasswordHashing::LeastCostForTests,
        ..Config::default()
    };
    config.limits.request_timeout = TIMEOUT;
    let server = Server::start(config).expect("a server starts");
    let (mut client, mut asking) = (Client::new(server.base_url()), Client::new(server.base_url()));
    let mut sql = target.clone().dbname(&database).connect(NoTls).expect("the cluster takes connections");
    for held in changes() {
        let what = format!(
            "{} {} {:?} {}, prepared: {prepared}, stopped: {stopped}",
            held.method, held.target, held.field, held.body
        );
        let mut ask = |target: &str, key: &str, body: &str| {
            let value = |name, value| if name == "Idempotency-Key" { key } else { value };
            let field = held.field.map(|(name, text)| (name, value(name, text)));
            asking.request(held.method, target, field.as_slice(), body)
        };
        sql.batch_execute("truncate users, credentials, idempotency_keys restart identity").unwrap();
        for name in ["ada", "bob"] {
            let insert = "with u as (insert into users (name, email) values ($1::text, $1::text || '@example.com') \
                returning id) insert into credentials select id, $2 from u";
            sql.execute(insert, &[&name, &OUTDATED]).unwrap();
        }
        // A change of the same kind prepares the statements.
        let body = held.body.replace("held@", "warm@").replace("ada@", "bob@");
        let before = ask(&held.target.replace('1', "2"), "other", &body);
        assert!([200, 201, 204].contains(&before.status), "{what}: {before:?}");
        let before = stored(&mut sql);

        relay.hold(held.marker.as_bytes());
        let mut sessions = Vec::new();
        thread::scope(|scope| {
            let answer = scope.spawn(|| ask(held.target, "held", &held.body));
            relay.holds();
            sessions = pids(&mut sql);
            if stopped {
                send(&sessions, Signal::SIGSTOP);
                relay.release();
            }
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 503, "{what}: {answer:?}");
        });
        // There is one session at a time: this one is closed, and whatever was sent on it is still on its way.
        eventually(LONG, "another session", || client.get("/users/2").status != 503);
        if let Some(body) = &held.meanwhile {
            let answer = client.put("/users/1", body);
            assert_eq!(answer.status, 200, "{what}: {answer:?}");
        }
        let then = client.get("/users/1").body;
        let acknowledged = stored(&mut sql);
        assert_eq!(acknowledged == before, held.meanwhile.is_none(), "{what}");
        match stopped {
            true => send(&sessions, Signal::SIGCONT),
            false => relay.release(),
        }
        // The server process reads that it was closed after the statement.
        eventually(LONG, "the old session ends", || pids(&mut sql).iter().all(|pid| !sessions.contains(pid)));
        assert_eq!(stored(&mut sql), acknowledged, "{what}");
        assert_eq!(client.get("/users/1").body, then, "{what}");
    }
}

/// Batches of creates, of which each row has a deadline of its own.
#[test]
fn batches_do_what_is_in_time() {
    let service = Service::start();
    let users = service.server.app().users();
    let (soon, past) = (Instant::now() + LONG, Instant::now());
    fn new(email: &str, deadline: Instant) -> New<'_> {
        New { values: Values::new("n", email), deadline }
    }
    let taken = users.create_many(&[new("taken@example.com", soon)]).pop();
    assert!(matches!(taken, Some(Ok(_))), "{taken:?}");
    for round in 0..3 {
        let emails: Vec<_> = (0..4).map(|n| format!("{n}-{round}@example.com")).collect();
        let batch = [
            new(&emails[0], past),
            new(&emails[1], soon),
            new("taken@example.com", past),
            new("TAKEN@example.com", soon),
            new(&emails[2], past),
            new(&emails[3], soon),
        ];
        let outcomes = users.create_many(&batch);
        for (new, outcome) in batch.iter().zip(outcomes) {
            match outcome {
                Ok(user) if new.deadline == soon => assert_eq!(Some(user.email.as_str()), new.values.email),
                Err(Error::AlreadyExists) if new.values.email == Some("TAKEN@example.com") => {}
                Err(Error::Unavailable(_)) if new.deadline == past => {}
                outcome => panic!("{new:?}: {outcome:?}"),
            }
        }
    }
    assert_eq!(service.client().get("/users").json()["total"], 1 + 3 * 2);
}

/// The database's clock is set while sessions are open: changes succeed all the same.
#[test]
fn a_clock_that_is_set() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        let (mut client, mut sql) = (service.client(), service.database.client());
        // Only statements that are prepared from now on meet it, and sessions of this service have prepared none.
        sql.batch_execute(
            "create table step (seconds float8); insert into step values (0); \
             alter function pg_catalog.clock_timestamp() rename to real_clock; \
             create function pg_catalog.clock_timestamp() returns timestamptz language sql volatile as \
             'select pg_catalog.real_clock() + pg_catalog.make_interval(secs => (select seconds from public.step))'",
        )
        .unwrap();
        let mut name = 0;
        for step in [0, 3600, 0, -3600, 7200, 0] {
            sql.batch_execute(&format!("update step set seconds = {step}")).unwrap();
            for _ in 0..4 {
                name += 1;
                let body =
                    json!({"name": name.to_string(), "email": format!("{name}@example.com")}).to_string();
                let created = client.post("/users", &body);
                assert_eq!(created.status, 201, "{step}: {created:?}");
                let path = created.header("Location").expect("a path").to_owned();
                let put = client.put(&path, r#"{"name":"put"}"#);
                assert_eq!((put.status, put.json()["name"].as_str()), (200, Some("put")), "{step}");
                assert_eq!(client.get(&path).json()["name"], "put");
                assert_eq!(client.put("/users/99999", r#"{"name":"put"}"#).status, 404, "{step}");
                assert_eq!(client.post("/users", &body).status, 409, "{step}");
                assert_eq!(client.delete(&path).status, 204, "{step}");
                assert_eq!(client.get(&path).status, 404);
                assert_eq!(client.delete(&path).status, 404, "{step}");
            }
        }
    }
}

fn pids(sql: &mut Sql) -> Vec<i32> {
    let sessions = "select pid from pg_stat_activity \
        where datname = current_database() and application_name = 'userd'";
    let rows = sql.query(sessions, &[]);
    rows.expect("anyone may see that").iter().map(|row| row.get(0)).collect()
}

fn send(pids: &[i32], signal: Signal) {
    pids.iter().for_each(|pid| kill(Pid::from_raw(*pid), signal).expect("a process of ours"));
}
