//! Requests that fail on command, in a service that is thrown away.

use super::{Dispatch, Job, MEMORY_WAIT, guard};
use crate::http::{Request, Response};
use crate::{app::Next, error::Error};
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

/// Chooses the requests that fail.
pub type Faults = Arc<dyn Fn(&Request) -> Option<Fault> + Send + Sync>;

/// Fails a judged request, on a thread of its own: no worker waits for it.
pub(super) fn fail(dispatch: Arc<Dispatch>, fault: Fault, mut job: Box<Job>, next: Next) {
    let work = move || {
        dispatch.slots.begin(job.claimed.slot);
        let id = Some(&job.claimed.id);
        let response = match fault {
            Fault::Refused => Response::no_content(),
            Fault::Unavailable => Error::Unavailable("it fails on command".into()).into_response(id),
            _ => guard(id, || dispatch.app.answer(next)).unwrap_or_else(|response| response),
        };
        if let Fault::Slow(delay) = fault {
            let left = job.claimed.deadline.saturating_duration_since(Instant::now());
            thread::sleep(delay.min(left));
            if delay >= left {
                // The frontend answers.
                return;
            }
        }
        job.cut = match fault {
            Fault::AnswerLost | Fault::Refused => Some(0),
            Fault::Cut(bytes) => Some(bytes),
            Fault::Unavailable | Fault::Slow(_) => None,
        };
        dispatch.answer(&mut job, response, MEMORY_WAIT);
    };
    if let Err(error) = thread::Builder::new().name("fault".to_owned()).spawn(work) {
        log::error!("a request cannot fail on command: {error}");
    }
}
