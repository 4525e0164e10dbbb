//! `userd import`: what it accepts, what it refuses and why, and what is left of one that ends early.

use crate::support::{
    Client, Database, Dice, LONG, PASSWORD, Process, Service, TempDir, assert_no_secret, eventually,
    memory_kib, pause,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use userd::config::PasswordHashing;

/// `userd import` of this file.
fn start(database: &Database, file: &Path, arguments: &[&str]) -> Process {
    let file = file.to_str().expect("UTF-8");
    Process::start(&[&["import"], arguments, &[file]].concat(), &[("DATABASE_URL", &database.url())])
}

/// How an import of this file ends: its exit code, standard output and standard error.
fn import_file(database: &Database, file: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut process = start(database, file, arguments);
    (process.wait(LONG), process.stdout(), process.stderr())
}

/// Imports a text from a file and returns the exit code, standard output and standard error.
fn import<T: AsRef<[u8]>>(database: &Database, text: T, arguments: &[&str]) -> (i32, String, String) {
    let dir = TempDir::new();
    let file = dir.path().join("users");
    fs::write(&file, text).expect("a fresh directory");
    import_file(database, &file, arguments)
}

/// Its standard input is written by the test.
fn piped(database: &Database, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_userd"));
    command.arg("import").args(arguments).env_clear().env("DATABASE_URL", database.url());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("cargo has built it")
}

/// How an import of this text ends that comes through a pipe.
fn import_piped(database: &Database, text: &str, arguments: &[&str]) -> (i32, String, String) {
    let mut process = piped(database, arguments);
    process.stdin.take().expect("it is piped").write_all(text.as_bytes()).expect("it is read to its end");
    let output = process.wait_with_output().expect("it is our child");
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
    (output.status.code().expect("no signal"), stdout, stderr)
}

fn lines(count: usize) -> String {
    (1..=count).map(|n| format!("{{\"name\":\"User {n}\",\"email\":\"{n}@example.com\"}}\n")).collect()
}

/// How many users there are: in the table, and by the counts that the pages stand on.
fn counted(database: &Database) -> (usize, usize) {
    let count = database.value("select count(*) from users").parse().expect("a number");
    let server = userd::Server::start(database.config()).expect("a server starts");
    let total = Client::new(server.base_url()).get("/users?perPage=1").json()["total"].as_u64();
    (count, total.expect("a number") as usize)
}

fn can_log_in(client: &mut Client, email: &str, password: &str) -> bool {
    let body = json!({"email": email, "password": password}).to_string();
    match client.post("/users/authenticate", body).status {
        200 => true,
        401 => false,
        status => panic!("{status}"),
    }
}

#[test]
fn users_in_the_order_of_their_lines() {
    let text = lines(1000);
    for format in ["ndjson", "csv"] {
        let service = Service::start();
        let text = match format {
            "csv" => (1..=1000)
                .fold("email,name\n".to_owned(), |text, n| text + &format!("{n}@example.com,User {n}\n")),
            _ => text.clone(),
        };
        let mut client = service.client();
        assert_eq!(client.post("/users", r#"{"name":"First","email":"first@example.com"}"#).id(), "1");
        let expected = (0, "imported 1000 users\n".to_owned(), String::new());
        assert_eq!(import(&service.database, text, &["--format", format]), expected);
        let page = client.get("/users?perPage=1000&page=1").json();
        assert_eq!((&page["total"], &page["lastPage"]), (&1001.into(), &2.into()));
        for (n, user) in page["data"].as_array().unwrap().iter().enumerate().skip(1) {
            assert_eq!(user["email"], format!("{n}@example.com"));
            assert_eq!(
                (&user["name"], &user["id"]),
                (&format!("User {n}").into(), &(n + 1).to_string().into())
            );
        }
        // It goes on as if nothing had been.
        assert_eq!(client.post("/users", r#"{"name":"Last","email":"last@example.com"}"#).id(), "1002");
        assert_eq!(client.get("/users?perPage=1000&page=2").json()["data"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn export_import_export() {
    let source = Service::start();
    let mut client = source.client();
    let body = json!({"name": "Ada", "email": "Ada@Example.com", "password": PASSWORD}).to_string();
    assert_eq!(client.post("/users", body).status, 201);
    // PUT and psql store these users, although POST refuses them.
    let odd = [
        ("", "no address"),
        ("two\nlines, \"quoted\"\r", "missing@domain"),
        (" ", ""),
        ("Zoë 😀 \u{1}\u{7f}", "\u{feff}é@b"),
        ("=1+1\\", "\"\\u0041\n"),
    ];
    for (name, email) in odd {
        let insert =
            "insert into users (name, email, created_at) values ($1, $2, '2001-02-03 04:05:06.789+00')";
        source.database.client().execute(insert, &[&name, &email]).unwrap();
    }
    source.database.run(
        "insert into users (name, email) select n, n || '@example.com' from generate_series(1, 2000) n;
         delete from users where id between 100 and 1100",
    );
    let exported = |database: &Database, name: &str, dir: &TempDir| {
        let file = dir.path().join(name);
        let arguments = ["export", "--with-password-hashes", file.to_str().unwrap()];
        let mut process = Process::start(&arguments, &[("DATABASE_URL", &database.url())]);
        assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
        file
    };
    let without_ids = |file: &Path| -> Vec<String> {
        let text = fs::read_to_string(file).unwrap();
        text.lines().map(|line| line.split_once(',').map_or("", |(_, rest)| rest).to_owned()).collect()
    };
    for name in ["users.ndjson", "users.csv"] {
        let dir = TempDir::new();
        let first = exported(&source.database, name, &dir);
        let target = Service::start();
        // Without --as-is, they are held to the create schema.
        let (code, _, said) = import_file(&target.database, &first, &[]);
        assert_eq!(code, 1);
        assert!(said.contains("/email value is not an e-mail address"), "{said}");
        let (code, _, said) = import_file(&target.database, &first, &["--as-is"]);
        assert_eq!((code, said.as_str()), (0, ""));
        assert_eq!(
            without_ids(&exported(&target.database, &format!("again-{name}"), &dir)),
            without_ids(&first)
        );
        assert_eq!(counted(&target.database), counted(&source.database));
        assert!(can_log_in(&mut target.client(), "ada@example.com", PASSWORD), "{name}");
    }
}

#[test]
fn fields() {
    let service = Service::start();
    let text = format!(
        "{}\n{}\n{}\n",
        json!({"id": "77", "name": "Ada", "email": "ada@example.com", "createdAt": "2001-02-03T04:05:06.789Z",
               "updatedAt": "2002-02-03 04:05:06+01:00", "password": PASSWORD}),
        json!({"id": 78, "name": "Bob", "email": "bob@example.com", "createdAt": null, "passwordHash": null}),
        r#"{"name":"x","name":"Eve","email":"eve@example.com"}"#,
    );
    assert_eq!(import(&service.database, text, &[]).0, 0);
    let mut client = service.client();
    let ada = client.get("/users/1").json();
    assert_eq!(ada["createdAt"], "2001-02-03T04:05:06.789000Z");
    assert_eq!(ada["updatedAt"], "2002-02-03T03:05:06.000000Z");
    assert!(can_log_in(&mut client, "ada@example.com", PASSWORD));
    let [bob, eve] = ["/users/2", "/users/3"].map(|target| client.get(target).json());
    assert_eq!((&bob["name"], &eve["name"]), (&"Bob".into(), &"Eve".into()));
    assert_eq!(bob["createdAt"], eve["createdAt"]);
    assert!(!can_log_in(&mut client, "bob@example.com", PASSWORD));

    // The strict schema asks for a password; a hash will do.
    let hash = service.database.value("select password_hash from credentials");
    let strict = |line: Value| {
        let dir = TempDir::new();
        dir.write("users", &line.to_string());
        let file = dir.path().join("users").to_str().unwrap().to_owned();
        let url = service.database.url();
        let mut process = Process::start(&["import", &file], &[("DATABASE_URL", &url), ("SCHEMA", "strict")]);
        (process.wait(LONG), process.stderr())
    };
    let refused = "line 1: /password is required\nuserd: 1 line is refused; nothing was imported\n";
    assert_eq!(strict(json!({"name": "Zoë", "email": "zoe@example.com"})), (1, refused.to_owned()));
    let zoe = json!({"name": "Zoë", "email": "zoe@example.com", "passwordHash": hash});
    assert_eq!(strict(zoe), (0, String::new()));
    assert!(can_log_in(&mut client, "zoe@example.com", PASSWORD));
}

/// A hash of bcrypt is replaced at the first login; the record stays as it was.
#[test]
fn hashes_of_bcrypt_are_replaced_at_login() {
    // "correct horse", by crypt(3).
    const TAIL: &str = "$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    let service = Service::start();
    let mut client = service.client();
    let line = |version: &str| json!({"name": "n", "email": format!("{version}@example.com"), "passwordHash": format!("$2{version}{TAIL}")});
    let text = ["a", "b", "y"].map(line).map(|line| format!("{line}\n")).concat();
    assert_eq!(import(&service.database, text, &[]).0, 0);
    let stored = |id: usize| {
        service.database.value(&format!("select password_hash from credentials where user_id = {id}"))
    };
    for (id, version) in [(1, "a"), (2, "b"), (3, "y")] {
        let email = format!("{version}@example.com");
        let before = client.get(&format!("/users/{id}"));
        assert!(!can_log_in(&mut client, &email, "correct horsf"));
        assert!(!can_log_in(&mut client, &email, ""));
        assert_eq!(stored(id), format!("$2{version}{TAIL}"), "only when its password is known");
        // A lock does not keep the user out.
        let mut locked = service.database.client();
        locked.batch_execute("begin; select from credentials for update").unwrap();
        assert!(can_log_in(&mut client, &email, PASSWORD));
        assert_eq!(stored(id), format!("$2{version}{TAIL}"));
        drop(locked);
        assert!(can_log_in(&mut client, &email, PASSWORD));
        let hash = stored(id);
        assert!(hash.starts_with("$argon2id$"), "{hash}");
        assert!(!can_log_in(&mut client, &email, "correct horsf"));
        assert!(can_log_in(&mut client, &email, PASSWORD));
        assert_eq!(stored(id), hash, "once");
        let after = client.get(&format!("/users/{id}"));
        assert_eq!((&after.body, after.header("ETag")), (&before.body, before.header("ETag")));
    }
}

/// é as one character and as two is one password: at logins, in hashes of other programs and for a repeated create.
#[test]
fn passwords_in_two_forms_are_one() {
    const COMPOSED: &str = "\u{e9}-password";
    const DECOMPOSED: &str = "e\u{301}-password";
    // Hash of the decomposed form of the password.
    const HASH: &str = "$pbkdf2-sha256$i=1000$c2FsdHNhbHRzYWx0$vl9Oh2k2Aq5ewnjPmIyJmRtjWsc7w5hq2m1xUOs8x1Q";
    let service = Service::start();
    let mut client = service.client();
    let create =
        |password: &str| json!({"name": "n", "email": "a@example.com", "password": password}).to_string();
    let key = [("Idempotency-Key", "one")];
    let created = client.request("POST", "/users", &key, create(DECOMPOSED));
    let repeated = client.request("POST", "/users", &key, create(COMPOSED));
    assert_eq!((created.status, repeated.status, &created.body), (201, 201, &repeated.body));
    assert_ne!(client.request("POST", "/users", &key, create("e-password")).status, 201);
    for (password, expected) in [(COMPOSED, true), (DECOMPOSED, true), ("e-password", false)] {
        assert_eq!(can_log_in(&mut client, "a@example.com", password), expected, "{password:?}");
    }
    let line = json!({"name": "n", "email": "b@example.com", "passwordHash": HASH}).to_string();
    assert_eq!(import(&service.database, line, &[]).0, 0);
    assert!(!can_log_in(&mut client, "b@example.com", COMPOSED), "it was hashed as it was sent");
    for password in [DECOMPOSED, COMPOSED, DECOMPOSED] {
        assert!(can_log_in(&mut client, "b@example.com", password), "{password:?}");
    }
    assert!(!can_log_in(&mut client, "b@example.com", "e-password"));
}

/// Bcrypt reads only 72 bytes of a longer password, so a match does not prove the whole password.
#[test]
fn hashes_of_bcrypt_stay_where_it_did_not_read_all_of_the_password() {
    // By crypt(3): of 80 digits, and of "correct horse".
    const OF_80: &str = "$2b$05$abcdefghijklmnopqrstuuLkMZtUsVwf9Ptg/wgiNv8ZhtnAHnix.";
    const OF_13: &str = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    let digits = "0123456789".repeat(8);
    let mistyped = format!("{}x", &digits[..79]);
    let repeated = format!("{PASSWORD}\0{PASSWORD}");
    let service = Service::start();
    let mut client = service.client();
    let rows = [(1, OF_80, &digits, &mistyped), (2, OF_13, &PASSWORD.to_owned(), &repeated)];
    for (id, hash, password, other) in rows {
        let email = format!("user{id}@example.com");
        let line = json!({"name": "n", "email": email, "passwordHash": hash}).to_string();
        assert_eq!(import(&service.database, line, &[]).0, 0);
        let stored = format!("select password_hash from credentials where user_id = {id}");
        can_log_in(&mut client, &email, other);
        assert_eq!(service.database.value(&stored), hash, "{other:?}");
        assert!(can_log_in(&mut client, &email, password));
        assert_eq!(service.database.value(&stored) == hash, password.len() > 71);
        assert!(can_log_in(&mut client, &email, password));
    }
    // Set anew, all of it counts.
    let body = json!({"password": digits}).to_string();
    assert_eq!(client.request("PUT", "/users/1", &[], body).status, 200);
    assert!(!can_log_in(&mut client, "user1@example.com", &mistyped));
    assert!(can_log_in(&mut client, "user1@example.com", &digits));
}

/// Login replaces a hash of less cost once, like a hash of bcrypt.
#[test]
fn hashes_of_less_cost_are_replaced_at_login() {
    let cheap = Service::with(|config| config.password_hashing = PasswordHashing::LeastCostForTests);
    let body = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    assert_eq!(cheap.client().post("/users", body).status, 201);
    let service = Service::start();
    let sql = "select password_hash from credentials";
    let hash = cheap.database.value(sql);
    assert!(hash.starts_with("$argon2id$v=19$m=8,t=1,p=1$"), "{hash}");
    let line = json!({"name": "Ada", "email": "ada@example.com", "passwordHash": hash}).to_string();
    assert_eq!(import(&service.database, line, &[]).0, 0);
    let mut client = service.client();
    let before = client.get("/users/1");
    assert!(!can_log_in(&mut client, "ada@example.com", "correct horsf"));
    assert_eq!(service.database.value(sql), hash);
    assert!(can_log_in(&mut client, "ada@example.com", PASSWORD));
    let replaced = service.database.value(sql);
    assert!(replaced.starts_with("$argon2id$v=19$m=19456,t=2,p=1$"), "{replaced}");
    assert!(!can_log_in(&mut client, "ada@example.com", "correct horsf"));
    assert!(can_log_in(&mut client, "ada@example.com", PASSWORD));
    assert_eq!(service.database.value(sql), replaced, "once");
    let after = client.get("/users/1");
    assert_eq!((&after.body, after.header("ETag")), (&before.body, before.header("ETag")));
}

/// Lines of JSON and what is said of them; empty for those that are imported.
fn broken_lines() -> Vec<(Vec<u8>, &'static str)> {
    let line = |text: &str| text.as_bytes().to_vec();
    let user = |fields: &str| format!(r#"{{"name":"n","email":"x@example.com",{fields}}}"#).into_bytes();
    let hash = |text: &str| user(&format!(r#""passwordHash":"{text}""#));
    vec![
        (b"\xef\xbb\xbf{\"name\":\"bom\",\"email\":\"bom@example.com\"}\r".to_vec(), ""),
        (
            line(r#"{"name":"n","email":"x@example.com""#),
            "is not JSON: EOF while parsing an object at column 35",
        ),
        (line("{'name':1}"), "is not JSON: key must be a string at column 2"),
        (line("[1]"), "is not a JSON object"),
        (line("\"text\""), "is not a JSON object"),
        (line("name,email"), "is not JSON: expected ident at column 2"),
        (line(""), ""),
        (line("  \r"), ""),
        (b"{\"name\":\"\xff\",\"email\":\"x@example.com\"}".to_vec(), "is not UTF-8"),
        (
            b"\xef\xbb\xbf{\"name\":\"n\",\"email\":\"x@example.com\"}".to_vec(),
            "is not JSON: expected value at column 1",
        ),
        (b"{\"name\":\"\0\",\"email\":\"x@example.com\"}".to_vec(), "is not JSON: control character"),
        (line(r#"{"name":"\u0000","email":"x@example.com"}"#), "/name must not contain NUL (U+0000)"),
        (
            line(&format!(r#"{{"name":"{}","email":"x@example.com"}}"#, "é".repeat(1001))),
            "/name value is longer than 1000 characters",
        ),
        (
            hash(&format!("$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ${}", "A".repeat(474))),
            "/passwordHash is longer than 512 bytes",
        ),
        (line(r#"{"name":"n"}"#), "/email is required"),
        (line(r#"{"name":7,"email":"x@example.com"}"#), "/name value is not of type \"string\""),
        (line(r#"{"name":null,"email":["x"]}"#), "/name value is not of type"),
        (line(r#"{"name":"n","email":"x"}"#), "/email value is not an e-mail address: it has no @"),
        (
            line(r#"{"name":"n","email":"Ann <ann@example.com>"}"#),
            "/email value is not an e-mail address alone: leave out the display name and the < >",
        ),
        (
            user(r#""isAdmin":true,"role":{"a":[1]}"#),
            "These fields may not be mass assigned: \"isAdmin\", \"role\"",
        ),
        (user(r#""password":"short""#), "/password value is shorter than 8 characters"),
        (user(r#""password":"correct horse","passwordHash":"$2b$04$.".."#), "is not JSON"),
        (user(r#""createdAt":"yesterday""#), "/createdAt must be a time as in 2020-02-29T23:59:59.123456Z"),
        (user(r#""createdAt":"2020-01-01T00:00:00""#), "/createdAt must be a time"),
        (user(r#""updatedAt":1577836800"#), "/updatedAt must be a time"),
        (
            hash("5f4dcc3b5aa765d61d8327deb882cf99"),
            "/passwordHash is neither an Argon2id, bcrypt, PBKDF2, scrypt nor WordPress hash",
        ),
        (
            hash("$2b$13$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2"),
            "costs more to verify than bcrypt's 12",
        ),
        (
            hash("$argon2id$v=19$m=131073,t=1,p=1$c2FsdHNhbHQ$AAAAAAAAAAAAAAAAAAAAAA"),
            "costs more to verify than 131072 KiB, or 262144 KiB times passes",
        ),
        (
            user(
                r#""password":"correct horse","passwordHash":"$2b$04$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2""#,
            ),
            "/password and /passwordHash exclude one another",
        ),
        (line(r#"{"name":"good","email":"good@example.com"}"#), ""),
        (line(r#"{"name":"again","email":"GOOD@example.com"}"#), "/email is that of line 29, too"),
        (line(r#"{"name":"taken","email":"Ada@example.com"}"#), "/email is that of a user in the database"),
        (line(r#"{"name":"last","email":"last@example.com"}"#), ""),
    ]
}

#[test]
fn broken_lines_are_told_by_their_number() {
    let rows = broken_lines();
    let text: Vec<u8> = rows.iter().map(|(line, _)| &line[..]).collect::<Vec<_>>().join(&b'\n');
    let database = Database::create();
    let ada = "insert into users (name, email) values ('Ada', 'ada@example.com')";
    database.run(ada);
    let expected: Vec<(usize, &str)> = rows
        .iter()
        .enumerate()
        .map(|(at, (_, said))| (at + 1, *said))
        .filter(|(_, said)| !said.is_empty())
        .collect();

    // Import reports at most 20 refused lines, and a count.
    let (code, stdout, stderr) = import(&database, &text, &[]);
    assert_no_secret(&stderr);
    let said: Vec<&str> = stderr.lines().collect();
    for ((line, problem), said) in expected.iter().zip(&said[..20]) {
        assert!(
            said.starts_with(&format!("line {line}: ")) && said.contains(problem),
            "{line} {problem}: {said}"
        );
    }
    let more = expected.len() - 20;
    let count = expected.len();
    assert_eq!(
        said[20..],
        [format!("and {more} more lines"), format!("userd: {count} lines are refused; nothing was imported")]
    );
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert_eq!(database.value("select count(*) from users"), "1");

    // Import reports the first 20 problems, so each further row is imported alone.
    for (number, (line, problem)) in rows.iter().enumerate().skip(20) {
        let [before, after] = [number, 0].map(|count| b"\n".repeat(count));
        let (code, _, stderr) = import(&database, [&before, &line[..], &after].concat(), &["--dry-run"]);
        let said = if problem.contains("line 29") { "" } else { problem };
        assert_eq!(code, i32::from(!said.is_empty()), "{stderr}");
        assert!(said.is_empty() || stderr.contains(&format!("line {}: ", number + 1)), "{stderr}");
        assert!(stderr.contains(said), "{said}: {stderr}");
    }

    // Exactly the rest.
    let (code, stdout, stderr) = import(&database, &text, &["--skip-invalid", "--dry-run"]);
    assert_eq!((code, stdout), (0, format!("would import 3 users, skipped {count} invalid lines\n")));
    assert_eq!(stderr.lines().count(), 21);
    assert_eq!(database.value("select count(*) from users"), "1");
    let (code, stdout, _) = import(&database, &text, &["--skip-invalid"]);
    assert_eq!((code, stdout), (0, format!("imported 3 users, skipped {count} invalid lines\n")));
    assert_eq!(database.value("select string_agg(name, ',' order by id) from users"), "Ada,bom,good,last");
    assert_eq!(counted(&database), (4, 4));
}

#[test]
fn broken_csv() {
    let database = Database::create();
    let rows: [(&[u8], &[&str]); 19] = [
        (b"", &[]),
        (b"email\nx@example.com\n", &["line 1: the header has no column name, and 0 columns"]),
        (b"\n\nname;mail\n", &["line 3: the header has no column email, and 1 columns of other names"]),
        (
            b"Ann,ann@example.com,correct-horse-1\n",
            &["line 1: the header has no column name, and 3 columns of other names; is it a header?"],
        ),
        (b"Email,email,name\n", &["line 1: the header has the column email twice"]),
        (
            b"name,email\n\"n\"x,x@example.com\n\"m\",y@example.com\n",
            &["line 2: has text behind a closing quote"],
        ),
        (
            b"name,email,isAdmin\nn,x@example.com,1\n",
            &[
                "line 1: These fields may not be mass assigned: \"isAdmin\"; --ignore-unknown leaves them out, --map",
            ],
        ),
        (b"name,email,name\n", &["line 1: the header has the column name twice"]),
        (
            b"name,email\nn,x@example.com,more\nn\n",
            &["line 2: has 3 fields, and the header 2", "line 3: has 1 fields, and the header 2"],
        ),
        (
            b"name,email\n\"a\nb\",x\n\"\"\"\",y\n",
            &["line 2: /email value is not", "line 4: /email value is not"],
        ),
        (b"name,email\r\n\r\nn,x\r\n", &["line 3: /email value is not"]),
        (
            b"name,email\nn,x@example.com\n\"n,y@example.com\nn,z@example.com\n",
            &["line 3 has a quote that is not closed"],
        ),
        (b"name,email\n\xff,x@example.com\n", &["line 2: is not UTF-8"]),
        (b"name,email\n\0,x@example.com\n", &["line 2: /name must not contain NUL"]),
        (b"name,email\nn,\n", &["line 2: /email value is not"]),
        (b"name,email,passwordHash\nn,x@example.com,nonsense\n", &["line 2: /passwordHash is neither"]),
        (b"name,email,createdAt\nn,x@example.com,2020-01-01\n", &["line 2: /createdAt must be a time"]),
        (b"name,email\nn,x@example.com\nm,X@example.com\n", &["line 3: /email is that of line 2, too"]),
        (b"\xff\xfen\0a\0m\0e\0", &["it is not UTF-8, but UTF-16"]),
    ];
    for (text, expected) in rows {
        let (code, _, stderr) = import(&database, text, &["--format=csv"]);
        let lines = stderr.lines().map(|line| line.strip_prefix("userd: cannot read: ").unwrap_or(line));
        let said: Vec<&str> = lines.filter(|line| !line.starts_with("userd: ")).collect();
        assert_eq!((code, said.len()), (i32::from(!expected.is_empty()), expected.len()), "{stderr}");
        for (said, expected) in said.iter().zip(expected) {
            assert!(said.starts_with(expected), "{expected}: {said}");
        }
    }
    assert_eq!(database.value("select count(*) from users"), "0");
    let text = "\u{feff}id,name,email,password,createdAt\r\n\
        7,\"a \"\"quoted\"\", name\",a@example.com,,2020-01-01 00:00:00+00\r\n\
        8,\"two\r\nlines\",b@example.com,correct horse,\r\n\
        9,,c@example.com,,\r\n";
    assert_eq!(import(&database, text, &["--format=csv"]).0, 0);
    let found = "select string_agg(format('%s|%s|%s', name, email, password_hash is not null), ';' order by id) \
        from users left join credentials on user_id = id";
    let expected = "a \"quoted\", name|a@example.com|f;two\r\nlines|b@example.com|t;|c@example.com|f";
    assert_eq!(database.value(found), expected);
    assert_eq!(database.value("select min(created_at) = '2020-01-01 00:00:00+00' from users"), "true");
}

/// Files as spreadsheets and other programs write them: what is said, and what is stored.
#[test]
fn files_of_other_programs() {
    let csv = "name,email";
    let rows: [(&str, &str, &str, &str); 32] = [
        // JSON in one array, or in an object with one.
        (
            r#"[{"name":"a","email":"a@x.org"},{"name":"b","email":"b@x.org"}]"#,
            "",
            "imported 2 users",
            "a@x.org b@x.org",
        ),
        (
            "[\n  {\n    \"name\": \"a]}\\\"\",\n    \"email\": \"a@x.org\"\n  }\n]\n",
            "",
            "imported 1 user",
            "a@x.org",
        ),
        (
            r#"{"version":[1],"users":[{"name":"a","email":"a@x.org"}],"meta":{"x":[{"y":1}]}}"#,
            "",
            "imported 1 user",
            "a@x.org",
        ),
        (
            "{\n\"users\": [\n{\"name\":\"a\",\n\"email\":\"a@x.org\"}, {\"name\":\"b\",\"email\":\"b@x.org\"}]}",
            "",
            "imported 2 users",
            "a@x.org b@x.org",
        ),
        ("[]", "", "imported 0 users", ""),
        ("{\"users\":[]}", "", "imported 0 users", ""),
        (r#"[{"name":"a","email":"a@x.org"},7]"#, "", "user 2: is not a JSON object", ""),
        (
            r#"[{"name":"a","email":"a@x.org"},{"name":"b","email":"A@x.org"}]"#,
            "",
            "user 2: /email is that of user 1, too",
            "",
        ),
        (
            r#"[{"name":"a","email":"a@x.org"},{"name":"b","email":"#,
            "",
            "EOF while parsing a value at line 1 column 52",
            "",
        ),
        (
            r#"{"users":[{"name":"a","email":"a@x.org"}],"roles":[{"name":"b","email":"b@x.org"}]}"#,
            "",
            "it has several arrays of objects: `jq -c '.users[]'` chooses the users of one",
            "",
        ),
        (
            "{\n  \"name\": \"a\",\n  \"email\": \"a@x.org\"\n}\n",
            "",
            "it is an object without an array of users: `jq -c .` writes one user a line",
            "",
        ),
        // Separators, names, blanks of CSV.
        ("name;email\na;a@x.org\n", "", "imported 1 user", "a@x.org"),
        ("\"Name\";\"E\"\na;a@x.org\n", "--map=email=e", "imported 1 user", "a@x.org"),
        ("\"name\"\t\"email\"\n\"a;b,c\"\ta@x.org\n", "", "imported 1 user", "a@x.org"),
        ("\u{feff} NAME ,\u{a0}Email\u{a0}\na,\u{a0}a@x.org \u{a0}\n", "", "imported 1 user", "a@x.org"),
        ("name,email,\na,a@x.org,\n,,\n , ,\u{a0}\nb,b@x.org,\n", "", "imported 2 users", "a@x.org b@x.org"),
        ("name,email\na,a@x.org,,\n", "", "imported 1 user", "a@x.org"),
        ("name,email\na,a@x.org,b\n", "", "line 2: has 3 fields, and the header 2", ""),
        // Members and columns that are no field.
        (
            r#"{"name":"a","email":"a@x.org","role":7}"#,
            "",
            "line 1: These fields may not be mass assigned: \"role\"; --ignore-unknown leaves them out, --map says",
            "",
        ),
        (
            r#"{"name":"a","email":"a@x.org","role":7}"#,
            "--ignore-unknown",
            "imported 1 user; left out \"role\" of 1 user",
            "a@x.org",
        ),
        (
            "name,email,role,x\na,a@x.org,1,\nb,b@x.org,2,\n",
            "--ignore-unknown",
            "imported 2 users; left out \"role\" of 2 users",
            "a@x.org b@x.org",
        ),
        (
            r#"{"displayName":"a","emails":[{"value":"a@x.org"}],"passwordHash":"x","createdAt":1}"#,
            "--map=name=displayName,email=emails.0.value",
            "imported 1 user; left out \"createdAt\" of 1 user, \"passwordHash\" of 1 user",
            "a@x.org",
        ),
        (
            r#"[{"profile":{"login":"a@x.org"}}]"#,
            "--map=name=profile.login,email=profile.login",
            "imported 1 user",
            "a@x.org",
        ),
        ("Full Name,Mail\na,a@x.org\n", "--map=name=full name,email=MAIL", "imported 1 user", "a@x.org"),
        ("e\na@x.org\n", "--map=name=e,email=e", "imported 1 user", "a@x.org"),
        (
            "name,mail\na,a@x.org\n",
            "--map=email=e-mail",
            "line 1: the header has no column e-mail, and 1 columns of other names",
            "",
        ),
        (r#"{"name":"a","mail":"a@x.org"}"#, "--map=email=mail.0", "line 1: /email is required", ""),
        (
            csv,
            "--map=mail=x",
            "userd: --map must be FIELD=MEMBER,…, and FIELD one of id, name, email, createdAt",
            "",
        ),
        (csv, "--map=name=x,name=y", "userd: --map has name twice", ""),
        // Files that are no text.
        ("PK\u{3}\u{4}", "", "line 1: the header has no column name", ""),
        (
            "Ann,ann@x.org,hunter2-hunter2,$2b$05$abcdefghijklmnopqrstuu\n",
            "",
            "line 1: the header has no column name, and 4 columns of other names",
            "",
        ),
        (
            "ann;hunter2-hunter2;name\n",
            "",
            "line 1: the header has no column email, and 2 columns of other names",
            "",
        ),
    ];
    let database = Database::create();
    for (text, argument, said, stored) in rows {
        let argument = Some(argument).filter(|argument| !argument.is_empty());
        for run in [import::<&str>, import_piped] {
            database.run("delete from users");
            let (code, stdout, stderr) = run(&database, text, argument.as_slice());
            let line = stderr.strip_prefix("userd: cannot read: ").unwrap_or(&stderr);
            assert!((stdout.clone() + line).starts_with(said), "{text}: {stdout}{stderr}");
            assert!(!stderr.contains("hunter2") && !stderr.contains("$2b$"), "{stderr}");
            let expected = if said.starts_with("imported") {
                0
            } else if said.starts_with("userd: ") {
                2
            } else {
                1
            };
            assert_eq!(code, expected, "{text}");
            let emails = "select coalesce(string_agg(email, ' ' order by id), '') from users";
            assert_eq!(database.value(emails), stored, "{text}");
        }
    }
}

/// A file that was cut off, or is no text in UTF-8, is no file with an invalid line: nothing of it is imported.
#[test]
fn files_that_are_cut_off() {
    let line = r#"{"name":"a","email":"a@x.org"}"#;
    let many = format!("[{}LINE", "LINE,".repeat(50_000));
    let rows = [
        (r#"[LINE,{"name":"b","ema"#, "EOF while parsing a string at line 1"),
        ("[LINE", "EOF while parsing a list"),
        ("[LINE,", "EOF while parsing a value"),
        (&many, "EOF while parsing a list"),
        (r#"{"users":[LINE],"x":"#, "EOF while parsing a value"),
        ("[LINE] LINE", "trailing characters"),
        ("LINE\n{\"name\":\"b\",\"email\":\"b@x", "line 2 is cut off"),
        ("name,email\na,a@x.org\n\"b,b@x.org\nc,c@x.org\n", "line 3 has a quote that is not closed"),
        ("name,email\na,a@x.org\nb", "line 3 is cut off"),
        ("name,mail\na,a@x.org\n", "line 1: the header has no column email"),
    ];
    let text_rows = rows.map(|(text, said)| (text.replace("LINE", line).into_bytes(), said));
    // Beginnings of a file of gzip and of one in UTF-16.
    let others = [b"\x1f\x8b\x08\0\0\0\0\0\0\x03", b"\xff\xfe{\0\"\0n\0a\0"];
    let others =
        others.map(|text| (text.to_vec(), "it is not UTF-8, but UTF-16, compressed or a spreadsheet"));
    let database = Database::create();
    for (text, said) in text_rows.iter().chain(&others) {
        for arguments in [&["--skip-invalid"][..], &[], &["--skip-invalid", "--dry-run"]] {
            let (code, stdout, stderr) = import(&database, text, arguments);
            assert_eq!((code, stdout.as_str()), (1, ""), "{said}: {stderr}");
            assert!(stderr.starts_with(&format!("userd: cannot read: {said}")), "{said}: {stderr}");
            assert!(stderr.ends_with("; nothing was imported\n"), "{stderr}");
            assert_eq!(database.value("select count(*) from users"), "0", "{said}");
        }
    }
}

#[test]
fn existing_users_can_be_skipped() {
    let database = Database::create();
    database
        .run("insert into users (name, email) values ('Ada', 'ADA@example.com'), ('Bob', 'bob@example.com')");
    let text = "{\"name\":\"ada\",\"email\":\"ada@example.com\"}\n{\"name\":\"Eve\",\"email\":\"eve@example.com\"}\n";
    let (code, _, stderr) = import(&database, text, &[]);
    assert_eq!(code, 1);
    assert!(stderr.starts_with("line 1: /email is that of a user in the database\n"), "{stderr}");
    for (expected, arguments) in [
        ("would import 1 user, skipped 1 existing user\n", &["--skip-existing", "--dry-run"][..]),
        ("imported 1 user, skipped 1 existing user\n", &["--skip-existing"]),
        ("imported 0 users, skipped 2 existing users\n", &["--skip-existing"]),
    ] {
        assert_eq!(import(&database, text, arguments), (0, expected.to_owned(), String::new()));
    }
    assert_eq!(database.value("select string_agg(name, ',' order by id) from users"), "Ada,Bob,Eve");
    // An address that occurs twice in one file is an error even with --skip-existing.
    let text = "{\"name\":\"x\",\"email\":\"x@example.com\"}\n".repeat(2);
    let (code, _, stderr) = import(&database, &text, &["--skip-existing"]);
    assert_eq!(code, 1);
    assert!(stderr.starts_with("line 2: /email is that of line 1, too\n"), "{stderr}");
}

/// Addresses of the file and of the database are equal if only the case of ASCII letters differs.
#[test]
fn addresses_that_differ_in_the_case_of_their_letters() {
    let addresses = [
        "ada@example.com",
        "ZOË@example.com",
        "zoë@example.com",
        "ADA@Example.COM",
        "Zoë@EXAMPLE.com",
        "é@example.com",
    ];
    let ndjson = addresses.map(|email| json!({"name": "n", "email": email}).to_string() + "\n").concat();
    let csv = "name,email\n".to_owned() + &addresses.map(|email| format!("n,{email}\n")).concat();
    for (format, text, first_line) in [("ndjson", ndjson, 1), ("csv", csv, 2)] {
        let database = Database::create();
        database.run("insert into users (name, email) values ('n', 'É@example.com')");
        let at = |index: usize| first_line + index;
        let refused = format!(
            "line {}: /email is that of line {}, too\nline {}: /email is that of line {}, too\n",
            at(3),
            at(0),
            at(4),
            at(2)
        );
        let (code, _, stderr) = import(&database, &text, &["--format", format]);
        assert_eq!(code, 1);
        assert!(stderr.starts_with(&refused), "{format}: {stderr}");
        assert_eq!(database.value("select count(*) from users"), "1");

        let (code, stdout, stderr) = import(&database, &text, &["--format", format, "--skip-invalid"]);
        assert_eq!((code, stdout.as_str()), (0, "imported 4 users, skipped 2 invalid lines\n"), "{stderr}");
        let stored = database.value("select string_agg(email, ',' order by id) from users");
        assert_eq!(stored, "É@example.com,ada@example.com,ZOË@example.com,zoë@example.com,é@example.com");

        // Now all of them are those of users in the database.
        let (code, _, stderr) = import(&database, &text, &["--format", format]);
        assert_eq!(code, 1);
        let lines: Vec<_> = stderr.lines().filter(|line| line.contains(" /email is that of ")).collect();
        assert_eq!(lines.len(), 6, "{stderr}");
    }
}

/// The two lines of docs/import.md: ids, times, hashes and answers of the copy are those of the original.
#[test]
fn a_copy_with_its_ids() {
    let source = Service::start();
    let mut client = source.client();
    for n in 1..=5 {
        let body = json!({"name": "n", "email": format!("{n}@example.com"), "password": PASSWORD});
        assert_eq!(client.post("/users", body.to_string()).status, 201);
    }
    assert_eq!(client.put("/users/4", r#"{"name":"Changed"}"#).status, 200);
    assert_eq!(client.delete("/users/2").status, 204);
    source.database.run(
        "insert into users (id, name, email) overriding system value
             select n, n, 'x' || n from generate_series(3000, 5000) n;
         insert into users (id, name, email) overriding system value values (9007199254740993, 'far', 'odd')",
    );
    let (_, block) =
        include_str!("../../docs/import.md").split_once("copy all users: ").expect("there is a sentence");
    let (_, block) = block.split_once("\n```sh\n").expect("a block of shell");
    let (block, _) = block.split_once("\n```").expect("it ends");
    let copy = Service::start();
    let dir = TempDir::new();
    let userd = Path::new(env!("CARGO_BIN_EXE_userd")).parent().expect("a directory");
    let mut shell = Command::new("sh");
    shell.args(["-ec", block]).current_dir(dir.path()).env_clear().stdin(Stdio::null());
    shell.env("PATH", format!("{}:/usr/bin:/bin", userd.display()));
    shell.env("DATABASE_URL", source.database.url()).env("OTHER_DATABASE", copy.database.url());
    let output = shell.output().expect("sh");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout, "imported 2006 users\n", "{}", String::from_utf8_lossy(&output.stderr));
    let rows = "select md5(string_agg(concat_ws('|', id, name, email, created_at, updated_at, password_hash), ';' \
        order by id)) from users left join credentials on user_id = id";
    assert_eq!(copy.database.value(rows), source.database.value(rows));
    assert_eq!(counted(&copy.database), (2006, 2006));
    let mut other = copy.client();
    for (id, same_tag) in
        [(1, true), (2, true), (4, false), (5, true), (4000, true), (9007199254740993_i64, true)]
    {
        let [one, two] = [&mut client, &mut other].map(|client| client.get(&format!("/users/{id}")));
        assert_eq!((one.status, &one.body), (two.status, &two.body), "{id}");
        assert_eq!(one.header("ETag") == two.header("ETag"), same_tag, "{id}: {one:?} {two:?}");
    }
    let stale = client.get("/users/4").header("ETag").expect("a tag").to_owned();
    assert_eq!(other.request("PUT", "/users/4", &[("If-Match", &stale)], r#"{"name":"x"}"#).status, 412);
    assert!(can_log_in(&mut other, "5@example.com", PASSWORD));
    // Behind the largest one.
    let body = r#"{"name":"Next","email":"next@example.com"}"#;
    assert_eq!(other.post("/users", body).id(), "9007199254740994");
    assert_eq!(other.get("/users/9007199254740994").json()["name"], "Next");
}

#[test]
fn ids_that_are_kept() {
    let service = Service::start();
    let mut client = service.client();
    let database = &service.database;
    assert_eq!(client.post("/users", r#"{"name":"Ada","email":"ada@example.com"}"#).id(), "1");
    let keep =
        |text: &str, arguments: &[&str]| import(database, text, &[&["--keep-ids"], arguments].concat());
    let line = |id: &str, email: &str| format!("{{{id}\"name\":\"n\",\"email\":\"{email}@example.com\"}}\n");
    let whole = "/id must be a whole number from 1 to 9223372036854775807";
    for (id, problem) in [
        ("", "/id is required by --keep-ids"),
        ("\"id\":null,", "/id is required by --keep-ids"),
        ("\"id\":\"\",", whole),
        ("\"id\":0,", whole),
        ("\"id\":-1,", whole),
        ("\"id\":1.0,", whole),
        ("\"id\":\"007\",", whole),
        ("\"id\":\"+7\",", whole),
        ("\"id\":\"x\",", whole),
        ("\"id\":9223372036854775808,", whole),
        ("\"id\":\"9223372036854775808\",", whole),
        ("\"id\":[7],", whole),
        ("\"id\":\"1\",", "/id is that of a user in the database"),
        ("\"id\":\"9\",", "/id is that of line 1, too"),
    ] {
        let text = line("\"id\":9,", "first") + &line(id, "second");
        let (code, _, stderr) = keep(&text, &[]);
        assert_eq!(code, 1, "{id}");
        assert!(stderr.starts_with(&format!("line 2: {problem}\n")), "{id}: {stderr}");
        assert_eq!(counted(database), (1, 1), "{id}");
    }
    let (code, _, stderr) = keep("name,email\nn,n@example.com\n", &["--format=csv"]);
    assert!(code == 1 && stderr.contains("line 1: the header has no column id, and 0"), "{stderr}");
    // Refused lines and a dry run draw no value from the sequence.
    let text = line("\"id\":40,", "a") + &line("\"id\":\"30\",", "b") + &line("\"id\":1,", "ADA");
    assert_eq!(
        keep(&text, &["--dry-run", "--skip-existing"]).1,
        "would import 2 users, skipped 1 existing user\n"
    );
    assert_eq!(client.post("/users", r#"{"name":"Bob","email":"bob@example.com"}"#).id(), "2");
    assert_eq!(keep(&text, &["--skip-existing"]).1, "imported 2 users, skipped 1 existing user\n");
    let ids = "select string_agg(concat(id, email), ' ' order by id) from users";
    assert_eq!(database.value(ids), "1ada@example.com 2bob@example.com 30b@example.com 40a@example.com");
    assert_eq!(client.get("/users/30").json()["email"], "b@example.com");
    assert_eq!(client.post("/users", r#"{"name":"Eve","email":"eve@example.com"}"#).id(), "41");
    // The id of another address is taken, whatever is skipped; the others can be imported without it.
    let text = line("\"id\":40,", "other") + &line("\"id\":50000,", "c");
    let (code, _, stderr) = keep(&text, &["--skip-existing"]);
    assert!(code == 1 && stderr.starts_with("line 1: /id is that of a user in the database\n"), "{stderr}");
    let (code, stdout, _) = keep(&text, &["--skip-existing", "--skip-invalid"]);
    assert_eq!((code, stdout.as_str()), (0, "imported 1 user, skipped 1 invalid line\n"));
    assert_eq!(client.post("/users", r#"{"name":"Zoe","email":"zoe@example.com"}"#).id(), "50001");
    // Below the sequence nothing is set back; CSV, and a pipe.
    let text = "email,id,name\nd@example.com,7,n\n";
    let (code, stdout, stderr) = import_piped(database, text, &["--keep-ids", "--format=csv"]);
    assert_eq!((code, stdout.as_str(), stderr.as_str()), (0, "imported 1 user\n", ""));
    assert_eq!(client.post("/users", r#"{"name":"Kim","email":"kim@example.com"}"#).id(), "50002");
    assert_eq!(client.get("/users/7").json()["email"], "d@example.com");
    assert_eq!(counted(database), (9, 9));
    // Without the option the id of a line means nothing.
    assert_eq!(import(database, line("\"id\":1,", "new"), &[]).1, "imported 1 user\n");
    assert_eq!(client.get("/users?email=new@example.com").json()["data"][0]["id"], "50003");
}

/// Creates that go on meanwhile never get an id of the file.
#[test]
fn ids_that_are_kept_while_users_are_created() {
    let service = Service::start();
    let database = &service.database;
    let text: String = (1..=3000)
        .map(|n| format!("{{\"id\":{},\"name\":\"n\",\"email\":\"k{n}@example.com\"}}\n", 100 + n))
        .collect();
    // Its insert waits for this address.
    let mut lock = database.client();
    lock.batch_execute("begin; insert into users (name, email) values ('x', 'k3000@example.com')").unwrap();
    let dir = TempDir::new();
    dir.write("users", &text);
    let mut process = start(database, &dir.path().join("users"), &["--keep-ids"]);
    database.waits_for_locks(1);
    let mut client = service.client();
    assert_eq!(client.post("/users", r#"{"name":"Ada","email":"ada@example.com"}"#).id(), "3101");
    lock.batch_execute("rollback").unwrap();
    assert_eq!((process.wait(LONG), process.stdout().as_str()), (0, "imported 3000 users\n"));
    assert_eq!(client.post("/users", r#"{"name":"Bob","email":"bob@example.com"}"#).id(), "3102");
    assert_eq!(counted(database), (3002, 3002));
}

/// Without `--format` and a name that says it, the first character does.
#[test]
fn the_format_is_that_of_the_users() {
    let service = Service::start();
    let csv = |n: usize| format!("\u{feff}\nname,email\nn,{n}@example.com\n");
    let ndjson = |n: usize| format!("\u{feff}\n {{\"name\":\"n\",\"email\":\"{n}@example.com\"}}\n");
    for (n, text) in [csv(1), ndjson(2)].iter().enumerate() {
        let expected = (0, "imported 1 user\n".to_owned(), String::new());
        assert_eq!(import(&service.database, text, &[]), expected, "{text}");
        let piped = text.replace("@", &format!("{n}@"));
        assert_eq!(import_piped(&service.database, &piped, &[]), expected, "{piped}");
    }
    for (text, problem) in [
        ("name;email\nn;x\n", "line 2: /email value is not an e-mail address"),
        ("[{\"name\":\"n\"}]", "user 1: /email is required"),
        ("", ""),
    ] {
        let (code, _, stderr) = import_piped(&service.database, text, &[]);
        assert_eq!(code, i32::from(!problem.is_empty()), "{stderr}");
        assert!(stderr.starts_with(problem), "{stderr}");
    }
    let (code, _, stderr) = import(&service.database, csv(7), &["--format=ndjson"]);
    assert!(code == 1 && stderr.starts_with("line 2: is not JSON"), "{stderr}");
    let users = service.client().get("/users").json();
    assert_eq!(users["total"], 4);
    assert_eq!(users["data"][3]["email"], "21@example.com");
}

/// The users of a file are stored while it is read, those of a stream afterwards: the outcome is the same.
#[test]
fn a_file_is_imported_as_a_stream_is() {
    const COUNT: usize = 500;
    const HASH: &str = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    let of_line = |line: usize| format!("/email is that of line {line}, too");
    let stored = "/email is that of a user in the database".to_owned();
    let user = |email: &str| json!({"name": "n", "email": email}).to_string();
    let invalid = "/email value is not an e-mail address: it has no @".to_owned();
    // Lines that are others, by number, and what is said of lines. A batch has 64 lines.
    type Case = (Vec<(usize, String)>, Vec<(usize, String)>);
    let cases: [Case; 9] = [
        (vec![], vec![]),
        (vec![(2, user("1@example.com"))], vec![(2, of_line(1))]),
        (vec![(COUNT, user("1@EXAMPLE.com"))], vec![(COUNT, of_line(1))]),
        (vec![(65, user("64@example.com"))], vec![(65, of_line(64))]),
        (vec![(1, user("taken@example.com"))], vec![(1, stored.clone())]),
        (vec![(COUNT, user("Taken@example.com"))], vec![(COUNT, stored.clone())]),
        (vec![(COUNT, user("nonsense"))], vec![(COUNT, invalid.clone())]),
        (
            vec![
                (9, user("8@example.com")),
                (300, user("nonsense")),
                (301, user("taken@example.com")),
                (499, user("8@example.com")),
            ],
            vec![(9, of_line(8)), (300, invalid), (301, stored), (499, of_line(8))],
        ),
        (
            vec![(COUNT, json!({"name": "n", "email": "x@example.com", "passwordHash": HASH}).to_string())],
            vec![],
        ),
    ];
    let database = Database::create();
    let expected_counts = |count: usize| (count + 1, count + 1);
    for (others, said) in cases {
        let mut text: Vec<String> = lines(COUNT).lines().map(str::to_owned).collect();
        others.iter().for_each(|(line, other)| text[line - 1].clone_from(other));
        let text = text.join("\n");
        let complaints: String =
            said.iter().map(|(line, problem)| format!("line {line}: {problem}\n")).collect();
        for import in [import::<&str>, import_piped] {
            database
                .run("delete from users; insert into users (name, email) values ('t', 'taken@example.com')");
            let (code, stdout, stderr) = import(&database, &text, &[]);
            assert_eq!(code, i32::from(!said.is_empty()), "{others:?}: {stderr}");
            assert!(stderr.starts_with(&complaints), "{others:?}: {stderr}");
            let ending = match said.len() {
                0 => format!("imported {COUNT} users\n"),
                1 => "userd: 1 line is refused; nothing was imported\n".to_owned(),
                count => format!("userd: {count} lines are refused; nothing was imported\n"),
            };
            assert_eq!(stdout + &stderr, complaints.clone() + &ending, "{others:?}");
            assert_eq!(
                counted(&database),
                expected_counts(if said.is_empty() { COUNT } else { 0 }),
                "{others:?}"
            );

            database
                .run("delete from users; insert into users (name, email) values ('t', 'taken@example.com')");
            let (code, stdout, stderr) = import(&database, &text, &["--skip-invalid"]);
            assert_eq!((code, &stderr), (0, &complaints), "{others:?}");
            let rest = COUNT - said.len();
            assert!(stdout.starts_with(&format!("imported {rest} users")), "{others:?}: {stdout}");
            assert_eq!(counted(&database), expected_counts(rest), "{others:?}");
            let in_order = "select bool_and(name = 'n' or name like 'User %') and array_agg(email order by id) = \
                array_agg(email order by case name when 't' then 0 else split_part(email, '@', 1)::int end, id) \
                from users where name <> 'n' and email <> 'taken@example.com'";
            assert_eq!(database.value(in_order), "true", "{others:?}");
            let hashed =
                "select count(*) from users join credentials on user_id = id where email = 'x@example.com'";
            let count = others.iter().filter(|(_, line)| line.contains(HASH)).count();
            assert_eq!(database.value(hashed), count.to_string());
        }
    }
}

/// A file that is standard input is read from where it is.
#[test]
fn the_rest_of_a_file() {
    let database = Database::create();
    let dir = TempDir::new();
    // The last line repeats the first one, so that the file is read twice.
    dir.write("users", &format!("read by another program\n{}", lines(100) + &lines(1)));
    for (arguments, expected) in [
        (&[][..], (1, "line 101: /email is that of line 1, too\n")),
        (&["--skip-invalid"], (0, "line 101: /email is that of line 1, too\n")),
    ] {
        let mut file = fs::File::open(dir.path().join("users")).unwrap();
        let mut byte = [0];
        while byte != *b"\n" {
            file.read_exact(&mut byte).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_userd"));
        command.arg("import").args(arguments).env_clear().env("DATABASE_URL", database.url());
        let output = command.stdin(file).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(expected.0), "{stderr}");
        assert!(stderr.starts_with(expected.1), "{stderr}");
    }
    assert_eq!(counted(&database), (100, 100));
}

/// Rows that a trigger leaves out are no import.
#[test]
fn a_trigger_that_alters_the_rows() {
    let database = Database::create();
    database.run(
        "create function leave_out() returns trigger language plpgsql as \
         $$ begin return case new.email when '7@example.com' then null else new end; end $$;
         create trigger leave_out before insert on users for each row execute function leave_out()",
    );
    let text = lines(10);
    for import in [import::<&str>, import_piped] {
        let (code, _, stderr) = import(&database, &text, &[]);
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains("9 users were stored instead of 10: a trigger"), "{stderr}");
        assert_eq!(database.value("select count(*) from users"), "0");
    }
}

/// Another client stores an address between the look and the insert: it waits for that transaction, and tells.
#[test]
fn an_address_that_is_stored_meanwhile() {
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("users", &lines(3));
    for (arguments, code, expected) in [
        (&[][..], 1, "line 2: /email is that of a user in the database\n"),
        (&["--skip-existing"], 0, "imported 2 users, skipped 1 existing user\n"),
        (&["--skip-invalid"], 0, "imported 2 users, skipped 1 invalid line\n"),
    ] {
        database.run("delete from users");
        let mut other = database.client();
        other
            .batch_execute("begin; insert into users (name, email) values ('other', '2@example.com')")
            .unwrap();
        let mut process = start(&database, &dir.path().join("users"), arguments);
        database.waits_for_locks(1);
        other.batch_execute("commit").unwrap();
        assert_eq!(process.wait(LONG), code);
        let said = process.stderr() + &process.stdout();
        assert!(said.contains(expected), "{said}");
        let names = database.value("select string_agg(name, ',' order by id) from users");
        assert_eq!(names, if code == 1 { "other" } else { "other,User 1,User 3" });
    }
}

#[test]
fn one_line_without_an_end() {
    /// Bytes; and KiB that a debug build may hold.
    const LENGTH: usize = 100 << 20;
    const MOST: usize = 64 << 10;
    let database = Database::create();
    for format in ["ndjson", "csv"] {
        let mut process = piped(&database, &["--format", format]);
        let mut stdin = process.stdin.take().unwrap();
        if format == "csv" {
            stdin.write_all(b"name,email\n\"").unwrap();
        }
        let mut most = 0;
        let piece = vec![b'x'; 1 << 20];
        // The process ends before the line does.
        for _ in 0..LENGTH / piece.len() {
            if stdin.write_all(&piece).is_err() {
                break;
            }
            most = most.max(memory_kib(process.id()));
        }
        drop(stdin);
        let output = process.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let expected = match format {
            "csv" => "userd: cannot read: line 2 is longer than 1048576 bytes; nothing was imported\n",
            _ => "userd: cannot read: line 1 is longer than 1048576 bytes; nothing was imported\n",
        };
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr.starts_with(expected), "{stderr}");
        assert!(most < MOST, "{most} KiB");
    }
}

#[test]
fn the_service_runs_meanwhile() {
    let service = Service::start();
    let mut client = service.client();
    let mut process = piped(&service.database, &[]);
    let mut stdin = process.stdin.take().unwrap();
    stdin.write_all(lines(20_000).as_bytes()).unwrap();
    let staged = "select count(*) from pg_stat_progress_copy where tuples_processed > 0";
    eventually(LONG, "lines are staged", || service.database.value(staged) == "1");
    assert_eq!(client.get("/users").json()["total"], 0);
    assert_eq!(client.post("/users", r#"{"name":"n","email":"meanwhile@example.com"}"#).id(), "1");
    assert_eq!(client.get("/users").json()["total"], 1);
    drop(stdin);
    assert!(process.wait().unwrap().success());
    assert_eq!(client.get("/users").json()["total"], 20_001);
    assert_eq!(counted(&service.database), (20_001, 20_001));
}

#[test]
fn a_signal_leaves_nothing() {
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("users", &lines(1000));
    let sessions = "select count(*) from pg_stat_activity \
        where datname = current_database() and application_name = 'userd'";
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut locked = database.client();
        locked.batch_execute("begin; lock table users in exclusive mode").unwrap();
        let mut process = start(&database, &dir.path().join("users"), &[]);
        database.waits_for_locks(1);
        process.signal(signal);
        assert_eq!(process.wait(LONG), code);
        assert_eq!(process.stderr(), "userd: interrupted; nothing was imported\n");
        // Even while the lock is held, the server does not go on with it.
        eventually(LONG, "its session ends", || database.value(sessions) == "0");
        drop(locked);
    }
    // And while it waits for its input.
    let mut process = piped(&database, &[]);
    let mut stdin = process.stdin.take().unwrap();
    stdin.write_all(lines(1000).as_bytes()).unwrap();
    eventually(LONG, "it is connected", || database.value(sessions) == "1");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(process.id().cast_signed()), Signal::SIGINT).unwrap();
    eventually(LONG, "it ends", || process.try_wait().unwrap().is_some());
    assert_eq!(process.wait().unwrap().code(), Some(130));
    assert_eq!(database.value("select count(*) from users"), "0");
}

/// No client sees a user before all are stored, and creates of other addresses go on.
#[test]
fn the_service_runs_while_a_file_is_stored() {
    let service = Service::start();
    let mut client = service.client();
    let dir = TempDir::new();
    dir.write("users", &lines(2000));
    let mut other = service.database.client();
    other
        .batch_execute("begin; insert into users (name, email) values ('other', '2000@example.com')")
        .unwrap();
    let mut process = start(&service.database, &dir.path().join("users"), &[]);
    service.database.waits_for_locks(1);
    let stores = "select count(*) from pg_stat_activity where query like '%insert into users%' and wait_event_type = 'Lock' \
         and application_name = 'userd'";
    assert_eq!(service.database.value(stores), "1");
    assert_eq!(client.get("/users").json()["total"], 0);
    let created = client.post("/users", r#"{"name":"n","email":"meanwhile@example.com"}"#);
    assert_eq!(created.status, 201);
    assert_eq!(client.get("/users").json()["total"], 1);
    other.batch_execute("rollback").unwrap();
    assert_eq!((process.wait(LONG), process.stderr().as_str()), (0, ""));
    assert_eq!(client.get("/users").json()["total"], 2001);
    assert_eq!(counted(&service.database), (2001, 2001));
}

/// The input need not end for the process to end.
#[test]
fn a_session_that_the_database_ends() {
    let database = Database::create();
    let mut process = piped(&database, &[]);
    let mut stdin = process.stdin.take().unwrap();
    let sessions = "select count(*) from pg_stat_activity \
        where datname = current_database() and application_name = 'userd' and query like 'copy%'";
    eventually(LONG, "it is staging", || {
        stdin.write_all(lines(100).as_bytes()).unwrap();
        database.value(sessions) == "1"
    });
    database.value(&sessions.replace("count(*)", "count(pg_terminate_backend(pid))"));
    eventually(LONG, "it ends", || {
        // It may end meanwhile.
        let _ = stdin.write_all(lines(100).as_bytes());
        process.try_wait().unwrap().is_some()
    });
    let output = process.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.ends_with("; nothing was imported\n"), "{stderr}");
    assert_eq!(database.value("select count(*) from users"), "0");
}

/// The rights that the service needs are enough.
#[test]
fn a_role_with_few_rights() {
    let database = Database::create();
    let role = format!("{}_few", database.name());
    database.run(&format!(
        "create role {role} login; grant select, insert on users, credentials to {role};
         grant select on user_counts, refinery_schema_history to {role}"
    ));
    let dir = TempDir::new();
    let hash = "$2b$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    let hashed = json!({"name": "n", "email": "hashed@example.com", "passwordHash": hash});
    dir.write("users", &format!("{}{hashed}\n", lines(1000)));
    let file = dir.path().join("users");
    let url = database.url().replace("user=postgres", &format!("user={role}"));
    for (arguments, expected) in [
        (&["import"][..], "imported 1001 users\n"),
        (&["import", "--skip-existing"], "imported 0 users, skipped 1001 existing users\n"),
    ] {
        let mut process =
            Process::start(&[arguments, &[file.to_str().unwrap()]].concat(), &[("DATABASE_URL", &url)]);
        assert_eq!((process.wait(LONG), process.stderr().as_str()), (0, ""));
        assert_eq!(process.stdout(), expected);
    }
    let owner = "select email from users join credentials on user_id = id";
    assert_eq!(database.value(owner), "hashed@example.com");
    // COPY stores no rows where the role's are restricted.
    database.run(
        "alter table users enable row level security; create policy p on users using (true) with check (true)",
    );
    dir.write("users", "{\"name\":\"n\",\"email\":\"restricted@example.com\"}");
    let mut process = Process::start(&["import", file.to_str().unwrap()], &[("DATABASE_URL", &url)]);
    assert_eq!((process.wait(LONG), process.stderr().as_str()), (0, ""));
    assert_eq!(counted(&database), (1002, 1002));
    database.run(&format!("drop owned by {role}; drop role {role}"));
}

/// An import killed at 50 random moments stores all users or none, and does not block the next import.
#[test]
fn killed_at_any_moment() {
    const COUNT: usize = 500;
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("users", &lines(COUNT));
    let file = dir.path().join("users");
    let began = Instant::now();
    assert_eq!(import_file(&database, &file, &[]).0, 0);
    let takes = began.elapsed();
    let mut client = database.client();
    client.execute("delete from users", &[]).unwrap();
    let (mut all, mut none) = (0, 0);
    let mut dice = Dice(20_261_122);
    for _ in 0..50 {
        let process = start(&database, &file, &[]);
        pause(Duration::from_micros(dice.roll(takes.as_micros() as u64 * 6 / 5)));
        process.signal(Signal::SIGKILL);
        // The lock waits for an import that the server is still executing.
        client.batch_execute("begin; lock table users in share row exclusive mode; commit").unwrap();
        match client.execute("delete from users", &[]).unwrap() as usize {
            0 => none += 1,
            COUNT => all += 1,
            count => panic!("{count} users"),
        }
    }
    println!("{all} imported all, {none} nothing");
    assert!(all + none == 50 && none > 5);
    let (code, stdout, stderr) = import_file(&database, &file, &["--skip-existing"]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert_eq!(counted(&database), (COUNT, COUNT));
}

/// The lines of docs/import.md, in a directory with a file of new users.
#[test]
fn the_lines_of_the_page() {
    let (_, chapter) = include_str!("../../docs/import.md")
        .split_once("\n## How do I export and import many users?\n")
        .expect("there is a chapter");
    let (_, block) = chapter.split_once("\n```sh\n").expect("a block of shell");
    let (block, _) = block.split_once("\n```").expect("it ends");
    let service = Service::start();
    let mut client = service.client();
    for n in 1..=3 {
        let body =
            json!({"name": "n", "email": format!("{n}@example.com"), "password": PASSWORD}).to_string();
        assert_eq!(client.post("/users", body).status, 201);
    }
    let dir = TempDir::new();
    dir.write("new-users.csv", "name,email\nZoë,zoe@example.com\nEve,eve@example.com\n");
    let userd = Path::new(env!("CARGO_BIN_EXE_userd")).parent().expect("a directory");
    let path = format!("{}:/usr/bin:/bin", userd.display());
    let mut shell = Command::new("sh");
    shell.args(["-ec", block]).current_dir(dir.path()).env_clear().env("PATH", path);
    let output = shell.env("DATABASE_URL", service.database.url()).stdin(Stdio::null()).output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{stdout}{stderr}");
    let said: Vec<&str> = stdout.lines().collect();
    assert_eq!(said.len(), 6, "{stdout}");
    assert_eq!(said[0], "id,name,email,createdAt,updatedAt");
    assert_eq!(said[3], "would import 2 users");
    assert_eq!(said[4], "imported 2 users");
    assert_eq!(said[5], "imported 0 users, skipped 2 existing users");
    let lines = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap().lines().count();
    assert_eq!((lines("users.ndjson"), lines("everything.ndjson")), (3, 3));
    assert_eq!(client.get("/users").json()["total"], 5);
}

/// On a terminal there is a progress bar; `script` is one. Every other test sees that there is none elsewhere.
#[test]
fn a_progress_bar_on_a_terminal() {
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("users", &lines(2000));
    let file = dir.path().join("users");
    for (command, expected) in [("import", "lines, "), ("export", " of 2,000 users, ")] {
        let line = format!("{} {command} {}", env!("CARGO_BIN_EXE_userd"), file.display());
        let mut terminal = Command::new("script");
        terminal.args(["-qec", &line, "/dev/null"]).env("DATABASE_URL", database.url()).env("TERM", "xterm");
        let output = terminal.stdin(Stdio::null()).output().expect("bsdutils");
        let shown = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && shown.contains(expected), "{shown:?}");
    }
}

/// The lines of docs/import.md, each on a file of three users in the system's own form. The last member: whether the hash
/// of the first user comes along.
#[test]
fn files_of_other_systems() {
    const BCRYPT: &str = "05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2";
    const SHA512: &str =
        "oSKce4SGrSKsJabCWZfpe2MmVOPtl4paOjoD1njLdjo3le9sMBwq0q7ivJFcrXSTMQ0HjlOn/J48J9WZe4uR0g==";
    let each = |user: &dyn Fn(usize) -> Value| (1..=3).map(user).collect::<Vec<Value>>();
    let rows = |header: &str, separator: &str, user: &dyn Fn(usize) -> Vec<String>| {
        let rows = (1..=3).map(|n| user(n).join(separator) + "\n");
        header.replace(',', separator) + "\n" + &rows.collect::<String>()
    };
    let email = |n: usize| format!("user{n}@example.com");
    let auth0 = each(&|n| {
        json!({"_id": {"$oid": format!("60425dc43519d90068f8297{n}")}, "email_verified": false, "email": email(n),
               "passwordHash": format!("$2b${BCRYPT}"), "tenant": "dev",
               "password_set_date": {"$date": "2021-03-05T16:34:49.502Z"}, "connection": "Username-Password-Authentication"})
    });
    let firebase = each(&|n| {
        json!({"localId": n.to_string(), "email": email(n), "emailVerified": false, "passwordHash": "V1N3LQ==",
               "salt": "r7vD3Q==", "createdAt": "1520370000000", "providerUserInfo": []})
    });
    let keycloak = each(&|n| {
        let secret =
            json!({"value": SHA512, "salt": "c2FsdHNhbHRzYWx0", "additionalParameters": {}}).to_string();
        let data = json!({"hashIterations": 1000, "algorithm": "pbkdf2-sha512", "additionalParameters": {}});
        let credential =
            json!({"id": "x", "type": "password", "secretData": secret, "credentialData": data.to_string()});
        json!({"id": "x", "username": format!("user{n}"), "firstName": "User", "lastName": n.to_string(),
               "email": email(n), "createdTimestamp": 1520370000000_i64, "enabled": true, "credentials": [credential]})
    });
    let okta = each(&|n| {
        json!({"id": format!("00u{n}"), "status": "ACTIVE", "created": "2013-06-24T16:39:18.000Z",
               "profile": {"firstName": "User", "lastName": n.to_string(), "email": email(n), "login": email(n)},
               "credentials": {"password": {}, "provider": {"type": "OKTA", "name": "OKTA"}}})
    });
    let django = each(&|n| {
        json!({"model": "auth.user", "pk": n, "fields": {
            "password": "pbkdf2_sha256$1000$saltsaltsalt$F7o7+5VTVzFAO998X6s3AHrDsJVdMiIlgndIMe19NvY=",
            "last_login": null, "username": format!("user{n}"), "email": email(n), "is_staff": false, "groups": [],
            "date_joined": "2020-02-29T23:59:59.123Z"}})
    });
    let (phpass, wp) = (
        "$P$6abcdefghRJFCMvnAbZH2hCiFPRxpk.",
        "$wp$2y$05$abcdefghijklmnopqrstuu9iY1gyjA3k6CGptWJJ9nIT22tG/wV8K",
    );
    let wordpress = rows("display_name,user_email,user_pass", "\t", &|n| {
        vec![format!("User {n}"), email(n), if n == 1 { phpass } else { wp }.to_owned()]
    });
    let pg = |version: &'static str| {
        move |n: usize| {
            let hash = format!("${version}${BCRYPT}");
            vec![format!("User {n}"), email(n), hash, "2020-02-29 23:59:59.123456+00".to_owned()]
        }
    };
    let lines = |users: &[Value]| users.iter().map(|user| format!("{user}\n")).collect::<String>();
    let files = [
        ("Auth0", "auth0.ndjson", lines(&auth0), true),
        ("Firebase", "firebase.json", format!("{{\"users\": {}}}", json!(firebase)), false),
        (
            "Keycloak",
            "keycloak.json",
            format!("{:#}", json!({"realm": "shop", "users": keycloak, "roles": {}})),
            true,
        ),
        ("Okta", "okta.json", json!(okta).to_string(), false),
        ("WordPress", "wordpress.tsv", wordpress, true),
        ("Django", "django.json", json!(django).to_string(), true),
        ("Rails", "rails.csv", rows("name,email,encrypted_password,created_at", ",", &pg("2a")), true),
        ("Laravel", "laravel.tsv", rows("name,email,password", "\t", &|n| pg("2y")(n)[..3].to_vec()), true),
        ("Supabase", "supabase.csv", rows("name,email,encrypted_password,created_at", ",", &pg("2a")), true),
    ];
    let page = include_str!("../../docs/import.md");
    assert_eq!(page.matches("\n**").count(), files.len());
    let service = Service::start();
    let mut client = service.client();
    let userd = Path::new(env!("CARGO_BIN_EXE_userd")).parent().expect("a directory");
    for (system, name, text, has_hash) in files {
        service.database.run("delete from users");
        let (_, section) = page.split_once(&format!("\n**{system}**: ")).expect(system);
        let (_, block) = section.split_once("\n```sh\n").expect(system);
        let (block, _) = block.split_once("\n```").expect(system);
        let dir = TempDir::new();
        dir.write(name, &text);
        let mut shell = Command::new("sh");
        shell.args(["-ec", block]).current_dir(dir.path()).env_clear().stdin(Stdio::null());
        shell.env("PATH", format!("{}:/usr/bin:/bin", userd.display()));
        let output = shell.env("DATABASE_URL", service.database.url()).output().expect("sh");
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(said.starts_with("imported 3 users"), "{system}: {said}");
        let users = client.get("/users").json();
        assert_eq!(users["total"], 3, "{system}");
        for (n, user) in users["data"].as_array().expect("users").iter().enumerate() {
            assert_eq!(user["email"], email(n + 1), "{system}");
            assert!(
                user["name"].as_str().expect("a name").to_lowercase().contains("user"),
                "{system}: {user}"
            );
        }
        let hash = "select coalesce(min(password_hash), '') from credentials join users on user_id = id \
            where email = 'user1@example.com'";
        assert_eq!(service.database.value(hash).is_empty(), !has_hash, "{system}");
        assert!(!has_hash || !can_log_in(&mut client, &email(1), "correct horsf"), "{system}");
        assert_eq!(can_log_in(&mut client, &email(1), PASSWORD), has_hash, "{system}");
        assert_eq!(service.database.value(hash).starts_with("$argon2id$"), has_hash, "{system}");
        assert_eq!(can_log_in(&mut client, &email(3), PASSWORD), has_hash, "{system}");
    }
}
