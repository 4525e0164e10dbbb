//! Privileges of the process: started by root with its own PostgreSQL, it runs as PostgreSQL's account from when it
//! listens. These tests run only as root: another user has no rights to give up.

use crate::support::{
    Client, LONG, LONG_ON_DISK, Process, TOKEN, TempDir, check, eventually, is_root, postmaster, running,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid, User, chown},
};
use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    },
    process::{Command, Stdio},
};

const USERD: &str = env!("CARGO_BIN_EXE_userd");
const ADA: &str = r#"{"name":"Ada","email":"ada@example.com"}"#;
const ADA_1: &str = r#"{"id":"1","name":"Ada","email":"ada@example.com",<times>}"#;

fn account() -> User {
    User::from_name("postgres").unwrap().expect("the tests need PostgreSQL, which brings this user")
}

/// A directory that PostgreSQL's account may enter, and only root may write to; the argument that names a cluster there.
fn directory() -> (TempDir, String) {
    let dir = TempDir::new();
    let argument = format!("--embedded={}/data", dir.name());
    (dir, argument)
}

/// Returns the users (real, effective, saved, of files), groups and capabilities of a process's threads.
fn threads(process: u32) -> BTreeSet<String> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let status = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("status")).ok());
    let named = |line: &str| ["Uid:", "Gid:", "Groups:", "Cap"].iter().any(|name| line.starts_with(name));
    let named = |line: &str| named(line) && !line.starts_with("CapBnd");
    let lines =
        |status: String| status.lines().filter(|line| named(line)).map(str::to_owned).collect::<Vec<_>>();
    status.flat_map(lines).map(|line| line.trim_end().to_owned()).collect()
}

#[track_caller]
fn check_given_up(process: u32) {
    let User { uid, gid, .. } = account();
    let none = |name| format!("{name}:\t0000000000000000");
    let ids = [format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}"), format!("Gid:\t{gid}\t{gid}\t{gid}\t{gid}")];
    let capabilities = ["CapInh", "CapPrm", "CapEff", "CapAmb"].map(none);
    let groups = ["Groups:".to_owned()];
    let expected = ids.into_iter().chain(capabilities).chain(groups).collect();
    assert_eq!(threads(process), expected, "each of its threads");
}

