//! Creates with an `Idempotency-Key`: repeated, at once, on several replicas, and when a replica or a connection breaks.

use crate::support::{
    ADA, Answer, Client, Database, Dice, LONG, PASSWORD, Process, Service, Weather, check, eventually, pause,
};
use nix::sys::signal::Signal;
use serde_json::json;
use std::time::Duration;
use userd::{PasswordHashing, Server};

const REUSED: &str = r#"{"error":"Idempotency-Key reused"}"#;

fn post(client: &mut Client, key: &str, body: &str) -> Answer {
    client.request("POST", "/users", &[("Idempotency-Key", key)], body)
}

fn is_replayed(answer: &Answer) -> bool {
    let field = answer.header("Idempotency-Replayed");
    assert!(field.is_none() || field == Some("true"), "{answer:?}");
    field.is_some()
}

/// Asserts that it is the answer to the same create.
#[track_caller]
fn assert_same(answer: &Answer, first: &Answer) {
    assert_eq!((answer.status, &answer.body), (first.status, &first.body));
    for field in ["Location", "ETag"] {
        assert_eq!(answer.header(field), first.header(field));
        assert!(answer.header(field).is_some(), "{answer:?}");
    }
}

fn users(database: &Database) -> String {
    database.value("select count(*) from users")
}

#[test]
fn a_repeated_create_has_the_first_answer() {
    for prepared in [true, false] {
        let service = Service::with(|config| config.db_prepared = prepared);
        service.check(
            r#"
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"ada@example.com"} => 201 <!Idempotency-Replayed> <Location: /users/1> <ETag: $a> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"ada@example.com"} => 201 <Idempotency-Replayed: true> <Location: /users/1> <ETag: $a> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
            PUT /users/1 {"name":"A","email":"a@example.com"} => 200 <ETag: $b> {"id":"1","name":"A","email":"a@example.com",<times>}
            POST /users <Idempotency-Key: "key-1"> {"name":"Ada","email":"ada@example.com"} => 201 <Idempotency-Replayed: true> <Location: /users/1> <ETag: $a> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
            POST /users <Idempotency-Key: key-1> { "email" : "ada@example.com", "name": "\u0041da" } => 201 <Idempotency-Replayed: true> <ETag: $a> *
            POST /users <Idempotency-Key: key-1> {"name":"Bob","name":"Ada","email":"ada@example.com"} => 201 <Idempotency-Replayed: true> <ETag: $a> *
            GET /users/1 => 200 <ETag: $b> {"id":"1","name":"A",*
            POST /users <Idempotency-Key: key-1> {"name":"ada","email":"ada@example.com"} => 422 <!Idempotency-Replayed> {"error":"Idempotency-Key reused"}
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"Ada@example.com"} => 422 {"error":"Idempotency-Key reused"}
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"bob@example.com"} => 422 {"error":"Idempotency-Key reused"}
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 422 {"error":"Idempotency-Key reused"}
            POST /users <Idempotency-Key: key-1> {"name":"Ada"} => 400 *
            POST /users <Idempotency-Key: key-1> {"name":"Ada","email":"a@b.co","id":1} => 422 *
            sql select count(*) from users => 1
            DELETE /users/1 => 204
            POST /users <Idempotency-Key: KEY-1> {"name":"Ada","email":"ada@example.com"} => 201 <!Idempotency-Replayed> <Location: /users/2> *
            POST /users {"name":"Ada","email":"ada@example.com"} => 409 {"error":"Already exists"}
            sql select count(*) from idempotency_keys where key in (sha256('key-1'), sha256('KEY-1')) => 2
            sql select count(*) from idempotency_keys k where k::text ilike '%key-1%' => 0
            "#,
        );
    }
}

