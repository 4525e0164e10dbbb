//! The system's limits for this process: open descriptors (`RLIMIT_NOFILE`) and address space (`RLIMIT_AS`). The first
//! is raised where it can be; where they are too low, the server does not start, rather than fail requests under load.

use super::threads;
use crate::{config::Config, error::StartError, frontend::MAX_SURPLUS};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use std::{fs, io};

/// Of one session: its socket twice, and the three that its runtime waits with.
const SESSION_DESCRIPTORS: u64 = 5;

/// Descriptors that are left to the rest of the process, beside those that are open at the start. It starts with half
/// of them, as it opens some between two checks.
const SPARE_DESCRIPTORS: u64 = 64;

/// What a thread's stack takes of the addresses, and how many threads there are beside the workers.
const STACK: u64 = 2 << 20;
const THREADS: u64 = 16;

/// The program itself, with what it holds before there are clients.
const PROGRAM: u64 = 32 << 20;

/// What the allocator sets aside at once where it may.
const ALLOCATOR: u64 = 128 << 20;

/// Addresses for each byte of the budget: freed memory is not of use for every size.
const FRAGMENTED: u64 = 2;

/// Raises the limit of descriptors to what a server of these settings needs; for how many clients they suffice.
/// Errors: they do not for any, or there are too few addresses; the line has the number that is needed.
pub fn check(config: &Config) -> Result<usize, StartError> {
    let threads = config.workers + THREADS as usize;
    let checked = threads::check(threads).and_then(|()| addresses(config));
    checked.and_then(|()| descriptors(config)).map_err(StartError::System)
}

fn descriptors(config: &Config) -> io::Result<usize> {
    let wanted = config.limits.max_connections;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let open = fs::read_dir("/proc/self/fd").map_or(SPARE_DESCRIPTORS, |open| open.count() as u64);
    let others = open + SESSION_DESCRIPTORS * u64::from(config.db_pool_size);
    let least = others + SPARE_DESCRIPTORS;
    let others = least + MAX_SURPLUS as u64;
    let needed = wanted as u64 + others;
    if soft >= needed {
        return Ok(wanted);
    }
    // Root may raise the hard limit as well; other users may only go up to it.
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

fn addresses(config: &Config) -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_AS)?;
    if limit == RLIM_INFINITY {
        return Ok(());
    }
    let budget = config.limits.memory_budget as u64;
    let stacks = STACK * (THREADS + config.workers as u64);
    let least = ALLOCATOR + PROGRAM + FRAGMENTED * budget + stacks;
    // The allocator sets aside more where the limit is large, and may leave too little for the stacks. What is asked
    // for is more than what is refused, as the process grows between two checks.
    let in_use = size().unwrap_or_default() + stacks;
    let needed = least.max(in_use + PROGRAM);
    match limit >= least.max(in_use) {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "the limit of {} KiB of addresses (ulimit -v) is too low: at least {} KiB are needed with \
             MEMORY_BUDGET={budget} and WORKERS={}",
            limit >> 10,
            needed.div_ceil(1 << 10),
            config.workers
        ))),
    }
}

/// Addresses in use; `None` where there is no Linux /proc.
fn size() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}
