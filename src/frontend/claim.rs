//! A request in the hands of a worker.

use crate::budget::Reservation;
use crate::http::{Cors, Request, RequestId};
use std::time::Instant;

/// A request that a worker has claimed.
pub struct Claimed {
    /// The slot of the connection that waits for the answer.
    pub slot: Slot,
    /// The request. Its peer is the client's address: the connection's, or the one that a trusted proxy names; `None` on a
    /// Unix socket.
    pub request: Request,
    pub id: RequestId,
    /// The fields that the answer will have for a page of another origin.
    pub cors: Cors,
    /// Deadline at which the frontend answers the request 503.
    pub deadline: Instant,
    /// The memory of the request, to be kept as long as the request.
    pub held: Option<Reservation>,
}

/// The name of a request, by which a worker finds the client that waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    pub(super) index: u32,
    /// The number of the request among all requests of this slot, so that a late answer never meets another client.
    pub(super) generation: u64,
}
