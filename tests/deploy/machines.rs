//! Several userd, with other programs between them and their clients or their database: the set-ups of
//! docs/clustering.md, with the files of `examples/deploy` and the lines of its page. Only addresses are replaced.

use crate::{
    listening::Listening,
    program, serve,
    support::{
        Account, BUSY, Client, Daemon, Database, Event, LONG, Load, Own, Process, Proxy, Service, TempDir,
        Weather, assert_no_secret, blocks, eventually, every_verb, free_port, loopback_network, pause, shell,
        users,
    },
};
use nix::sys::signal::Signal;
use serde_json::json;
use socket2::{Domain, Socket, Type};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

const DEPLOY: &str = include_str!("../../examples/deploy/README.md");
const HAPROXY: &str = include_str!("../../examples/deploy/haproxy.cfg");
const PGBOUNCER: &str = include_str!("../../examples/deploy/pgbouncer.ini");
const USERLIST: &str = include_str!("../../examples/deploy/userlist.txt");

/// From the primary's death to the first success, when its standby is promoted at once.
const FAILOVER: Duration = Duration::from_secs(5);

fn userd(url: &str, port: u16, variables: &[(&str, &str)]) -> Process {
    let port = port.to_string();
    let ours = [("PORT", &*port), ("LOG_LEVEL", "warn"), ("ALLOWED_HOSTS", "users.example")];
    Process::at(url, &[&ours, variables].concat())
}

fn wait_for_port(port: u16) {
    eventually(LONG, "the port is listened on", || TcpStream::connect(("127.0.0.1", port)).is_ok());
}

/// An example with its addresses replaced by ours.
fn with_ours(example: &str, ours: &[(&str, &str)]) -> String {
    let mut text = example.to_owned();
    for (theirs, ours) in ours {
        assert!(text.contains(theirs), "{theirs} is not in {example}");
        text = text.replace(theirs, ours);
    }
    text
}

/// The shell lines that follow `title` there, by the comments above them.
fn chapter(title: &str) -> Vec<(&'static str, &'static str)> {
    let (_, text) = DEPLOY.split_once(title).unwrap_or_else(|| panic!("the page has {title}"));
    let (_, block) = text.split_once("\n```sh\n").expect("it has a block of shell lines");
    let (block, _) = block.split_once("```").expect("it ends");
    let parts = block.strip_prefix("# ").expect("it says where first").split("\n# ");
    parts.map(|part| part.split_once('\n').expect("a comment, then lines")).collect()
}

/// Beginnings of the addresses in the examples, each with the one that replaces it.
fn network() -> [(&'static str, String); 2] {
    [("10.0.0.0/24", "127.0.0.0/8".to_owned()), ("10.0.0.", loopback_network())]
}

/// haproxy before these three, the directory of its configuration, and its URL.
fn haproxy(replicas: &[u16]) -> (Daemon, TempDir, String) {
    let (dir, port) = (TempDir::new(), free_port());
    let addresses = [replicas[0], replicas[1], replicas[2]].map(|port| format!("127.0.0.1:{port}"));
    let configuration = with_ours(
        HAPROXY,
        &[
            ("bind :80", &format!("bind 127.0.0.1:{port}")),
            ("10.0.0.11:3000", &addresses[0]),
            ("10.0.0.12:3000", &addresses[1]),
            ("10.0.0.13:3000", &addresses[2]),
        ],
    );
    dir.write("haproxy.cfg", &configuration);
    let mut command = Command::new(program("haproxy", "haproxy"));
    command.arg("-f").arg(dir.path().join("haproxy.cfg")).args(["-db", "-q"]);
    let daemon = serve(&mut command, Signal::SIGTERM);
    wait_for_port(port);
    (daemon, dir, format!("http://127.0.0.1:{port}"))
}

/// A replica that is well by its checks, and answers `answer` to anything else, or closes the connection where that is
/// empty. Its port, and the methods of the requests.
fn replica_that_answers(answer: &'static str) -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let methods = Arc::new(Mutex::new(Vec::new()));
    let seen = methods.clone();
    let serve = move |stream: TcpStream| {
        let mut reader = BufReader::new(stream);
        let mut lines = reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
        let Some(line) = lines.next() else {
            return;
        };
        // All of the head, so that the end of the connection is no reset.
        lines.for_each(drop);
        let method = line.split(' ').next().unwrap_or_default().to_owned();
        let answer = match &*method {
            _ if line.contains(" /readyz ") => "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            _ => {
                seen.lock().unwrap().push(method);
                answer
            }
        };
        let _ = reader.get_mut().write_all(answer.as_bytes());
    };
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let serve = serve.clone();
            thread::spawn(move || serve(stream));
        }
    });
    (port, methods)
}

