//! One request on a connection of its own, which may break anywhere, and what its client then knows.

use super::state::{Action, Answer};
use crate::support::{LONG, assert_no_secret, eventually};
use serde_json::{Value, json};
use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    time::Instant,
};

/// Where a client closes its connection by itself: after so many hundredths of its request, or bytes of the answer.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    Request(usize),
    Answer(usize),
}

/// The fate of a request.
pub enum Outcome {
    Answered(Answer, Instant),
    /// It may have been done, or be done later, or not.
    Open,
    /// It was answered 503: it may have been done, or not; it is not begun any more.
    Unavailable(Instant),
    /// It was not sent whole.
    Void,
}

/// Sends a request on a connection of its own. Returns when it was sent, too.
pub fn exchange(address: &str, action: &Action, cut: Option<Cut>) -> (Instant, Outcome) {
    let (method, target, fields, body) = action.request();
    let length = body.len();
    let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{fields}Content-Length: {length}\r\n\r\n{body}"
    );
    let mut stream = None;
    eventually(LONG, "the service listens", || {
        stream = TcpStream::connect(address).ok();
        stream.is_some()
    });
    let mut stream = stream.expect("it was waited for");
    stream.set_nodelay(true).expect("a connected socket");
    stream.set_read_timeout(Some(LONG)).expect("a connected socket");
    let sent = Instant::now();
    if let Some(Cut::Request(hundredths)) = cut {
        let part = request.len() * hundredths / 100;
        let _ = stream.write_all(&request.as_bytes()[..part]);
        let _ = stream.shutdown(Shutdown::Both);
        return (sent, Outcome::Void);
    }
    if stream.write_all(request.as_bytes()).is_err() {
        return (sent, Outcome::Open);
    }
    let mut answer = Vec::new();
    let limit = match cut {
        Some(Cut::Answer(bytes)) => bytes as u64,
        _ => u64::MAX,
    };
    match stream.take(limit).read_to_end(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            panic!("no answer: {method} {target}")
        }
        _ => {}
    }
    let end = Instant::now();
    match parse(&answer) {
        // The service says so where it cannot know.
        Some(Answer { status: 500, body, .. }) if body == json!({"error": "Database error"}) => {
            (sent, Outcome::Open)
        }
        Some(Answer { status: 503, body, .. }) if body == json!({"error": "Service unavailable"}) => {
            (sent, Outcome::Unavailable(end))
        }
        Some(answer) => (sent, Outcome::Answered(answer, end)),
        None => (sent, Outcome::Open),
    }
}

/// A whole answer, or `None`.
fn parse(bytes: &[u8]) -> Option<Answer> {
    let text = str::from_utf8(bytes).ok()?;
    assert_no_secret(text);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let tag = head.lines().find_map(|line| line.strip_prefix("ETag: ")).map(str::to_owned);
    let length =
        head.lines().find_map(|line| line.strip_prefix("Content-Length: ")?.parse().ok()).unwrap_or(0);
    if body.len() < length {
        return None;
    }
    assert_eq!(body.len(), length, "{text}");
    let body = if body.is_empty() { Value::Null } else { serde_json::from_str(body).expect("JSON") };
    Some(Answer { status, body, tag })
}
