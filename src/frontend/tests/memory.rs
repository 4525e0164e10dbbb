//! Tests of the memory budget: clients that send slowly, or do not read their answers.

use super::harness::{Client, Harness, connect_from, pause, until};
use socket2::SockRef;
use std::time::{Duration, Instant};
use std::{net::TcpStream, sync::atomic::Ordering, thread};

const KIB: usize = 1 << 10;

/// A budget of two bodies of the largest size.
fn harness() -> Harness {
    Harness::with(|limits| {
        limits.memory_budget = 128 * KIB;
        limits.head_timeout = Duration::from_secs(60);
    })
}

fn post(length: usize) -> String {
    format!("POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n")
}

/// Returns a client that has sent these bytes, which the frontend has read.
fn sent(harness: &Harness, bytes: impl AsRef<[u8]>) -> Client<TcpStream> {
    let mut client = harness.connect();
    client.send(bytes);
    harness.barrier();
    client
}

fn is_refused(mut client: Client<TcpStream>) {
    let answer = client.answer();
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.closes() && client.ends());
}

#[test]
fn a_body_has_its_memory_before_it_is_read() {
    let harness = harness();
    let one = || post(60_000) + "x";
    let mut first = sent(&harness, one());
    let _second = sent(&harness, one());
    assert!((120_000..125_000).contains(&harness.budget.held_bytes()));
    is_refused(sent(&harness, one()));
    // Serves a request without a body meanwhile, and a body that fits.
    let get = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n";
    assert_eq!(sent(&harness, get).answer().status, 200);
    assert_eq!(sent(&harness, post(500) + &"y".repeat(500)).answer().status, 200);
    let answer = first.send("x".repeat(59_999)).answer();
    assert_eq!(answer.json()["body"].as_str().map(str::len), Some(60_000));
    until(|| (harness.budget.held_bytes() < 65_000).then_some(()));
    let mut third = sent(&harness, one());
    assert_eq!(third.send("x".repeat(59_999)).answer().status, 200);
}

#[test]
fn a_request_takes_its_memory_along() {
    let harness = harness();
    let hold = |length: usize| {
        let body = "x".repeat(length);
        format!("POST /hold HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}")
    };
    let mut first = sent(&harness, hold(60_000));
    let gone = sent(&harness, hold(60_000));
    until(|| (harness.gate.held.load(Ordering::SeqCst) == 2).then_some(()));
    assert!(harness.budget.held_bytes() >= 120_000);
    // Counts the memory until the workers are done, even if the client is gone.
    drop(gone);
    harness.barrier();
    assert!(harness.budget.held_bytes() >= 120_000);
    is_refused(sent(&harness, post(60_000) + "x"));
    harness.release();
    assert_eq!(first.answer().status, 200);
    until(|| (harness.budget.held_bytes() == 0).then_some(()));
}

/// Checks that a request that waits for a worker gives its memory back when its connection ends, whatever ticket names
/// its slot. The ticket may get a newer request of the slot.
#[test]
fn a_body_whose_client_has_reset_its_connection_is_free_at_once() {
    let harness = harness();
    let claims = harness.claims.lock().unwrap();
    for _ in 0..3 {
        let gone = [sent(&harness, post(60_000) + &"x".repeat(60_000)), sent(&harness, post(60_000) + "x")];
        assert!((120_000..125_000).contains(&harness.budget.held_bytes()), "{}", harness.budget.held_bytes());
        is_refused(sent(&harness, post(60_000) + &"x".repeat(60_000)));
        for client in gone {
            SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
            drop(client);
            harness.barrier();
        }
        assert_eq!(harness.budget.held_bytes(), 0);
    }
    let mut clients = [sent(&harness, post(60_000) + &"x".repeat(60_000)), sent(&harness, post(2) + "ab")];
    drop(claims);
    for (client, length) in clients.iter_mut().zip([60_000, 2]) {
        assert_eq!(client.answer().json()["body"].as_str().map(str::len), Some(length));
    }
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 2);
}

