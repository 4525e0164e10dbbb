//! Cuts a stream into records, in batches: lines of JSON, elements of a JSON array, or records of CSV, whose quoted
//! fields may hold line ends.
//!
//! Holds no more than a batch and the longest record, whatever comes. Knows no field of a user.

use super::{Complaint, Format, select::Selection};
use memchr::memchr;
use serde_json::Value;
use std::{
    io::{self, BufRead, BufReader, Cursor, Read},
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bytes and records after which a batch ends: the work of one core. A record with a password takes some 20 ms.
const BATCH_BYTES: usize = 64 << 10;
const BATCH_RECORDS: usize = 64;

/// Bytes of one read.
const READ: usize = 64 << 10;

/// Beginnings of files that are no text in UTF-8, and their problems.
const OTHER_FILES: [(&[u8], &str); 4] = [
    (b"\xff\xfe", "is UTF-16, and should be UTF-8"),
    (b"\xfe\xff", "is UTF-16, and should be UTF-8"),
    (b"\x1f\x8b", "is compressed: gunzip it first"),
    (b"PK\x03\x04", "is a spreadsheet or an archive: save it as CSV"),
];

const TOO_LONG: &str = "is too long";
const UNCLOSED: &str = "has a quote that is not closed";
const STRAY: &str = "has text behind a closing quote (a quote within quotes is written twice)";
const NO_ARRAY: &str = "is an object without an array of users: `jq -c .` writes one user a line";
const SEVERAL_ARRAYS: &str = "has several arrays or objects: `jq -c '.users[]'` chooses the users of one";

/// Consecutive records.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// The texts of the records, each with a line feed at its end.
    pub text: Vec<u8>,
    /// The number of each record, and the end of its text, or the problem that it has none for.
    pub records: Vec<(u64, Result<usize, &'static str>)>,
}

/// The arrangement of records in a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Lines of JSON.
    Lines,
    /// Elements of one JSON array, which may be a member of an object. Numbered by their places, from 1.
    Array,
    /// Records of CSV, separated by this byte. Numbered by their first lines.
    Csv(u8),
}

/// A stream of records whose first line has been looked at.
pub(super) struct Source {
    input: Box<dyn BufRead + Send>,
    pub layout: Layout,
    /// The number of the line, or of the element, that comes next.
    number: u64,
    nesting: Nesting,
    /// Bytes of the longest record.
    longest: usize,
}

impl Source {
    /// Looks at the first line that is not blank. `position` counts the bytes that are read. The inner error is the
    /// problem of that line. Blocks for the input.
    pub fn open(
        input: impl Read + Send + 'static,
        format: Option<Format>,
        selection: &Selection,
        longest: usize,
        position: &Arc<AtomicU64>,
    ) -> io::Result<Result<Source, Complaint>> {
        let mut input = BufReader::with_capacity(READ, Counted(input, position.clone()));
        let (mut first, mut line) = (Vec::new(), 0);
        while first.trim_ascii().is_empty() {
            first.clear();
            line += 1;
            if input.by_ref().take(longest as u64).read_until(b'\n', &mut first)? == 0 {
                break;
            }
            if let Some((_, problem)) = OTHER_FILES.iter().find(|(start, _)| first.starts_with(start)) {
                return Ok(Err(Complaint::of_line(line, (*problem).to_owned())));
            }
            if line == 1 && first.starts_with("\u{feff}".as_bytes()) {
                first.drain(..3);
            }
        }
        let is_json = matches!(first.trim_ascii_start().first(), None | Some(b'{' | b'['));
        let layout = match format.unwrap_or(if is_json { Format::Ndjson } else { Format::Csv }) {
            Format::Csv => Layout::Csv(separator(&first)),
            Format::Ndjson if is_array(&first, first.len() == longest, selection) => Layout::Array,
            Format::Ndjson => Layout::Lines,
        };
        let input = Box::new(Cursor::new(first).chain(input));
        let number = if layout == Layout::Array { 1 } else { line };
        Ok(Ok(Source { input, layout, number, nesting: Nesting::default(), longest }))
    }

