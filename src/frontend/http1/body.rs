//! The body of a request on its way in: counted, or in chunks.
//!
//! Owns the decoding of chunks (RFC 9112, 7). Extensions and trailers are checked, bounded and dropped.

use super::{Parsed, Traits, line, request_line::is_token};
use crate::{config::Limits, error::Error};
use std::io::Write;

/// A chunk-size line with its extensions; a size needs 16 digits at most.
const MAX_CHUNK_LINE: usize = 256;

/// A body on its way in.
pub struct Incoming {
    head: Vec<u8>,
    body: Vec<u8>,
    traits: Traits,
    next: Part,
    chunked: bool,
    /// Bytes of extensions and trailers, which are dropped.
    dropped: usize,
}

/// The part of a body that comes next.
enum Part {
    /// Bytes of the body, or of one chunk.
    Data(usize),
    /// The line end behind a chunk.
    DataEnd,
    /// The line with a chunk's size.
    Size,
    Trailer,
}

impl Incoming {
    /// A body of `length` bytes, or in chunks, for a head in the form that is passed on.
    pub fn new(head: Vec<u8>, traits: Traits, length: Option<usize>) -> Incoming {
        let (chunked, next) = (length.is_none(), length.map_or(Part::Size, Part::Data));
        Incoming { head, body: Vec::new(), traits, next, chunked, dropped: 0 }
    }

    /// The most bytes that it and its head can have when it is complete.
    pub fn most(&self, limits: &Limits) -> usize {
        let body = match self.next {
            Part::Data(left) if !self.chunked => self.body.len() + left,
            _ => limits.max_body_bytes,
        };
        self.head.len() + body
    }

    /// Reads on, like [`super::framing::Framing::advance`]; `used` grows by what was used.
    pub fn advance(
        &mut self,
        bytes: &[u8],
        used: &mut usize,
        limits: &Limits,
        out: &mut Vec<u8>,
    ) -> Result<Parsed, Error> {
        loop {
            let rest = &bytes[*used..];
            let (most, too_long) = match self.next {
                Part::Data(left) => {
                    let count = left.min(rest.len());
                    self.body.extend_from_slice(&rest[..count]);
                    *used += count;
                    match left - count {
                        0 if self.chunked => self.next = Part::DataEnd,
                        0 => return Ok(self.complete(out)),
                        left => {
                            self.next = Part::Data(left);
                            return Ok(Parsed::Incomplete);
                        }
                    }
                    continue;
                }
                Part::DataEnd => (0, Error::BadRequest("a chunk is too long")),
                Part::Size => (MAX_CHUNK_LINE, Error::BadRequest("a chunk's size line is too long")),
                Part::Trailer => (limits.max_head_bytes - self.dropped, Error::HeadTooLarge),
            };
            let Some(line) = line(rest, most, too_long)? else {
                return Ok(Parsed::Incomplete);
            };
            *used += line.len() + 2;
            match self.next {
                Part::Size => {
                    let (size, extension_bytes) = chunk_size(line)?;
                    self.dropped += extension_bytes;
                    if self.dropped > limits.max_head_bytes {
                        return Err(Error::BadRequest("the chunk extensions are too long"));
                    }
                    if size > (limits.max_body_bytes - self.body.len()) as u64 {
                        return Err(Error::ContentTooLarge);
                    }
                    self.next = if size == 0 { Part::Trailer } else { Part::Data(size as usize) };
                }
                Part::Trailer if line.is_empty() => return Ok(self.complete(out)),
                Part::Trailer => {
                    self.dropped += line.len();
                    let name = line.split(|&byte| byte == b':').next().unwrap_or_default();
                    let well_formed = name.len() < line.len() && !name.is_empty();
                    if !well_formed || !name.iter().copied().all(is_token) {
                        return Err(Error::BadRequest("a trailer field is malformed"));
                    }
                }
                Part::DataEnd | Part::Data(_) => self.next = Part::Size,
            }
        }
    }

    fn complete(&self, out: &mut Vec<u8>) -> Parsed {
        out.extend_from_slice(&self.head);
        write(&self.body, out);
        Parsed::Complete(self.traits)
    }
}

/// Ends a head with the length of its body, and appends that.
pub fn write(body: &[u8], out: &mut Vec<u8>) {
    if !body.is_empty() {
        let length = body.len();
        write!(out, "Content-Length: {length}\r\n").expect("writing to memory does not fail");
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(body);
}

/// Parses the first line of a chunk: its size, and the number of bytes of its extensions.
fn chunk_size(line: &[u8]) -> Result<(u64, usize), Error> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let (digits, extensions) = line.split_at(digits.count());
    if digits.is_empty() || !are_extensions(extensions) {
        return Err(Error::BadRequest("a chunk's size or extension is malformed"));
    }
    let digits = str::from_utf8(digits).expect("digits are ASCII");
    let size = u64::from_str_radix(digits, 16).map_err(|_| Error::ContentTooLarge)?;
    Ok((size, extensions.len()))
}

/// Returns true if the bytes can be chunk extensions: a semicolon, visible characters and blanks. Extensions are dropped.
fn are_extensions(bytes: &[u8]) -> bool {
    let allowed = |byte: &u8| byte.is_ascii_graphic() || matches!(byte, b' ' | b'\t');
    bytes.is_empty() || (bytes.trim_ascii_start().starts_with(b";") && bytes.iter().all(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions() {
        for text in
            ["", ";", ";a", " ;a", "\t;\ta", ";a = b", ";a=b ; c=\"d\";e", ";;", ";a=\"", ";a b ", ";{}"]
        {
            assert!(are_extensions(text.as_bytes()), "{text}");
        }
        for text in [" ", "a", ",a", "\"a\"", ";a\u{e9}", ";a\r", "\n;a", ";a\0", ";\u{7f}"] {
            assert!(!are_extensions(text.as_bytes()), "{text}");
        }
    }
}
