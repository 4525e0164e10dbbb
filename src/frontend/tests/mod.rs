//! Tests of the frontend through raw bytes over real sockets, with a real tiny_http behind it.

mod admission;
mod harness;
mod memory;
mod private_stream;

use crate::frontend::{Frontend, Listener, SharedResources, listener::tests::failure};
use crate::{budget::MemoryBudget, config::Limits, metrics::Metrics};
use harness::*;
use socket2::SockRef;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::{fs::PermissionsExt, net::UnixStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const GET: &str = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const HOLD: &str = "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n";
const SHORT: Duration = Duration::from_millis(150);

fn post(length: usize) -> String {
    format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n")
}

#[test]
fn requests_reach_the_workers_and_answers_their_clients() {
    let harness = Harness::new();
    let rows = [
        (
            "GET /a?b HTTP/1.1\r\nHost: a\r\n\r\n",
            r#"{"body":"","fields":[["Host","a"]],"method":"GET","target":"/a?b"}"#,
        ),
        (
            "PUT /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nhi",
            r#"{"body":"hi","fields":[["Host","a"],["Content-Length","2"],["Content-Type","text/plain"]],"method":"PUT","target":"/x"}"#,
        ),
        (
            "POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\nT: x\r\n\r\n",
            r#"{"body":"abc","fields":[["Host","a"],["Transfer-Encoding","chunked"]],"method":"POST","target":"/x"}"#,
        ),
        (
            "DELETE http://b/y HTTP/1.1\r\nHost: a\r\nOrigin: http://o\r\n\r\n",
            r#"{"body":"","fields":[["Host","b"],["Host","a"],["Origin","http://o"]],"method":"DELETE","target":"/y"}"#,
        ),
        (
            "odd-method * HTTP/1.1\r\nHost: a\r\n\r\n",
            r#"{"error":"Bad request","message":"the request target is malformed"}"#,
        ),
        (
            "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
            r#"{"body":"","fields":[["Host","a"]],"method":"OPTIONS","target":"*"}"#,
        ),
        (
            "odd-method / HTTP/1.1\r\nHost: a\r\n\r\n",
            r#"{"body":"","fields":[["Host","a"]],"method":"odd-method","target":"/"}"#,
        ),
    ];
    let mut client = harness.connect();
    for (request, expected) in rows {
        let answer = client.send(request).answer();
        assert_eq!(String::from_utf8(answer.body.clone()).unwrap(), format!("{expected}\n"));
        if answer.closes() {
            client = harness.connect();
        }
    }
    let long = vec![b'z'; 60_000];
    let answer = client.send(post(long.len())).send(&long).answer();
    assert_eq!(answer.json()["body"].as_str().unwrap().as_bytes(), long);
}

/// Checks that `/immediate` is answered although every worker is blocked, in its order among other requests.
#[test]
fn what_is_answered_at_once_needs_no_worker() {
    let harness = Harness::new();
    let mut holding: Vec<_> = (0..4).map(|_| harness.connect()).collect();
    for client in &mut holding {
        client.send(HOLD);
    }
    until(|| (harness.gate.held.load(Ordering::SeqCst) == 4).then_some(()));
    let seen = harness.gate.seen.load(Ordering::SeqCst);
    let immediate = GET.replace("/ ", "/immediate ");
    let mut client = harness.connect();
    assert_eq!(client.send(&immediate).answer().json()["at"], "once");
    assert_eq!(
        client.send(immediate.replace("GET", "HEAD")).head_answer().header("Content-Length"),
        Some("14")
    );
    assert_eq!(client.send(immediate.replace("te ", "te?x=y ")).answer().status, 200);
    let posted = post(3).replace("/ ", "/immediate ") + "abc";
    assert_eq!(client.send(posted.repeat(2)).answer().status, 200);
    assert_eq!(client.answer().status, 200);
    let named = immediate.replace("Host", "X-Request-Id: mine\r\nHost");
    assert_eq!(client.send(named).answer().header("X-Request-Id"), Some("mine"));
    let closing = immediate.replace("Host", "Connection: close\r\nHost");
    assert!(client.send(closing).answer().closes() && client.ends());
    // Sends a second request behind one that waits.
    holding[0].send(&immediate).send(GET);
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), seen);
    harness.release();
    assert_eq!(holding[0].answer().json()["held"], true);
    assert_eq!(holding[0].answer().json()["at"], "once");
    assert_eq!(holding[0].answer().json()["target"], "/");
}

#[test]
fn refusals_are_answered_and_end_the_connection() {
    let harness = Harness::new();
    let long = "x".repeat(20_000);
    let rows = [
        ("GET / HTTP/1.1\nHost: a\n\n".to_owned(), 400),
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), 400),
        (format!("{}Transfer-Encoding: chunked\r\n\r\n", post(3).trim_end_matches("\r\n")), 400),
        (post(3).replace("3", "3\r\nTransfer-Encoding: chunked"), 400),
        (post(3).replace("3", "+3"), 400),
        (post(3).replace("3", "3\r\nContent-Length: 3"), 400),
        ("\u{16}\u{3}\u{1}hello, TLS".to_owned(), 400),
        (post(65_537), 413),
        (post(99_999_999_999), 413),
        (post(65_537).replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n"), 413),
        (format!("GET /{long}"), 414),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nX: {long}"), 431),
        (format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(100)), 431),
        (GET.replace("Host", "Expect: 200-ok\r\nHost"), 417),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), 505),
        (GET.replace("1.1", "3.0"), 505),
    ];
    for (request, status) in rows {
        let mut client = harness.connect();
        // Sends a valid request first, in the same write.
        client.send(format!("{GET}{request}"));
        assert_eq!(client.answer().status, 200);
        let answer = client.answer();
        assert_eq!(answer.status, status, "{request:.100}");
        assert!(answer.closes());
        assert!(client.ends(), "{request:.100}");
    }
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 16);
}

