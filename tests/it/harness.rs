//! The command as harnesses in other languages use it: the examples, as real processes.

use crate::support::{Client, Database, LONG, Process, TempDir, eventually, free_port, has_ipv6};
use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    process::{Child, Command, Stdio},
};

const USERD: &str = env!("CARGO_BIN_EXE_userd");

fn run(program: &str, example: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(example);
    // What the machine of somebody's sets, conda for one, is no setting of the service.
    let foreign = [("HOST", "x86_64-conda-linux-gnu"), ("API_TOKEN", "theirs"), ("SCHEMA", "strict")];
    let output = Command::new(program).arg(file).env("USERD", USERD).envs(foreign).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is needed: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {}\n{said}", output.status);
}

#[test]
fn a_shell_script() {
    run("sh", "harness.sh");
}

#[test]
fn a_python_test() {
    run("python3", "test_users.py");
}

/// `userd` with its standard input in our hands.
fn ephemeral(arguments: &[&str]) -> (Child, String) {
    let mut child = Command::new(USERD)
        .args(["--embedded", "--ephemeral", "--port", "0"])
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.strip_prefix("listening on ").and_then(|line| line.strip_suffix('\n'));
    (child, url.unwrap_or_else(|| panic!("{line:?}")).to_owned())
}

fn ends(mut child: Child) {
    eventually(LONG, "userd ends", || match child.try_wait().unwrap() {
        Some(status) => {
            assert!(status.success(), "{status}");
            true
        }
        None => false,
    });
}

#[test]
fn it_ends_with_its_parent_only_if_told() {
    let (mut with, url) = ephemeral(&["--with-parent"]);
    assert!(url.starts_with("http://127.0.0.1:"), "not beyond this machine: {url}");
    drop(with.stdin.take());
    ends(with);

    let (argument, address) =
        if has_ipv6() { ("--host=::1", "http://[::1]:") } else { ("--host=127.0.0.2", "http://127.0.0.2:") };
    let (mut without, url) = ephemeral(&[argument]);
    drop(without.stdin.take());
    assert!(url.starts_with(address), "{url}");
    assert_eq!(Client::new(&url).get("/users").status, 200);
    let pid = nix::unistd::Pid::from_raw(without.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM).unwrap();
    ends(without);
}

#[test]
fn it_ends_with_the_process_that_it_is_told() {
    let mut parent = Command::new("sleep").arg("1000").spawn().unwrap();
    let (child, url) = ephemeral(&[&format!("--with-parent={}", parent.id())]);
    assert_eq!(Client::new(&url).get("/users").status, 200);
    parent.kill().unwrap();
    // It has ended, though its status is read later.
    ends(child);
    parent.wait().unwrap();
}

/// As a background job of a shell is started.
#[test]
fn a_parent_that_is_none_is_told() {
    let line = |argument: &str| {
        let mut process = Process::start(&["--embedded", "--ephemeral", "--port=0", argument], &[]);
        assert_eq!(process.wait(LONG), 2, "{}", process.stderr());
        process.stderr()
    };
    let said = line("--with-parent");
    assert!(said.contains("/dev/null") && said.contains("--with-parent=PID"), "{said}");
    let said = line("--with-parent=999999999");
    assert!(said.contains("no such process"), "{said}");
}

#[test]
fn the_shell_script_leaves_nothing_without_userd() {
    let temp = TempDir::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/harness.sh");
    let mut script = Command::new("sh");
    script.arg(file).env("USERD", "/nowhere/userd").env("TMPDIR", temp.path()).stderr(Stdio::null());
    let mut script = script.spawn().unwrap();
    eventually(LONG, "it gives up", || script.try_wait().unwrap().is_some_and(|status| !status.success()));
    assert_eq!(temp.path().read_dir().unwrap().count(), 0);
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    let rows: [&[&str]; 9] = [
        &["--with-parent=me"],
        &["--ephemeral"],
        &["--embedded=/tmp/x", "--ephemeral"],
        &["--port"],
        &["--port", "abc"],
        &["--port="],
        &["--host"],
        &["healthcheck", "--port"],
        &["healthchek"],
    ];
    for arguments in rows {
        let mut process = Process::start(arguments, &[]);
        assert_eq!(process.wait(LONG), 2, "{arguments:?}: {}", process.stderr());
        assert_eq!(process.stderr().lines().count(), 1, "{}", process.stderr());
    }
}

#[test]
fn a_healthcheck_over_tcp_and_unix_sockets() {
    let database = Database::create();
    let dir = TempDir::new();
    let socket = format!("unix:{}/http", dir.path().display());
    for host in ["127.0.0.1", socket.as_str()] {
        let token = ("API_TOKEN", crate::support::TOKEN);
        // No other process gets it once it is free.
        let port = if host == socket { "1".to_owned() } else { free_port().to_string() };
        let port = port.as_str();
        let mut process = Process::on(&database, &[("HOST", host), ("PORT", port), token]);
        process.wait_for_url();
        let ask = |variables: &[(&str, &str)]| {
            let all = [&[("HOST", host), ("PORT", port)], variables].concat();
            let mut asked = Process::start(&["healthcheck"], &all);
            (asked.wait(LONG), asked.stderr())
        };
        // It asks for what needs no token.
        assert_eq!(ask(&[]), (0, String::new()));
        let arguments = ["healthcheck", "--host", host, "--port", port];
        let mut asked = Process::start(&arguments, &[token, ("HOST", "192.0.2.1"), ("PORT", "1")]);
        assert_eq!((asked.wait(LONG), asked.stderr()), (0, String::new()));
        database.run("alter table refinery_schema_history rename to away");
        let mut last = (0, String::new());
        eventually(LONG, "it is unready", || {
            last = ask(&[]);
            last.0 == 1
        });
        assert!(last.1.contains("was answered 503") && last.1.contains("schema is not the one"), "{last:?}");
        assert_eq!(last.1.lines().count(), 1, "{last:?}");
        database.run("alter table away rename to refinery_schema_history");
        drop(process);
        let (code, said) = ask(&[]);
        assert_eq!(code, 1);
        assert!(said.contains("no answer from"), "{said}");
    }
}

/// A shell does what systemd does: descriptor 3, and two variables that name the process meant.
fn activated(socket: OwnedFd, database: &Database) -> Child {
    Command::new("/bin/sh")
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" 3<&0 </dev/null", USERD])
        .env_clear()
        .env("DATABASE_URL", database.url())
        .env("HOST", "192.0.2.1")
        .stdin(Stdio::from(socket))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_socket_that_a_supervisor_passes() {
    let database = Database::create();
    let dir = TempDir::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let path = dir.path().join("http");
    let unix = UnixListener::bind(&path).unwrap();
    let name = format!("unix:{}", path.display());
    for (socket, name) in [(OwnedFd::from(listener), url), (OwnedFd::from(unix), name)] {
        let mut child = activated(socket.try_clone().unwrap(), &database);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("listening on {name}\n"));
        if name.starts_with("http") {
            assert_eq!(Client::new(&name).get("/users").status, 200);
        }
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM).unwrap();
        let mut stderr = child.stderr.take().unwrap();
        ends(child);
        let mut log = String::new();
        stderr.read_to_string(&mut log).unwrap();
        assert!(
            log.contains("[WARN] HOST has no effect: the socket that was passed is listened on"),
            "{log}"
        );
    }
    assert!(path.exists(), "the supervisor's file stays");

    let socket = OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
    let code = activated(socket, &database).wait().unwrap().code();
    assert_eq!(code, Some(1), "a connection is no listener");
}
