//! What is listened on: a TCP address, a Unix socket, or a socket that a supervisor has opened.
//!
//! Owns the life of a Unix socket's file. Knows nothing of HTTP; the only place where a socket is bound.

use mio::{event::Source, net};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use std::{
    fmt, fs,
    io::{self, Read, Write},
    net::{IpAddr, Shutdown, SocketAddr, ToSocketAddrs},
    os::{
        fd::OwnedFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

/// Connections that the kernel completes before they are accepted. It lowers this to its own bound.
const BACKLOG: i32 = 4096;

/// A socket that clients connect to. Dropping it frees the port, and removes the file that it made.
pub struct Listener {
    socket: Kind,
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

enum Kind {
    Tcp(net::TcpListener),
    Unix(net::UnixListener),
}

impl Listener {
    /// Listens on `host`, an address, a name, or `unix:/path`; `::` takes IPv4 as well. Port 0 is a free one.
    ///
    /// A Unix socket's file without a listener is replaced; one that is in use, or a file of another
    /// kind, is an error. Blocks for as long as looking a host name up takes.
    pub fn bind(host: &str, port: u16) -> io::Result<Listener> {
        if let Some(path) = host.strip_prefix("unix:") {
            return bind_unix(Path::new(path));
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
        Listener::new(result?, Origin::Bound(None))
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
        match &self.socket {
            Kind::Tcp(listener) => listener.local_addr().ok(),
            Kind::Unix(_) => None,
        }
    }

    /// The next client, and its address unless it came over a Unix socket; `WouldBlock` when there is none.
    pub(super) fn accept(&self) -> io::Result<(Stream, Option<IpAddr>)> {
        match &self.socket {
            Kind::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                Ok((Stream::Tcp(stream), Some(address.ip())))
            }
            Kind::Unix(listener) => Ok((Stream::Unix(listener.accept()?.0), None)),
        }
    }

    pub(super) fn source(&mut self) -> &mut dyn Source {
        match &mut self.socket {
            Kind::Tcp(listener) => listener,
            Kind::Unix(listener) => listener,
        }
    }

    fn new(socket: Socket, origin: Origin) -> io::Result<Listener> {
        socket.set_nonblocking(true)?;
        let address = socket.local_addr()?;
        let (name, socket) = match address.as_socket() {
            Some(address) => {
                // Linux hands it on to every connection that is accepted. An answer is one write, so
                // waiting for more of it would only be late.
                socket.set_tcp_nodelay(true)?;
                let listener = std::net::TcpListener::from(socket);
                (format!("http://{address}"), Kind::Tcp(net::TcpListener::from_std(listener)))
            }
            None if address.is_unix() => {
                let path = address.as_pathname().unwrap_or(Path::new("(unnamed)"));
                let listener = std::os::unix::net::UnixListener::from(OwnedFd::from(socket));
                (format!("unix:{}", path.display()), Kind::Unix(net::UnixListener::from_std(listener)))
            }
            None => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a TCP nor a Unix socket"));
            }
        };
        Ok(Listener { socket, name, origin })
    }
}

/// A client's socket.
pub(super) enum Stream {
    /// Over TCP.
    Tcp(net::TcpStream),
    /// Over a Unix socket.
    Unix(net::UnixStream),
}

/// `http://127.0.0.1:3000`, or `unix:/path`.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Stream {
    /// What the readiness loop registers.
    pub(super) fn source(&mut self) -> &mut dyn Source {
        match self {
            Stream::Tcp(stream) => stream,
            Stream::Unix(stream) => stream,
        }
    }

    /// Says that nothing more will be sent.
    pub(super) fn finish(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(bytes),
            Stream::Unix(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
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
    socket.listen(BACKLOG)?;
    Ok(socket)
}

fn bind_unix(path: &Path) -> io::Result<Listener> {
    if path.as_os_str().is_empty() {
        // The system would make a name up.
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path of the socket is empty"));
    }
    let address = SockAddr::unix(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the path is taken by something that is not a socket",
            ));
        }
        Ok(_) if in_use(&address)? => return Err(io::ErrorKind::AddrInUse.into()),
        Ok(_) => fs::remove_file(path)?,
        Err(_) => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&address)?;
    let file = File::new(path)?;
    socket.listen(BACKLOG)?;
    Listener::new(socket, Origin::Bound(Some(file)))
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
            let _ = match &self.socket {
                Kind::Tcp(listener) => SockRef::from(listener).shutdown(Shutdown::Both),
                Kind::Unix(listener) => SockRef::from(listener).shutdown(Shutdown::Both),
            };
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
        match listener.accept().unwrap().0 {
            Stream::Tcp(stream) => assert!(stream.nodelay().unwrap()),
            Stream::Unix(_) => unreachable!(),
        }
    }

    #[test]
    fn copies_in_other_processes_keep_no_port() {
        let bind = |port| Listener::bind("127.0.0.1", port).unwrap();
        let listener = bind(0);
        let address = listener.local_addr().unwrap();
        let Kind::Tcp(socket) = &listener.socket else { unreachable!() };
        // What a process that is being started has as well.
        let copy = SockRef::from(socket).try_clone().unwrap();
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
    fn a_path_is_needed() {
        let error = Listener::bind("unix:", 0).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