/// Root reads secrets and migrations before it gives up its rights. The cluster's directory stays usable, the
/// one of an older version included.
#[test]
fn root_becomes_the_account_of_its_postgresql() {
    if !is_root() {
        return;
    }
    let (dir, argument) = directory();
    let data = dir.path().join("data");
    let private = TempDir::new();
    fs::set_permissions(private.path(), PermissionsExt::from_mode(0o700)).unwrap();
    private.write("token", TOKEN);
    let token = private.path().join("token");
    let migrations = private.path().join("migrations");
    let copied = Command::new("/bin/cp")
        .args(["-r", concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")])
        .arg(&migrations)
        .status();
    assert!(copied.unwrap().success());
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
        ("MIGRATIONS_DIR", migrations.to_str().unwrap()),
    ];
    let bearer = format!("Bearer {TOKEN}");
    let start = |method, path, status| {
        let mut process = Process::under(&["/bin/sh", "-c", few, USERD], &[&argument], &variables);
        let url = process.wait_for_url_within(LONG_ON_DISK);
        check_given_up(process.id());
        let limits = fs::read_to_string(format!("/proc/{}/limits", process.id())).unwrap();
        let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let files: u32 = files.split_whitespace().nth(3).unwrap().parse().unwrap();
        assert!(files > 1024, "descriptors for 1024 connections: {files}");
        let mut client = Client::new(&url);
        assert_eq!(client.get("/users/1").status, 401);
        let answer = client.request(
            method,
            path,
            &[("Authorization", &bearer)],
            if method == "POST" { ADA } else { "" },
        );
        assert_eq!((answer.status, &answer.json()["name"]), (status, &"Ada".into()), "{answer:?}");
        (process, postmaster(&data).unwrap())
    };
    let (mut killed, server) = start("POST", "/users", 201);
    killed.signal(Signal::SIGKILL);
    assert_eq!(killed.wait(LONG), -9);
    assert!(running(server));

    // An older version made these files as root.
    for name in ["", "lock", "postgres.log"] {
        chown(&data.join(name), Some(Uid::from_raw(0)), Some(0.into())).unwrap();
    }
    let (mut process, next) = start("GET", "/users/1", 200);
    assert!(!running(server));
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    assert!(!running(next), "PostgreSQL is left behind");
    // A session that is opened while PostgreSQL stops is refused.
    let log = process.stderr().replace("cannot connect to the database", "");
    assert!(!log.contains("cannot"), "{log}");
    assert_eq!(process.left_behind(), [""; 0]);
}

#[test]
fn root_becomes_that_account_on_a_database_to_be_dropped() {
    if !is_root() {
        return;
    }
    let mut process = Process::start(&["--embedded", "--ephemeral"], &[]);
    let url = process.wait_for_url_within(LONG_ON_DISK);
    check_given_up(process.id());
    check(&mut Client::new(&url), &format!("POST /users {ADA} => 201 {ADA_1}"));
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    assert_eq!(process.left_behind(), [""; 0]);
}

/// The file is root's. Where the account may not remove it, it stays at the end as it does after a kill, and the next
/// start replaces it.
#[test]
fn unix_sockets_of_a_process_that_was_roots() {
    if !is_root() {
        return;
    }
    let (dir, argument) = directory();
    let User { uid, gid, .. } = account();
    for (name, owner) in [("its", Some(uid)), ("roots", None)] {
        let sockets = dir.path().join(name);
        fs::create_dir(&sockets).unwrap();
        chown(&sockets, owner, owner.map(|_| gid)).unwrap();
        let path = sockets.join("userd.sock");
        let host = format!("unix:{}", path.display());
        for (signal, code) in [(Signal::SIGKILL, -9), (Signal::SIGTERM, 0)] {
            let mut process = Process::start(&[&argument], &[("HOST", &host)]);
            let url = process.wait_for_url_within(LONG_ON_DISK);
            check_given_up(process.id());
            assert_eq!(Client::new(&url).get("/readyz").status, 200);
            process.signal(signal);
            assert_eq!(process.wait(LONG), code, "{}", process.stderr());
            let left = fs::symlink_metadata(&path).is_ok_and(|found| {
                assert!(found.file_type().is_socket() && found.uid() == 0);
                true
            });
            assert_eq!(left, signal == Signal::SIGKILL || owner.is_none(), "{name} {signal}");
        }
    }
}

/// Systemd passes a socket to a service that runs as root.
#[test]
fn a_socket_that_was_passed_to_root() {
    if !is_root() {
        return;
    }
    let (_dir, argument) = directory();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut child = Command::new("/bin/sh")
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\" 3<&0 </dev/null", USERD, &argument])
        .env_clear()
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It waits in the queue of the socket until the service takes it.
    check(&mut Client::new(&url), &format!("POST /users {ADA} => 201 {ADA_1}"));
    check_given_up(child.id());
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    eventually(LONG, "it ends", || child.try_wait().unwrap().is_some());
    assert!(child.wait().unwrap().success());
}

/// A process that keeps root's capabilities as it becomes another user has given nothing up. The command alone gives
/// root up: a program that embeds the service decides for itself.
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
    assert_eq!(stdout, "");
    let last = stderr.lines().last().unwrap();
    assert!(last.starts_with("userd: ") && last.contains("could become root again"), "{stderr}");
    assert_eq!(postmaster(&dir.path().join("data")), None, "PostgreSQL is left behind");

    let server = userd::testing::TestServer::start();
    assert_eq!(Client::new(server.base_url()).get("/users").status, 200);
    assert!(threads(std::process::id()).contains("Uid:\t0\t0\t0\t0"));
    assert_eq!(threads(std::process::id()).iter().filter(|line| line.starts_with("Uid:")).count(), 1);
}
