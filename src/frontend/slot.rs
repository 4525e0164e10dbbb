//! The name of a request, by which the worker that gets it finds the client that waits for its answer.

use super::peers::Client;
use std::{fmt, net::IpAddr, str::FromStr};

/// Which client waits for a request's answer, and for which of its requests: the fragment of the target that tiny_http
/// gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    pub(super) index: u32,
    pub(super) generation: u32,
    peer: Option<IpAddr>,
}

impl Slot {
    pub(super) fn new(index: u32, generation: u32) -> Slot {
        Slot { index, generation, peer: None }
    }

    /// The same, of this client.
    pub(super) fn of(self, peer: Option<IpAddr>) -> Slot {
        Slot { peer, ..self }
    }

    /// The client's address: the connection's, or the one that a trusted proxy names. `None` on a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// The same for the log.
    pub fn client(&self) -> impl fmt::Display {
        Client(self.peer)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}.{:x}", self.index, self.generation)
    }
}

impl FromStr for Slot {
    type Err = ();

    fn from_str(text: &str) -> Result<Slot, ()> {
        let (index, generation) = text.split_once('.').ok_or(())?;
        let number = |text| u32::from_str_radix(text, 16).map_err(|_| ());
        Ok(Slot::new(number(index)?, number(generation)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_as_text() {
        for slot in [Slot::new(0, 0), Slot::new(31, 4096), Slot::new(u32::MAX, u32::MAX)] {
            assert_eq!(slot.to_string().parse(), Ok(slot));
        }
        assert_eq!(Slot::new(31, 4096).to_string(), "1f.1000");
        for text in ["", ".", "1", "1.", ".1", "1.g", "100000000.0", "1.1.1", "-1.0"] {
            assert_eq!(text.parse::<Slot>(), Err(()), "{text}");
        }
    }
}

/// How much of an answer the client's socket took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes that it took at once. The frontend sends the others as the client takes them, and logs where it does not.
    pub taken: usize,
    /// Bytes of the whole answer.
    pub length: usize,
}

/// `2048B`, or `1024B of 2048B so far`.
impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Delivery { taken, length } = self;
        match taken == length {
            true => write!(f, "{length}B"),
            false => write!(f, "{taken}B of {length}B so far"),
        }
    }
}
