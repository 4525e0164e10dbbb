//! Three machines on this one, by the files and the script of `examples/deploy/cluster`: etcd, PostgreSQL under Patroni
//! with synchronous replication, PgBouncer, haproxy and userd. The primary is killed and cut off
//! from etcd, while clients create, change, read and delete users, on both ways to the database: its three addresses in
//! `DATABASE_URL`, and haproxy with PgBouncer.

use crate::{
    program,
    support::{
        Account, BUSY, Daemon, LONG, LONG_ON_DISK, Load, Process, Proxy, TempDir, USERD, Weather, eventually,
        loopback_network, pause, running, users,
    },
};
use nix::sys::signal::Signal;
use postgres::{Client, NoTls};
use serde_json::json;
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/deploy/cluster/cluster");

/// A new primary, and an old one that follows it: Patroni's `ttl`, some of its rounds, and a busy machine.
const FAILOVER: Duration = Duration::from_secs(90);

/// How soon userd is back after its database.
const BACK: Duration = Duration::from_secs(1);

/// The three machines.
struct Machines {
    /// Ended before the directory goes.
    _script: Daemon,
    account: Account,
    addresses: [String; 3],
    /// Between each Patroni and its etcd.
    proxies: [Proxy; 3],
    password: String,
}

impl Machines {
    fn start() -> Machines {
        let account = Account::new();
        let network = loopback_network();
        let addresses = [1, 2, 3].map(|n| format!("{network}{n}"));
        let dir = account.dir().join("cluster");
        let [first, second, third] = &addresses;
        script(&["files", dir.to_str().expect("a plain path"), first, second, third, "here"]);
        let proxies = [0, 1, 2].map(|node| {
            for file in fs::read_dir(dir.join(format!("node{}", node + 1))).expect("it is there").flatten() {
                let text = fs::read_to_string(file.path()).expect("a file");
                let is_filled_in =
                    !["@N", "@S", "@E", "@P", "@F", "@B", "@A", "@R"].iter().any(|at| text.contains(at));
                assert!(is_filled_in, "{file:?}: {text}");
            }
            let proxy = Proxy::before(format!("{}:2379", addresses[node]));
            let path = dir.join(format!("node{}/patroni.yml", node + 1));
            let text = fs::read_to_string(&path).expect("the script has written it");
            let theirs = format!("hosts: {first}:2379,{second}:2379,{third}:2379");
            assert!(text.contains(&theirs), "{text}");
            let ours = format!("hosts: 127.0.0.1:{}\n  use_proxies: true", proxy.port());
            fs::write(&path, text.replace(&theirs, &ours)).expect("a file");
            proxy
        });
        let sql = fs::read_to_string(dir.join("node1/bootstrap.sql")).expect("the script has written it");
        let password = sql.split('\'').nth(1).expect("a password in quotes").to_owned();
        let mut script = Command::new("bash")
            .args([SCRIPT, "try"])
            .arg(&dir)
            .env("USERD", USERD)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("bash");
        let output = BufReader::new(script.stdout.take().expect("it is piped"));
        let script = Daemon::new(script, Signal::SIGTERM);
        // With a last line that names the directory.
        let lines: Vec<String> = output.lines().map_while(Result::ok).take(4).collect();
        let listening = addresses.iter().map(|address| format!("listening on http://{address}:8080"));
        assert_eq!(lines[..3], listening.collect::<Vec<_>>());
        Machines { _script: script, account, addresses, proxies, password }
    }

    fn dir(&self) -> PathBuf {
        self.account.dir().join("cluster")
    }

    fn node(&self, node: usize) -> PathBuf {
        self.dir().join(format!("node{}", node + 1))
    }

    fn client(&self, node: usize) -> Result<Client, postgres::Error> {
        let (address, password) = (&self.addresses[node], &self.password);
        let url = format!("host={address} user=app dbname=app password={password} connect_timeout=2");
        Client::connect(&url, NoTls)
    }

    /// Waits until one is the primary, and both others follow it, one of them synchronously.
    fn wait_until_whole(&self) -> usize {
        let sql = "select not pg_is_in_recovery(), count(*), count(*) filter (where sync_state in ('sync', 'quorum')) \
                   from pg_stat_replication where state = 'streaming'";
        let is_whole = |node: &usize| {
            let row = self.administrator(*node).and_then(|mut client| client.query_one(sql, &[]));
            row.is_ok_and(|row| row.get(0) && row.get::<_, i64>(1) == 2 && row.get::<_, i64>(2) >= 1)
        };
        let mut primary = None;
        eventually(FAILOVER, "a primary and two standbys", || {
            primary = (0..3).find(is_whole);
            pause(Duration::from_millis(200));
            primary.is_some()
        });
        primary.expect("waited for")
    }

