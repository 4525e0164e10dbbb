//! Cuts a stream into records: lines of JSON, or records of CSV, whose quoted fields may hold line ends. In batches,
//! with the number of the line that each begins on.
//!
//! Holds no more than a batch and the longest record, whatever comes. Knows nothing of what is in a record.

use super::Format;
use memchr::{memchr, memchr_iter, memchr2};
use std::io::{self, BufRead};

/// Bytes, and records, after which a batch ends: what one core has in work. A record with a password takes it some 20
/// ms.
const BATCH_BYTES: usize = 64 << 10;
const BATCH_RECORDS: usize = 64;

/// Some records, one behind another.
#[derive(Debug, Default)]
pub struct Batch {
    /// Their text: a line each, or as many as its quotes hold, with a line feed at its end.
    pub text: Vec<u8>,
    pub records: Vec<Record>,
    /// Bytes of the stream up to the end of the last record.
    pub position: u64,
}

/// One record of a batch.
#[derive(Debug, PartialEq, Eq)]
pub struct Record {
    /// The number of the line that it begins on, from 1.
    pub line: u64,
    /// Where its text ends; or why it has none.
    pub end: Result<usize, &'static str>,
}

/// Cuts a stream.
pub struct Records<R> {
    input: R,
    format: Format,
    /// Bytes of the longest record.
    longest: usize,
    /// The line that the next byte is on.
    line: u64,
    position: u64,
    place: Place,
}

/// Where in a record of CSV the next byte is. A quote means something at the start of a field and inside of a quoted
/// one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    FieldStart,
    Unquoted,
    Quoted,
    /// After a quote in a quoted field: its end, or the first half of an escaped one.
    Quote,
    /// After a CR behind a quoted field, which only a line feed may follow.
    Return,
}

pub const TOO_LONG: &str = "is too long";
pub const UNCLOSED: &str = "has a quote that is not closed";
pub const STRAY: &str = "has text behind a closing quote (a quote within quotes is written twice)";

impl<R: BufRead> Records<R> {
    pub fn new(input: R, format: Format, longest: usize) -> Records<R> {
        Records { input, format, longest, line: 1, position: 0, place: Place::FieldStart }
    }

    /// The next records; `None` at the end of the stream. Blocks for the input.
    pub fn next_batch(&mut self) -> io::Result<Option<Batch>> {
        let batch = self.batch(BATCH_RECORDS)?;
        Ok(Some(batch).filter(|batch| !batch.records.is_empty()))
    }

    /// Records, `most` at most; none at the end of the stream. Blocks for the input.
    pub fn batch(&mut self, most: usize) -> io::Result<Batch> {
        let mut batch = Batch::default();
        while batch.records.len() < most && batch.text.len() < BATCH_BYTES && self.record(&mut batch)? {}
        batch.position = self.position;
        Ok(batch)
    }

    /// Adds the next record, unless it is blank. `false` at the end of the stream.
    fn record(&mut self, batch: &mut Batch) -> io::Result<bool> {
        let start = batch.text.len();
        let line = self.line;
        let (mut length, mut ended, mut stray) = (0, false, false);
        self.place = Place::FieldStart;
        while !ended {
            let found = self.input.fill_buf()?;
            if found.is_empty() {
                break;
            }
            let end = match self.format {
                Format::Ndjson => memchr(b'\n', found).map(|end| end + 1),
                Format::Csv => end_of_record(found, &mut self.place, &mut stray),
            };
            ended = end.is_some();
            let piece = &found[..end.unwrap_or(found.len())];
            self.line += memchr_iter(b'\n', piece).count() as u64;
            length += piece.len();
            if length <= self.longest {
                batch.text.extend_from_slice(piece);
            }
            let used = piece.len();
            self.position += used as u64;
            self.input.consume(used);
        }
        if length == 0 {
            return Ok(false);
        }
        let unclosed = !ended && self.place == Place::Quoted;
        if length > self.longest || unclosed || stray {
            batch.text.truncate(start);
            let problem = match (unclosed, stray) {
                (true, _) => UNCLOSED,
                (false, true) => STRAY,
                (false, false) => TOO_LONG,
            };
            batch.records.push(Record { line, end: Err(problem) });
            return Ok(true);
        }
        if batch.text.last() == Some(&b'\n') {
            batch.text.pop();
        }
        if batch.text.len() > start && batch.text.last() == Some(&b'\r') {
            batch.text.pop();
        }
        if batch.text[start..].trim_ascii().is_empty() {
            batch.text.truncate(start);
        } else {
            batch.text.push(b'\n');
            batch.records.push(Record { line, end: Ok(batch.text.len()) });
        }
        Ok(true)
    }
}

