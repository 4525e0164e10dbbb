//! The body of a request while it arrives, either with a known length or in chunks.
//!
//! Owns the decoding of chunks (RFC 9112, 7). Chunk extensions and trailers (header fields behind the body) are checked
//! and dropped, and their size is bounded.

use super::{FramedRequest, next_line};
use crate::http::is_http_token_byte;
use crate::{config::Limits, error::Error};

/// The most bytes of the line that begins a chunk: up to 16 digits of its size, and extensions.
const MAX_CHUNK_LINE: usize = 256;

/// A request whose body is arriving.
pub struct ArrivingRequest {
    /// The request, with the part of its body that has arrived.
    pub framed_request: FramedRequest,
    next_part: BodyPart,
    is_chunked: bool,
    /// The number of bytes of chunk extensions and trailers so far. They are dropped, but count against the limit of a
    /// head.
    overhead_bytes: usize,
}

/// The part of a body that arrives next. A body of a known length has one part, `Data`.
enum BodyPart {
    /// Content, with the number of bytes that are still to arrive: of the body, or of the current chunk.
    Data(usize),
    /// The line end behind the content of a chunk.
    LineEndAfterChunk,
    /// The line with the size of a chunk.
    SizeLine,
    /// A line behind the last chunk: a trailer field, or the empty line that ends the body.
    TrailerLine,
}

impl ArrivingRequest {
    /// Begins a body of `length` bytes, or a body in chunks (`None`). `framed_request` is the request without its body.
    pub fn new(framed_request: FramedRequest, length: Option<usize>) -> ArrivingRequest {
        let (is_chunked, next_part) = (length.is_none(), length.map_or(BodyPart::SizeLine, BodyPart::Data));
        ArrivingRequest { framed_request, next_part, is_chunked, overhead_bytes: 0 }
    }

    /// Returns the most bytes that the request can have when its body is complete.
    pub fn max_bytes(&self, limits: &Limits) -> usize {
        let request = &self.framed_request.request;
        let left = match self.next_part {
            BodyPart::Data(left) if !self.is_chunked => left,
            _ => limits.max_body_bytes - request.body.len(),
        };
        request.memory_bytes() + left
    }

    /// Parses the bytes of the body from position `used` of `bytes` on, and moves `used` behind the parsed ones.
    /// Returns true once the body is complete.
    pub fn parse_more(&mut self, bytes: &[u8], used: &mut usize, limits: &Limits) -> Result<bool, Error> {
        loop {
            let rest = &bytes[*used..];
            let (most, too_long) = match self.next_part {
                BodyPart::Data(left) => {
                    let count = left.min(rest.len());
                    self.framed_request.request.body.extend_from_slice(&rest[..count]);
                    *used += count;
                    self.next_part = match left - count {
                        0 if self.is_chunked => BodyPart::LineEndAfterChunk,
                        left => BodyPart::Data(left),
                    };
                    match self.next_part {
                        BodyPart::Data(left) => return Ok(left == 0),
                        _ => continue,
                    }
                }
                BodyPart::LineEndAfterChunk => (0, Error::BadRequest("a chunk is too long")),
                BodyPart::SizeLine => (MAX_CHUNK_LINE, Error::BadRequest("a chunk's size line is too long")),
                BodyPart::TrailerLine => (limits.max_head_bytes - self.overhead_bytes, Error::HeadTooLarge),
            };
            let Some(line) = next_line(rest, most, too_long)? else { return Ok(false) };
            *used += line.len() + 2;
            if matches!(self.next_part, BodyPart::TrailerLine) && line.is_empty() {
                return Ok(true);
            }
            self.next_part = self.parse_framing_line(line, limits)?;
        }
    }

    /// Parses a line that is not content: the size of a chunk, the end of a chunk, or a trailer field. Returns the part
    /// that comes next.
    fn parse_framing_line(&mut self, line: &[u8], limits: &Limits) -> Result<BodyPart, Error> {
        match self.next_part {
            BodyPart::SizeLine => {
                let (size, extensions) = parse_chunk_size(line)?;
                self.overhead_bytes += extensions.len();
                if self.overhead_bytes > limits.max_head_bytes {
                    return Err(Error::BadRequest("the chunk extensions are too long"));
                }
                if size > (limits.max_body_bytes - self.framed_request.request.body.len()) as u64 {
                    return Err(Error::ContentTooLarge);
                }
                Ok(if size == 0 { BodyPart::TrailerLine } else { BodyPart::Data(size as usize) })
            }
            BodyPart::TrailerLine => {
                self.overhead_bytes += line.len();
                let name = line.split(|&byte| byte == b':').next().unwrap_or_default();
                let is_well_formed = name.len() < line.len() && !name.is_empty();
                if !is_well_formed || !name.iter().copied().all(is_http_token_byte) {
                    return Err(Error::BadRequest("a trailer field is malformed"));
                }
                Ok(BodyPart::TrailerLine)
            }
            BodyPart::LineEndAfterChunk | BodyPart::Data(_) => Ok(BodyPart::SizeLine),
        }
    }
}

/// Parses the line that begins a chunk. Returns the size of the chunk, and its extensions.
fn parse_chunk_size(line: &[u8]) -> Result<(u64, &[u8]), Error> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
    let (digits, extensions) = line.split_at(digits.count());
    if digits.is_empty() || !are_chunk_extensions(extensions) {
        return Err(Error::BadRequest("a chunk's size or extension is malformed"));
    }
    let digits = str::from_utf8(digits).expect("digits are ASCII");
    let size = u64::from_str_radix(digits, 16).map_err(|_| Error::ContentTooLarge)?;
    Ok((size, extensions))
}

/// Returns true if the bytes may be the chunk extensions of a line: none, or a semicolon and then visible characters
/// and blanks.
fn are_chunk_extensions(bytes: &[u8]) -> bool {
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
            assert!(are_chunk_extensions(text.as_bytes()), "{text}");
        }
        for text in [" ", "a", ",a", "\"a\"", ";a\u{e9}", ";a\r", "\n;a", ";a\0", ";\u{7f}"] {
            assert!(!are_chunk_extensions(text.as_bytes()), "{text}");
        }
    }
}
