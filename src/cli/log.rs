//! The log on standard error: text that simplelog formats, lines for systemd's journal, or JSON with one object a line.
//!
//! A thread collects lines for a few milliseconds and writes them together, so that a worker makes no system call to
//! log a request. If standard error is stuck, requests go on, and the log drops and counts lines.

use super::{Failure, environment, signals::spawn_thread};
use log::kv::{Key, Value};
use log::{Level, LevelFilter, Log, Metadata, Record};
use nix::sys::stat::fstat;
use simplelog::{ConfigBuilder, WriteLogger};
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io::{self, LineWriter, Write};
use std::sync::{
    LazyLock, OnceLock,
    atomic::{AtomicUsize, Ordering::SeqCst},
    mpsc,
};
use std::time::{Duration, Instant};
use std::{panic, thread};
use time::{OffsetDateTime, format_description::BorrowedFormatItem, macros::format_description};

/// Pause of the log's thread between two writes. Lines collect in the pause, so that the thread wakes up less often.
const WRITE_PAUSE: Duration = Duration::from_millis(10);

/// The most bytes of lines that are queued while standard error is stuck. Further lines are dropped.
const MAX_QUEUED_BYTES: usize = 1 << 20;

/// Capacity of a new line of the log in bytes, which suffices for most lines.
const USUAL_LINE_BYTES: usize = 256;

/// Number of bytes in the lines that the log's thread has not yet written.
static QUEUED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Number of lines that the log has dropped and not yet reported.
static DROPPED_LINES: AtomicUsize = AtomicUsize::new(0);

/// True if the log on standard error is in JSON, false if it is text. Unset if the process has no log on standard
/// error.
pub static IS_JSON: OnceLock<bool> = OnceLock::new();

/// True if the log is text and standard error is a stream of systemd's journal. Compares standard error with
/// `JOURNAL_STREAM`, because a shell may have redirected standard error.
static IS_JOURNAL_TEXT: LazyLock<bool> = LazyLock::new(|| {
    let is_text = environment::variable("LOG_FORMAT").is_none_or(|format| format != "json");
    let stream = environment::variable("JOURNAL_STREAM").filter(|_| is_text);
    fstat(io::stderr()).is_ok_and(|found| stream == Some(format!("{}:{}", found.st_dev, found.st_ino).into()))
});

/// Keys of the values that a log record may have beside its message. The first five values are part of the message,
/// too.
const RECORD_KEYS: [&str; 8] =
    ["method", "path", "status", "duration_ms", "bytes", "token", "client", "request_id"];

/// Format of the times in the log: UTC with microseconds, so that all times have one width.
const TIME_FORMAT: &[BorrowedFormatItem] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:6]Z");

/// A function that returns the value of a setting by the name of its variable.
type VarLookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Starts the log on standard error, as [`log_to`] does.
pub fn log_to_stderr(lookup: VarLookup) -> Result<(), Failure> {
    // Ignores an error, because there is no other place to report that standard error is closed.
    let is_json = log_to(lookup, |text| _ = io::stderr().write_all(text))?;
    IS_JSON.get_or_init(|| is_json);
    Ok(())
}

/// Starts the log: its thread calls `write` with the lines. The setting `LOG_LEVEL` says which lines, `LOG_FORMAT` in
/// which format. Returns true if the format is JSON.
///
/// Logs records of userd alone, because other crates log statements with their parameters, among them passwords.
pub fn log_to(lookup: VarLookup, mut write: impl FnMut(&[u8]) + Send + 'static) -> Result<bool, Failure> {
    let level = lookup("LOG_LEVEL").and_then(|level| level.to_str()?.parse().ok());
    let level = level.unwrap_or(LevelFilter::Info);
    let is_json = lookup("LOG_FORMAT").is_some_and(|format| format == "json");
    let (lines, queued) = mpsc::channel::<Vec<u8>>();
    spawn_thread("log", move || {
        while let Ok(mut text) = queued.recv() {
            queued.try_iter().for_each(|line| text.extend_from_slice(&line));
            write(&text);
            QUEUED_BYTES.fetch_sub(text.len(), SeqCst);
            let dropped = DROPPED_LINES.swap(0, SeqCst);
            if dropped > 0 {
                log::warn!("{dropped} lines of this log were dropped");
            }
            thread::sleep(WRITE_PAUSE);
        }
    })?;
    let off = LevelFilter::Off;
    let mut config = ConfigBuilder::new();
    config.set_target_level(off).set_thread_level(off).set_location_level(off).add_filter_allow_str("userd");
    let has_own_form = is_json || *IS_JOURNAL_TEXT;
    if has_own_form {
        config.set_time_level(off).set_max_level(off);
    } else {
        config.set_time_format_custom(TIME_FORMAT);
    }
    let writer = WriteLogger::new(level, config.build(), LineWriter::new(LineSender(lines)));
    log::set_max_level(level);
    // Ignores an error, because it means that a logger is set already.
    let _ = log::set_boxed_logger(Box::new(Logger { is_json, writer }));
    if has_own_form {
        panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    }
    Ok(is_json)
}

