//! `userd healthcheck`: asks the server that the same variables start. Knows its address, and enough of HTTP to read an
//! answer.

use super::signals::{exit, spawn};
use super::{Failure, arguments::Args, environment};
use crate::{Config, server};
use std::io::{self, Read, Write};
use std::{net::TcpStream, os::unix::net::UnixStream, thread, time::Duration};

/// Age in seconds of the oldest probe whose result counts. The first request for `/readyz` causes a new probe.
const FRESH_SECONDS: u64 = 5;

/// Pause between two requests.
const QUESTION_PAUSE: Duration = Duration::from_millis(100);

/// The most bytes of an answer that are read. An answer of userd has some 300.
const ANSWER_BYTES: u64 = 4096;

/// Asks the server whether the service is ready, again and again until the answer comes from a recent probe of the
/// database. Blocks for up to the `request_timeout`.
pub fn healthcheck(args: &Args) -> Result<(), Failure> {
    let Config { host, port, limits, .. } = environment::config(args).map_err(Failure::usage)?;
    let late = format!("no answer from {} in time", server::address(&host, port));
    // A thread ends the process at the time-out: neither a connect nor reading from a server that sends one byte
    // at a time has a bound of its own.
    spawn("deadline", move || {
        thread::sleep(limits.request_timeout);
        exit(1, &late);
    })?;
    while ask(&host, port).map_err(Failure::runtime)? >= FRESH_SECONDS {
        thread::sleep(QUESTION_PAUSE);
    }
    Ok(())
}

/// Returns the seconds since the database answered, if the service is ready.
fn ask(host: &str, port: u16) -> Result<u64, String> {
    let connect = || TcpStream::connect(&*server::addresses(host, port)?);
    let answer = match host.strip_prefix("unix:") {
        Some(path) => UnixStream::connect(path).and_then(exchange),
        None => connect().and_then(exchange),
    };
    let address = server::address(host, port);
    let answer = answer.map_err(|error| {
        format!("no answer from {address}: {error}; start userd, or name its address with --host and --port")
    })?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let mut lines = head.lines();
    match lines.next().unwrap_or_default().trim_start_matches("HTTP/1.1 ") {
        "200 OK" => Ok(lines.find_map(|line| line.strip_prefix("Age: ")?.parse().ok()).unwrap_or_default()),
        status => Err(format!("GET /readyz at {address} was answered {status}: {}", body.trim_end())),
    }
}

fn exchange(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES).read_to_string(&mut answer)?;
    Ok(answer)
}