    /// Calls `send` with batches until the stream ends, or `send` fails. Blocks for the input.
    pub fn read(mut self, send: &mut dyn FnMut(Batch) -> io::Result<()>) -> io::Result<()> {
        let (mut batch, mut text) = (Batch::default(), Vec::new());
        while let Some((number, found)) = self.record(&mut text)? {
            let end = found.map(|()| {
                batch.text.extend_from_slice(&text);
                batch.text.push(b'\n');
                batch.text.len()
            });
            batch.records.push((number, end));
            if batch.records.len() >= BATCH_RECORDS || batch.text.len() >= BATCH_BYTES {
                send(mem::take(&mut batch))?;
            }
        }
        send(batch)
    }

    /// Reads the next record that is not blank into `text`. Returns its number; the inner error is its problem. `None`
    /// at the end of the stream.
    pub fn record(&mut self, text: &mut Vec<u8>) -> io::Result<Option<Numbered>> {
        text.clear();
        match self.layout {
            Layout::Array => self.element(text),
            Layout::Lines => self.lines(text, None),
            Layout::Csv(separator) => self.lines(text, Some(separator)),
        }
    }

    fn element(&mut self, text: &mut Vec<u8>) -> io::Result<Option<Numbered>> {
        let mut ends = false;
        while !ends {
            let found = self.input.fill_buf()?;
            if found.is_empty() {
                // Told once.
                self.layout = Layout::Lines;
                let problem = self.nesting.problem();
                return Ok(problem.map(|problem| (self.number, Err(problem))));
            }
            let (length, has_ended) = self.nesting.take(found, text, self.longest);
            self.input.consume(length);
            ends = has_ended;
        }
        self.number += 1;
        Ok(Some((self.number - 1, if text.len() > self.longest { Err(TOO_LONG) } else { Ok(()) })))
    }

    /// Reads a line, or as many as the quotes of a record of CSV hold.
    fn lines(&mut self, text: &mut Vec<u8>, separator: Option<u8>) -> io::Result<Option<Numbered>> {
        loop {
            text.clear();
            let (number, mut length, mut quoting, mut ends) = (self.number, 0, Quoting::FieldStart, false);
            while !ends {
                let found = self.input.fill_buf()?;
                let piece = &found[..memchr(b'\n', found).map_or(found.len(), |at| at + 1)];
                if let Some(separator) = separator {
                    quoting = quoting.after(piece, separator);
                }
                length += piece.len();
                if length <= self.longest {
                    text.extend_from_slice(piece);
                }
                let ends_line = piece.ends_with(b"\n");
                self.number += u64::from(ends_line);
                ends = piece.is_empty() || (ends_line && quoting != Quoting::Quoted);
                let used = piece.len();
                self.input.consume(used);
            }
            let problem = match quoting {
                Quoting::Quoted => Some(UNCLOSED),
                Quoting::Stray => Some(STRAY),
                _ if length > self.longest => Some(TOO_LONG),
                _ if length == 0 => return Ok(None),
                _ => None,
            };
            text.truncate(text.strip_suffix(b"\n").unwrap_or(text).len());
            text.truncate(text.strip_suffix(b"\r").unwrap_or(text).len());
            if problem.is_some() || !text.trim_ascii().is_empty() {
                return Ok(Some((number, problem.map_or(Ok(()), Err))));
            }
        }
    }
}