#[test]
fn a_body_in_chunks_has_memory_for_the_largest() {
    let harness = harness();
    let chunked = "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut first = sent(&harness, format!("{chunked}1\r\nx"));
    let held = harness.budget.held_bytes();
    assert!((64 * KIB..66 * KIB).contains(&held), "{held}");
    let _second = sent(&harness, post(60_000) + "x");
    is_refused(sent(&harness, format!("{chunked}1\r\nx")));
    assert_eq!(first.send("\r\n0\r\n\r\n").answer().json()["body"], "x");
    until(|| (harness.budget.held_bytes() == 0).then_some(()));
}

/// A request whose client waits for 100 (Continue).
fn expecting(length: usize) -> String {
    post(length).replace("Host", "Expect: 100-continue\r\nHost")
}

/// Checks that a client that waits for a 100 gets it, or 503 if there is no memory. Before each row, memory is held:
/// by two clients whose incomplete bodies have stalled for so long that one is closed, by two clients that have not,
/// or by a worker.
#[test]
fn a_client_that_waits_to_go_on_is_always_told() {
    let chunked = expecting(0).replace("Content-Length: 0", "Transfer-Encoding: chunked");
    let rows = [
        (expecting(60_000), true, 100),
        (chunked.clone(), true, 100),
        (expecting(60_000), false, 503),
        (chunked, false, 503),
        // Closes no connection for a request that is so small that it is not counted.
        (expecting(500), false, 100),
        (expecting(500).replace("Host: a", &format!("Host: a\r\nX: {}", "x".repeat(5000))), false, 503),
    ];
    for (request, makes_way, status) in rows {
        let harness = harness();
        let held = [(); 2].map(|()| sent(&harness, expecting(60_000)));
        let [mut first, mut second] = held;
        assert_eq!((first.answer().status, second.answer().status), (100, 100));
        let worker = (!makes_way).then(|| harness.budget.reserve_unchecked(20 * KIB));
        if makes_way {
            pause(Duration::from_millis(1100));
        }
        let mut client = sent(&harness, &request);
        assert_eq!(client.answer().status, status, "{request}");
        if makes_way {
            is_refused(first);
        }
        if status == 503 {
            assert!(client.ends());
            continue;
        }
        let is_chunked = request.contains("chunked");
        let length = if is_chunked || makes_way { 60_000 } else { 500 };
        let body = "x".repeat(length);
        let body = if is_chunked { format!("ea60\r\n{body}\r\n0\r\n\r\n") } else { body };
        assert_eq!(client.send(body).answer().json()["body"].as_str().map(str::len), Some(length));
        drop(worker);
        assert_eq!(second.send("x".repeat(60_000)).answer().status, 200);
    }
}

/// Checks that a client that has sent a part of its body gets no 100.
#[test]
fn a_client_that_has_not_waited_is_not_told_to_go_on() {
    let harness = harness();
    let _held = [(); 2].map(|()| sent(&harness, post(60_000) + "x"));
    pause(Duration::from_millis(1100));
    let mut client = sent(&harness, expecting(60_000) + &"x".repeat(30_000));
    assert_eq!(client.send("x".repeat(30_000)).answer().status, 200);
}

