//! `userd healthcheck`: one request to the server that the same variables start. Knows its address, its token, and
//! enough of HTTP to read a status.

use std::{
    io::{self, Read, Write},
    net::{TcpStream, ToSocketAddrs},
    os::unix::net::UnixStream,
    time::Duration,
};
use userd::Config;

/// A page of one user, which takes a worker and the database.
const TARGET: &str = "/users?perPage=1";

/// Asks for a page of one user. Blocks for up to twice the `request_timeout`. The error is one line.
pub fn healthcheck(config: &Config) -> Result<(), String> {
    let timeout = config.limits.request_timeout;
    let address = match config.host.starts_with("unix:") {
        true => config.host.clone(),
        false => format!("{}:{}", config.host, config.port),
    };
    let answer = match config.host.strip_prefix("unix:") {
        Some(path) => unix(path, timeout).and_then(|stream| ask(stream, config)),
        None => tcp(config, timeout).and_then(|stream| ask(stream, config)),
    };
    let answer = answer.map_err(|error| format!("no answer from {address}: {error}"))?;
    match answer.strip_prefix("HTTP/1.1 ") {
        Some(answer) if answer.starts_with("200 ") => Ok(()),
        Some(answer) => Err(format!(
            "GET {TARGET} at {address} was answered {}",
            answer.lines().next().unwrap_or_default()
        )),
        None => Err(format!("{address} does not speak HTTP/1.1")),
    }
}

fn unix(path: &str, timeout: Duration) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

/// Connecting to `0.0.0.0` or `::`, where a server listens on every address, reaches this machine.
fn tcp(config: &Config, timeout: Duration) -> io::Result<TcpStream> {
    let host = config.host.trim_start_matches('[').trim_end_matches(']');
    let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the host name has no address"));
    for address in (host, config.port).to_socket_addrs()? {
        result = TcpStream::connect_timeout(&address, timeout);
        if result.is_ok() {
            break;
        }
    }
    let stream = result?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

fn ask(mut stream: impl Read + Write, config: &Config) -> io::Result<String> {
    let token = config
        .api_token
        .as_ref()
        .map_or_else(String::new, |token| format!("Authorization: Bearer {}\r\n", token.expose()));
    let request = format!("GET {TARGET} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{token}\r\n");
    stream.write_all(request.as_bytes())?;
    // The status is in the first bytes.
    let mut answer = Vec::new();
    stream.take(64).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
