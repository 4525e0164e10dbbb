//! The system's limit of threads: a server does not start if it cannot have all of them.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use parking_lot::Mutex;
use std::{io, thread};

/// Starts so many threads and ends them again. The error says which limit is too low.
pub fn check(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let _shut = gate.lock();
        (0..count).try_for_each(|_| {
            let thread = thread::Builder::new().spawn_scoped(scope, || drop(gate.lock()));
            thread.map(drop).map_err(ran_out)
        })
    })
}

fn ran_out(error: io::Error) -> io::Error {
    let limit = getrlimit(Resource::RLIMIT_NPROC).ok().filter(|(soft, _)| *soft != RLIM_INFINITY);
    let limit = limit.map(|(soft, _)| format!(", now {soft}")).unwrap_or_default();
    io::Error::other(format!(
        "no thread can be started ({error}); raise the limit of threads (ulimit -u{limit}; TasksMax= of a unit, pids \
         of a container)"
    ))
}
