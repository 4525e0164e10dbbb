//! `userd test`, as people and harnesses in other languages use it, and a socket that a supervisor passes.

use crate::support::{
    ADA, ADA_1, Client, Database, LONG, PASSWORD, Process, TempDir, Tested, USERD, by_default, check,
    control, eventually, is_root, running,
};
use nix::{
    libc,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpListener,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
        unix::{fs::PermissionsExt, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use userd::testing::TestServer;

/// Starts `userd test -- sh -c SCRIPT`.
fn start(arguments: &[&str], script: &str) -> Process {
    Process::start(&[&["test"], arguments, &["--", "sh", "-c", script]].concat(), &[])
}

/// Waits for a word on standard output.
fn says(process: &Process, word: &str) {
    eventually(LONG, word, || process.stdout().contains(word));
}

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

#[test]
fn the_exit_code_is_that_of_the_command() {
    let dir = TempDir::new();
    dir.write("program", "");
    for (command, code, line) in [
        (&["true"][..], 0, ""),
        (&["sh", "-c", "exit 3"], 3, ""),
        (&["sh", "-c", "exit 255"], 255, ""),
        (&["sh", "-c", "kill -KILL $$"], 137, ""),
        (&["sh", "-c", "kill -TERM $$"], 143, ""),
        // Its arguments are its own: an empty one, options, the address of a database.
        (
            &[
                "sh",
                "-c",
                r#"[ "$1,$2,$3" = ",--help,postgres://a:b@c/d" ]"#,
                "sh",
                "",
                "--help",
                "postgres://a:b@c/d",
            ],
            0,
            "",
        ),
        (&["no-such-program"], 127, "cannot execute no-such-program"),
        (&[&format!("{}/program", dir.name())], 126, "cannot execute"),
        (&["/"], 126, "cannot execute /"),
    ] {
        let (ended, stdout, stderr) = Process::start(&[&["test", "--"], command].concat(), &[]).ended();
        assert_eq!((ended, stdout.as_str()), (code, ""), "{command:?}: {stderr}");
        assert!(stderr.lines().count() <= 1 && stderr.contains(line), "{command:?}: {stderr}");
        assert_eq!(line.is_empty(), stderr.is_empty(), "{command:?}: {stderr}");
    }
    // The log, which a failure of a service would be told in, is kept for the command.
    let (code, _, stderr) =
        Process::start(&["test", "--set=LOG_FORMAT=json", "--", "no-such-program"], &[]).ended();
    assert_eq!((code, stderr.contains("cannot execute")), (127, true), "{stderr}");
    let usage: [&[&str]; 6] = [
        &["--bogus"],
        &["--port=x", "--", "true"],
        &["--set=SCHEMA", "--", "true"],
        &["--set=WORKERS=0", "--", "true"],
        &["--control=0123456789abcdef", "--", "true"],
        &["--until-signal", "--control=short"],
    ];
    for arguments in usage {
        let (ended, stdout, stderr) = Process::start(&[&["test"], arguments].concat(), &[]).ended();
        let lines = stderr.lines().count();
        assert_eq!((ended, stdout.as_str(), lines), (125, "", 1), "{arguments:?}: {stderr}");
    }
}

/// The service reads no variable, and the command has all of them.
#[test]
fn the_environment_is_that_of_the_command() {
    let variables = [
        ("DATABASE_URL", "postgres://ada@127.0.0.1:1/app"),
        ("NODE_ENV", "production"),
        ("PORT", "1"),
        ("HOST", "x86_64-conda-linux-gnu"),
        ("SCHEMA", "strict"),
        ("API_TOKEN", "theirs"),
        ("LOG_FORMAT", "json"),
        ("USERD_URL", "an outer one"),
    ];
    let script = "env; curl -sS --fail-with-body $USERD_URL/users -d '{\"name\":\"Ada\",\"email\":\"ada@example.com\"}'; exit 1";
    let mut process = Process::start(&["test", "--", "/bin/sh", "-c", script], &variables);
    let (code, stdout, stderr) = process.ended();
    for (name, value) in &variables[..7] {
        assert!(stdout.lines().any(|line| line == format!("{name}={value}")), "{name}: {stdout}");
    }
    assert!(stdout.lines().last().unwrap().starts_with(r#"{"id":"1","name":"Ada""#), "{stdout}");
    let own: Vec<&str> = stdout.lines().filter(|line| line.starts_with("USERD_")).collect();
    assert_eq!(own.len(), 3, "{own:?}");
    assert!(own.iter().any(|line| line.starts_with("USERD_URL=http://127.0.0.1:")), "{own:?}");
    // The last requests of a test that fails, and no line of the log, as none is a warning.
    assert_eq!(code, 1);
    assert!(stderr.starts_with("userd: last requests:\n{") && stderr.lines().count() == 2, "{stderr}");
}

#[test]
fn a_failure_is_explained() {
    let script = |code| {
        format!(
            "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do curl -sS $USERD_URL/users/$n -H 'Authorization: Bearer t0ken' >&2; done
             curl -sS $USERD_CONTROL/faults >&2; exit {code}"
        )
    };
    let (code, stdout, stderr) = start(&["--set", "LOG_LEVEL=info"], &script(7)).ended();
    assert_eq!((code, stdout.as_str()), (7, ""), "{stderr}");
    let explained = stderr.split_once("userd: last requests:\n").expect("it is explained").1;
    let (requests, log) = explained.split_once("userd: last lines of the log:\n").expect("so is the log");
    assert_eq!(requests.lines().count(), 10, "{requests}");
    assert!(
        requests.starts_with('{') && requests.contains("\"/users/12\"") && !requests.contains("\"/users/2\"")
    );
    assert!(log.lines().last().unwrap().contains("GET /users/12 404"), "{log}");
    assert!(!stderr.contains("t0ken") && !log.contains("faults"), "{stderr}");
    let (code, stdout, stderr) = start(&["--set", "LOG_LEVEL=info"], &script(0)).ended();
    assert!(code == 0 && stdout.is_empty() && !stderr.contains("userd:"), "{stderr}");
}

/// Each signal that a process has sent is passed on, each time; and the command alone decides when it ends.
#[test]
fn signals_are_passed_on() {
    for (signal, name) in [(Signal::SIGINT, "INT"), (Signal::SIGTERM, "TERM"), (Signal::SIGHUP, "HUP")] {
        let script = format!(
            "n=0; trap 'n=$((n + 1)); echo signal $n; [ $n = 3 ] && exit 5' {name}; echo begun; while :; do sleep 0.01; done"
        );
        let mut process = start(&[], &script);
        says(&process, "begun");
        for n in 1..=3 {
            process.signal(signal);
            says(&process, &format!("signal {n}\n"));
        }
        assert_eq!(process.wait(LONG), 5, "{name}: {}", process.stderr());
        assert_eq!(process.stdout().matches("signal").count(), 3, "{name}");
    }
    // A shell without job control starts its background jobs with SIGINT ignored.
    let script = r#"trap '' INT; exec "$0" test -- sh -c 'trap "exit 4" TERM; kill -INT $PPID $$; echo $$; while :; do sleep 0.01; done'"#;
    let mut process = Process::under(&["/bin/sh", "-c", script, USERD], &[], &[]);
    says(&process, "\n");
    process.signal(Signal::SIGINT);
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 4);
}

#[test]
fn nothing_is_left_by_one_that_is_killed() {
    let script = "trap 'echo ended; exit' TERM; echo $$ $USERD_URL ready; while :; do sleep 0.01; done";
    let mut process = start(&[], script);
    says(&process, "ready");
    let stdout = process.stdout();
    let (command, rest) = stdout.split_once(' ').unwrap();
    let url = rest.split_once(' ').unwrap().0;
    let address = url.strip_prefix("http://").unwrap();
    process.signal(Signal::SIGKILL);
    assert_eq!(process.wait(LONG), -9);
    assert!(process.stdout().ends_with("ended\n"), "{}", process.stdout());
    eventually(LONG, "the command has ended", || !running(command.parse().unwrap()));
    assert!(std::net::TcpStream::connect(address).is_err(), "it still listens");

    // A command that is killed, and that has left a process which holds standard output.
    let mut process = start(&[], "sleep 1000 & echo $! $$; wait");
    says(&process, "\n");
    let pids = process.stdout();
    let (rest, command) = pids.trim().split_once(' ').unwrap();
    kill(Pid::from_raw(command.parse().unwrap()), Signal::SIGKILL).unwrap();
    let killed = Instant::now();
    eventually(LONG, "it ends", || !running(process.id()));
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    kill(Pid::from_raw(rest.parse().unwrap()), Signal::SIGKILL).unwrap();
    assert_eq!(process.wait(LONG), 137);
}

/// Opens a terminal. Returns its two ends.
fn terminal() -> (File, OwnedFd) {
    let (mut master, mut slave) = (0, 0);
    let none = std::ptr::null_mut();
    // SAFETY: both descriptors are new, and have no other owner.
    unsafe {
        assert_eq!(libc::openpty(&mut master, &mut slave, none, none.cast(), none.cast()), 0);
        (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave))
    }
}

/// Runs `userd test -- COMMAND` in a terminal, and types Ctrl-C after each of these texts. Returns the exit code, and all that
/// was written.
fn interrupted(command: &[&str], after: &[&str]) -> (Option<i32>, String) {
    let (mut master, slave) = terminal();
    let mut userd = Command::new(USERD);
    by_default(&mut userd).args(["test", "--"]).args(command);
    let end = || Stdio::from(slave.try_clone().unwrap());
    userd.stdin(end()).stdout(end()).stderr(end());
    let lead = || {
        nix::unistd::setsid()?;
        // SAFETY: standard input is a terminal.
        if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } == 0 {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error())
        }
    };
    // SAFETY: the closure makes system calls alone.
    let mut child = unsafe { userd.pre_exec(lead) }.spawn().unwrap();
    drop((userd, slave));
    let (mut text, mut buffer) = (String::new(), [0; 1024]);
    for word in after {
        while !text.contains(word) {
            let length = master.read(&mut buffer).expect(word);
            text += &String::from_utf8_lossy(&buffer[..length]);
        }
        master.write_all(b"\x03").unwrap();
    }
    // The end of a terminal is an error.
    while let Ok(length @ 1..) = master.read(&mut buffer) {
        text += &String::from_utf8_lossy(&buffer[..length]);
    }
    (child.wait().unwrap().code(), text)
}