    /// A session with all rights.
    fn administrator(&self, node: usize) -> Result<Client, postgres::Error> {
        let text =
            fs::read_to_string(self.node(node).join("patroni.yml")).expect("the script has written it");
        let (_, rest) = text.split_once("{username: postgres, password: '").expect("its password");
        let (password, _) = rest.split_once('\'').expect("a closing quote");
        let address = &self.addresses[node];
        Client::connect(&format!("host={address} user=postgres dbname=app password={password}"), NoTls)
    }

    /// The processes that the script has started.
    fn started(&self) -> Vec<u32> {
        let files = (0..3).flat_map(|node| fs::read_dir(self.node(node)).expect("a directory").flatten());
        let ids =
            files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "pid"));
        ids.map(|path| fs::read_to_string(path).unwrap().trim().parse().unwrap()).collect()
    }

    /// Runs the script with a verb for a node and returns its output.
    fn script(&self, verb: &str, node: &str) -> String {
        let dir = self.dir();
        script(&[verb, node, dir.to_str().expect("a plain path")])
    }

    /// Asks each PostgreSQL but `old` directly, until one of them has stored a change.
    fn wait_for_another(&self, old: usize) {
        let is_stored = |node: usize| {
            let mut client = self.client(node).ok()?;
            client.execute("insert into probe default values", &[]).ok()
        };
        eventually(FAILOVER, "another primary", || {
            (0..3).any(|node| node != old && is_stored(node).is_some())
        });
    }
}

