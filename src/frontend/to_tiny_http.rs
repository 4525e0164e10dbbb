//! Complete requests on their way to tiny_http.

use std::io::{self, ErrorKind, Write};

/// The capacity that an empty buffer keeps.
const USUAL: usize = 64 << 10;

/// The bytes that tiny_http has not taken yet.
#[derive(Default)]
pub struct ToTinyHttp {
    /// Requests are appended here.
    pub bytes: Vec<u8>,
    sent: usize,
}

impl ToTinyHttp {
    /// Removes the last `bytes` bytes that were appended.
    pub fn take_back(&mut self, bytes: usize) {
        self.bytes.truncate(self.bytes.len() - bytes);
    }

    /// Sends as many bytes as the stream takes without blocking. Returns true if none is left.
    pub fn send(&mut self, to: &mut impl Write) -> io::Result<bool> {
        while self.sent < self.bytes.len() {
            match to.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.sent = 0;
        self.bytes.clear();
        self.bytes.shrink_to(USUAL);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that takes some bytes of every other write, and nothing of the rest.
    struct Slow(Vec<u8>, usize, bool);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.2 = !self.2;
            if self.2 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let count = bytes.len().min(self.1);
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn requests_are_sent_in_their_order_and_freed() {
        let mut to_tiny_http = ToTinyHttp::default();
        let mut slow = Slow(Vec::new(), 50_000, false);
        let mut expected = Vec::new();
        for turn in 0..200_u8 {
            let request = vec![turn; usize::from(turn) * 613];
            to_tiny_http.bytes.extend_from_slice(&request);
            expected.extend_from_slice(&request);
            let done = to_tiny_http.send(&mut slow).unwrap();
            assert_eq!(to_tiny_http.bytes.is_empty(), done);
        }
        while !to_tiny_http.send(&mut slow).unwrap() {}
        assert!(slow.0 == expected);
        assert!(to_tiny_http.bytes.capacity() <= USUAL);
    }
}
