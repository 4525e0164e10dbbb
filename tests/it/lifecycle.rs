//! The command: its arguments and variables, how it starts, what it logs, how it ends.

use crate::support::{
    ADA, ADA_1, Client, DATABASE_PASSWORD, Database, LONG, LONG_ON_DISK, PASSWORD, Process, Proxy, TOKEN,
    TempDir, USERD, Variables, Weather, assert_no_secret, check, children, eventually, free_port, postmaster,
    running,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use std::{
    env::{self, consts},
    fs,
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
    process::{Command, Stdio},
    time::{Duration, Instant},
};
use userd::internals::SETTINGS;

/// Bound for a reaction without a wait, on a busy machine.
const SOON: Duration = Duration::from_secs(10);

/// The line that says why it ended: the last one. What comes before it is the log's.
#[track_caller]
fn complaint(process: &mut Process, expected: i32) -> String {
    let status = process.wait(LONG);
    let (stdout, stderr) = (process.stdout(), process.stderr());
    assert_eq!((status, stdout.as_str()), (expected, ""), "{stderr}");
    assert_no_secret(&stderr);
    let (last, before) = {
        let mut lines: Vec<&str> = stderr.lines().collect();
        (lines.pop().unwrap_or_default(), lines)
    };
    let last = last.strip_prefix("userd: ").unwrap_or_else(|| panic!("no last line: {stderr}"));
    for line in before {
        assert!(line.contains("[INFO]") || line.contains("[WARN]"), "one line says why: {stderr}");
    }
    last.to_owned()
}

// Arguments and variables

/// Returns what is printed, whatever the variables are.
fn printed(arguments: &[&str]) -> String {
    let mut process = Process::start(arguments, &[("PORT", "abc")]);
    assert_eq!((process.wait(LONG), process.stderr().as_str()), (0, ""), "{arguments:?}");
    process.stdout()
}

#[test]
fn help_and_version() {
    let help = printed(&["--help"]);
    assert!(help.contains("Usage: userd [OPTIONS]"), "{help}");
    for setting in SETTINGS {
        let name = setting.variable;
        let found = help.lines().find(|line| line.split_whitespace().next() == Some(name));
        let line = found.unwrap_or_else(|| panic!("{name} is not in {help}"));
        assert!(
            line.contains(&setting.default().unwrap_or_default()) && line.ends_with(setting.help),
            "{line}"
        );
    }
    let import = printed(&["import", "--help"]);
    assert!(import.contains("Usage: userd import [OPTIONS] [FILE]"), "{import}");
    assert!(import.contains("  --skip-existing ") && !import.contains("DB_HOST"), "{import}");
    assert_eq!((printed(&["help"]), printed(&["help", "import"])), (help, import));
    let commit = option_env!("USERD_COMMIT").map(|commit| format!("{commit}, ")).unwrap_or_default();
    let (version, machine) = (env!("CARGO_PKG_VERSION"), format!("{}-{}", consts::ARCH, consts::OS));
    assert_eq!(printed(&["--version"]), format!("userd {version} ({commit}{machine})\n"));
    let database = Database::create();
    let figures = Process::on(&database, &[]).client().get("/metrics").body;
    let build = format!(
        "{{version=\"{version}\",commit=\"{}\",machine=\"{machine}\"}} 1",
        commit.trim_end_matches(", ")
    );
    assert!(figures.contains(&format!("\nuserd_build_info{build}\n")), "{figures}");
}

// Start-up

#[test]
fn a_database_that_stays_away_or_never_answers() {
    // Connections are taken, by the system, and nothing is ever said.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for port in [free_port(), silent.local_addr().unwrap().port()] {
        let url = format!("postgres://ada:{DATABASE_PASSWORD}@127.0.0.1:{port}/app");
        let start = Instant::now();
        let mut process = Process::start(&[], &[("DATABASE_URL", &url), ("DB_CONNECT_TIMEOUT", "3")]);
        let line = complaint(&mut process, 1);
        // Half a second before the end at most, the pause between two tries.
        assert!(start.elapsed() > Duration::from_millis(2500), "{:?}", start.elapsed());
        assert!(line.starts_with("cannot connect to the database: "), "{line}");
        let lines = process.stderr().matches("cannot connect to the database yet: ").count();
        assert!(lines <= 6, "a line a try: {}", process.stderr());
        assert!(line.contains("DATABASE_URL") && line.contains("--embedded"), "the remedy: {line}");
        let tried = format!("tried database \"app\" as user \"ada\" on 127.0.0.1:{port}");
        let mut check = Process::start(&["check"], &[("DATABASE_URL", &url), ("DB_CONNECT_TIMEOUT", "1")]);
        assert_eq!(check.wait(LONG), 1);
        assert!(line.contains(&tried) && check.stdout().contains(&tried), "{line} {}", check.stdout());
    }
}