/// Where a record of CSV ends in these bytes, if it does. `stray` is set where text follows a closing quote.
fn end_of_record(bytes: &[u8], place: &mut Place, stray: &mut bool) -> Option<usize> {
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        at += 1;
        *place = match (*place, byte) {
            (Place::Quoted, b'"') => Place::Quote,
            (Place::Quoted, _) => {
                at += memchr(b'"', &bytes[at..]).unwrap_or(bytes.len() - at);
                Place::Quoted
            }
            (_, b'\n') => return Some(at),
            (Place::Return, b',') => {
                *stray = true;
                Place::FieldStart
            }
            (_, b',') => Place::FieldStart,
            (Place::FieldStart | Place::Quote, b'"') => Place::Quoted,
            (Place::Quote, b'\r') => Place::Return,
            (before, _) => {
                *stray |= matches!(before, Place::Quote | Place::Return);
                at += memchr2(b',', b'\n', &bytes[at..]).unwrap_or(bytes.len() - at);
                Place::Unquoted
            }
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;

    type Found = (u64, Result<String, &'static str>);

    /// The records of a text with their lines, however it is cut into pieces.
    fn cut(text: &str, format: Format) -> Vec<Found> {
        let cut = |capacity| {
            let input = BufReader::with_capacity(capacity, text.as_bytes());
            let mut records = Records::new(input, format, 40);
            let mut found = Vec::new();
            while let Some(batch) = records.next_batch().unwrap() {
                let mut start = 0;
                for record in &batch.records {
                    let text = record.end.map(|end| {
                        let text = String::from_utf8(batch.text[start..end].to_vec()).unwrap();
                        start = end;
                        text
                    });
                    found.push((record.line, text));
                }
                assert_eq!(start, batch.text.len());
            }
            assert_eq!(records.position, text.len() as u64);
            found
        };
        let expected = cut(1 << 16);
        for capacity in 1..=8 {
            assert_eq!(cut(capacity), expected, "{capacity}");
        }
        expected
    }

    #[test]
    fn lines() {
        let ok = |line, text: &str| (line, Ok(text.to_owned()));
        assert_eq!(cut("", Format::Ndjson), []);
        assert_eq!(cut("\n \r\n\n", Format::Ndjson), []);
        assert_eq!(cut("a\r\n\nb", Format::Ndjson), [ok(1, "a\n"), ok(3, "b\n")]);
        let long = "x".repeat(41);
        assert_eq!(
            cut(&format!("a\n{long}\nb\n{long}"), Format::Ndjson),
            [ok(1, "a\n"), (2, Err(TOO_LONG)), ok(3, "b\n"), (4, Err(TOO_LONG))]
        );
    }

    #[test]
    fn records_of_csv() {
        let ok = |line, text: &str| (line, Ok(text.to_owned()));
        let rows: [(&str, &[Found]); 13] = [
            ("a,b\nc,d\n", &[ok(1, "a,b\n"), ok(2, "c,d\n")]),
            ("a,b\r\n\r\n\nc,d", &[ok(1, "a,b\n"), ok(4, "c,d\n")]),
            ("a,\"b\nb\"\nc,d\n", &[ok(1, "a,\"b\nb\"\n"), ok(3, "c,d\n")]),
            ("\"a\r\n\"\"\n\",b\r\nc\n", &[ok(1, "\"a\r\n\"\"\n\",b\n"), ok(4, "c\n")]),
            // A quote within a field is nothing but a quote.
            ("5\" disk,b\nc\n", &[ok(1, "5\" disk,b\n"), ok(2, "c\n")]),
            ("a,\"b\"x\nc\n", &[(1, Err(STRAY)), ok(2, "c\n")]),
            ("a,\"b\" \nc\n", &[(1, Err(STRAY)), ok(2, "c\n")]),
            ("a,\"b\"\rx\nc\n", &[(1, Err(STRAY)), ok(2, "c\n")]),
            ("a,\"b\"\r\nc\n\"d\"\r", &[ok(1, "a,\"b\"\n"), ok(2, "c\n"), ok(3, "\"d\"\n")]),
            ("\"\",\"\"\nc\n", &[ok(1, "\"\",\"\"\n"), ok(2, "c\n")]),
            ("a,\"b\r\"\nc\n", &[ok(1, "a,\"b\r\"\n"), ok(2, "c\n")]),
            ("a\n\"b\nc\n", &[ok(1, "a\n"), (2, Err(UNCLOSED))]),
            ("a\n\"\"\"\nc\n", &[ok(1, "a\n"), (2, Err(UNCLOSED))]),
        ];
        for (text, expected) in rows {
            assert_eq!(cut(text, Format::Csv), expected, "{text:?}");
        }
    }

    /// The crate that reads the fields sees the same records.
    #[test]
    fn the_crate_agrees() {
        let mut dice = 7_u64;
        for _ in 0..3000 {
            let text: String = (0..12)
                .map(|_| {
                    dice ^= dice << 13;
                    dice ^= dice >> 7;
                    dice ^= dice << 17;
                    ['a', '"', ',', '\n', '"', 'b'][(dice % 6) as usize]
                })
                .collect();
            let found = cut(&text, Format::Csv);
            if found.iter().any(|(_, record)| record.is_err()) {
                continue;
            }
            let mut reader = csv::ReaderBuilder::new();
            reader.has_headers(false).flexible(true).terminator(csv::Terminator::Any(b'\n'));
            let expected = reader.from_reader(text.as_bytes()).byte_records().count();
            assert_eq!(found.len(), expected, "{text:?}: {found:?}");
        }
    }
}
