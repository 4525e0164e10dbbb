//! Where the users of an import come from: a stream, or a file, which can be read twice.

use super::Format;
use std::{
    fs::File,
    io::{self, Read, Seek},
    mem,
    os::unix::fs::FileExt,
    sync::Arc,
};

/// What is imported.
pub struct Input(Source);

enum Source {
    File(FromHere),
    Stream(Box<dyn Read + Send>),
}

impl Input {
    /// The rest of an open file, of whichever kind.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn new(mut file: File) -> io::Result<Input> {
        Ok(Input(match file.metadata()?.is_file() {
            true => Source::File(FromHere { at: file.stream_position()?, file: Arc::new(file) }),
            false => Source::Stream(Box::new(file)),
        }))
    }

    /// How its users seem to be written: as JSON where the first character begins an object or an array, which is
    /// refused then, else as CSV. Waits for that character, and reads it again later.
    pub(super) fn format(&mut self) -> io::Result<Format> {
        /// More space than any file begins with.
        const MOST: usize = 64 << 10;
        let mut start = Vec::new();
        let mut byte = [0];
        let mut first = None;
        let mut read: Box<dyn Read + Send> = match &mut self.0 {
            Source::File(file) => Box::new(file.clone()),
            Source::Stream(stream) => mem::replace(stream, Box::new(io::empty())),
        };
        while start.len() < MOST && first.is_none() && read.read(&mut byte)? > 0 {
            start.push(byte[0]);
            let is_mark = start.len() <= 3 && b"\xef\xbb\xbf".starts_with(&start);
            first = Some(byte[0]).filter(|byte| !is_mark && !byte.is_ascii_whitespace());
        }
        if let Source::Stream(stream) = &mut self.0 {
            *stream = Box::new(io::Cursor::new(start).chain(read));
        }
        Ok(match first {
            None | Some(b'{' | b'[' | 0xfe | 0xff) => Format::Ndjson,
            Some(_) => Format::Csv,
        })
    }

    /// All of it, where it can be read once more after that.
    pub(super) fn ahead(&self) -> Option<Box<dyn Read + Send>> {
        match &self.0 {
            Source::File(file) => Some(Box::new(file.clone())),
            Source::Stream(_) => None,
        }
    }

    /// All of it.
    pub(super) fn read(self) -> Box<dyn Read + Send> {
        match self.0 {
            Source::File(file) => Box::new(file),
            Source::Stream(stream) => stream,
        }
    }
}

/// A file from a position of its own on: a thread that reads it is not in the way of another one that does.
#[derive(Clone)]
struct FromHere {
    file: Arc<File>,
    at: u64,
}

impl Read for FromHere {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(bytes, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// The stream behind a byte order mark, which some programs write before UTF-8. The inner error is what the first line
/// is refused for.
pub(super) fn without_bom(
    mut input: Box<dyn Read + Send>,
) -> io::Result<Result<impl Read + Send + 'static, String>> {
    let mut start = Vec::new();
    input.by_ref().take(3).read_to_end(&mut start)?;
    if start.starts_with(b"\xff\xfe") || start.starts_with(b"\xfe\xff") {
        return Ok(Err("is UTF-16, and should be UTF-8".to_owned()));
    }
    if start == b"\xef\xbb\xbf" {
        start.clear();
    }
    Ok(Ok(io::Cursor::new(start).chain(input)))
}
