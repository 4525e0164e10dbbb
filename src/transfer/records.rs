//! Cuts a stream into records: lines of JSON, the elements of one JSON array, or rows of CSV, whose quoted fields may
//! have line ends.
//!
//! A record that cannot be parsed has a problem instead of members. A stream that is cut off or is not UTF-8 is an
//! error.

use super::rules::{Record, Rules};
use super::{Format, TransferError};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::io::{self, BufRead, BufReader, Read};
use std::{cell::Cell, fmt};

/// The function that is called with each record. An error that it returns ends the import.
type Sink<'a> = dyn FnMut(Record) -> Result<(), TransferError> + 'a;

/// The most bytes of a record: of a line of JSON, of an element of an array or of a row of CSV.
const MAX_RECORD_BYTES: usize = 1 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

const AMBIGUOUS_FIELD: &str = "has, between tabs, a field that begins with a quote or has a backslash or a CR, which \
                             programs read in different ways: save the file as CSV with commas, or as JSON";
const MISPLACED_QUOTE: &str = "has text behind a closing quote, or a quote or a CR in a field without quotes (a quote in \
                               quotes is written twice)";
const SINGLE_OBJECT: &str = "it is one JSON object: write a user a line, as `jq -c '.users[]'` does from an array in the object, \
                        and `jq -c .` from objects of several lines";

/// Calls `each` with every record of the stream. Returns the word for a record in messages: `line`, or `user` for an
/// element of an array. Blocks until the stream ends.
pub(super) fn read(input: impl Read, rules: &Rules, each: &mut Sink) -> Result<&'static str, TransferError> {
    let mut input = BufReader::new(input);
    if input.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        input.consume(BYTE_ORDER_MARK.len());
    }
    let mut lines = LineReader { input, line_number: 0, has_line_feed: false };
    let Some(first) = lines.next_nonblank_line()? else { return Ok("line") };
    let begin = first_nonblank_byte(&first);
    let is_json = matches!(begin, Some(b'{' | b'['));
    match rules.options.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if begin == Some(b'[') => {
            let bytes_left = &Cell::new(MAX_RECORD_BYTES);
            let input = BoundedInput { input: first.as_slice().chain(lines.input), bytes_left };
            ArrayReader { sink: each, element_count: 0, error: None, bytes_left }.read(input).map(|()| "user")
        }
        Format::Ndjson => {
            let first = lines.decode_line(first)?;
            if rules.begins_single_document(&first) {
                return Err(read_error(SINGLE_OBJECT));
            }
            lines.read_objects(first, each).map(|()| "line")
        }
        Format::Csv => lines.read_rows(first, rules, each).map(|()| "line"),
    }
}

/// A stream that is read line by line.
struct LineReader<R> {
    input: R,
    /// The number of the line that was read last, from 1.
    line_number: i64,
    /// True if the line that was read last ends in a line feed. False for the last line of a file that is cut off.
    has_line_feed: bool,
}

impl<R: BufRead> LineReader<R> {
    /// Reads the next line, with its line feed. Reads only the beginning of a line that is too long. Returns `None` at
    /// the end of the stream.
    fn next_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        self.input.by_ref().take(MAX_RECORD_BYTES as u64 + 1).read_until(b'\n', &mut line)?;
        self.line_number += 1;
        self.has_line_feed = line.ends_with(b"\n");
        Ok(Some(line).filter(|line| !line.is_empty()))
    }

    /// Reads the next line that is not blank. Returns `None` at the end of the stream.
    fn next_nonblank_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            match self.next_line()? {
                Some(line) if first_nonblank_byte(&line).is_none() => {}
                line => return Ok(line),
            }
        }
    }

    /// Returns the line that was read last as text. Fails if the line is too long or not UTF-8.
    fn decode_line(&self, line: Vec<u8>) -> Result<String, TransferError> {
        if line.len() > MAX_RECORD_BYTES {
            return Err(too_long_error("line", self.line_number));
        }
        String::from_utf8(line)
            .map_err(|_| self.line_error("is not UTF-8: save the file as CSV or JSON in UTF-8"))
    }

    /// Returns an error that names the line that was read last.
    fn line_error(&self, problem: &str) -> TransferError {
        read_error(format!("line {} {problem}", self.line_number))
    }

    /// Reads the JSON lines of a stream, each of which is a record. `first_line` has been read already.
    fn read_objects(mut self, first_line: String, each: &mut Sink) -> Result<(), TransferError> {
        let mut next = Some(first_line);
        while let Some(line) = next {
            let object = serde_json::from_str(line.trim_end_matches(['\r', '\n']));
            if object.as_ref().is_err_and(serde_json::Error::is_eof) && !self.has_line_feed {
                return Err(self.line_error("is cut off"));
            }
            each(Record { number: self.line_number, members: object.map_err(not_json_problem) })?;
            next = self.next_nonblank_line()?.map(|line| self.decode_line(line)).transpose()?;
        }
        Ok(())
    }

    /// Reads the CSV rows of a stream, each of which is a record. `header` has been read already. A record has the
    /// number of the first line of its row.
    fn read_rows(mut self, header: Vec<u8>, rules: &Rules, each: &mut Sink) -> Result<(), TransferError> {
        let header = self.decode_line(header)?;
        let mut unquoted = header.split('"').step_by(2).flat_map(str::chars);
        let separator = unquoted.find(|sign| "\t;,".contains(*sign)).unwrap_or(',');
        let header = self.read_row(header, separator)?;
        let header = rules.parse_header(header).map_err(|problem| self.line_error(&problem))?;
        while let Some(line) = self.next_line()? {
            let (number, line) = (self.line_number, self.decode_line(line)?);
            let row = self.read_row(line, separator)?;
            if row.iter().all(|value| value.trim().is_empty()) {
                continue;
            }
            if row.len() < header.len() && !self.has_line_feed {
                return Err(self.line_error("is cut off"));
            }
            each(Record { number, members: rules.parse_row(&header, row) })?;
        }
        Ok(())
    }

    /// Splits a row of CSV into fields. Reads further lines while a quote is open.
    ///
    /// Refuses a quote within a field that does not begin with one: crates that read CSV accept such a quote, and then
    /// take the next rows for a part of the field. If tabs separate the fields, quotes enclose no tab, because some
    /// programs write quotes around a tab and some a backslash before it.
    fn read_row(&mut self, mut text: String, separator: char) -> Result<Vec<String>, TransferError> {
        let is_tsv = separator == '\t';
        let is_quote = |sign: char| sign == '"' && !is_tsv;
        let (number, mut end, mut is_open) = (self.line_number, 0, false);
        loop {
            is_open ^= text[end..].matches(is_quote).count() % 2 == 1;
            if !is_open {
                break;
            }
            end = text.len();
            match self.next_line()? {
                Some(_) if end > MAX_RECORD_BYTES => return Err(too_long_error("line", number)),
                Some(next) => text.push_str(&self.decode_line(next)?),
                None => return Err(read_error(format!("line {number} has a quote that is not closed"))),
            }
        }
        let fields = text.trim_end_matches(['\r', '\n']).split(|sign| {
            is_open ^= is_quote(sign);
            sign == separator && !is_open
        });
        let fields: Option<_> = fields.map(if is_tsv { parse_tab_field } else { parse_csv_field }).collect();
        fields.ok_or_else(|| self.line_error(if is_tsv { AMBIGUOUS_FIELD } else { MISPLACED_QUOTE }))
    }
}