#[test]
fn keys_that_are_malformed() {
    let (longest, refused) = (
        "k".repeat(255),
        r#"400 {"error":"Bad request","message":"Idempotency-Key must be one key of 1 to 255 visible ASCII characters"}"#,
    );
    Service::start().check(format!(
        r#"
        POST /users <Idempotency-Key:> {ADA} => {refused}
        POST /users <Idempotency-Key: a b> {ADA} => {refused}
        POST /users <Idempotency-Key: "a> {ADA} => {refused}
        POST /users <Idempotency-Key: {longest}k> {ADA} => {refused}
        POST /users <Idempotency-Key: a> <Idempotency-Key: a> {ADA} => {refused}
        sql select count(*) from users => 0
        POST /users <Idempotency-Key: {longest}> {ADA} => 201 *
        GET /users/1 <Idempotency-Key: a b> => 200 *
        PUT /users/1 <Idempotency-Key: a b> {{"name":"A"}} => 200 *
        DELETE /users/1 <Idempotency-Key: a b> => 204
        "#
    ));
}

/// The password of a repeated create is compared with a hash of its own, and its fingerprint tells nothing of it.
#[test]
fn passwords_of_repeated_creates() {
    Service::start().check(
        r#"
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 201 <!Idempotency-Replayed> <Location: /users/1> <ETag: $a> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 201 <Idempotency-Replayed: true> <Location: /users/1> <ETag: $a> {"id":"1","name":"Ada","email":"ada@example.com",<times>}
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"battery staple"} => 422 {"error":"Idempotency-Key reused"}
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 422 {"error":"Idempotency-Key reused"}
        POST /users/authenticate {"email":"ada@example.com","password":"correct horse"} => 200 *
        PUT /users/1 {"password":"battery staple"} => 200 *
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 201 <Idempotency-Replayed: true> <ETag: $a> *
        POST /users/authenticate {"email":"ada@example.com","password":"battery staple"} => 200 *
        sql select count(*) from users => 1
        sql select answer ->> 'password_hash' like '$argon2id$v=19$m=19456,t=2,p=1$%' from idempotency_keys => t
        POST /users <Idempotency-Key: l> {"name":"Bob","email":"bob@example.com","password":"12345678"} => 201 *
        sql update users set email = 'b@example.com' where email like 'bob%'
        POST /users <Idempotency-Key: m> {"name":"Bob","email":"bob@example.com","password":"12345679"} => 201 *
        sql select count(*) || ' ' || count(distinct answer -> 'fingerprint') from idempotency_keys where answer ->> 'email' like 'bob%' => 2 1
        "#,
    );
}

/// A wrong password in a repeated create counts as one in a login does, and with those; a right one does not count, and a
/// body that differs in other ways tells nothing of the password.
#[test]
fn passwords_cannot_be_guessed_by_repeating_a_create() {
    let service = Service::with(|config| {
        config.auth_attempts = 4;
        config.password_hashing = PasswordHashing::LeastCostForTests;
    });
    // `C` creates Ada with a key, and `L` is her login, each with a password.
    let rows = |rows: &str| {
        rows.replace(
            "C ",
            r#"POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"#,
        )
        .replace("L ", r#"POST /users/authenticate {"email":"ADA@example.com","password":"#)
        .replace("REUSED", REUSED)
    };
    let right = r#"
        C "correct horse"} => 201 *
        C "correct horse"} => 201 <Idempotency-Replayed: true> *
        C "correct horse","name":"Eve"} => 422 REUSED
        "#;
    service.check(rows(right));
    service.check(rows(&right.replace("201 *", "201 <Idempotency-Replayed: true> *").repeat(5)));
    service.check(rows(
        r#"
        C "guess no. 1"} => 422 REUSED
        C "guess no. 2"} => 422 REUSED
        C "guess no. 3"} => 422 REUSED
        L "guess no. 4"} => 401 *
        C "guess no. 5"} => 429 <!Idempotency-Replayed> *
        L "guess no. 5"} => 429 *
        C "correct horse"} => 429 <!Idempotency-Replayed> *
        L "correct horse"} => 429 *
        POST /users <Idempotency-Key: l> {"name":"Bob","email":"bob@example.com","password":"correct horse"} => 201 <!Idempotency-Replayed> *
        POST /users <Idempotency-Key: l> {"name":"Bob","email":"bob@example.com","password":"correct horse"} => 201 <Idempotency-Replayed: true> *
        POST /users <Idempotency-Key: m> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 409 *
        sql select count(*) from users => 2
        "#,
    ));
    // Each replica counts by itself, unless nothing is counted.
    let mut config = service.database.config();
    config.auth_attempts = 0;
    let replica = Server::start(config).expect("a server");
    let mut client = Client::new(replica.base_url());
    check(&mut client, &rows("C \"guess no. 6\"} => 422 REUSED\n").repeat(8));
    check(
        &mut client,
        &rows("C \"correct horse\"} => 201 <Idempotency-Replayed: true> *\nL \"correct horse\"} => 200 *"),
    );
}

