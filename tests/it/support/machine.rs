//! The machine that the tests run on: its ports, its files, its time. Knows nothing of what is tested.

use nix::sys::stat::{Mode, umask};
use socket2::{Domain, Socket, Type};
use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

/// Lets time pass: between two polls, or to reach a later moment of another process's work.
pub fn pause(time: Duration) {
    thread::sleep(time);
}

/// A port that no process listens on, and that the system does not assign to a process that asks for a free one.
pub fn free_port() -> u16 {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // Below the range of the ports that the system hands out; where another process looks is not where we do.
    let start = std::process::id() * 64;
    loop {
        let next = start.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + u16::try_from(next % 20_000).expect("a remainder");
        // Not listened on: a process that another test starts just now has a copy of the socket for a moment.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("an option of every socket");
        if socket.bind(&SocketAddr::from(([127, 0, 0, 1], port)).into()).is_ok() {
            return port;
        }
    }
}

/// PostgreSQL's account has to read what the tests write, whatever umask they are started with.
pub fn others_may_read() {
    umask(Mode::from_bits_truncate(0o022));
}