/// One of three replicas ends while it answers, and another one answers 503.
#[test]
fn a_read_is_repeated_by_haproxy_and_a_change_is_not() {
    const EACH: usize = 30;
    const UNAVAILABLE: &str =
        "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";
    let service = Service::start();
    let (ending, of_ending) = replica_that_answers("");
    let (unwell, of_unwell) = replica_that_answers(UNAVAILABLE);
    let port = service.server.addr().expect("a TCP address").port();
    let (_haproxy, _dir, base_url) = haproxy(&[ending, unwell, port]);
    let count = |method: &str| {
        let count =
            |seen: &Mutex<Vec<String>>| seen.lock().unwrap().iter().filter(|seen| *seen == method).count();
        (count(&of_ending), count(&of_unwell))
    };
    let mut caller = Client::new(&base_url);
    for _ in 0..EACH {
        assert_eq!(caller.call("GET", "/users", "").expect("an answer").0, 200);
    }
    let (ended, refused) = count("GET");
    assert!(ended > 0 && refused > 0, "both were asked: {ended}, {refused}");

    let mut created = 0;
    for n in 0..EACH {
        let body = json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
        // Without an answer of the service's, or with 503 for one, the connection starts anew.
        let mut caller = Client::new(&base_url);
        created += usize::from(caller.call("POST", "/users", &body).is_ok_and(|(status, _)| status == 201));
    }
    let (ended, refused) = count("POST");
    assert!(ended > 0 && refused > 0, "both were asked: {ended}, {refused}");
    assert_eq!(created + ended + refused, EACH, "{created} created, {ended} not answered, {refused} refused");
    assert_eq!(service.database.value("select count(*) from users"), created.to_string());
}

