//! The socket that clients connect to: a TCP address, a Unix socket, or a socket that a supervisor has opened.
//!
//! Owns the life of a Unix socket's file. Binds every socket that clients connect to. Knows nothing of HTTP.

use nix::unistd::{AccessFlags, access};
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    fmt, fs, io,
    net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// Connections that the kernel completes before they are accepted. It lowers this to its own bound.
const BACKLOG: i32 = 4096;

/// A socket that clients connect to. Dropping it frees the port, and removes the file that it made.
pub struct Listener {
    socket: Socket,
    /// The path and the inode of the file of a Unix socket that was bound here.
    file: Option<(PathBuf, u64)>,
    /// A supervisor has passed the socket, and goes on listening when this process stops.
    is_passed: bool,
}

/// An address that can be listened on, and is not yet: clients are refused until [`Bound::listen`].
pub enum Bound {
    /// Bound, so that no other socket can listen there.
    Tcp(Socket),
    /// Bound with the first [`Bound::listen`]: the file of a socket that does not listen looks like a stale one.
    Unix(PathBuf),
    Passed(Listener),
}

impl Bound {
    /// Binds `host`, an address or a name, or looks whether `unix:/path` can be bound; `::` takes IPv4 as well. Port 0
    /// is a free one.
    ///
    /// A Unix socket's file that no process listens on will be replaced; one that is in use, or a file of another kind, is
    /// an error. Blocks for as long as looking a host name up takes.
    pub fn new(host: &str, port: u16) -> io::Result<Bound> {
        if let Some(path) = host.strip_prefix("unix:") {
            check_unix(Path::new(path))?;
            return Ok(Bound::Unix(path.into()));
        }
        let host = host.strip_prefix('[').unwrap_or(host);
        let host = host.strip_suffix(']').unwrap_or(host);
        let bound = (host, port).to_socket_addrs()?.map(bind_tcp);
        // Takes the first address that can be bound, or the last error.
        let bound = bound.reduce(Result::or);
        let none = || Err(io::Error::new(io::ErrorKind::NotFound, "the host name has no address"));
        bound.unwrap_or_else(none).map(Bound::Tcp)
    }

    /// Listens. An error if another process has begun to listen there since.
    pub fn listen(self) -> io::Result<Listener> {
        match self {
            Bound::Tcp(socket) => {
                socket.listen(BACKLOG)?;
                Listener::new(socket, None, false)
            }
            Bound::Unix(path) => listen_unix(&path),
            Bound::Passed(listener) => Ok(listener),
        }
    }
}

impl Listener {
    /// Listens on `host` at once: [`Bound::new`] and [`Bound::listen`].
    #[cfg(test)]
    pub fn bind(host: &str, port: u16) -> io::Result<Listener> {
        Bound::new(host, port)?.listen()
    }

    /// Listens on a socket that is bound already, as systemd passes one in `LISTEN_FDS`. If it is a Unix
    /// socket, its file is the supervisor's and stays.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Listener> {
        let socket = Socket::from(fd);
        if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor passed is not a listening stream socket",
            ));
        }
        Listener::new(socket, None, true)
    }

    /// The TCP address, port included; `None` for a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.socket.local_addr().ok()?.as_socket()
    }

    /// The next client, and its address unless it came over a Unix socket; `WouldBlock` when there is none.
    pub(super) fn accept(&self) -> io::Result<(Socket, Option<IpAddr>)> {
        let (socket, address) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        Ok((socket, address.as_socket().map(|address| address.ip())))
    }

    /// Returns the descriptor that the readiness loop registers.
    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn new(socket: Socket, file: Option<(PathBuf, u64)>, is_passed: bool) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        if address.as_socket().is_some() {
            // Linux hands it on to every connection that is accepted. An answer is one write, so
            // waiting for more of it would only be late.
            socket.set_tcp_nodelay(true)?;
        } else if !address.is_unix() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a TCP nor a Unix socket"));
        }
        Ok(Listener { socket, file, is_passed })
    }
}

