//! `userd healthcheck`: asks the server at the configured address whether it is ready. Has an HTTP client of its own,
//! which can do no more than this.

use super::signals::{exit_now, spawn_thread};
use super::{Failure, arguments::Args, environment};
use crate::{Config, server};
use std::io::{self, Read, Write};
use std::{net::TcpStream, os::unix::net::UnixStream, thread, time::Duration};

/// Age in seconds at which the server's last probe of the database is too old for this check. A request for `/readyz`
/// makes the server probe the database anew if its last probe is old.
const MAX_PROBE_AGE_SECONDS: u64 = 5;

/// Pause between two requests for `/readyz`.
const REQUEST_PAUSE: Duration = Duration::from_millis(100);

/// The most bytes of an answer that are read. userd's answers have some 300 bytes.
const MAX_ANSWER_BYTES: u64 = 4096;

/// Asks the server whether it is ready. Repeats the request until the server has probed the database recently. Blocks
/// for up to the `request_timeout`.
pub fn check_health(args: &Args) -> Result<(), Failure> {
    let Config { host, port, limits, .. } = environment::read_config(args).map_err(Failure::usage)?;
    let late = format!("no answer from {} in time", server::shown_address(&host, port));
    // Ends the process from a thread at the time-out, because no time-out of a socket bounds the connect, or an answer
    // that comes byte by byte.
    spawn_thread("deadline", move || {
        thread::sleep(limits.request_timeout);
        exit_now(1, &late);
    })?;
    while request_probe_age_seconds(&host, port).map_err(Failure::runtime)? >= MAX_PROBE_AGE_SECONDS {
        thread::sleep(REQUEST_PAUSE);
    }
    Ok(())
}

/// Requests `/readyz`. Returns how many seconds ago the server has probed the database. Fails if the service is not
/// ready.
fn request_probe_age_seconds(host: &str, port: u16) -> Result<u64, String> {
    let connect = || TcpStream::connect(&*server::resolve_addresses(host, port)?);
    let answer = match host.strip_prefix("unix:") {
        Some(path) => UnixStream::connect(path).and_then(get_readyz),
        None => connect().and_then(get_readyz),
    };
    let address = server::shown_address(host, port);
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

/// Requests `/readyz` through a connected stream. Returns the answer, its head included.
fn get_readyz(mut stream: impl Read + Write) -> io::Result<String> {
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    Ok(answer)
}