/// The terminal signals the whole group: the command gets Ctrl-C once, and may go on.
#[test]
fn control_c_in_a_terminal() {
    const COUNT: &str = "n=0; trap 'n=$((n + 1)); echo signal $n; [ $n = 2 ] && exit 6' INT; echo begun; \
                         while :; do sleep 0.01; done";
    // A command may leave the group, as some that start others do.
    for program in [&["sh"][..], &["perl", "-e", "setpgrp; exec @ARGV", "sh"]] {
        let (code, text) = interrupted(&[program, &["-c", COUNT]].concat(), &["begun", "signal 1"]);
        assert_eq!((code, text.matches("signal").count()), (Some(6), 2), "{program:?}: {text}");
    }
}

/// A harness starts it without a command. It ends with standard input, with its parent, and by a signal.
#[test]
fn without_a_command_it_serves_a_harness() {
    let mut userd = Tested::start(&["--set", "SCHEMA=strict"]);
    assert_eq!(userd.lines.len(), 3, "{:?}", userd.lines);
    let url = userd.value("USERD_URL").to_owned();
    assert!(userd.value("USERD_CONTROL").starts_with(&format!("{url}/")), "{:?}", userd.lines);
    let mut client = postgres::Client::connect(userd.value("USERD_DATABASE_URL"), postgres::NoTls).unwrap();
    client.batch_execute("insert into users (name, email) values ('Ada', 'ada@example.com')").unwrap();
    drop(client);
    check(&mut userd.client(), &format!("GET /users/1 => 200 {ADA_1}\nPOST /users {ADA} => 400 *"));
    userd.process.write(b"ignored\n").unwrap();
    assert_eq!(userd.client().get("/users/1").status, 200);
    userd.process.end_input();
    assert_eq!(userd.process.wait(LONG), 0, "{}", userd.process.stderr());
    let mut userd = Tested::start(&[]);
    userd.process.signal(Signal::SIGTERM);
    assert_eq!(userd.process.wait(LONG), 0, "{}", userd.process.stderr());

    // Its parent ends, and another process keeps the pipe open.
    let script = r#""$0" test <&3 3<&- & echo pid $!; wait"#;
    let outer = format!("exec 3<&0; {script}");
    let mut process = Process::fed(Stdio::piped(), &["/bin/sh", "-c", &outer, USERD], &[], &[]);
    says(&process, "\n\n");
    let stdout = process.stdout();
    let pid: u32 = stdout.strip_prefix("pid ").unwrap().lines().next().unwrap().parse().unwrap();
    assert!(running(pid));
    process.signal(Signal::SIGKILL);
    eventually(LONG, "it ends with its parent", || !running(pid));
    process.end_input();

    // A background job of a shell has /dev/null as its standard input, which has ended.
    let (code, stdout, stderr) = Process::start(&["test"], &[]).ended();
    assert_eq!((code, stdout.as_str(), stderr.lines().count()), (125, "", 1), "{stderr}");
}

