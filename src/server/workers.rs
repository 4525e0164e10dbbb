//! The threads that answer requests: they receive them from tiny_http, have them judged, and execute batches of
//! commands. One log line a request.
//!
//! The only module that handles `tiny_http::Request`; everything it calls sees the service's own [`Request`] and
//! [`Response`](crate::http::Response).
//!
//! Workers follow the pattern Leader/Followers: two wait in tiny_http's queue, and the one that gets a request goes on
//! to execute it, which saves a lone request a hand-over. While all sessions are in use, two workers are left to
//! receive and refuse. Passwords are hashed by threads of their own, as each takes a core for some 20 ms.

mod answering;
mod faults;
mod receiving;

use super::{
    LAST_WORK,
    lanes::{Batch, Capacity, Lanes, Queued},
};
use crate::{
    app::{App, Command},
    budget::Reservation,
    error::{Error, Reason},
    frontend::{Responder, Slot},
    http::{Method, RequestId},
};
use answering::guard;
pub use faults::{Fault, Faults};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    borrow::Cow,
    io, mem,
    sync::{Arc, atomic::Ordering, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Bytes of a thread's stack. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

/// Workers in tiny_http's queue, at most: one for the next request, and one for those that come while it is executed.
const RECEIVERS: usize = 2;

/// Commands queued before the first check whether clients still wait for them.
const FEW: usize = 64;

/// The threads that answer requests. Dropping it stops them.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    end: mpsc::Sender<()>,
    ended: mpsc::Receiver<()>,
}

struct Shared {
    server: tiny_http::Server,
    responder: Responder,
    app: Arc<App>,
    /// `None`: no request fails on command.
    faults: Option<Faults>,
    state: Mutex<State>,
    /// Wakes a worker that neither receives nor executes.
    idle: Condvar,
    /// Wakes a thread that hashes.
    hasher: Condvar,
}

struct State {
    lanes: Lanes<Job>,
    /// Workers in tiny_http's queue.
    receiving: usize,
    /// When a worker without a batch wakes by itself.
    wakes_at: Option<Instant>,
    stopping: bool,
    /// Commands that may be queued before those are dropped that no client waits for.
    most_queued: usize,
}

/// A request that is queued or in flight.
struct Job {
    /// `None` until it is judged.
    command: Option<Command>,
    slot: Slot,
    id: RequestId,
    received: Instant,
    /// When the frontend answers it 503. No change begins for it after that.
    deadline: Instant,
    method: Method,
    /// The method's name for the log.
    name: Cow<'static, str>,
    path: String,
    /// The name of the rights that the token of the request gives; empty without a token.
    token: &'static str,
    /// The memory of its request, and then of its answer.
    held: Option<Reservation>,
}

impl Workers {
    /// Starts the threads. Errors: the system has no more threads; those that were started are ended.
    pub fn start(
        server: tiny_http::Server,
        responder: Responder,
        app: Arc<App>,
        capacity: Capacity,
        faults: Option<Faults>,
    ) -> io::Result<Workers> {
        let lanes = Lanes::new(capacity);
        let state = State { lanes, receiving: 0, wakes_at: None, stopping: false, most_queued: FEW };
        let (state, idle, hasher) = (Mutex::new(state), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { server, responder, app, faults, state, idle, hasher });
        let (end, ended) = mpsc::channel();
        let mut workers = Workers { shared, threads: Vec::new(), end, ended };
        for n in 0..capacity.hashers {
            workers.spawn(&format!("hasher-{n}"), true)?;
        }
        // While a session is free, one of them neither receives nor executes, and can be woken.
        for n in 0..capacity.sessions + RECEIVERS {
            workers.spawn(&format!("worker-{n}"), false)?;
        }
        Ok(workers)
    }

    /// Ends the threads once they have answered what was queued, and waits for them up to `timeout`. Those that are
    /// stuck for longer are left behind.
    pub fn stop(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.state.lock().stopping = true;
        self.shared.wake_all();
        (0..RECEIVERS).for_each(|_| self.shared.server.unblock());
        let threads = mem::take(&mut self.threads);
        for _ in &threads {
            let left = deadline.saturating_duration_since(Instant::now());
            if self.ended.recv_timeout(left).is_err() {
                log::warn!("left a worker behind that did not finish in time");
                return;
            }
        }
        for thread in threads {
            // It has reported its end; a panic in it was logged where it was caught.
            let _ = thread.join();
        }
    }

