//! A request that a worker has taken over from the frontend, and the handle by which the worker sends the answer to the
//! right client.

use crate::budget::Reservation;
use crate::http::{Cors, Request, RequestId};
use std::time::Instant;

/// A request that a worker has taken over from the frontend (claimed), and has to answer.
pub struct ClaimedRequest {
    /// The handle by which the worker sends the answer to the right client.
    pub handle: RequestHandle,
    /// The request. Its `peer` is the address of the client: the peer of the connection, or the client that a trusted
    /// proxy names; `None` on a Unix socket.
    pub request: Request,
    /// The id of the request, which its answer (`X-Request-Id`) and its log lines show.
    pub id: RequestId,
    /// The CORS header fields of the answer, for a browser that shows a page of another origin.
    pub cors: Cors,
    /// The time until which the worker may answer. Then the frontend answers 503 instead.
    pub deadline: Instant,
    /// The reservation in the memory budget for the bytes of the request; `None` if the request is too small to be
    /// counted.
    pub memory: Option<Reservation>,
}

/// The handle of a request: the slot of its connection, and the number of the request in this slot. By the handle a
/// worker finds the client that waits for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestHandle {
    /// The number of the slot in the table of connections.
    pub(super) slot: u32,
    /// The number of the request among all requests of this slot. A late answer has the number of an earlier request,
    /// and is dropped.
    pub(super) request_number: u64,
}
