//! Requests that a test intercepts: requests that are made to fail, and control requests, which are for the test
//! harness instead of the service.

use super::{Dispatcher, MAX_MEMORY_WAIT, PendingRequest, catch_panic};
use crate::frontend::ClaimedRequest;
use crate::http::{Request, Response};
use crate::{app::Verdict, error::Error};
use std::time::{Duration, Instant};
use std::{sync::Arc, thread};

/// A way in which a test makes a request fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is executed, but the connection is closed without an answer.
    AnswerLost,
    /// The request is not executed, and the connection is closed without an answer.
    Refused,
    /// The request is not executed, and answered 503 with `Retry-After`.
    Unavailable,
    /// The request is executed, but its answer is delayed for this time. If the delay is longer than `request_timeout`,
    /// the answer is 503.
    Slow(Duration),
    /// The request is executed, but the connection is closed after this number of bytes of its answer.
    Cut(usize),
}

/// The way in which an intercepted request is executed.
pub enum Interception {
    /// The request fails in this way.
    Fault(Fault),
    /// The request is a control request: this function executes it. The service does not judge, count or log it.
    ControlRequest(ControlHandler),
}

/// A function that executes a control request, and must end by the deadline. It sends its answer by calling the
/// function that is its last argument, which returns true if the client still waited for the answer.
pub type ControlHandler = Box<dyn FnOnce(Request, Instant, &dyn Fn(Response) -> bool) + Send>;

/// A function that decides whether, and how, a request is intercepted. It must not block.
pub type InterceptHook = Arc<dyn Fn(&Request) -> Option<Interception> + Send + Sync>;

/// Executes a control request, which is for the test harness, on a thread of its own.
pub fn execute_control(dispatcher: Arc<Dispatcher>, handler: ControlHandler, claimed: ClaimedRequest) {
    spawn_thread("control", move || {
        let ClaimedRequest { handle, request, id, deadline, memory, .. } = claimed;
        let answer = |response| dispatcher.slots.send(handle, response, None, None).is_some();
        if dispatcher.slots.mark_executing(handle) {
            let done = catch_panic(Some(&id), || handler(request, deadline, &answer));
            let _ = done.map_err(answer);
        }
        drop(memory);
    });
}

/// Makes a judged request fail as `fault` says, on a thread of its own.
pub fn inject(dispatcher: Arc<Dispatcher>, fault: Fault, mut pending: PendingRequest, verdict: Verdict) {
    spawn_thread("fault", move || {
        dispatcher.slots.mark_executing(pending.claimed.handle);
        let id = Some(&pending.claimed.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).log_and_answer(id),
            _ => catch_panic(id, || dispatcher.app.answer(verdict)).unwrap_or_else(|response| response),
        };
        if let Fault::Slow(delay) = fault {
            let left = pending.claimed.deadline.saturating_duration_since(Instant::now());
            thread::sleep(delay.min(left));
            if delay >= left {
                // Sends nothing, because the frontend answers 503 at the deadline.
                return;
            }
        }
        pending.cut_at_byte = match fault {
            Fault::AnswerLost | Fault::Refused => Some(0),
            Fault::Cut(bytes) => Some(bytes),
            Fault::Unavailable | Fault::Slow(_) => None,
        };
        dispatcher.send_answer(&mut pending, response, MAX_MEMORY_WAIT);
    });
}

/// Starts a thread that calls `work`, so that no worker has to wait for it. Logs an error if no thread can be started.
fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.to_owned()).spawn(work) {
        log::error!("no thread for a {name} can be started: {error}");
    }
}
