//! tiny_http, and the private stream over which the frontend sends it tickets. A ticket names the slots of connections
//! whose requests are complete.
//!
//! The clients of the service never connect to tiny_http, because it gives each connection a thread, waits for slow
//! clients, and accepts malformed requests. tiny_http can only be started with a listening socket, so the stream is the
//! only connection to such a socket.

use nix::sys::socket::{AddressFamily, Backlog, Shutdown, SockFlag, SockType, UnixAddr, bind, connect};
use nix::sys::socket::{getsockname, listen, shutdown, socket};
use std::io;
use std::os::{
    fd::AsRawFd,
    unix::net::{UnixListener, UnixStream},
};

/// Starts tiny_http, and connects to it the stream over which the frontend hands it complete requests, as tickets. The
/// threads of tiny_http end when the stream is closed. The `Server` is leaked, because its `Drop` panics if the
/// listening socket has no path in a directory.
pub fn start_tiny_http() -> io::Result<(&'static tiny_http::Server, UnixStream)> {
    let open = |flags| socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC | flags, None);
    let (listener, stream) = (open(SockFlag::empty())?, open(SockFlag::SOCK_NONBLOCK)?);
    // Lets Linux choose an abstract name for the socket: it needs no directory and leaves no file.
    bind(listener.as_raw_fd(), &UnixAddr::new_unnamed())?;
    listen(&listener, Backlog::new(0)?)?;
    // Fails if another process has connected before, because the backlog has space for one connection only.
    connect(stream.as_raw_fd(), &getsockname::<UnixAddr>(listener.as_raw_fd())?)?;
    // Lets no other process connect. The connection of the stream stays in the backlog until tiny_http accepts it.
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
        let (http, mut stream) = start_tiny_http().unwrap();
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