#[test]
fn a_database_that_comes_later() {
    let database = Database::create();
    let proxy = Proxy::start(&database.socket());
    proxy.shut();
    let port = proxy.port().to_string();
    let parts = [("DB_HOST", "127.0.0.1"), ("DB_PORT", &port), ("DB_NAME", database.name())];
    let [mut process, mut ended] = [(); 2].map(|()| {
        let process = Process::start(&[], &[&parts[..], &[("HOST", "127.0.0.1")]].concat());
        process.logs("cannot connect to the database yet");
        assert_eq!(process.stdout(), "");
        process
    });
    // A signal before there is work.
    ended.signal(Signal::SIGTERM);
    assert_eq!(ended.wait(SOON), 128 + 15);
    proxy.set(Weather::Fair);
    check(&mut process.client(), &format!("POST /users {ADA} => 201 {ADA_1}"));
    // Waiting does not mend a name that is wrong.
    let wrong = ("DB_USER", "nobody-at-all");
    let mut process = Process::start(&[], &[&parts[..], &[wrong, ("DB_CONNECT_TIMEOUT", "600")]].concat());
    let line = complaint(&mut process, 1);
    assert!(line.contains("\"nobody-at-all\" does not exist"), "{line}");
    assert!(!process.stderr().contains("yet"), "{}", process.stderr());
}

/// Without the right to raise its limits, which root has.
fn limited(limit: &str) -> Vec<&str> {
    let root = ["/usr/bin/setpriv", "--bounding-set=-sys_resource"];
    let is_root = nix::unistd::geteuid().is_root();
    let program = ["/usr/bin/prlimit", limit, USERD];
    [if is_root { &root[..] } else { &[] }, &program].concat()
}

#[test]
fn a_system_that_allows_too_little() {
    let database = Database::create();
    let url = database.url();
    let variables = [("DATABASE_URL", url.as_str()), ("HOST", "127.0.0.1")];
    let limit = |count: u64| format!("--nofile={count}:{count}");
    let line = complaint(&mut Process::under(&limited(&limit(32)), &[], &variables), 1);
    let expected = "cannot start: the limit of 32 open descriptors (ulimit -n) is too low: at least ";
    let least = line.strip_prefix(expected).and_then(|rest| rest.split(' ').next()?.parse().ok());
    let least = least.unwrap_or_else(|| panic!("{line}"));
    // With as many it starts, and does what it does.
    let mut process = Process::under(&limited(&limit(least)), &[], &variables);
    let mut client = process.client();
    let body = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD});
    check(&mut client, &format!("POST /users {body} => 201 {ADA_1}\nGET /users/1 => 200 {ADA_1}"));
    assert_eq!(client.get("/readyz").status, 200);
    assert!(!process.stderr().contains("panicked"), "{}", process.stderr());
    let mut check = Process::under(&limited(&limit(32)), &["check"], &variables);
    assert_eq!(check.wait(LONG), 1);
    assert!(check.stdout().contains("the limit of 32 open descriptors"), "{}", check.stdout());
    // The limit of threads is for no more of root's: another user, who has no other process.
    if nix::unistd::geteuid().is_root() {
        let user = ["/usr/bin/setpriv", "--reuid=1999", "--regid=1999", "--clear-groups"];
        let program = [&user[..], &["/usr/bin/prlimit", "--nproc=4", USERD]].concat();
        let line = complaint(
            &mut Process::under(&program, &[], &[&variables[..], &[("TMPDIR", "/tmp")]].concat()),
            1,
        );
        assert!(line.contains("no thread can be started") && line.contains("ulimit -u, now "), "{line}");
    }
}