/// Returns the value of a field between tabs, or `None` if programs read the field in different ways.
fn parse_tab_field(field: &str) -> Option<String> {
    (!field.starts_with('"') && !field.contains(['\\', '\r'])).then(|| field.to_owned())
}

/// Returns the value of a field of CSV, without its quotes, or `None` if programs read the field in different ways.
fn parse_csv_field(field: &str) -> Option<String> {
    let Some(quoted) = field.strip_prefix('"') else {
        return (!field.contains(['"', '\r'])).then(|| field.to_owned());
    };
    let parts: Vec<&str> = quoted.strip_suffix('"')?.split("\"\"").collect();
    (!parts.iter().any(|part| part.contains('"'))).then(|| parts.join("\""))
}

/// Returns the error of an import whose stream cannot be read, with this reason.
pub(super) fn read_error(problem: impl Into<String>) -> TransferError {
    io::Error::other(problem.into()).into()
}

/// Returns the error of a record that has more than [`MAX_RECORD_BYTES`].
fn too_long_error(record_word: &str, number: i64) -> TransferError {
    read_error(format!("{record_word} {number} is longer than {MAX_RECORD_BYTES} bytes"))
}

/// Returns the problem of a record that is not a JSON object.
fn not_json_problem(error: serde_json::Error) -> String {
    if error.is_data() {
        return "is not a JSON object".to_owned();
    }
    format!("is not JSON: {error}").replace(" at line 1 column ", " at column ")
}

/// Returns the first byte that is not white space in JSON.
fn first_nonblank_byte(text: &[u8]) -> Option<u8> {
    text.iter().copied().find(|byte| !b" \t\r\n".contains(byte))
}

/// An input that fails once `bytes_left` have been read. The reader of an array sets this number anew after each
/// element, so that no element is too long.
struct BoundedInput<'a, R> {
    input: R,
    bytes_left: &'a Cell<usize>,
}

impl<R: Read> Read for BoundedInput<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let max = buffer.len().min(self.bytes_left.get());
        if max == 0 && !buffer.is_empty() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let bytes = self.input.read(&mut buffer[..max])?;
        self.bytes_left.set(self.bytes_left.get() - bytes);
        Ok(bytes)
    }
}

/// A reader of one JSON array, whose elements are records. Holds one element at a time.
struct ArrayReader<'a> {
    sink: &'a mut Sink<'a>,
    /// How many elements have been read, which is also the number of the last one.
    element_count: i64,
    /// The error that `sink` has returned, which ends the import.
    error: Option<TransferError>,
    /// The most bytes that can still be read of the next element.
    bytes_left: &'a Cell<usize>,
}

impl ArrayReader<'_> {
    /// Calls `sink` with each element of the array. Fails if anything but white space follows the array.
    fn read(mut self, input: impl Read) -> Result<(), TransferError> {
        let mut array = serde_json::Deserializer::from_reader(input);
        let end = array.deserialize_seq(&mut self).and_then(|()| array.end());
        let no_json = |error: serde_json::Error| match error.io_error_kind() {
            Some(io::ErrorKind::FileTooLarge) => too_long_error("user", self.element_count + 1),
            Some(_) => io::Error::from(error).into(),
            None => read_error(format!("it is no JSON behind {} users: {error}", self.element_count)),
        };
        self.error.map_or_else(|| end.map_err(no_json), Err)
    }
}

impl<'de> Visitor<'de> for &mut ArrayReader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array of users")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
        // Takes each element as text first, so that a number or an escape that cannot be parsed is the problem of one
        // record, and not of the array.
        while let Some(user) = array.next_element::<Box<RawValue>>()? {
            self.element_count += 1;
            self.bytes_left.set(MAX_RECORD_BYTES);
            let members = serde_json::from_str(user.get()).map_err(not_json_problem);
            self.error = (self.sink)(Record { number: self.element_count, members }).err();
            if self.error.is_some() {
                return Err(A::Error::custom("the import has ended"));
            }
        }
        Ok(())
    }
}
