//! The log as JSON: one object a line, with `time`, `level`, `message`, and what a line says of a request as values.
//!
//! Knows not where lines go.

use log::{
    Level, LevelFilter, Log, Metadata, Record,
    kv::{Error, Key, Value, VisitSource, VisitValue},
};
use std::{
    fmt,
    io::Write,
    sync::{Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};
use userd::Timestamp;

/// A logger of userd's own lines, each of which it writes in one piece.
pub struct JsonLogger<W> {
    level: LevelFilter,
    writer: Mutex<W>,
}

impl<W> JsonLogger<W> {
    pub fn new(level: LevelFilter, writer: W) -> JsonLogger<W> {
        JsonLogger { level, writer: Mutex::new(writer) }
    }
}

impl<W: Write + Send> Log for JsonLogger<W> {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= self.level && metadata.target().starts_with("userd")
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let mut object = Object::new(record.level(), record.args());
        // Its errors are those of a visitor, and this one has none.
        let _ = record.key_values().visit(&mut object);
        let line = object.end();
        let _ = self.writer.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line);
    }

    fn flush(&self) {
        let _ = self.writer.lock().unwrap_or_else(PoisonError::into_inner).flush();
    }
}

/// The time as both formats have it. `None` after the year 9999.
pub fn now() -> Option<Timestamp> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(since.as_micros().try_into().ok()?)
}

/// A line without values.
pub fn line(level: Level, message: &str) -> Vec<u8> {
    Object::new(level, &format_args!("{message}")).end()
}

/// An object that is being written.
struct Object {
    line: Vec<u8>,
    /// A value as text, before it is quoted.
    text: String,
}

impl Object {
    fn new(level: Level, message: &fmt::Arguments) -> Object {
        let mut object = Object { line: Vec::with_capacity(384), text: String::with_capacity(128) };
        object.line.push(b'{');
        if let Some(now) = now() {
            object.text("time", now);
        }
        object.text("level", level.as_str().to_ascii_lowercase());
        object.text("message", message);
        object
    }

    fn key(&mut self, key: &str) {
        if self.line.len() > 1 {
            self.line.push(b',');
        }
        self.quote(key);
        self.line.push(b':');
    }

    fn quote(&mut self, text: &str) {
        serde_json::to_writer(&mut self.line, text).expect("writing to memory does not fail");
    }

    fn text(&mut self, key: &str, value: impl fmt::Display) {
        use fmt::Write;
        self.key(key);
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        write!(text, "{value}").expect("writing to memory does not fail");
        self.quote(&text);
        self.text = text;
    }

    fn number(&mut self, key: &str, value: fmt::Arguments) {
        self.key(key);
        self.line.write_fmt(value).expect("writing to memory does not fail");
    }

    fn end(mut self) -> Vec<u8> {
        self.line.extend_from_slice(b"}\n");
        self.line
    }
}

impl<'v> VisitSource<'v> for Object {
    fn visit_pair(&mut self, key: Key<'v>, value: Value<'v>) -> Result<(), Error> {
        value.visit(Pair { key: key.as_str(), object: self })
    }
}

/// One value and the object that it goes to.
struct Pair<'a> {
    key: &'a str,
    object: &'a mut Object,
}

impl<'v> VisitValue<'v> for Pair<'_> {
    fn visit_any(&mut self, value: Value) -> Result<(), Error> {
        self.object.text(self.key, value);
        Ok(())
    }

    fn visit_u64(&mut self, value: u64) -> Result<(), Error> {
        self.object.number(self.key, format_args!("{value}"));
        Ok(())
    }

    fn visit_f64(&mut self, value: f64) -> Result<(), Error> {
        self.object.number(self.key, format_args!("{value:.3}"));
        Ok(())
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
        let mut object = Object::new(Level::Info, &format_args!("two\nlines"));
        log::kv::Source::visit(&pairs, &mut object).unwrap();
        let line = String::from_utf8(object.end()).unwrap();
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
}
