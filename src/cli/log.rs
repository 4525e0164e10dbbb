//! The log: lines are gathered, and written to standard error by a thread of their own. `log_json` has the other
//! format.
//!
//! Otherwise a line a request would be many small writes, made by the worker. The thread writes at once when the log
//! was idle, so a quiet service logs promptly; lines that gather during a write go in the next one. When standard
//! error is stuck, requests go on, and lines are dropped and counted.

use super::log_json::{self, now};
use log::{Level, LevelFilter, Log, Metadata, Record, kv::Key};
use parking_lot::{Condvar, Mutex};
use simplelog::{ConfigBuilder, WriteLogger};
use std::{
    cell::Cell,
    fmt::{self, Write as _},
    io::{self, Write},
    mem, panic,
    sync::Arc,
    thread,
    time::Duration,
};

/// Between two writes under load; some dozens of lines gather.
const PAUSE: Duration = Duration::from_millis(2);

/// The most bytes that gather while standard error is stuck.
const MOST_BYTES: usize = 1 << 20;

/// How a line reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Text,
    /// One object a line.
    Json,
}

impl Format {
    /// A line that goes past the log; as text, behind `before`.
    pub fn line(self, level: Level, message: fmt::Arguments, before: &str) -> Vec<u8> {
        match self {
            Format::Text => format!("{before}{message}\n").into_bytes(),
            Format::Json => log_json::line(&Record::builder().level(level).args(message).build()),
        }
    }
}

/// Logs userd's own lines alone: other crates log statements with their parameters, passwords among them. Times are
/// in UTC with microseconds, all of the same width.
pub fn log_to_stderr(level: LevelFilter, format: Format) -> io::Result<()> {
    let shared = Shared::start(format)?;
    let config = ConfigBuilder::new()
        // The writer puts it in front.
        .set_time_level(LevelFilter::Off)
        .set_target_level(LevelFilter::Off)
        .set_thread_level(LevelFilter::Off)
        .set_location_level(LevelFilter::Off)
        .build();
    let text = WriteLogger::new(level, config, LogWriter { shared: shared.clone(), line: Vec::new() });
    log::set_max_level(level);
    // It fails only where a logger is set already, and no other is set before.
    let _ = log::set_boxed_logger(Box::new(Logger { level, text, shared }));
    if format == Format::Json {
        panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    }
    Ok(())
}

thread_local! {
    /// The text of a thread's next line: made before simplelog takes its lock, and handed to it in one piece.
    static TEXT: Cell<String> = const { Cell::new(String::new()) };
}

/// Bytes of a line's text that a thread keeps for the next one.
const KEPT: usize = 4 << 10;

struct Logger {
    level: LevelFilter,
    text: Box<WriteLogger<LogWriter>>,
    shared: Arc<Shared>,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= self.level && metadata.target().starts_with("userd")
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            match self.shared.format {
                Format::Text => self.log_text(record),
                Format::Json => self.shared.add(&log_json::line(record)),
            }
        }
    }

    /// Blocks until the lines logged so far are written, at most for a second.
    fn flush(&self) {
        const WAIT: Duration = Duration::from_secs(1);
        let pending = |gathered: &mut Gathered| gathered.writing || !gathered.lines.is_empty();
        self.shared.changed.wait_while_for(&mut self.shared.gathered.lock(), pending, WAIT);
    }
}

impl Logger {
    /// By simplelog, with the client and the id of the request that the line is about at its end.
    fn log_text(&self, record: &Record) {
        let mut text = TEXT.take();
        // Writing to memory does not fail.
        let _ = text.write_fmt(*record.args());
        let values = record.key_values();
        if let Some(id) = values.get(Key::from_str("request_id")) {
            let _ = match values.get(Key::from_str("client")) {
                Some(client) => write!(text, " client={client} request_id={id}"),
                None => write!(text, " request_id={id}"),
            };
        }
        self.text.log(&record.to_builder().args(format_args!("{text}")).build());
        text.clear();
        if text.capacity() <= KEPT {
            TEXT.set(text);
        }
    }
}

/// What simplelog writes to.
struct LogWriter {
    shared: Arc<Shared>,
    /// The part of the current line that was written: simplelog writes a line in many pieces, under a lock of its own.
    line: Vec<u8>,
}

struct Shared {
    format: Format,
    gathered: Mutex<Gathered>,
    changed: Condvar,
}

#[derive(Default)]
struct Gathered {
    lines: Vec<u8>,
    /// How many lines were dropped.
    dropped: usize,
    /// Whether the thread waits for a wake-up. A wake-up is a system call.
    idle: bool,
    /// Whether a write is under way.
    writing: bool,
}

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.line.is_empty()
            && let Some(now) = now()
        {
            write!(self.line, "{now} ")?;
        }
        self.line.extend_from_slice(bytes);
        if bytes.ends_with(b"\n") {
            self.shared.add(&self.line);
            self.line.clear();
        }
        Ok(bytes.len())
    }

    /// Lines are written by the thread.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    /// Starts the thread; it ends with the process. Errors: the system has no more threads.
    fn start(format: Format) -> io::Result<Arc<Shared>> {
        let shared = Arc::new(Shared { format, gathered: Mutex::default(), changed: Condvar::new() });
        let writer = shared.clone();
        let body = move || {
            loop {
                writer.write_gathered();
                thread::sleep(PAUSE);
            }
        };
        thread::Builder::new().name("log".to_owned()).spawn(body)?;
        Ok(shared)
    }

    /// Adds a line, unless too many wait.
    fn add(&self, line: &[u8]) {
        let mut gathered = self.gathered.lock();
        if gathered.lines.len() > MOST_BYTES {
            gathered.dropped += 1;
        } else {
            gathered.lines.extend_from_slice(line);
        }
        if mem::take(&mut gathered.idle) {
            drop(gathered);
            self.changed.notify_all();
        }
    }

    /// Waits for lines and writes those that are there.
    fn write_gathered(&self) {
        let mut gathered = self.gathered.lock();
        self.changed.wait_while(&mut gathered, |gathered| {
            gathered.idle = gathered.lines.is_empty();
            gathered.idle
        });
        let mut lines = mem::take(&mut gathered.lines);
        match mem::take(&mut gathered.dropped) {
            0 => {}
            dropped => lines.extend(self.format.line(
                Level::Warn,
                format_args!("{dropped} lines of this log were dropped"),
                "",
            )),
        }
        gathered.writing = true;
        drop(gathered);
        // There is no other place to report that standard error is closed.
        let _ = io::stderr().write_all(&lines);
        lines.clear();
        let mut gathered = self.gathered.lock();
        gathered.writing = false;
        if gathered.lines.is_empty() {
            // Its capacity is used again.
            gathered.lines = lines;
        }
        drop(gathered);
        self.changed.notify_all();
    }
}
