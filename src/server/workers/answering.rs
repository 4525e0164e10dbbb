//! Answers: each is sent, counted and logged; and the figures of what waits for one.

use super::{Job, Shared, Workers};
use crate::{
    app,
    error::{Error, Reason},
    http::{RequestId, Response},
    metrics::Text,
};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

/// Bytes of a body from which on it needs a reservation of its own.
const LARGE: usize = 16 << 10;

/// How long a large answer waits for its memory.
const MEMORY_WAIT: Duration = Duration::from_secs(2);

impl Workers {
    /// Writes what is queued.
    pub fn figures(&self) -> impl Fn(&mut Text) + Send + 'static {
        // It belongs to the figures, and these to what the threads share.
        let shared = Arc::downgrade(&self.shared);
        move |text| {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            let state = shared.state.lock();
            let (queued, hashes) = (state.lanes.len(), state.lanes.hashes_waiting());
            drop(state);
            text.gauge("userd_commands_queued", "Commands that wait for a worker or a retry.", queued);
            text.gauge("userd_hashes_waiting", "Passwords that wait to be hashed or checked.", hashes);
            let (connections, most) = shared.responder.connections();
            text.family("userd_http_connections", "gauge", "Connections of clients, by what they are doing.");
            connections.for_each(|(state, count)| text.value(&[("state", state)], count));
            text.gauge("userd_http_connections_max", "The most connections of clients at once.", most);
        }
    }
}

impl Shared {
    /// Answers with an error, and logs it: where there is too much to do, once a second, as many requests have that.
    pub(super) fn refuse(&self, job: &mut Job, error: Error) {
        let id = Some(&job.id);
        let response = match error {
            Error::Busy(why) => {
                self.app.metrics.refused(why.label());
                self.responder.warn(why, job.slot, &job.id);
                error.answer()
            }
            error => guard(id, || error.into_response(id)).unwrap_or_else(|response| response),
        };
        self.answer(job, response);
    }

    /// Sends an answer. A large one reserves its length first, or is refused.
    pub(super) fn answer(&self, job: &mut Job, response: Response) {
        let bytes = response.memory();
        if bytes > LARGE {
            job.held = self.app.budget.reserve_for_hash(bytes, Instant::now() + MEMORY_WAIT);
            if job.held.is_none() {
                return self.refuse(job, Error::Busy(Reason::NoMemory));
            }
        }
        let held = job.held.take();
        let (status, took) = (response.status, job.received.elapsed());
        let sent = guard(Some(&job.id), || self.responder.answer(job.slot, response, held)).unwrap_or(None);
        let Job { name, path, token, id, .. } = job;
        let milliseconds = Milliseconds(took);
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                self.app.metrics.request(job.method, app::label(path), status, took);
                delivery
            }
            // The frontend has answered it, and counted that.
            None => &"not awaited",
        };
        log::info!(
            method = name.as_ref(), path = path.as_str(), status = status, duration_ms = took.as_secs_f64() * 1000.0,
            bytes = sent.map_or(0, |delivery| delivery.taken), token = *token, client:% = job.slot.client(),
            request_id:% = id;
            "{name} {path} {status} {milliseconds} {delivery}"
        );
    }
}

/// `12.3ms`, rounded. Of whole numbers: they take a quarter of the time that a fraction takes.
struct Milliseconds(Duration);

impl fmt::Display for Milliseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = self.0.as_secs() * 10_000 + u64::from((self.0.subsec_micros() + 50) / 100);
        write!(f, "{}.{}ms", tenths / 10, tenths % 10)
    }
}

/// Runs `work`; a panic in it is logged, and is the answer 500. `request` is the id of the request that it is done for,
/// where there is one.
pub(super) fn guard<T>(request: Option<&RequestId>, work: impl FnOnce() -> T) -> Result<T, Response> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Error::Internal(format!("panic: {}", text.unwrap_or("of an unknown kind"))).into_response(request)
    })
}
