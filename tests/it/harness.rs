//! The command as harnesses in other languages use it: the examples, as real processes.

use crate::support::{Client, Database, LONG, Process, TempDir, ephemeral, eventually, free_port, has_ipv6};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::Path,
    process::{Child, Command, Stdio},
};
use userd::testing::TestServer;

const USERD: &str = env!("CARGO_BIN_EXE_userd");

/// Runs an example, which must succeed, and returns its standard error.
fn run(program: &str, example: &str) -> String {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(example);
    // Variables that the environment sets for its own purposes, such as conda's HOST, are no settings of the service.
    let foreign = [("HOST", "x86_64-conda-linux-gnu"), ("API_TOKEN", "theirs"), ("SCHEMA", "strict")];
    let output = Command::new(program).arg(file).env("USERD", USERD).envs(foreign).output();
    let output = output.unwrap_or_else(|error| panic!("{program} is needed: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {}\n{said}", output.status);
    said.into_owned()
}

#[test]
fn a_shell_script() {
    assert_eq!(run("sh", "harness.sh"), "");
    // It leaves nothing where userd is missing.
    let temp = TempDir::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/harness.sh");
    let mut script = Command::new("sh");
    script.arg(file).env("USERD", "/nowhere/userd").env("TMPDIR", temp.path()).stderr(Stdio::null());
    let mut script = script.spawn().unwrap();
    eventually(LONG, "it gives up", || script.try_wait().unwrap().is_some_and(|status| !status.success()));
    assert_eq!(temp.path().read_dir().unwrap().count(), 0);
}

/// Starts `userd`, and waits for its URL.
fn start(arguments: &[&str]) -> (Child, String) {
    let mut child = ephemeral(arguments);
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.strip_prefix("listening on ").and_then(|line| line.strip_suffix('\n'));
    (child, url.unwrap_or_else(|| panic!("{line:?}")).to_owned())
}

fn stop(child: &Child) {
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
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

/// Harnesses give both parents: a child that the test process has forked may hold the pipe after that has ended.
#[test]
fn it_ends_with_a_parent_that_it_is_told() {
    for (by_pipe, by_process, end_pipe) in
        [(true, false, true), (false, true, false), (true, true, true), (true, true, false)]
    {
        let mut parent = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = format!("--with-parent={}", parent.id());
        let arguments = [(by_pipe, "--with-parent"), (by_process, &process)];
        let arguments: Vec<_> =
            arguments.iter().filter(|(given, _)| *given).map(|(_, argument)| *argument).collect();
        let (mut child, url) = start(&arguments);
        assert!(url.starts_with("http://127.0.0.1:"), "not beyond this machine: {url}");
        assert_eq!(Client::new(&url).get("/users").status, 200);
        match end_pipe {
            true => drop(child.stdin.take()),
            // It has ended, though its status is read later.
            false => parent.kill().unwrap(),
        }
        ends(child);
        let _ = parent.kill();
        parent.wait().unwrap();
    }
    let (argument, address) =
        if has_ipv6() { ("--host=::1", "http://[::1]:") } else { ("--host=127.0.0.2", "http://127.0.0.2:") };
    let (mut without, url) = start(&[argument]);
    drop(without.stdin.take());
    assert!(url.starts_with(address), "{url}");
    assert_eq!(Client::new(&url).get("/users").status, 200);
    stop(&without);
    ends(without);
}

/// A background job of a shell has /dev/null as its standard input, which has ended.
#[test]
fn a_standard_input_that_has_ended_ends_the_service() {
    let mut process = Process::start(&["--embedded", "--ephemeral", "--port=0", "--with-parent"], &[]);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    process.logs("standard input has ended, and this process with it (--with-parent)");
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    let rows: [(&[&str], &str); 12] = [
        (&["--seed", "users.csv"], ""),
        (&["--embedded", "--seed=users.csv"], ""),
        (&["--with-parent=me"], ""),
        (&["--embedded", "--ephemeral", "--with-parent=999999999"], "no such process"),
        (&["--ephemeral"], ""),
        (&["--embedded=/tmp/x", "--ephemeral"], ""),
        (&["--port"], ""),
        (&["--port", "abc"], ""),
        (&["--port="], ""),
        (&["--host"], ""),
        (&["healthcheck", "--port"], ""),
        (&["healthchek"], ""),
    ];
    for (arguments, reason) in rows {
        let mut process = Process::start(arguments, &[]);
        assert_eq!(process.wait(LONG), 2, "{arguments:?}: {}", process.stderr());
        let said = process.stderr();
        assert!(said.lines().count() == 1 && said.contains(reason), "{said}");
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
    activated_with(socket, &[("DATABASE_URL", &database.url()), ("HOST", "192.0.2.1")])
}

fn activated_with(socket: OwnedFd, variables: &[(&str, &str)]) -> Child {
    Command::new("/bin/sh")
        .args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" 3<&0 </dev/null", USERD])
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::from(socket))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A database that cannot be used ends the start. The socket stays open, so that the next start answers the clients
/// that have connected meanwhile.
#[test]
fn a_passed_socket_without_a_database() {
    let (other, missing) = (Database::empty(), Database::unmade());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let socket = OwnedFd::from(listener);
    let mut client = Client::new(&url);
    client.send(b"GET /users HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let failed = activated(socket.try_clone().unwrap(), &missing).wait_with_output().unwrap();
    assert_eq!(failed.status.code(), Some(1));
    let log = String::from_utf8(failed.stderr).unwrap();
    assert!(log.contains("cannot connect to the database: FATAL: database"), "{log}");
    other.run(&format!("create database {}", missing.name()));
    let child = activated(socket.try_clone().unwrap(), &missing);
    assert_eq!(client.answer("GET").status, 200);
    let user = r#"{"name":"Ada","email":"ada@example.com"}"#;
    assert_eq!(client.post("/users", user).status, 201);
    assert_eq!(client.get("/users/1").json()["name"], "Ada");
    stopped(child);
    // A setting that cannot be used ends it as well.
    let code = activated_with(socket, &[("WORKERS", "0")]).wait().unwrap().code();
    assert_eq!(code, Some(2));
}

/// Stops a process by SIGTERM, which must succeed, and returns its log.
fn stopped(mut child: Child) -> String {
    stop(&child);
    let mut stderr = child.stderr.take().unwrap();
    ends(child);
    let mut log = String::new();
    stderr.read_to_string(&mut log).unwrap();
    log
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
        let log = stopped(child);
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

/// The end of the command, whatever ends it, waits for no drop; the next one drops its database.
#[test]
fn the_database_of_a_command_that_has_ended_is_dropped_by_the_next() {
    let keep = TestServer::start();
    let (cluster, _) = keep.database_url().rsplit_once('/').unwrap();
    let connect = |name: &str| postgres::Client::connect(&format!("{cluster}/{name}"), postgres::NoTls);
    let mut here = connect("postgres").unwrap();
    for (signal, code) in [(Signal::SIGTERM, 0), (Signal::SIGKILL, -9)] {
        let mut process = Process::start(&["--embedded", "--ephemeral"], &[]);
        let user = format!(r#"{{"name":"Ada","email":"{code}@left.example"}}"#);
        assert_eq!(process.client().post("/users", user).status, 201);
        let mut find = || {
            let names = "select datname::text from pg_database where datname ~ '^userd_scratch'";
            let rows = here.query(names, &[]).unwrap();
            let has_it = |name: &String| {
                let ask = "select exists (select from users where email = concat($1::text, '@left.example'))";
                let found = connect(name).and_then(|mut client| client.query_one(ask, &[&code.to_string()]));
                found.is_ok_and(|row| row.get(0))
            };
            rows.iter().map(|row| row.get::<_, String>(0)).find(has_it)
        };
        let name = find().expect("the command's database");
        // Whatever takes it long: nothing can drop the database meanwhile.
        let mut other = connect("postgres").unwrap();
        let mut holding = other.transaction().unwrap();
        holding.batch_execute(&format!("comment on database {name} is 'held'")).unwrap();
        process.signal(signal);
        assert_eq!(process.wait(LONG), code);
        assert_eq!(find(), Some(name));
        holding.rollback().unwrap();
        eventually(LONG, "the next process drops it", || {
            let mut next = Process::start(&["--embedded", "--ephemeral"], &[]);
            next.wait_for_url();
            find().is_none()
        });
    }
}

#[test]
fn a_service_begins_with_the_users_of_a_file() {
    let dir = TempDir::new();
    let file = |name: &str, text: &str| {
        dir.write(name, text);
        dir.path().join(name).display().to_string()
    };
    let lines = "{\"name\":\"Ada\",\"email\":\"ada@example.com\",\"password\":\"correct horse\"}\n\
        {\"name\":\"\",\"email\":\"no address\"}\n";
    let table = "name,email\nAda,ada@example.com\n,no address\n";
    for (seed, has_password) in [(file("users.ndjson", lines), true), (file("users.csv", table), false)] {
        // They need not be what the create schema takes.
        let arguments = ["--embedded", "--ephemeral", "--seed", &seed];
        let mut process = Process::start(&arguments, &[("SCHEMA", "strict")]);
        let mut client = process.client();
        assert_eq!(client.get("/users/1").json()["name"], "Ada");
        assert_eq!(client.get("/users/2").json()["email"], "no address");
        assert_eq!(client.get("/users").json()["total"], 2);
        let proof = r#"{"email":"ada@example.com","password":"correct horse"}"#;
        let status = client.request("POST", "/users/authenticate", &[], proof).status;
        assert_eq!(status, if has_password { 200 } else { 401 }, "{seed}");
        process.logs("the database begins with the users of ");
    }
    let kept = [
        file("kept.ndjson", "{\"id\":\"7\",\"name\":\"Ada\",\"email\":\"ada@example.com\"}\n"),
        file("kept.csv", "\u{feff}\"id\",name,email\n7,Ada,ada@example.com\n"),
    ];
    for seed in kept {
        let mut process = Process::start(&["--embedded", "--ephemeral", "--seed", &seed], &[]);
        let mut client = process.client();
        assert_eq!(client.get("/users/7").json()["name"], "Ada", "{seed}");
        let next = client.request("POST", "/users", &[], r#"{"name":"Grace","email":"grace@example.com"}"#);
        assert_eq!(next.json()["id"], "8", "{seed}");
    }
    let twice = file("twice.csv", "name,email\nAda,ada@example.com\nAda,ADA@example.com\n");
    let missing = dir.path().join("missing").display().to_string();
    for (seed, line) in [
        (&twice, "line 3: /email is that of line 2, too"),
        (&twice, "userd: 1 line is refused; nothing was imported"),
        (&missing, "userd: cannot read "),
    ] {
        let mut process = Process::start(&["--embedded", "--ephemeral", "--seed", seed], &[]);
        assert_eq!(process.wait(LONG), 1);
        assert!(process.stderr().contains(line), "{}", process.stderr());
        assert_eq!(process.stdout(), "", "it never listens");
    }
}