/// The number of a record; the error is its problem.
type Numbered = (u64, Result<(), &'static str>);

/// A reader that counts the bytes that it has read.
struct Counted<R>(R, Arc<AtomicU64>);

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.0.read(bytes)?;
        self.1.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Returns the separator that a header has most often outside of quotes.
fn separator(header: &[u8]) -> u8 {
    let unquoted = || header.split(|byte| *byte == b'"').step_by(2).flatten();
    let count = |separator: &&u8| unquoted().filter(|byte| byte == separator).count();
    // Of equals, the last one.
    *b"\t;,".iter().max_by_key(count).unwrap_or(&b',')
}

/// Returns whether the stream that begins with this line is one array, or one object with an array in it.
fn is_array(line: &[u8], is_cut: bool, selection: &Selection) -> bool {
    match serde_json::from_slice(line) {
        Ok(Value::Object(object)) => !selection.is_user(&object),
        Ok(_) => line.trim_ascii_start().starts_with(b"["),
        Err(error) => {
            let goes_on = matches!(line.trim_ascii_end().last(), Some(b'{' | b'[' | b',' | b':'));
            line.trim_ascii_start().starts_with(b"[")
                || (error.is_eof() && (goes_on || (is_cut && line.contains(&b'['))))
        }
    }
}

/// The part of a CSV record that the next byte is in. A quote means something at the start of a field and inside of a
/// quoted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quoting {
    FieldStart,
    Unquoted,
    Quoted,
    /// After a quote in a quoted field: its end, or the first half of an escaped quote.
    Closed,
    /// After a CR behind a quoted field, which only a line feed may follow.
    Return,
    /// After text behind a closing quote.
    Stray,
}

impl Quoting {
    fn after(self, bytes: &[u8], separator: u8) -> Quoting {
        use Quoting::{Closed, FieldStart, Quoted, Return, Stray, Unquoted};
        bytes.iter().fold(self, |quoting, byte| match (quoting, *byte) {
            (Quoted, b'"') => Closed,
            (Quoted, _) | (FieldStart | Closed, b'"') => Quoted,
            (Closed, b'\r') => Return,
            (Stray, _) => Stray,
            (Closed | Return, b'\n') => FieldStart,
            (Return, _) => Stray,
            (_, byte) if byte == separator => FieldStart,
            (Closed, _) => Stray,
            _ => Unquoted,
        })
    }
}

/// The place of the next byte in a JSON stream that is one array of objects, or one object with such an array in it.
#[derive(Debug, Default)]
struct Nesting {
    depth: usize,
    /// The depth of the elements' container: 1, or 2 in an object; 0 before the first byte.
    base: usize,
    in_string: bool,
    is_escaped: bool,
    /// Whether the container at the base is an array, and whether an object was found in it.
    in_array: bool,
    is_full: bool,
    /// Containers at the top, of which there has to be one; arrays at the base, and those with objects in them.
    roots: usize,
    arrays: usize,
    full_arrays: usize,
}

impl Nesting {
    /// Appends bytes up to the end of the next element to `text`. Returns how many were read, and whether it has ended.
    fn take(&mut self, bytes: &[u8], text: &mut Vec<u8>, longest: usize) -> (usize, bool) {
        for (at, byte) in bytes.iter().enumerate() {
            let was_inside = self.in_array && self.depth >= self.base;
            let mut closes = false;
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_string => self.is_escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => {
                    self.depth += 1;
                    self.roots += usize::from(self.depth == 1);
                    if self.base == 0 {
                        self.base = if *byte == b'[' { 1 } else { 2 };
                    }
                    if self.depth == self.base {
                        (self.in_array, self.is_full) = (*byte == b'[', false);
                        self.arrays += usize::from(self.in_array);
                    }
                }
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    closes = was_inside;
                }
                _ => {}
            }
            let ends_array = closes && self.depth < self.base;
            let is_between = text.is_empty() && (*byte == b',' || byte.is_ascii_whitespace());
            if was_inside && !ends_array && !is_between && text.len() <= longest {
                text.push(*byte);
            }
            if closes && self.depth == self.base && !self.is_full {
                (self.is_full, self.full_arrays) = (true, self.full_arrays + 1);
            }
            if ends_array && self.base == 2 {
                // It has no objects: it belongs to something else.
                text.clear();
            }
            if closes && self.depth <= self.base && !text.is_empty() {
                return (at + 1, true);
            }
        }
        (bytes.len(), false)
    }

    /// Returns the problem of a stream that has ended.
    fn problem(&self) -> Option<&'static str> {
        match self.full_arrays {
            _ if self.depth > 0 => Some("ends before the array does"),
            _ if self.roots > 1 => Some(SEVERAL_ARRAYS),
            0 if self.arrays == 0 => Some(NO_ARRAY),
            0 | 1 => None,
            _ => Some(SEVERAL_ARRAYS),
        }
    }
}