#[test]
fn a_refusal_can_be_read_while_the_client_is_still_sending() {
    let harness = Harness::new();
    for _ in 0..20 {
        let mut client = harness.connect();
        client.stream.write_all(post(6 << 20).as_bytes()).unwrap();
        client.stream.write_all(&vec![0; 6 << 20]).unwrap();
        assert_eq!(client.answer().status, 413);
        assert!(client.ends());
    }
}

#[test]
fn lingering_has_an_end() {
    let harness = Harness::new();
    let mut client = harness.connect();
    assert_eq!(client.send(post(1 << 30)).answer().status, 413);
    assert!(client.ends());
    let start = Instant::now();
    let piece = vec![0; 1 << 16];
    let error = loop {
        if let Err(error) = client.stream.write_all(&piece) {
            break error.kind();
        }
        assert!(start.elapsed() < TIMEOUT);
    };
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    assert!(matches!(error, BrokenPipe | ConnectionReset), "{error:?}");
}

#[test]
fn limits_at_their_edge() {
    let harness = Harness::new();
    let head = |count: usize| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(count - 32));
    let line = |count: usize| GET.replace("/ ", &format!("/{} ", "x".repeat(count - 14)));
    let fields = |count: usize| GET.replace("Host", &format!("{}Host", "A: b\r\n".repeat(count - 1)));
    let body = |count: usize| post(count) + &"x".repeat(count);
    type Make<'a> = &'a dyn Fn(usize) -> String;
    let rows: [(Make, usize, u16); 4] =
        [(&head, 16 * 1024, 431), (&line, 8 * 1024, 414), (&fields, 100, 431), (&body, 64 * 1024, 413)];
    for (make, edge, status) in rows {
        assert_eq!(harness.connect().send(make(edge)).answer().status, 200, "{status}");
        assert_eq!(harness.connect().send(make(edge + 1)).answer().status, status);
    }
}

#[test]
fn continue_is_said_only_when_the_body_will_be_read() {
    let harness = Harness::new();
    let expecting = |n| post(n).replace("\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n");
    let mut client = harness.connect();
    assert_eq!(client.send(expecting(2)).answer().status, 100);
    assert_eq!(client.send("hi").answer().json()["body"], "hi");
    let answer = client.send(expecting(2) + "hi").answer();
    assert_eq!(answer.status, 200, "it was there already");
    assert_eq!(client.send(expecting(0)).answer().status, 200);
    let mut old = harness.connect();
    old.send(expecting(2).replace("1.1", "1.0"));
    assert_eq!(old.send("hi").answer().status, 200);
}

#[test]
fn persistence_and_head() {
    let harness = Harness::new();
    let rows = [
        ("1.1", "", Some("keep-alive"), false),
        ("1.1", "Connection: close\r\n", Some("close"), true),
        ("1.0", "", Some("close"), true),
        ("1.0", "Connection: keep-alive\r\n", Some("keep-alive"), false),
    ];
    for (version, field, connection, ends) in rows {
        let mut client = harness.connect();
        client.send(format!("GET / HTTP/{version}\r\nHost: a\r\n{field}\r\n"));
        let answer = client.answer();
        assert_eq!(answer.header("connection"), connection);
        assert_eq!(answer.header("keep-alive"), (!ends).then_some("timeout=74"));
        if ends {
            assert!(client.ends());
        } else {
            assert_eq!(client.send(GET).answer().status, 200);
        }
    }
    let mut client = harness.connect();
    let answer = client.send(GET.replace("GET", "HEAD")).head_answer();
    assert!(answer.header("content-length").unwrap().parse::<u32>().unwrap() > 10);
    client.send("GET /empty HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.answer().status, 204);
    assert_eq!(client.send(GET).answer().status, 200);
}

#[test]
fn refusals_of_head_requests_have_no_body() {
    let harness = Harness::with(|limits| limits.body_timeout = SHORT);
    let rows = [
        ("Content-Length: 99999999\r\n", 413),
        ("Expect: x\r\n", 417),
        ("Host: b\r\n", 400),
        ("Content-Length: 3\r\n", 408),
    ];
    for (field, status) in rows {
        let mut client = harness.connect();
        let answer =
            client.send(GET.replace("GET", "HEAD").replace("Host", &format!("{field}Host"))).head_answer();
        assert_eq!(answer.status, status, "{field}");
        assert!(client.ends(), "{field}");
    }
    // Sends a request that does not depend on the last one.
    let harness = Harness::with(|limits| limits.head_timeout = SHORT);
    let mut client = harness.connect();
    assert_eq!(client.send(GET.replace("GET", "HEAD")).head_answer().status, 200);
    assert_eq!(client.send("GET /use").answer().json()["error"], "Request timeout");
}

#[test]
fn the_end_of_sending_is_not_the_end_of_listening() {
    let harness = Harness::new();
    // Ends sending together with the request, and while the request is in work.
    let mut client = harness.connect();
    client.send(format!("{GET}{GET}")).finish();
    assert_eq!([client.answer().status, client.answer().status], [200, 200]);
    assert!(client.ends());
    let mut client = harness.connect();
    client.send(HOLD);
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 3).then_some(()));
    client.finish();
    harness.barrier();
    harness.release();
    assert_eq!(client.answer().status, 200);
    assert!(client.ends());
    // Ends the connection after half a request.
    let mut client = harness.connect();
    assert!(client.send("GET / HT").finish().ends());
    let mut client = harness.connect();
    assert!(client.send(post(3) + "ab").finish().ends());
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let harness = Harness::new();
    let mut client = harness.connect();
    let mut writer = client.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        for i in 0..5_000 {
            write!(writer, "POST /{i} HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc").unwrap();
            if i % 3 == 0 {
                write!(writer, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            }
        }
    });
    for i in 0..5_000 {
        assert_eq!(client.answer().json()["target"], format!("/{i}"));
        if i % 3 == 0 {
            assert_eq!(client.answer().json()["target"], "/x");
        }
    }
    sender.join().unwrap();
}

