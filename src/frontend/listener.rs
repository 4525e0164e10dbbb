//! The listening sockets: of TCP addresses, of a Unix socket, or passed by a supervisor such as systemd.
//!
//! Owns the file of a Unix socket, from its creation to its removal. Knows nothing of HTTP.

use crate::error::{PASSED_SOCKET_NAME, StartError};
use nix::libc::EAFNOSUPPORT;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, ToSocketAddrs};
use std::os::{
    fd::OwnedFd,
    unix::fs::{FileTypeExt, MetadataExt},
};
use std::path::{Path, PathBuf};
use std::{collections::BTreeSet, fmt, fs};

/// The most connections that wait in the kernel until they are accepted. The kernel lowers this number to a bound of
/// its own.
const BACKLOG: i32 = 4096;

/// How often binding port 0 is tried. A try fails if the port that the kernel picks is not free on each address.
const MAX_PORT_TRIES: usize = 64;

/// The listening sockets of a service. Dropping them frees the port, and removes the file of a Unix socket that was
/// bound here.
pub struct Listener {
    /// The listening sockets, at least one.
    pub(super) sockets: Vec<Socket>,
    /// The path and the inode of the Unix socket's file; `None` if no Unix socket was bound here.
    path_and_inode: Option<(PathBuf, u64)>,
    /// True if a supervisor has passed the sockets to this process. The supervisor goes on listening when the process
    /// stops.
    is_inherited: bool,
}

impl Listener {
    /// Binds the addresses of `host` that this machine has, or a Unix socket for `unix:/path`. The address `::` takes
    /// IPv4, too. Port 0 stands for a port that is free on each address. Clients are refused until
    /// [`Listener::listen`] is called.
    ///
    /// The error names the address that is in use. The file of a Unix socket is replaced unless a process listens on
    /// it; a file of another kind is an error. Blocks while the host name is looked up.
    pub fn bind(host: &str, port: u16) -> Result<Listener, StartError> {
        let failed = |error| StartError::Listen(shown_address(host, port), error);
        if let Some(path) = host.strip_prefix("unix:") {
            return bind_unix(Path::new(path)).map_err(failed);
        }
        let addresses = resolve_addresses(host, port).map_err(failed)?;
        let mut tries = if port == 0 { MAX_PORT_TRIES } else { 1 };
        loop {
            tries -= 1;
            match bind_each(&addresses) {
                Err(StartError::Listen(_, error)) if error.kind() == ErrorKind::AddrInUse && tries > 0 => {}
                bound => return Listener::new(bound?, None, false).map_err(failed),
            }
        }
    }

    /// Listens on the bound sockets. Fails if another process has begun to listen there, or has replaced the file of
    /// the Unix socket, since the sockets were bound.
    pub fn listen(&self) -> Result<(), StartError> {
        let result = |socket: &Socket| match self.path_and_inode {
            Some(_) if !self.owns_socket_file() => Err(ErrorKind::AddrInUse.into()),
            _ if self.is_inherited => Ok(()),
            _ => socket.listen(BACKLOG),
        };
        self.sockets.iter().try_for_each(|socket| {
            result(socket).map_err(|error| StartError::Listen(socket_name(socket).unwrap_or_default(), error))
        })
    }

    /// Takes over sockets that listen already, as systemd passes them in `LISTEN_FDS`. The file of such a Unix socket
    /// is not removed, because it belongs to the supervisor.
    pub fn from_fds(fds: impl IntoIterator<Item = io::Result<OwnedFd>>) -> Result<Listener, StartError> {
        let take = |fd: io::Result<OwnedFd>| {
            let socket = Socket::from(fd?);
            let is_listening = socket.r#type()? == Type::STREAM && socket.is_listener()?;
            let not_listening = || io::Error::other("it is not a listening stream socket");
            is_listening.then_some(socket).ok_or_else(not_listening)
        };
        let sockets = fds.into_iter().map(take).collect::<io::Result<_>>();
        let listener = sockets.and_then(|sockets| Listener::new(sockets, None, true));
        listener.map_err(|error| StartError::Listen(PASSED_SOCKET_NAME.to_owned(), error))
    }

