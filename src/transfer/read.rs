//! Cuts a stream into records: lines of JSON, the users of one JSON document, or rows of CSV, whose quoted fields may hold
//! line ends.
//!
//! A record with a problem is passed on. A stream that is cut off, or is no text in UTF-8, is an error.

use super::{
    Format, TransferError,
    rules::{Rules, trimmed},
};
use serde_json::{Map, Value};
use std::{
    io::{self, BufRead, BufReader, Cursor, Read},
    mem,
};

/// The number of a record, from 1, and its members; the error is its problem, which quotes no value.
pub(super) type Record = (i64, Result<Map<String, Value>, String>);

/// The consumer of records.
type Each<'a> = dyn FnMut(Record) -> Result<(), TransferError> + 'a;

/// Bytes of one read.
const READ: usize = 64 << 10;

/// Bytes of the longest line of JSON, row of CSV or user of a document.
const LONGEST: usize = 1 << 20;

const NO_ARRAY: &str = "it is an object without an array of users: `jq -c .` writes one user a line";
const SEVERAL_ARRAYS: &str = "it has several arrays of objects: `jq -c '.users[]'` chooses the users of one";

/// Calls `each` with every record of the stream. Returns the word for a record: line, or user of a document. Blocks for
/// the input.
pub(super) fn read(input: impl Read, rules: &Rules, each: &mut Each) -> Result<&'static str, TransferError> {
    let mut lines = Lines { input: BufReader::with_capacity(READ, input), number: 0, has_end: false };
    let mut first = Vec::new();
    while first.trim_ascii().is_empty() {
        let Some(line) = lines.next()? else { return Ok("line") };
        first = line;
    }
    let is_json = matches!(first.trim_ascii_start().first(), Some(b'{' | b'['));
    match rules.import.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if rules.is_document(&first) => {
            document(Cursor::new(first).chain(lines.input), each)?;
            return Ok("user");
        }
        Format::Ndjson => objects(lines, first, each)?,
        Format::Csv => rows(lines, first, rules, each)?,
    }
    Ok("line")
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
        const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
        let mut line = Vec::new();
        let most = LONGEST + BYTE_ORDER_MARK.len() + 1;
        self.input.by_ref().take(most as u64).read_until(b'\n', &mut line)?;
        self.number += 1;
        self.has_end = line.ends_with(b"\n");
        if self.number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(Some(line).filter(|line| !line.is_empty()))
    }

    /// Returns the text of the last line that was read.
    fn text(&self, line: Vec<u8>) -> Result<String, TransferError> {
        if line.len() > LONGEST {
            return Err(too_long("line", self.number));
        }
        String::from_utf8(line)
            .map_err(|_| self.unreadable("is not UTF-8: save the file as CSV or JSON in UTF-8"))
    }

    /// Returns the error that the last line that was read is.
    fn unreadable(&self, problem: &str) -> TransferError {
        unreadable(format!("line {} {problem}", self.number))
    }
}

fn unreadable(problem: impl Into<String>) -> TransferError {
    io::Error::other(problem.into()).into()
}

fn too_long(unit: &str, number: i64) -> TransferError {
    unreadable(format!("{unit} {number} is longer than {LONGEST} bytes"))
}

/// Reads lines of JSON.
fn objects(mut lines: Lines<impl BufRead>, first: Vec<u8>, each: &mut Each) -> Result<(), TransferError> {
    let mut next = Some(first);
    while let Some(line) = next {
        let text = lines.text(line)?;
        if !text.trim().is_empty() {
            let object = serde_json::from_str(text.trim());
            if object.as_ref().is_err_and(serde_json::Error::is_eof) && !lines.has_end {
                return Err(lines.unreadable("is cut off"));
            }
            each((lines.number, object.map_err(not_json)))?;
        }
        next = lines.next()?;
    }
    Ok(())
}