#[test]
fn heads_are_counted_as_bodies_are() {
    let harness = harness();
    let head = format!("GET /x HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(15_000));
    let mut held: Vec<_> = (0..8).map(|_| harness.connect()).collect();
    for client in &mut held {
        client.send(&head);
    }
    harness.barrier();
    assert!((120_000..128 * KIB).contains(&harness.budget.held_bytes()), "{}", harness.budget.held_bytes());
    is_refused(sent(&harness, &head));
    is_refused(sent(&harness, post(60_000) + "x"));
    // Refuses no head of the usual length.
    assert_eq!(sent(&harness, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n").answer().status, 200);
    for client in &mut held {
        assert_eq!(client.send("\r\n\r\n").answer().status, 200);
    }
    until(|| (harness.budget.held_bytes() == 0).then_some(()));
}

/// Checks that a complete request without memory is refused, reaches no worker, and closes no other connection.
#[test]
fn a_whole_request_without_memory_is_refused() {
    let harness = harness();
    let _held = [sent(&harness, post(60_000) + "x"), sent(&harness, post(60_000) + "x")];
    let seen = harness.gate.seen.load(Ordering::SeqCst);
    is_refused(sent(&harness, post(15_000) + &"y".repeat(15_000)));
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), seen);
    assert_eq!(sent(&harness, post(500) + &"y".repeat(500)).answer().status, 200);
}

/// Checks that an incomplete body that has stalled for a second is given up even for a request of its own address.
#[test]
fn the_oldest_incomplete_body_makes_way() {
    let harness = harness();
    let mut first = sent(&harness, post(60_000) + "x");
    let mut second = sent(&harness, post(60_000) + "x");
    pause(Duration::from_millis(1100));
    let mut third = sent(&harness, post(60_000) + "x");
    let answer = first.answer();
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    for client in [&mut second, &mut third] {
        assert_eq!(client.send("x".repeat(59_999)).answer().status, 200);
    }
}

#[test]
fn pipelined_requests_without_memory_are_not_begun() {
    let harness = harness();
    let head = format!("GET /x HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(15_000));
    let mut held: Vec<_> = (0..8).map(|_| harness.connect()).collect();
    for client in &mut held {
        client.send(&head);
    }
    harness.barrier();
    let get = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut client = sent(&harness, get.repeat(500));
    let answer = client.answer();
    assert_eq!((answer.status, answer.closes()), (200, true));
    assert!(client.ends());
}

#[test]
fn answers_that_do_not_move_are_given_up_for_their_memory() {
    let harness = harness();
    let address = harness.address.unwrap();
    let big = |host, length: usize| {
        let mut client = connect_from(host, address).unwrap();
        client.send(format!("GET /big/{length} HTTP/1.1\r\nHost: a\r\n\r\n"));
        client
    };
    let mut larger = big(2, 4_000_000);
    let mut smaller = big(3, 1_000_000);
    until(|| (harness.gate.answered.load(Ordering::SeqCst) == 2).then_some(()));
    assert!(harness.budget.held_bytes() > 4_500_000, "{}", harness.budget.held_bytes());
    // Closes the connection of the address that holds the most first. Reports a shortage only while that connection is
    // there, and seldom: a frontend that is late on a busy machine must not close the other one for a second report.
    let mut reported = Instant::now();
    until(|| {
        if reported.elapsed() > Duration::from_secs(3) {
            harness.slots.ask_for_memory();
            reported = Instant::now();
        }
        (harness.budget.held_bytes() < 2_000_000).then_some(())
    });
    assert!(harness.budget.held_bytes() > 500_000);
    let mut bytes = Vec::new();
    let _ = std::io::Read::read_to_end(&mut larger.stream, &mut bytes);
    assert!(bytes.len() < 4_000_000);
    assert_eq!(smaller.answer().body.len(), 1_000_000);
    until(|| (harness.budget.held_bytes() == 0).then_some(()));
}

/// Checks that no memory stays counted. Clients of few slots send complete bodies, for which there is hardly memory,
/// and reset their connections, so that requests are given up while older tickets of their slots are claimed.
#[test]
fn bodies_whose_clients_reset_confuse_no_request() {
    let harness = Harness::with(|limits| {
        limits.memory_budget = 150 * KIB;
        limits.max_connections = 6;
    });
    let address = harness.address.unwrap();
    let end = Instant::now() + Duration::from_secs(4);
    let flood = |host: u8| {
        while Instant::now() < end {
            let Ok(mut client) = connect_from(host, address) else { continue };
            client.send(post(20_000) + &"x".repeat(20_000));
            SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
            pause(Duration::from_micros(u64::from(host) * 150));
        }
    };
    thread::scope(|scope| (2..6).for_each(|host| drop(scope.spawn(move || flood(host)))));
    let get = "GET /x HTTP/1.1\r\nHost: a\r\n\r\n";
    until(|| (harness.connect().send(get).answer().status == 200).then_some(()));
    until(|| (harness.budget.held_bytes() == 0).then_some(()));
    assert_eq!(harness.gate.broken.load(Ordering::SeqCst), 0);
}