    /// Starts a thread. A panic in its loop is logged, and the loop is restarted.
    fn spawn(&mut self, name: &str, hashes: bool) -> io::Result<()> {
        let (shared, end) = (self.shared.clone(), self.end.clone());
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(move || {
            while guard(None, || shared.work(hashes)).is_err() {}
            drop(shared);
            let _ = end.send(());
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop(LAST_WORK);
    }
}

impl Shared {
    /// Executes batches, and receives requests meanwhile; returns at a stop when nothing is queued or in flight. A thread
    /// that hashes takes batches of passwords alone and receives nothing.
    fn work(self: &Arc<Self>, hashes: bool) {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            let batch = state.lanes.next(now, hashes);
            self.wake(&state, batch.is_some() || hashes, now);
            if let Some(batch) = batch {
                drop(state);
                state = self.execute(batch);
            } else if state.stopping && state.lanes.is_idle() {
                return self.wake_all();
            } else if hashes {
                let due = state.lanes.next_due(now, true);
                wait(&self.hasher, &mut state, due);
            } else {
                // One worker wakes for what is due: this one, if no other does by then.
                let wakes_at = state.wakes_at;
                let due = state.lanes.next_due(now, false);
                let due = due.filter(|due| wakes_at.is_none_or(|at| *due < at));
                state.wakes_at = due.or(wakes_at);
                if state.receiving < RECEIVERS && !state.stopping {
                    state.receiving += 1;
                    drop(state);
                    let received = self.receive(due);
                    state = self.state.lock();
                    state.receiving -= 1;
                    self.push(&mut state, received);
                } else {
                    wait(&self.idle, &mut state, due);
                }
                if due.is_some() && state.wakes_at == due {
                    state.wakes_at = None;
                }
            }
        }
    }

    /// Wakes a thread that hashes if there is a password; and a worker, if this thread goes on to execute and more is
    /// ready, no worker receives, or none wakes for what is due.
    fn wake(&self, state: &State, executes: bool, now: Instant) {
        let due = state.lanes.next_due(now, false);
        let is_missed = due.is_some_and(|due| state.wakes_at.is_none_or(|at| due < at));
        if executes && (is_missed || state.receiving == 0 || state.lanes.is_ready(now, false)) {
            self.idle.notify_one();
        }
        if state.lanes.is_ready(now, true) {
            self.hasher.notify_one();
        }
    }

    fn wake_all(&self) {
        self.idle.notify_all();
        self.hasher.notify_all();
    }

    /// Executes a batch and answers what is done; what is not is queued again.
    fn execute(&self, batch: Batch<Job>) -> MutexGuard<'_, State> {
        let Batch { lane, commands, token } = batch;
        // A client that was answered 503 has given the request up, or retries it: it is not executed.
        let (mut items, mut ended): (Vec<_>, Vec<_>) =
            commands.into_iter().partition(|item: &Queued<Job>| self.responder.begin(item.work.slot));
        let count = items.len();
        if count > 0 {
            self.app.metrics.batch(lane as usize, count);
        }
        // A panic is an answer to each.
        let only = items.first().filter(|_| count == 1).map(|item| item.work.id.clone());
        let commands =
            items.iter_mut().filter_map(|Queued { work, .. }| Some((work.command.as_mut()?, work.deadline)));
        let outcomes = guard(only.as_ref(), || self.app.execute(commands.collect()))
            .unwrap_or_else(|response| vec![Ok(Some(response)); count]);
        let (mut unfinished, mut contended) = (Vec::new(), Vec::new());
        for (mut item, outcome) in items.into_iter().zip(outcomes) {
            match outcome {
                Ok(Some(response)) => self.answer(&mut item.work, response),
                Ok(None) => {
                    unfinished.push(item);
                    continue;
                }
                Err(Error::Contended) => {
                    contended.push(item);
                    continue;
                }
                Err(error) => self.refuse(&mut item.work, error),
            }
            ended.push(item);
        }
        let now = Instant::now();
        let mut refused = Vec::new();
        let mut state = self.state.lock();
        state.lanes.finished(token, now);
        ended.iter().for_each(|item| state.lanes.done(item));
        for item in unfinished {
            let Some(needs) = item.work.command.as_ref().map(Command::needs) else { continue };
            let too_many = state.lanes.push_next(item, needs);
            refused.extend(too_many.map(|job| (job, Error::Busy(Reason::TooManyHashes))));
        }
        for item in contended {
            match state.lanes.retry(item, now) {
                Ok(()) => drop(self.app.metrics.lock_retries.fetch_add(1, Ordering::Relaxed)),
                Err(item) => {
                    state.lanes.done(&item);
                    refused.push((item.work, Error::Contended));
                }
            }
        }
        self.refuse_all(&mut state, refused);
        state
    }
}

fn wait(condvar: &Condvar, state: &mut MutexGuard<'_, State>, until: Option<Instant>) {
    match until {
        None => condvar.wait(state),
        Some(until) => drop(condvar.wait_until(state, until)),
    }
}
