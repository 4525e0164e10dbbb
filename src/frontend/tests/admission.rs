//! Tests of admission: one address opens many connections, and another address opens some.

use super::*;
use crate::config::TrustedProxies;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize},
};
use std::{net::SocketAddr, thread};

/// The address that takes all connections or memory, and the address of another client.
const GREEDY: u8 = 2;
const OTHER: u8 = 3;

/// Clients of one address. Each connects again as soon as its connection ends, until this value is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    /// The number of connections that were opened.
    opened: Arc<AtomicUsize>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Flood {
    fn start(address: SocketAddr, count: usize, bytes: &str) -> Flood {
        let (stop, opened) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, counter, bytes) = (Arc::clone(&stop), Arc::clone(&opened), bytes.to_owned());
        let open = move || {
            let client = connect_from(GREEDY, address).ok()?;
            let mut stream = client.stream;
            let _ = stream.write_all(bytes.as_bytes());
            counter.fetch_add(1, Ordering::SeqCst);
            Some(stream)
        };
        let thread = thread::spawn(move || {
            let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
            while !stopped.load(Ordering::SeqCst) {
                for stream in &mut streams {
                    // Peeks at the answer, which stays unread.
                    let ended = stream.as_ref().is_none_or(has_ended);
                    if ended {
                        *stream = open();
                    }
                }
            }
        });
        Flood { stop, opened, thread: Some(thread) }
    }
}

/// Returns true if the server has closed the connection or refused its request.
fn has_ended(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let mut start = [0; 12];
    let ended = match stream.peek(&mut start) {
        Ok(0) => true,
        Ok(count) => start[..count].starts_with(b"HTTP/1.1 4") || start[..count].starts_with(b"HTTP/1.1 5"),
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    stream.set_nonblocking(false).unwrap();
    ended
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = self.thread.take().unwrap().join();
    }
}

/// The most connections of the frontend, and the connections that one address opens.
const CAPACITY: usize = 128;
const FLOOD: usize = 192;

/// Checks that all requests of another address are answered while one address opens more connections than there may
/// be.
fn others_are_answered(bytes: &str) {
    let harness = Harness::with(|limits| limits.max_connections = CAPACITY);
    let address = harness.address.unwrap();
    let flood = Flood::start(address, FLOOD, bytes);
    until(|| (flood.opened.load(Ordering::SeqCst) >= FLOOD).then_some(()));
    for round in 0..20 {
        let mut client = connect_from(OTHER, address).unwrap();
        let answer = client.send(GET).answer();
        assert_eq!(answer.status, 200, "{round} of {bytes:.40}");
    }
    drop(flood);
    assert_eq!(harness.connect().send(GET).answer().status, 200);
}

#[test]
fn idle_connections_of_one_address_shut_out_no_other() {
    others_are_answered("");
}

#[test]
fn single_bytes_of_one_address_shut_out_no_other() {
    others_are_answered("G");
}

#[test]
fn half_heads_of_one_address_shut_out_no_other() {
    others_are_answered("GET / HTTP/1.1\r\nHost: a");
}

#[test]
fn half_bodies_of_one_address_shut_out_no_other() {
    others_are_answered(&(post(1000) + "half"));
}

#[test]
fn answers_of_one_address_that_are_not_read_shut_out_no_other() {
    // Sends a larger answer than the kernels hold of it, which is 90 kB.
    others_are_answered("GET /big/120000 HTTP/1.1\r\nHost: a\r\n\r\n");
}

/// Checks that a client that sends head and body in two segments has memory for its body, although another client has
/// reserved all of it.
#[test]
fn bodies_of_one_address_that_never_end_shut_out_no_other() {
    let harness = Harness::with(|limits| limits.memory_budget = 4 << 20);
    let address = harness.address.unwrap();
    let flood = Flood::start(address, 80, &(post(65_000) + "half"));
    until(|| (flood.opened.load(Ordering::SeqCst) >= 80).then_some(()));
    for round in 0..20 {
        let mut client = connect_from(OTHER, address).unwrap();
        client.send(post(60_000));
        pause(Duration::from_millis(2));
        let answer = client.send("x".repeat(60_000)).answer();
        assert_eq!(answer.status, 200, "{round}");
        assert_eq!(answer.json()["body"].as_str().unwrap().len(), 60_000);
    }
    drop(flood);
}

