//! Tests of the bytes that clients may send: which requests they contain, however the bytes are split.

use super::super::{FramedRequest, fuzz::checks::limits};
use super::*;
use crate::http::{Persistence, Request};
use std::mem;

/// The result of parsing a stream: each request, with its persistence and whether it is HEAD, and the refusal that
/// ended the stream.
#[derive(Debug, PartialEq)]
struct Outcome {
    requests: Vec<(String, Persistence, bool)>,
    refused: Option<String>,
    unused: usize,
    continues: usize,
}

/// Writes a request as its method, target, fields and body.
fn text(request: &Request) -> String {
    let fields: Vec<_> = request.header_fields().map(|(name, value)| format!("{name}: {value}")).collect();
    let body = String::from_utf8_lossy(&request.body);
    format!("{} {} [{}] {body}", request.method_name, request.target, fields.join(", "))
}

/// Parses a stream in pieces of these sizes, as a connection would. The last size repeats.
fn feed(stream: &[u8], limits: &Limits, sizes: impl IntoIterator<Item = usize>) -> Outcome {
    let mut outcome = Outcome { requests: Vec::new(), refused: None, unused: 0, continues: 0 };
    let mut sizes = sizes.into_iter();
    let (mut framing, mut kept, mut rest) = (Framing::default(), Vec::new(), stream);
    while !rest.is_empty() {
        let size = sizes.next().unwrap_or(rest.len()).clamp(1, rest.len());
        kept.extend_from_slice(&rest[..size]);
        rest = &rest[size..];
        loop {
            let mut used = 0;
            let step = framing.parse_more(&kept, &mut used, limits);
            kept.drain(..used);
            match step {
                Ok(Progress::Incomplete) => break,
                Ok(Progress::AwaitsContinue) => outcome.continues += 1,
                Ok(Progress::Complete(FramedRequest { request, persistence })) => {
                    let Framing { for_answer, .. } = mem::take(&mut framing);
                    outcome.requests.push((text(&request), persistence, for_answer.head_only));
                }
                Err(error) => {
                    outcome.refused = Some(format!("{error:?}"));
                    return outcome;
                }
            }
            if kept.is_empty() {
                break;
            }
        }
    }
    outcome.unused = kept.len();
    outcome
}

fn whole(stream: impl AsRef<[u8]>) -> Outcome {
    let (stream, limits) = (stream.as_ref(), limits());
    let at_once = feed(stream, &limits, None);
    let mut one_by_one = feed(stream, &limits, std::iter::repeat(1));
    one_by_one.continues = at_once.continues;
    let text = String::from_utf8_lossy(stream);
    assert_eq!(at_once, one_by_one, "splits matter in {text:?}");
    at_once
}

fn refusal_of(stream: impl AsRef<[u8]>) -> Option<String> {
    whole(stream).refused
}

