//! Cuts a stream into records: lines of JSON, the users of one JSON document, or rows of CSV, whose quoted fields may hold
//! line ends.
//!
//! A record with a problem is passed on. A stream that is cut off, or is no text in UTF-8, is an error.

use super::{Format, TransferError, rules::Rules};
use serde_json::{Map, Value};
use std::{
    io::{self, BufRead, BufReader, Cursor, Read},
    mem,
};

/// The number of a record, from 1, and its members; the error is its problem, which quotes no value.
pub(super) type Record = (i64, Result<Map<String, Value>, String>);

/// The consumer of records.
type Each<'a> = dyn FnMut(Record) -> Result<(), TransferError> + 'a;

/// Bytes of the longest line of JSON, row of CSV or user of a document.
const LONGEST: usize = 1 << 20;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

const NO_ARRAY: &str = "it is an object without an array of users: `jq -c .` writes one user a line";
const SEVERAL_ARRAYS: &str = "it has several arrays of objects: `jq -c '.users[]'` chooses the users of one";

/// Calls `each` with every record of the stream. Returns the word for a record: line, or user of a document. Blocks for
/// the input.
pub(super) fn read(input: impl Read, rules: &Rules, each: &mut Each) -> Result<&'static str, TransferError> {
    let mut input = BufReader::new(input);
    if input.fill_buf()?.starts_with(BYTE_ORDER_MARK) {
        input.consume(BYTE_ORDER_MARK.len());
    }
    let mut lines = Lines { input, number: 0, has_end: false };
    let Some(first) = lines.next_filled()? else { return Ok("line") };
    let is_json = matches!(first.trim_ascii_start().first(), Some(b'{' | b'['));
    match rules.import.format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
        Format::Ndjson if rules.is_document(&first) => {
            document(Cursor::new(first).chain(lines.input), each).map(|()| "user")
        }
        Format::Ndjson => lines.objects(first, each).map(|()| "line"),
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
        self.input.by_ref().take(LONGEST as u64 + 1).read_until(b'\n', &mut line)?;
        self.number += 1;
        self.has_end = line.ends_with(b"\n");
        Ok(Some(line).filter(|line| !line.is_empty()))
    }

    /// Reads the next line that is not blank.
    fn next_filled(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            match self.next()? {
                Some(line) if line.trim_ascii().is_empty() => {}
                line => return Ok(line),
            }
        }
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

    /// Reads lines of JSON.
    fn objects(mut self, first: Vec<u8>, each: &mut Each) -> Result<(), TransferError> {
        let mut next = Some(first);
        while let Some(line) = next {
            let object = serde_json::from_str(self.text(line)?.trim());
            if object.as_ref().is_err_and(serde_json::Error::is_eof) && !self.has_end {
                return Err(self.unreadable("is cut off"));
            }
            each((self.number, object.map_err(not_json)))?;
            next = self.next_filled()?;
        }
        Ok(())
    }

    /// Reads CSV. The number of a row is that of its first line.
    fn rows(mut self, first: Vec<u8>, rules: &Rules, each: &mut Each) -> Result<(), TransferError> {
        let first = self.text(first)?;
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
            each((number, rules.row(&header, row)))?;
        }
        Ok(())
    }

    /// Splits a row of CSV, which goes on with the next lines while a quote is open. Crates that read CSV accept text
    /// behind a closing quote, and take the next rows for a part of a field then.
    fn row(&mut self, mut line: String, separator: char) -> Result<Vec<String>, TransferError> {
        let (number, mut bytes) = (self.number, 0);
        let (mut fields, mut field, mut is_open) = (Vec::new(), String::new(), false);
        loop {
            let text = line.trim_end_matches(['\r', '\n']);
            for sign in text.chars() {
                is_open ^= sign == '"' && (field.is_empty() || field.starts_with('"'));
                match sign == separator && !is_open {
                    true => fields.push(mem::take(&mut field)),
                    false => field.push(sign),
                }
            }
            if !is_open {
                fields.push(field);
                let fields: Option<_> = fields.into_iter().map(unquoted).collect();
                let problem = "has text behind a closing quote (a quote in quotes is written twice)";
                return fields.ok_or_else(|| self.unreadable(problem));
            }
            field.push_str(&line[text.len()..]);
            bytes += line.len();
            line = match self.next()? {
                Some(_) if bytes > LONGEST => return Err(too_long("line", number)),
                Some(next) => self.text(next)?,
                None => return Err(unreadable(format!("line {number} has a quote that is not closed"))),
            };
        }
    }
}

/// Returns a field of CSV without its quotes; `None` if there is text behind the closing one.
fn unquoted(field: String) -> Option<String> {
    let Some(quoted) = field.strip_prefix('"') else { return Some(field) };
    let parts: Vec<&str> = quoted.strip_suffix('"')?.split("\"\"").collect();
    (!parts.iter().any(|part| part.contains('"'))).then(|| parts.join("\""))
}

fn unreadable(problem: impl Into<String>) -> TransferError {
    io::Error::other(problem.into()).into()
}

fn too_long(unit: &str, number: i64) -> TransferError {
    unreadable(format!("{unit} {number} is longer than {LONGEST} bytes"))
}

/// Returns the problem of a text that is no JSON object.
fn not_json(error: serde_json::Error) -> String {
    match error.is_data() {
        true => "is not a JSON object".to_owned(),
        false => format!("is not JSON: {error}").replace(" at line 1 column ", " at column "),
    }
}

/// Reads the elements of an array, or of the one array of objects in an object. They are numbered by their places.
fn document(input: impl BufRead, each: &mut Each) -> Result<(), TransferError> {
    // The closing brackets that are still to come, and how many of them follow a user.
    let (mut open, mut level, mut in_text, mut is_escaped) = (Vec::new(), 0, false, false);
    let (mut element, mut number) = (Vec::new(), 0);
    // True in the array of users.
    let mut is_of_users = false;
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
                let is_user = is_of_users || text.starts_with(b"{");
                if is_user && !(text.is_empty() && byte == b']' && number == 0) {
                    if number > 0 && !is_of_users {
                        return Err(unreadable(SEVERAL_ARRAYS));
                    }
                    (is_of_users, number) = (true, number + 1);
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
            b'[' | b'{' => {
                // In ASCII, a closing bracket is two behind the opening one.
                open.push(byte + 2);
                level = level.max(if open[0] == b']' { 1 } else { 2 });
                is_of_users = level == 1 || (is_of_users && open.len() > level);
            }
            b']' | b'}' if open.pop() != Some(byte) => {
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
