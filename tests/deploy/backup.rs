//! Dumps and what they are restored into: the lines of "How do I back up and restore?" in docs/backup.md, and what it
//! says is refused.

use crate::support::{
    Client, LONG, LONG_ON_DISK, Own, PASSWORD, Process, TempDir, blocks, eventually, programs_of_postgres,
    shell,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::{os::unix::fs::PermissionsExt, path::Path};

const BACKUP: &str = include_str!("../../docs/backup.md");

/// A block of the chapter.
fn block(number: usize) -> &'static str {
    blocks(BACKUP, "\n## How do I back up and restore?\n")[number]
}

/// Runs lines in a directory; each must succeed.
fn run(dir: &Path, lines: &str) {
    let (code, _, stderr) = shell(dir, lines, &[]);
    assert_eq!(code, 0, "{lines}: {stderr}");
}

/// `userd` on a cluster of its own in this directory, with the programs of this path.
fn embedded(dir: &Path, path: &str) -> Process {
    let argument = format!("--embedded={}/userd-data", dir.display());
    Process::start(&[&argument], &[("HOST", "127.0.0.1"), ("PATH", path)])
}

/// Some users, two of them with passwords, and gaps where users were deleted.
fn fill(client: &mut Client, sql: &mut postgres::Client) {
    for name in ["ada", "bob"] {
        let body = json!({"name": name, "email": format!("{name}@example.com"), "password": PASSWORD});
        assert_eq!(client.post("/users", body.to_string()).status, 201);
    }
    sql.batch_execute(
        "insert into users (name, email) select 'n', n || '@example.com' from generate_series(1, 3000) n;
         delete from users where id between 700 and 900 or id % 10 = 0",
    )
    .expect("users");
}

/// Every page, as it is answered.
fn pages(client: &mut Client) -> Vec<Value> {
    let mut pages = Vec::new();
    loop {
        let page = client.get(&format!("/users?perPage=500&page={}", pages.len() + 1)).json();
        let more = page["hasMorePages"] == true;
        pages.push(page);
        if !more {
            return pages;
        }
    }
}

/// Users and totals are as before, passwords open their accounts, and new users get the next ids.
fn assert_restored(client: &mut Client, expected: &[Value]) {
    assert_eq!(pages(client), expected);
    for email in ["ada@example.com", "bob@example.com"] {
        assert!(client.opens(email, PASSWORD), "{email}");
    }
    let total = expected[0]["total"].as_u64().expect("a number");
    let created = client.post("/users", r#"{"name":"new","email":"new@example.com"}"#);
    assert_eq!(created.status, 201, "{created:?}");
    assert_eq!(client.delete("/users/1").status, 204);
    let list = client.get("/users?perPage=1").json();
    assert_eq!(list["total"], total);
    let highest = expected.iter().flat_map(|page| page["data"].as_array().expect("users"));
    let highest = highest.filter_map(|user| user["id"].as_str()?.parse::<i64>().ok()).max();
    assert!(created.id().parse().ok() > highest, "{created:?}");
}

/// An embedded database, and a distribution with a newer PostgreSQL beside the one that made the cluster: here the same
/// programs, which say that they are of another version.
#[test]
fn an_embedded_database_and_the_next_postgresql() {
    let (dir, next) = (TempDir::new(), TempDir::new());
    let path = std::env::var("PATH").unwrap_or_default();
    let mut before = embedded(dir.path(), &path);
    let mut client = Client::new(&before.wait_for_url_within(LONG_ON_DISK));
    let url = format!("host={}/userd-data user=postgres dbname=postgres", dir.path().display());
    fill(&mut client, &mut postgres::Client::connect(&url, postgres::NoTls).expect("the cluster"));
    let created = pages(&mut client);
    before.signal(Signal::SIGTERM);
    assert_eq!(before.wait(LONG_ON_DISK), 0);

    for name in ["initdb", "postgres"] {
        let program = programs_of_postgres().join(name).display().to_string();
        let version = format!("[ \"$1\" != --version ] || exec echo '{name} (PostgreSQL) 99.1'");
        next.write(name, &format!("#!/bin/sh\n{version}\nexec {program} \"$@\"\n"));
        let executable = PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(next.path().join(name), executable).expect("our own file");
    }
    let path = format!("{}:{path}", next.name());
    let mut old = embedded(dir.path(), &path);
    let mut client = Client::new(&old.wait_for_url_within(LONG_ON_DISK));
    assert!(!old.stderr().contains("PostgreSQL 99"), "{}", old.stderr());
    assert_eq!(pages(&mut client), created);
    run(dir.path(), block(0));
    old.signal(Signal::SIGTERM);
    assert_eq!(old.wait(LONG_ON_DISK), 0);

    run(dir.path(), "mv userd-data userd-data.old");
    let mut new = embedded(dir.path(), &path);
    let mut client = Client::new(&new.wait_for_url_within(LONG_ON_DISK));
    new.logs("making a PostgreSQL 99 cluster");
    run(dir.path(), &block(1).replace("restored", "userd-data"));
    eventually(LONG, "the service has the restored tables", || client.get("/users").status == 200);
    assert_restored(&mut client, &created);
}

#[test]
fn a_server() {
    let (source, target, dir) = (Own::start(), Own::start(), TempDir::new());
    for server in [&source, &target] {
        server.run("create role app login createdb");
        server.run("create database app owner app");
    }
    let url = |server: &Own, database: &str| {
        format!("host={} user=app dbname={database}", server.socket_dir().display())
    };
    let connect = |url: &str| postgres::Client::connect(url, postgres::NoTls).expect("it takes connections");
    let ours = |block: &str| {
        let block = block.replace("10.0.0.21", &source.socket_dir().display().to_string());
        block.replace("10.0.0.22", &target.socket_dir().display().to_string())
    };

    let mut process = Process::at(&url(&source, "app"), &[]);
    let mut client = process.client();
    fill(&mut client, &mut connect(&url(&source, "app")));
    let before = pages(&mut client);
    let lines = ours(block(2));
    let (lines, last) = lines.trim_end().rsplit_once('\n').expect("several lines");
    run(dir.path(), lines);
    let database_url = last.strip_prefix("DATABASE_URL='").and_then(|rest| rest.strip_suffix("' userd"));
    let mut restored = Process::at(database_url.expect("the last line starts userd"), &[]);
    assert_restored(&mut restored.client(), &before);

    // Only rows, into the tables of a userd that runs.
    let mut other = Process::at(&url(&target, "app"), &[]);
    let mut client = other.client();
    let rows = "
        pg_dump --data-only -t users -t credentials 'host=10.0.0.21 user=app dbname=app' > rows.sql
        psql -X -1 -v ON_ERROR_STOP=1 -f rows.sql 'host=10.0.0.22 user=app dbname=app'";
    run(dir.path(), &ours(rows));
    assert_restored(&mut client, &before);
}