#[test]
fn what_is_passed_on() {
    let rows = [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / [Host: a] "),
        ("\r\n\r\nGET /a?b=c HTTP/1.0\r\n\r\n", "GET /a?b=c [] "),
        (
            "PUT /x HTTP/1.1\r\nhost:a\r\nAUTHORIZATION:  Bearer x \r\ncontent-type:\r\n\
             Cookie: a:b\r\nAuthorization:\ttwo\t\r\nContent-Length: 3\r\n\r\nabc",
            "PUT /x [host: a, AUTHORIZATION: Bearer x, content-type: , Cookie: a:b, Authorization: two, \
             Content-Length: 3] abc",
        ),
        ("GET /x HTTP/1.0\r\nHost: a.example\r\n\r\n", "GET /x [Host: a.example] "),
        ("GET /x HTTP/1.1\r\nHost:\r\n\r\n", "GET /x [Host: ] "),
        // Puts the authority of a target before the Host, which it replaces.
        (
            "POST http://other:8/x?y HTTP/1.1\r\nHost: a\r\nOrigin: http://o\r\n\r\n",
            "POST /x?y [Host: other:8, Host: a, Origin: http://o] ",
        ),
        ("GET HTTP://h HTTP/1.1\r\nHost:\r\n\r\n", "GET / [Host: h, Host: ] "),
        ("GET http://h?q HTTP/1.0\r\n\r\n", "GET /?q [Host: h] "),
        ("GET /x HTTP/1.2\r\nHost: a\r\n\r\n", "GET /x [Host: a] "),
        ("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS * [Host: a] "),
        ("OPTIONS http://h HTTP/1.1\r\nHost: a\r\n\r\n", "OPTIONS * [Host: h, Host: a] "),
        ("g!t / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", "g!t / [Host: [::1]:80] "),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n\
             3\r\nabc\r\n0A ; x=\"y\"\r\n0123456789\r\n00\r\nA: b\r\nC:\r\n\r\n",
            "POST / [Host: a, Transfer-Encoding: Chunked] abc0123456789",
        ),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "POST / [Host: a, Transfer-Encoding: chunked] ",
        ),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0002\r\nUpgrade: h2c\r\n\r\nhi",
            "POST / [Host: a, Content-Length: 0002, Upgrade: h2c] hi",
        ),
    ];
    for (stream, expected) in rows {
        let outcome = whole(stream);
        assert_eq!(outcome.refused, None, "{stream}");
        assert_eq!(outcome.unused, 0, "{stream}");
        let requests: Vec<_> = outcome.requests.iter().map(|(text, ..)| text).collect();
        assert_eq!(requests, [expected], "{stream}");
    }
}

