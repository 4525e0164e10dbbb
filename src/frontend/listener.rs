//! The socket that clients connect to: a TCP address, a Unix socket, or a socket that a supervisor has opened.
//!
//! Owns the life of a Unix socket's file. Binds every socket that clients connect to. Knows nothing of HTTP.

use socket2::{Domain, SockAddr, Socket, Type};
use std::net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs};
use std::os::{
    fd::OwnedFd,
    unix::fs::{FileTypeExt, MetadataExt},
};
use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

/// Connections that the kernel completes before they are accepted. It lowers this to its own bound.
const BACKLOG: i32 = 4096;

/// A socket that clients connect to, or will. Dropping it frees the port, and removes the file that it made.
pub struct Listener {
    pub(super) socket: Socket,
    /// The path and the inode of the file of a Unix socket that was bound here.
    file: Option<(PathBuf, u64)>,
    /// A supervisor has passed the socket, and goes on listening when this process stops.
    is_passed: bool,
}

impl Listener {
    /// Binds `host`, an address or a name, or `unix:/path`; `::` takes IPv4 as well. Port 0 is a free one. Clients are
    /// refused until [`Listener::listen`].
    ///
    /// A Unix socket's file that no process listens on is replaced; one that is in use, or a file of another kind, is
    /// an error. Blocks for as long as looking a host name up takes.
    pub fn bind(host: &str, port: u16) -> io::Result<Listener> {
        if let Some(path) = host.strip_prefix("unix:") {
            return bind_unix(Path::new(path));
        }
        let host = host.strip_prefix('[').unwrap_or(host);
        let host = host.strip_suffix(']').unwrap_or(host);
        let bound = (host, port).to_socket_addrs()?.map(bind_tcp);
        // Takes the first address that can be bound, or the last error.
        let bound = bound.reduce(Result::or);
        let none = || Err(io::Error::new(io::ErrorKind::NotFound, "the host name has no address"));
        Listener::new(bound.unwrap_or_else(none)?, None, false)
    }

    /// Listens. An error if another process has begun to listen there, or has taken the path, since.
    pub fn listen(&self) -> io::Result<()> {
        match self.file {
            Some(_) if !self.has_file() => Err(io::ErrorKind::AddrInUse.into()),
            _ if self.is_passed => Ok(()),
            _ => self.socket.listen(BACKLOG),
        }
    }

    /// Takes a socket that listens already, as systemd passes one in `LISTEN_FDS`. If it is a Unix socket, its file is
    /// the supervisor's and stays.
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

    /// Accepts the next client. Returns its socket, and its address unless that is a Unix socket; `WouldBlock` if no
    /// client waits.
    pub(super) fn accept(&self) -> io::Result<(Socket, Option<IpAddr>)> {
        let (socket, address) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        Ok((socket, address.as_socket().map(|address| address.ip())))
    }

    /// Returns whether the path of the Unix socket that was bound here still leads to its file.
    fn has_file(&self) -> bool {
        let is_own = |(path, inode): &(PathBuf, u64)| {
            fs::symlink_metadata(path).is_ok_and(|found| found.ino() == *inode)
        };
        self.file.as_ref().is_some_and(is_own)
    }

    fn new(socket: Socket, file: Option<(PathBuf, u64)>, is_passed: bool) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        if address.as_socket().is_some() {
            // Accepted connections inherit the option. An answer is one write, so waiting for more bytes would delay
            // it.
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
    // Connections of an earlier server in TIME_WAIT do not hold the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Binds a path that is free. Removes the file of a socket that no process listens on.
fn bind_unix(path: &Path) -> io::Result<Listener> {
    use io::ErrorKind::{AddrInUse, AlreadyExists, InvalidInput, NotFound};
    if path.as_os_str().is_empty() {
        // Linux would bind an empty path to a name of its own choice.
        return Err(io::Error::new(InvalidInput, "the path of the socket is empty"));
    }
    let address = SockAddr::unix(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(AlreadyExists, "the path is taken by something that is not a socket"));
        }
        Ok(_) if in_use(&address)? => return Err(AddrInUse.into()),
        Ok(_) => fs::remove_file(path)?,
        Err(error) if error.kind() == NotFound => {}
        Err(error) => return Err(error),
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&address)?;
    let file = (std::path::absolute(path)?, fs::symlink_metadata(path)?.ino());
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
        // The file is removed before the socket is closed, as a server that starts now would take it for a stale one.
        // The next start replaces a file that is left.
        if let Some((path, _)) = self.file.as_ref().filter(|_| self.has_file()) {
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

    fn listen(port: u16) -> Listener {
        let listener = Listener::bind("127.0.0.1", port).unwrap();
        listener.listen().unwrap();
        listener
    }

    #[test]
    fn accepted_connections_do_not_wait_for_more_to_send() {
        let listener = listen(0);
        let address = listener.local_addr().unwrap();
        let _client = std::net::TcpStream::connect(address).unwrap();
        assert!(listener.accept().unwrap().0.tcp_nodelay().unwrap());
    }

    #[test]
    fn copies_in_other_processes_keep_no_port() {
        let listener = listen(0);
        let address = listener.local_addr().unwrap();
        // A process that is being started has such a copy.
        let copy = listener.socket.try_clone().unwrap();
        drop(listener);
        assert!(std::net::TcpStream::connect(address).is_err());
        drop(listen(address.port()));
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
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(std::net::TcpStream::connect(address).is_err());
        listener.listen().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
        let error = Listener::bind("127.0.0.1", address.port()).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    /// The file of a socket that does not listen looks like one that was left behind.
    #[test]
    fn of_two_that_bind_one_path_the_last_one_listens() {
        let path = std::env::temp_dir().join(format!("userd-listener-{}", std::process::id()));
        let host = format!("unix:{}", path.display());
        let [first, last] = [(); 2].map(|()| Listener::bind(&host, 0).unwrap());
        assert_eq!(first.listen().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        last.listen().unwrap();
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(last);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_is_needed() {
        let error = Listener::bind("unix:", 0).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
