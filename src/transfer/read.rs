//! Cuts a stream into records: lines of JSON, the users of one JSON document, or rows of CSV, whose quoted fields may hold
//! line ends.
//!
//! A record with a problem is passed on. A stream that is cut off, or is no text in UTF-8, is an error.

use super::{Format, TransferError, rules::Rules};
use memchr::memchr;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::{
    fmt,
    io::{self, BufRead, BufReader, Cursor, Read},
    mem,
};

/// The number of a record, from 1, and its members; the error is its problem, which quotes no value.
pub(super) type Record = (u64, Result<Map<String, Value>, String>);

/// The consumer of records.
type Each<'a> = dyn FnMut(Record) -> Result<(), TransferError> + 'a;

/// Bytes of one read.
const READ: usize = 64 << 10;

/// Bytes of the longest line of JSON or row of CSV.
const LONGEST: usize = 1 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

const NO_TEXT: &str =
    "it is not UTF-8, but UTF-16, compressed or a spreadsheet: save it as CSV or JSON in UTF-8";
const NO_ARRAY: &str = "it is an object without an array of users: `jq -c .` writes one user a line";
const SEVERAL_ARRAYS: &str = "it has several arrays of objects: `jq -c '.users[]'` chooses the users of one";

/// Calls `each` with every record of the stream. Returns the word for a record: line, or user of a document. Blocks for
/// the input.
pub(super) fn read(input: impl Read, rules: &Rules, each: &mut Each) -> Result<&'static str, TransferError> {
    let mut lines = Lines { input: BufReader::with_capacity(READ, input), number: 0 };
    let first = loop {
        match lines.next()? {
            Some(line) if line.trim_ascii().is_empty() => {}
            Some(line) => break line,
            None => return Ok("line"),
        }
    };
    if str::from_utf8(&first).is_err() {
        return Err(unreadable(NO_TEXT));
    }
    let is_json = matches!(first.trim_ascii_start().first(), Some(b'{' | b'['));
    match rules.import.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if rules.is_document(&first) => {
            document(Cursor::new(first).chain(lines.input), each)?;
            return Ok("user");
        }
        _ if first.len() + BYTE_ORDER_MARK.len() >= LONGEST => return Err(too_long(lines.number).into()),
        Format::Csv => rows(lines, first, rules, each)?,
        Format::Ndjson => objects(lines, first, each)?,
    }
    Ok("line")
}

fn too_long(line: u64) -> io::Error {
    io::Error::other(format!("line {line} is longer than {LONGEST} bytes"))
}

fn unreadable(problem: impl fmt::Display) -> TransferError {
    TransferError::Failed(format!("cannot read: {problem}"))
}

fn cut_off(line: u64) -> TransferError {
    unreadable(format!("line {line} is cut off"))
}

/// The lines of a stream.
struct Lines<R> {
    input: R,
    /// The number of the last line that was read.
    number: u64,
}

impl<R: BufRead> Lines<R> {
    /// Reads a line with its end. `None` at the end of the stream. Of the first line, which may be a document, only the
    /// beginning is read if it is too long.
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        self.input.by_ref().take(LONGEST as u64).read_until(b'\n', &mut line)?;
        self.number += 1;
        if line.len() == LONGEST && self.number > 1 {
            return Err(too_long(self.number));
        }
        if self.number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(Some(line).filter(|line| !line.is_empty()))
    }
}

/// Reads lines of JSON.
fn objects(mut lines: Lines<impl BufRead>, first: Vec<u8>, each: &mut Each) -> Result<(), TransferError> {
    let mut next = Some(first);
    while let Some(line) = next {
        let text = line.trim_ascii();
        if !text.is_empty() {
            let object = serde_json::from_slice(text);
            if object.as_ref().is_err_and(|error| error.is_eof()) && !line.ends_with(b"\n") {
                return Err(cut_off(lines.number));
            }
            let object = object.map_err(|error| match error.is_data() {
                _ if str::from_utf8(text).is_err() => "is not UTF-8".to_owned(),
                true => "is not a JSON object".to_owned(),
                false => format!("is not JSON: {error}").replace(" at line 1 column ", " at column "),
            });
            each((lines.number, object))?;
        }
        next = lines.next()?;
    }
    Ok(())
}

/// Reads CSV. The number of a row is that of its first line.
fn rows(
    mut lines: Lines<impl BufRead>,
    first: Vec<u8>,
    rules: &Rules,
    each: &mut Each,
) -> Result<(), TransferError> {
    let separator = separator(&first);
    let (mut header, mut next) = (None, Some(first));
    while let Some(mut text) = next {
        let number = lines.number;
        let row = loop {
            if let Some(row) = split(&text, separator) {
                break row;
            }
            let start = text.len();
            while !text[start..].contains(&b'"') {
                match lines.next()?.filter(|_| text.len() <= LONGEST) {
                    Some(line) => text.extend_from_slice(&line),
                    None => return Err(unreadable(format!("line {number} has a quote that is not closed"))),
                }
            }
        };
        match &header {
            None => {
                let names = row.and_then(|row| rules.header(row));
                header = Some(names.map_err(|problem| unreadable(format!("line {number}: {problem}")))?);
            }
            Some(header) => {
                let is_short = row.as_ref().is_ok_and(|row| row.len() < header.len());
                match row.and_then(|row| rules.row(header, &row)) {
                    Ok(None) => {}
                    Err(_) if is_short && !text.ends_with(b"\n") => return Err(cut_off(number)),
                    row => each((number, row.map(Option::unwrap_or_default)))?,
                }
            }
        }
        next = lines.next()?;
    }
    Ok(())
}

