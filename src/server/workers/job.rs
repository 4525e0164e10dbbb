//! A request on its way through the workers.

use crate::{
    app::Task,
    budget::Reservation,
    frontend::Slot,
    http::{Method, RequestId},
};
use std::{borrow::Cow, time::Instant};

/// A request that is queued or in flight.
pub(super) struct Job {
    /// `None` while it is executed.
    pub(super) task: Option<Task>,
    pub(super) slot: Slot,
    pub(super) id: RequestId,
    pub(super) received: Instant,
    /// When the frontend answers it 503. Nothing is changed for it past this.
    pub(super) deadline: Instant,
    pub(super) method: Method,
    /// The method's name for the log.
    pub(super) name: Cow<'static, str>,
    pub(super) path: String,
    /// The memory of its request, and then of its answer.
    pub(super) held: Option<Reservation>,
}
