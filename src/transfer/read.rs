//! Cuts a stream into records: lines of JSON, the users of one JSON document, or rows of CSV, whose quoted fields may hold
//! line ends.
//!
//! A record with a problem is passed on. A stream that is cut off, or is no text in UTF-8, is an error.

use super::{Format, TransferError, rules::Rules};
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

/// Bytes of the longest line of JSON, row of CSV or user of a document.
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
    // A character may be cut off at the end of a part.
    if str::from_utf8(&first).is_err_and(|error| error.error_len().is_some()) {
        return Err(unreadable(NO_TEXT));
    }
    let is_json = matches!(first.trim_ascii_start().first(), Some(b'{' | b'['));
    match rules.import.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if rules.is_document(&first) => {
            document(Cursor::new(first).chain(lines.input), each)?;
            return Ok("user");
        }
        _ if first.len() + BYTE_ORDER_MARK.len() >= LONGEST => {
            return Err(too_long("line", lines.number).into());
        }
        Format::Csv => rows(lines, first, rules, each)?,
        Format::Ndjson => objects(lines, first, each)?,
    }
    Ok("line")
}

fn too_long(unit: &str, number: u64) -> io::Error {
    io::Error::other(format!("{unit} {number} is longer than {LONGEST} bytes"))
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
            return Err(too_long("line", self.number));
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
            each((lines.number, object.map_err(|error| not_json(text, &error))))?;
        }
        next = lines.next()?;
    }
    Ok(())
}

/// Returns the problem of a text that is no JSON object.
fn not_json(text: &[u8], error: &serde_json::Error) -> String {
    match error.is_data() {
        _ if str::from_utf8(text).is_err() => "is not UTF-8".to_owned(),
        true => "is not a JSON object".to_owned(),
        false => format!("is not JSON: {error}").replace(" at line 1 column ", " at column "),
    }
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
    while let Some(first) = next {
        let number = lines.number;
        let (row, is_whole) = row(&mut lines, first, separator)?;
        match &header {
            None => {
                let names = row.and_then(|row| rules.header(row));
                header = Some(names.map_err(|problem| unreadable(format!("line {number}: {problem}")))?);
            }
            Some(header) => {
                let is_short = row.as_ref().is_ok_and(|row| row.len() < header.len());
                match row.and_then(|row| rules.row(header, &row)) {
                    Ok(None) => {}
                    Err(_) if is_short && !is_whole => return Err(cut_off(number)),
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

/// Splits a record of CSV, which goes on with the next lines while a quote is open. Returns the fields, or the problem of
/// the record; and whether its last line has an end. Crates that read CSV accept text behind a closing quote, and take the
/// next rows for a part of a field then.
fn row(
    lines: &mut Lines<impl BufRead>,
    mut line: Vec<u8>,
    separator: u8,
) -> Result<(Result<Vec<String>, String>, bool), TransferError> {
    let (number, mut bytes) = (lines.number, 0);
    let (mut fields, mut field, mut quotes) = (Vec::new(), Vec::new(), Quotes::None);
    loop {
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        for byte in text {
            match (&quotes, *byte) {
                (Quotes::None, b'"') if field.is_empty() => quotes = Quotes::Open,
                (Quotes::Open, b'"') => quotes = Quotes::Closed,
                (Quotes::Closed, b'"') => {
                    field.push(b'"');
                    quotes = Quotes::Open;
                }
                (Quotes::None | Quotes::Closed, byte) if byte == separator => {
                    fields.push(mem::take(&mut field));
                    quotes = Quotes::None;
                }
                (Quotes::Closed, _) => {
                    let problem = "has text behind a closing quote (a quote in quotes is written twice)";
                    return Ok((Err(problem.to_owned()), line.ends_with(b"\n")));
                }
                (_, byte) => field.push(byte),
            }
        }
        if quotes != Quotes::Open {
            break;
        }
        field.extend_from_slice(&line[text.len()..]);
        bytes += line.len();
        line = lines
            .next()?
            .filter(|_| bytes <= LONGEST)
            .ok_or_else(|| unreadable(format!("line {number} has a quote that is not closed")))?;
    }
    fields.push(field);
    let fields: Result<_, _> = fields.into_iter().map(String::from_utf8).collect();
    Ok((fields.map_err(|_| "is not UTF-8".to_owned()), line.ends_with(b"\n")))
}

/// Quotes around a field of CSV.
#[derive(PartialEq)]
enum Quotes {
    None,
    Open,
    /// A quote in quotes was the last byte.
    Closed,
}

/// Reads the elements of an array, or of the one array of objects in an object. They are numbered by their places.
fn document(input: impl BufRead, each: &mut Each) -> Result<(), TransferError> {
    /// Brackets within one another, as many as `serde_json` takes.
    const DEEPEST: usize = 128;
    // The closing brackets that are still to come, and how many of them follow a user.
    let (mut open, mut level, mut in_text, mut is_escaped) = (Vec::new(), 0, false, false);
    let (mut element, mut number, mut commas) = (Vec::new(), 0, 0);
    // Arrays that may have users, and the number of the one that has.
    let (mut arrays, mut users) = (0, 0);
    for byte in input.bytes() {
        let byte = byte?;
        if level > 0 && open.get(level - 1) == Some(&b']') {
            if in_text || open.len() > level || !matches!(byte, b',' | b']') {
                element.push(byte);
                if element.len() == LONGEST {
                    return Err(too_long("user", number + 1).into());
                }
            } else {
                let text = element.trim_ascii();
                let is_user = level == 1 || users == arrays || text.starts_with(b"{");
                if is_user && !(text.is_empty() && byte == b']') {
                    if users != 0 && users != arrays {
                        return Err(unreadable(SEVERAL_ARRAYS));
                    }
                    (users, number) = (arrays, number + 1);
                    each((number, serde_json::from_slice(text).map_err(|error| not_json(text, &error))))?;
                }
                element.clear();
            }
        }
        match byte {
            _ if is_escaped => is_escaped = false,
            _ if open.is_empty() && level > 0 && !byte.is_ascii_whitespace() => {
                return Err(unreadable("it has text behind its end"));
            }
            b'\\' if in_text => is_escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' if open.len() < DEEPEST => {
                open.push(if byte == b'[' { b']' } else { b'}' });
                if level == 0 {
                    level = if byte == b'[' { 1 } else { 2 };
                }
                arrays += usize::from(byte == b'[' && open.len() == level);
            }
            b']' | b'}' if open.last() == Some(&byte) => _ = open.pop(),
            b'[' | b'{' | b']' | b'}' => {
                return Err(unreadable(format!("it is no JSON behind {number} users")));
            }
            b',' => commas += usize::from(open.len() == 1),
            _ => {}
        }
    }
    match open.is_empty() && level > 0 {
        false => Err(unreadable(format!("it is cut off behind {number} users"))),
        true if number == 0 && level == 2 && (arrays == 0 || commas > 0) => Err(unreadable(NO_ARRAY)),
        true => Ok(()),
    }
}
