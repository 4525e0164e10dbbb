//! `cargo bench --bench bulk`: `userd export` and `userd import` beside `psql \copy` of the same rows in the same run, and
//! what requests wait for meanwhile.
//!
//! Needs psql (Debian: `apt-get install postgresql`). A durable private cluster; `USERS` is how many (1,000,000). The table
//! that psql copies into has the same columns and indexes as users, and no triggers. Compare within one run.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};
use userd::internals::Cluster;

const ROUNDS: usize = 3;

/// Between two requests of each kind while users are imported.
const PACE: Duration = Duration::from_millis(5);

const PLAIN: &str = "
    drop table if exists plain;
    create table plain (
        id bigint generated always as identity primary key,
        name text not null,
        email varchar(254) not null,
        created_at timestamptz not null default now(),
        updated_at timestamptz not null default now()
    );
    create unique index plain_email_key on plain (lower(email collate \"C\"))";

fn main() {
    let users: u32 = env::var("USERS").ok().and_then(|count| count.parse().ok()).unwrap_or(1_000_000);
    let dir = env::temp_dir().join(format!("userd-bench-bulk-{}", std::process::id()));
    fs::create_dir(&dir).expect("a fresh directory");
    let cluster = Cluster::open(&dir.join("cluster"), 100, false, |_| true).expect("a cluster");
    let url = cluster.connection_string("postgres");
    let (ndjson, csv) = (dir.join("in.ndjson"), dir.join("in.csv"));
    write_files(&ndjson, &csv, users);
    userd(&url, &["migrate"], None);

    println!(
        "{users} users, medians of {ROUNDS} rounds\n\n| work | s | users/s | × psql | MiB | processor s |\n\
         |---|---|---|---|---|---|"
    );
    let plain_in = || {
        sql(&url, PLAIN);
        psql(&url, &format!("\\copy plain (name, email) from '{}' with (format csv, header)", csv.display()))
    };
    let plain_out = || {
        let rows = "select id, name, email, created_at, updated_at from users order by id";
        let file = dir.join("out.psql");
        psql(&url, &format!("\\copy ({rows}) to '{}' with (format csv, header)", file.display()))
    };
    /// Tasks of a round, each with the index of the psql task it is compared with.
    const WORK: [(&str, usize); 6] = [
        ("import, NDJSON", 2),
        ("import, CSV", 2),
        ("psql \\copy into a table with the same indexes", 2),
        ("export, NDJSON", 5),
        ("export, CSV", 5),
        ("psql \\copy of the same rows", 5),
    ];
    let mut rounds: Vec<[Cost; WORK.len()]> = Vec::new();
    for _ in 0..ROUNDS {
        let import = |file| {
            sql(&url, "truncate users restart identity cascade; checkpoint");
            userd(&url, &["import"], Some(file))
        };
        let [from_ndjson, from_csv] = [import(&ndjson), import(&csv)];
        sql(&url, "checkpoint");
        let plain = plain_in();
        sql(&url, "vacuum analyze users; checkpoint");
        let export = |name| userd(&url, &["export"], Some(&dir.join(name)));
        let exported = [export("out.ndjson"), export("out.csv")];
        rounds.push([from_ndjson, from_csv, plain, exported[0], exported[1], plain_out()]);
    }
    let median = |value: &dyn Fn(&[Cost; WORK.len()]) -> f64| {
        let mut column: Vec<f64> = rounds.iter().map(value).collect();
        column.sort_by(f64::total_cmp);
        column[ROUNDS / 2]
    };
    for (at, (name, base)) in WORK.into_iter().enumerate() {
        let time = median(&|round| round[at].seconds);
        let ratio = time / median(&|round| round[base].seconds);
        let peak = rounds.iter().map(|round| round[at].mib).fold(0.0, f64::max);
        let processor = median(&|round| round[at].processor);
        println!(
            "| {name} | {time:.2} | {:.0} | {ratio:.2} | {peak:.1} | {processor:.2} |",
            f64::from(users) / time
        );
    }

    sql(&url, "truncate users restart identity cascade");
    println!("\n| requests | p50 | p99 | longest | |\n|---|---|---|---|---|");
    meanwhile(&url, "idle", || thread::sleep(Duration::from_secs(10)));
    meanwhile(&url, "during an import", || _ = userd(&url, &["import"], Some(&ndjson)));
    meanwhile(&url, "during an export", || _ = userd(&url, &["export"], Some(&dir.join("out.ndjson"))));
    drop(cluster);
    let _ = fs::remove_dir_all(dir);
}

fn write_files(ndjson: &Path, csv: &Path, users: u32) {
    let create = |path| std::io::BufWriter::new(fs::File::create(path).expect("a fresh directory"));
    let (mut ndjson, mut csv) = (create(ndjson), create(csv));
    writeln!(csv, "name,email").expect("it has space");
    for n in 0..users {
        // Not in the order of the index.
        let email = format!("{:08x}.{n}@example.com", n.wrapping_mul(2_654_435_761));
        writeln!(ndjson, "{{\"name\":\"User Number {n}\",\"email\":\"{email}\"}}").expect("it has space");
        writeln!(csv, "User Number {n},{email}").expect("it has space");
    }
}

/// Time and memory that a command takes.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    /// The most that were resident.
    mib: f64,
    /// Seconds of the processor, without the server's.
    processor: f64,
}

/// Measures a command of userd.
fn userd(url: &str, arguments: &[&str], file: Option<&PathBuf>) -> Cost {
    let mut command = Command::new(env!("CARGO_BIN_EXE_userd"));
    command.args(arguments).args(file).env("DATABASE_URL", url).stdout(Stdio::null());
    cost(command)
}

fn cost(mut command: Command) -> Cost {
    let (began, used) = (Instant::now(), processor());
    let mut process = command.spawn().expect("it starts");
    let mut peak = 0.0_f64;
    let status = loop {
        if let Some(status) = process.try_wait().expect("it is our child") {
            break status;
        }
        peak = peak.max(peak_mib(&process));
        thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "{command:?}: {status}");
    Cost { seconds: began.elapsed().as_secs_f64(), mib: peak, processor: processor() - used }
}

/// Seconds of the processor that children took who have ended.
fn processor() -> f64 {
    use nix::sys::{
        resource::{UsageWho, getrusage},
        time::TimeValLike,
    };
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("it is there");
    (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6
}

fn peak_mib(process: &Child) -> f64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}

/// Measures a command of psql (Debian: apt-get install postgresql).
fn psql(url: &str, command: &str) -> Cost {
    let mut psql = Command::new("psql");
    psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-c", command, url]);
    cost(psql)
}

fn sql(url: &str, statements: &str) {
    let mut client = postgres::Client::connect(url, postgres::NoTls).expect("the cluster takes connections");
    for statement in statements.split(';') {
        client.batch_execute(statement).expect("a statement");
    }
}

/// The text of the n-th request.
type Request<'a> = dyn Fn(u32) -> String + Sync + 'a;

/// Prints what requests wait for while `work` is under way: reads by id, pages and creates, each from a client of its own
/// that sends one every `PACE`.
fn meanwhile(database: &str, what: &str, work: impl FnOnce()) {
    let mut service = Command::new(env!("CARGO_BIN_EXE_userd"))
        .envs([("DATABASE_URL", database), ("HOST", "127.0.0.1"), ("PORT", "0"), ("LOG_LEVEL", "warn")])
        .stdout(Stdio::piped())
        .spawn()
        .expect("userd starts");
    let mut line = String::new();
    let stdout = service.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("listening on http://").expect("where it listens").to_owned();
    let stop = AtomicBool::new(false);
    let seed = std::process::id();
    let requests: [(&str, Box<Request>); 3] = [
        ("GET /users/:id", Box::new(|n| format!("GET /users/{} HTTP/1.1\r\nHost: x\r\n\r\n", n % 1000 + 1))),
        (
            "GET /users?page",
            Box::new(|n| format!("GET /users?page={} HTTP/1.1\r\nHost: x\r\n\r\n", n % 60 + 1)),
        ),
        (
            "POST /users",
            Box::new(|n| {
                let body =
                    format!("{{\"name\":\"n\",\"email\":\"{what}{seed}-{n}@b.example\"}}").replace(' ', "");
                format!("POST /users HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            }),
        ),
    ];
    thread::scope(|scope| {
        let clients: Vec<_> = requests
            .iter()
            .map(|(name, request)| (name, scope.spawn(|| client(&address, &stop, request.as_ref()))))
            .collect();
        work();
        stop.store(true, Ordering::Relaxed);
        for (name, client) in clients {
            let mut times = client.join().expect("the client ends");
            times.sort_by(f64::total_cmp);
            let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
            let (p50, p99, longest) = (at(0.5), at(0.99), at(1.0));
            println!("| {name} {what} | {p50:.1} ms | {p99:.1} ms | {longest:.0} ms | {} |", times.len());
        }
    });
    let pid = nix::unistd::Pid::from_raw(service.id().cast_signed());
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::SIGTERM);
    let _ = service.wait();
}

/// Milliseconds that each answer took.
fn client(address: &str, stop: &AtomicBool, request: &Request) -> Vec<f64> {
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.set_nodelay(true).expect("a connected socket");
    let (mut times, mut n, mut answer) = (Vec::new(), 0, Vec::new());
    while !stop.load(Ordering::Relaxed) {
        n += 1;
        let began = Instant::now();
        stream.write_all(request(n).as_bytes()).expect("it reads");
        answer.clear();
        while !is_whole(&answer) {
            let mut bytes = [0; 1 << 16];
            let count = stream.read(&mut bytes).expect("it answers");
            assert!(count > 0, "the connection is closed");
            answer.extend_from_slice(&bytes[..count]);
        }
        times.push(began.elapsed().as_secs_f64() * 1000.0);
        let status = String::from_utf8_lossy(&answer[9..12]).into_owned();
        assert!(["200", "201", "404"].contains(&status.as_str()), "answered {status}");
        thread::sleep(PACE);
    }
    times
}

fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    length.and_then(|length| length.parse().ok()).is_none_or(|length: usize| body.len() >= length)
}
