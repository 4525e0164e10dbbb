//! The two ends of a request in a worker: it is received from tiny_http and judged; it is answered, counted and logged.
//! Also the metrics of the requests that wait in between.

use super::{Dispatch, Treatment, Workers, faults};
use crate::app::Verdict;
use crate::error::{BusyReason, Error};
use crate::frontend::{ClaimedRequest, ClientName};
use crate::http::{RequestId, Response};
use crate::metrics::MetricsWriter;
use crate::operations::Command;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use std::{convert::identity, fmt, mem, sync::Arc};

/// The most requests that a worker judges before it queues their commands for all workers.
const MAX_JUDGED_REQUESTS: usize = 256;
/// The most requests that a worker answers by itself before it queues the commands that it has made. Otherwise these
/// commands would wait until further requests are answered.
const MAX_ANSWERED_REQUESTS: usize = 8;

/// The most bytes of an answer that needs no memory reservation of its own.
const MAX_UNRESERVED_BYTES: usize = 16 << 10;

/// The longest time that a large answer waits for its memory.
pub(super) const MAX_MEMORY_WAIT: Duration = Duration::from_secs(2);

/// A command, and the request that it answers.
pub(super) struct Task {
    pub command: Command,
    pub job: Job,
}

/// A request that a worker has claimed, until its answer.
pub(super) struct Job {
    /// The slot, the client, the id and the deadline of the request. Holds the memory reservation of the request, then
    /// of its answer.
    pub claimed: ClaimedRequest,
    /// The bytes of the answer after which a test has the connection closed; `None` for a whole answer.
    pub cut_after: Option<usize>,
    /// The time at which the worker received the request from tiny_http.
    received: Instant,
    /// The value of the label `route` in the metrics, for the route of the request.
    metrics_label: &'static str,
    /// The name of the rights that the token of the request gives, for the log; empty without a token.
    token: &'static str,
}

impl Workers {
    /// Returns the function that writes the metrics of waiting requests and of connections.
    pub fn metrics_writer(&self) -> MetricsWriter {
        // Keeps a weak reference: `dispatch` owns the metrics, which will own this function, so with a strong reference
        // neither would ever be freed.
        let dispatch = Arc::downgrade(&self.dispatch);
        Box::new(move |text| {
            let Some(dispatch) = dispatch.upgrade() else { return };
            let schedule = dispatch.schedule.lock();
            let (queued, hashes) = (schedule.lanes.len(), schedule.lanes.hashes_waiting());
            drop(schedule);
            text.add_gauge("userd_commands_queued", "Commands that wait for a worker or a retry.", queued);
            text.add_gauge("userd_hashes_waiting", "Passwords that wait to be hashed or checked.", hashes);
            let (connections, most) = dispatch.slots.count_connections();
            let help = "Connections of clients, by what they are doing.";
            text.add_family("userd_http_connections", "gauge", help);
            connections.for_each(|(state, count)| text.add_value(&[("state", state)], count));
            text.add_gauge("userd_http_connections_max", "The most connections of clients at once.", most);
        })
    }
}

impl Dispatch {
    /// Waits for a ticket, which names complete requests, and judges these requests and those of further tickets that
    /// are there. Answers the requests that need no database, and returns the commands of the remaining ones.
    pub(super) fn receive(self: &Arc<Self>) -> Vec<Box<Task>> {
        let mut next = self.server.recv().map(Some);
        let (received, mut judged, mut answered) = (Instant::now(), Vec::new(), 0);
        while let Ok(Some(ticket)) = next {
            let claimed: Vec<ClaimedRequest> = self.slots.claim(ticket.url()).collect();
            // Drops the ticket without an answer over tiny_http, because the workers write the answers of its requests
            // to the sockets of the clients.
            drop(ticket.into_writer());
            for claimed in claimed {
                let id = claimed.id.clone();
                match catch_panic(Some(&id), || self.judge(claimed, received)) {
                    Ok(Some(task)) => judged.push(task),
                    _ => answered += 1,
                }
                // Queues the commands so far, so that they do not wait while this worker answers further requests.
                if answered >= MAX_ANSWERED_REQUESTS && !judged.is_empty() {
                    answered = 0;
                    self.submit(mem::take(&mut judged));
                }
            }
            if judged.len() >= MAX_JUDGED_REQUESTS || answered >= MAX_ANSWERED_REQUESTS {
                break;
            }
            next = self.server.try_recv();
        }
        judged
    }

    /// Queues commands, and wakes a worker to execute them.
    fn submit(&self, judged: Vec<Box<Task>>) {
        let mut schedule = self.schedule.lock();
        self.push(&mut schedule, judged);
        self.wake(&schedule, Instant::now());
    }

