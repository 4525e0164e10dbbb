//! How much memory the process takes, whatever clients do: its peak, and what it keeps a while later. Each test has a
//! process of its own with the default budget, and reads back what was acknowledged.

use crate::support::{
    BUSY, Client, Database, LONG, PASSWORD, Process, connect_small, eventually, memory_kib, pause,
    time_of_a_hash,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    io::{BufRead, BufReader, Read, Write},
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
    // The limit of descriptors usually is 1024.
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("every process has one");
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(8192)), hard).expect("no more than the hard limit");
    let database = Database::create();
    database.run(users);
    let mut process = Process::on(&database, &[&[("REQUEST_TIMEOUT", "100")], variables].concat());
    let url = process.wait_for_url();
    let address = url.strip_prefix("http://").and_then(|text| text.parse().ok()).expect("an address");
    (database, process, address)
}

/// The peak, and then what is kept.
fn is_bounded(process: &Process, what: &str) {
    let code = if cfg!(debug_assertions) { memory_kib(process.id(), "RssFile:").unwrap() } else { 0 };
    let peak = memory_kib(process.id(), "VmHWM:").unwrap() - code;
    let ended = Instant::now();
    let rest = || memory_kib(process.id(), "VmRSS:").unwrap() - code;
    println!("{what}: {peak} KiB at most, {} KiB at its end, {code} KiB of code", rest());
    while rest() > REST_KIB {
        assert!(ended.elapsed() < REST + BUSY, "{what}: {} KiB after {:?}", rest(), ended.elapsed());
        pause(Duration::from_millis(50));
    }
    println!("{what}: {} KiB after {:?}", rest(), ended.elapsed());
    assert!(peak <= PEAK_KIB, "{what}: {peak} KiB");
}

fn get(target: &str) -> String {
    format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n")
}

/// Sends each request over a connection of its own, all at once, and reads what is answered, all at once: status and
/// body of each answer, which is there to its end.
fn exchange(address: SocketAddr, requests: &[String]) -> Vec<(u16, String)> {
    let ask = |request: &String| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(LONGER)).expect("a socket");
        // It may be refused before it was sent whole.
        let _ = stream.write_all(request.as_bytes());
        let (mut stream, mut head) = (BufReader::new(stream), String::new());
        while !head.ends_with("\r\n\r\n") {
            assert_ne!(stream.read_line(&mut head).expect("an answer in time"), 0, "the end after {head:?}");
        }
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).expect("a length");
        let mut body = vec![0; length.parse().expect("a length")];
        stream.read_exact(&mut body).expect("the whole answer");
        let status = head[9..12].parse().expect("a status");
        assert_eq!(status == 503, head.contains("\r\nRetry-After: "), "{head}");
        (status, String::from_utf8(body).expect("UTF-8"))
    };
    thread::scope(|scope| {
        let clients: Vec<_> = requests.iter().map(|request| scope.spawn(move || ask(request))).collect();
        clients.into_iter().map(|client| client.join().expect("it has an answer")).collect()
    })
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
fn creates(count: usize, members: &str) -> Vec<String> {
    let create = |n: usize| {
        let body = format!(r#"{{"email":"{n}@example.com",{members}}}"#);
        let length = body.len();
        format!("POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    (0..count).map(create).collect()
}

#[test]
fn the_largest_users_at_once() {
    let (_database, process, address) = start(LARGEST, &[]);
    let requests: Vec<_> = (1..=256).map(|id| get(&format!("/users/{id}"))).collect();
    for (id, (status, body)) in (1..).zip(exchange(address, &requests)) {
        assert_eq!(status, 200);
        is_largest(&format!(r#"{{"data":[{body}]}}"#), id, id);
    }
    is_bounded(&process, "256 of the largest users at once");
    let answers = exchange(address, &vec![get("/users?perPage=1000"); 32]);
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
        let (_database, process, address) = start(users, &[("WRITE_TIMEOUT", "100")]);
        let mut stalled: Vec<_> = (0..count).map(|_| connect_small(address)).collect();
        for stream in &mut stalled {
            stream.write_all(get("/users?perPage=1000").as_bytes()).expect("it reads");
        }
        let line = "bytes of an answer (the memory for requests is used up)";
        eventually(LONGER, line, || process.stderr().contains(line));
        for (status, body) in exchange(address, &vec![get("/users?perPage=500&page=2"); 2]) {
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
    let (_database, process, address) = start("", &[]);
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

/// The memory of clients that leave amid a body is given back.
#[test]
fn bodies_that_never_end() {
    let (_database, process, address) = start("", &[]);
    let head = "POST /users HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\n";
    let unfinished = format!("{head}{}", " ".repeat(59_000));
    let mut stalled: Vec<_> = (0..900).map(|_| TcpStream::connect(address).expect("it listens")).collect();
    // Some are closed amid this: their memory is needed for others.
    stalled.iter_mut().for_each(|stream| drop(stream.write_all(unfinished.as_bytes())));
    let mut client = Client::new(&format!("http://{address}"));
    let none = "userd_http_refusals_total{reason=\"no_memory\"} 0\n";
    eventually(LONGER, "memory is short", || !client.get("/metrics").body.contains(none));
    drop(stalled);
    is_bounded(&process, "900 bodies that never end");
    assert_eq!(client.get("/users").json()["total"], 0);
}

#[test]
fn passwords_at_once() {
    const WAIT: Duration = Duration::from_secs(2);
    let (_database, process, address) = start("", &[]);
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
    let (_database, process, address) = start(users, &[("AUTH_ATTEMPTS", "0")]);
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
    let refused = |budget: &str| {
        let variables = [("MAX_PER_PAGE", "4000"), ("MEMORY_BUDGET", budget)];
        let mut process = Process::on(&database, &variables);
        let code = process.wait(LONG);
        (code, process.stderr())
    };
    let (code, line) = refused("1");
    let least = line.split("at least ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
    let least: usize = least.parse().expect("a number");
    assert!(code == 2 && line.contains("MEMORY_BUDGET") && line.contains("MAX_PER_PAGE=4000"), "{line}");
    assert_eq!(refused(&(least - 1).to_string()), (2, line));

    let budget = least.to_string();
    let variables = [("MAX_PER_PAGE", "4000"), ("MEMORY_BUDGET", &*budget)];
    let (_database, process, address) = start(&LARGEST.replace("1, 1000)", "1, 4000)"), &variables);
    let targets = ["/users?perPage=4000", "/users?after=0&perPage=4000", "/users?perPage=4000"];
    for (status, body) in exchange(address, &targets.map(get)) {
        assert_eq!(status, 200);
        is_largest(&body, 1, USERS);
    }
    let email = format!("/users?perPage=4000&email=4000{}", "%01".repeat(250));
    let (status, body) = exchange(address, &[get(&email)]).remove(0);
    assert_eq!(status, 200);
    is_largest(&body, USERS, USERS);
    let peak = memory_kib(process.id(), "VmHWM:").unwrap();
    println!(
        "pages of {USERS} of the largest users: {peak} KiB at most, with a budget of {} KiB",
        least >> 10
    );
    assert!(peak <= (least >> 10) + (22 << 10), "{peak}");
}
