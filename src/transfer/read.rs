//! Cuts a stream into records: lines of JSON, the users of one JSON array, or rows of CSV, whose quoted fields may hold line
//! ends.
//!
//! A record with a problem is passed on. A stream that is cut off, or is no text in UTF-8, is an error.

use super::rules::{Record, Rules};
use super::{Format, TransferError};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::io::{self, BufRead, BufReader, Read};
use std::{cell::Cell, fmt};

/// The consumer of records.
type Each<'a> = dyn FnMut(Record) -> Result<(), TransferError> + 'a;

/// Bytes of the longest line of JSON, element of an array or row of CSV.
const MAX_LINE_BYTES: usize = 1 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Byte before each text of a sequence of JSON texts.
const RECORD_SEPARATOR: u8 = 0x1e;

const UTF_16: &str = "it is UTF-16, or no text: save it as CSV or JSON in UTF-8";
const AMBIGUOUS: &str = "has, between tabs, a field that begins with a quote or has a backslash or a CR, which programs \
                         read in different ways: save the file as CSV with commas, or as JSON";
const QUOTES: &str = "has text behind a closing quote, or a quote or a CR in a field without quotes (a quote in quotes is \
                      written twice)";
const IS_JSON_SEQUENCE: &str =
    "it is a sequence of JSON texts (RFC 7464), each behind a record separator: write it without `jq --seq`";
const IS_ONE_OBJECT: &str = "it is one JSON object: write a user a line, as `jq -c '.users[]'` does from an array in the object, \
                        and `jq -c .` from objects of several lines";

/// Calls `each` with every record of the stream. Returns the word for a record: line, or user of an array. Blocks for
/// the input.
pub(super) fn read(input: impl Read, rules: &Rules, each: &mut Each) -> Result<&'static str, TransferError> {
    let mut input = BufReader::new(input);
    if input.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        input.consume(BYTE_ORDER_MARK.len());
    }
    let mut lines = Lines { input, number: 0, has_end: false };
    let Some(first) = lines.next_filled()? else { return Ok("line") };
    if first.starts_with(b"\xff\xfe") || first.starts_with(b"\xfe\xff") || first.contains(&0) {
        return Err(unreadable(UTF_16));
    }
    let begin = first_sign(&first);
    if begin == Some(RECORD_SEPARATOR) {
        return Err(unreadable(IS_JSON_SEQUENCE));
    }
    let is_json = matches!(begin, Some(b'{' | b'['));
    match rules.import.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if begin == Some(b'[') => {
            let left = &Cell::new(MAX_LINE_BYTES);
            let input = Bounded { input: first.as_slice().chain(lines.input), left };
            Users { each, read: 0, error: None, left }.read(input).map(|()| "user")
        }
        Format::Ndjson => {
            let first = lines.text(first)?;
            if rules.is_document(&first) {
                return Err(unreadable(IS_ONE_OBJECT));
            }
            lines.objects(first, each).map(|()| "line")
        }
        Format::Csv => lines.rows(first, rules, each).map(|()| "line"),
    }
}

/// The lines of a stream.
struct Lines<R> {
    input: R,
    /// The number of the last line that was read.
    number: i64,
    /// True if the last line that was read has a line end.
    has_end: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads a line with its end; of a line that is too long, the beginning. `None` at the end of the stream.
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        self.input.by_ref().take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', &mut line)?;
        self.number += 1;
        self.has_end = line.ends_with(b"\n");
        Ok(Some(line).filter(|line| !line.is_empty()))
    }

    /// Reads the next line that is not blank.
    fn next_filled(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            match self.next()? {
                Some(line) if first_sign(&line).is_none() => {}
                line => return Ok(line),
            }
        }
    }

    /// Returns the text of the last line that was read.
    fn text(&self, line: Vec<u8>) -> Result<String, TransferError> {
        if line.len() > MAX_LINE_BYTES {
            return Err(too_long("line", self.number));
        }
        String::from_utf8(line)
            .map_err(|_| self.unreadable("is not UTF-8: save the file as CSV or JSON in UTF-8"))
    }

    /// Returns an error with the number of the last line that was read.
    fn unreadable(&self, problem: &str) -> TransferError {
        unreadable(format!("line {} {problem}", self.number))
    }

    /// Reads lines of JSON.
    fn objects(mut self, first: String, each: &mut Each) -> Result<(), TransferError> {
        let mut next = Some(first);
        while let Some(line) = next {
            let object = serde_json::from_str(line.trim_end_matches(['\r', '\n']));
            if object.as_ref().is_err_and(serde_json::Error::is_eof) && !self.has_end {
                return Err(self.unreadable("is cut off"));
            }
            each(Record { number: self.number, members: object.map_err(not_json) })?;
            next = self.next_filled()?.map(|line| self.text(line)).transpose()?;
        }
        Ok(())
    }

    /// Reads CSV. The number of a row is that of its first line.
    fn rows(mut self, first: Vec<u8>, rules: &Rules, each: &mut Each) -> Result<(), TransferError> {
        let mut first = self.text(first)?;
        // Skips a line `sep=;` before the header, from which Excel reads the separator.
        if first.trim_start_matches('"').starts_with("sep=")
            && let Some(header) = self.next_filled()?
        {
            first = self.text(header)?;
        }
        let mut unquoted = first.split('"').step_by(2).flat_map(str::chars);
        let separator = unquoted.find(|sign| "\t;,".contains(*sign)).unwrap_or(',');
        let header = self.row(first, separator)?;
        let header = rules.header(header).map_err(|problem| self.unreadable(&problem))?;
        while let Some(line) = self.next()? {
            let (number, line) = (self.number, self.text(line)?);
            let row = self.row(line, separator)?;
            if row.iter().all(|value| value.trim().is_empty()) {
                continue;
            }
            if row.len() < header.len() && !self.has_end {
                return Err(self.unreadable("is cut off"));
            }
            each(Record { number, members: rules.row(&header, row) })?;
        }
        Ok(())
    }

    /// Splits a row of CSV, which goes on with the next lines while a quote is open. Crates that read CSV accept quotes in
    /// fields without quotes, and take the next rows for a part of a field then. Between tabs, some programs quote and some
    /// write backslashes, so no quote opens.
    fn row(&mut self, mut text: String, separator: char) -> Result<Vec<String>, TransferError> {
        let has_tabs = separator == '\t';
        let is_quote = |sign: char| sign == '"' && !has_tabs;
        let (number, mut end, mut is_open) = (self.number, 0, false);
        loop {
            is_open ^= text[end..].matches(is_quote).count() % 2 == 1;
            if !is_open {
                break;
            }
            end = text.len();
            match self.next()? {
                Some(_) if end > MAX_LINE_BYTES => return Err(too_long("line", number)),
                Some(next) => text.push_str(&self.text(next)?),
                None => return Err(unreadable(format!("line {number} has a quote that is not closed"))),
            }
        }
        let fields = text.trim_end_matches(['\r', '\n']).split(|sign| {
            is_open ^= is_quote(sign);
            sign == separator && !is_open
        });
        let fields: Option<_> = fields.map(if has_tabs { unescaped } else { unquoted }).collect();
        fields.ok_or_else(|| self.unreadable(if has_tabs { AMBIGUOUS } else { QUOTES }))
    }
}

