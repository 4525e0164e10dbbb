//! The body of a request while it arrives: of a known length, or in chunks.
//!
//! Owns the decoding of chunks (RFC 9112, 7). Chunk extensions and trailers (fields behind the body) are checked and
//! dropped, and their size is bounded.

use super::{ArrivedRequest, next_line};
use crate::http::is_token;
use crate::{config::Limits, error::Error};

/// The most bytes of the line that begins a chunk: its size in up to 16 digits, and extensions.
const MAX_CHUNK_LINE: usize = 256;

/// A request whose body is arriving.
pub struct ArrivingRequest {
    /// The request, with as much of its body as has arrived.
    pub arrived: ArrivedRequest,
    next: BodyPart,
    chunked: bool,
    /// The number of bytes of extensions and trailers so far, which are dropped.
    dropped: usize,
}

/// The part of a body that arrives next. A body of a known length is a single part `Data`.
enum BodyPart {
    /// The bytes of the body, or of the current chunk, that are still to arrive.
    Data(usize),
    /// The line end behind a chunk.
    DataEnd,
    /// The line with a chunk's size.
    Size,
    Trailer,
}

impl ArrivingRequest {
    /// Begins a body of `length` bytes, or in chunks (`None`). `arrived` is the request without its body.
    pub fn new(arrived: ArrivedRequest, length: Option<usize>) -> ArrivingRequest {
        let (chunked, next) = (length.is_none(), length.map_or(BodyPart::Size, BodyPart::Data));
        ArrivingRequest { arrived, next, chunked, dropped: 0 }
    }

    /// Returns the most bytes that the request can have when it is complete.
    pub fn max_bytes(&self, limits: &Limits) -> usize {
        let request = &self.arrived.request;
        let left = match self.next {
            BodyPart::Data(left) if !self.chunked => left,
            _ => limits.max_body_bytes - request.body.len(),
        };
        request.memory() + left
    }

    /// Reads more bytes of the body. `used` grows by the number of `bytes` that were used. Returns true once the body
    /// is complete.
    pub fn advance(&mut self, bytes: &[u8], used: &mut usize, limits: &Limits) -> Result<bool, Error> {
        loop {
            let rest = &bytes[*used..];
            let (most, too_long) = match self.next {
                BodyPart::Data(left) => {
                    let count = left.min(rest.len());
                    self.arrived.request.body.extend_from_slice(&rest[..count]);
                    *used += count;
                    self.next = match left - count {
                        0 if self.chunked => BodyPart::DataEnd,
                        left => BodyPart::Data(left),
                    };
                    match self.next {
                        BodyPart::Data(left) => return Ok(left == 0),
                        _ => continue,
                    }
                }
                BodyPart::DataEnd => (0, Error::BadRequest("a chunk is too long")),
                BodyPart::Size => (MAX_CHUNK_LINE, Error::BadRequest("a chunk's size line is too long")),
                BodyPart::Trailer => (limits.max_head_bytes - self.dropped, Error::HeadTooLarge),
            };
            let Some(line) = next_line(rest, most, too_long)? else { return Ok(false) };
            *used += line.len() + 2;
            if matches!(self.next, BodyPart::Trailer) && line.is_empty() {
                return Ok(true);
            }
            self.next = self.parse_line(line, limits)?;
        }
    }

    /// Parses a line between chunks or behind them. Returns the part that follows the line.
    fn parse_line(&mut self, line: &[u8], limits: &Limits) -> Result<BodyPart, Error> {
        match self.next {
            BodyPart::Size => {
                let (size, extension_bytes) = parse_chunk_size(line)?;
                self.dropped += extension_bytes;
                if self.dropped > limits.max_head_bytes {
                    return Err(Error::BadRequest("the chunk extensions are too long"));
                }
                if size > (limits.max_body_bytes - self.arrived.request.body.len()) as u64 {
                    return Err(Error::ContentTooLarge);
                }
                Ok(if size == 0 { BodyPart::Trailer } else { BodyPart::Data(size as usize) })
            }
            BodyPart::Trailer => {
                self.dropped += line.len();
                let name = line.split(|&byte| byte == b':').next().unwrap_or_default();
                let is_well_formed = name.len() < line.len() && !name.is_empty();
                if !is_well_formed || !name.iter().copied().all(is_token) {
                    return Err(Error::BadRequest("a trailer field is malformed"));
                }
                Ok(BodyPart::Trailer)
            }
            BodyPart::DataEnd | BodyPart::Data(_) => Ok(BodyPart::Size),
        }
    }
}

/// Parses the first line of a chunk: its size, and the number of bytes of its extensions.
fn parse_chunk_size(line: &[u8]) -> Result<(u64, usize), Error> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let (digits, extensions) = line.split_at(digits.count());
    if digits.is_empty() || !are_extensions(extensions) {
        return Err(Error::BadRequest("a chunk's size or extension is malformed"));
    }
    let digits = str::from_utf8(digits).expect("digits are ASCII");
    let size = u64::from_str_radix(digits, 16).map_err(|_| Error::ContentTooLarge)?;
    Ok((size, extensions.len()))
}

/// Returns true if the bytes may be chunk extensions: a semicolon, visible characters and blanks.
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