/// A delete, by whomever it is made, erases what was kept of the user, and its key creates none.
#[test]
fn keys_of_deleted_users() {
    let service = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    let mut client = service.client();
    let with_password = |n: u32| {
        json!({"name": "Ada", "email": format!("ada-{n}@example.com"), "password": PASSWORD}).to_string()
    };
    // A request or a statement that deletes user ID.
    let deletes = [
        "DELETE /users/ID => 204",
        "DELETE /users/ID <If-Match: *> => 204",
        "sql delete from users where id = ID",
        "sql truncate users cascade",
    ];
    for (n, delete) in (0..).zip(deletes) {
        let (body, bare) = (with_password(n), ADA.replace("ada@", &format!("bare-{n}@")));
        for (key, body) in [(format!("k-{n}"), &body), (format!("bare-{n}"), &bare)] {
            let first = post(&mut client, &key, body);
            assert_eq!(first.status, 201);
            service.check(delete.replace("ID", &first.id()));
            for body in [&body[..], &bare, ADA, &with_password(100), body] {
                let gone = r#"410 <!Idempotency-Replayed> {"error":"Gone"}"#;
                service.check(format!("POST /users <Idempotency-Key: {key}> {body} => {gone}"));
            }
        }
    }
    assert_eq!(users(&service.database), "0");
    // A key, a number and a time are left.
    let left = "select string_agg(distinct name, ' ' order by name) from idempotency_keys k, jsonb_each(to_jsonb(k)) as c (name, value) \
                where value <> 'null'";
    assert_eq!(service.database.value(left), "expires_at key user_id");
    assert_eq!(service.database.value("select count(*) from idempotency_keys"), "8");
    // After 24 hours it may be used again.
    service.database.run("update idempotency_keys set expires_at = now()");
    assert_eq!(post(&mut client, "k-0", &with_password(0)).status, 201);
}

#[test]
fn what_is_no_success_is_not_kept() {
    Service::start().check(
        r#"
        POST /users {"name":"Ada","email":"ada@example.com"} => 201 *
        POST|POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 409 <!Idempotency-Replayed> *
        POST|POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com","password":"correct horse"} => 409 <!Idempotency-Replayed> *
        POST /users <Idempotency-Key: k> {"name":7} => 400 *
        DELETE /users/1 => 204
        sql select count(*) from idempotency_keys => 0
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 201 <!Idempotency-Replayed> *
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 201 <Idempotency-Replayed: true> *
        sql alter table users add constraint short check (length(name) < 5)
        POST /users <Idempotency-Key: l> {"name":"Augusta","email":"augusta@example.com"} => 500 *
        sql alter table users drop constraint short
        POST /users <Idempotency-Key: l> {"name":"Augusta","email":"augusta@example.com"} => 201 <!Idempotency-Replayed> *
        "#,
    );
}

/// A key that has expired is absent, although it is there still.
#[test]
fn keys_expire() {
    let service = Service::start();
    service.check(
        r#"
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 201 <ETag: $a> *
        sql update idempotency_keys set expires_at = expires_at - interval '23 hours 59 minutes'
        POST|POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 201 <Idempotency-Replayed: true> *
        sql update idempotency_keys set expires_at = expires_at - interval '1 minute'
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 409 *
        POST /users <Idempotency-Key: k> {"name":"Bob","email":"bob@example.com","password":"correct horse"} => 201 <!Idempotency-Replayed> <ETag: $b> *
        sql select count(*) from idempotency_keys => 1
        POST /users <Idempotency-Key: k> {"name":"Bob","email":"bob@example.com","password":"correct horse"} => 201 <Idempotency-Replayed: true> <ETag: $b> *
        POST /users <Idempotency-Key: k> {"name":"Ada","email":"ada@example.com"} => 422 *
        sql select count(*) from users => 2
        "#,
    );
}