/// Returns a field between tabs; `None` if programs read it in different ways.
fn unescaped(field: &str) -> Option<String> {
    (!field.starts_with('"') && !field.contains(['\\', '\r'])).then(|| field.to_owned())
}

/// Returns a field of CSV without its quotes; `None` if programs read it in different ways.
fn unquoted(field: &str) -> Option<String> {
    let Some(quoted) = field.strip_prefix('"') else {
        return (!field.contains(['"', '\r'])).then(|| field.to_owned());
    };
    let parts: Vec<&str> = quoted.strip_suffix('"')?.split("\"\"").collect();
    (!parts.iter().any(|part| part.contains('"'))).then(|| parts.join("\""))
}

pub(super) fn unreadable(problem: impl Into<String>) -> TransferError {
    io::Error::other(problem.into()).into()
}

fn too_long(unit: &str, number: i64) -> TransferError {
    unreadable(format!("{unit} {number} is longer than {MAX_LINE_BYTES} bytes"))
}

/// Returns the problem of a text that is no JSON object.
fn not_json(error: serde_json::Error) -> String {
    if error.is_data() {
        return "is not a JSON object".to_owned();
    }
    format!("is not JSON: {error}").replace(" at line 1 column ", " at column ")
}

/// Returns the first byte that is no white space; in JSON, a form feed is none.
fn first_sign(text: &[u8]) -> Option<u8> {
    text.iter().copied().find(|byte| !b" \t\r\n".contains(byte))
}

/// An input of which no more than `left` bytes are read, until `left` is set again.
struct Bounded<'a, R> {
    input: R,
    left: &'a Cell<usize>,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(self.left.get());
        if most == 0 && !buffer.is_empty() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let read = self.input.read(&mut buffer[..most])?;
        self.left.set(self.left.get() - read);
        Ok(read)
    }
}

/// The users of one JSON array, of which one at a time is held. They are numbered by their places.
struct Users<'a> {
    each: &'a mut Each<'a>,
    read: i64,
    /// The error that `each` has returned, which ends the array.
    error: Option<TransferError>,
    /// The most bytes of the next user.
    left: &'a Cell<usize>,
}

impl Users<'_> {
    fn read(mut self, input: impl Read) -> Result<(), TransferError> {
        let mut array = serde_json::Deserializer::from_reader(input);
        let end = array.deserialize_seq(&mut self).and_then(|()| array.end());
        let no_json = |error: serde_json::Error| match error.io_error_kind() {
            Some(io::ErrorKind::FileTooLarge) => too_long("user", self.read + 1),
            Some(_) => io::Error::from(error).into(),
            None => unreadable(format!("it is no JSON behind {} users: {error}", self.read)),
        };
        self.error.map_or_else(|| end.map_err(no_json), Err)
    }
}

impl<'de> Visitor<'de> for &mut Users<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array of users")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
        // A text of JSON, as a number or an escape in it that is not read is the problem of one user.
        while let Some(user) = array.next_element::<Box<RawValue>>()? {
            self.read += 1;
            self.left.set(MAX_LINE_BYTES);
            let members = serde_json::from_str(user.get()).map_err(not_json);
            self.error = (self.each)(Record { number: self.read, members }).err();
            if self.error.is_some() {
                return Err(A::Error::custom("the import has ended"));
            }
        }
        Ok(())
    }
}