#[test]
fn values_that_are_no_ascii_and_targets_that_are_none() {
    let outcome = whole(b"GET / HTTP/1.1\r\nHost: a\r\nX: \xc3\xa9\r\nY: \xff\r\nZ: z\r\n\r\n");
    assert_eq!(outcome.requests[0].0, "GET / [Host: a, X: \u{e9}, Y: \u{fffd}, Z: z] ");
    for target in ["/\u{e9}", "/\u{7f}"] {
        let refused = refusal_of(format!("GET {target} HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(refused.unwrap().starts_with("BadRequest"), "{target}");
    }
}

#[test]
fn pipelined_requests_stay_in_order() {
    let one = "GET /1 HTTP/1.1\r\nHost: a\r\n\r\n";
    let two = "POST /2 HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nGET ";
    let outcome = whole(format!("{one}{two}\r\n{one}GET"));
    let starts: Vec<_> = outcome.requests.iter().map(|(text, ..)| &text[..7]).collect();
    assert_eq!(starts, ["GET /1 ", "POST /2", "GET /1 "]);
    assert_eq!(outcome.unused, 3);
}

#[test]
fn refusals() {
    let get = |line: &str| format!("GET / HTTP/1.1\r\nHost: a\r\n{line}\r\n\r\n");
    let post = |lines: &str| format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n");
    let chunked =
        |body: &str| format!("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
    let rows = [
        // Lines.
        ("GET / HTTP/1.1\nHost: a\n\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: a\n\r\n".into(), "BadRequest"),
        ("\nGET / HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\rHost: a\r\n\r\n".into(), "BadRequest"),
        (get("A: b\rc"), "BadRequest"),
        (get("A: b\0c"), "BadRequest"),
        (get("A: b\u{1}c"), "BadRequest"),
        (get("A: b\u{7f}c"), "BadRequest"),
        // Other protocols.
        ("\u{16}\u{3}\u{1}\u{2}".into(), "BadRequest(\"this port speaks plain http, not https\")"),
        ("PROXY UNKNOWN\r\n".into(), "BadRequest(\"the connection begins with the PROXY protocol"),
        ("\r\n\r\n\0\r\nQUIT\n".into(), "BadRequest(\"the connection begins with the PROXY protocol"),
        ("\r\n\r\n\r\n\r\n\r\n".into(), "BadRequest"),
        // The request line.
        ("GET /\r\n\r\n".into(), "BadRequest"),
        ("GET / \r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1 x\r\n\r\n".into(), "BadRequest"),
        ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET /  HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET /a b HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        (" GET / HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("G(T / HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET x HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n".into(), "BadRequest"),
        ("GET * HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET http://u@a/ HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / http/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/11\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.10\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.2x\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET /#9 HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET /\\x HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        // Refuses a request line once it is complete, without another byte.
        ("GET /\r\n".into(), "BadRequest"),
        ("GET / \r\n".into(), "BadRequest"),
        ("GET\r\n".into(), "BadRequest"),
        ("GET / HTTP/2.0\r\n".into(), "VersionNotSupported"),
        ("GET x HTTP/1.1\r\n".into(), "BadRequest"),
        ("GET / HTTP/0.9\r\n\r\n".into(), "VersionNotSupported"),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), "VersionNotSupported"),
        // Fields.
        (get("A : b"), "BadRequest"),
        (get("A: b\r\n c"), "BadRequest"),
        (get("A: b\r\n\tc"), "BadRequest"),
        (get(": b"), "BadRequest"),
        (get("Ab"), "BadRequest"),
        (get("A\u{e9}: b"), "BadRequest"),
        ("GET / HTTP/1.1\r\n Host: a\r\n\r\n".into(), "BadRequest"),
        // Host.
        ("GET / HTTP/1.1\r\n\r\n".into(), "BadRequest(\"no Host\")"),
        (get("host: b"), "BadRequest"),
        ("GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: a@b\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: \u{e9}\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: [\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: [::1\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: a:b\r\n\r\n".into(), "BadRequest"),
        ("GET / HTTP/1.1\r\nHost: %zz\r\n\r\n".into(), "BadRequest"),
        ("GET http://[/ HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        ("GET http://a:b/ HTTP/1.1\r\nHost: a\r\n\r\n".into(), "BadRequest"),
        // Media types.
        (post("Content-Type: a/b\r\ncontent-type: a/b"), "BadRequest"),
        // Lengths.
        (post("Content-Length: 1\r\nContent-Length: 1"), "BadRequest"),
        (post("Content-Length: 1, 1"), "BadRequest"),
        (post("Content-Length: +1"), "BadRequest"),
        (post("Content-Length: -1"), "BadRequest"),
        (post("Content-Length: 0x1"), "BadRequest"),
        (post("Content-Length: 1 1"), "BadRequest"),
        (post("Content-Length:"), "BadRequest"),
        (post("Content-Length: 65"), "ContentTooLarge"),
        (post("Content-Length: 99999999999"), "ContentTooLarge"),
        (post("Content-Length: 99999999999999999999999999999"), "ContentTooLarge"),
        (post("Content-Length: 1\r\nTransfer-Encoding: chunked"), "BadRequest"),
        (post("Transfer-Encoding: chunked\r\nContent-Length: 1"), "BadRequest"),
        (post("Transfer-Encoding: gzip"), "NotImplemented"),
        (post("Transfer-Encoding: gzip, chunked"), "NotImplemented"),
        (post("Transfer-Encoding: gzip;q=1, chunked"), "NotImplemented"),
        (post("Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"), "NotImplemented"),
        (post("Transfer-Encoding: identity"), "NotImplemented"),
        (post("Transfer-Encoding: chunked, gzip"), "BadRequest"),
        (post("Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip"), "BadRequest"),
        (post("Transfer-Encoding: chunked,"), "BadRequest"),
        (post("Transfer-Encoding: , chunked"), "BadRequest"),
        (post("Transfer-Encoding: gzip\r\nContent-Length: 1"), "BadRequest"),
        (post("Transfer-Encoding: chunked, chunked"), "BadRequest"),
        (post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"), "BadRequest"),
        (post("Transfer-Encoding: xchunked"), "NotImplemented"),
        (post("Transfer-Encoding: \"chunked\""), "BadRequest"),
        (post("Transfer-Encoding: chunked;a=b"), "BadRequest"),
        (post("Transfer-Encoding:"), "BadRequest"),
        (post("Transfer-Encoding : chunked"), "BadRequest"),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n".into(), "BadRequest"),
        // Chunks.
        (chunked("\r\n"), "BadRequest"),
        (chunked("g\r\n"), "BadRequest"),
        (chunked("-1\r\n"), "BadRequest"),
        (chunked("0x1\r\n"), "BadRequest"),
        (chunked(" 1\r\n"), "BadRequest"),
        (chunked("1 \r\n"), "BadRequest"),
        (chunked("1 x\r\n"), "BadRequest"),
        (chunked("2 \r\n"), "BadRequest"),
        (chunked("2;a=\u{e9}\r\n"), "BadRequest"),
        (chunked("0 \r\n"), "BadRequest"),
        (chunked("1\n"), "BadRequest"),
        (chunked("1;a\rb\r\n"), "BadRequest"),
        (chunked("1;a\nb\r\n"), "BadRequest"),
        (chunked("1\r\nab\r\n"), "BadRequest"),
        (chunked("1\r\na\n0\r\n\r\n"), "BadRequest"),
        (chunked("1\r\na\rx"), "BadRequest"),
        (chunked("41\r\n"), "ContentTooLarge"),
        (chunked("1\r\na\r\n40\r\n"), "ContentTooLarge"),
        (chunked("ffffffffffffffff\r\n"), "ContentTooLarge"),
        (chunked("10000000000000001\r\n"), "ContentTooLarge"),
        (chunked("0\r\nx\r\n\r\n"), "BadRequest"),
        (chunked("0\r\n: x\r\n\r\n"), "BadRequest"),
        (chunked("0\r\n a: x\r\n\r\n"), "BadRequest"),
        (chunked("0\r\na : x\r\n\r\n"), "BadRequest"),
        (chunked("0\r\na: x\n\r\n"), "BadRequest"),
        // Expectations.
        (get("Expect: 200-ok"), "ExpectationFailed"),
        (get("Expect: 100-continue\r\nExpect: x"), "ExpectationFailed"),
        (get("Expect: x\r\nExpect: 100-continue"), "ExpectationFailed"),
        (post("Expect: 100-continue\r\nContent-Length: 65"), "ContentTooLarge"),
    ];
    for (stream, expected) in rows {
        let outcome = whole(&stream);
        assert_eq!(outcome.continues, 0, "{stream:?}");
        let refused = outcome.refused.unwrap_or_else(|| panic!("{stream:?}"));
        assert!(refused.starts_with(expected), "{stream:?}: {refused}");
        assert_eq!(outcome.requests, [], "{stream:?}");
    }
}

#[test]
fn limits_at_their_edge_and_one_past() {
    let fill = |before: &str, count: usize, after: &str| format!("{before}{}{after}", "x".repeat(count));
    let line = |count| fill("GET /", count - 14, " HTTP/1.1\r\nHost: a\r\n\r\n");
    let head = |count| fill("GET / HTTP/1.1\r\nHost: a\r\nA: ", count - 32, "\r\n\r\n");
    let unended = |count| fill("GET / HTTP/1.1\r\nHost: a\r\nA: ", count - 28, "");
    let fields = |count| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(count - 1));
    let chunked = "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let body = |count| {
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {count}\r\n\r\n");
        fill(&head, count, "")
    };
    let chunk = |count| fill(&format!("{chunked}{count:x}\r\n"), count, "\r\n0\r\n\r\n");
    let extension = |count| fill(&format!("{chunked}1;"), count - 2, "\r\na\r\n0\r\n\r\n");
    let extensions = |count: usize| {
        let chunk = fill("1;", 127, "\r\na\r\n");
        let last = fill("1;", count - 3 * 128 - 1, "\r\na\r\n");
        format!("{chunked}{}{last}0\r\n\r\n", chunk.repeat(3))
    };
    let trailer = |count| fill(&format!("{chunked}0\r\na:"), count - 2, "\r\n\r\n");
    type Make<'a> = &'a dyn Fn(usize) -> String;
    let rows: [(&str, Make, usize, &str); 10] = [
        ("request line", &line, 128, "UriTooLong"),
        ("head", &head, 512, "HeadTooLarge"),
        ("endless head", &unended, 512, "HeadTooLarge"),
        ("fields", &fields, 8, "HeadTooLarge"),
        ("body", &body, 64, "ContentTooLarge"),
        ("chunked body", &chunk, 64, "ContentTooLarge"),
        ("chunk line", &extension, 256, "BadRequest"),
        ("extensions", &extensions, 512, "BadRequest"),
        ("trailer", &trailer, 512, "HeadTooLarge"),
        (
            "empty lines",
            &|n| format!("{}GET / HTTP/1.1\r\nHost: a\r\n\r\n", "\r\n".repeat(n)),
            4,
            "BadRequest",
        ),
    ];
    for (what, make, edge, expected) in rows {
        assert_eq!(refusal_of(make(edge)), None, "{what}");
        let refused = refusal_of(make(edge + 1));
        assert!(refused.as_ref().is_some_and(|r| r.starts_with(expected)), "{what}: {refused:?}");
    }
}

#[test]
fn when_a_client_is_told_to_continue() {
    let head = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n";
    let limits = limits();
    let pieces = |sizes: &[usize], text: &str| feed(text.as_bytes(), &limits, sizes.to_vec()).continues;
    assert_eq!(pieces(&[head.len()], &format!("{head}ab")), 1);
    assert_eq!(pieces(&[head.len() + 1], &format!("{head}ab")), 0, "it is sending already");
    assert_eq!(pieces(&[], &head.replace('2', "0")), 0, "there is no body");
    assert_eq!(pieces(&[], &head.replace("/1.1", "/1.0")), 0, "HTTP/1.0 does not know it");
}

#[test]
fn persistence() {
    use Persistence::*;
    let rows = [
        ("1.1", "", KeepAliveSeconds(74)),
        ("1.1", "Connection: keep-alive\r\n", KeepAliveSeconds(74)),
        ("1.1", "Connection: Close\r\n", Close),
        ("1.1", "Connection: x, close ,y\r\n", Close),
        ("1.1", "Connection: keep-alive\r\nConnection: close\r\n", Close),
        ("1.1", "Connection: closed\r\n", KeepAliveSeconds(74)),
        ("1.1", "Connection: upgrade\r\n", KeepAliveSeconds(74)),
        ("1.0", "", Close),
        ("1.0", "Connection: Keep-Alive\r\n", KeepAliveSeconds(74)),
        ("1.0", "Connection: keep-alive, close\r\n", Close),
    ];
    for (version, line, expected) in rows {
        let outcome = whole(format!("HEAD / HTTP/{version}\r\nHost: a\r\n{line}\r\n"));
        let (_, found, head_only) = &outcome.requests[0];
        assert_eq!(*found, expected, "{version} {line}");
        assert!(head_only);
    }
}

#[test]
fn seconds_that_clients_may_rely_on() {
    let rows = [
        (0.001, 0),
        (0.9, 0),
        (1.0, 1),
        (1.5, 1),
        (2.0, 1),
        (2.9, 1),
        (3.0, 2),
        (60.0, 59),
        (86400.0, 86399),
    ];
    for (idle, expected) in rows {
        let limits = Limits { idle_timeout: std::time::Duration::from_secs_f64(idle), ..limits() };
        let outcome = feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", &limits, None);
        assert_eq!(outcome.requests[0].1, Persistence::KeepAliveSeconds(expected), "{idle}");
    }
}

/// A generator of random numbers whose seed repeats a failure.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % most
    }

    fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

fn any_request(dice: &mut Dice) -> String {
    let target = dice.of(&["/", "/users?page=2", "http://h/x", "/%20"]);
    let mut head = format!("{} {target} HTTP/1.1\r\nHost: a\r\n", dice.of(&["GET", "POST", "x"]));
    for _ in 0..dice.below(4) {
        head +=
            dice.of(&["A: b\r\n", "Connection: close\r\n", "Origin:  x \r\n", "Expect: 100-continue\r\n"]);
    }
    let length = dice.below(30);
    let body = "GET / HTTP/1.1\r\nHost: a\r\n\r\n....".get(..length).unwrap();
    match dice.below(3) {
        0 => head + "\r\n",
        1 => format!("{head}Content-Length: {length}\r\n\r\n{body}"),
        _ => {
            let (one, two) = body.split_at(dice.below(length + 1));
            let mut text = format!("{head}Transfer-Encoding: chunked\r\n\r\n");
            for chunk in [one, two].into_iter().filter(|chunk| !chunk.is_empty()) {
                text += &format!("{:x}{}\r\n{chunk}\r\n", chunk.len(), dice.of(&["", ";a", " ; b=\"c\""]));
            }
            text + dice.of(&["0\r\n\r\n", "000\r\nA: b\r\n\r\n"])
        }
    }
}

#[test]
fn splits_never_matter() {
    for seed in 1..2000 {
        let mut dice = Dice(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15));
        let count = 1 + dice.below(5);
        let mut stream: Vec<u8> = (0..count).map(|_| any_request(&mut dice)).collect::<String>().into();
        let damaged = dice.below(2) == 0;
        if damaged {
            for _ in 0..=dice.below(3) {
                let at = dice.below(stream.len());
                match dice.below(3) {
                    0 => stream[at] = dice.below(256) as u8,
                    1 => drop(stream.remove(at)),
                    _ => stream.insert(at, *dice.of(&[b"\r", b"\n", b" ", b":", b"0"]).first().unwrap()),
                }
            }
        }
        let mut at_once = feed(&stream, &limits(), None);
        assert!(at_once.requests.len() <= count + 2, "seed {seed}");
        if !damaged {
            assert_eq!(
                (at_once.requests.len(), &at_once.refused, at_once.unused),
                (count, &None, 0),
                "seed {seed}"
            );
        }
        for _ in 0..8 {
            let most = 1 + dice.below(40);
            let sizes: Vec<usize> = (0..stream.len()).map(|_| 1 + dice.below(most)).collect();
            let split = feed(&stream, &limits(), sizes);
            at_once.continues = split.continues;
            assert_eq!(at_once, split, "seed {seed}: {:?}", String::from_utf8_lossy(&stream));
        }
    }
}

#[test]
fn random_bytes_are_survived() {
    let alphabet: &[&[u8]] = &[
        b"GET / HTTP/1.1\r\n",
        b"Host: a\r\n",
        b"\r\n",
        b"\r",
        b"\n",
        b"Content-Length: ",
        b"5",
        b"0",
        b"Transfer-Encoding: chunked\r\n",
        b"abc",
        b" ",
        b":",
        b";",
        b"\xff",
        b"\0",
        b"f",
        b"\r\n\r\n",
    ];
    for seed in 1..3000 {
        let mut dice = Dice(u64::wrapping_mul(seed, 0x2545_f491_4f6c_dd1d));
        let mut stream = Vec::new();
        for _ in 0..dice.below(40) {
            stream.extend_from_slice(dice.of(alphabet));
        }
        let ends = stream.windows(4).filter(|window| window == b"\r\n\r\n").count();
        let outcome = whole(&stream);
        assert!(outcome.requests.len() <= ends, "seed {seed}");
    }
}
