//! A request at both ends of its way through the workers: received from tiny_http and judged, and answered, counted and
//! logged; and the figures of those in between.

use super::{Dispatch, Intercepted, Workers, faults};
use crate::app::Judged;
use crate::error::{BusyReason, Error};
use crate::frontend::{Claimed, ClientName};
use crate::http::{RequestId, Response};
use crate::metrics::Source;
use crate::operations::Command;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use std::{fmt, mem, sync::Arc};

/// Requests that a worker judges, at most, before it queues their commands for all workers.
const MAX_JUDGED: usize = 256;
/// Requests that a worker answers by itself, at most, before it queues the commands that it has: they wait for it.
const MAX_ANSWERED: usize = 8;

/// Bytes of an answer from which on it needs a reservation of its own.
const MIN_RESERVED_BYTES: usize = 16 << 10;

/// The longest wait of a large answer of a command for its memory.
pub(super) const MAX_MEMORY_WAIT: Duration = Duration::from_secs(2);

/// A command, and the request that it answers.
pub(super) struct Task {
    pub command: Command,
    pub job: Job,
}

/// A request that a worker has claimed, until its answer.
pub(super) struct Job {
    /// The slot, the client, the id and the deadline, and what the log says of the request. Holds the memory of the request,
    /// and then of its answer.
    pub claimed: Claimed,
    /// Bytes of the answer that are sent before the connection is closed; `None` for an answer that is whole.
    pub cut: Option<usize>,
    received: Instant,
    /// The label of the request's route in figures.
    label: &'static str,
    /// The name of the rights that the token of the request gives; empty without a token.
    token: &'static str,
}

