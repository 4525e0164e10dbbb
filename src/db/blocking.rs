//! A way out of an async runtime. The synchronous PostgreSQL client runs a small runtime of its own, and a
//! runtime must not be started within another one's task. Knows nothing of what is run.

use std::{panic::resume_unwind, thread};

/// Runs `work` on this thread, or on a new one if this thread is in a tokio runtime. Blocks in both cases.
pub(crate) fn outside_of_runtimes<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic))),
        Err(_) => work(),
    }
}