#[test]
fn the_same_answers_whatever_the_splits() {
    let harness = Harness::new();
    let stream = format!(
        "{GET}\r\n{}abc{GET}POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n\
         2;x\r\nhi\r\n0\r\nA: b\r\n\r\n{}{}",
        post(3),
        GET.replace("GET", "PUT"),
        GET.replace("Host", "Connection: close\r\nHost"),
    );
    let answers = |pieces: &[usize]| {
        let mut client = harness.connect();
        let mut at = 0;
        for &piece in pieces {
            let end = (at + piece).min(stream.len());
            client.send(&stream[at..end]);
            at = end;
            if pieces.len() < 50 {
                pause(Duration::from_millis(1));
            }
        }
        client.send(&stream[at..]);
        let bodies: Vec<_> = std::iter::from_fn(|| client.try_answer(false).map(|a| a.body)).collect();
        assert_eq!(bodies.len(), 6);
        bodies
    };
    let expected = answers(&[]);
    let mut seed = 12345u64;
    for _ in 0..60 {
        let pieces: Vec<usize> = (0..20)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                1 + (seed >> 33) as usize % 40
            })
            .collect();
        assert_eq!(answers(&pieces), expected, "{pieces:?}");
    }
    assert_eq!(answers(&vec![1; stream.len()]), expected);
}

#[test]
fn a_flood_does_not_starve_others() {
    let harness = Harness::new();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let floods: Vec<_> = (0..4)
        .map(|_| {
            let mut stream = harness.connect().stream;
            let mut reader = stream.try_clone().unwrap();
            let stop = stop.clone();
            let sender = std::thread::spawn(move || {
                let piece = GET.repeat(500);
                while stream.write_all(piece.as_bytes()).is_ok() {}
            });
            let receiver = std::thread::spawn(move || {
                let mut bytes = vec![0; 1 << 16];
                while !stop.load(Ordering::Relaxed) && reader.read(&mut bytes).is_ok_and(|n| n > 0) {}
                let _ = reader.shutdown(std::net::Shutdown::Both);
            });
            (sender, receiver)
        })
        .collect();
    let mut client = harness.connect();
    for _ in 0..200 {
        assert_eq!(client.send(GET).answer().status, 200);
    }
    stop.store(true, Ordering::Relaxed);
    for (sender, receiver) in floods {
        receiver.join().unwrap();
        sender.join().unwrap();
    }
}

#[test]
fn clients_that_do_not_come_back_hold_up_no_request() {
    let harness = Harness::new();
    let mut client = harness.connect();
    for round in 0..50 {
        harness.slots.expect_requests(16);
        assert_eq!(client.send(GET).answer().status, 200, "{round}");
    }
    // Each client that comes back is answered, too.
    let mut clients: Vec<_> = (0..8).map(|_| harness.connect()).collect();
    for round in 0..50 {
        harness.slots.expect_requests(clients.len());
        clients.iter_mut().for_each(|client| _ = client.send(GET));
        clients.iter_mut().for_each(|client| assert_eq!(client.answer().status, 200, "{round}"));
    }
}

#[test]
fn large_answers_to_slow_readers_hold_no_worker() {
    // Waits until all of them were read.
    let limits = Limits { write_timeout: 3 * TIMEOUT, ..Limits::default() };
    let harness = Harness::start(Listener::bind("127.0.0.1", 0).unwrap(), &limits, 1);
    let mut slow: Vec<_> = (0..10).map(|_| harness.connect()).collect();
    for client in &mut slow {
        client.send(format!("GET /big/8000000 HTTP/1.1\r\nHost: a\r\n\r\n{GET}"));
    }
    // Shows that the only worker is free.
    assert_eq!(harness.connect().send(GET).answer().status, 200);
    for client in &mut slow {
        assert_eq!(client.answer().body.len(), 8_000_000);
        assert_eq!(client.answer().status, 200, "the pipelined one");
        assert_eq!(client.send(GET).answer().status, 200);
    }
    let mut closing = harness.connect();
    closing.send("GET /big/8000000 HTTP/1.0\r\n\r\n");
    assert_eq!(closing.answer().body.len(), 8_000_000);
    assert!(closing.ends());
}