impl Workers {
    /// Adds the figures of requests that wait for an answer.
    pub fn figures(&self) -> Source {
        // The figures hold a weak reference: the threads own the figures.
        let dispatch = Arc::downgrade(&self.dispatch);
        Box::new(move |text| {
            let Some(dispatch) = dispatch.upgrade() else { return };
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
    /// Waits for a ticket. Judges the requests of it and of the tickets behind it. Answers the requests that need no database,
    /// and returns the commands of the rest.
    pub(super) fn receive(self: &Arc<Self>) -> Vec<Box<Task>> {
        let mut next = self.server.recv().map(Some);
        let (received, mut judged, mut answered) = (Instant::now(), Vec::new(), 0);
        while let Ok(Some(ticket)) = next {
            let claimed: Vec<Claimed> = self.slots.claim(ticket.url()).collect();
            // The ticket is dropped without an answer over tiny_http: answers go to the slots.
            drop(ticket.into_writer());
            for claimed in claimed {
                let id = claimed.id.clone();
                match guard(Some(&id), || self.judge(claimed, received)) {
                    Ok(Some(task)) => judged.push(task),
                    _ => answered += 1,
                }
                // Queues the commands that were judged before, so that they wait for no more answers.
                if answered >= MAX_ANSWERED && !judged.is_empty() {
                    answered = 0;
                    self.submit(mem::take(&mut judged));
                }
            }
            if judged.len() >= MAX_JUDGED || answered >= MAX_ANSWERED {
                break;
            }
            next = self.server.try_recv();
        }
        judged
    }

    /// Queues commands, and wakes a worker for them.
    fn submit(&self, judged: Vec<Box<Task>>) {
        let mut schedule = self.schedule.lock();
        self.push(&mut schedule, judged);
        self.wake(&schedule, Instant::now());
    }

    /// Judges a request. `None` if it is answered, or is not executed as usual.
    fn judge(self: &Arc<Self>, claimed: Claimed, received: Instant) -> Option<Box<Task>> {
        let Claimed { request, cors, id, .. } = &claimed;
        let asked = self.app.find(request, cors);
        let (label, token) = (asked.label, asked.token.map_or("", Into::into));
        let judged = guard(Some(id), || match self.intercept.as_ref().and_then(|choose| choose(request)) {
            Some(Intercepted::Control(control)) => Err(control),
            fault => Ok((fault, self.app.judge(request, asked, cors, Some(id)))),
        });
        let (fault, judged) = match judged.unwrap_or_else(|answer| Ok((None, Judged::Answer(answer)))) {
            Ok(judged) => judged,
            Err(control) => {
                faults::control(Arc::clone(self), control, claimed);
                return None;
            }
        };
        let mut job = Job { claimed, cut: None, received, label, token };
        // The log needs no more of it than the method and the path.
        (job.claimed.request.fields, job.claimed.request.body) = (String::new(), Vec::new());
        match (fault, judged) {
            (Some(Intercepted::Fault(fault)), judged) => faults::fail(Arc::clone(self), fault, job, judged),
            // Does not wait for memory, because this thread receives requests: a large answer is refused if its memory
            // is not free.
            (_, Judged::Answer(answer)) => self.send(&mut job, answer, Duration::ZERO),
            (_, Judged::Execute(command)) => return Some(Box::new(Task { command, job })),
        }
        None
    }

    /// Answers with an error, and logs it. An overload is logged at most once a second, as many requests have the
    /// same error.
    pub(super) fn refuse(&self, job: &mut Job, error: Error) {
        let Claimed { id, request, .. } = &job.claimed;
        let response = match error {
            Error::Busy(why) => {
                self.app.metrics.refused(why);
                self.slots.warnings.refused(why, request.peer, id);
                error.answer()
            }
            error => guard(Some(id), || error.into_response(Some(id))).unwrap_or_else(|response| response),
        };
        self.send(job, response, Duration::ZERO);
    }

    /// Sends an answer. A large one reserves its length first, for which it waits so long, or is refused.
    pub(super) fn send(&self, job: &mut Job, response: Response, memory_wait: Duration) {
        let bytes = response.memory();
        if bytes > MIN_RESERVED_BYTES {
            let deadline = job.claimed.deadline.min(Instant::now() + memory_wait);
            job.claimed.held = self.app.operations.budget.reserve(bytes, deadline);
            if job.claimed.held.is_none() {
                return self.refuse(job, Error::Busy(BusyReason::NoMemory));
            }
        }
        self.send_and_log(job, response);
    }

    /// Sends an answer, counts it, and logs the request.
    fn send_and_log(&self, job: &mut Job, response: Response) {
        let held = job.claimed.held.take();
        let (status, took) = (response.status, job.received.elapsed());
        let send = || self.slots.send(job.claimed.slot, response, job.cut, held);
        let sent = guard(Some(&job.claimed.id), send).unwrap_or(None);
        let Job { label, token, claimed: Claimed { id, request, .. }, .. } = job;
        let (name, path) = (&*request.method_name, request.path());
        let milliseconds = took.as_secs_f64() * 1000.0;
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                self.app.metrics.request(request.method, label, status, took);
                delivery
            }
            // Counts and logs nothing: the frontend has answered the request, and counted that.
            None => &"not awaited",
        };
        log::info!(
            method = name, path = path, status = status, duration_ms = milliseconds,
            bytes = sent.map_or(0, |delivery| delivery.taken), token = *token, client:% = ClientName(request.peer),
            request_id:% = id;
            "{name} {path} {status} {milliseconds:.1}ms {delivery}"
        );
    }
}

/// Runs `work`; a panic in it is logged, and is the answer 500. `request` is the id of the request that it is done for,
/// where there is one. The logger of a program that embeds the service may be what panics, so its own panic ends here.
pub(super) fn guard<T>(request: Option<&RequestId>, work: impl FnOnce() -> T) -> Result<T, Response> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let error = Error::Internal(format!("panic: {}", text.unwrap_or("of an unknown kind")));
        let _ = catch_unwind(AssertUnwindSafe(|| error.log(request)));
        error.answer()
    })
}
