//! tiny_http, and the private stream over which the frontend is its only client.
//!
//! tiny_http gives each connection a thread, waits for slow clients, and accepts malformed requests. So no client of
//! the service reaches it: the frontend sends tickets over one stream, each with the numbers of the slots whose
//! requests are complete. As tiny_http takes only a listener, the stream is the one connection to a listening socket.

use nix::sys::socket::{AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, bind, connect};
use nix::sys::socket::{getsockname, listen, shutdown, socket};
use std::io;
use std::os::{
    fd::AsRawFd,
    unix::net::{UnixListener, UnixStream},
};

/// Starts tiny_http, and connects the one stream that it will ever serve. Its threads end with that stream. The server
/// is leaked, because its `Drop` panics if the listening socket has no path.
pub fn start() -> io::Result<(&'static tiny_http::Server, UnixStream)> {
    let open = |flags| socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC | flags, None);
    let (listener, stream) = (open(SockFlag::empty())?, open(SockFlag::SOCK_NONBLOCK)?);
    // Linux chooses an abstract name for the socket, which is in no directory.
    bind(listener.as_raw_fd(), &UnixAddr::new_unnamed())?;
    listen(&listener, Backlog::new(0)?)?;
    // Fails if another process has connected first, because the backlog has space for one connection.
    connect(stream.as_raw_fd(), &getsockname::<UnixAddr>(listener.as_raw_fd())?)?;
    // Lets no further process connect; the connection above waits to be accepted.
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
        // Ignores the first result: no further connection can be accepted.
        let request = http.recv().or_else(|_| http.recv()).unwrap();
        assert_eq!(request.url(), "/x");
        assert!(UnixStream::connect_addr(&address).is_err());
    }
}
