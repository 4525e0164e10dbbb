//! Finding the socket of a connection, which `postgres` keeps to itself.

use nix::{
    libc,
    sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getpeername},
};
use std::{
    fs, io,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

/// A descriptor of the socket that the runtime of this thread has just connected to a server. `None` where there is no
/// Linux /proc. The error: the system has no descriptor left, so that it cannot be told.
///
/// A runtime has an epoll instance of its own. It is found by a socket that we register with it, and has one other
/// whose peer has a name.
pub(super) fn connected_socket() -> io::Result<Option<OwnedFd>> {
    let (marker, _other) = tokio::net::UnixStream::pair()?;
    let registered_with = |text: String| -> Vec<RawFd> {
        let fd = |line: &str| {
            let number = line.strip_prefix("tfd:")?.split_whitespace().next()?;
            number.parse().ok()
        };
        text.lines().filter_map(fd).collect()
    };
    let mut found = None;
    for descriptor in read(fs::read_dir("/proc/self/fdinfo"))?.into_iter().flatten() {
        // It may have been closed since.
        let text = read(descriptor.and_then(|entry| fs::read_to_string(entry.path())))?;
        let registered = text.map(registered_with).unwrap_or_default();
        if registered.contains(&marker.as_raw_fd()) {
            found = registered.into_iter().find(|fd| has_named_peer(*fd));
            break;
        }
    }
    // SAFETY: the runtime of this thread owns it and is in the middle of connecting with it, so it stays open here.
    found.map(|found| unsafe { BorrowedFd::borrow_raw(found) }.try_clone_to_owned()).transpose()
}

/// What was read from /proc, or `None` where it has it not. The error: there is no descriptor to read it with.
fn read<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => Err(error),
        result => Ok(result.ok()),
    }
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
