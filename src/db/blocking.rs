//! A way out of an async runtime. The synchronous PostgreSQL client runs a small runtime of its own, and a
//! runtime must not be started within another one's task. Knows nothing of what is run.

use std::{ops::Deref, panic::resume_unwind, thread};

/// Runs `work` here, or on a thread of its own where here is within a tokio runtime. Blocks in both cases.
pub(crate) fn outside_of_runtimes<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match tokio::runtime::Handle::try_current() {
        Ok(_) => thread::scope(|scope| scope.spawn(work).join().unwrap_or_else(|panic| resume_unwind(panic))),
        Err(_) => work(),
    }
}

/// A value that closes PostgreSQL connections when it is dropped, which is done there as well.
pub(crate) struct DropOutside<T: Send>(Option<T>);

impl<T: Send> DropOutside<T> {
    pub(crate) fn new(value: T) -> DropOutside<T> {
        DropOutside(Some(value))
    }
}

impl<T: Send> Deref for DropOutside<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is taken by drop only")
    }
}

impl<T: Send> Drop for DropOutside<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        outside_of_runtimes(|| drop(value));
    }
}
