//! How much memory the process takes, whatever clients do: its peak, and what it keeps a while later. Each test has a
//! process of its own with the default budget, and reads back what was acknowledged.

use crate::support::{
    BUSY, Client, Database, PASSWORD, Process, code_kib, connect_small, eventually, memory_kib, pause,
    peak_kib, time_of_a_hash,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Memory that the process may take with the default settings, and half a minute after the last request; of an
/// unoptimized build without its code, which is as large as all the rest.
const PEAK_KIB: usize = 70 << 10;
const REST_KIB: usize = 25 << 10;
const REST: Duration = Duration::from_secs(30);

/// Building megabytes of JSON takes long without optimization, on a busy machine.
const LONGER: Duration = Duration::from_secs(100);

/// Users as large as they can be: a control character is six bytes of JSON.
const LARGEST: &str = "insert into users (name, email) \
    select rpad(n::text, 1000, chr(1)), rpad(n::text, 254, chr(1)) from generate_series(1, 1000) n";

/// A process with these users.
fn start(users: &str, variables: &[(&str, &str)]) -> (Database, Process, SocketAddr) {
    raise_the_limit_of_descriptors();
    let database = Database::create();
    if !users.is_empty() {
        database.run(users);
    }
    let mut process = Process::on(&database, variables);
    let url = process.wait_for_url();
    let address = url.strip_prefix("http://").and_then(|text| text.parse().ok()).expect("an address");
    (database, process, address)
}

/// The limit usually is 1024.
fn raise_the_limit_of_descriptors() {
    const ENOUGH: u64 = 8192;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("every process has one");
    if soft < ENOUGH.min(hard) {
        setrlimit(Resource::RLIMIT_NOFILE, ENOUGH.min(hard), hard).expect("up to the hard limit it may be");
    }
}

/// The peak, and then what is kept.
fn is_bounded(process: &Process, what: &str) {
    let code = if cfg!(debug_assertions) { code_kib(process.id()) } else { 0 };
    let peak = peak_kib(process.id()) - code;
    let ended = Instant::now();
    let rest = || memory_kib(process.id()) - code;
    println!("{what}: {peak} KiB at most, {} KiB at its end, {code} KiB of code", rest());
    while rest() > REST_KIB {
        assert!(ended.elapsed() < REST + BUSY, "{what}: {} KiB after {:?}", rest(), ended.elapsed());
        pause(Duration::from_millis(50));
    }
    println!("{what}: {} KiB after {:?}", rest(), ended.elapsed());
    assert!(peak <= PEAK_KIB, "{what}: {peak} KiB");
}

fn gives_answers_up(process: &Process) {
    let line = "bytes of an answer before other requests needed the memory";
    eventually(LONGER, line, || process.stderr().contains(line));
}

fn get(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")
}

/// Sends each request over a connection of its own, all at once, and reads what is answered, all at once: status and
/// body of each answer, which is there to its end.
fn exchange(address: SocketAddr, requests: &[Vec<u8>]) -> Vec<(u16, String)> {
    let connect = |request: &Vec<u8>| {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        (stream, request.clone(), Vec::new())
    };
    let mut clients: Vec<(TcpStream, Vec<u8>, Vec<u8>)> = requests.iter().map(connect).collect();
    let mut answers: Vec<Option<(u16, String)>> = requests.iter().map(|_| None).collect();
    let (deadline, mut buffer) = (Instant::now() + LONGER, vec![0; 1 << 18]);
    while answers.iter().any(Option::is_none) {
        assert!(Instant::now() < deadline, "some are not answered");
        let mut moved = false;
        for ((stream, unsent, received), answer) in clients.iter_mut().zip(&mut answers) {
            match stream.write(unsent) {
                _ if unsent.is_empty() => {}
                Ok(count) => drop(unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Refused before it was sent whole.
                Err(_) => unsent.clear(),
            }
            match stream.read(&mut buffer) {
                _ if answer.is_some() => {}
                Ok(count @ 1..) => {
                    received.extend_from_slice(&buffer[..count]);
                    *answer = whole(received);
                    moved = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                end => panic!("{end:?} after {} bytes of an answer", received.len()),
            }
        }
        if !moved {
            pause(Duration::from_millis(1));
        }
    }
    answers.into_iter().flatten().collect()
}

/// An answer's status and body, once it is whole.
fn whole(bytes: &[u8]) -> Option<(u16, String)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = str::from_utf8(&bytes[..end]).expect("ASCII");
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
    let body = &bytes[end + 4..];
    if body.len() < length.parse().expect("a length") {
        return None;
    }
    let status = head[9..12].parse().expect("a status");
    assert_eq!(status == 503, head.contains("\r\nRetry-After: "), "{head}");
    Some((status, String::from_utf8(body.to_vec()).expect("UTF-8")))
}

/// The largest users from `first` to `last`, as a list has them.
fn is_largest(body: &str, first: usize, last: usize) {
    let list: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let users = list["data"].as_array().expect("users");
    assert_eq!(users.len(), last + 1 - first);
    for (id, user) in (first..).zip(users) {
        assert_eq!(user["id"], id.to_string());
        for (field, length) in [("name", 1000), ("email", 254)] {
            let value = user[field].as_str().expect("a text");
            assert!(value.len() == length && value.trim_end_matches('\u{1}') == id.to_string());
        }
    }
}

/// Returns creates of so many users, with these members in each body.
fn creates(count: usize, members: &str) -> Vec<Vec<u8>> {
    let create = |n: usize| {
        let body = format!(r#"{{"email":"{n}@example.com",{members}}}"#);
        let length = body.len();
        format!("POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
    };
    (0..count).map(create).collect()
}

#[test]
fn the_largest_users_at_once() {
    let (_database, process, address) = start(LARGEST, &[("REQUEST_TIMEOUT", "100")]);
    let requests: Vec<_> = (1..=256).map(|id| get(&format!("/users/{id}")).into_bytes()).collect();
    for (id, (status, body)) in (1..).zip(exchange(address, &requests)) {
        assert_eq!(status, 200);
        is_largest(&format!(r#"{{"data":[{body}]}}"#), id, id);
    }
    is_bounded(&process, "256 of the largest users at once");
    let answers = exchange(address, &vec![get("/users?perPage=1000").into_bytes(); 32]);
    assert!(answers.iter().all(|answer| answer.0 == 200 && *answer == answers[0]));
    assert!(answers[0].1.len() > 7_500_000);
    is_largest(&answers[0].1, 1, 1000);
    is_bounded(&process, "32 pages of the largest users at once");
}

#[test]
fn pages_that_are_not_read_hold_up_no_others() {
    let small = "insert into users (name, email) \
        select 'Ada Lovelace ' || n, n || '@example.com' from generate_series(1, 1000) n";
    for (users, count) in [(LARGEST, 32), (small, 400)] {
        let variables = [("WRITE_TIMEOUT", "100"), ("REQUEST_TIMEOUT", "100")];
        let (_database, process, address) = start(users, &variables);
        let mut stalled: Vec<_> = (0..count).map(|_| connect_small(address)).collect();
        for stream in &mut stalled {
            stream.write_all(get("/users?perPage=1000").as_bytes()).expect("it reads");
        }
        gives_answers_up(&process);
        for (status, body) in exchange(address, &vec![get("/users?perPage=500&page=2").into_bytes(); 2]) {
            let page: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!((status, &page["from"], &page["to"]), (200, &501.into(), &1000.into()));
            if users == LARGEST {
                is_largest(&body, 501, 1000);
            }
        }
        drop(stalled);
        is_bounded(&process, &format!("{count} pages that are not read"));
    }
}

#[test]
fn bodies_at_once() {
    let (_database, process, address) = start("", &[("REQUEST_TIMEOUT", "100")]);
    // Bodies as long as the default allows, with the longest name.
    let name = "\\u0001".repeat(1000);
    let requests = creates(1000, &format!(r#""name":"{name}"{}"#, " ".repeat(59_000)));
    let answers = exchange(address, &requests);
    let created = answers.iter().filter(|(status, _)| *status == 201).count();
    assert!(created >= 100, "{created}");
    assert!(answers.iter().all(|(status, _)| [201, 503].contains(status)));
    let mut client = Client::new(&format!("http://{address}"));
    // The acknowledged users are there, and no others.
    assert_eq!(client.get("/users?perPage=1").json()["total"], created);
    for (_, body) in answers.iter().filter(|(status, _)| *status == 201).step_by(50) {
        let user: serde_json::Value = serde_json::from_str(body).expect("JSON");
        let target = format!("/users/{}", user["id"].as_str().expect("an id"));
        assert_eq!(client.get(&target).json(), user);
    }
    is_bounded(&process, "1000 bodies of 64 KiB at once");
}

#[test]
fn passwords_at_once() {
    const WAIT: Duration = Duration::from_secs(2);
    let (_database, process, address) = start("", &[("REQUEST_TIMEOUT", "100")]);
    let requests = creates(300, &format!(r#""name":"n","password":"{PASSWORD}""#));
    // How long a hash takes is learned while the requests come; at first it is 20 ms.
    let each = time_of_a_hash().max(Duration::from_millis(20));
    let answers = exchange(address, &requests);
    let created: Vec<_> = (0..300).filter(|n| answers[*n].0 == 201).collect();
    assert!(answers.iter().all(|(status, _)| [201, 503].contains(status)));
    // Two seconds of work wait: an eighth of that, as this machine may be slower by now.
    let promised = (WAIT.as_secs_f64() / each.as_secs_f64() / 8.0) as usize;
    assert!(created.len() >= promised.max(1), "{} of {promised}, each {each:?}", created.len());
    let mut client = Client::new(&format!("http://{address}"));
    assert_eq!(client.get("/users").json()["total"], created.len());
    for n in [created[0], created[created.len() - 1]] {
        assert!(client.opens(&format!("{n}@example.com"), PASSWORD));
    }
    is_bounded(&process, "300 passwords at once");
}

/// Asks for lists while passwords wait all the time.
#[test]
fn lists_while_passwords_are_hashed() {
    let users = "insert into users (name, email) \
        select case when n > 1000 then rpad(n::text, 1000, chr(1)) else 'Ada Lovelace' end, 'u' || n || '@example.com' \
        from generate_series(1, 2000) n";
    let (_database, process, address) = start(users, &[("REQUEST_TIMEOUT", "100"), ("AUTH_ATTEMPTS", "0")]);
    let mut client = Client::new(&format!("http://{address}"));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for n in 0..8 {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    let mut client = Client::new(&format!("http://{address}"));
                    let status = client.login(&format!("{n}@example.com"), PASSWORD).status;
                    assert!([401, 503].contains(&status), "{status}");
                }
            });
        }
        let waits = |client: &mut Client| !client.get("/metrics").body.contains("userd_hashes_waiting 0\n");
        eventually(LONGER, "passwords wait", || waits(&mut client));
        // A usual page, and one that has to wait for memory.
        for (target, first) in [("/users?perPage=1000", 1), ("/users?after=1000&perPage=1000", 1001)] {
            let list = client.get(target).json();
            assert_eq!(list["data"][0]["id"], first.to_string());
            assert_eq!(list["data"].as_array().map(Vec::len), Some(1000));
        }
        over.store(true, Ordering::SeqCst);
    });
    is_bounded(&process, "lists while passwords are hashed");
}

/// With the smallest budget that a start accepts for so large pages.
#[test]
fn the_largest_lists_in_the_smallest_budget() {
    const USERS: usize = 4000;
    let database = Database::create();
    database.run(&LARGEST.replace("1, 1000)", "1, 4000)"));
    let refused = |budget: &str| {
        let variables = [("MAX_PER_PAGE", "4000"), ("MEMORY_BUDGET", budget)];
        let mut process = Process::on(&database, &variables);
        let code = process.wait(BUSY);
        (code, process.stderr())
    };
    let (code, line) = refused("1");
    let least = line.split("at least ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
    let least: usize = least.parse().expect("a number");
    assert!(code == 2 && line.contains("MEMORY_BUDGET") && line.contains("MAX_PER_PAGE=4000"), "{line}");
    assert_eq!(refused(&(least - 1).to_string()), (2, line));

    let budget = least.to_string();
    let variables = [("MAX_PER_PAGE", "4000"), ("MEMORY_BUDGET", &*budget), ("REQUEST_TIMEOUT", "100")];
    let mut process = Process::on(&database, &variables);
    let url = process.wait_for_url();
    let address = url.strip_prefix("http://").and_then(|text| text.parse().ok()).expect("an address");
    let targets = ["/users?perPage=4000", "/users?after=0&perPage=4000", "/users?perPage=4000"];
    let requests: Vec<_> = targets.iter().map(|target| get(target).into_bytes()).collect();
    for (status, body) in exchange(address, &requests) {
        assert_eq!(status, 200);
        is_largest(&body, 1, USERS);
    }
    let email = format!("/users?perPage=4000&email=4000{}", "%01".repeat(250));
    let (status, body) = exchange(address, &[get(&email).into_bytes()]).remove(0);
    assert_eq!(status, 200);
    is_largest(&body, USERS, USERS);
    let peak = peak_kib(process.id());
    println!(
        "pages of {USERS} of the largest users: {peak} KiB at most, with a budget of {} KiB",
        least >> 10
    );
    assert!(peak <= (least >> 10) + (22 << 10), "{peak}");

    let url = database.url();
    let variables = [("DATABASE_URL", &*url), ("MAX_PER_PAGE", "4000"), ("MEMORY_BUDGET", &*budget)];
    let mut export = Process::start(&["export"], &variables);
    assert_eq!(export.wait(LONGER), 0, "{}", export.stderr());
    let lines = export.stdout();
    assert_eq!(lines.lines().count(), USERS);
    for (id, line) in (1..).zip(lines.lines()) {
        is_largest(&format!(r#"{{"data":[{line}]}}"#), id, id);
    }
}
