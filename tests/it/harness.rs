//! The command as harnesses in other languages use it: the examples, as real processes.

use crate::support::{
    ADA, ADA_1, Client, Database, EPHEMERAL, LONG, Process, TempDir, USERD, check, eventually,
};
use nix::sys::signal::Signal;
use std::{
    net::TcpListener,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    process::{Command, Stdio},
};
use userd::testing::TestServer;

#[test]
fn a_shell_script() {
    let temp = TempDir::new();
    let mut script = Command::new("sh");
    script.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/harness.sh"));
    // Variables that the environment sets for its own purposes, such as conda's HOST, are no settings of the service.
    script.envs([("HOST", "x86_64-conda-linux-gnu"), ("API_TOKEN", "theirs"), ("SCHEMA", "strict")]);
    let output = script.env("USERD", USERD).env("TMPDIR", temp.path()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert_eq!(temp.path().read_dir().unwrap().count(), 0);
}

/// Harnesses give both parents: a child that the test process has forked may hold the pipe after that has ended.
#[test]
fn it_ends_with_a_parent_that_it_is_told() {
    let start = |arguments: &[&str]| {
        let arguments = [&EPHEMERAL, arguments].concat();
        let mut process = Process::fed(Stdio::piped(), &[USERD], &arguments, &[]);
        assert_eq!(process.client().get("/users").status, 200);
        process
    };
    for (given, is_pipe) in [(0..1, true), (1..2, false), (0..2, true), (0..2, false)] {
        let mut parent = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut process = start(&["--with-parent", &format!("--with-parent={}", parent.id())][given]);
        let url = process.wait_for_url();
        assert!(url.starts_with("http://127.0.0.1:"), "not beyond this machine: {url}");
        // The parent has ended, though its status is read later.
        if is_pipe {
            process.end_input()
        } else {
            parent.kill().unwrap()
        }
        assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
        let _ = parent.kill();
        parent.wait().unwrap();
    }
    let mut without = start(&["--host=127.0.0.2"]);
    without.end_input();
    assert!(without.wait_for_url().starts_with("http://127.0.0.2:"));
    assert_eq!(without.client().get("/users").status, 200);
    // A background job of a shell has /dev/null as its standard input, which has ended.
    let mut process = Process::start(&[&EPHEMERAL[..], &["--with-parent"]].concat(), &[]);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    process.logs("standard input has ended, and this process with it (--with-parent)");
}

/// A database that cannot be used ends the start. The socket stays open, so that the next start answers the clients
/// that have connected meanwhile.
#[test]
fn a_socket_that_a_supervisor_passes() {
    let (other, database) = (Database::empty(), Database::unmade());
    let dir = TempDir::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Client::new(&format!("http://{}", listener.local_addr().unwrap()));
    client.send(b"GET /users HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let url = database.url();
    let start = |socket, more| Process::activated(vec![socket], &[], &[("DATABASE_URL", &url), more]);
    let passed = || listener.try_clone().unwrap().into();
    let elsewhere = ("HOST", "192.0.2.1");
    let mut failed = start(passed(), elsewhere);
    assert_eq!(failed.wait(LONG), 1);
    failed.logs("cannot connect to the database: FATAL: database");
    // A setting that cannot be used ends it as well, and a socket that is no listener.
    assert_eq!(start(passed(), ("WORKERS", "0")).wait(LONG), 2);
    other.run(&format!("create database {}", database.name()));
    assert_eq!(start(UnixStream::pair().unwrap().0.into(), elsewhere).wait(LONG), 1);
    let _process = start(passed(), elsewhere);
    assert_eq!(client.answer("GET").status, 200);
    check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}"));

    let path = dir.path().join("http");
    let mut process = start(UnixListener::bind(&path).unwrap().into(), elsewhere);
    assert_eq!(process.wait_for_url(), format!("unix:{}", path.display()));
    check(&mut process.client(), &format!("GET /users/1 => 200 {ADA_1}"));
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0);
    assert!(path.exists(), "the supervisor's file stays");
}

/// The next command drops the database of one that has ended, whatever ended it.
#[test]
fn the_database_of_a_command_that_has_ended_is_dropped_by_the_next() {
    let keep = TestServer::start();
    let (cluster, _) = keep.database_url().rsplit_once('/').unwrap();
    let connect = |name: &str| postgres::Client::connect(&format!("{cluster}/{name}"), postgres::NoTls);
    let mut here = connect("postgres").unwrap();
    for (signal, code) in [(Signal::SIGTERM, 0), (Signal::SIGKILL, -9)] {
        let mut process = Process::start(&EPHEMERAL, &[]);
        let user = format!(r#"{{"name":"Ada","email":"{code}@left.example"}}"#);
        assert_eq!(process.client().post("/users", user).status, 201);
        let ask = format!("select exists (select from users where email = '{code}@left.example')");
        let mut is_there = || {
            let names = "select datname::text from pg_database where datname ~ '^userd_scratch'";
            let mut names = here.query(names, &[]).unwrap().into_iter().map(|row| row.get::<_, String>(0));
            let has_it = |mut client: postgres::Client| client.query_one(&ask, &[]);
            names.any(|name| connect(&name).and_then(has_it).is_ok_and(|row| row.get(0)))
        };
        eventually(LONG, "it has the user", &mut is_there);
        process.signal(signal);
        assert_eq!(process.wait(LONG), code);
        eventually(LONG, "the next process drops it", || {
            Process::start(&EPHEMERAL, &[]).wait_for_url();
            !is_there()
        });
    }
}
