//! The request that a worker takes over from the frontend, and the name by which the worker answers the request.

use crate::budget::Reservation;
use crate::http::{Cors, Request, RequestId};
use std::time::Instant;

/// A request that a worker has claimed: the worker has taken over the request from the frontend, and is to answer it.
pub struct ClaimedRequest {
    /// The name by which the worker answers the request.
    pub slot: Slot,
    /// The request. Its `peer` is the address of the client: the peer of the connection, or the client that a trusted
    /// proxy names; `None` on a Unix socket.
    pub request: Request,
    /// The id of the request, for its answer and its log lines.
    pub id: RequestId,
    /// The CORS fields of the answer, for a browser with a page of another origin.
    pub cors: Cors,
    /// The time at which the frontend answers 503 unless the worker has answered by then.
    pub deadline: Instant,
    /// The reservation of the memory of the request, kept as long as the request; `None` for a small one.
    pub memory: Option<Reservation>,
}

/// The name of a request: the slot of its connection, and the number of the request in this slot. A worker finds the
/// client that waits for the answer by this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// The position of the slot in the table of connections.
    pub(super) index: u32,
    /// The number of the request among all requests of this slot, so that a late answer never meets another client.
    pub(super) generation: u64,
}