    /// Returns the first TCP address, port included; `None` if all sockets are Unix sockets.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.tcp_addresses().next()
    }

    /// Returns true if other machines can connect: if a TCP address is not a loopback address.
    pub fn accepts_remote_clients(&self) -> bool {
        self.tcp_addresses().any(|addr| !addr.ip().to_canonical().is_loopback())
    }

    fn tcp_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.sockets.iter().filter_map(|socket| socket.local_addr().ok()?.as_socket())
    }

    /// Accepts the next client of any socket. Returns the socket of the client, and its address unless it uses a Unix
    /// socket; `WouldBlock` if no client waits.
    pub(super) fn accept(&mut self) -> io::Result<(Socket, Option<IpAddr>)> {
        // Begins with another socket at each call, so that a flood at one socket does not keep clients of another one
        // waiting.
        self.sockets.rotate_left(1);
        let is_waiting = |accepted: &io::Result<_>| !matches!(accepted, Err(error) if error.kind() == ErrorKind::WouldBlock);
        let accepted = self.sockets.iter().map(Socket::accept).find(is_waiting);
        let (socket, address) = accepted.unwrap_or_else(|| Err(ErrorKind::WouldBlock.into()))?;
        socket.set_nonblocking(true)?;
        Ok((socket, address.as_socket().map(|address| address.ip())))
    }

    /// Returns true if the path of the Unix socket still leads to the file that was created here. If this process may
    /// not look at the path, the file counts as its own: the process may have created it as root, and run as another
    /// user since.
    fn owns_socket_file(&self) -> bool {
        let is_own = |(path, inode): &(PathBuf, u64)| match fs::symlink_metadata(path) {
            Ok(found) => found.ino() == *inode,
            Err(error) => error.kind() == ErrorKind::PermissionDenied,
        };
        self.path_and_inode.as_ref().is_some_and(is_own)
    }

    /// Prepares sockets for accepting. Fails if one is neither TCP nor Unix. `file`: path and inode of the Unix socket.
    fn new(sockets: Vec<Socket>, file: Option<(PathBuf, u64)>, is_inherited: bool) -> io::Result<Listener> {
        for socket in &sockets {
            socket.set_nonblocking(true)?;
            let address = socket.local_addr()?;
            if address.as_socket().is_some() {
                // Sets TCP_NODELAY on the listening socket, from which accepted connections inherit it. An answer is
                // one write, which would only be delayed by waiting for more bytes.
                socket.set_tcp_nodelay(true)?;
            } else if !address.is_unix() {
                return Err(io::Error::other("neither a TCP nor a Unix socket"));
            }
        }
        Ok(Listener { sockets, path_and_inode: file, is_inherited })
    }
}

/// Shows the address of the first socket: `http://127.0.0.1:3000`, or `unix:/path`.
impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = socket_name(&self.sockets[0]).map_err(|_| fmt::Error)?;
        let scheme = if name.starts_with("unix:") { "" } else { "http://" };
        write!(f, "{scheme}{name}")
    }
}

/// Returns the addresses of a host, IPv4 first. For `localhost`, returns the loopback addresses of IPv4 and IPv6,
/// whatever the resolver says, because clients use either. Blocks while the host name is looked up.
pub fn resolve_addresses(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if host.eq_ignore_ascii_case("localhost") {
        return Ok(vec![(Ipv4Addr::LOCALHOST, port).into(), (Ipv6Addr::LOCALHOST, port).into()]);
    }
    let host = host.strip_prefix('[').unwrap_or(host);
    let host = host.strip_suffix(']').unwrap_or(host);
    // Sorts IPv4 first, and removes duplicates: `/etc/hosts` may have a name twice.
    Ok((host, port).to_socket_addrs()?.collect::<BTreeSet<_>>().into_iter().collect())
}

