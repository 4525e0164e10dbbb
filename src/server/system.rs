//! The limits that the system sets for open descriptors and threads. If a limit is too low, the server does not start,
//! because it would fail requests under load.

use crate::{config::Config, error::StartError, frontend::MAX_SURPLUS_CLIENTS};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use std::{fs, io, thread};

/// The descriptors of one database session: two for its socket, and three with which the async runtime of the database
/// client waits for events.
const SESSION_DESCRIPTORS: u64 = 5;

/// The descriptors that are left to the rest of the process, which may open them after the start. A start succeeds
/// with half of them, because the process opens some between two checks.
const SPARE_DESCRIPTORS: u64 = 64;

/// The threads of the process beside its workers.
const OTHER_THREADS: usize = 16;

/// Raises the limit of descriptors to the number that a server of these settings needs. Returns the number of
/// connections that the descriptors suffice for.
///
/// # Errors
/// [`StartError::System`] if they suffice for no connection, with the number that is needed, or if the process may not
/// have enough threads.
pub fn check_system(config: &Config) -> Result<usize, StartError> {
    let threads = try_start_threads(config.workers + OTHER_THREADS);
    threads.and_then(|()| possible_connections(config)).map_err(StartError::System)
}

fn possible_connections(config: &Config) -> io::Result<usize> {
    let wanted = config.limits.max_connections;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let open = fs::read_dir("/proc/self/fd").map_or(SPARE_DESCRIPTORS, |open| open.count() as u64);
    let others = open + SESSION_DESCRIPTORS * u64::from(config.db_pool_size);
    let least = others + SPARE_DESCRIPTORS;
    let others = least + MAX_SURPLUS_CLIENTS as u64;
    let needed = wanted as u64 + others;
    if soft >= needed {
        return Ok(wanted);
    }
    // Raises the hard limit, too, which root may do; other users may raise the soft limit up to it.
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

/// Starts so many threads and ends them again, because a library panics later if it can start none. The error says
/// which limit is too low.
fn try_start_threads(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let _shut = gate.lock();
        (0..count).try_for_each(|_| {
            let thread = thread::Builder::new().spawn_scoped(scope, || drop(gate.lock()));
            thread.map(drop).map_err(explain_limit)
        })
    })
}

fn explain_limit(error: io::Error) -> io::Error {
    let limit = getrlimit(Resource::RLIMIT_NPROC).ok().filter(|(soft, _)| *soft != RLIM_INFINITY);
    let limit = limit.map(|(soft, _)| format!(", now {soft}")).unwrap_or_default();
    io::Error::other(format!(
        "no thread can be started ({error}); raise the limit of threads (ulimit -u{limit}; TasksMax= of a unit, pids \
         of a container)"
    ))
}