fn script(arguments: &[&str]) -> String {
    let output =
        Command::new("bash").arg(SCRIPT).args(arguments).stdin(Stdio::null()).output().expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Creates users, each under its `Idempotency-Key` until it is acknowledged. Returns the addresses.
fn create(name: &str, url: &str, stop: &AtomicBool) -> Vec<String> {
    let (mut acknowledged, mut client) = (Vec::new(), crate::support::Client::new(url));
    for turn in 0.. {
        let (key, email) = (format!("{name}-{turn}"), format!("{name}-{turn}@example.com"));
        let body = json!({"name": name, "email": email}).to_string();
        loop {
            if stop.load(Ordering::SeqCst) {
                return acknowledged;
            }
            let answer = client.try_request("POST", "/users", &[("Idempotency-Key", &key)], &body);
            match answer.map(|answer| answer.status) {
                Ok(201) => break acknowledged.push(email),
                // The user may have been created or not.
                Err(_) | Ok(500 | 503) => pause(Duration::from_millis(20)),
                Ok(status) => panic!("POST {email}: {status}"),
            }
        }
        pause(Duration::from_millis(10));
    }
    acknowledged
}

/// A way to the database, and the clients of a userd that goes it.
struct Way {
    name: &'static str,
    /// Creates, changes, reads and deletes.
    load: Load,
    stop: Arc<AtomicBool>,
    /// Clients that create with keys.
    keyed: Vec<JoinHandle<Vec<String>>>,
}

impl Way {
    fn start(name: &'static str, url: &str) -> Way {
        let stop = Arc::new(AtomicBool::new(false));
        let keyed = (0..3).map(|number| {
            let (stop, url, name) = (stop.clone(), url.to_owned(), format!("keyed-{name}-{number}"));
            thread::spawn(move || create(&name, &url, &stop))
        });
        let keyed = keyed.collect();
        Way { name, load: Load::start(name, 3, url), stop, keyed }
    }

    /// Ends the clients, and compares what they have seen with what is stored: no acknowledged change is lost, and each
    /// client was served soon after each of these moments, at which PostgreSQL took changes again.
    fn check(self, client: &mut Client, backs: &[Instant]) {
        self.stop.store(true, Ordering::SeqCst);
        let keyed: Vec<_> = self.keyed.into_iter().map(|keyed| keyed.join().expect("a client")).collect();
        let books = self.load.stop();
        // Only now is every answer there.
        let stored = users(client);
        let outage = backs.iter().map(|back| books.longest_outage(*back)).max().expect("faults");
        println!("{}: {}, back after {outage:?}", self.name, books.check(&stored));
        assert!(outage < BACK + BUSY, "{}: {outage:?}", self.name);
        for acknowledged in keyed {
            assert!(!acknowledged.is_empty(), "{}", self.name);
            let lost: Vec<_> = acknowledged.iter().filter(|email| !stored.contains_key(*email)).collect();
            assert!(lost.is_empty(), "{}: {lost:?}", self.name);
        }
    }
}

#[test]
fn the_primary_is_killed_and_cut_off() {
    let programs =
        [("patroni", "patroni"), ("etcd", "etcd-server"), ("pgbouncer", "pgbouncer"), ("haproxy", "haproxy")];
    for (name, package) in programs {
        program(name, package);
    }
    let machines = Machines::start();
    let mut primary = machines.wait_until_whole();
    // A second one would stop what the first one has started.
    let mut second = Command::new("bash");
    second.args([SCRIPT, "try"]).arg(machines.dir()).env("USERD", USERD);
    let second = second.stdin(Stdio::null()).output().expect("bash");
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && said.contains("another `cluster try` runs in "), "{said}");
    machines
        .client(primary)
        .unwrap()
        .batch_execute("create table probe (at timestamptz default now())")
        .unwrap();

    // One userd that goes through haproxy and PgBouncer, as the file says in a comment.
    let text = fs::read_to_string(machines.node(0).join("userd.env")).unwrap();
    let url = text.lines().find_map(|line| line.strip_prefix("#DATABASE_URL=")).expect("the other way");
    let mut other = Process::at(url, &[("DB_PREPARED", "false")]);
    let other_url = other.wait_for_url_within(LONG_ON_DISK);

    let url = format!("http://{}:8080", machines.addresses[0]);
    for (host, status) in [("users.example", 200), ("evil.example", 403)] {
        let mut client = crate::support::Client::new(&url);
        client.send(format!("GET /users HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes());
        assert_eq!(client.answer("GET").status, status, "{host}");
    }
    let ways = [Way::start("addresses", &url), Way::start("haproxy", &other_url)];
    let creates = |count| ways.iter().for_each(|way| way.load.creates(count));

    let mut backs = Vec::new();
    for name in ["killed", "cut off"] {
        creates(50);
        let at = Instant::now();
        match name {
            "killed" => {
                let said = machines.script("kill", "leader");
                assert_eq!(said, format!("killed node{}\n", primary + 1));
            }
            _ => machines.proxies[primary].shut(),
        }
        machines.wait_for_another(primary);
        backs.push(Instant::now());
        println!("{name}: PostgreSQL takes changes after {:?}", at.elapsed());
        creates(50);
        match name {
            "killed" => drop(machines.script("start", &(primary + 1).to_string())),
            _ => machines.proxies[primary].set(Weather::Fair),
        }
        creates(50);
        primary = machines.wait_until_whole();
    }
    creates(50);
    let mut client = machines.client(primary).unwrap();
    ways.into_iter().for_each(|way| way.check(&mut client, &backs));
    let started = machines.started();
    assert_eq!(started.len(), 15, "five programs for each of three machines");
    drop(machines);
    eventually(LONG, "the script ends all that it has started", || started.iter().all(|id| !running(*id)));
}

/// Other accounts of the machine see the arguments of each process.
#[test]
fn passwords_are_no_arguments() {
    let dir = TempDir::new();
    let asked = dir.path().join("asked");
    let shims = dir.path().join("bin");
    fs::create_dir(&shims).unwrap();
    // The programs that could get one.
    for program in ["sed", "tr", "od", "mkdir", "chown"] {
        let shim = format!(
            "#!/bin/sh\necho {program} \"$@\" >>{}\nPATH=/usr/sbin:/usr/bin exec {program} \"$@\"\n",
            asked.display()
        );
        fs::write(shims.join(program), shim).unwrap();
        fs::set_permissions(shims.join(program), PermissionsExt::from_mode(0o755)).unwrap();
    }
    let files = dir.path().join("machines");
    let path = format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", shims.display());
    let made = Command::new("bash")
        .args([SCRIPT, "files", files.to_str().unwrap(), "10.0.0.31", "10.0.0.32", "10.0.0.33"])
        .env("PATH", path)
        .status();
    assert!(made.unwrap().success());
    let sql = fs::read_to_string(files.join("node1/bootstrap.sql")).unwrap();
    let password = sql.split('\'').nth(1).expect("a password in quotes");
    assert!(password.len() == 32 && password.bytes().all(|byte| byte.is_ascii_hexdigit()), "{sql}");
    let asked = fs::read_to_string(asked).unwrap();
    assert!(asked.contains("sed ") && !asked.contains(password), "{asked}");
}
