//! `userd healthcheck`: one request to the server that the same variables start. Knows its address, and enough of HTTP
//! to read an answer.

use super::{Failure, arguments::Given, environment};
use socket2::{SockAddr, Socket, Type};
use std::{
    io::{self, Read, Write},
    net::ToSocketAddrs,
    thread,
    time::{Duration, Instant},
};
use userd::Config;

const TARGET: &str = "/readyz";

/// Age of the oldest probe whose result counts. The first question causes a new one.
const FRESH: Duration = Duration::from_secs(5);

/// Pause between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks if the service is ready, until the answer is from a recent probe. Blocks for up to three times the
/// `request_timeout`.
pub fn healthcheck(given: &Given) -> Result<(), Failure> {
    let config = environment::config(given).map_err(Failure::usage)?;
    let deadline = Instant::now() + config.limits.request_timeout;
    loop {
        let age = ask(&config).map_err(Failure::runtime)?;
        if age < FRESH {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Failure::runtime(format!("the database answered last {} s ago", age.as_secs())));
        }
        thread::sleep(PAUSE);
    }
}

/// Returns the time since the database answered, if the service is ready.
fn ask(config: &Config) -> Result<Duration, String> {
    let address = match config.host.starts_with("unix:") {
        true => config.host.clone(),
        false => format!("{}:{}", config.host, config.port),
    };
    let answer = connect(config).and_then(exchange).map_err(|error| {
        format!("no answer from {address}: {error}; start userd, or name its address with --host and --port")
    })?;
    match answer.strip_prefix("HTTP/1.1 ") {
        Some(answer) if answer.starts_with("200 ") => {
            let age = answer.lines().find_map(|line| line.strip_prefix("Age: ")?.parse().ok());
            Ok(Duration::from_secs(age.unwrap_or_default()))
        }
        Some(answer) => {
            let status = answer.lines().next().unwrap_or_default();
            let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body.trim_end());
            Err(format!("GET {TARGET} at {address} was answered {status}: {body}"))
        }
        None => Err(format!("{address} does not speak HTTP/1.1")),
    }
}

/// Connects to the service. `0.0.0.0` and `::`, with which a server listens on every address, are this machine.
fn connect(config: &Config) -> io::Result<Socket> {
    let timeout = config.limits.request_timeout;
    let host = config.host.trim_start_matches('[').trim_end_matches(']');
    let addresses = match host.strip_prefix("unix:") {
        Some(path) => vec![SockAddr::unix(path)?],
        None => (host, config.port).to_socket_addrs()?.map(SockAddr::from).collect(),
    };
    let open = |address: SockAddr| {
        let socket = Socket::new(address.domain(), Type::STREAM, None)?;
        socket.set_read_timeout(Some(timeout))?;
        socket.set_write_timeout(Some(timeout))?;
        match address.is_unix() {
            true => socket.connect(&address)?,
            false => socket.connect_timeout(&address, timeout)?,
        }
        Ok(socket)
    };
    let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the host name has no address"));
    for address in addresses {
        result = open(address);
        if result.is_ok() {
            break;
        }
    }
    result
}

fn exchange(mut stream: Socket) -> io::Result<String> {
    /// Ours have some 300 bytes; another program's may have any number.
    const MOST_BYTES: u64 = 4096;
    let request = format!("GET {TARGET} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.take(MOST_BYTES).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
