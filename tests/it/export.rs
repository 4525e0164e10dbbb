//! `userd export`: what it writes, and what is left of one that ends early.

use crate::support::{Database, LONG, PASSWORD, Process, Service, TempDir, USERD, eventually};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Child, Command, Stdio},
};

/// `userd export` on this database.
fn export(database: &Database, arguments: &[&str]) -> Process {
    Process::start(&[&["export"], arguments].concat(), &[("DATABASE_URL", &database.url())])
}

/// Runs an export that succeeds and returns its standard output.
fn exported(database: &Database, arguments: &[&str]) -> String {
    let mut process = export(database, arguments);
    assert_eq!((process.wait(LONG), process.stderr().as_str()), (0, ""));
    process.stdout()
}

/// Its standard output is read by the test.
fn piped(database: &Database) -> Child {
    let mut command = Command::new(USERD);
    command.arg("export").env_clear().env("DATABASE_URL", database.url()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cargo has built it")
}

fn many(database: &Database, count: u32) {
    database.run(&format!(
        "insert into users (name, email) select 'User ' || n, n || '@example.com' from generate_series(1, {count}) n"
    ));
}

fn names(dir: &Path) -> Vec<String> {
    let files = fs::read_dir(dir).expect("it is ours");
    let mut names: Vec<String> =
        files.map(|file| file.expect("it is ours").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

const NAMES: [&str; 7] =
    ["Ada", "", "a \"quoted\", name", "two\nlines\r\n", " spaces ", "Zoë 😀 \u{1}\u{7f}", "=1+1"];

#[test]
fn a_line_is_what_a_get_answers() {
    let service = Service::start();
    let mut client = service.client();
    for (n, name) in NAMES.iter().enumerate() {
        let mut body = json!({"name": name, "email": format!("{n}@example.com")});
        if n == 0 {
            body["password"] = PASSWORD.into();
        }
        assert_eq!(client.post("/users", body.to_string()).status, 201);
    }
    assert_eq!(client.delete("/users/3").status, 204);
    let users: Vec<String> =
        [1, 2, 4, 5, 6, 7].iter().map(|id| client.get(&format!("/users/{id}")).body).collect();
    assert_eq!(exported(&service.database, &[]), users.concat());

    let mut csv =
        csv::Reader::from_reader(exported(&service.database, &["--format=csv"]).into_bytes().leak() as &[u8]);
    assert_eq!(csv.headers().unwrap(), vec!["id", "name", "email", "createdAt", "updatedAt"]);
    let rows: Vec<_> = csv.records().collect::<Result<_, _>>().unwrap();
    let row = |line: &String| {
        let user: Value = serde_json::from_str(line).unwrap();
        let fields = ["id", "name", "email", "createdAt", "updatedAt"];
        fields.map(|field| user[field].as_str().unwrap().to_owned())
    };
    assert_eq!(rows, users.iter().map(row).map(|row| csv::StringRecord::from(&row[..])).collect::<Vec<_>>());
}

#[test]
fn formulas_are_quoted_for_spreadsheets_alone() {
    let service = Service::start();
    // Names, and what is written.
    let names = [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@a", "'@a"),
        ("\t=1", "'\t'=1"),
        ("\r=1", "'\r'=1"),
        ("\n=1", "'\n'=1"),
        ("＝1", "'＝1"),
        ("＋1", "'＋1"),
        ("－1", "'－1"),
        ("＠a", "'＠a"),
        // A spreadsheet may separate fields by semicolons.
        ("a;=1+1;b;-1", "a;'=1+1;b;'-1"),
        ("a;\"=1\"", "a;'\"=1\""),
        ("a\n@b", "a\n'@b"),
        ("a=1; b=2", "a=1; b=2"),
        ("'=1", "'=1"),
        (" =1", " =1"),
        ("", ""),
    ];
    for (n, (name, _)) in names.iter().enumerate() {
        let body = json!({"name": name, "email": format!("={n}@example.com")});
        assert_eq!(service.client().post("/users", body.to_string()).status, 201, "{body}");
    }
    for (arguments, begin, quote) in
        [(&["--format=csv"][..], "", ""), (&["--for-spreadsheets", "--format=csv"], "\u{feff}", "'")]
    {
        let text = exported(&service.database, arguments);
        let text = text.strip_prefix(begin).expect("its mark");
        let records: Vec<_> =
            csv::Reader::from_reader(text.as_bytes()).into_records().map(Result::unwrap).collect();
        assert_eq!(records.len(), names.len());
        for (n, ((name, quoted), record)) in names.iter().zip(records).enumerate() {
            let name = if quote.is_empty() { name } else { quoted };
            assert_eq!((&record[1], &record[2]), (*name, &*format!("{quote}={n}@example.com")));
        }
    }
}

#[test]
fn hashes_only_where_they_are_asked_for() {
    let database = Database::create();
    many(&database, 2);
    database.run("insert into credentials values (2, '$argon2id$of-user-2')");
    let dir = TempDir::new();
    let path = |name: &str| dir.path().join(name).to_str().expect("UTF-8").to_owned();
    assert_eq!(exported(&database, &["--with-password-hashes", &path("users.ndjson")]), "");
    assert_eq!(exported(&database, &["--with-password-hashes", &path("users.csv")]), "");
    let lines = fs::read_to_string(path("users.ndjson")).unwrap();
    let users: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(users[0].get("passwordHash"), None);
    assert_eq!(users[1]["passwordHash"], "$argon2id$of-user-2");
    let csv = fs::read_to_string(path("users.csv")).unwrap();
    let ends: Vec<&str> = csv.lines().map(|line| line.rsplit(',').next().unwrap()).collect();
    assert_eq!(ends, ["passwordHash", "", "$argon2id$of-user-2"]);
    for name in ["users.ndjson", "users.csv"] {
        assert_eq!(fs::metadata(path(name)).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
    assert!(!exported(&database, &[]).contains("argon"));
}

#[test]
fn a_file_is_there_once_it_is_complete() {
    let database = Database::create();
    many(&database, 3);
    let dir = TempDir::new();
    let file = dir.path().join("users.ndjson");
    let argument = file.to_str().unwrap();
    dir.write("users.ndjson", "older");
    fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    symlink("users.ndjson", dir.path().join("link")).unwrap();
    for name in ["users.ndjson", "link"] {
        exported(&database, &[dir.path().join(name).to_str().unwrap()]);
        assert_eq!(fs::read_to_string(&file).unwrap(), exported(&database, &["-"]));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(dir.path()), ["link", "users.ndjson"]);
        database.run("delete from users where id = 1");
    }
    assert!(dir.path().join("link").is_symlink());

    // Ended while it waits for the table, by a signal or by the database.
    let _locked = database.transaction("lock table users");
    let before = fs::read_to_string(&file).unwrap();
    for (signal, code) in [(Some(Signal::SIGINT), 130), (Some(Signal::SIGTERM), 143), (None, 1)] {
        let mut process = export(&database, &[argument]);
        eventually(LONG, "it has begun", || names(dir.path()).len() == 3);
        database.waits_for_a_lock();
        match signal {
            Some(signal) => process.signal(signal),
            None => database.end_sessions(),
        }
        assert_eq!(process.wait(LONG), code);
        assert_eq!(process.stderr().lines().count(), usize::from(signal.is_none()), "{}", process.stderr());
        assert_eq!(names(dir.path()), ["link", "users.ndjson"]);
        database.waits_for_no_lock();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
}

#[test]
fn what_is_no_file_is_written_to_as_it_is() {
    let database = Database::create();
    many(&database, 3);
    let dir = TempDir::new();
    let pipe = dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut process = export(&database, &[pipe.to_str().unwrap()]);
    let mut lines = String::new();
    fs::File::open(&pipe).unwrap().read_to_string(&mut lines).unwrap();
    assert_eq!(process.wait(LONG), 0);
    assert_eq!(lines.lines().count(), 3);
    assert_eq!(names(dir.path()), ["pipe"]);
    let link = dir.path().join("link");
    symlink("nowhere", &link).unwrap();
    for file in ["/dev/full", "/nowhere/at/all", "/", link.to_str().unwrap()] {
        let mut process = export(&database, &[file]);
        assert_eq!(process.wait(LONG), 1, "{file}");
        assert_eq!(process.stderr().lines().count(), 1, "{}", process.stderr());
    }
    assert_eq!(fs::read_link(link).unwrap().to_str(), Some("nowhere"));
}

#[test]
fn a_spreadsheet_takes_csv_alone() {
    let (code, stdout, stderr) =
        Process::start(&["export", "--for-spreadsheets", "--format=ndjson"], &[]).ended();
    assert_eq!((code, &*stdout), (2, ""));
    assert!(stderr.contains("a spreadsheet takes CSV"), "{stderr}");
}

#[test]
fn a_file_that_may_not_be_so_large() {
    let database = Database::create();
    many(&database, 1000);
    let dir = TempDir::new();
    let file = dir.path().join("users.csv");
    let script = r#"ulimit -f 8; exec "$0" "$@""#;
    let mut process = Process::under(
        &["/bin/sh", "-c", script, USERD],
        &["export", file.to_str().unwrap()],
        &[("DATABASE_URL", &database.url())],
    );
    assert_eq!(
        process.ended(),
        (1, String::new(), "userd: cannot write: File too large (os error 27)\n".to_owned())
    );
    assert_eq!(names(dir.path()), [""; 0]);
}

#[test]
fn it_is_one_snapshot() {
    let database = Database::create();
    const COUNT: u32 = 50_000;
    many(&database, COUNT);
    let mut process = piped(&database);
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.contains("\"id\":\"1\""), "{first}");
    // More than what is on its way.
    database.run("update users set name = 'changed'; delete from users where id % 2 = 0");
    let rest: Vec<String> = lines.collect::<Result<_, _>>().unwrap();
    assert_eq!(rest.len(), COUNT as usize - 1);
    assert!(rest.iter().all(|line| line.contains("\"name\":\"User ")));
    assert!(process.wait().unwrap().success());
    // A reader that has enough ends it.
    let mut process = piped(&database);
    BufReader::new(process.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    let mut said = String::new();
    process.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!((process.wait().unwrap().code(), said.as_str()), (Some(141), ""));
    database.has_sessions(0);
}