/// Returns the separator that a header has most often outside of quotes.
fn separator(header: &[u8]) -> u8 {
    let unquoted = || header.split(|byte| *byte == b'"').step_by(2).flatten();
    let count = |separator: &&u8| unquoted().filter(|byte| byte == separator).count();
    // The last one is chosen among equals.
    *b"\t;,".iter().max_by_key(count).unwrap_or(&b',')
}

/// Splits a record of CSV into fields. `None` if a quote is not closed in this text. The error is the problem of the record:
/// crates that read CSV accept text behind a closing quote, and take the next rows for a part of a field then.
fn split(text: &[u8], separator: u8) -> Option<Result<Vec<String>, String>> {
    let mut rest = text.strip_suffix(b"\n").unwrap_or(text);
    rest = rest.strip_suffix(b"\r").unwrap_or(rest);
    let mut fields = Vec::new();
    loop {
        let mut field = Vec::new();
        if let Some(mut quoted) = rest.strip_prefix(b"\"") {
            loop {
                let end = memchr(b'"', quoted)?;
                field.extend_from_slice(&quoted[..end]);
                rest = &quoted[end + 1..];
                let Some(more) = rest.strip_prefix(b"\"") else { break };
                field.push(b'"');
                quoted = more;
            }
        } else {
            let end = memchr(separator, rest).unwrap_or(rest.len());
            field.extend_from_slice(&rest[..end]);
            rest = &rest[end..];
        }
        fields.push(field);
        match rest.split_first() {
            Some((byte, more)) if *byte == separator => rest = more,
            Some(_) => {
                return Some(Err(
                    "has text behind a closing quote (a quote in quotes is written twice)".to_owned()
                ));
            }
            None => break,
        }
    }
    let fields: Result<_, _> = fields.into_iter().map(String::from_utf8).collect();
    Some(fields.map_err(|_| "is not UTF-8".to_owned()))
}

/// Reads the elements of an array, or of the one array of objects in an object. They are numbered by their places.
fn document(input: impl Read, each: &mut Each) -> Result<(), TransferError> {
    let mut users = Users { each, failure: None, number: 0, arrays: 0, others: 0, is_member: false };
    let mut json = serde_json::Deserializer::from_reader(input);
    let read = users.deserialize(&mut json).and_then(|()| json.end());
    match (users.failure, read) {
        (Some(failure), _) => Err(failure),
        (None, Err(error)) => Err(unreadable(error)),
        _ if users.arrays > 1 => Err(unreadable(SEVERAL_ARRAYS)),
        _ if users.arrays == 0 && users.others > 0 => Err(unreadable(NO_ARRAY)),
        _ => Ok(()),
    }
}

/// Passes the users of a document on while it is parsed.
struct Users<'a, 'b> {
    each: &'a mut Each<'b>,
    /// The error of `each`, which has ended the parsing.
    failure: Option<TransferError>,
    /// Number of the last user.
    number: u64,
    /// Number of arrays with an object in them.
    arrays: usize,
    /// Number of members that are no array.
    others: usize,
    /// True below the top of the document.
    is_member: bool,
}

impl<'de> DeserializeSeed<'de> for &mut Users<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// Functions of a visitor that skip a scalar.
macro_rules! skip {
    ($($visit:ident: $scalar:ty),*) => {
        $(fn $visit<E>(self, _: $scalar) -> Result<(), E> {
            self.others += 1;
            Ok(())
        })*
    };
}

impl<'de> Visitor<'de> for &mut Users<'_, '_> {
    type Value = ();

    skip!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_unit<E>(self) -> Result<(), E> {
        self.others += 1;
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        let mut has_users = !self.is_member;
        while let Some(element) = elements.next_element()? {
            let object = match element {
                Value::Object(object) => Ok(object),
                _ if has_users => Err("is not a JSON object".to_owned()),
                _ => continue,
            };
            has_users = true;
            self.number += 1;
            self.failure = (self.each)((self.number, object)).err();
            if self.failure.is_some() {
                return Err(A::Error::custom("stopped"));
            }
        }
        self.arrays += usize::from(has_users);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        if mem::replace(&mut self.is_member, true) {
            self.others += 1;
            return IgnoredAny.visit_map(members).map(drop);
        }
        while members.next_key::<IgnoredAny>()?.is_some() {
            members.next_value_seed(&mut *self)?;
        }
        Ok(())
    }

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an array of users")
    }
}