    /// Judges a request. Returns its command, or `None` if the request is answered or a test intercepts it.
    fn judge(self: &Arc<Self>, claimed: ClaimedRequest, received: Instant) -> Option<Box<Task>> {
        let ClaimedRequest { request, cors, id, .. } = &claimed;
        let asked = self.app.find_endpoint(request, cors);
        let (metrics_label, token) = (asked.metrics_label, asked.token.map_or("", Into::into));
        let judged = catch_panic(Some(id), || match self.intercept.as_ref().and_then(|f| f(request)) {
            Some(Treatment::Harness(handler)) => Err(handler),
            fault => Ok((fault, self.app.judge(request, asked, cors, Some(id)))),
        });
        let (fault, judged) = match judged.unwrap_or_else(|answer| Ok((None, Verdict::Answer(answer)))) {
            Ok(judged) => judged,
            Err(handler) => {
                faults::run_handler(Arc::clone(self), handler, claimed);
                return None;
            }
        };
        let mut job = Job { claimed, cut_after: None, received, metrics_label, token };
        // Drops the header fields and the body to free their memory: the log line needs only the method and the path.
        (job.claimed.request.raw_headers, job.claimed.request.body) = (String::new(), Vec::new());
        match (fault, judged) {
            (Some(Treatment::Fault(fault)), judged) => faults::inject(Arc::clone(self), fault, job, judged),
            // Does not wait for memory, because this thread receives requests. A large answer is refused if its memory
            // is not free.
            (_, Verdict::Answer(answer)) => self.send(&mut job, answer, Duration::ZERO),
            (_, Verdict::Execute(command)) => return Some(Box::new(Task { command, job })),
        }
        None
    }

    /// Answers with an error, and logs it. Logs an overload at most once a second, because it refuses many requests.
    pub(super) fn refuse(&self, job: &mut Job, error: Error) {
        let ClaimedRequest { id, request, .. } = &job.claimed;
        let response = match error {
            Error::Busy(why) => {
                self.app.metrics.count_busy(why);
                self.slots.warnings.warn_of_refusal(why, request.peer, id);
                error.answer()
            }
            error => catch_panic(Some(id), || error.into_response(Some(id))).unwrap_or_else(identity),
        };
        self.send(job, response, Duration::ZERO);
    }

    /// Sends an answer. Reserves the memory of a large one first: waits for it up to `memory_wait`, then refuses the
    /// request.
    pub(super) fn send(&self, job: &mut Job, response: Response, memory_wait: Duration) {
        let bytes = response.memory_bytes();
        if bytes > MAX_UNRESERVED_BYTES {
            let deadline = job.claimed.deadline.min(Instant::now() + memory_wait);
            job.claimed.memory = self.app.operations.budget.reserve(bytes, deadline);
            if job.claimed.memory.is_none() {
                return self.refuse(job, Error::Busy(BusyReason::NoMemory));
            }
        }
        self.send_and_log(job, response);
    }

    /// Sends an answer, counts it, and logs the request.
    fn send_and_log(&self, job: &mut Job, response: Response) {
        let held = job.claimed.memory.take();
        let (status, took) = (response.status, job.received.elapsed());
        let send = || self.slots.send(job.claimed.handle, response, job.cut_after, held);
        let sent = catch_panic(Some(&job.claimed.id), send).unwrap_or(None);
        let Job { metrics_label, token, claimed: ClaimedRequest { id, request, .. }, .. } = job;
        let (name, path) = (&*request.method_name, request.path());
        let milliseconds = took.as_secs_f64() * 1000.0;
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                self.app.metrics.count_request(request.method, metrics_label, status, took);
                delivery
            }
            // Does not count the answer: the frontend has answered the request and counted it, or the client is gone.
            None => &"not awaited",
        };
        log::info!(
            method = name, path = path, status = status, duration_ms = milliseconds,
            bytes = sent.map_or(0, |delivery| delivery.sent_bytes), token = *token, client:% = ClientName(request.peer),
            request_id:% = id;
            "{name} {path} {status} {milliseconds:.1}ms {delivery}"
        );
    }
}

/// Runs `work`. Logs a panic in it, and returns the answer 500 for it. `request` is the id of the request that the
/// work is done for. A panic while logging ends here, too: it may come from the logger of a program that embeds the
/// service.
pub(super) fn catch_panic<T>(request: Option<&RequestId>, work: impl FnOnce() -> T) -> Result<T, Response> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let error = Error::Internal(format!("panic: {}", text.unwrap_or("of an unknown kind")));
        let _ = catch_unwind(AssertUnwindSafe(|| error.log(request)));
        error.answer()
    })
}
