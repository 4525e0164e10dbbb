//! Requests that fail on command, in a service that is thrown away.

use super::{Job, guard};
use crate::{
    app::{self, App},
    error::Error,
    frontend::Responder,
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
pub(super) fn fail(fault: Fault, mut job: Job, request: Request, app: Arc<App>, responder: Responder) {
    let work = move || {
        responder.begin(job.slot);
        let id = Some(&job.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).into_response(id),
            _ => guard(id, || app.respond(&request, id)).unwrap_or_else(|response| response),
        };
        if let Fault::Slow(delay) = fault {
            thread::sleep(delay.min(job.deadline.saturating_duration_since(Instant::now())));
            if Instant::now() >= job.deadline {
                // The frontend answers it.
                return;
            }
        }
        log::info!(request_id:% = job.id; "{} {} {} on command: {fault:?}", job.name, job.path, response.status);
        app.metrics.request(job.method, app::label(&job.path), response.status, job.received.elapsed());
        match fault {
            Fault::AnswerLost | Fault::Refused => responder.cut(job.slot, response, 0),
            Fault::Cut(bytes) => responder.cut(job.slot, response, bytes),
            _ => drop(responder.answer(job.slot, response, job.held.take())),
        }
    };
    if let Err(error) = thread::Builder::new().name("fault".to_owned()).spawn(work) {
        log::error!("a request cannot fail on command: {error}");
    }
}
