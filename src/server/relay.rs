//! tiny_http, and the private stream over which the frontend is its only client.
//!
//! tiny_http gives each connection a thread, waits for a slow client, and takes whatever is sent. So it serves one
//! client that never misbehaves: the frontend, which sends tickets over one stream. A ticket names the slots whose
//! requests are complete. tiny_http takes only a listener; so the stream is a connection to a socket that has space for
//! one.

use nix::sys::socket::{AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, bind, connect};
use nix::sys::socket::{getsockname, listen, shutdown, socket};
use std::io;
use std::os::{
    fd::AsRawFd,
    unix::net::{UnixListener, UnixStream},
};

/// Starts tiny_http, and connects the one stream that it will ever serve. Its threads end with that stream. The value
/// is never dropped: its `Drop` panics if the listener has no path.
pub fn start() -> io::Result<(&'static tiny_http::Server, UnixStream)> {
    let open = |flags| socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC | flags, None);
    let (listener, stream) = (open(SockFlag::empty())?, open(SockFlag::SOCK_NONBLOCK)?);
    // Linux chooses a name that is in no directory.
    bind(listener.as_raw_fd(), &UnixAddr::new_unnamed())?;
    listen(&listener, Backlog::new(0)?)?;
    // Fails if another process has connected to the listener first.
    connect(stream.as_raw_fd(), &getsockname::<UnixAddr>(listener.as_raw_fd())?)?;
    // No process can connect any more; the connection above waits to be accepted.
    shutdown(listener.as_raw_fd(), Shutdown::Both)?;
    let http = tiny_http::Server::from_listener(UnixListener::from(listener), None);
    Ok((Box::leak(Box::new(http.map_err(io::Error::other)?)), UnixStream::from(stream)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_stream_is_the_only_one() {
        let (http, mut stream) = start().unwrap();
        let tiny_http::ListenAddr::Unix(address) = http.server_addr() else { panic!("it is a Unix socket") };
        let refused = UnixStream::connect_addr(&address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        stream.write_all(b"GET /x HTTP/1.1\r\n\r\n").unwrap();
        // The first result is that no further connection can be accepted.
        let request = http.recv().or_else(|_| http.recv()).unwrap();
        assert_eq!(request.url(), "/x");
        assert!(UnixStream::connect_addr(&address).is_err());
    }
}
