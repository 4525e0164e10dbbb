//! Finding the socket of a connection, which `postgres` keeps to itself.

use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getpeername};
use std::{
    fs,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

/// A descriptor of the socket that the runtime of this thread has just connected to a server. `None` where there is no
/// Linux /proc, or no descriptor left.
///
/// A runtime has an epoll instance of its own. It is found by a socket that we register with it, and has one other
/// whose peer has a name.
pub(super) fn connected_socket() -> Option<OwnedFd> {
    let (marker, _other) = tokio::net::UnixStream::pair().ok()?;
    let registered_with = |text: String| -> Vec<RawFd> {
        let fd = |line: &str| {
            let number = line.strip_prefix("tfd:")?.split_whitespace().next()?;
            number.parse().ok()
        };
        text.lines().filter_map(fd).collect()
    };
    let descriptors = fs::read_dir("/proc/self/fdinfo").ok()?;
    let found = descriptors
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .map(registered_with)
        .find(|registered| registered.contains(&marker.as_raw_fd()))?
        .into_iter()
        .find(|fd| has_named_peer(*fd))?;
    // SAFETY: the runtime of this thread owns it and is in the middle of connecting with it, so it stays open here.
    let socket = unsafe { BorrowedFd::borrow_raw(found) };
    socket.try_clone_to_owned().ok()
}

fn has_named_peer(fd: RawFd) -> bool {
    let Ok(peer) = getpeername::<SockaddrStorage>(fd) else {
        return false;
    };
    match peer.as_unix_addr() {
        Some(unix) => unix.path().is_some(),
        None => matches!(peer.family(), Some(AddressFamily::Inet | AddressFamily::Inet6)),
    }
}
