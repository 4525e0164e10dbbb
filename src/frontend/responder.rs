//! The way of an answer: from a worker straight to the client's socket.
//!
//! Owns the name of a request ([`Slot`]) and what a worker may do with it. A worker holds the lock of one slot for one
//! non-blocking write at most, so it never waits for a client, nor for another worker.

use super::{
    connection::{Connection, DOING},
    peers::Client,
    slots::SharedState,
};
use crate::{
    budget::Reservation,
    http::{RequestId, Response},
    reason::Reason,
};
use std::{
    fmt,
    net::IpAddr,
    str::FromStr,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// Which client waits for a request's answer, and for which of its requests: the fragment of the target that tiny_http
/// gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    pub(super) index: u32,
    pub(super) generation: u32,
    peer: Option<IpAddr>,
}

/// Sends answers to clients; one for all workers.
#[derive(Clone)]
pub struct Responder(pub(super) Arc<SharedState>);

/// How much of an answer the client's socket took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Bytes that it took at once. The frontend sends the others as the client takes them, and logs where it does not.
    pub taken: usize,
    /// Bytes of the whole answer.
    pub length: usize,
}

impl Responder {
    /// The slot in a request's fragment with the request's id and when it is answered 503, and the memory that is reserved for the request, to be
    /// kept for as long as that is. To be called exactly once for every request that tiny_http hands out, as soon as it
    /// does: this is how the frontend knows how many are in flight.
    ///
    /// No slot when the client does not wait for the answer any more; such a request is to be dropped.
    pub fn claim(&self, fragment: &str) -> (Option<(Slot, RequestId, Instant)>, Option<Reservation>) {
        self.0.in_flight.remove();
        let Ok(slot) = fragment.parse::<Slot>() else {
            return (None, None);
        };
        let held = self.0.unclaimed.take(slot);
        let entry = self.0.slots.get(slot.index);
        let connection = entry.as_ref().and_then(|entry| entry.awaiting(slot.generation));
        let claimed = connection.and_then(|connection| {
            let deadline = connection.deadline(&self.0.limits)?;
            Some((Slot { peer: connection.client(), ..slot }, connection.request_id()?.clone(), deadline))
        });
        (claimed, held)
    }

    /// Sends the answer to its client, as much of it as the socket takes at once, or returns `None` when it comes too
    /// late (the frontend has answered 503 by then, or the client is gone).
    ///
    /// Never blocks: what the client's socket does not take at once is sent by the event loop. `held` is what is reserved
    /// for the answer; what it keeps is counted in any case.
    pub fn answer(&self, slot: Slot, response: Response, held: Option<Reservation>) -> Option<Delivery> {
        let shared = &*self.0;
        let mut entry = shared.slots.get(slot.index)?;
        let connection = entry.awaiting_mut(slot.generation)?;
        let stopping = shared.stopping.load(Ordering::SeqCst);
        let (delivery, unfinished) = connection.answer(response, held, stopping, &shared.budget);
        drop(entry);
        if unfinished {
            shared.schedule(slot.index);
        }
        Some(delivery)
    }

    /// How many connections there are, by what they are doing; and how many there may be. Looks at each of them.
    pub fn connections(&self) -> (impl Iterator<Item = (&'static str, usize)>, usize) {
        (DOING.into_iter().zip(self.0.slots.count()), self.0.limits.max_connections)
    }

    /// Warns that a request is refused, at most once a second for each reason.
    pub fn warn(&self, why: Reason, slot: Slot, id: &RequestId) {
        self.0.unavailable.warn(Instant::now(), why.text(), Some((slot.peer, id)));
    }

    /// A worker begins to execute a request, which is not given up for other clients from now on. Whether its client waits
    /// for the answer yet.
    pub fn begin(&self, slot: Slot) -> bool {
        let mut entry = self.0.slots.get(slot.index);
        let connection = entry.as_mut().and_then(|entry| entry.awaiting_mut(slot.generation));
        connection.map(Connection::begin).is_some()
    }

    /// Whether the client does not wait for the answer any more, so that work on it would be in vain. Cheap.
    pub fn abandoned(&self, slot: Slot) -> bool {
        match self.0.slots.get(slot.index) {
            Some(entry) => entry.awaiting(slot.generation).is_none(),
            None => true,
        }
    }
}

impl Slot {
    pub(super) fn new(index: u32, generation: u32) -> Slot {
        Slot { index, generation, peer: None }
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
