//! A request at both ends of its way through the workers: received from tiny_http and judged, and answered, counted and
//! logged; and the figures of those in between.

use super::{Dispatch, Workers, faults::fail};
use crate::{
    app::{self, Command, Needs},
    error::{Error, Reason},
    frontend::{Claimed, ClientName},
    http::{Method, Request, RequestId, Response},
    metrics::Source,
};
use std::{
    borrow::Cow,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

/// Requests that are judged before they are queued: then other workers may execute them.
const RECEIVE_REQUESTS: usize = 256;
/// Requests that are answered at once meanwhile: those that were judged before wait for them.
const RECEIVE_ANSWERED: usize = 8;

/// Bytes of a body from which on it needs a reservation of its own.
const LARGE: usize = 16 << 10;

/// The longest wait of a large answer for its memory.
const MEMORY_WAIT: Duration = Duration::from_secs(2);

/// A request that is queued or in flight.
pub(super) struct Job {
    /// `None` until it is judged, and once it is answered.
    pub command: Option<Command>,
    /// The slot, the client, the id and the deadline. Holds the memory of the request, and then of its answer.
    pub claimed: Claimed,
    pub received: Instant,
    pub method: Method,
    /// The method's name for the log.
    pub name: Cow<'static, str>,
    pub path: String,
    /// The name of the rights that the token of the request gives; empty without a token.
    token: &'static str,
}

impl Workers {
    /// Writes the figures of what waits for an answer.
    pub fn figures(&self) -> Source {
        // The threads own the figures, so the figures must not own the threads.
        let dispatch = Arc::downgrade(&self.dispatch);
        Box::new(move |text| {
            let Some(dispatch) = dispatch.upgrade() else {
                return;
            };
            let schedule = dispatch.schedule.lock();
            let (queued, hashes) = (schedule.lanes.len(), schedule.lanes.hashes_waiting());
            drop(schedule);
            text.gauge("userd_commands_queued", "Commands that wait for a worker or a retry.", queued);
            text.gauge("userd_hashes_waiting", "Passwords that wait to be hashed or checked.", hashes);
            let (connections, most) = dispatch.slots.connections();
            let help = "Connections of clients, by what they are doing.";
            text.family("userd_http_connections", "gauge", help);
            connections.for_each(|(state, count)| text.value(&[("state", state)], count));
            text.gauge("userd_http_connections_max", "The most connections of clients at once.", most);
        })
    }
}

impl Dispatch {
    /// Waits for a request, at most until that time. Judges it, and those that are there behind it; answers those that
    /// need no database.
    pub(super) fn receive(self: &Arc<Self>, until: Instant) -> Vec<(Job, Needs)> {
        let mut next = self.server.recv_timeout(until.saturating_duration_since(Instant::now()));
        let (received, mut judged, mut answered) = (Instant::now(), Vec::new(), 0);
        while let Ok(Some(incoming)) = next {
            if let Ok(Some((mut job, request))) = guard(None, || self.accept(incoming, received)) {
                let id = Some(&job.claimed.id);
                match guard(id, || self.app.judge(&request, id)).unwrap_or_else(Err) {
                    Ok(command) => {
                        let needs = command.needs();
                        job.command = Some(command);
                        judged.push((job, needs));
                    }
                    Err(answer) => {
                        self.answer(&mut job, answer);
                        answered += 1;
                    }
                }
            }
            if judged.len() >= RECEIVE_REQUESTS || answered >= RECEIVE_ANSWERED {
                break;
            }
            next = self.server.try_recv();
        }
        judged
    }

    /// Returns the request and a job for it; `None` if no client waits for its answer any more, or if it fails on command.
    fn accept(
        self: &Arc<Self>,
        mut incoming: tiny_http::Request,
        received: Instant,
    ) -> Option<(Job, Request)> {
        let (target, slot) = incoming.url().rsplit_once('#').unwrap_or_default();
        let claimed = self.slots.claim(slot);
        let method = incoming.method().as_str();
        let (method, name) = (Method::from(method), Method::from(method).shown(method));
        let headers = incoming.headers().iter();
        let mut request = Request {
            method,
            target: target.to_owned(),
            headers: headers.map(|header| (header.field.to_string(), header.value.to_string())).collect(),
            body: Vec::with_capacity(incoming.body_length().unwrap_or_default()),
            peer: claimed.as_ref().and_then(|claimed| claimed.client),
        };
        // The frontend sends whole requests over a stream of our own, so this does not block; and what is not
        // read here, tiny_http would drain.
        let body = incoming.as_reader().read_to_end(&mut request.body);
        // Dropped unused: the answer goes to the slot.
        drop(incoming.into_writer());
        let claimed = claimed.filter(|_| body.is_ok())?;
        let path = request.path().to_owned();
        let token = self.app.rights(&request).unwrap_or_default();
        let job = Job { command: None, claimed, received, method, name, path, token };
        match self.faults.as_ref().and_then(|faults| faults(&request)) {
            None => Some((job, request)),
            Some(fault) => {
                fail(Arc::clone(self), fault, job, request);
                None
            }
        }
    }

    /// Answers with an error, and logs it: where there is too much to do, once a second, as many requests have that.
    pub(super) fn refuse(&self, job: &mut Job, error: Error) {
        let Claimed { id, client, .. } = &job.claimed;
        let response = match error {
            Error::Busy(why) => {
                self.app.metrics.refused(why);
                self.slots.warn(why, *client, id);
                error.answer()
            }
            error => guard(Some(id), || error.into_response(Some(id))).unwrap_or_else(|response| response),
        };
        self.answer(job, response);
    }

    /// Sends an answer. A large one reserves its length first, or is refused.
    pub(super) fn answer(&self, job: &mut Job, response: Response) {
        let bytes = response.memory();
        if bytes > LARGE {
            job.claimed.held = self.app.budget.reserve(bytes, Instant::now() + MEMORY_WAIT);
            if job.claimed.held.is_none() {
                return self.refuse(job, Error::Busy(Reason::NoMemory));
            }
        }
        self.send(job, response, None);
    }

    /// Sends an answer, or so many bytes of it, counts it, and logs the request.
    pub(super) fn send(&self, job: &mut Job, response: Response, cut: Option<usize>) {
        // An attempt at a password is over before its client can make the next one.
        job.command = None;
        let held = job.claimed.held.take();
        let (status, took) = (response.status, job.received.elapsed());
        let send = || self.slots.answer(job.claimed.slot, response, cut, held);
        let sent = guard(Some(&job.claimed.id), send).unwrap_or(None);
        let Job { name, path, token, claimed: Claimed { id, client, .. }, .. } = job;
        let milliseconds = took.as_secs_f64() * 1000.0;
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                self.app.metrics.request(job.method, app::label(path), status, took);
                delivery
            }
            // The frontend has answered it, and counted that.
            None => &"not awaited",
        };
        log::info!(
            method = name.as_ref(), path = path.as_str(), status = status, duration_ms = milliseconds,
            bytes = sent.map_or(0, |delivery| delivery.taken), token = *token, client:% = ClientName(*client),
            request_id:% = id;
            "{name} {path} {status} {milliseconds:.1}ms {delivery}"
        );
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
