//! `cargo bench`: userd's kinds of work, beside pgbench with the same statements in the same run.
//!
//! Needs wrk and pgbench (Debian: `apt-get install wrk postgresql`). Everything runs on this machine: a
//! durable private cluster with 100,000 users, userd as a process at its default settings with its log on,
//! one wrk thread. Machines are noisy: compare within one run, don't quote single figures.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};
use userd::internals::Cluster;

const USERS: u32 = 100_000;
const SECONDS: u32 = 4;
const ROUNDS: usize = 3;
const CONNECTIONS: [u32; 3] = [1, 32, 128];

/// Name and wrk script of each kind of work.
const WORK: [(&str, &str); 8] = [
    ("GET /users/:id", "return wrk.format('GET', '/users/' .. math.random(1, 100000))"),
    ("GET /users?page", "return wrk.format('GET', '/users?page=' .. math.random(1, 6000))"),
    (
        "GET /users?email",
        "return wrk.format('GET', '/users?email=user' .. math.random(1, 100000) .. '@example.com')",
    ),
    ("POST /users", "return create()"),
    ("PUT /users/:id", "return put()"),
    // Each deletes a user that is there.
    ("DELETE /users/:id", "return wrk.format('DELETE', '/users/' .. FIRST + n)"),
    (
        "90 % find, 5 % list, 5 % create",
        "local dice = n % 20
         if dice == 0 then return create() end
         if dice == 1 then return wrk.format('GET', '/users?page=' .. math.random(1, 6000)) end
         return wrk.format('GET', '/users/' .. math.random(1, 100000))",
    ),
    (
        "60 % find, 20 % create, 20 % PUT",
        "local dice = n % 10
         if dice < 2 then return create() end
         if dice < 4 then return put() end
         return wrk.format('GET', '/users/' .. math.random(1, 100000))",
    ),
];

const PRELUDE: &str = "
local n, seed = 0, os.time() .. '-' .. math.random(1, 1000000000)
math.randomseed(os.time())
local function create()
  local body = '{\"name\":\"Load Test\",\"email\":\"b' .. n .. '-' .. seed .. '@example.com\"}'
  return wrk.format('POST', '/users', nil, body)
end
local function put()
  local body = '{\"name\":\"Name ' .. n .. '-' .. seed .. '\"}'
  return wrk.format('PUT', '/users/' .. math.random(1, 100000), nil, body)
end
";

/// Users that one run may delete.
const DELETED: u32 = 60_000 * SECONDS;

/// The statements that userd would run for one request, for pgbench.
const SELECT: &str = "\\set id random(1, 100000)
select id, name, email, created_at, updated_at from users where id = :id;";
const INSERT: &str = "\\set a random(1, 9000000000000000)
insert into users (name, email) values ('Load Test', :a || '-pgbench@example.com')
returning id, name, email, created_at, updated_at;";

