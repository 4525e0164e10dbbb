//! Several userd, with other programs between them and their clients or their database: the set-ups of the
//! README's "More than one machine".

use crate::support::{
    BUSY, Caller, Daemon, Event, LONG, Load, Own, Process, TempDir, assert_no_secret, eventually, free_port,
    pause, users,
};
use nix::sys::signal::Signal;
use serde_json::json;
use std::{
    fs,
    net::TcpStream,
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

const README: &str = include_str!("../../README.md");

/// From the primary's death to the first success, when its standby is promoted at once.
const FAILOVER: Duration = Duration::from_secs(5);

/// A program that Debian has in a package of the same name.
fn program(name: &str) -> PathBuf {
    let path = Path::new("/usr/sbin").join(name);
    assert!(path.exists(), "the tests need {name}: apt-get install {name}");
    path
}

fn userd(url: &str, port: u16, variables: &[(&str, &str)]) -> Process {
    let port = port.to_string();
    let ours = [("DATABASE_URL", url), ("HOST", "127.0.0.1"), ("PORT", &port), ("LOG_LEVEL", "warn")];
    Process::start(&[], &[&ours, variables].concat())
}

fn wait_for_port(port: u16) {
    eventually(LONG, "the port is listened on", || TcpStream::connect(("127.0.0.1", port)).is_ok());
}

/// The README's block of that language, with its addresses replaced by ours.
fn readme(language: &str, ours: &[(&str, &str)]) -> String {
    let (_, block) = README
        .split_once(&format!("\n```{language}\n"))
        .unwrap_or_else(|| panic!("the README has a block of {language}"));
    let (block, _) = block.split_once("```").expect("it ends");
    let mut text = block.to_owned();
    for (theirs, ours) in ours {
        assert!(text.contains(theirs), "{theirs} is not in {block}");
        text = text.replace(theirs, ours);
    }
    text
}

fn haproxy(dir: &TempDir, replicas: &[u16]) -> (Daemon, String) {
    let port = free_port();
    let addresses = [replicas[0], replicas[1], replicas[2]].map(|port| format!("127.0.0.1:{port}"));
    let configuration = readme(
        "haproxy",
        &[
            ("bind :80", &format!("bind 127.0.0.1:{port}")),
            ("10.0.0.11:3000", &addresses[0]),
            ("10.0.0.12:3000", &addresses[1]),
            ("10.0.0.13:3000", &addresses[2]),
        ],
    );
    dir.write("haproxy.cfg", &configuration);
    let child = Command::new(program("haproxy"))
        .arg("-f")
        .arg(dir.path().join("haproxy.cfg"))
        .args(["-db", "-q"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let daemon = Daemon::new(child.expect("haproxy runs"), Signal::SIGTERM);
    wait_for_port(port);
    (daemon, format!("http://127.0.0.1:{port}"))
}

/// Three replicas behind haproxy, a primary with a synchronous standby. One replica is killed and restarted;
/// then the primary is killed and the standby promoted.
#[test]
fn replicas_behind_haproxy_and_a_standby_that_is_promoted() {
    let mut primary = Own::start();
    let standby = primary.standby();
    // Acknowledged means: to be seen on the standby.
    primary.run("alter system set synchronous_standby_names = '*'");
    primary.run("alter system set synchronous_commit = 'remote_apply'");
    primary.run("select pg_reload_conf()");
    eventually(LONG, "the standby is synchronous", || {
        let sql = "select count(*) from pg_stat_replication where sync_state = 'sync'";
        primary.client().query_one(sql, &[]).unwrap().get::<_, i64>(0) == 1
    });
    let hosts = format!("{},{}", primary.socket_dir().display(), standby.socket_dir().display());
    let url = format!("host={hosts} user=postgres dbname=postgres target_session_attrs=read-write");
    let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let mut replicas: Vec<Process> =
        ports.iter().map(|port| userd(&url, *port, &[("DB_POOL_SIZE", "4")])).collect();
    replicas.iter_mut().for_each(|replica| drop(replica.wait_for_url()));
    let dir = TempDir::new();
    let (_haproxy, base_url) = haproxy(&dir, &ports);
    let mut caller = Caller::new(&base_url, LONG);
    eventually(LONG, "haproxy knows them", || matches!(caller.call("GET", "/users", ""), Ok((200, _))));
    let load = Load::start("many", 6, &Arc::new(Mutex::new(base_url.clone())), LONG);
    load.creates(100);

    replicas[0].signal(Signal::SIGKILL);
    assert_eq!(replicas[0].wait(LONG), -9);
    let killed = Instant::now();
    pause(Duration::from_secs(1));
    replicas[0] = userd(&url, ports[0], &[("DB_POOL_SIZE", "4")]);
    replicas[0].wait_for_url();
    pause(Duration::from_millis(500));

    let start = Instant::now();
    primary.kill();
    standby.client().execute("select pg_promote(wait => false)", &[]).unwrap();
    // Each of them leaves the dead primary by itself.
    for port in &ports {
        let mut caller = Caller::new(&format!("http://127.0.0.1:{port}"), LONG);
        let body = json!({"name": "after", "email": format!("after-{port}@example.com")}).to_string();
        eventually((FAILOVER + BUSY).saturating_sub(start.elapsed()), "it serves", || {
            let last = caller.call("POST", "/users", &body).map_or(0, |(status, _)| status);
            // 409: the dying primary replicated a create whose answer was lost.
            matches!(last, 201 | 409)
        });
    }
    let promoted = start.elapsed();
    pause(Duration::from_secs(1));
    load.all_succeed_after(start + promoted);
    let books = load.stop();
    let mut found = users(&mut standby.client());
    found.retain(|email, _| !email.starts_with("after-"));
    let audit = books.audit(&found);
    let (acknowledged, open) = (audit.acknowledged, audit.open);
    let (lost, unexpected) = (audit.lost.len(), audit.unexpected.len());
    let replica = books.longest_outage(killed).as_millis();
    println!(
        "| one of three replicas behind haproxy killed | 1 | {acknowledged} | {open} | {lost} | {unexpected} | {replica} ms |"
    );
    println!(
        "| primary killed, standby promoted | 1 | {acknowledged} | {open} | {lost} | {unexpected} | {} ms |",
        promoted.as_millis()
    );
    assert_eq!((audit.lost, audit.unexpected), (vec![], vec![]));
    assert!(acknowledged > 0, "the load was no load");
    replicas.iter().for_each(|replica| assert_no_secret(&replica.stderr()));
}

/// A primary that is demoted while it lives: its sessions go on, but it takes no changes any more.
#[test]
fn a_primary_that_is_demoted() {
    let primary = Own::start();
    let standby = primary.standby();
    let hosts = format!("{},{}", primary.socket_dir().display(), standby.socket_dir().display());
    let url = format!("host={hosts} user=postgres dbname=postgres target_session_attrs=read-write");
    let mut process = userd(&url, 0, &[]);
    let mut caller = Caller::new(&process.wait_for_url(), LONG);
    let create = |n: u32| json!({"name": "n", "email": format!("{n}@example.com")}).to_string();
    assert_eq!(caller.call("POST", "/users", &create(0)).unwrap().0, 201);
    eventually(LONG, "the standby has all of it", || standby.has_replayed(&primary));
    assert_eq!(users(&mut standby.client()).len(), 1);
    standby.client().execute("select pg_promote()", &[]).unwrap();
    primary.run("alter system set default_transaction_read_only = on");
    primary.client().batch_execute("begin read write; select pg_reload_conf(); commit").unwrap();
    let demoted = || {
        let row = primary.client().query_one("show default_transaction_read_only", &[]).unwrap();
        row.get::<_, String>(0) == "on"
    };
    eventually(LONG, "it takes no changes", demoted);
    // The sessions have been told by now, or are while they are asked. No change is refused in either case.
    for n in 1..20 {
        assert_eq!(caller.call("POST", "/users", &create(n)).unwrap().0, 201, "{}", process.stderr());
    }
    eventually(LONG, "it has moved", || users(&mut standby.client()).contains_key("19@example.com"));
}

/// Two replicas with eight sessions each, and two to the database.
#[test]
fn replicas_behind_pgbouncer() {
    let postgres = Own::start();
    let dir = TempDir::new();
    // It refuses to run as root, as PostgreSQL does.
    let owner = fs::metadata(postgres.socket_dir()).unwrap();
    chown(dir.path(), Some(owner.uid()), Some(owner.gid())).unwrap();
    postgres.run("alter role postgres set statement_timeout = '10s'");
    postgres.run("alter role postgres set lock_timeout = '10s'");
    let port = free_port();
    let socket = postgres.socket_dir();
    let database = format!("host={} user=postgres dbname=postgres", socket.display());
    let configuration = readme(
        "ini",
        &[
            ("host=10.0.0.21 dbname=app", &database),
            ("listen_port = 6432", &format!("listen_port = {port}")),
            ("default_pool_size = 20", "default_pool_size = 2"),
            // Every account that may enter the directory of the cluster's socket is trusted.
            ("auth_type = scram-sha-256\nauth_file = /etc/pgbouncer/userlist.txt", "auth_type = any"),
        ],
    );
    dir.write("pgbouncer.ini", &configuration);
    let start = || {
        let child = Command::new(program("pgbouncer"))
            .arg(dir.path().join("pgbouncer.ini"))
            .uid(owner.uid())
            .gid(owner.gid())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let daemon = Daemon::new(child.expect("pgbouncer runs"), Signal::SIGINT);
        wait_for_port(port);
        daemon
    };
    let pgbouncer = start();
    let url = format!("postgres://userd@127.0.0.1:{port}/app?sslmode=disable");
    let mut replicas = [0, 0].map(|port| userd(&url, port, &[("DB_PREPARED", "false")]));
    let urls = replicas.each_mut().map(Process::wait_for_url);
    // Every kind of statement.
    let mut caller = Caller::new(&urls[0], LONG);
    let ada = r#"{"name":"Ada","email":"ada@example.com","password":"correct horse"}"#;
    let credentials = r#"{"email":"ada@example.com","password":"correct horse"}"#;
    for (method, target, body, status) in [
        ("POST", "/users", ada, 201),
        ("GET", "/users/1", "", 200),
        ("GET", "/users?page=1", "", 200),
        ("POST", "/users/authenticate", credentials, 200),
        ("PUT", "/users/1", r#"{"password":null}"#, 200),
        ("POST", "/users/authenticate", credentials, 401),
        ("PUT", "/users/1", r#"{"name":"Lovelace","password":"battery staple"}"#, 200),
        ("POST", "/users/authenticate", credentials, 401),
        ("POST", "/users/authenticate", r#"{"email":"ada@example.com","password":"battery staple"}"#, 200),
        ("POST", "/users", ada, 409),
        ("DELETE", "/users/1", "", 204),
        ("GET", "/users/1", "", 404),
    ] {
        let answer = caller.call(method, target, body).unwrap();
        assert_eq!(answer.0, status, "{method} {target}: {answer:?}: {}", replicas[0].stderr());
    }
    let loads = urls.each_ref().map(|url| {
        let name = url.rsplit(':').next().unwrap();
        Load::start(name, 12, &Arc::new(Mutex::new(url.clone())), LONG)
    });
    for load in &loads {
        load.creates(100);
    }
    let fault = Instant::now();
    drop(pgbouncer);
    let _pgbouncer = start();
    let back = Instant::now();
    pause(Duration::from_secs(2));
    let found = postgres.users();
    for load in loads {
        load.all_succeed_after(back);
        let books = load.stop();
        let failed = |event: &&Event| !event.succeeded() && event.sent + event.took < fault;
        assert_eq!(books.events.iter().flatten().find(failed).map(|event| event.status), None);
        let found = postgres.users().into_iter().filter(|(email, _)| books.possible.contains_key(email));
        let audit = books.audit(&found.collect());
        let (acknowledged, open) = (audit.acknowledged, audit.open);
        let (lost, unexpected) = (audit.lost.len(), audit.unexpected.len());
        let outage = books.longest_outage(back).as_millis();
        println!(
            "| PgBouncer restarted | 1 | {acknowledged} | {open} | {lost} | {unexpected} | {outage} ms |"
        );
        assert_eq!((audit.lost, audit.unexpected), (vec![], vec![]));
        assert!(acknowledged > 0, "the load was no load");
    }
    assert!(!found.is_empty());
    replicas.iter().for_each(|replica| assert_no_secret(&replica.stderr()));
}