/// Returns a text for standard error. If standard error is systemd's journal, each line of the text begins with its
/// priority (sd-daemon(3)).
pub fn with_priority(level: Level, text: String) -> String {
    if !*IS_JOURNAL_TEXT {
        return text;
    }
    let priority = match level {
        Level::Error => "<3>",
        Level::Warn => "<4>",
        Level::Info => "<6>",
        Level::Debug | Level::Trace => "<7>",
    };
    format!("{priority}{}", text.replace('\n', &format!("\n{priority}")))
}

/// The receiver of log records: formats each as text or as JSON, and sends it to the log's thread.
struct Logger {
    is_json: bool,
    writer: Box<WriteLogger<LineWriter<LineSender>>>,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        self.writer.enabled(metadata)
    }

    fn log(&self, record: &Record) {
        let line =
            if self.is_json { to_json(record) } else { with_priority(record.level(), to_text(record)) };
        self.writer.log(&record.to_builder().args(format_args!("{line}")).build());
    }

    /// Blocks until all lines are written, but for no longer than a second.
    fn flush(&self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        while QUEUED_BYTES.load(SeqCst) > 0 && Instant::now() < deadline {
            thread::sleep(WRITE_PAUSE);
        }
    }
}

/// A writer that sends lines to the log's thread.
struct LineSender(mpsc::Sender<Vec<u8>>);

impl Write for LineSender {
    /// Sends lines to the log's thread, or drops them if too many bytes are queued.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        if QUEUED_BYTES.load(SeqCst) > MAX_QUEUED_BYTES {
            DROPPED_LINES.fetch_add(1, SeqCst);
        } else {
            QUEUED_BYTES.fetch_add(lines.len(), SeqCst);
            // Ignores an error, because the receiving thread ends only with the process.
            let _ = self.0.send(lines.to_vec());
        }
        Ok(lines.len())
    }

    /// Does nothing, because the log's thread soon writes each line.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the values with these names that a log record has. Leaves out a value that is an empty text.
fn values_named<'r>(record: &'r Record, names: &'r [&str]) -> impl Iterator<Item = (&'r str, Value<'r>)> {
    names.iter().filter_map(|name| {
        let value = record.key_values().get(Key::from_str(name))?;
        (value.to_borrowed_str() != Some("")).then_some((*name, value))
    })
}

/// Formats a log record as text: its message, and the values that are not part of the message.
fn to_text(record: &Record) -> String {
    let mut line = String::with_capacity(USUAL_LINE_BYTES);
    let mut add = |text: fmt::Arguments| line.write_fmt(text).expect("a String takes all");
    add(*record.args());
    values_named(record, &RECORD_KEYS[5..]).for_each(|(name, value)| add(format_args!(" {name}={value}")));
    line
}

/// Formats a log record as one line with a JSON object. Numbers stay numbers, and all other values become texts.
fn to_json(record: &Record) -> String {
    let mut object = serde_json::json!({
        "time": OffsetDateTime::now_utc().format(TIME_FORMAT).unwrap_or_default(),
        "level": record.level().as_str().to_ascii_lowercase(),
        "message": record.args().to_string(),
    });
    for (name, value) in values_named(record, &RECORD_KEYS) {
        object[name] = match (value.to_u64(), value.to_f64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => ((number * 1e3).round() / 1e3).into(),
            (None, None) => value.to_string().into(),
        };
    }
    object.to_string()
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
        let line = to_json(&record);
        assert!(!line.contains('\n'), "{line}");
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
        let (lines, queued) = mpsc::channel();
        let mut lines = LineWriter::new(LineSender(lines));
        for expected in [0, 1, 2] {
            lines.write_all(&[[b'x'; MAX_QUEUED_BYTES].as_slice(), b"\n"].concat()).unwrap();
            assert_eq!(DROPPED_LINES.load(SeqCst), expected);
        }
        assert_eq!(queued.try_iter().map(|line| line.len()).collect::<Vec<_>>(), [MAX_QUEUED_BYTES + 1]);
    }
}