/// In a container nothing is left to read, the path is known, and the database cannot be reached.
#[test]
fn until_a_signal() {
    let arguments = ["test", "--until-signal", "--host", "0.0.0.0", "--control", "0123456789-abc.DEF_~"];
    let mut process = Process::start(&arguments, &[]);
    says(&process, "\n\n");
    let lines = process.stdout();
    let lines: Vec<&str> = lines.trim().lines().collect();
    let [url, controls] = lines[..] else { panic!("{lines:?}") };
    let url = url.strip_prefix("USERD_URL=").unwrap();
    let controls = controls.strip_prefix("USERD_CONTROL=").unwrap();
    assert_eq!(controls, format!("{url}/0123456789-abc.DEF_~"));
    // The client names the machine, as another one would.
    let named = controls.replace("127.0.0.1", "127.0.0.9");
    let another = control(&named, "POST /services", "").json();
    assert!(another["url"].as_str().unwrap().starts_with("http://127.0.0.9:"), "{another}");
    assert!(
        another["control"].as_str().unwrap().starts_with(named.strip_suffix("0123456789-abc.DEF_~").unwrap()),
        "{another}"
    );
    assert_eq!(Client::new(another["url"].as_str().unwrap()).get("/users").status, 200);
    process.signal(Signal::SIGTERM);
    assert_eq!(process.wait(LONG), 0, "{}", process.stderr());
    let mut here = Process::start(&["test", "--until-signal"], &[]);
    says(&here, "USERD_DATABASE_URL=");
    here.signal(Signal::SIGINT);
    assert_eq!(here.wait(LONG), 0, "{}", here.stderr());
}

