//! The log as JSON: one object a line, with `time`, `level`, `message`, and what a line says of a request as values.
//!
//! Knows not where lines go.

use log::{
    Record,
    kv::{Error, Key, Value, VisitSource},
};
use serde::ser::{SerializeMap, Serializer};
use std::{
    fmt,
    time::{SystemTime, UNIX_EPOCH},
};
use userd::Timestamp;

/// The time as both formats have it. `None` after the year 9999.
pub fn now() -> Option<Timestamp> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_unix_micros(since.as_micros().try_into().ok()?)
}

/// The line of a record.
pub fn line(record: &Record) -> Vec<u8> {
    let mut line = Vec::with_capacity(384);
    write_to(&mut line, record).expect("writing to memory does not fail");
    line.push(b'\n');
    line
}

fn write_to(line: &mut Vec<u8>, record: &Record) -> serde_json::Result<()> {
    let mut serializer = serde_json::Serializer::new(line);
    let mut object = serializer.serialize_map(None)?;
    if let Some(now) = now() {
        object.serialize_entry("time", &format_args!("{now}"))?;
    }
    object.serialize_entry("level", &record.level().as_str().to_ascii_lowercase())?;
    object.serialize_entry("message", record.args())?;
    let mut values = Values(object);
    // Its errors are those of writing.
    let _ = record.key_values().visit(&mut values);
    values.0.end()
}

/// The object that values go to: numbers as such, and all else as text.
struct Values<M>(M);

impl<'v, M: SerializeMap> VisitSource<'v> for Values<M> {
    fn visit_pair(&mut self, key: Key<'v>, value: Value<'v>) -> Result<(), Error> {
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
        let line = String::from_utf8(line(&record)).unwrap();
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
