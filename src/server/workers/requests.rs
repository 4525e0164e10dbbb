//! The first and the last steps of a request in a worker: receiving it from tiny_http and judging it; answering,
//! counting and logging it. Also the metrics of the requests that wait in between.

use super::{Dispatcher, Interception, Workers, faults::execute_control, faults::inject};
use crate::app::Verdict;
use crate::error::{BusyReason, Error};
use crate::frontend::{ClaimedRequest, ClientName};
use crate::http::{RequestId, Response};
use crate::metrics::MetricsWriter;
use crate::operations::Command;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use std::{convert::identity, fmt, mem, sync::Arc};

/// The number of commands after which a worker takes no further ticket of the frontend, but queues the commands, so
/// that other workers can execute them.
const MAX_UNQUEUED_COMMANDS: usize = 256;
/// The number of requests that a worker answers itself before it queues the commands of other requests, so that these
/// commands do not wait for further answers.
const MAX_ANSWERS_BEFORE_QUEUEING: usize = 8;

/// The most bytes of an answer that is sent without a reservation of memory from the budget.
const MAX_UNRESERVED_ANSWER_BYTES: usize = 16 << 10;

/// The longest time that a large answer waits until enough of the memory budget is free.
pub(super) const MAX_MEMORY_WAIT: Duration = Duration::from_secs(2);

/// A command, and the request that it belongs to.
pub(super) struct Task {
    pub command: Command,
    pub pending: PendingRequest,
}

/// A request that a worker has claimed from the frontend and not yet answered.
pub(super) struct PendingRequest {
    /// The request as the frontend has handed it over. Its memory reservation is replaced by that of the answer.
    pub claimed: ClaimedRequest,
    /// The number of bytes of the answer after which the connection is closed, because a test asks for it; `None` to
    /// send the whole answer.
    pub cut_at_byte: Option<usize>,
    /// The time at which the worker received the request from tiny_http.
    received_at: Instant,
    /// The label `route` of the request in the metrics.
    route_label: &'static str,
    /// The name of the rights that the token of the request gives, for the log; empty without a known token.
    rights: &'static str,
}

impl Workers {
    /// Returns the function that writes the metrics of queued commands and of client connections.
    pub fn make_metrics_writer(&self) -> MetricsWriter {
        // Keeps a weak reference, because the dispatcher owns the metrics, and the metrics will own this function. With
        // a strong reference neither would ever be freed.
        let dispatcher = Arc::downgrade(&self.dispatcher);
        Box::new(move |text| {
            let Some(dispatcher) = dispatcher.upgrade() else { return };
            let (state, slots) = (dispatcher.state.lock(), &dispatcher.slots);
            let (queued, passwords) = (state.lanes.queued_commands(), state.lanes.waiting_passwords());
            drop(state);
            text.add_gauge("userd_commands_queued", "Commands that wait for a worker or a retry.", queued);
            text.add_gauge("userd_hashes_waiting", "Passwords that wait to be hashed or checked.", passwords);
            let (connections, most) = (slots.count_connections(), slots.limits.max_connections);
            let help = "Connections of clients, by what they are doing.";
            text.add_family("userd_http_connections", "gauge", help);
            connections.for_each(|(state, count)| text.add_value(&[("state", state)], count));
            text.add_gauge("userd_http_connections_max", "The most connections of clients at once.", most);
        })
    }
}

impl Dispatcher {
    /// Waits for a ticket, which names requests that are complete, and judges these requests. Goes on with further
    /// tickets while there are any. Answers the requests that need no database, and returns the commands of the others.
    pub(super) fn receive_requests(self: &Arc<Self>) -> Vec<Box<Task>> {
        let mut next = self.tiny_http.recv().map(Some);
        let (received_at, mut tasks, mut answered) = (Instant::now(), Vec::new(), 0);
        while let Ok(Some(ticket)) = next {
            let claimed: Vec<ClaimedRequest> = self.slots.claim(ticket.url()).collect();
            // Drops the ticket without an answer over tiny_http, because workers write answers directly to the sockets
            // of clients.
            drop(ticket.into_writer());
            for claimed in claimed {
                let id = claimed.id.clone();
                match catch_panic(Some(&id), || self.judge_request(claimed, received_at)) {
                    Ok(Some(task)) => tasks.push(task),
                    _ => answered += 1,
                }
                // Queues the commands so far, so that they do not wait while this worker answers further requests.
                if answered >= MAX_ANSWERS_BEFORE_QUEUEING && !tasks.is_empty() {
                    answered = 0;
                    self.queue_and_wake_worker(mem::take(&mut tasks));
                }
            }
            if tasks.len() >= MAX_UNQUEUED_COMMANDS || answered >= MAX_ANSWERS_BEFORE_QUEUEING {
                break;
            }
            next = self.tiny_http.try_recv();
        }
        tasks
    }

    /// Queues the commands of requests, and wakes a worker to execute them.
    fn queue_and_wake_worker(&self, tasks: Vec<Box<Task>>) {
        let mut state = self.state.lock();
        self.queue_tasks(&mut state, tasks);
        self.wake_thread_if_needed(&state, Instant::now());
    }