/// The variables of a start, and what it warns of, as a check does: one line.
#[test]
fn variables_that_are_not_used_are_told() {
    let database = Database::create();
    let (url, dir) = (database.url(), database.socket_dir());
    let parts = [("DB_HOST", dir.as_str()), ("DB_NAME", database.name())];
    let by_url = [("DATABASE_URL", url.as_str())];
    let ssl = |text| {
        format!(
            "DB_SSL={text:?} has no effect: TLS to the database is on with the exact text `true`, and beside \
             DATABASE_URL as its sslmode says"
        )
    };
    let pooled = format!(" {url} pgbouncer=true\n");
    let rows: [(Variables, Variables, &str); 5] = [
        (&parts, &[("DB_SSL", "yes"), ("PGPASSWORD", "none is asked for")], &ssl("yes")),
        (&by_url, &[("PGPASSWORD", "none is asked for"), ("API_TOKEN", TOKEN), ("MAIL_HOST", "x")], ""),
        (&by_url, &[("DB_SSL", "true"), ("DB_SSL_CA", "/ca.pem")], &ssl("true")),
        // Kubernetes sets such a port beside a service that is named `db`. It is not judged.
        (&by_url, &[("DB_PORT", "tcp://10.0.0.1:5432"), ("DB_PASS_FILE", "/none")], ""),
        (&[("DATABASE_URL", pooled.as_str())], &[], "DATABASE_URL: pgbouncer has no effect"),
    ];
    for (database, variables, expected) in rows {
        let variables = [&[("HOST", "127.0.0.1")], database, variables].concat();
        let mut process = Process::start(&[], &variables);
        process.wait_for_url();
        let log = process.stderr();
        let warned: Vec<&str> =
            log.lines().filter_map(|line| line.split_once(" [WARN] ")).map(|(_, line)| line).collect();
        let told: Vec<&str> = (!expected.is_empty()).then_some(expected).into_iter().collect();
        assert_eq!(warned, told, "{variables:?}: {log}");
        let mut check = Process::start(&["check"], &variables);
        check.wait(LONG);
        let said = check.stdout();
        let notes: Vec<_> =
            said.lines().filter_map(|line| line.strip_prefix("note     configuration: ")).collect();
        assert_eq!(notes, told, "{variables:?}: {said}");
    }
}

// Migrations

fn history(database: &Database) -> String {
    database.value(
        "select coalesce(string_agg(version::text, ',' order by version), '') from refinery_schema_history",
    )
}