#[test]
fn clients_that_vanish_disturb_nothing() {
    let harness = Harness::new();
    for i in 0..300 {
        let mut client = harness.connect();
        match i % 6 {
            0 => drop(client.send("GET / HT")),
            1 => drop(client.send(post(100) + "abc")),
            2 => drop(client.send(HOLD)),
            3 => drop(client.send("GET /big/8000000 HTTP/1.1\r\nHost: a\r\n\r\n")),
            4 => drop(client.send(GET)),
            _ => drop(client.send(GET.repeat(50))),
        }
        if i % 2 == 0 {
            // Ends the connection with a reset.
            SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
        drop(client);
        if i == 10 {
            harness.release();
        }
    }
    harness.release();
    assert_eq!(harness.connect().send(GET).answer().status, 200);
}

#[test]
fn requests_of_a_client_that_has_reset_its_connection_are_dropped() {
    let harness = Harness::start(Listener::bind("127.0.0.1", 0).unwrap(), &Limits::default(), 1);
    let mut holding = harness.connect();
    holding.send(HOLD);
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 1).then_some(()));
    let mut gone: Vec<_> = (0..100).map(|_| harness.connect()).collect();
    for client in &mut gone {
        client.send(GET);
        SockRef::from(&client.stream).set_linger(Some(Duration::ZERO)).unwrap();
    }
    harness.barrier();
    drop(gone);
    harness.barrier();
    harness.release();
    assert_eq!(holding.answer().status, 200);
    // Drops the answers to requests that were claimed before the reset; the other requests are never claimed.
    assert_eq!(harness.connect().send(GET).answer().status, 200);
    until(|| (harness.gate.answered.load(Ordering::SeqCst) == 2).then_some(()));
    let (seen, late) = (&harness.gate.seen, &harness.gate.late);
    until(|| (seen.load(Ordering::SeqCst) == late.load(Ordering::SeqCst) + 2).then_some(()));
}

/// Sends bytes now and then, until there is an answer.
fn insist(client: &mut Client<TcpStream>, more: &str) {
    client.stream.set_read_timeout(Some(SHORT / 6)).unwrap();
    until(|| {
        client.send(more);
        client.stream.peek(&mut [0]).ok()
    });
    client.stream.set_read_timeout(Some(TIMEOUT)).unwrap();
}

#[test]
fn heads_have_a_deadline_that_no_byte_extends() {
    let harness = Harness::with(|limits| limits.head_timeout = SHORT);
    // The first bytes, and the bytes that are sent again and again.
    let rows = [
        ("G", ""),
        ("\r\n", ""),
        ("\r\n\r\nGET /", "a"),
        ("GET / HTTP/1.1\r\n", "A: b\r\n"),
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET", ""),
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /", "a"),
    ];
    for (beginning, more) in rows {
        let mut client = harness.connect();
        let start = Instant::now();
        client.send(beginning);
        insist(&mut client, more);
        let mut answer = client.answer();
        if answer.status == 200 {
            insist(&mut client, more);
            answer = client.answer();
        }
        assert_eq!(answer.status, 408, "{beginning} {more}");
        assert!(client.ends());
        assert!(start.elapsed() >= SHORT, "{:?}", start.elapsed());
    }
}

#[test]
fn bodies_have_a_deadline_that_no_byte_extends() {
    let harness = Harness::with(|limits| limits.body_timeout = SHORT);
    let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned();
    for head in [post(60_000), chunked + "1\r\n1\r\nea60\r\n"] {
        let mut client = harness.connect();
        let start = Instant::now();
        client.send(head);
        insist(&mut client, "1");
        assert_eq!(client.answer().status, 408);
        assert!(client.ends());
        assert!(start.elapsed() >= SHORT, "{:?}", start.elapsed());
    }
}

#[test]
fn idle_connections_have_a_deadline() {
    const IDLE: Duration = Duration::from_secs(1);
    let harness = Harness::with(|limits| limits.idle_timeout = IDLE);
    for send in ["", GET] {
        // Takes the time before the client connects, because its deadline counts from its admission.
        let start = Instant::now();
        let mut client = harness.connect();
        if !send.is_empty() {
            assert_eq!(client.send(send).answer().status, 200);
        }
        assert!(client.ends(), "without a word");
        assert!(start.elapsed() >= IDLE, "{:?}", start.elapsed());
    }
    // Closes no connection with a request now and then.
    let mut client = harness.connect();
    for _ in 0..10 {
        assert_eq!(client.send(GET).answer().status, 200);
        pause(IDLE / 7);
    }
}