    /// Judges a request: makes a command of it, or answers it. Returns the command, or `None` if the request is answered
    /// or a test intercepts it.
    fn judge_request(self: &Arc<Self>, claimed: ClaimedRequest, received_at: Instant) -> Option<Box<Task>> {
        let ClaimedRequest { request, cors, id, .. } = &claimed;
        let route = self.app.find_route(request, cors);
        let (route_label, rights) = (route.route_label, route.token_rights.map_or("", Into::into));
        let verdict = catch_panic(Some(id), || match self.intercept.as_ref().and_then(|f| f(request)) {
            Some(Interception::ControlRequest(handler)) => Err(handler),
            fault => Ok((fault, self.app.judge(request, route, cors, Some(id)))),
        });
        let (fault, verdict) = match verdict.unwrap_or_else(|answer| Ok((None, Verdict::Answer(answer)))) {
            Ok(judged) => judged,
            Err(handler) => {
                execute_control(self.clone(), handler, claimed);
                return None;
            }
        };
        let mut pending = PendingRequest { claimed, cut_at_byte: None, received_at, route_label, rights };
        // Frees the memory of the header fields and the body. The log line needs only the method and the path.
        (pending.claimed.request.raw_headers, pending.claimed.request.body) = (String::new(), Vec::new());
        match (fault, verdict) {
            (Some(Interception::Fault(fault)), verdict) => inject(self.clone(), fault, pending, verdict),
            // Does not wait for memory, so that this thread can receive further requests. If the memory for a large
            // answer is not free, the request is refused.
            (_, Verdict::Answer(answer)) => self.send_answer(&mut pending, answer, Duration::ZERO),
            (_, Verdict::Execute(command)) => return Some(Box::new(Task { command, pending })),
        }
        None
    }

    /// Answers a request with an error, and logs the error. Logs an overload at most once a second, because an overload
    /// makes the service refuse many requests.
    pub(super) fn refuse(&self, pending: &mut PendingRequest, error: Error) {
        let ClaimedRequest { id, request, .. } = &pending.claimed;
        let response = match error {
            Error::Busy(why) => {
                self.app.metrics.count_busy_reason(why);
                self.slots.warnings.warn_of_refusal(why, request.peer, id);
                error.answer()
            }
            error => catch_panic(Some(id), || error.log_and_answer(Some(id))).unwrap_or_else(identity),
        };
        self.send_answer(pending, response, Duration::ZERO);
    }

    /// Sends the answer to a request. Reserves memory for a large answer first. If the memory does not become free
    /// within `max_wait`, refuses the request instead.
    pub(super) fn send_answer(&self, pending: &mut PendingRequest, response: Response, max_wait: Duration) {
        let bytes = response.memory_bytes();
        if bytes > MAX_UNRESERVED_ANSWER_BYTES {
            let deadline = pending.claimed.deadline.min(Instant::now() + max_wait);
            pending.claimed.memory = self.app.operations.budget.reserve(bytes, deadline);
            if pending.claimed.memory.is_none() {
                return self.refuse(pending, Error::Busy(BusyReason::NoMemory));
            }
        }
        self.send_and_log(pending, response);
    }

    /// Sends the answer to a request, counts the answer in the metrics, and logs the request.
    fn send_and_log(&self, pending: &mut PendingRequest, response: Response) {
        let memory = pending.claimed.memory.take();
        let (status, took) = (response.status, pending.received_at.elapsed());
        let send = || self.slots.send(pending.claimed.handle, response, pending.cut_at_byte, memory);
        let sent = catch_panic(Some(&pending.claimed.id), send).unwrap_or(None);
        let PendingRequest { route_label, rights, claimed: ClaimedRequest { id, request, .. }, .. } = pending;
        let (name, path) = (&*request.method_name, request.path());
        let milliseconds = took.as_secs_f64() * 1000.0;
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                self.app.metrics.count_request(request.method, route_label, status, took);
                delivery
            }
            // Does not count the answer, because the client does not get it: the frontend has answered 503 and counted
            // that answer, or the client is gone.
            None => &"not awaited",
        };
        log::info!(
            method = name, path = path, status = status, duration_ms = milliseconds,
            bytes = sent.map_or(0, |delivery| delivery.sent_bytes), token = *rights, client:% = ClientName(request.peer),
            request_id:% = id;
            "{name} {path} {status} {milliseconds:.1}ms {delivery}"
        );
    }
}

/// Calls `work`. If it panics, logs the panic and returns the answer 500. `id` is the id of the request for which the
/// work is done, for the log. A panic while logging is caught, too, because a program that embeds the service has its
/// own logger.
pub(super) fn catch_panic<T>(id: Option<&RequestId>, work: impl FnOnce() -> T) -> Result<T, Response> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let error = Error::Internal(format!("panic: {}", text.unwrap_or("of an unknown kind")));
        let _ = catch_unwind(AssertUnwindSafe(|| error.log(id)));
        error.answer()
    })
}