#[test]
fn a_failing_migration_leaves_nothing_half_applied() {
    let database = Database::empty();
    let dir = TempDir::new();
    let second = "create table second (n int);";
    dir.write("V1__first.sql", "create table first (n int);");
    dir.write("V2__second.sql", &format!("{second} insert into second values (1); select * from missing;"));
    dir.write("V3__third.sql", "create table third (n int);");
    let start = || Process::on(&database, &[("MIGRATIONS_DIR", dir.name())]);
    let line = complaint(&mut start(), 1);
    assert!(line.starts_with("cannot migrate the database: "), "{line}");
    assert!(line.contains(r#"relation "missing" does not exist"#), "{line}");
    // The history has exactly the migrations that were applied.
    let made = database
        .value("select string_agg(relname, ' ') from pg_class where relname ~ '^(first|second|third)$'");
    assert!(["null", "first"].contains(&made.as_str()), "{made}");
    assert_eq!(history(&database), if made == "first" { "1" } else { "" });
    // Once it is mended, all are applied.
    dir.write("V2__second.sql", second);
    start().wait_for_url();
    assert_eq!(history(&database), "1,2,3");
    // A history that diverges is left alone.
    dir.write("V1__first.sql", "create table first (n bigint);");
    assert!(complaint(&mut start(), 1).starts_with("cannot migrate the database: "));
}

#[test]
fn replicas_that_start_together() {
    let database = Database::empty();
    let mut replicas: Vec<Process> = (0..8).map(|_| Process::on(&database, &[])).collect();
    for (n, replica) in replicas.iter_mut().enumerate() {
        let body = json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
        assert_eq!(replica.client().post("/users", body).status, 201);
    }
    let applied = history(&database).split(',').count();
    let logged = || -> usize {
        replicas.iter().map(|replica| replica.stderr().matches("applied migration").count()).sum()
    };
    eventually(LONG, "each is logged", || logged() >= applied);
    assert_eq!(logged(), applied, "each is applied once");
}

// The log

#[test]
fn log_levels() {
    let database = Database::create();
    for (level, requests_logged, errors_logged) in
        [("info", 1, 1), ("warn", 0, 1), ("error", 0, 1), ("off", 0, 0)]
    {
        let mut process = Process::on(&database, &[("LOG_LEVEL", level)]);
        let mut client = process.client();
        assert_eq!(client.get("/users").status, 200);
        database.run("alter table users rename to lost");
        let status = client.get("/users/1").status;
        database.run("alter table lost rename to users");
        assert_eq!(status, 500);
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0);
        let log = process.stderr();
        assert_eq!(log.matches("GET /users 200").count(), requests_logged, "{level}: {log}");
        assert_eq!(log.matches("[ERROR]").count(), errors_logged, "{level}: {log}");
        assert!(level != "off" || log.is_empty(), "{log}");
    }
}

// The end

/// A signal is repeated within a second: `timeout` and npm pass on what the terminal has sent already.
#[test]
fn a_signal_lets_work_be_finished() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        with_a_request_in_flight(&[], |process, mut client, lock| {
            let _idle = process.client();
            let url = process.wait_for_url();
            process.signal(signal);
            process.signal(Signal::SIGINT);
            process.logs("stopping");
            // The line is logged before the stop has begun.
            let address = url.strip_prefix("http://").unwrap();
            eventually(LONG, "no client is accepted", || TcpStream::connect(address).is_err());
            drop(lock);
            let answer = client.answer("GET");
            assert_eq!((answer.status, answer.header("Connection")), (200, Some("close")), "{signal}");
            assert_eq!(answer.id(), "1");
            assert_eq!(process.wait(SOON), 0, "{signal}");
            assert_eq!(process.left_behind(), Vec::<String>::new(), "{signal}");
        });
    }
}