/// Neither field of a client's own hides its address from a userd behind haproxy.
#[test]
fn a_client_behind_haproxy_cannot_hide() {
    let database = Database::create();
    let trusted = [("TRUSTED_PROXIES", "127.0.0.1"), ("LOG_LEVEL", "info"), ("LOG_FORMAT", "json")];
    let port = free_port();
    let mut replica = userd(&database.url(), port, &trusted);
    replica.wait_for_url();
    let (_haproxy, _dir, base_url) = haproxy(&[port, port, port]);
    let haproxy: SocketAddr = base_url.strip_prefix("http://").unwrap().parse().unwrap();
    for (n, field) in
        ["", "Forwarded: for=198.51.100.9\r\n", "X-Forwarded-For: 198.51.100.9\r\n"].iter().enumerate()
    {
        let request =
            format!("GET /users/{n} HTTP/1.1\r\nHost: localhost\r\n{field}Connection: close\r\n\r\n");
        let line = format!(r#""path":"/users/{n}""#);
        let logged = || {
            // From an address of its own. haproxy may not have found the replica yet.
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).unwrap();
            socket.connect(&haproxy.into()).unwrap();
            (&socket).write_all(request.as_bytes()).unwrap();
            (&socket).read_to_end(&mut Vec::new()).unwrap();
            replica.stderr().contains(&line)
        };
        eventually(LONG, "the request is logged", logged);
        let log = replica.stderr();
        let mut lines = log.lines().filter(|text| text.contains(&line));
        assert!(lines.all(|text| text.contains(r#""client":"127.0.0.2""#)), "{log}");
    }
}

/// The page's lines, each where they say: passwords are asked for on every way.
#[test]
fn a_standby_that_asks_for_passwords() {
    let network = network();
    let address = |last: &str| format!("{}{last}", network[1].1);
    let primary = Listening::start(&address("21"));
    let second = Account::new();
    let data = second.dir().join("standby");
    let _stopped = Stopped(&second);
    let mut process = None;
    let mut url = String::new();
    let create = |url: &str, n: u32| {
        let body = json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
        let answer = Client::new(url).call("POST", "/users", &body);
        answer.is_ok_and(|(status, _)| matches!(status, 201 | 409))
    };
    let mut places = Vec::new();
    for (place, lines) in chapter("\n## A primary and a standby\n") {
        let lines =
            network.iter().fold(lines.to_owned(), |lines, (theirs, ours)| lines.replace(theirs, ours));
        places.push(place);
        match place {
            "on the primary" => primary.shell(&lines),
            "on the standby's machine" => {
                // Beside another server on one machine.
                let (directory, start) = ("/var/lib/postgresql/standby", "standby start");
                let options = format!("-c listen_addresses={} -k {}", address("22"), second.dir().display());
                let start_here = format!("{start} -w -l log -o '{options}'");
                second
                    .shell(&with_ours(&lines, &[(start, &start_here), (directory, data.to_str().unwrap())]));
            }
            "on the primary, once the standby runs" => {
                primary.shell(&lines);
                let sql = "select count(*) from pg_stat_replication where sync_state = 'sync'";
                let is_synchronous =
                    || primary.client("postgres").query_one(sql, &[]).unwrap().get::<_, i64>(0) == 1;
                eventually(LONG, "the standby is synchronous", is_synchronous);
            }
            "wherever userd runs" => {
                let line =
                    lines.trim().strip_prefix("DATABASE_URL='").and_then(|line| line.strip_suffix("' userd"));
                let mut started = userd(line.expect("a line that starts userd"), 0, &[]);
                url = started.wait_for_url();
                assert!(create(&url, 0), "{}", started.stderr());
                process = Some(started);
            }
            "on the standby, when the primary has died" => {
                primary.shell("pg_ctl -D data -m immediate stop");
                second.shell(&lines);
            }
            place => panic!("the test does not know {place:?}"),
        }
    }
    assert_eq!(places.len(), 5, "{places:?}");
    eventually(FAILOVER + BUSY, "it serves from the standby", || create(&url, 1));
    let count = Client::new(&url).call("GET", "/users", "").expect("an answer").1;
    assert_eq!(count["total"], 2, "the first user was there when it was acknowledged");
    drop(process);
}

/// The standby in an account's directory, stopped when dropped.
struct Stopped<'a>(&'a Account);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.0.dir().join("standby/postmaster.pid").exists() {
            self.0.shell("pg_ctl -D standby -m immediate stop || true");
        }
    }
}

