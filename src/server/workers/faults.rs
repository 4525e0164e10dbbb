//! Requests that a test makes fail, and controls, which are requests to the test harness instead of the service.

use super::{Dispatch, Job, MAX_MEMORY_WAIT, catch_panic};
use crate::frontend::ClaimedRequest;
use crate::http::{Request, Response};
use crate::{app::Verdict, error::Error};
use std::time::{Duration, Instant};
use std::{sync::Arc, thread};

/// A way in which a test makes a request fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is executed, and the connection is closed without an answer.
    AnswerLost,
    /// The connection is closed, and the request is not executed.
    Refused,
    /// The answer is 503 with `Retry-After`, and the request is not executed.
    Unavailable,
    /// The request is executed, and answered after this delay. If the delay is longer than `request_timeout`, the
    /// answer is 503.
    Slow(Duration),
    /// The request is executed, and the connection is closed after so many bytes of its answer.
    Cut(usize),
}

/// The treatment of a request that a test intercepts.
pub enum Treatment {
    /// The request fails.
    Fault(Fault),
    /// The request is for the test harness. The service neither judges, counts nor logs the request.
    Harness(HarnessHandler),
}

/// Function that executes a request for the harness until its deadline. It answers with the function that it gets,
/// which returns true if the client still waited.
pub type HarnessHandler = Box<dyn FnOnce(Request, Instant, &dyn Fn(Response) -> bool) + Send>;

/// Function that chooses the requests to intercept. Must not block.
pub type Intercept = Arc<dyn Fn(&Request) -> Option<Treatment> + Send + Sync>;

/// Executes a request for the test harness.
pub(super) fn run_handler(dispatch: Arc<Dispatch>, handler: HarnessHandler, claimed: ClaimedRequest) {
    on_own_thread("control", move || {
        let ClaimedRequest { handle, request, id, deadline, memory, .. } = claimed;
        let answer = |response| dispatch.slots.send(handle, response, None, None).is_some();
        if dispatch.slots.mark_executing(handle) {
            let done = catch_panic(Some(&id), || handler(request, deadline, &answer));
            let _ = done.map_err(answer);
        }
        drop(memory);
    });
}

/// Makes a judged request fail.
pub(super) fn inject(dispatch: Arc<Dispatch>, fault: Fault, mut job: Job, judged: Verdict) {
    on_own_thread("fault", move || {
        dispatch.slots.mark_executing(job.claimed.handle);
        let id = Some(&job.claimed.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).into_response(id),
            _ => catch_panic(id, || dispatch.app.answer(judged)).unwrap_or_else(|response| response),
        };
        if let Fault::Slow(delay) = fault {
            let left = job.claimed.deadline.saturating_duration_since(Instant::now());
            thread::sleep(delay.min(left));
            if delay >= left {
                // Sends nothing, because the frontend answers 503 at the deadline.
                return;
            }
        }
        job.cut_after = match fault {
            Fault::AnswerLost | Fault::Refused => Some(0),
            Fault::Cut(bytes) => Some(bytes),
            Fault::Unavailable | Fault::Slow(_) => None,
        };
        dispatch.send(&mut job, response, MAX_MEMORY_WAIT);
    });
}

/// Executes work on a thread of its own, so that no worker waits for it.
fn on_own_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(work) {
        log::error!("no thread for a {name} can be started: {error}");
    }
}
