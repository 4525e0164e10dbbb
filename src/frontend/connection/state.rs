//! The states of a connection, their deadlines, and whether a connection may be closed for another one. Does no input
//! or output.

use super::{Connection, writing::UnsentAnswer};
use crate::config::Limits;
use crate::frontend::{
    http1::{framing::Framing, head::AnswerInfo},
    peers::CloseRank,
};
use crate::http::{Persistence, Request, RequestId};
use std::time::{Duration, Instant};

/// The states of a connection. `since` is the time at which the state began: its deadline counts from there, even if
/// bytes arrive later. `input` has bytes that were read from the socket and are not parsed yet.
pub(super) enum State {
    /// The connection is between requests. `input` may have the beginning of the next request, if it was read together
    /// with the previous one.
    Idle { since: Instant, input: Vec<u8> },
    /// A head or a body is arriving. If `awaits_continue`, the client waits for 100 (Continue) before it sends the
    /// body.
    Arriving { since: Instant, framing: Framing, input: Vec<u8>, awaits_continue: bool },
    /// The request is complete: it waits for a worker, or a worker has it.
    Working {
        since: Instant,
        stage: WorkStage,
        persistence: Persistence,
        id: RequestId,
        for_answer: AnswerInfo,
        input: Vec<u8>,
    },
    /// An answer is being sent: the socket has not taken all of it yet.
    Writing { since: Instant, answer: UnsentAnswer },
    /// The event loop is to close the connection: the last answer is sent, or a write has failed.
    Closing,
    /// The server has ended sending. It reads and discards what the client sends until the time `until`, because
    /// closing a socket with unread bytes would reset the connection.
    Lingering { until: Instant },
}

/// The label of each state in the metric `userd_http_connections`, in the order of [`Connection::state_label_index`].
pub const STATE_LABELS: [&str; 5] = ["idle", "reading", "working", "writing", "closing"];

/// How far the workers have come with a complete request.
pub(super) enum WorkStage {
    /// No worker has claimed the request yet.
    Unclaimed(Request),
    /// A worker has claimed the request, and may have queued its command.
    Claimed,
    /// A worker executes the request.
    Executing,
}

impl Connection {
    /// Returns the index of the label of the connection's state in [`STATE_LABELS`].
    pub fn state_label_index(&self) -> usize {
        match &self.state {
            State::Idle { .. } => 0,
            State::Arriving { .. } => 1,
            State::Working { .. } => 2,
            State::Writing { .. } => 3,
            State::Closing | State::Lingering { .. } => 4,
        }
    }

    /// Returns true if a request is arriving, or is complete and waits for its answer.
    pub fn has_request(&self) -> bool {
        matches!(self.state, State::Arriving { .. } | State::Working { .. })
    }

    /// Returns true if a request is arriving, or waits for a worker. Once a worker has claimed a request, it will be
    /// executed, so its client must not be told that it is refused.
    pub fn request_may_be_refused(&self) -> bool {
        match &self.state {
            State::Working { stage, .. } => matches!(stage, WorkStage::Unclaimed(_)),
            state => matches!(state, State::Arriving { .. }),
        }
    }

    /// Returns true if the request with the number `request_number` still waits for its answer.
    pub fn awaits_answer(&self, request_number: u64) -> bool {
        self.request_number == request_number && matches!(self.state, State::Working { .. })
    }

    /// Returns the rank of this connection among those that may be closed for another one, and the time since which it
    /// may be closed; `None` if it may not be closed.
    pub fn close_rank(&self) -> Option<(CloseRank, Instant)> {
        if self.permit.is_none() || self.counted_client.is_trusted_proxy {
            return None;
        }
        match &self.state {
            State::Idle { since, .. } | State::Lingering { until: since } => Some((CloseRank::Idle, *since)),
            State::Arriving { since, .. } => Some((CloseRank::IncompleteRequest, *since)),
            State::Writing { answer, .. } => Some((CloseRank::Stalled, answer.last_sent_at)),
            State::Working { stage: WorkStage::Executing, .. } | State::Closing => None,
            State::Working { since, .. } => Some((CloseRank::Queued, *since)),
        }
    }

    /// Returns the deadline of the connection's present state, at which the event loop ends the request or the
    /// connection; `None` if the connection is about to be closed anyway.
    pub fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let (since, time) = match &self.state {
            State::Idle { since, .. } => (since, limits.idle_timeout),
            State::Arriving { since, framing, .. } if framing.is_in_body() => (since, limits.body_timeout),
            State::Arriving { since, .. } => (since, limits.head_timeout),
            State::Working { since, .. } => (since, limits.request_timeout),
            State::Writing { since, .. } => (since, limits.write_timeout),
            State::Lingering { until } => (until, Duration::ZERO),
            // A closing connection needs no deadline: the event loop is about to close it.
            State::Closing => return None,
        };
        Some(*since + time)
    }
}
