//! From tiny_http's queue to the scheduler: requests are received, judged, and queued as commands.

use super::{FEW, Job, Role, Shared, State, guard};
use crate::{
    app::{Needs, Step},
    config::counted_as,
    error::{Error, Reason},
    http::{Method, Request},
    metrics::Recorder,
};
use parking_lot::MutexGuard;
use std::{sync::atomic::Ordering, time::Instant};

/// Requests, and bytes of their bodies, that are judged before they are queued: then other workers may execute them.
const RECEIVE_REQUESTS: usize = 256;
const RECEIVE_BYTES: usize = 256 << 10;
/// Requests that are answered at once meanwhile: those that were judged before wait for them.
const RECEIVE_ANSWERED: usize = 8;

impl Shared {
    /// Waits for a request, at most until that time. Judges it, and those that are there behind it; answers those that
    /// need no database, and queues the others.
    pub(super) fn receive(&self, until: Option<Instant>, recorder: &Recorder) -> MutexGuard<'_, State> {
        let first = match until {
            None => self.server.recv().ok(),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.server.recv_timeout(time).ok().flatten()
            }
        };
        let mut next = first.or_else(|| self.try_receive());
        let received = Instant::now();
        let mut judged = Vec::new();
        let (mut bytes, mut answered) = (0, 0);
        while let Some(incoming) = next {
            if let Ok(Some((mut job, request))) = guard(None, || self.accept(incoming, received)) {
                bytes += request.body.len();
                let id = Some(&job.id);
                match guard(id, || self.app.judge(&request, id)).unwrap_or_else(Err) {
                    Ok(Step { needs, task }) => {
                        job.task = Some(task);
                        judged.push((job, needs));
                    }
                    Err(answer) => {
                        self.answer(&mut job, answer, None, recorder);
                        answered += 1;
                    }
                }
            }
            if judged.len() >= RECEIVE_REQUESTS || bytes >= RECEIVE_BYTES || answered >= RECEIVE_ANSWERED {
                break;
            }
            next = self.try_receive();
        }
        let mut state = self.state.lock();
        state.roles.returned(Role::Receive(until));
        self.push(state, judged, recorder)
    }

    /// A request that is there. tiny_http answers a worker that was told to leave its queue as if it were empty.
    fn try_receive(&self) -> Option<tiny_http::Request> {
        loop {
            let found = self.server.try_recv().ok().flatten();
            let less = |count: usize| count.checked_sub(1);
            if found.is_some()
                || self.unblocks.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err()
            {
                return found;
            }
        }
    }

    /// The request, and a job for it; `None` where no client waits for its answer any more.
    fn accept(&self, mut incoming: tiny_http::Request, received: Instant) -> Option<(Job, Request)> {
        let (target, slot) = incoming.url().rsplit_once('#').unwrap_or_default();
        let (claimed, held) = self.responder.claim(slot);
        let method = incoming.method().as_str();
        let (method, name) = (Method::from(method), Method::from(method).shown(method));
        let headers = incoming.headers().iter();
        let mut request = Request {
            method,
            target: target.to_owned(),
            headers: headers.map(|header| (header.field.to_string(), header.value.to_string())).collect(),
            body: Vec::with_capacity(incoming.body_length().unwrap_or_default()),
            peer: claimed.as_ref().and_then(|(slot, ..)| slot.peer()),
        };
        // The frontend sends whole requests over a stream of our own, so this does not block; and what is not
        // read here, tiny_http would drain.
        let body = incoming.as_reader().read_to_end(&mut request.body);
        // Dropped unused: the answer goes to the slot.
        drop(incoming.into_writer());
        let (slot, id, deadline) = claimed.filter(|_| body.is_ok())?;
        let path = request.path().to_owned();
        Some((Job { task: None, slot, id, received, deadline, method, name, path, held }, request))
    }

    fn push<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        judged: Vec<(Job, Needs)>,
        recorder: &Recorder,
    ) -> MutexGuard<'a, State> {
        let mut refused = Vec::new();
        let now = Instant::now();
        for (job, needs) in judged {
            let peer = job.slot.peer().map(counted_as);
            match state.scheduler.push(job, needs, peer, now) {
                Ok(()) => state.unanswered += 1,
                Err(job) => refused.push(job),
            }
        }
        let one_suffices = state.scheduler.one_core_suffices(state.unanswered);
        self.cores.place(&mut state.placement, one_suffices, now);
        // Clients that give up and retry would let the queue grow without limit.
        if state.scheduler.len() > state.most_queued {
            let queued = state.scheduler.len();
            state.scheduler.retain(|job| !self.responder.abandoned(job.slot));
            state.unanswered -= queued - state.scheduler.len();
            state.most_queued = FEW.max(2 * state.scheduler.len());
        }
        if state.scheduler.hash_is_ready() {
            self.hash.notify_one();
        }
        if refused.is_empty() {
            return state;
        }
        drop(state);
        for mut job in refused {
            recorder.refused(Reason::TooManyHashes);
            self.refuse(&mut job, Error::Busy(Reason::TooManyHashes), recorder);
        }
        self.state.lock()
    }
}