#[test]
fn answers_have_a_deadline() {
    let harness = Harness::with(|limits| limits.write_timeout = SHORT);
    let mut client = harness.connect();
    client.send("GET /big/20000000 HTTP/1.1\r\nHost: a\r\n\r\n");
    until(|| (harness.gate.answered.load(Ordering::SeqCst) == 1).then_some(()));
    pause(SHORT * 4);
    // Lets a connection in after the deadline, and reads it after the late ones were ended.
    harness.barrier();
    // Reads the bytes that the kernel had taken, then the end of the connection.
    let mut bytes = Vec::new();
    let _ = client.stream.read_to_end(&mut bytes);
    assert!(bytes.len() < 20_000_000);
}

#[test]
fn requests_have_a_deadline_even_if_every_worker_is_stuck() {
    const DEADLINE: Duration = Duration::from_secs(1);
    let harness = Harness::with(|limits| limits.request_timeout = DEADLINE);
    let start = Instant::now();
    let mut clients: Vec<_> = (0..20).map(|_| harness.connect()).collect();
    let (first, others) = clients.split_at_mut(4);
    for client in first {
        client.send(format!("{HOLD}{GET}"));
    }
    until(|| (harness.gate.held.load(Ordering::SeqCst) == 4).then_some(()));
    for client in others {
        client.send(format!("{HOLD}{GET}"));
    }
    for client in &mut clients {
        let answer = client.answer();
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(answer.closes());
        assert!(client.ends(), "nothing else, and no late answer");
    }
    assert!(start.elapsed() >= DEADLINE, "{:?}", start.elapsed());
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 4);
    harness.release();
    // Drops the late answers, and those of requests that were not begun.
    until(|| (harness.gate.late.load(Ordering::SeqCst) == 20).then_some(()));
    assert_eq!(harness.connect().send(GET).answer().status, 200);
}

#[test]
fn bursts_of_keep_alive_connections_are_all_answered() {
    for count in [8, 100, 1000] {
        let harness = Harness::new();
        let mut clients: Vec<_> = (0..count).map(|_| harness.connect()).collect();
        for _ in 0..3 {
            for client in &mut clients {
                client.send(GET);
            }
            for client in &mut clients {
                let answer = client.answer();
                assert!(answer.status == 200 && !answer.closes());
            }
        }
    }
}

#[test]
fn the_oldest_idle_connection_makes_room() {
    let harness = Harness::with(|limits| limits.max_connections = 4);
    let mut clients: Vec<_> = (0..4).map(|_| harness.connect()).collect();
    for at in [1, 2, 0, 3] {
        assert_eq!(clients[at].send(GET).answer().status, 200);
        pause(Duration::from_millis(3));
    }
    let mut fifth = harness.connect();
    assert_eq!(fifth.send(GET).answer().status, 200);
    assert!(clients[1].ends(), "it was idle for longest");
    for at in [2, 0, 3] {
        assert_eq!(clients[at].send(GET).answer().status, 200, "{at}");
    }
}

#[test]
fn without_an_idle_connection_there_is_a_503() {
    let harness = Harness::with(|limits| limits.max_connections = 4);
    let mut clients: Vec<_> = (0..4).map(|_| harness.connect()).collect();
    for client in &mut clients {
        client.send(HOLD);
    }
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 4).then_some(()));
    for _ in 0..100 {
        let mut client = harness.connect();
        let answer = client.send(GET).answer();
        assert_eq!(answer.status, 503);
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(answer.closes() && client.ends());
    }
    // Gives each of many surplus clients the answer and no connection.
    let mut refused: Vec<_> = (0..600).map(|_| harness.connect()).collect();
    for client in &mut refused {
        assert_eq!(client.send(GET).answer().status, 503);
        assert!(client.ends());
    }
    assert_eq!(harness.gate.seen.load(Ordering::SeqCst), 4);
    drop(refused);
    harness.release();
    for client in &mut clients {
        assert_eq!(client.answer().status, 200);
    }
    assert_eq!(harness.connect().send(GET).answer().status, 200);
}

#[test]
fn half_read_requests_are_not_idle() {
    let harness = Harness::with(|limits| limits.max_connections = 3);
    let mut half = harness.connect();
    half.send("GET / HTTP/1.1\r\n");
    let mut body = harness.connect();
    body.send(post(3) + "a");
    // Waits until both were read, as one of them may look idle to the frontend. The frontend reads in the order of
    // arrival.
    let mut working = harness.connect();
    working.send(HOLD);
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 1).then_some(()));
    assert_eq!(harness.connect().send(GET).answer().status, 503);
    harness.release();
    assert_eq!(working.answer().status, 200);
    assert_eq!(half.send("Host: a\r\n\r\n").answer().status, 200);
    assert_eq!(body.send("bc").answer().status, 200);
}

