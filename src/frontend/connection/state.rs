//! The states of a connection, their deadlines, and whether a connection may be closed for another one. Pure.

use super::{Connection, writing::UnsentAnswer};
use crate::config::Limits;
use crate::frontend::{
    http1::{framing::Framing, head::AnswerInfo},
    peers::CloseCause,
};
use crate::http::{Persistence, Request, RequestId};
use std::time::{Duration, Instant};

/// The states of a connection. `since` is the time at which the state began: its deadline counts from there, whatever
/// bytes arrive. `input` has bytes that were read and not parsed yet.
pub(super) enum State {
    /// The connection is between requests; the beginning of the next one may have been read with the last one.
    Idle { since: Instant, input: Vec<u8> },
    /// A head or a body is arriving. If `awaits_continue`, the client waits for 100 (Continue) before it sends the
    /// body.
    Arriving { since: Instant, framing: Framing, input: Vec<u8>, awaits_continue: bool },
    /// The request is complete: it waits for a worker, or a worker has it.
    Working {
        since: Instant,
        stage: Stage,
        persistence: Persistence,
        id: RequestId,
        for_answer: AnswerInfo,
        input: Vec<u8>,
    },
    /// The socket did not take all of an answer.
    Writing { since: Instant, answer: UnsentAnswer },
    /// The last answer is sent: the event loop is to close the connection.
    Closing,
    /// The socket is shut down for writing, and bytes that arrive before the time `until` are discarded.
    Lingering { until: Instant },
}

/// The label of each state in the metric `userd_http_connections`.
pub const STATE_LABELS: [&str; 5] = ["idle", "reading", "working", "writing", "closing"];

/// How far a complete request has come.
pub(super) enum Stage {
    /// The request waits for a worker.
    Unclaimed(Request),
    /// A worker has claimed the request, and may have queued its command.
    Claimed,
    /// A worker executes the request.
    Begun,
}

impl Connection {
    /// Returns the position of this state's label in [`STATE_LABELS`].
    pub fn label_index(&self) -> usize {
        match &self.state {
            State::Idle { .. } => 0,
            State::Arriving { .. } => 1,
            State::Working { .. } => 2,
            State::Writing { .. } => 3,
            State::Closing | State::Lingering { .. } => 4,
        }
    }

    /// Returns whether a request is arriving, or is with the workers.
    pub fn has_request(&self) -> bool {
        matches!(self.state, State::Arriving { .. } | State::Working { .. })
    }

    /// Returns true if a request is arriving, or waits for a worker. Once a worker has claimed a request, it is
    /// executed, so its client is not told that it is refused.
    pub fn request_may_be_refused(&self) -> bool {
        match &self.state {
            State::Working { stage, .. } => matches!(stage, Stage::Unclaimed(_)),
            state => matches!(state, State::Arriving { .. }),
        }
    }

    /// Returns whether the request of this generation still waits for its answer.
    pub fn awaits_answer(&self, generation: u64) -> bool {
        self.generation == generation && matches!(self.state, State::Working { .. })
    }

    /// Returns the reason for which this connection may be closed for another one, and the time since which the reason
    /// holds; `None` if it may not be closed.
    pub fn close_cause(&self) -> Option<(CloseCause, Instant)> {
        if self.admission.is_none() || self.client.is_trusted_proxy {
            return None;
        }
        match &self.state {
            State::Idle { since, .. } | State::Lingering { until: since } => Some((CloseCause::Idle, *since)),
            State::Arriving { since, .. } => Some((CloseCause::Incomplete, *since)),
            State::Writing { answer, .. } => Some((CloseCause::Stalled, answer.moved_at)),
            State::Working { stage: Stage::Begun, .. } | State::Closing => None,
            State::Working { since, .. } => Some((CloseCause::Queued, *since)),
        }
    }

    /// Returns the deadline of the state.
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