/// Two replicas with eight sessions each, and two to the database.
#[test]
fn replicas_behind_pgbouncer() {
    let program = program("pgbouncer", "pgbouncer");
    let network = network();
    let address = format!("{}21", network[1].1);
    let postgres = Listening::start(&address);
    postgres.shell(
        "psql -c \"create role app login password 'change-me'\" -c 'create database app owner app'
         echo 'host app app 127.0.0.0/8 scram-sha-256' >> data/pg_hba.conf
         psql -c 'select pg_reload_conf()'",
    );
    let lines = chapter("\n## PgBouncer in transaction mode\n");
    let line = |end: &str| {
        let mut lines = lines.iter().flat_map(|(_, lines)| lines.lines());
        lines.find(|line| line.contains(end)).unwrap_or_else(|| panic!("a line with {end}"))
    };
    let settings =
        lines.iter().flat_map(|(_, lines)| lines.lines()).filter(|line| line.starts_with("psql -c"));
    assert_eq!(settings.inspect(|line| postgres.shell(line)).count(), 4);
    let account = Account::new();
    let port = free_port().to_string();
    let userlist = account.write("userlist.txt", USERLIST);
    let configuration = with_ours(
        PGBOUNCER,
        &[
            ("10.0.0.21", &address),
            ("listen_port = 6432", &format!("listen_port = {port}")),
            ("default_pool_size = 20", "default_pool_size = 2"),
            ("/etc/pgbouncer/userlist.txt", userlist.to_str().unwrap()),
            ("user = postgres", &format!("user = {}", account.name)),
        ],
    );
    let configuration = account.write("pgbouncer.ini", &configuration);
    let start = || {
        let mut command = Command::new(&program);
        let daemon = serve(command.arg(&configuration).current_dir("/"), Signal::SIGINT);
        wait_for_port(port.parse().unwrap());
        daemon
    };
    let pgbouncer = start();
    let url = line(" userd").strip_prefix("DB_PREPARED=false DATABASE_URL='");
    let url = url.and_then(|line| line.strip_suffix("' userd")).expect("a line that starts userd");
    let url = with_ours(url, &[("6432", &port)]);
    let wrong = with_ours(&url, &[("change-me", "changed")]);
    let mut refused = userd(&wrong, 0, &[("DB_PREPARED", "false"), ("DB_CONNECT_TIMEOUT", "1")]);
    assert_eq!(refused.wait(LONG), 1, "{}", refused.stderr());
    let mut replicas = [0, 0].map(|port| userd(&url, port, &[("DB_PREPARED", "false")]));
    replicas[0].wait_for_url();
    let variables = [("DATABASE_URL", &*url), ("DB_PREPARED", "false")];
    let (code, found, _) = Process::start(&["check"], &variables).ended();
    assert_eq!(code, 0, "{found}");
    let urls = replicas.each_mut().map(Process::wait_for_url);
    every_verb(&urls[0], "pooled");
    let loads = urls.each_ref().map(|url| {
        let name = url.rsplit(':').next().unwrap();
        Load::start(name, 12, url)
    });
    for load in &loads {
        load.creates(100);
    }
    let fault = Instant::now();
    drop(pgbouncer);
    let _pgbouncer = start();
    let back = Instant::now();
    pause(Duration::from_secs(2));
    let stored = || users(&mut postgres.client("app"));
    for load in loads {
        load.all_succeed_after(back);
        let books = load.stop();
        let failed = |event: &&Event| !event.succeeded() && event.sent + event.took < fault;
        assert_eq!(books.events.iter().flatten().find(failed).map(|event| event.status), None);
        println!(
            "PgBouncer restarted: {}, back after {:?}",
            books.check(&stored()),
            books.longest_outage(back)
        );
    }
    replicas.iter().for_each(|replica| assert_no_secret(&replica.stderr()));
}

/// Two replicas are replaced one after the other, under load.
#[test]
fn a_rolling_restart_loses_no_request() {
    let database = Database::create();
    // Ten of haproxy's checks, on a busy machine, too.
    let start = |port: u16| {
        let mut replica = userd(&database.url(), port, &[("DB_POOL_SIZE", "4"), ("DRAIN_DELAY", "2")]);
        replica.wait_for_url();
        replica
    };
    let gets_requests = |port: u16| {
        let mut client = Client::new(&format!("http://127.0.0.1:{port}"));
        let created = r#"userd_http_requests_total{method="POST",route="/users",status="201"}"#;
        eventually(LONG, "haproxy has found it", || client.get("/metrics").body.contains(created));
    };
    let ports = [free_port(), free_port()];
    let mut replicas = ports.map(start);
    let (_haproxy, _dir, base_url) = haproxy(&[ports[0], ports[1], free_port()]);
    let mut caller = Client::new(&base_url);
    eventually(LONG, "haproxy knows them", || matches!(caller.call("GET", "/users", ""), Ok((200, _))));
    let load = Load::start("rolling", 8, &base_url);
    ports.iter().for_each(|port| gets_requests(*port));
    for (replica, port) in replicas.iter_mut().zip(ports) {
        replica.signal(Signal::SIGTERM);
        assert_eq!(replica.wait(LONG), 0, "{}", replica.stderr());
        *replica = start(port);
        gets_requests(port);
    }
    let books = load.stop();
    let failed: Vec<_> = books.events.iter().flatten().filter(|event| !event.succeeded()).collect();
    assert!(failed.is_empty(), "{} requests were lost: {:?}", failed.len(), failed[0]);
    println!("rolling restart of two replicas: {}", books.check(&users(&mut database.client())));
}