/// `http://127.0.0.1:3000`, or `unix:/path`.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.socket.local_addr().map_err(|_| fmt::Error)?;
        match (address.as_socket(), address.as_pathname()) {
            (Some(address), _) => write!(f, "http://{address}"),
            (None, Some(path)) => write!(f, "unix:{}", path.display()),
            (None, None) => f.write_str("unix:(unnamed)"),
        }
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        // `::` takes IPv4 as well, which some systems do not do by default.
        socket.set_only_v6(false)?;
    }
    // Connections of an earlier server that are still being forgotten do not hold the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Checks that the path can be bound: it is free, or has the file of a socket that is not in use.
fn check_unix(path: &Path) -> io::Result<()> {
    use io::ErrorKind::{AlreadyExists, InvalidInput, NotFound};
    if path.as_os_str().is_empty() {
        // Linux makes a name up for an empty path.
        return Err(io::Error::new(InvalidInput, "the path of the socket is empty"));
    }
    let address = SockAddr::unix(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(io::Error::new(AlreadyExists, "the path is taken by something that is not a socket"))
        }
        Ok(_) if in_use(&address)? => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() != NotFound => Err(error),
        _ => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            access(parent.unwrap_or(Path::new(".")), AccessFlags::W_OK).map_err(io::Error::from)
        }
    }
}

/// Takes the path, and removes a stale file.
fn listen_unix(path: &Path) -> io::Result<Listener> {
    check_unix(path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let made = fs::symlink_metadata(path)?;
    let file = (std::path::absolute(path)?, made.ino());
    socket.listen(BACKLOG)?;
    Listener::new(socket, Some(file), false)
}

/// Returns whether a process listens there. Does not wait for it: a full backlog is a yes.
fn in_use(address: &SockAddr) -> io::Result<bool> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let result = socket.connect(address);
    Ok(!result.is_err_and(|error| {
        matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
    }))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // The file is removed before the socket is closed, as a server that starts now would take it for a stale one. The
        // next start replaces a file that is left.
        if let Some((path, inode)) = &self.file
            && fs::symlink_metadata(path).is_ok_and(|found| found.ino() == *inode)
        {
            let _ = fs::remove_file(path);
        }
        if !self.is_passed {
            // Closing the socket is not enough: a process that another thread starts holds a copy until it runs its
            // program (187 of 20,000 ports were not free at once where six threads started processes).
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_connections_do_not_wait_for_more_to_send() {
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        let address = listener.local_addr().unwrap();
        let _client = std::net::TcpStream::connect(address).unwrap();
        assert!(listener.accept().unwrap().0.tcp_nodelay().unwrap());
    }

    #[test]
    fn copies_in_other_processes_keep_no_port() {
        let bind = |port| Listener::bind("127.0.0.1", port).unwrap();
        let listener = bind(0);
        let address = listener.local_addr().unwrap();
        // A process that is being started has such a copy.
        let copy = listener.socket.try_clone().unwrap();
        drop(listener);
        assert!(std::net::TcpStream::connect(address).is_err());
        drop(bind(address.port()));
        drop(copy);
    }

    #[test]
    fn a_supervisor_goes_on_listening() {
        let ours = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        drop(Listener::from_fd(ours.try_clone().unwrap().into()).unwrap());
        assert!(std::net::TcpStream::connect(ours.local_addr().unwrap()).is_ok());
    }

    #[test]
    fn a_bound_address_is_taken_and_refuses_clients() {
        let bound = Bound::new("127.0.0.1", 0).unwrap();
        let Bound::Tcp(socket) = &bound else { unreachable!() };
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        assert!(std::net::TcpStream::connect(address).is_err());
        let listener = bound.listen().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
        let error = Bound::new("127.0.0.1", address.port()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(listener);
    }

    #[test]
    fn a_path_is_needed() {
        let error = Listener::bind("unix:", 0).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