/// Checks that bodies count for the client that a head names behind a trusted proxy, and for the proxy if it names
/// none. Each row has the fields of the requests of the flood.
#[test]
fn bodies_of_one_client_behind_a_proxy_shut_out_no_other() {
    for fields in ["X-Forwarded-For: 192.0.2.7\r\n", ""] {
        let harness = Harness::with(|limits| {
            limits.memory_budget = 4 << 20;
            limits.trusted_proxies = format!("127.0.0.{GREEDY}").parse().unwrap();
        });
        let address = harness.address.unwrap();
        let half = post(65_000).replace("Host", &format!("{fields}Host")) + "half";
        // Leaves the connections of the proxy open between requests.
        let mut idle = clients(&harness, GREEDY, 3, GET);
        idle.iter_mut().for_each(|client| assert_eq!(client.answer().status, 200));
        let flood = Flood::start(address, 80, &half);
        until(|| (flood.opened.load(Ordering::SeqCst) >= 80).then_some(()));
        for round in 0..20 {
            let mut client = connect_from(GREEDY, address).unwrap();
            client.send(post(60_000).replace("Host", "X-Forwarded-For: 192.0.2.8\r\nHost"));
            pause(Duration::from_millis(2));
            let answer = client.send("x".repeat(60_000)).answer();
            assert_eq!(answer.status, 200, "{round} {fields}");
        }
        drop(flood);
        idle.iter_mut().for_each(|client| assert_eq!(client.send(GET).answer().status, 200));
    }
}

/// Checks that a request that no worker has begun to execute is refused for a client of another address.
#[test]
fn queued_requests_make_way_and_those_that_are_executed_do_not() {
    let harness = Harness::with(|limits| limits.max_connections = 8);
    // Occupies all four workers of the harness.
    let mut greedy = clients(&harness, GREEDY, 8, "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    until(|| (harness.gate.held.load(Ordering::SeqCst) == 4).then_some(()));
    let at_once = "GET /immediate HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut others: Vec<_> = (0..6).flat_map(|_| clients(&harness, OTHER, 1, at_once)).collect();
    let statuses: Vec<u16> = others.iter_mut().map(|client| client.answer().status).collect();
    assert_eq!(statuses, [200; 6], "the last ones at the cost of idle ones of their own peer");
    harness.release();
    let mut statuses: Vec<u16> = greedy.iter_mut().map(|client| client.answer().status).collect();
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 503, 503, 503, 503]);
    until(|| (harness.gate.late.load(Ordering::SeqCst) == 4).then_some(()));
}

/// Connects `count` clients of an address, each of which sends these bytes.
fn clients(harness: &Harness, host: u8, count: usize, bytes: &str) -> Vec<Client<TcpStream>> {
    let open = |_| {
        let mut client = connect_from(host, harness.address.unwrap()).unwrap();
        client.send(bytes);
        client
    };
    (0..count).map(open).collect()
}

#[test]
fn a_peer_makes_room_only_until_it_holds_no_more_than_others() {
    let harness = Harness::with(|limits| limits.max_connections = 6);
    let mut greedy = clients(&harness, GREEDY, 6, "GET / HT");
    harness.barrier();
    // Closes the oldest connections of the greedy address first, with an answer 503.
    let mut others = clients(&harness, OTHER, 3, "GET / HT");
    for client in &mut greedy[..3] {
        assert_eq!(client.answer().status, 503);
        assert!(client.ends());
    }
    // Closes no connection once both addresses hold the same number.
    for host in [OTHER, GREEDY] {
        let mut client = connect_from(host, harness.address.unwrap()).unwrap();
        assert_eq!(client.send(GET).answer().status, 503);
        assert!(client.ends());
    }
    for client in greedy[3..].iter_mut().chain(&mut others) {
        assert_eq!(client.send("TP/1.1\r\nHost: a\r\n\r\n").answer().status, 200);
    }
    // Closes connections for a third address.
    let mut third = connect_from(4, harness.address.unwrap()).unwrap();
    assert_eq!(third.send(GET).answer().status, 200);
}