/// `nohup` has every process of the tests ignore SIGHUP. This is a test of this binary again.
#[test]
fn the_tests_run_under_nohup() {
    let mut again = Command::new("/usr/bin/nohup");
    again.arg(env::current_exe().unwrap()).args(["--exact", "lifecycle::a_signal_lets_work_be_finished"]);
    let output = again.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A parent may leave signals ignored or blocked to the command. It starts its PostgreSQL and ends all the same.
#[test]
fn signals_that_a_parent_ignores_or_blocks() {
    let dir = TempDir::new();
    let argument = format!("--embedded={}/data", dir.name());
    let rows =
        ["--ignore-signal=CHLD", "--block-signal=TERM,INT,CHLD", "--ignore-signal=TERM,INT,QUIT,PIPE,USR1"];
    for (n, row) in rows.into_iter().enumerate() {
        let mut process =
            Process::under(&["/usr/bin/env", row, USERD], &[&argument], &[("HOST", "127.0.0.1")]);
        let url = process.wait_for_url_within(LONG_ON_DISK);
        let create = format!(r#"POST /users {{"name":"Ada","email":"{n}@example.com"}} => 201 *"#);
        check(&mut Client::new(&url), &create);
        assert_eq!(Client::new(&url).get("/users").json()["total"], n + 1, "{row}");
        let server = postmaster(&dir.path().join("data")).unwrap();
        process.signal(Signal::SIGTERM);
        assert_eq!(process.wait(LONG), 0, "{row}: {}", process.stderr());
        assert!(!running(server), "{row}: PostgreSQL is left behind");
    }
}

/// A request that met a lock is retried, and is answered before the end. `nohup` lets the process run when the terminal
/// is closed.
#[test]
fn a_signal_lets_what_met_a_lock_be_retried() {
    let database = Database::create();
    let variables = [("DATABASE_URL", &*database.url()), ("HOST", "127.0.0.1")];
    let mut process = Process::under(&["/usr/bin/nohup", USERD], &[], &variables);
    let mut client = process.client();
    process.signal(Signal::SIGHUP);
    check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}"));
    let lock = database.transaction("select from users where id = 1 for update");
    client.send_request("PUT", "/users/1", &[], r#"{"name": "Augusta"}"#);
    database.waits_for_a_lock();
    process.signal(Signal::SIGTERM);
    process.logs("stopping");
    database.waits_for_no_lock();
    drop(lock);
    let answer = client.answer("PUT");
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(database.value("select name from users where id = 1"), "Augusta");
    assert_eq!(process.wait(SOON), 0);
}

/// A request in flight that waits for a lock, which ends with the transaction.
fn with_a_request_in_flight(variables: Variables, test: impl FnOnce(&mut Process, Client, postgres::Client)) {
    let database = Database::create();
    let mut process = Process::on(&database, variables);
    let mut client = process.client();
    check(&mut client, &format!("POST /users {ADA} => 201 {ADA_1}"));
    let lock = database.transaction("lock table users");
    client.send_request("GET", "/users/1", &[], "");
    database.waits_for_a_lock();
    test(&mut process, client, lock);
}

/// Neither the request nor the delay of a stop is waited for.
#[test]
fn a_signal_a_second_later_ends_at_once() {
    with_a_request_in_flight(&[("DRAIN_DELAY", "600")], |process, _client, _lock| {
        let first = Instant::now();
        process.signal(Signal::SIGTERM);
        eventually(LONG, "it ends", || {
            process.signal(Signal::SIGTERM);
            !running(process.id())
        });
        assert_eq!(process.wait(SOON), 128 + 15);
        assert!(first.elapsed() >= Duration::from_secs(1), "{:?}", first.elapsed());
    });
}

// A database of its own

/// A unit of `Type=notify` gets a datagram when the service serves, and one when it stops. PostgreSQL, which would send
/// its own, does not see the socket.
#[test]
fn an_embedded_database() {
    let dir = TempDir::new();
    // PostgreSQL's account has to get to it.
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let (data, path) = (dir.path().join("data"), dir.path().join("notify"));
    let socket = UnixDatagram::bind(&path).unwrap();
    // Anybody may write to systemd's.
    fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
    socket.set_read_timeout(Some(LONG_ON_DISK)).unwrap();
    let told = || {
        let mut state = [0; 64];
        let length = socket.recv(&mut state).unwrap();
        String::from_utf8(state[..length].to_vec()).unwrap()
    };
    let argument = format!("--embedded={}", data.display());
    // The variables of another database mean nothing then.
    let variables = [("PORT", "0"), ("DB_HOST", "192.0.2.1"), ("NOTIFY_SOCKET", path.to_str().unwrap())];
    let start = || Process::start(&[&argument], &variables);
    let create = json!({"name": "Ada", "email": "ada@example.com", "password": PASSWORD}).to_string();
    let credentials = json!({"email": "ada@example.com", "password": PASSWORD}).to_string();

    let mut first = start();
    assert_eq!(told(), "READY=1");
    let url = first.wait_for_url();
    assert!(url.starts_with("http://127.0.0.1:"), "not beyond this machine: {url}");
    assert_eq!(first.stdout(), format!("listening on {url}\n"));
    check(&mut first.client(), &format!("POST /users {create} => 201 {ADA_1}"));
    let server = postmaster(&data).unwrap();
    let environment = fs::read(format!("/proc/{server}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("NOTIFY_SOCKET"));
    let line = complaint(&mut start(), 1);
    assert!(line.contains(data.to_str().unwrap()) && line.contains("in use"), "{line}");
    check(&mut first.client(), &format!("GET /users/1 => 200 {ADA_1}"));
    first.signal(Signal::SIGTERM);
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(first.wait(LONG), 0, "{}", first.stderr());
    assert!(!running(server), "PostgreSQL is left behind");

    let mut second = start();
    check(&mut second.client(), &format!("POST /users/authenticate {credentials} => 200 {ADA_1}"));
    // If the server is killed, the service says so and ends, and leaves nothing running.
    let server = postmaster(&data).unwrap();
    let processes = children(server);
    kill(Pid::from_raw(server.cast_signed()), Signal::SIGKILL).unwrap();
    assert_eq!(second.wait(LONG), 1);
    let log = second.stderr();
    let last = log.lines().last().unwrap_or_default();
    assert!(last.starts_with("userd: PostgreSQL (process ") && last.contains("has ended"), "{log}");
    eventually(LONG, "nothing is left running", || !processes.iter().any(|process| running(*process)));

    let mut third = start();
    third.wait_for_url_within(LONG_ON_DISK);
    check(&mut third.client(), &format!("GET /users/1 => 200 {ADA_1}"));
    let left_behind = postmaster(&data).unwrap();
    third.signal(Signal::SIGKILL);
    assert_eq!(third.wait(LONG), -9);

    let mut fourth = start();
    fourth.wait_for_url_within(LONG_ON_DISK);
    check(&mut fourth.client(), &format!("GET /users/1 => 200 {ADA_1}"));
    let server = postmaster(&data).unwrap();
    // The terminal is closed.
    fourth.signal(Signal::SIGHUP);
    assert_eq!(fourth.wait(LONG), 0, "{}", fourth.stderr());
    assert!(!running(server) && !running(left_behind), "PostgreSQL is left behind");
}

/// A start warns if other machines can connect and need no token.
#[test]
fn who_can_connect() {
    let database = Database::create();
    let dir = TempDir::new();
    dir.write("token", &format!("{TOKEN}\n"));
    let file = dir.path().join("token").display().to_string();
    let socket = format!("unix:{}/userd.sock", dir.path().display());
    for (host, token, warnings) in [
        ("127.0.0.1", ("API_TOKEN", ""), 0),
        ("127.0.0.1", ("API_TOKEN", TOKEN), 0),
        ("0.0.0.0", ("API_TOKEN", ""), 1),
        ("0.0.0.0", ("API_TOKEN_FILE", &file), 0),
        (&socket, ("API_TOKEN", ""), 0),
    ] {
        let mut process = Process::on(&database, &[("HOST", host), token]);
        let url = process.wait_for_url().replace("0.0.0.0", "127.0.0.1");
        let status = if token.1.is_empty() { 200 } else { 401 };
        check(
            &mut Client::new(&url),
            &format!("GET /users => {status} *\nGET /users <Authorization: Bearer {TOKEN}> => 200 *"),
        );
        let line = "[WARN] other machines can connect, and no token is needed: set API_TOKEN";
        assert_eq!(process.stderr().matches(line).count(), warnings, "{host}: {}", process.stderr());
    }
}