/// Each test has a service of its own.
#[test]
fn services_beside_the_first() {
    let userd = Tested::start(&["--set", "MAX_CONNECTIONS=2"]);
    let order = r#"{"settings":{"SCHEMA":"strict","MAX_CONNECTIONS":1,"UI":false},
        "users":[{"id":7,"name":"Ada","email":"ada@example.com","password":"correct horse"}]}"#;
    let (url, controls) = userd.another(order);
    let (other, other_controls) = userd.another("{}");
    let mut client = Client::new(&url);
    assert!(client.opens("ada@example.com", PASSWORD));
    assert_eq!(client.post("/users", ADA).status, 400, "strict");
    assert_eq!(client.get("/ui").status, 404);
    assert_eq!(client.delete("/users/7").status, 204);
    // The only connection of this service is in use, and it is controlled all the same.
    assert_eq!(
        control(&controls, "GET /requests?method=DELETE", "").json()["requests"][0]["target"],
        "/users/7"
    );
    assert_eq!(control(&controls, "POST /reset", "").status, 204);
    check(&mut client, "GET /users/7 => 200 {\"id\":\"7\",*");
    check(
        &mut Client::new(&other),
        &format!("GET /users => 200 {{\"data\":[],*\nPOST /users {ADA} => 201 {ADA_1}"),
    );
    check(&mut userd.client(), "GET /users => 200 {\"data\":[],*");
    let about = control(&other_controls, "GET ", "").json();
    assert_eq!((&about["url"], &about["control"]), (&other.as_str().into(), &other_controls.as_str().into()));
    let database = about["databaseUrl"].as_str().unwrap();
    assert!(postgres::Client::connect(database, postgres::NoTls).is_ok());
    assert_eq!(control(&other_controls, "DELETE ", "").status, 204);
    assert!(postgres::Client::connect(database, postgres::NoTls).is_err(), "the database is left");
    assert!(
        std::net::TcpStream::connect(other.strip_prefix("http://").unwrap()).is_err(),
        "it still listens"
    );
    for request in ["GET ", "DELETE ", "POST /reset"] {
        assert_eq!(control(&other_controls, request, "").status, 404);
    }
    // The number is not given to another one.
    assert_ne!(userd.another("").1, other_controls);
    let port = url.rsplit_once(':').unwrap().1;
    let taken = userd.control("POST /services", &format!(r#"{{"settings":{{"PORT":{port}}}}}"#));
    assert_eq!(taken.status, 400, "{taken:?}");
}

/// The log and the journal have no control, and a token is not asked for.
#[test]
fn controls_are_no_requests_to_the_service() {
    let userd =
        Tested::start(&["--set=LOG_LEVEL=debug", "--set=API_TOKEN=t0ken", "--set=ALLOWED_HOSTS=example.org"]);
    let path = userd.value("USERD_CONTROL").rsplit_once('/').unwrap().1;
    assert!(path.len() >= 32, "{path}");
    assert_eq!(userd.control("POST /reset", "").status, 204);
    assert_eq!(userd.client().get("/users").status, 401);
    let wrong =
        userd.client().get(&format!("/{}/reset", path.to_uppercase().replace(char::is_alphabetic, "0")));
    assert_eq!(wrong.status, 404);
    let journal = userd.control("GET /requests", "").json();
    assert_eq!(journal["requests"].as_array().unwrap().len(), 2, "{journal}");
    userd.process.logs("GET /users 401");
    assert!(!userd.process.stderr().contains(path), "{}", userd.process.stderr());
}

/// A control whose time is up has changed nothing.
#[test]
fn what_has_timed_out_is_undone() {
    let userd = Tested::start(&["--set", "REQUEST_TIMEOUT=2"]);
    let mut client = userd.client();
    assert_eq!(client.post("/users", ADA).status, 201);
    let mut session = postgres::Client::connect(userd.value("USERD_DATABASE_URL"), postgres::NoTls).unwrap();
    let mut lock = session.transaction().unwrap();
    lock.batch_execute("select from users for update").unwrap();
    let (_, other) = userd.another("{}");
    for request in ["POST /reset", "PUT /states/locked"] {
        thread::scope(|scope| {
            let waits = scope.spawn(|| userd.control(request, "").status);
            // The lock is of one database: another service is controlled meanwhile.
            assert_eq!(control(&other, "POST /reset", "").status, 204);
            let status = waits.join().unwrap();
            assert_eq!(status, if request == "POST /reset" { 409 } else { 204 }, "{request}");
        });
    }
    lock.rollback().unwrap();
    check(&mut client, &format!("GET /users/1 => 200 {ADA_1}"));

    // A service is started in more time than that.
    let userd = Tested::start(&["--set", "REQUEST_TIMEOUT=0.005"]);
    let mut session = postgres::Client::connect(userd.value("USERD_DATABASE_URL"), postgres::NoTls).unwrap();
    let mut count = || {
        let own = "select count(*) from pg_database where datname ~ regexp_replace(current_database(), '_[0-9]+$', '_')";
        session.query_one(own, &[]).unwrap().get::<_, i64>(0)
    };
    assert_eq!(userd.control("POST /services", "").status, 503);
    eventually(LONG, "its database is dropped", || count() == 1);
}

/// Root reads a seed of its own and stays root, so that it can signal the command; PostgreSQL runs as its account.
#[test]
fn root_stays_root() {
    if !is_root() {
        return;
    }
    let dir = TempDir::new();
    dir.write("users.ndjson", ADA);
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
    let script = "id -u; grep ^Uid /proc/$PPID/status | cut -f 2; curl -sS $USERD_URL/users/1";
    let (code, stdout, stderr) = start(&[&format!("--seed={}/users.ndjson", dir.name())], script).ended();
    assert_eq!(code, 0, "{stderr}");
    assert!(stdout.starts_with("0\n0\n{\"id\":\"1\","), "{stdout}");
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
        let mut userd = Tested::start(&[]);
        let user = format!(r#"{{"name":"Ada","email":"{code}@left.example"}}"#);
        assert_eq!(userd.client().post("/users", user).status, 201);
        let ask = format!("select exists (select from users where email = '{code}@left.example')");
        let mut is_there = || {
            let names = "select datname::text from pg_database where datname ~ '^userd_scratch'";
            let mut names = here.query(names, &[]).unwrap().into_iter().map(|row| row.get::<_, String>(0));
            let has_it = |mut client: postgres::Client| client.query_one(&ask, &[]);
            names.any(|name| connect(&name).and_then(has_it).is_ok_and(|row| row.get(0)))
        };
        eventually(LONG, "it has the user", &mut is_there);
        userd.process.signal(signal);
        assert_eq!(userd.process.wait(LONG), code);
        eventually(LONG, "the next process drops it", || {
            Tested::start(&[]);
            !is_there()
        });
    }
}
