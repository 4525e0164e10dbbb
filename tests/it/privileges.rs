//! Privileges of the process: started by root with its own PostgreSQL, it runs as PostgreSQL's account from when it
//! listens. These tests run only as root: another user has no rights to give up.

use crate::support::{
    ADA, ADA_1, Client, LONG, LONG_ON_DISK, Process, TOKEN, TempDir, USERD, check, is_root, postmaster,
    running,
};
use nix::{sys::signal::Signal, unistd::User};
use std::{collections::BTreeSet, fs, net::TcpListener, os::unix::fs::PermissionsExt};

fn account() -> User {
    User::from_name("postgres").unwrap().expect("the tests need PostgreSQL, which brings this user")
}

/// A directory that PostgreSQL's account may enter, and only root may write to; the argument that names a cluster there.
fn directory() -> (TempDir, String) {
    let dir = TempDir::new();
    let argument = format!("--embedded={}/data", dir.name());
    (dir, argument)
}

/// Checks users (real, effective, saved, of files), groups and capabilities of each of a process's threads.
#[track_caller]
fn check_given_up(process: u32) {
    let User { uid, gid, .. } = account();
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let all: String = statuses.collect();
    let names = ["Uid:", "Gid:", "Groups:", "CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
    let named = all.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    let found: BTreeSet<String> = named.map(|line| line.trim_end().to_owned()).collect();
    let ids = [format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}"), format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}")];
    let none = ["CapInh", "CapPrm", "CapEff", "CapAmb"].map(|name| format!("{name}:\t0000000000000000"));
    let expected = ids.into_iter().chain(none).chain(["Groups:".to_owned()]).collect();
    assert_eq!(found, expected);
}

#[track_caller]
fn stop(mut process: Process) {
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    // A session that is opened while PostgreSQL stops is refused.
    let log = process.stderr().replace("cannot connect to the database", "");
    assert!(!log.contains("cannot"), "{log}");
    assert_eq!(process.left_behind(), [""; 0]);
}

/// Root reads secrets before it gives up its rights, and the account reads the migrations. The cluster's directory stays usable.
#[test]
fn root_becomes_the_account_of_its_postgresql() {
    if !is_root() {
        return;
    }
    let (dir, argument) = directory();
    let data = dir.path().join("data");
    let migrations = TempDir::next_release("select 1", false);
    fs::set_permissions(migrations.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let refused = Process::start(&[&argument], &[("MIGRATIONS_DIR", migrations.name())]).ended().2;
    assert!(refused.contains(&format!("cannot read {}: Permission denied", migrations.name())), "{refused}");
    fs::set_permissions(migrations.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let secret = TempDir::new();
    secret.write("token", TOKEN);
    fs::set_permissions(secret.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let token = secret.path().join("token");
    // Only root may raise the hard limit (not in every container), and stand in its home, and bind this port.
    let few = r#"
        (ulimit -n 200 && ulimit -n 300) 2>/dev/null && which= || which=-S
        cd /root && ulimit $which -n 200 && exec "$0" "$@""#;
    let port = (600..1024).rev().find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    let port = port.expect("a free port below 1024").to_string();
    let variables = [
        ("HOST", "127.0.0.1"),
        ("PORT", &port),
        ("API_TOKEN_FILE", token.to_str().unwrap()),
        ("MIGRATIONS_DIR", migrations.name()),
    ];
    let start = |request: &str| {
        let mut process = Process::under(&["/bin/sh", "-c", few, USERD], &[&argument], &variables);
        let url = process.wait_for_url_within(LONG_ON_DISK);
        check_given_up(process.id());
        let limits = fs::read_to_string(format!("/proc/{}/limits", process.id())).unwrap();
        let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let files: u32 = files.split_whitespace().nth(3).unwrap().parse().unwrap();
        assert!(files > 1024, "descriptors for 1024 connections: {files}");
        check(&mut Client::new(&url), &format!("GET /users/1 => 401 *\n{request} {ADA_1}"));
        (process, postmaster(&data).unwrap())
    };
    let with_token = format!("<Authorization: Bearer {TOKEN}>");
    let (mut killed, server) = start(&format!("POST /users {with_token} {ADA} => 201"));
    killed.signal(Signal::SIGKILL);
    assert_eq!(killed.wait(LONG), -9);
    assert!(running(server));
    let (process, next) = start(&format!("GET /users/1 {with_token} => 200"));
    assert!(!running(server));
    stop(process);
    assert!(!running(next), "PostgreSQL is left behind");
}

/// A Unix socket in a directory of root's, and a socket that systemd has passed, in whose queue a client waits.
#[test]
fn root_becomes_that_account_in_other_ways() {
    if !is_root() {
        return;
    }
    let (dir, argument) = directory();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut early = Client::new(&url);
    early.send_request("GET", "/users", &[], "");
    let mut passed = Process::activated(vec![listener.into()], &[&argument], &[]);
    passed.wait_for_url_within(LONG_ON_DISK);
    assert_eq!(early.answer("GET").status, 200);
    let host = format!("unix:{}/userd.sock", dir.name());
    let (_other_dir, argument) = directory();
    let mut unix = Process::start(&[&argument], &[("HOST", &host)]);
    let other = unix.wait_for_url_within(LONG_ON_DISK);
    for (process, url) in [(passed, url), (unix, other)] {
        check(&mut Client::new(&url), &format!("POST /users {ADA} => 201 {ADA_1}"));
        check_given_up(process.id());
        stop(process);
    }
}

/// A process that keeps root's capabilities as it becomes another user has given nothing up.
#[test]
fn a_start_that_cannot_give_root_up_ends() {
    if !is_root() {
        return;
    }
    let (dir, argument) = directory();
    let keeping = ["/usr/bin/setpriv", "--securebits=+no_setuid_fixup", USERD];
    let mut process = Process::under(&keeping, &[&argument], &[]);
    assert_eq!(process.wait(LONG_ON_DISK), 1);
    let (stdout, stderr) = (process.stdout(), process.stderr());
    let last = stderr.lines().last().unwrap();
    assert!(last.starts_with("userd: ") && last.contains("could become root again"), "{stderr}");
    assert_eq!((stdout.as_str(), postmaster(&dir.path().join("data"))), ("", None), "it is left behind");
}