/// Returns the problem of a text that is no JSON object.
fn not_json(error: serde_json::Error) -> String {
    match error.is_data() {
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
    let first = lines.text(first)?;
    let mut unquoted = first.split('"').step_by(2).flat_map(str::chars);
    let separator = unquoted.find(|sign| "\t;,".contains(*sign)).unwrap_or(',');
    let header = row(&mut lines, first, separator)?;
    let header = rules.header(header).map_err(|problem| lines.unreadable(&problem))?;
    while let Some(line) = lines.next()? {
        let (number, line) = (lines.number, lines.text(line)?);
        let row = row(&mut lines, line, separator)?;
        if row.iter().all(|value| trimmed(value).is_empty()) {
            continue;
        }
        if row.len() < header.len() && !lines.has_end {
            return Err(lines.unreadable("is cut off"));
        }
        each((number, rules.row(&header, row)))?;
    }
    Ok(())
}

/// Splits a row of CSV, which goes on with the next lines while a quote is open. Crates that read CSV accept text behind a
/// closing quote, and take the next rows for a part of a field then.
fn row(
    lines: &mut Lines<impl BufRead>,
    mut line: String,
    separator: char,
) -> Result<Vec<String>, TransferError> {
    let (number, mut bytes) = (lines.number, 0);
    // A field in quotes is open while the number of its quotes is odd.
    let (mut fields, mut field, mut quotes) = (Vec::new(), String::new(), 0);
    loop {
        let text = line.strip_suffix('\n').unwrap_or(&line);
        let text = text.strip_suffix('\r').unwrap_or(text);
        for sign in text.chars() {
            match sign {
                '"' if quotes > 0 || field.is_empty() => {
                    quotes += 1;
                    if quotes > 1 && quotes % 2 == 1 {
                        field.push('"');
                    }
                }
                _ if quotes % 2 == 1 => field.push(sign),
                _ if sign == separator => {
                    fields.push(mem::take(&mut field));
                    quotes = 0;
                }
                _ if quotes > 0 => {
                    let problem = "has text behind a closing quote (a quote in quotes is written twice)";
                    return Err(lines.unreadable(problem));
                }
                _ => field.push(sign),
            }
        }
        if quotes % 2 == 0 {
            fields.push(field);
            return Ok(fields);
        }
        field.push_str(&line[text.len()..]);
        bytes += line.len();
        line = match lines.next()? {
            Some(_) if bytes > LONGEST => return Err(too_long("line", number)),
            Some(next) => lines.text(next)?,
            None => return Err(unreadable(format!("line {number} has a quote that is not closed"))),
        };
    }
}

/// Reads the elements of an array, or of the one array of objects in an object. They are numbered by their places.
fn document(input: impl BufRead, each: &mut Each) -> Result<(), TransferError> {
    /// Brackets within one another, as many as `serde_json` takes.
    const DEEPEST: usize = 128;
    // The closing brackets that are still to come, and how many of them follow a user.
    let (mut open, mut level, mut in_text, mut is_escaped) = (Vec::new(), 0, false, false);
    let (mut element, mut number) = (Vec::new(), 0);
    // Arrays that may have users, and the number of the one that has.
    let (mut arrays, mut users) = (0, 0);
    for byte in input.bytes() {
        let byte = byte?;
        if level > 0 && open.get(level - 1) == Some(&b']') {
            if in_text || open.len() > level || !matches!(byte, b',' | b']') {
                element.push(byte);
                if element.len() == LONGEST {
                    return Err(too_long("user", number + 1));
                }
            } else {
                let text = element.trim_ascii();
                let is_user = level == 1 || users == arrays || text.starts_with(b"{");
                if is_user && !(text.is_empty() && byte == b']') {
                    if users != 0 && users != arrays {
                        return Err(unreadable(SEVERAL_ARRAYS));
                    }
                    (users, number) = (arrays, number + 1);
                    each((number, serde_json::from_slice(text).map_err(not_json)))?;
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
            _ => {}
        }
    }
    match open.is_empty() {
        false => Err(unreadable(format!("it is cut off behind {number} users"))),
        true if number == 0 && level == 2 => Err(unreadable(NO_ARRAY)),
        true => Ok(()),
    }
}