#[test]
fn what_tiny_http_does_not_survive_does_not_get_through() {
    // Sends requests that tiny_http alone does not survive.
    let harness = Harness::new();
    let mut client = harness.connect();
    // Declares a length that no memory holds.
    assert_eq!(harness.connect().send(post(99_999_999_999) + "x").answer().status, 413);
    // Shows that a slow body holds no worker.
    let slow: Vec<_> = (0..50)
        .map(|_| {
            let mut slow = harness.connect();
            slow.send(post(5000) + "x");
            slow
        })
        .collect();
    assert_eq!(client.send(GET).answer().status, 200);
    drop(slow);
    // Asks for an upgrade, which is not made.
    client.send(format!("{}{GET}", GET.replace("Host", "Connection: upgrade\r\nUpgrade: h2c\r\nHost")));
    assert_eq!([client.answer().status, client.answer().status], [200, 200]);
    // Sends a line that is not ASCII, which would end the stream of tiny_http.
    client.send(b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: \xff\r\nX: \xe9\r\n\r\n");
    assert_eq!(client.answer().json()["fields"][1][1], "\u{fffd}");
}

#[test]
fn a_broken_private_stream_is_reported_and_ends_the_frontend() {
    use std::sync::{Arc, atomic::AtomicUsize};
    let (ours, theirs) = UnixStream::pair().unwrap();
    let listener = Listener::bind("127.0.0.1", 0).unwrap();
    listener.listen().unwrap();
    let address = listener.local_addr().unwrap();
    let broken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&broken);
    let (frontend, _slots) = Frontend::start(
        listener,
        Limits::default(),
        SharedResources {
            budget: MemoryBudget::new(1 << 20),
            answer_without_worker: Box::new(|_, _| None),
            metrics: Arc::new(Metrics::new(&[])),
        },
        ours,
        move || {
            count.fetch_add(1, Ordering::SeqCst);
        },
    )
    .unwrap();
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Client::new(stream)
    };
    let mut waiting = connect();
    waiting.send(GET);
    barrier(address);
    drop(theirs);
    assert_eq!(waiting.answer().status, 503);
    assert!(waiting.ends());
    until(|| (broken.load(Ordering::SeqCst) == 1).then_some(()));
    assert!(TcpStream::connect(address).is_err(), "the port is closed");
    drop(frontend);
}

#[test]
fn a_stop_answers_what_has_begun() {
    // Uses a port that the system assigns to no other test once it is free.
    let listener = Listener::bind("127.0.0.1", free_port()).unwrap();
    let limits = Limits { stop_timeout: 2 * TIMEOUT, ..Limits::default() };
    let mut harness = Harness::start(listener, &limits, 4);
    let address = harness.address.unwrap();
    let mut idle = harness.connect();
    assert_eq!(idle.send(GET).answer().status, 200);
    let mut working = harness.connect();
    working.send(HOLD);
    let mut half = harness.connect();
    half.send("GET /half HTTP/1.1\r\n");
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 2).then_some(()));
    harness.barrier();
    harness.slots.begin_stop();
    harness.slots.begin_stop();
    assert!(idle.ends(), "at once");
    assert!(until(|| TcpStream::connect(address).err()).kind() == std::io::ErrorKind::ConnectionRefused);
    drop(Listener::bind("127.0.0.1", address.port()).expect("the port is free"));
    let answer = half.send("Host: a\r\n\r\n").answer();
    assert!(answer.status == 200 && answer.closes());
    assert!(half.ends());
    harness.release();
    let answer = working.answer();
    assert!(answer.status == 200 && answer.closes());
    assert!(working.ends());
    let start = Instant::now();
    drop(harness.frontend.take());
    assert!(start.elapsed() < TIMEOUT, "there is nothing to wait for");
}

#[test]
fn a_stop_has_a_deadline() {
    let mut harness = Harness::with(|limits| limits.stop_timeout = Duration::from_millis(300));
    let mut working = harness.connect();
    working.send(HOLD);
    let mut half = harness.connect();
    half.send("GET");
    until(|| (harness.gate.seen.load(Ordering::SeqCst) == 1).then_some(()));
    harness.barrier();
    let start = Instant::now();
    drop(harness.frontend.take());
    let took = start.elapsed();
    assert!(took < Limits::default().stop_timeout, "{took:?}");
    assert!(took >= Duration::from_millis(300), "{took:?}");
    for client in [&mut working, &mut half] {
        let answer = client.answer();
        assert!(answer.status == 503 && answer.closes() && client.ends());
    }
}

