//! Requests that fail on command, and controls, in a service that is thrown away.

use super::{Dispatch, Job, MAX_MEMORY_WAIT, guard};
use crate::frontend::Claimed;
use crate::http::{Request, Response};
use crate::{app::Judged, error::Error};
use std::time::{Duration, Instant};
use std::{sync::Arc, thread};

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

/// The treatment of a request that is not executed as usual.
pub enum Intercepted {
    /// The request fails.
    Fault(Fault),
    /// The request is no request to the service: it is neither judged, counted nor logged.
    Control(Control),
}

/// Executes a request until its deadline, and answers it with a function that returns whether the client still waited.
pub type Control = Box<dyn FnOnce(Request, Instant, &dyn Fn(Response) -> bool) + Send>;

/// Chooses the requests that are not executed as usual. Must not block.
pub type Intercept = Arc<dyn Fn(&Request) -> Option<Intercepted> + Send + Sync>;

/// Executes a control.
pub(super) fn control(dispatch: Arc<Dispatch>, control: Control, claimed: Claimed) {
    on_own_thread("control", move || {
        let Claimed { slot, request, id, deadline, held, .. } = claimed;
        let answer = |response| dispatch.slots.send(slot, response, None, None).is_some();
        if dispatch.slots.begin(slot) {
            let done = guard(Some(&id), || control(request, deadline, &answer));
            let _ = done.map_err(answer);
        }
        drop(held);
    });
}

/// Fails a judged request.
pub(super) fn fail(dispatch: Arc<Dispatch>, fault: Fault, mut job: Job, judged: Judged) {
    on_own_thread("fault", move || {
        dispatch.slots.begin(job.claimed.slot);
        let id = Some(&job.claimed.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).into_response(id),
            _ => guard(id, || dispatch.app.answer(judged)).unwrap_or_else(|response| response),
        };
        if let Fault::Slow(delay) = fault {
            let left = job.claimed.deadline.saturating_duration_since(Instant::now());
            thread::sleep(delay.min(left));
            if delay >= left {
                // Sends nothing: the frontend answers 503 at the deadline.
                return;
            }
        }
        job.cut = match fault {
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