/// Where no replica is ready, clients get the answers of userd all the same.
#[test]
fn haproxy_forwards_while_no_replica_is_ready() {
    let database = Database::create();
    let proxy = Proxy::start(&database.socket());
    let url = database.url_at(proxy.port());
    let ports = [free_port(), free_port(), free_port()];
    let mut replicas =
        ports.map(|port| userd(&url, port, &[("DB_POOL_SIZE", "2"), ("DB_ACQUIRE_TIMEOUT", "0.3")]));
    replicas.iter_mut().for_each(|replica| drop(replica.wait_for_url()));
    let (_haproxy, _dir, base_url) = haproxy(&ports);
    let mut caller = Client::new(&base_url);
    eventually(LONG, "haproxy knows them", || matches!(caller.call("GET", "/users", ""), Ok((200, _))));
    proxy.shut();
    let unready = |port: &u16| Client::new(&format!("http://127.0.0.1:{port}")).get("/readyz").status == 503;
    eventually(LONG, "no replica is ready", || ports.iter().all(unready));
    // Longer than haproxy needs to learn it, from the first answer to the last.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(1) {
        // haproxy closes the connection after a 503.
        let mut caller = Client::new(&base_url);
        let answer = caller.call("GET", "/users", "").expect("an answer of userd's");
        assert_eq!(answer, (503, json!({"error": "Service unavailable"})));
    }
    // With an id: it is userd's own.
    assert_eq!(Client::new(&base_url).get("/users").status, 503);
    proxy.set(Weather::Fair);
    let mut caller = Client::new(&base_url);
    eventually(LONG, "it is back", || matches!(caller.call("GET", "/users", ""), Ok((200, _))));
    eventually(LONG, "every replica is ready", || !ports.iter().any(unready));
}

/// One role owns the tables, another one runs the service and cannot change them.
#[test]
fn two_roles() {
    let (server, dir) = (Own::start(), TempDir::new());
    let socket_dir = server.socket_dir().display().to_string();
    let lines = blocks(DEPLOY, "\n## Two roles\n")[0];
    let lines = lines.replace("@10.0.0.21/app", &format!("@/app?host={socket_dir}"));
    let lines = lines.replace("10.0.0.21", &socket_dir);
    let (lines, last) = lines.trim_end().rsplit_once('\n').expect("several lines");
    let variables = [("PGHOST", socket_dir), ("PGUSER", "postgres".to_owned())];
    let (code, _, stderr) = shell(dir.path(), lines, &variables);
    assert_eq!(code, 0, "{stderr}");
    // The line for an upgrade does no harm when there is nothing to migrate.
    let upgrade = lines.split_once('\n').expect("several lines").1;
    let (code, _, stderr) = shell(dir.path(), upgrade, &variables);
    assert_eq!(code, 0, "{stderr}");

    let url = last.strip_prefix("DATABASE_URL='").and_then(|rest| rest.strip_suffix("' userd --migrate=off"));
    let url = url.expect("the last line starts userd");
    let variables = [("DATABASE_URL", url), ("HOST", "127.0.0.1"), ("PORT", "0")];
    let mut process = Process::start(&["--migrate=off"], &variables);
    let mut client = process.client();
    let created = client.post("/users", json!({"name": "Ada", "email": "ada@example.com"}).to_string());
    assert_eq!(created.status, 201, "{created:?}");
    let path = format!("/users/{}", created.id());
    assert_eq!(client.put(&path, r#"{"name":"Ada King"}"#).status, 200);
    assert_eq!(client.get(&path).json()["name"], "Ada King");
    assert_eq!(client.delete(&path).status, 204);
    assert_eq!(client.get(&path).status, 404);
    let mut app = postgres::Client::connect(url, postgres::NoTls).expect("a session of the role");
    let refused = app.batch_execute("alter table users add column more text").expect_err("it owns no table");
    assert_eq!(refused.code(), Some(&postgres::error::SqlState::INSUFFICIENT_PRIVILEGE), "{refused}");
}