#[test]
fn a_stop_under_load_loses_no_answer() {
    for _ in 0..5 {
        let mut harness = Harness::new();
        let clients: Vec<_> = (0..50).map(|_| harness.connect()).collect();
        let threads: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                std::thread::spawn(move || {
                    let mut answers = 0;
                    // Ends connections between two answers, never within one: `try_answer` would fail.
                    while client.send(GET).try_answer(false).is_some() {
                        answers += 1;
                    }
                    answers
                })
            })
            .collect();
        until(|| (harness.gate.answered.load(Ordering::SeqCst) > 500).then_some(()));
        drop(harness.frontend.take());
        let answers: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        // Waits, because a worker may count an answer after the client has it.
        until(|| (harness.gate.answered.load(Ordering::SeqCst) >= answers).then_some(()));
        assert_eq!(answers, harness.gate.answered.load(Ordering::SeqCst));
        assert_eq!(harness.gate.late.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn connections_for_one_request_each() {
    let harness = Harness::with(|limits| limits.max_connections = 16);
    for i in 0..2000 {
        let mut client = harness.connect();
        let answer = match i % 2 {
            0 => client.send("GET / HTTP/1.0\r\n\r\n").answer(),
            _ => client.send(GET.replace("Host", "Connection: close\r\nHost")).answer(),
        };
        assert!(answer.status == 200 && answer.closes());
        assert!(client.ends());
    }
    // Waits, because a worker may count an answer after the client has it.
    until(|| (harness.gate.answered.load(Ordering::SeqCst) == 2000).then_some(()));
}

#[test]
fn unix_sockets_and_their_files() {
    let directory = std::env::temp_dir().join(format!("userd-frontend-unix-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("socket");
    let host = format!("unix:{}", path.display());
    let harness = Harness::start(Listener::bind(&host, 0).unwrap(), &Limits::default(), 2);
    assert_eq!(harness.name, host);
    let connect = || {
        let stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Client::new(stream)
    };
    let mut client = connect();
    for _ in 0..100 {
        assert_eq!(client.send(GET).answer().status, 200);
    }
    let mut slow = connect();
    slow.send("GET /big/8000000 HTTP/1.1\r\nHost: a\r\n\r\n");
    slow.send(GET);
    pause(Duration::from_millis(20));
    assert_eq!(slow.answer().body.len(), 8_000_000);
    assert_eq!(slow.answer().status, 200);
    // Refuses a path that is in use, and leaves its file.
    assert_eq!(failure(Listener::bind(&host, 0)), (host.clone(), std::io::ErrorKind::AddrInUse));
    assert_eq!(connect().send(GET).answer().status, 200);
    harness.stop();
    assert!(!path.exists(), "removed at stop");
    // Replaces the file of a socket without a listener.
    let stale = std::os::unix::net::UnixListener::bind(&path).unwrap();
    // Shuts the socket down: a process that another test is starting has a copy of it.
    SockRef::from(&stale).shutdown(Shutdown::Both).unwrap();
    drop(stale);
    assert!(path.exists());
    let listener = Listener::bind(&host, 0).unwrap();
    // Leaves a file that another process has put there.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "precious").unwrap();
    drop(listener);
    assert_eq!(failure(Listener::bind(&host, 0)), (host, std::io::ErrorKind::Other));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();
    // Serves a socket of a supervisor, and leaves its file.
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let mode = path.metadata().unwrap().permissions().mode();
    let harness = Harness::start(Listener::from_fds([Ok(listener.into())]).unwrap(), &Limits::default(), 2);
    assert_eq!(connect().send(GET).answer().status, 200);
    harness.stop();
    assert!(path.exists() && mode & 0o111 != 0);
    std::fs::remove_dir_all(&directory).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(Listener::from_fds([Ok(file.into())]).is_err());
}

#[test]
fn addresses() {
    let rows = [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
        ("[::1]", "http://[::1]:"),
        ("::", "http://[::]:"),
        ("0.0.0.0", "http://0.0.0.0:"),
        ("localhost", "http://127.0.0.1:"),
    ];
    let ipv6 = has_ipv6();
    for (host, name) in rows.into_iter().filter(|(host, _)| ipv6 || !host.contains(':')) {
        let harness = Harness::start(Listener::bind(host, 0).unwrap(), &Limits::default(), 1);
        assert!(harness.name.starts_with(name), "{}", harness.name);
        let port = harness.address.unwrap().port();
        let mut hosts = vec![];
        match host {
            "::" => hosts.extend(["127.0.0.1", "::1"]),
            "localhost" => hosts.extend(["127.0.0.1", "::1"].into_iter().take(if ipv6 { 2 } else { 1 })),
            "127.0.0.1" | "0.0.0.0" => hosts.push("127.0.0.1"),
            _ => hosts.push("::1"),
        }
        for to in hosts {
            let stream = TcpStream::connect((to, port)).unwrap();
            stream.set_read_timeout(Some(TIMEOUT)).unwrap();
            assert_eq!(Client::new(stream).send(GET).answer().status, 200, "{host} {to}");
        }
        let address = harness.name.replace("http://", "");
        assert_eq!(failure(Listener::bind(host, port)), (address, std::io::ErrorKind::AddrInUse));
    }
    assert_eq!(failure(Listener::bind("no.such.host.invalid", 1)).0, "no.such.host.invalid:1");
}

// Runs a test in a process of its own if it changes or measures the whole process.

/// A frontend in another process, which ends with its standard input.
struct Elsewhere {
    child: Child,
    address: String,
    /// Keeps the standard output open that the harness of the other process writes to.
    _output: BufReader<ChildStdout>,
}

impl Elsewhere {
    fn start(task: &str, argument: usize) -> Elsewhere {
        let module = module_path!().split_once("::").map_or("", |(_, module)| module);
        let name = format!("{module}::elsewhere");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env("FRONTEND_TASK", task)
            .env("FRONTEND_ARGUMENT", argument.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let address = output.by_ref().lines().map_while(Result::ok);
        let address = address.filter_map(|line| Some(line.split_once("http://")?.1.to_owned())).next();
        Elsewhere { child, address: address.expect("it says where it listens"), _output: output }
    }

    fn try_connect(&self) -> std::io::Result<Client<TcpStream>> {
        let stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Client::new(stream))
    }

    fn connect(&self) -> Client<TcpStream> {
        until(|| self.try_connect().ok())
    }

    /// Returns the processor time that the process has taken, in hundredths of a second.
    fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        // Reads utime and stime, the fields at these positions behind the name.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        [fields[11], fields[12]].map(|ticks| ticks.parse::<u64>().unwrap()).iter().sum()
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Runs the other process if `FRONTEND_TASK` is set, as the tests below do. This is no test.
#[test]
fn elsewhere() {
    let Ok(task) = std::env::var("FRONTEND_TASK") else { return };
    let argument: usize = std::env::var("FRONTEND_ARGUMENT").unwrap().parse().unwrap();
    if task == "again and again" {
        return again_and_again(argument);
    }
    let limits =
        Limits { max_connections: if task == "serve" { argument } else { 1024 }, ..Limits::default() };
    let harness = Harness::start(Listener::bind("127.0.0.1", 0).unwrap(), &limits, 4);
    if task == "starve" {
        // Waits for an answer, by which tiny_http has accepted its one stream: it would not survive having no
        // descriptor for that.
        assert_eq!(harness.connect().send(GET).answer().status, 200);
        use nix::sys::resource::{Resource, getrlimit, setrlimit};
        let hard = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
        setrlimit(Resource::RLIMIT_NOFILE, argument as u64, hard).unwrap();
    }
    println!("\n{}", harness.name);
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
fn running_out_of_descriptors_is_survived() {
    let server = Elsewhere::start("starve", 100);
    // Closes idle connections for new clients.
    let idle: Vec<_> = (0..300).filter_map(|_| server.try_connect().ok()).collect();
    assert_eq!(server.connect().send(GET).answer().status, 200);
    // Closes no busy connection: no client is accepted until one ends.
    let busy: Vec<_> = (0..300)
        .filter_map(|_| {
            let mut client = server.try_connect().ok()?;
            client.send("GET / HTTP");
            Some(client)
        })
        .collect();
    pause(Duration::from_millis(300));
    let before = server.ticks();
    pause(Duration::from_millis(500));
    assert!(server.ticks() - before < 15, "it does not spin");
    drop(busy);
    drop(idle);
    assert_eq!(server.connect().send(GET).answer().status, 200);
}

#[test]
fn a_pipelining_flood_costs_the_sender_only() {
    let server = Elsewhere::start("serve", 1024);
    let pid = server.child.id();
    assert_eq!(server.connect().send(GET).answer().status, 200);
    let before = memory_kib(pid);
    let mut floods: Vec<_> = (0..4).map(|_| server.connect()).collect();
    let piece = GET.repeat(1000);
    for flood in &mut floods[..3] {
        flood.send(HOLD);
        let patience = Some(Duration::from_millis(300));
        flood.stream.set_write_timeout(patience).unwrap();
        while flood.stream.write_all(piece.as_bytes()).is_ok() {}
    }
    let grown = memory_kib(pid).saturating_sub(before);
    assert!(grown < 2 * 1024, "{grown} KiB");
    assert_eq!(floods[3].send(GET).answer().status, 200);
}

#[test]
fn ten_thousand_idle_connections_cost_little() {
    const COUNT: usize = 9_500;
    let server = Elsewhere::start("serve", 10_000);
    let pid = server.child.id();
    raise_the_limit_of_descriptors();
    let (ours, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    let count = COUNT.min((ours as usize).saturating_sub(1500));
    assert!(count > 1000, "{ours} descriptors are too few");
    let mut warm: Vec<_> = (0..100).map(|_| server.connect()).collect();
    for client in &mut warm {
        assert_eq!(client.send(GET).answer().status, 200);
    }
    let before = memory_kib(pid);
    let mut clients: Vec<_> = (0..count).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send(GET);
    }
    for client in &mut clients {
        assert_eq!(client.answer().status, 200);
    }
    let each = (memory_kib(pid) - before) as f64 / count as f64;
    println!("{count} idle connections: {each:.2} KiB each");
    assert!(each <= 1.0, "{each} KiB each");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
    println!("{tasks} threads");
    assert!(tasks < 30);
    assert_eq!(server.connect().send(GET).answer().status, 200);
    assert_eq!(clients[0].send(GET).answer().status, 200);
}

#[test]
fn two_hundred_starts_and_stops_leave_nothing() {
    let mut child = Elsewhere::start("again and again", 200);
    assert!(child.child.wait().unwrap().success());
}

fn again_and_again(times: usize) {
    // Uses a port that the system assigns to no other process between two servers.
    let port = free_port();
    println!("\nhttp://127.0.0.1:{port}");
    let once = || {
        let listener = Listener::bind("127.0.0.1", port).expect("the port is free at once");
        let harness = Harness::start(listener, &Limits::default(), 2);
        let mut client = harness.connect();
        assert_eq!(client.send(GET).answer().status, 200);
        let mut idle = harness.connect();
        harness.stop();
        assert!(client.ends() && idle.ends());
    };
    once();
    let files = || {
        let own = format!("userd-frontend-{}-", std::process::id());
        let all = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten();
        all.filter(|file| file.file_name().to_string_lossy().starts_with(&own)).count()
    };
    until(|| (threads().len() <= 3 + MISSED).then_some(()));
    let before = (descriptors(), files());
    for _ in 0..times {
        once();
        // Waits for the thread, which the system may list for a moment after it was joined.
        until(|| threads().iter().all(|name| name != "frontend").then_some(()));
    }
    assert_eq!(files(), before.1);
    // Waits for tiny_http's idle threads, which end by themselves after five seconds.
    until(|| (descriptors() <= before.0).then_some(()));
    until(|| (threads().len() <= 3 + MISSED).then_some(()));
}
