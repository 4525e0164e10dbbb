//! tiny_http, and the private socket over which the frontend is its only client.
//!
//! tiny_http gives each connection a thread, waits for a slow client, and takes whatever is sent. The frontend has done
//! all that before it passes on whole requests over one stream, so tiny_http serves one client that never misbehaves.
//! tiny_http takes only a listener; so the stream is a connection to a socket that no other process can reach.

use nix::{
    sys::socket::{Shutdown, shutdown},
    unistd::mkdtemp,
};
use std::{
    fs, io,
    os::{
        fd::AsRawFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    process,
};

/// The listening end of the private socket. Dropping it ends tiny_http's accept thread.
pub struct Relay(UnixListener);

impl Relay {
    /// Starts tiny_http, and connects the one stream that it will ever serve: over a socket in a directory that only
    /// this user can enter, in TMPDIR, else /tmp, else /dev/shm, and that is removed before this returns.
    pub fn start() -> io::Result<(Relay, tiny_http::Server, UnixStream)> {
        let temporary = std::env::temp_dir();
        let (listener, stream) = connect([&temporary, Path::new("/tmp"), Path::new("/dev/shm")])?;
        let relay = Relay(listener.try_clone()?);
        let http = tiny_http::Server::from_listener(listener, None).map_err(io::Error::other)?;
        Ok((relay, http, stream))
    }
}

type Connected = (UnixListener, UnixStream);

/// Connects a socket in the first directory that takes one.
fn connect([first, second, third]: [&Path; 3]) -> io::Result<Connected> {
    let others = || connect_in(second).or_else(|_| connect_in(third));
    connect_in(first).or_else(|error| others().map_err(|_| error)).map_err(|error| {
        let places = format!("{}, /tmp or /dev/shm (TMPDIR names another directory)", first.display());
        io::Error::new(error.kind(), format!("cannot make a socket in {places}: {error}"))
    })
}

/// Connects a socket in a new directory in this place. Its path leads through a descriptor, as the path of a socket has
/// a hundred bytes, and build tools have long temporary directories.
fn connect_in(place: &Path) -> io::Result<Connected> {
    let dir = mkdtemp(&place.join(format!("userd-{}-XXXXXX", process::id())))?;
    let connect = || {
        let open = fs::File::open(&dir)?;
        // tiny_http's `Drop` connects to this path and removes its file. The name is unique, so no file is there, even if
        // the descriptor's number is reused.
        let name = dir.file_name().unwrap_or_default();
        let path = Path::new("/proc/self/fd").join(open.as_raw_fd().to_string()).join(name);
        let listener = UnixListener::bind(&path)?;
        Ok((listener, UnixStream::connect(&path)?))
    };
    let connected = connect();
    fs::remove_dir_all(&dir)?;
    connected
}

impl Drop for Relay {
    fn drop(&mut self) {
        // tiny_http's own way, connecting to the path once more, finds the path gone.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_directory_that_takes_a_socket() {
        let none = Path::new("/nowhere");
        let long = format!("/{}", "x".repeat(80));
        let temporary = std::env::temp_dir();
        assert!(connect([none, Path::new(&long), &temporary]).is_ok());
        let line = connect([Path::new("/sys"), none, none]).err().unwrap().to_string();
        assert!(line.starts_with("cannot make a socket in /sys, /tmp or /dev/shm (TMPDIR names"), "{line}");
    }
}