/// All at once, in turns on the replicas.
fn at_once(replicas: &[Server], key: &str, body: impl Fn(usize) -> String) -> Vec<Answer> {
    let mut clients: Vec<Client> =
        replicas.iter().cycle().take(32).map(|it| Client::new(it.base_url())).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send_request("POST", "/users", &[("Idempotency-Key", key)], body(n));
    }
    clients.iter_mut().map(|client| client.answer("POST")).collect()
}

#[test]
fn many_at_once_with_one_key_create_one_user() {
    let database = Database::create();
    let replicas: [Server; 2] = database.replicas();
    database.linger("0.05");
    for (round, password) in ["", r#","password":"correct horse""#].into_iter().enumerate() {
        let key = format!("same-{round}");
        let body = format!(r#"{{"name":"Ada","email":"{round}@example.com"{password}}}"#);
        let answers = at_once(&replicas, &key, |_| body.clone());
        let first: Vec<_> = answers.iter().filter(|answer| !is_replayed(answer)).collect();
        assert_eq!(first.len(), 1, "one is the first: {answers:?}");
        for answer in &answers {
            assert_eq!(answer.status, 201, "{answer:?}");
            assert_same(answer, first[0]);
        }
        assert_eq!(users(&database), (round + 1).to_string());
        assert_eq!(
            Client::new(replicas[0].base_url()).get(first[0].header("Location").unwrap()).body,
            first[0].body
        );
    }
    // One key and other bodies, with addresses of their own or with one.
    for (round, same_address) in [(2, false), (3, true)] {
        let key = format!("other-{round}");
        let answers = at_once(&replicas, &key, |n| {
            let address = if same_address { 0 } else { n };
            json!({"name": format!("{n}"), "email": format!("{round}.{address}@example.com")}).to_string()
        });
        let created: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
        assert_eq!(created.len(), 1, "{answers:?}");
        let refused = answers.iter().filter(|answer| answer.status != 201);
        for answer in refused {
            assert_eq!((answer.status, answer.body.trim_end()), (422, REUSED));
        }
        assert_eq!(users(&database), (round + 1).to_string());
    }
}

/// A create that waits for a key keeps no session meanwhile.
#[test]
fn waiting_for_a_key_is_waiting_for_a_lock() {
    const KEEP: &str = "insert into idempotency_keys (key, user_id, expires_at, answer) \
        values (sha256('KEY'), 1, now() + interval '1 hour', jsonb_build_object('id', 1, 'name', 'n', 'email', 'n', \
        'created_at', now(), 'updated_at', now(), 'version', 1, 'fingerprint', sha256('another body')))";
    let service = Service::with(|config| config.limits.request_timeout = LONG);
    let mut client = service.client();
    // The transaction stands for another replica that is slow to commit.
    let mut other = service.database.transaction(&KEEP.replace("KEY", "k"));
    let mut waiting = [(); 16].map(|()| service.client());
    for client in &mut waiting {
        client.send_request("POST", "/users", &[("Idempotency-Key", "k")], ADA);
    }
    service.database.waits_for_a_lock();
    for n in 0..20 {
        assert_eq!(client.get("/users").status, 200);
        let body = json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
        assert_eq!(client.post("/users", &body).status, 201);
        assert_eq!(post(&mut client, &format!("other-{n}"), &body.replace('@', "+@")).status, 201);
    }
    other.batch_execute("commit").unwrap();
    for mut client in waiting {
        let answer = client.answer("POST");
        assert_eq!((answer.status, answer.body.trim_end()), (422, REUSED));
    }
    assert_eq!(client.get("/users?email=ada@example.com").json()["total"], 0);
    // One whose transaction fails leaves the key to the next.
    let other = service.database.transaction(&KEEP.replace("KEY", "l"));
    client.send_request("POST", "/users", &[("Idempotency-Key", "l")], ADA);
    service.database.waits_for_a_lock();
    drop(other);
    let answer = client.answer("POST");
    assert_eq!((answer.status, is_replayed(&answer)), (201, false));
}

/// The replica that took a create is killed, and another one is asked again.
#[test]
fn a_replica_that_is_killed_has_created_one_user_or_none() {
    const ROUNDS: u64 = 4;
    let database = Database::create();
    database.linger("0.1");
    let mut stays = Process::on(&database, &[]);
    let mut client = stays.client();
    for round in 0..ROUNDS {
        let mut killed = Process::on(&database, &[]);
        let (key, email) = (format!("key-{round}"), format!("{round}@example.com"));
        let body = json!({"name": "Ada", "email": email}).to_string();
        // The number that a client in a hurry might send.
        let mut clients = [(); 8].map(|()| killed.client());
        for client in &mut clients {
            client.send_request("POST", "/users", &[("Idempotency-Key", &key)], &body);
        }
        pause(Duration::from_millis(40 * round));
        killed.signal(Signal::SIGKILL);
        assert_eq!(killed.wait(LONG), -9);
        let answers: Vec<Answer> = (0..3).map(|_| post(&mut client, &key, &body)).collect();
        assert!(answers[1..].iter().all(is_replayed), "{answers:?}");
        for answer in &answers {
            assert_eq!(answer.status, 201);
            assert_same(answer, &answers[0]);
        }
        let found = client.get(&format!("/users?email={email}")).json();
        assert_eq!(found["data"][0], answers[0].json());
    }
    assert_eq!(client.get("/users").json()["total"], ROUNDS);
}

/// A client repeats a create until it has an answer, whatever becomes of the connections to the database.
#[test]
fn connections_that_are_cut() {
    const CREATES: usize = 15;
    let database = Database::create();
    let (proxy, mut config) = database.proxied();
    config.password_hashing = PasswordHashing::LeastCostForTests;
    let server = Server::start(config).expect("a server");
    let mut dice = Dice(0x5eed_1e55);
    let mut client = Client::new(server.base_url());
    for n in 1..=CREATES {
        let (key, email) = (format!("key-{n}"), format!("{n}@example.com"));
        let mut body = json!({"name": "n", "email": email});
        if n % 3 == 0 {
            body["password"] = PASSWORD.into();
        }
        let create = |client: &mut Client| {
            client.send_request("POST", "/users", &[("Idempotency-Key", &key)], body.to_string());
        };
        // Anywhere in the statement or in its answer.
        let (from_server, bytes) = (dice.roll(2) == 0, dice.roll(500) as usize);
        let cuts = proxy.cuts();
        proxy.set(Weather::CutAfter { from_server, bytes });
        create(&mut client);
        eventually(LONG, "a connection is cut", || proxy.cuts() > cuts);
        proxy.set(Weather::Fair);
        let mut answers = vec![client.answer("POST")];
        // The end of a session may be noticed with the next statement only.
        eventually(LONG, "it is created, and created again", || {
            create(&mut client);
            answers.push(client.answer("POST"));
            answers[answers.len() - 2..].iter().all(|answer| answer.status == 201)
        });
        let (last, earlier) = answers.split_last().expect("answers");
        assert!(earlier.iter().all(|answer| [201, 500, 503].contains(&answer.status)), "{earlier:?}");
        let created: Vec<&Answer> = earlier.iter().filter(|answer| answer.status == 201).collect();
        created.iter().for_each(|answer| assert_same(answer, last));
        assert!(is_replayed(last));
        let found = client.get(&format!("/users?email={email}")).json();
        assert_eq!(found["data"][0], last.json());
    }
    assert_eq!(users(&database), CREATES.to_string());
    assert_eq!(database.value("select count(*) from idempotency_keys"), CREATES.to_string());
}

/// Creates that wait together share a statement; each has the outcome that it would have had by itself.
#[test]
fn creates_with_keys_that_wait_together() {
    const CLIENTS: usize = 45;
    let service = Service::start();
    service.check(
        r#"
        sql create table statements (inserted bigint)
        sql create function linger() returns trigger language plpgsql as $$ begin insert into statements select count(*) filter (where name like 'keyed%') from given; perform pg_sleep(0.05); return null; end $$
        sql create trigger linger after insert on users referencing new table as given for each statement execute function linger()
        POST /users {"name":"Taken","email":"taken@example.com"} => 201 *
        POST /users <Idempotency-Key: early> {"name":"early","email":"early@example.com"} => 201 *
        POST /users <Idempotency-Key: late> {"name":"late","email":"late@example.com"} => 201 *
        POST /users <Idempotency-Key: gone> {"name":"gone","email":"gone@example.com"} => 201 <Location: $gone> *
        DELETE $gone => 204
        sql update idempotency_keys set expires_at = now() where answer ->> 'name' = 'late'
        sql update users set email = 'was-late@example.com' where name = 'late'
        "#,
    );
    let mut client = service.client();
    // Key, name, address; status, and whether it is replayed, where that is certain. `#` is the number of the client.
    let kinds = [
        ("", "plain #", "#@example.com", 201, Some(false)),
        ("early", "early", "early@example.com", 201, Some(true)),
        ("early", "other #", "#@example.com", 422, Some(false)),
        ("late", "late", "late@example.com", 201, None),
        ("taken-#", "n", "TAKEN@example.com", 409, Some(false)),
        ("pair", "pair", "pair@example.com", 201, None),
        ("", "plain #", "taken@example.com", 409, Some(false)),
        ("key-#", "keyed #", "#@example.com", 201, Some(false)),
        ("gone", "gone", "gone@example.com", 410, Some(false)),
    ];
    let send = |client: &mut Client, n: usize| {
        let (key, name, email, ..) = kinds[n % kinds.len()];
        let [key, name, email] = [key, name, email].map(|text| text.replace('#', &n.to_string()));
        let fields = if key.is_empty() { &[][..] } else { &[("Idempotency-Key", &*key)] };
        client.send_request("POST", "/users", fields, json!({"name": name, "email": email}).to_string());
        (name, email)
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| service.client()).collect();
    let sent = clients.iter_mut().enumerate().map(|(n, client)| send(client, n));
    let sent: Vec<(String, String)> = sent.collect();
    let answers: Vec<Answer> = clients.iter_mut().map(|client| client.answer("POST")).collect();
    for (n, answer) in answers.iter().enumerate() {
        let (key, _, _, status, replayed) = kinds[n % kinds.len()];
        assert_eq!(answer.status, status, "{n}: {answer:?}");
        assert!(replayed.is_none_or(|replayed| replayed == is_replayed(answer)), "{n}: {answer:?}");
        if status == 201 {
            let user = answer.json();
            assert_eq!(
                (user["name"].as_str(), user["email"].as_str()),
                (Some(&*sent[n].0), Some(&*sent[n].1))
            );
            assert_eq!(client.get(answer.header("Location").expect("a user")).body, answer.body, "{n}");
            // Each again.
            if !key.is_empty() {
                send(&mut client, n);
                let again = client.answer("POST");
                assert_same(&again, answer);
                assert!(is_replayed(&again), "{n}");
            }
        }
    }
    for key in ["pair", "late"] {
        let first = answers.iter().enumerate().filter(|(n, answer)| {
            kinds[n % kinds.len()].0 == key && answer.status == 201 && !is_replayed(answer)
        });
        assert_eq!(first.count(), 1, "{key}");
    }
    // Taken, early, the one with an address that was late's, late, pair, and those with an address of their own.
    let own = (0..CLIENTS).filter(|n| [0, 7].contains(&(n % kinds.len()))).count();
    assert_eq!(users(&service.database), (5 + own).to_string());
    let keyed = "select count(*) from statements where inserted > 1";
    assert_ne!(service.database.value(keyed), "0", "no statement has created more than one");
}