fn main() {
    for program in ["wrk", "pgbench"] {
        let mut version = Command::new(program);
        version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        if version.status().is_err() {
            eprintln!("{program} is not here (Debian: apt-get install wrk postgresql)");
            std::process::exit(1);
        }
    }
    let dir = env::temp_dir().join(format!("userd-bench-{}", std::process::id()));
    fs::create_dir(&dir).expect("a fresh directory");
    let scripts = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let cluster = Cluster::open(&dir.join("cluster"), 100, false, |_| true).expect("a cluster");
    let url = cluster.connection_string("postgres");
    let userd = Userd::start(&url);
    let mut client = postgres::Client::connect(&url, postgres::NoTls).expect("a connection");
    let seed = format!(
        "insert into users (name, email) select 'User ' || i, 'user' || i || '@example.com' \
         from generate_series(1, {USERS}) i; analyze"
    );
    client.batch_execute(&seed).expect("users");
    client.batch_execute("vacuum").expect("a vacuum");

    println!("| work | connections | requests/s | p50 | p99 |\n|---|---|---|---|---|");
    for (name, script) in WORK {
        let path = scripts.join("work.lua");
        let text = format!("{PRELUDE}\nrequest = function()\n  n = n + 1\n  {script}\nend\n");
        let mut run = |connections| {
            let mut text = text.clone();
            if script.contains("FIRST") {
                let insert = format!(
                    "with i as (insert into users (name, email) \
                         select 'D', gen_random_uuid() || '@example.com' from generate_series(1, {DELETED}) returning id) \
                     select min(id) - 1 from i"
                );
                let first: i64 = client.query_one(&insert, &[]).expect("users").get(0);
                text = text.replace("FIRST", &first.to_string());
            }
            fs::write(&path, text).expect("a script");
            wrk(&userd.url, &path, connections)
        };
        for connections in CONNECTIONS {
            let runs: Vec<_> = (0..ROUNDS).map(|_| run(connections)).collect();
            let [rate, p50, p99] = [0, 1, 2].map(|column| median(runs.iter().map(|run| run[column])));
            println!("| {name} | {connections} | {rate:.0} | {p50:.2} ms | {p99:.2} ms |");
        }
    }
    for (name, script) in [("pgbench, the same select", SELECT), ("pgbench, the same insert", INSERT)] {
        let path = scripts.join("work.sql");
        fs::write(&path, script).expect("a script");
        for connections in [8, 32] {
            let rate = pgbench(&url, &path, connections);
            println!("| {name} | {connections} | {rate:.0} | | |");
        }
    }
    println!("\nuserd resident after all this: {:.1} MiB", userd.resident());
    drop(userd);
    drop(client);
    drop(cluster);
    let _ = fs::remove_dir_all(dir);
}

/// The service, as a process of its own.
struct Userd {
    process: Child,
    url: String,
}

impl Userd {
    fn start(database: &str) -> Userd {
        let mut process = Command::new(env!("CARGO_BIN_EXE_userd"))
            .envs([("DATABASE_URL", database), ("HOST", "127.0.0.1"), ("PORT", "0")])
            .stdout(Stdio::piped())
            .stderr(fs::File::create("/dev/null").expect("/dev/null"))
            .spawn()
            .expect("userd starts");
        let mut line = String::new();
        let stdout = process.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let url = line.trim().strip_prefix("listening on ").expect("where it listens");
        let url = url.to_owned();
        Userd { process, url }
    }

    fn resident(&self) -> f64 {
        let path = format!("/proc/{}/status", self.process.id());
        let status = fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
        kib.unwrap_or(f64::NAN) / 1024.0
    }
}

impl Drop for Userd {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.process.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM);
        let _ = self.process.wait();
    }
}

/// Requests a second, and the 50th and 99th percentile of their times in milliseconds. Panics where an answer was
/// no success.
fn wrk(url: &str, script: &Path, connections: u32) -> [f64; 3] {
    let output = Command::new("wrk")
        .args(["-t1", "--latency", "-s"])
        .arg(script)
        .args([format!("-c{connections}"), format!("-d{SECONDS}s"), url.to_owned()])
        .output()
        .expect("wrk runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!text.contains("Non-2xx"), "wrk said {text}");
    let after = |label: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(label));
        line.unwrap_or_else(|| panic!("wrk said {text}")).trim()
    };
    let milliseconds = |time: &str| {
        let (number, unit) = time.split_at(time.find(char::is_alphabetic).unwrap_or(time.len()));
        let factor = match unit {
            "us" => 0.001,
            "ms" => 1.0,
            "s" => 1000.0,
            _ => panic!("wrk said {time}"),
        };
        number.parse::<f64>().expect("a number") * factor
    };
    let rate = after("Requests/sec:").parse().expect("a number");
    [rate, milliseconds(after("50%")), milliseconds(after("99%"))]
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn pgbench(url: &str, script: &Path, connections: u32) -> f64 {
    let output = Command::new("pgbench")
        .args(["-n", "-M", "prepared", "-j", "2", "-f"])
        .arg(script)
        .args([format!("-c{connections}"), format!("-T{SECONDS}"), url.to_owned()])
        .output()
        .expect("pgbench runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("tps = "));
    let number = line.and_then(|line| line.split(' ').next());
    number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("pgbench said {text}"))
}