/// Returns the address of a socket as messages show it: `127.0.0.1:3000`, or `unix:/path`.
fn socket_name(socket: &Socket) -> io::Result<String> {
    let address = socket.local_addr()?;
    let path = || format!("unix:{}", address.as_pathname().unwrap_or(Path::new("(unnamed)")).display());
    Ok(address.as_socket().map_or_else(path, |address| address.to_string()))
}

/// Returns the address of a host and port as messages show it: `host:port`, or `unix:/path` without a port.
pub fn shown_address(host: &str, port: u16) -> String {
    if host.starts_with("unix:") { host.to_owned() } else { format!("{host}:{port}") }
}

/// Binds those addresses that this machine has, all on one port: for port 0, on the port that the kernel picks for the
/// first of them. Fails if the machine has none of the addresses.
fn bind_each(addresses: &[SocketAddr]) -> Result<Vec<Socket>, StartError> {
    let (mut sockets, mut missing) = (Vec::<Socket>::new(), None);
    for mut address in addresses.iter().copied() {
        let first = sockets.first().and_then(|socket| socket.local_addr().ok()?.as_socket());
        address.set_port(first.map_or(address.port(), |first| first.port()));
        match bind_tcp(address) {
            Ok(socket) => sockets.push(socket),
            Err(error) if means_missing_address(&error) => missing = Some((address, error)),
            Err(error) => return Err(StartError::Listen(address.to_string(), error)),
        }
    }
    let missing = missing.filter(|_| sockets.is_empty());
    missing.map_or(Ok(sockets), |(address, error)| Err(StartError::Listen(address.to_string(), error)))
}

/// Returns true if `error`, from binding an address, says that this machine lacks the address, or all addresses of its
/// kind, such as IPv6.
fn means_missing_address(error: &io::Error) -> bool {
    error.kind() == ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(EAFNOSUPPORT)
}

fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        // Clears IPV6_V6ONLY, so that `::` takes IPv4 on every system.
        socket.set_only_v6(false)?;
    }
    // Sets SO_REUSEADDR, so that connections of an earlier server in TIME_WAIT do not hold the port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Binds a Unix socket at a path. If the path has a socket that no process listens on, removes that file first.
fn bind_unix(path: &Path) -> io::Result<Listener> {
    if path.as_os_str().is_empty() {
        // Refuses an empty path: Linux would bind it to a name of its own choice.
        return Err(io::Error::other("the path of the socket is empty"));
    }
    let address = SockAddr::unix(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::other("the path is taken by something that is not a socket"));
        }
        Ok(_) if has_listener(&address)? => return Err(ErrorKind::AddrInUse.into()),
        Ok(_) => fs::remove_file(path)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&address)?;
    let file = (std::path::absolute(path)?, fs::symlink_metadata(path)?.ino());
    Listener::new(vec![socket], Some(file), false)
}

