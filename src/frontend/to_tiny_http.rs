//! Complete requests on their way to tiny_http.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Write},
};

/// Requests are gathered in pieces of about this size, and a piece is freed when it is sent: one buffer for all would
/// be copied as it grows, and would keep its size.
const PIECE: usize = 64 << 10;

/// What tiny_http has not taken yet.
#[derive(Default)]
pub struct ToTinyHttp {
    pieces: VecDeque<Vec<u8>>,
    /// How much of the first piece is sent.
    sent: usize,
}

impl ToTinyHttp {
    /// Where the next request is appended. The same until that is done.
    pub fn tail(&mut self) -> &mut Vec<u8> {
        if self.pieces.back().is_none_or(|last| last.len() >= PIECE) {
            self.pieces.push_back(Vec::new());
        }
        self.pieces.back_mut().expect("there is one now")
    }

    /// Takes so many bytes back that were appended last.
    pub fn take_back(&mut self, bytes: usize) {
        if let Some(last) = self.pieces.back_mut() {
            last.truncate(last.len() - bytes);
        }
    }

    /// Sends what is taken at once. Returns whether that was all.
    pub fn send(&mut self, to: &mut impl Write) -> io::Result<bool> {
        loop {
            let is_last = self.pieces.len() == 1;
            let Some(first) = self.pieces.front_mut() else {
                return Ok(true);
            };
            if self.sent == first.len() {
                self.sent = 0;
                if is_last {
                    // The usual one is used again.
                    first.clear();
                    first.shrink_to(PIECE);
                    return Ok(true);
                }
                self.pieces.pop_front();
                continue;
            }
            match to.write(&first[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so much, and then nothing for once.
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
            to_tiny_http.tail().extend_from_slice(&request);
            expected.extend_from_slice(&request);
            let done = to_tiny_http.send(&mut slow).unwrap();
            assert_eq!(to_tiny_http.pieces.iter().all(|piece| piece.len() == to_tiny_http.sent), done);
        }
        while !to_tiny_http.send(&mut slow).unwrap() {}
        assert!(slow.0 == expected);
        assert!(to_tiny_http.pieces.len() == 1 && to_tiny_http.pieces[0].capacity() <= PIECE);
    }
}
