//! The log on standard error: text as simplelog formats it, or JSON, one object a line.
//!
//! A thread writes the lines that gather in a few milliseconds, so that a worker makes no system call for the line of a
//! request. If standard error is stuck, requests go on, and lines are dropped and counted.

use super::{Failure, signals::spawn};
use log::{
    Level, LevelFilter, Log, Metadata, Record,
    kv::{Error, Key, Value, VisitSource},
};
use parking_lot::{Condvar, Mutex};
use serde::ser::{SerializeMap, Serializer};
use simplelog::{ConfigBuilder, WriteLogger};
use std::{
    fmt,
    io::{self, Write},
    mem, panic,
    sync::Arc,
    thread,
    time::Duration,
};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

/// Pause between two writes under load; some dozens of lines gather.
const PAUSE: Duration = Duration::from_millis(2);

/// The most bytes that gather while standard error is stuck.
const MOST_BYTES: usize = 1 << 20;

/// Times are in UTC, with microseconds, and of one width.
const TIME: &[BorrowedFormatItem] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// Form of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Text,
    /// One object a line: `time`, `level`, `message`, and what a line says of a request as values.
    Json,
}

impl Format {
    /// Returns a line that goes past the log; as text, behind `before`.
    pub fn line(self, level: Level, message: fmt::Arguments, before: &str) -> Vec<u8> {
        match self {
            Format::Text => format!("{before}{message}\n").into_bytes(),
            Format::Json => json(&Record::builder().level(level).args(message).build()),
        }
    }
}

/// Logs userd's own lines alone: other crates log statements with their parameters, passwords among them.
pub fn log_to_stderr(level: LevelFilter, format: Format) -> Result<(), Failure> {
    let lines = Arc::new(Lines::default());
    let written = lines.clone();
    spawn("log", move || {
        loop {
            written.write(format);
            thread::sleep(PAUSE);
        }
    })?;
    let config = ConfigBuilder::new()
        .set_time_format_custom(TIME)
        .set_target_level(LevelFilter::Off)
        .set_thread_level(LevelFilter::Off)
        .set_location_level(LevelFilter::Off)
        .build();
    let text = WriteLogger::new(level, config, Line { lines: lines.clone(), bytes: Vec::new() });
    log::set_max_level(level);
    // It fails only if a logger is set already, and no other is set before.
    let _ = log::set_boxed_logger(Box::new(Logger { format, text, lines }));
    if format == Format::Json {
        panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    }
    Ok(())
}

struct Logger {
    format: Format,
    text: Box<WriteLogger<Line>>,
    lines: Arc<Lines>,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::max_level() && metadata.target().starts_with("userd")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if self.format == Format::Json {
            return self.lines.add(&json(record));
        }
        use fmt::Write;
        let values = record.key_values();
        let mut line = record.args().to_string();
        for name in ["token", "client", "request_id"] {
            if let Some(value) = values.get(Key::from_str(name)).filter(|value| !is_empty(value)) {
                // Writing to memory does not fail.
                let _ = write!(line, " {name}={value}");
            }
        }
        self.text.log(&record.to_builder().args(format_args!("{line}")).build());
    }

    /// Blocks until the lines logged so far are written, at most for a second.
    fn flush(&self) {
        const WAIT: Duration = Duration::from_secs(1);
        let pending = |gathered: &mut Gathered| gathered.is_writing || !gathered.lines.is_empty();
        self.lines.changed.wait_while_for(&mut self.lines.gathered.lock(), pending, WAIT);
    }
}

/// The line that simplelog writes, in many pieces and under a lock of its own.
struct Line {
    lines: Arc<Lines>,
    bytes: Vec<u8>,
}

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        if bytes.ends_with(b"\n") {
            self.lines.add(&self.bytes);
            self.bytes.clear();
        }
        Ok(bytes.len())
    }

    /// Does nothing: the thread writes the lines.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that wait to be written.
#[derive(Default)]
struct Lines {
    gathered: Mutex<Gathered>,
    changed: Condvar,
}

#[derive(Default)]
struct Gathered {
    lines: Vec<u8>,
    dropped_lines: usize,
    is_writing: bool,
}

