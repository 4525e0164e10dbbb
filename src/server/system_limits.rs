//! The system's limits of open descriptors and threads. If a limit is too low, the server does not start, because
//! requests would fail under load.

use crate::{config::Config, error::StartError, frontend::MAX_SURPLUS_CLIENTS};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use std::{fs, io, thread};

/// The number of descriptors that one database session uses: two for its socket, and three with which the database
/// client waits for events.
const DESCRIPTORS_PER_SESSION: u64 = 5;

/// The number of descriptors that are kept free for the rest of the process. A start succeeds if half of them are free:
/// it checks the limit twice, and the process opens some descriptors in between.
const SPARE_DESCRIPTORS: u64 = 64;

/// The number of threads of the process beside its workers, rounded up.
const NON_WORKER_THREADS: usize = 16;

/// Raises the process's limit of open descriptors to what a server with these settings needs. Returns the number of
/// client connections for which the descriptors suffice, at most `max_connections`.
///
/// # Errors
/// [`StartError::System`] if the descriptors do not suffice for any connection, or if the process may not start enough
/// threads. The error says which limit to raise.
pub fn raise_limits_for_connections(config: &Config) -> Result<usize, StartError> {
    let threads = try_start_threads(config.workers + NON_WORKER_THREADS);
    threads.and_then(|()| raise_descriptor_limit(config)).map_err(StartError::System)
}

/// Raises the limit of open descriptors. Returns for how many client connections the descriptors suffice.
fn raise_descriptor_limit(config: &Config) -> io::Result<usize> {
    let wanted = config.limits.max_connections;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let open = fs::read_dir("/proc/self/fd").map_or(SPARE_DESCRIPTORS, |open| open.count() as u64);
    let others = open + DESCRIPTORS_PER_SESSION * u64::from(config.db_pool_size);
    let least = others + SPARE_DESCRIPTORS;
    let others = least + MAX_SURPLUS_CLIENTS as u64;
    let needed = wanted as u64 + others;
    if soft >= needed {
        return Ok(wanted);
    }
    // Raises the hard limit, too, which only root may do. If that fails, raises the soft limit up to the hard limit.
    let attempts = [(needed, hard.max(needed)), (hard.min(needed), hard)];
    let raised =
        attempts.into_iter().find(|&(soft, hard)| setrlimit(Resource::RLIMIT_NOFILE, soft, hard).is_ok());
    let got = raised.map_or(soft, |(soft, _)| soft);
    if got < least - SPARE_DESCRIPTORS / 2 {
        return Err(io::Error::other(format!(
            "the limit of {got} open descriptors (ulimit -n) is too low: at least {least} are needed with \
             DB_POOL_SIZE={}, and {needed} for MAX_CONNECTIONS={wanted}",
            config.db_pool_size
        )));
    }
    let possible = usize::try_from(got.saturating_sub(others)).unwrap_or(usize::MAX);
    Ok(possible.clamp(1, wanted))
}

/// Starts this number of threads and ends them again. Fails if the limit of threads is too low, because a library would
/// panic later if it could not start a thread. The error says which limit to raise.
fn try_start_threads(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let _shut = gate.lock();
        (0..count).try_for_each(|_| {
            let thread = thread::Builder::new().spawn_scoped(scope, || drop(gate.lock()));
            thread.map(drop).map_err(explain_thread_error)
        })
    })
}

/// Explains why a thread could not be started: returns an error that also says which limit to raise.
fn explain_thread_error(error: io::Error) -> io::Error {
    let limit = getrlimit(Resource::RLIMIT_NPROC).ok().filter(|(soft, _)| *soft != RLIM_INFINITY);
    let limit = limit.map(|(soft, _)| format!(", now {soft}")).unwrap_or_default();
    io::Error::other(format!(
        "no thread can be started ({error}); raise the limit of threads (ulimit -u{limit}; TasksMax= of a unit, pids \
         of a container)"
    ))
}
