//! Where log lines go: gathered, and written to standard error by a thread of their own.
//!
//! A line a request is many small writes otherwise, on the way of the request. The thread writes at once when
//! there was nothing before, so a quiet service logs promptly, and what gathers meanwhile goes in one write.
//! When standard error does not take it, requests go on and lines are dropped, and counted.

use std::{
    io::{self, Write},
    mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Between two writes under load: some dozens of lines gather.
const PAUSE: Duration = Duration::from_millis(2);

/// What may gather while standard error is stuck.
const MOST_BYTES: usize = 1 << 20;

/// A writer for simplelog.
#[derive(Default)]
pub struct LogWriter {
    shared: Arc<Shared>,
    /// What there is of the line that is being logged: simplelog writes it in many pieces, under a lock of its
    /// own.
    line: Vec<u8>,
}

#[derive(Default)]
struct Shared {
    gathered: Mutex<Gathered>,
    changed: Condvar,
}

#[derive(Default)]
struct Gathered {
    lines: Vec<u8>,
    /// How many lines were dropped.
    dropped: usize,
    /// Whether the thread waits to be told of a line. Telling it is a system call.
    idle: bool,
    /// Whether a write is under way.
    writing: bool,
}

impl LogWriter {
    /// Starts the thread; it ends with the process. Errors: the system has no more threads.
    pub fn start() -> io::Result<LogWriter> {
        let writer = LogWriter::default();
        let shared = writer.shared.clone();
        let body = move || {
            loop {
                shared.write_gathered();
                thread::sleep(PAUSE);
            }
        };
        thread::Builder::new().name("log".to_owned()).spawn(body)?;
        Ok(writer)
    }
}

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(bytes);
        if !bytes.ends_with(b"\n") {
            return Ok(bytes.len());
        }
        let mut gathered = self.shared.gathered();
        if gathered.lines.len() > MOST_BYTES {
            gathered.dropped += 1;
        } else {
            gathered.lines.extend_from_slice(&self.line);
        }
        self.line.clear();
        if mem::take(&mut gathered.idle) {
            drop(gathered);
            self.shared.changed.notify_all();
        }
        Ok(bytes.len())
    }

    /// Blocks until all that was logged before is written, or for a second where it cannot be.
    fn flush(&mut self) -> io::Result<()> {
        const PATIENCE: Duration = Duration::from_secs(1);
        let pending = |gathered: &mut Gathered| gathered.writing || !gathered.lines.is_empty();
        let gathered = self.shared.gathered();
        let _ = self.shared.changed.wait_timeout_while(gathered, PATIENCE, pending);
        Ok(())
    }
}

impl Shared {
    fn gathered(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for lines and writes those that are there.
    fn write_gathered(&self) {
        let gathered = self.gathered();
        let nothing = |gathered: &mut Gathered| {
            gathered.idle = gathered.lines.is_empty();
            gathered.idle
        };
        let waited = self.changed.wait_while(gathered, nothing);
        let mut gathered = waited.unwrap_or_else(PoisonError::into_inner);
        let mut lines = mem::take(&mut gathered.lines);
        if let Some(dropped) = Some(mem::take(&mut gathered.dropped)).filter(|count| *count > 0) {
            lines.extend_from_slice(format!("{dropped} lines of this log were dropped\n").as_bytes());
        }
        gathered.writing = true;
        drop(gathered);
        // Nobody is left to be told of a standard error that is closed.
        let _ = io::stderr().write_all(&lines);
        lines.clear();
        let mut gathered = self.gathered();
        gathered.writing = false;
        if gathered.lines.is_empty() {
            // Its room is used again.
            gathered.lines = lines;
        }
        drop(gathered);
        self.changed.notify_all();
    }
}
