//! Attempts that are retried while they meet a lock, for callers that may block.

use super::{explain, sqlstate};
use std::{
    error::Error,
    thread,
    time::{Duration, Instant},
};

/// Retries until an attempt meets no lock, and returns its result. An attempt waits for its locks only as long as reads
/// and writes may wait behind it. Blocks for ten minutes at the most. The error is one line.
pub(super) fn until_unlocked<T, E: Error + 'static>(
    mut attempt: impl FnMut() -> Result<T, E>,
    on_retry: impl Fn(),
) -> Result<T, String> {
    const LONGEST_PAUSE: Duration = Duration::from_secs(10);
    let deadline = Instant::now() + Duration::from_secs(600);
    let mut pause = Duration::from_millis(500);
    loop {
        match attempt() {
            Err(error) if sqlstate::is_locked(&error) && Instant::now() + pause < deadline => on_retry(),
            result => return result.map_err(|error| explain(&error)),
        }
        thread::sleep(pause);
        pause = LONGEST_PAUSE.min(2 * pause);
    }
}
