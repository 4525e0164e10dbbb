//! What is listened on: a TCP address, a Unix socket, or a socket that a supervisor has opened.
//!
//! Owns the life of a Unix socket's file. Binds every socket that clients connect to. Knows nothing of HTTP.

use nix::{
    libc::MSG_NOSIGNAL,
    unistd::{AccessFlags, Uid, access},
};
use socket2::{Domain, SockAddr, Socket, Type};
use std::{
    fmt, fs,
    io::{self, Read, Write},
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
    name: String,
    origin: Origin,
}

/// Where the socket comes from.
enum Origin {
    /// Bound here; a Unix socket with this file.
    Bound(Option<File>),
    /// Passed by a supervisor, which goes on listening when this process stops.
    Passed,
}

/// An address that can be listened on, and is not yet: clients are refused until [`Bound::listen`].
pub struct Bound(Kept);

enum Kept {
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
    /// A Unix socket's file that no process listens on will be replaced if it belongs to this user; one that is in
    /// use, or a file of another kind, is an error. Blocks for as long as looking a host name up takes.
    pub fn new(host: &str, port: u16) -> io::Result<Bound> {
        if let Some(path) = host.strip_prefix("unix:") {
            check_unix(Path::new(path))?;
            return Ok(Bound(Kept::Unix(path.into())));
        }
        let host = host.strip_prefix('[').unwrap_or(host);
        let host = host.strip_suffix(']').unwrap_or(host);
        let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the host name has no address"));
        for address in (host, port).to_socket_addrs()? {
            result = bind_tcp(address);
            if result.is_ok() {
                break;
            }
        }
        result.map(|socket| Bound(Kept::Tcp(socket)))
    }

    /// As [`Listener::from_fd`]: a supervisor listens there already.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Bound> {
        Listener::from_fd(fd).map(|listener| Bound(Kept::Passed(listener)))
    }

    /// Listens. An error if another process has begun to listen there since.
    pub fn listen(self) -> io::Result<Listener> {
        match self.0 {
            Kept::Tcp(socket) => {
                socket.listen(BACKLOG)?;
                Listener::new(socket, Origin::Bound(None))
            }
            Kept::Unix(path) => listen_unix(&path),
            Kept::Passed(listener) => Ok(listener),
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
        Listener::new(socket, Origin::Passed)
    }

    /// The TCP address, port included; `None` for a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.socket.local_addr().ok()?.as_socket()
    }

    /// The next client, and its address unless it came over a Unix socket; `WouldBlock` when there is none.
    pub(super) fn accept(&self) -> io::Result<(Stream, Option<IpAddr>)> {
        let (socket, address) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        Ok((Stream(socket), address.as_socket().map(|address| address.ip())))
    }

    /// What the readiness loop registers.
    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn new(socket: Socket, origin: Origin) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let name = match address.as_socket() {
            Some(address) => {
                // Linux hands it on to every connection that is accepted. An answer is one write, so
                // waiting for more of it would only be late.
                socket.set_tcp_nodelay(true)?;
                format!("http://{address}")
            }
            None if address.is_unix() => {
                let path = address.as_pathname().unwrap_or(Path::new("(unnamed)"));
                format!("unix:{}", path.display())
            }
            None => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a TCP nor a Unix socket"));
            }
        };
        Ok(Listener { socket, name, origin })
    }
}

/// A client's socket, over TCP or a Unix socket.
pub(super) struct Stream(Socket);

/// `http://127.0.0.1:3000`, or `unix:/path`.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Stream {
    /// What the readiness loop registers.
    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Says that nothing more will be sent.
    pub(super) fn finish(&self) -> io::Result<()> {
        self.0.shutdown(Shutdown::Write)
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

/// A client that is gone is an error, and no signal.
impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send_with_flags(bytes, MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        // Some systems say yes by default; `::` is to mean both.
        socket.set_only_v6(false)?;
    }
    // Connections of an earlier server that are still being forgotten do not hold the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Whether the path can be bound: it is free, or has the file of a socket of this user's that is not in use.
fn check_unix(path: &Path) -> io::Result<()> {
    use io::ErrorKind::{AddrInUse, AlreadyExists, InvalidInput, PermissionDenied};
    if path.as_os_str().is_empty() {
        // The system would make a name up.
        return Err(io::Error::new(InvalidInput, "the path of the socket is empty"));
    }
    let address = SockAddr::unix(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            Err(io::Error::new(AlreadyExists, "the path is taken by something that is not a socket"))
        }
        Ok(_) if in_use(&address)? => Err(AddrInUse.into()),
        Ok(found) if found.uid() != Uid::effective().as_raw() => Err(io::Error::new(
            PermissionDenied,
            "a socket of another user's is there, which no process listens on",
        )),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            access(parent(path), AccessFlags::W_OK).map_err(io::Error::from)
        }
        Err(error) => Err(error),
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
    let file = File::new(path)?;
    socket.listen(BACKLOG)?;
    Listener::new(socket, Origin::Bound(Some(file)))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a process listens there. Does not wait for it: a full backlog is a yes.
fn in_use(address: &SockAddr) -> io::Result<bool> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(address) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        _ => Ok(true),
    }
}

/// A Unix socket's file, removed with this value if it is still the one that was made.
struct File {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl File {
    fn new(path: &Path) -> io::Result<File> {
        let made = fs::symlink_metadata(path)?;
        Ok(File { path: std::path::absolute(path)?, device: made.dev(), inode: made.ino() })
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if let Ok(found) = fs::symlink_metadata(&self.path)
            && (found.dev(), found.ino()) == (self.device, self.inode)
        {
            // Nothing can be done about a failure; the next start replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Origin::Bound(file) = &mut self.origin {
            // Before the socket is closed: a server that starts now would take the file for a stale one.
            *file = None;
            // To close it is not enough: a process that another thread starts holds a copy until it runs its
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
        assert!(listener.accept().unwrap().0.0.tcp_nodelay().unwrap());
    }

    #[test]
    fn copies_in_other_processes_keep_no_port() {
        let bind = |port| Listener::bind("127.0.0.1", port).unwrap();
        let listener = bind(0);
        let address = listener.local_addr().unwrap();
        // What a process that is being started has as well.
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
        let Kept::Tcp(socket) = &bound.0 else { unreachable!() };
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