#[test]
fn idle_connections_go_before_incomplete_requests_and_those_before_stalled_answers() {
    let harness = Harness::with(|limits| limits.max_connections = 6);
    let big = "GET /big/8000000 HTTP/1.1\r\nHost: a\r\n\r\n";
    let stalled: [_; 2] = clients(&harness, GREEDY, 2, big).try_into().ok().unwrap();
    until(|| (harness.gate.answered.load(Ordering::SeqCst) == 2).then_some(()));
    let mut half = clients(&harness, GREEDY, 2, "GET / HT");
    // Waits for each request, because two workers may answer two requests in either order.
    let mut idle = [(); 2].map(|()| {
        let mut client = connect_from(GREEDY, harness.address.unwrap()).unwrap();
        assert_eq!(client.send(GET).answer().status, 200);
        client
    });
    let mut others = Vec::new();
    let mut other = || {
        let mut client = connect_from(OTHER + others.len() as u8, harness.address.unwrap()).unwrap();
        assert_eq!(client.send(GET).answer().status, 200);
        others.push(client);
    };
    other();
    assert!(idle[0].ends());
    other();
    assert!(idle[1].ends());
    other();
    assert_eq!(half[0].answer().status, 503);
    other();
    assert_eq!(half[1].answer().status, 503);
    other();
    // Cuts off the stalled answer that has not moved for longer; the other one arrives when it is read.
    let mut lengths = stalled.map(|mut client| {
        let mut bytes = Vec::new();
        let _ = client.finish().stream.read_to_end(&mut bytes);
        assert!(bytes.starts_with(b"HTTP/1.1 200 "));
        let head = memchr::memmem::find(&bytes, b"\r\n\r\n").unwrap() + 4;
        bytes.len() - head
    });
    lengths.sort_unstable();
    assert!(lengths[0] < 8_000_000, "{lengths:?}");
    assert_eq!(lengths[1], 8_000_000);
}

#[test]
fn connections_of_trusted_proxies_make_no_room() {
    let proxies: TrustedProxies = format!("127.0.0.{GREEDY}").parse().unwrap();
    let harness = Harness::with(|limits| {
        limits.max_connections = 4;
        limits.trusted_proxies = proxies;
    });
    let mut proxy = clients(&harness, GREEDY, 3, GET);
    for client in &mut proxy {
        assert_eq!(client.answer().status, 200);
    }
    let mut one = clients(&harness, OTHER, 1, "GET / HT");
    harness.barrier_from(GREEDY);
    // Refuses a further client: the only other address holds a single connection.
    let mut two = connect_from(OTHER + 1, harness.address.unwrap()).unwrap();
    assert_eq!(two.send(GET).answer().status, 503);
    for client in &mut proxy {
        assert_eq!(client.send(GET).answer().status, 200);
    }
    assert_eq!(one[0].send("TP/1.1\r\nHost: a\r\n\r\n").answer().status, 200);
}

#[test]
fn the_client_s_address_reaches_the_workers() {
    let harness = Harness::with(|limits| limits.trusted_proxies = "127.0.0.2".parse().unwrap());
    let request = "GET /peer HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 6.6.6.6, 192.0.2.7\r\n\r\n";
    let peer_of = |host, request: &str| {
        let mut client = connect_from(host, harness.address.unwrap()).unwrap();
        client.send(request).answer().json()["peer"].as_str().map(str::to_owned)
    };
    assert_eq!(peer_of(GREEDY, request).as_deref(), Some("192.0.2.7"));
    assert_eq!(peer_of(OTHER, request).as_deref(), Some("127.0.0.3"), "not a proxy that is trusted");
    assert_eq!(peer_of(GREEDY, "GET /peer HTTP/1.1\r\nHost: a\r\n\r\n").as_deref(), Some("127.0.0.2"));
}