impl Lines {
    /// Adds a line, unless too many wait.
    fn add(&self, line: &[u8]) {
        let mut gathered = self.gathered.lock();
        if gathered.lines.len() > MOST_BYTES {
            gathered.dropped_lines += 1;
        } else {
            gathered.lines.extend_from_slice(line);
        }
        drop(gathered);
        self.changed.notify_all();
    }

    /// Waits for lines and writes them.
    fn write(&self, format: Format) {
        let mut gathered = self.gathered.lock();
        self.changed.wait_while(&mut gathered, |gathered| gathered.lines.is_empty());
        let Gathered { mut lines, dropped_lines, .. } =
            mem::replace(&mut *gathered, Gathered { is_writing: true, ..Gathered::default() });
        drop(gathered);
        if dropped_lines > 0 {
            let message = format_args!("{dropped_lines} lines of this log were dropped");
            lines.extend(format.line(Level::Warn, message, ""));
        }
        // There is no other place to report that standard error is closed.
        let _ = io::stderr().write_all(&lines);
        self.gathered.lock().is_writing = false;
        self.changed.notify_all();
    }
}

/// Tells whether a value is the empty text, which stands for none.
fn is_empty(value: &Value) -> bool {
    value.to_borrowed_str() == Some("")
}

/// Returns a record as an object in a line.
fn json(record: &Record) -> Vec<u8> {
    let mut line = Vec::with_capacity(384);
    write_json(&mut line, record).expect("writing to memory does not fail");
    line.push(b'\n');
    line
}

fn write_json(line: &mut Vec<u8>, record: &Record) -> serde_json::Result<()> {
    let mut serializer = serde_json::Serializer::new(line);
    let mut object = serializer.serialize_map(None)?;
    if let Ok(time) = OffsetDateTime::now_utc().format(TIME) {
        object.serialize_entry("time", &time)?;
    }
    object.serialize_entry("level", &record.level().as_str().to_ascii_lowercase())?;
    object.serialize_entry("message", record.args())?;
    let mut values = Values(object);
    // Its errors are those of writing.
    let _ = record.key_values().visit(&mut values);
    values.0.end()
}

/// The object that values are added to: numbers as such, and all else as text.
struct Values<M>(M);

impl<'v, M: SerializeMap> VisitSource<'v> for Values<M> {
    fn visit_pair(&mut self, key: Key<'v>, value: Value<'v>) -> Result<(), Error> {
        if is_empty(&value) {
            return Ok(());
        }
        let key = key.as_str();
        let written = match (value.to_u64(), value.to_f64()) {
            (Some(number), _) => self.0.serialize_entry(key, &number),
            (None, Some(number)) => self.0.serialize_entry(key, &((number * 1e3).round() / 1e3)),
            (None, None) => self.0.serialize_entry(key, &format_args!("{value}")),
        };
        written.map_err(|_| fmt::Error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value as Json, json};

    #[test]
    fn values_keep_their_types_and_texts_are_escaped() {
        let pairs: [(&str, Value); 5] = [
            ("method", "GET".into()),
            ("path", "/users/\"\u{e9}\\".into()),
            ("status", 200u16.into()),
            ("duration_ms", 1.23456.into()),
            ("request_id", Value::from_display(&"an-id")),
        ];
        let record = Record::builder().args(format_args!("two\nlines")).key_values(&pairs).build();
        let line = String::from_utf8(super::json(&record)).unwrap();
        assert_eq!(line.find('\n'), Some(line.len() - 1), "{line}");
        let mut value: Json = serde_json::from_str(&line).unwrap();
        let time = value.as_object_mut().unwrap().remove("time").unwrap();
        assert!(time.as_str().unwrap().ends_with('Z'), "{time}");
        let expected = json!({
            "level": "info", "message": "two\nlines", "method": "GET", "path": "/users/\"\u{e9}\\",
            "status": 200, "duration_ms": 1.235, "request_id": "an-id",
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn lines_beyond_the_bound_are_counted() {
        let lines = Lines::default();
        let line = vec![b'x'; MOST_BYTES + 1];
        for expected in [0, 1, 2] {
            lines.add(&line);
            assert_eq!(lines.gathered.lock().dropped_lines, expected);
        }
        assert_eq!(lines.gathered.lock().lines.len(), line.len());
    }
}
