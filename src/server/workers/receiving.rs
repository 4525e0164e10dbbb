//! From tiny_http's queue to the lanes: requests are received, judged, and queued as commands.

use super::{FEW, Job, Shared, State, faults::fail, guard};
use crate::{
    app::Needs,
    config::counted_as,
    error::{Error, Reason},
    frontend::Claimed,
    http::{Method, Request},
};
use parking_lot::MutexGuard;
use std::{sync::Arc, time::Instant};

/// Requests, and bytes of their bodies, that are judged before they are queued: then other workers may execute them.
const RECEIVE_REQUESTS: usize = 256;
const RECEIVE_BYTES: usize = 256 << 10;
/// Requests that are answered at once meanwhile: those that were judged before wait for them.
const RECEIVE_ANSWERED: usize = 8;

impl Shared {
    /// Waits for a request, at most until that time. Judges it, and those that are there behind it; answers those that
    /// need no database.
    pub(super) fn receive(self: &Arc<Self>, until: Option<Instant>) -> Vec<(Job, Needs)> {
        let mut next = match until {
            None => self.server.recv().ok(),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.server.recv_timeout(time).ok().flatten()
            }
        };
        let received = Instant::now();
        let mut judged = Vec::new();
        let (mut bytes, mut answered) = (0, 0);
        while let Some(incoming) = next {
            if let Ok(Some((mut job, request))) = guard(None, || self.accept(incoming, received)) {
                bytes += request.body.len();
                let id = Some(&job.id);
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
            if judged.len() >= RECEIVE_REQUESTS || bytes >= RECEIVE_BYTES || answered >= RECEIVE_ANSWERED {
                break;
            }
            next = self.server.try_recv().ok().flatten();
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
        let claimed = self.responder.claim(slot);
        let method = incoming.method().as_str();
        let (method, name) = (Method::from(method), Method::from(method).shown(method));
        let headers = incoming.headers().iter();
        let mut request = Request {
            method,
            target: target.to_owned(),
            headers: headers.map(|header| (header.field.to_string(), header.value.to_string())).collect(),
            body: Vec::with_capacity(incoming.body_length().unwrap_or_default()),
            peer: claimed.as_ref().and_then(|claimed| claimed.slot.peer()),
        };
        // The frontend sends whole requests over a stream of our own, so this does not block; and what is not
        // read here, tiny_http would drain.
        let body = incoming.as_reader().read_to_end(&mut request.body);
        // Dropped unused: the answer goes to the slot.
        drop(incoming.into_writer());
        let Claimed { slot, id, deadline, held } = claimed.filter(|_| body.is_ok())?;
        let path = request.path().to_owned();
        let token = self.app.rights(&request).unwrap_or_default();
        let job = Job { command: None, slot, id, received, deadline, method, name, path, token, held };
        match self.faults.as_ref().and_then(|faults| faults(&request)) {
            None => Some((job, request)),
            Some(fault) => {
                fail(Arc::clone(self), fault, job, request);
                None
            }
        }
    }

    /// Queues commands.
    pub(super) fn push(&self, state: &mut MutexGuard<'_, State>, judged: Vec<(Job, Needs)>) {
        let (mut refused, now) = (Vec::new(), Instant::now());
        for (job, needs) in judged {
            let peer = job.slot.peer().map(counted_as);
            let too_many = state.lanes.push(job, needs, peer, now);
            refused.extend(too_many.map(|job| (job, Error::Busy(Reason::TooManyHashes))));
        }
        // Clients that give up and retry would let the queue grow without limit.
        if state.lanes.len() > state.most_queued {
            state.lanes.retain(|job| !self.responder.abandoned(job.slot));
            state.most_queued = FEW.max(2 * state.lanes.len());
        }
        self.refuse_all(state, refused);
    }

    /// Answers commands that are given up, and holds no lock meanwhile.
    pub(super) fn refuse_all(&self, state: &mut MutexGuard<'_, State>, refused: Vec<(Job, Error)>) {
        if refused.is_empty() {
            return;
        }
        MutexGuard::unlocked(state, || {
            for (mut job, error) in refused {
                self.refuse(&mut job, error);
            }
        });
    }
}
