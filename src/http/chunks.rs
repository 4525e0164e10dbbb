//! Bytes in pieces of one size: what is long grows without being copied, and is freed piece by piece as it is sent.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Write},
    mem,
};

/// Pieces that one write is given.
const PIECES_PER_WRITE: usize = 64;

/// Bytes to be sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chunks {
    /// Not in the queue, which would have to be allocated: most answers are one piece. Empty only if all is.
    first: Vec<u8>,
    rest: VecDeque<Vec<u8>>,
    /// How much of the first piece was sent.
    sent: usize,
    /// How much is left.
    len: usize,
}

impl Chunks {
    /// Bytes that are left.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory that it takes.
    pub fn memory(&self) -> usize {
        self.first.capacity() + self.rest.iter().map(Vec::capacity).sum::<usize>()
    }

    /// Puts a piece before all others. Only to be called while nothing is sent.
    pub fn push_front(&mut self, piece: Vec<u8>) {
        if piece.is_empty() {
            return;
        }
        self.len += piece.len();
        let second = mem::replace(&mut self.first, piece);
        if !second.is_empty() {
            self.rest.push_front(second);
        }
    }

    /// Writes once, and frees what was taken. Returns how much that was.
    pub fn send(&mut self, to: &mut impl Write) -> io::Result<usize> {
        let first = &self.first[self.sent..];
        let count = match self.rest.is_empty() {
            true => to.write(first)?,
            false => {
                let slices = [first].into_iter().chain(self.rest.iter().map(Vec::as_slice));
                let slices: Vec<_> = slices.take(PIECES_PER_WRITE).map(IoSlice::new).collect();
                to.write_vectored(&slices)?
            }
        };
        self.len -= count;
        self.sent += count;
        while self.sent >= self.first.len() && self.sent > 0 {
            self.sent -= self.first.len();
            self.first = self.rest.pop_front().unwrap_or_default();
        }
        Ok(count)
    }
}

/// In one piece.
impl From<Vec<u8>> for Chunks {
    fn from(first: Vec<u8>) -> Chunks {
        Chunks { len: first.len(), first, ..Chunks::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes so much at once.
    struct Slow(Vec<u8>, usize);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = self.1.min(bytes.len());
            self.0.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn write_vectored(&mut self, slices: &[IoSlice]) -> io::Result<usize> {
            let all: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            self.write(&all)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_is_written_is_sent_and_freed() {
        let bytes: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
        for step in [1 << 10, 100_000, 10_000_000] {
            let mut chunks = Chunks::default();
            for piece in bytes.chunks(7777).rev() {
                chunks.push_front(piece.to_vec());
            }
            chunks.push_front(b"head".to_vec());
            assert_eq!(chunks.len(), bytes.len() + 4);
            assert_eq!(chunks.memory(), chunks.len());
            let mut slow = Slow(Vec::new(), step);
            while !chunks.is_empty() {
                let (left, count) = (chunks.len(), chunks.send(&mut slow).unwrap());
                assert!(count > 0 && chunks.len() == left - count);
                assert!(chunks.memory() < chunks.len() + 7777);
            }
            assert_eq!(&slow.0[4..], bytes);
            assert_eq!((chunks.send(&mut slow).unwrap(), chunks.memory()), (0, 0));
        }
    }
}
