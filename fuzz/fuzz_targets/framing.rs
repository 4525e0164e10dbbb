//! Any bytes, split in any way: never a panic, the same answers as unsplit, never more requests than
//! the ends of heads, and nothing but well-formed ASCII lines and counted bodies towards tiny_http.
//!
//! The first byte says how many sizes of pieces follow it; the rest is the stream.
#![no_main]

use libfuzzer_sys::fuzz_target;
use userd::{
    config::Limits,
    frontend::http1::framing::{Framing, Step},
};

fuzz_target!(|data: &[u8]| {
    let Some((&count, rest)) = data.split_first() else {
        return;
    };
    let (sizes, stream) = rest.split_at(rest.len().min(count as usize % 16));
    let limits = Limits {
        max_head_bytes: 512,
        max_request_line_bytes: 128,
        max_header_fields: 8,
        max_body_bytes: 64,
        ..Limits::default()
    };
    let at_once = feed(stream, &limits, &[]);
    let split = feed(stream, &limits, sizes);
    assert_eq!(at_once, split, "splits matter");
    let bytes = feed(stream, &limits, &[0; 1]);
    assert_eq!(at_once, bytes, "splits matter");
    let ends = stream.windows(4).filter(|four| four == b"\r\n\r\n").count();
    assert!(at_once.0.len() <= ends, "more answers than requests");
    for request in &at_once.0 {
        check(request);
    }
});

fn feed(stream: &[u8], limits: &Limits, sizes: &[u8]) -> (Vec<Vec<u8>>, Option<String>, usize) {
    let mut requests = Vec::new();
    let (mut framing, mut kept, mut rest) = (Framing::default(), Vec::new(), stream);
    let mut sizes = sizes.iter().cycle();
    while !rest.is_empty() {
        let size = sizes.next().map_or(rest.len(), |&size| size as usize + 1);
        let (piece, later) = rest.split_at(size.min(rest.len()));
        kept.extend_from_slice(piece);
        rest = later;
        loop {
            let mut out = Vec::new();
            let (used, step) = framing.advance(&kept, limits, "S", &mut out);
            kept.drain(..used);
            match step {
                Step::More => break assert!(out.is_empty()),
                Step::Continue => assert!(out.is_empty() && kept.is_empty()),
                Step::Whole(_) => requests.push(out),
                Step::Refused(error) => {
                    assert!(out.is_empty());
                    return (requests, Some(format!("{error:?}")), 0);
                }
            }
            if kept.is_empty() {
                break;
            }
        }
    }
    assert!(kept.len() <= limits.max_head_bytes + 1);
    (requests, None, kept.len())
}

/// What tiny_http would make of it: one request line, fields of ASCII, one length at most that is right.
fn check(request: &[u8]) {
    let end = request.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.expect("a head ends");
    let head = std::str::from_utf8(&request[..end]).expect("ASCII");
    assert!(head.bytes().all(|byte| (b' '..0x7f).contains(&byte) || b"\t\r\n".contains(&byte)));
    let mut lines = head.split("\r\n");
    let first: Vec<&str> = lines.next().unwrap().split(' ').collect();
    assert!(first.len() == 3 && first[2] == "HTTP/1.1");
    assert!(first[1].strip_suffix("#S").is_some_and(|target| !target.is_empty()));
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(": ").expect("a field");
        assert!(!value.contains(['\r', '\n']));
        match name {
            "Content-Length" => {
                assert!(length.is_none());
                length = Some(value.parse::<usize>().unwrap());
            }
            "authorization" | "content-type" | "origin" | "sec-fetch-site" | "host" => {}
            other => panic!("{other} was passed on"),
        }
    }
    assert_eq!(request.len() - end - 4, length.unwrap_or(0));
}