/// Returns true if a process listens on this Unix socket. Connects without waiting: if the backlog is full, a process
/// listens, too.
fn has_listener(address: &SockAddr) -> io::Result<bool> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    let result = socket.connect(address);
    Ok(!result.is_err_and(|error| matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)))
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Removes the file before the socket is closed: a server that starts in between would take a file without a
        // listener for a stale one. Ignores an error, because the next start replaces the file.
        if let Some((path, _)) = self.path_and_inode.as_ref().filter(|_| self.owns_socket_file()) {
            let _ = fs::remove_file(path);
        }
        if !self.is_inherited {
            // Shuts the sockets down before they are closed. A process that another thread is starting holds copies of
            // the sockets until it runs its program; if they were only closed, the copies would keep the port taken.
            for socket in &self.sockets {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns the address in an error, and the kind of the error.
    pub fn failure<T>(result: Result<T, StartError>) -> (String, ErrorKind) {
        match result.err() {
            Some(StartError::Listen(address, error)) => (address, error.kind()),
            other => panic!("{other:?}"),
        }
    }

    fn listen(port: u16) -> Listener {
        let listener = Listener::bind("127.0.0.1", port).unwrap();
        listener.listen().unwrap();
        listener
    }

    #[test]
    fn accepted_connections_do_not_wait_for_more_to_send() {
        let mut listener = listen(0);
        let address = listener.local_addr().unwrap();
        let _client = std::net::TcpStream::connect(address).unwrap();
        assert!(listener.accept().unwrap().0.tcp_nodelay().unwrap());
    }

    #[test]
    fn copies_in_other_processes_keep_no_port() {
        let listener = listen(0);
        let address = listener.local_addr().unwrap();
        // Copies the socket, as a process that is being started does.
        let copy = listener.sockets[0].try_clone().unwrap();
        drop(listener);
        assert!(std::net::TcpStream::connect(address).is_err());
        drop(listen(address.port()));
        drop(copy);
    }

    #[test]
    fn a_supervisor_goes_on_listening() {
        let ours = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        drop(Listener::from_fds([ours.try_clone().map(OwnedFd::from)]).unwrap());
        assert!(std::net::TcpStream::connect(ours.local_addr().unwrap()).is_ok());
    }

    #[test]
    fn a_bound_address_is_taken_and_refuses_clients() {
        let listener = Listener::bind("127.0.0.1", 0).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(std::net::TcpStream::connect(address).is_err());
        listener.listen().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok());
        assert_eq!(
            failure(Listener::bind("127.0.0.1", address.port())),
            (address.to_string(), ErrorKind::AddrInUse)
        );
    }

    /// Checks that `localhost` is one port on both loopbacks: if the port is taken on either, the start fails with its
    /// name, and a listener that wants a free port gets another one.
    #[test]
    fn localhost_is_both_loopbacks() {
        let both = Listener::bind("localhost", 0).unwrap();
        both.listen().unwrap();
        let addresses: Vec<_> = both.tcp_addresses().collect();
        let port = addresses[0].port();
        let expected = super::resolve_addresses("LocalHost", port).unwrap();
        assert_eq!(
            expected.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [format!("127.0.0.1:{port}"), format!("[::1]:{port}")]
        );
        assert_eq!(addresses, expected, "this machine has IPv6");
        assert_eq!(both.to_string(), format!("http://127.0.0.1:{port}"));
        drop(both);
        for taken in expected {
            let other = std::net::TcpListener::bind(taken).unwrap();
            assert_eq!(failure(Listener::bind("localhost", port)), (taken.to_string(), ErrorKind::AddrInUse));
            drop(other);
            Listener::bind("localhost", port).unwrap().listen().unwrap();
        }
    }

    /// Takes half of the free ports on one loopback alone.
    #[test]
    fn a_free_port_is_free_on_both_loopbacks() {
        let others: Vec<_> = (0..200).map(|_| std::net::TcpListener::bind("[::1]:0").unwrap()).collect();
        let ours: Vec<_> = (0..200).map(|_| Listener::bind("localhost", 0).unwrap()).collect();
        for listener in &ours {
            listener.listen().unwrap();
            let ports: Vec<_> = listener.tcp_addresses().map(|addr| addr.port()).collect();
            assert_eq!(ports, [ports[0]; 2]);
            assert!(others.iter().all(|taken| taken.local_addr().unwrap().port() != ports[0]));
        }
    }

    /// Checks that the file of a socket that does not listen yet is taken for one that was left behind.
    #[test]
    fn of_two_that_bind_one_path_the_last_one_listens() {
        let path = std::env::temp_dir().join(format!("userd-listener-{}", std::process::id()));
        let host = format!("unix:{}", path.display());
        let [first, last] = [(); 2].map(|()| Listener::bind(&host, 0).unwrap());
        assert_eq!(failure(first.listen()).1, ErrorKind::AddrInUse);
        drop(first);
        last.listen().unwrap();
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        drop(last);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_is_needed() {
        assert_eq!(failure(Listener::bind("unix:", 0)), ("unix:".to_owned(), ErrorKind::Other));
    }
}
