//! Calls blocking code from an async task. The synchronous PostgreSQL client runs a tokio runtime of its own, which
//! must not be started within a task of another runtime.

use std::{panic::resume_unwind, thread};

/// Runs `work` on this thread, or on a new one if this thread is in a tokio runtime. Blocks in both cases.
pub(crate) fn run_outside_of_runtimes<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic))),
        Err(_) => work(),
    }
}
