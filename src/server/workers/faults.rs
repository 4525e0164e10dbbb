//! Requests that fail on command, in a service that is thrown away.

use super::{Job, Shared, guard};
use crate::{
    app,
    error::Error,
    http::{Request, Response},
};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A way for a request to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is executed, and the connection is closed without an answer.
    AnswerLost,
    /// The connection is closed, and the request is not executed.
    Refused,
    /// The answer is 503 with `Retry-After`, and the request is not executed.
    Unavailable,
    /// The request is executed, and answered so much later. Past `request_timeout` the answer is 503.
    Slow(Duration),
    /// The request is executed, and the connection is closed after so many bytes of the answer.
    Cut(usize),
}

/// Chooses the requests that fail.
pub type Faults = Arc<dyn Fn(&Request) -> Option<Fault> + Send + Sync>;

/// Fails a request, on a thread of its own: no worker waits for it.
pub(super) fn fail(shared: Arc<Shared>, fault: Fault, mut job: Job, request: Request) {
    let work = move || {
        shared.responder.begin(job.slot);
        let id = Some(&job.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).into_response(id),
            _ => guard(id, || shared.app.respond(&request, id)).unwrap_or_else(|response| response),
        };
        let bytes = match fault {
            Fault::AnswerLost | Fault::Refused => 0,
            Fault::Cut(bytes) => bytes,
            Fault::Slow(delay) => {
                thread::sleep(delay.min(job.deadline.saturating_duration_since(Instant::now())));
                if Instant::now() < job.deadline {
                    shared.answer(&mut job, response);
                }
                // Past the deadline, the frontend answers.
                return;
            }
            Fault::Unavailable => return shared.answer(&mut job, response),
        };
        let status = response.status;
        shared.app.metrics.request(job.method, app::label(&job.path), status, job.received.elapsed());
        log::info!(request_id:% = job.id; "{} {} {status} on command: {fault:?}", job.name, job.path);
        shared.responder.cut(job.slot, response, bytes);
    };
    if let Err(error) = thread::Builder::new().name("fault".to_owned()).spawn(work) {
        log::error!("a request cannot fail on command: {error}");
    }
}
