//! Databases as people have them: other encodings, a sequence that is behind.

use crate::support::{Client, Database, Process, check};
use std::thread;

/// Returns how `userd check` ends, and what it prints.
fn check_of(database: &Database, variables: &[(&str, &str)]) -> (i32, String) {
    let url = database.url();
    let (code, stdout, stderr) =
        Process::start(&["check"], &[&[("DATABASE_URL", &*url)], variables].concat()).ended();
    assert_eq!(stderr, "", "{stdout}");
    (code, stdout)
}

// Encodings

/// Reads of a user whose address begins with `WORD`, beside searches for characters that the database may not have.
const READS: &str = r#"
    GET /users?email=%F0%9F%98%80@example.com => 200 {"data":[],"total":0,*
    GET /users?email=WORD@example.com => 200 {"data":[{"id":"*
    GET /users?emailPrefix=WORD%F0%9F%98%80 => 200 {"data":[],*
    GET /users?emailPrefix=WORD@ => 200 {"data":[{"id":"*
    GET /users?after=0&perPage=2 => 200 {"data":[{"id":"*
    GET /users?page=1&perPage=2 => 200 {"data":[{"id":"*
    GET /users?id=1&id=2 => 200 {"data":[{"id":"1",*
    GET $user => 200 *
"#;

#[test]
fn characters_that_the_encoding_of_the_database_lacks() {
    for encoding in ["LATIN1", "WIN1252", "EUC_JP", "SQL_ASCII"] {
        let database =
            Database::with(&format!("template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"));
        let mut process = Process::on(&database, &[("DB_POOL_SIZE", "2")]);
        let url = process.wait_for_url();
        // Two addresses of which one is refused, in one batch.
        thread::scope(|scope| {
            for n in 0..12 {
                let url = &url;
                scope.spawn(move || {
                    let mut client = Client::new(url);
                    let create = format!("POST /users {{\"name\":\"n\",\"email\":\"w{n}@example.com\"}} => 201 <Location: $user> *\n");
                    let reads = READS.replace("WORD", &format!("w{n}"));
                    check(&mut client, &(create + &reads.repeat(6)));
                });
            }
        });
        let mut client = Client::new(&url);
        let fits = encoding == "SQL_ASCII";
        let stored = if fits { 201 } else { 500 };
        check(
            &mut client,
            &format!(
                r#"POST /users/authenticate {{"email":"😀@example.com","password":"correct horse"}} => 401 *
            POST /users {{"name":"😀","email":"name@example.com"}} => {stored} *
            POST /users {{"name":"n","email":"😀@example.com"}} => {stored} *
            GET /users?email=name@example.com => 200 {{"data":[{}*"#,
                if fits { r#"{"id":""# } else { "]" }
            ),
        );
        let (code, found) = check_of(&database, &[]);
        let line = format!("note     database: its encoding is {encoding}, not UTF8: ");
        assert!(code == 0 && found.contains(&line), "{found}");
        assert!(!check_of(&Database::create(), &[]).1.contains("encoding"));
    }
}

/// Another program has stored bytes that are no text: those who read other users beside it get them.
#[test]
fn a_row_that_cannot_be_read_fails_its_own_reads_alone() {
    let database = Database::with("template template0 encoding 'SQL_ASCII' lc_collate 'C' lc_ctype 'C'");
    let mut process = Process::on(&database, &[("DB_POOL_SIZE", "2")]);
    let url = process.wait_for_url();
    database.run(
        r"insert into users (name, email) values ('Ada', 'ada@example.com'), (E'\xff', 'bad@example.com');
          insert into users (name, email) select 'n', i || '@example.com' from generate_series(1, 20) i",
    );
    thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| {
                let reads = r#"
                    GET /users/2 => 500 *
                    GET /users/1 => 200 *
                    GET /users?page=2&perPage=2 => 200 *
                    GET /users?page=1&perPage=2 => 500 *
                    GET /users?after=2&perPage=2 => 200 *
                    GET /users?after=0&perPage=2 => 500 *
                    GET /users?email=bad@example.com => 500 *
                    GET /users?email=ada@example.com => 200 *
                "#;
                check(&mut Client::new(&url), &reads.repeat(6));
            });
        }
    });
}

// The sequence of ids

/// Rows that came with their ids, as COPY brings them: a create is refused, the log names the check, whose remedy mends it.
#[test]
fn a_sequence_that_is_behind_is_named_in_the_log() {
    let database = Database::create();
    database.run(
        "insert into users (id, name, email) overriding system value \
            select i, 'n', i || '@example.com' from generate_series(1, 30) i",
    );
    let mut process = Process::on(&database, &[]);
    let mut client = process.client();
    let create = |key: &str| {
        format!("POST /users {key}{{\"name\":\"n\",\"email\":\"new{}@example.com\"}} => ", key.len())
    };
    for key in ["", "<Idempotency-Key: k> "] {
        check(&mut client, &format!("{}409 {{\"error\":\"Already exists\"}}", create(key)));
    }
    process.logs("[ERROR] the sequence of ids gave an id that is taken: `userd check` says how to mend it");
    assert_eq!(client.get("/users").json()["total"], 30);
    let (code, found) = check_of(&database, &[]);
    let line = found.lines().find(|line| line.starts_with("problem  tables: the sequence of ids"));
    assert_eq!(code, 1, "{found}");
    database.run(line.expect(&found).split('`').nth(1).expect("a statement"));
    assert_eq!(check_of(&database, &[]).0, 0);
    for key in ["", "<Idempotency-Key: k> "] {
        check(&mut client, &format!("{}201 <Location: $user> *\nGET $user => 200 *", create(key)));
    }
    assert_eq!(client.get("/users").json()["total"], 32);
}
