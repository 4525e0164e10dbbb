//! The fixed pool of workers: they receive requests from tiny_http, have them judged, and execute what the scheduler
//! says; one log line a request.
//!
//! The only module that handles `tiny_http::Request`; everything it calls sees the service's own [`Request`] and
//! [`Response`].
//!
//! Idle workers wait for a request: at most two in tiny_http's queue, the others on a condition variable ([`roles`]).
//! The worker that receives a request can execute it itself, which saves a lone request a hand-over. There is one
//! worker more than may execute statements, so that one is always left to receive, judge and refuse. Passwords are
//! hashed by threads of their own, because each takes a core for some 20 ms.

mod answering;
mod job;
mod receiving;
mod roles;
mod waiting;

use super::{
    LAST_WORK,
    cores::{Cores, Placement},
    scheduler::{Batch, Capacity, Next, Scheduler},
};
use crate::{
    app::{App, Progress},
    budget::{Purpose, Reservation},
    error::Error,
    frontend::Responder,
    metrics::Recorder,
};
use answering::guard;
use job::Job;
use parking_lot::{Condvar, Mutex, MutexGuard};
use roles::{Role, Roles};
use std::{
    io, mem,
    sync::{Arc, atomic::AtomicUsize, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Of a worker, in bytes. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

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
    /// How many workers were told to leave tiny_http's queue and have not yet.
    unblocks: AtomicUsize,
    responder: Responder,
    app: Arc<App>,
    cores: Arc<Cores>,
    state: Mutex<State>,
    /// Workers that do not wait in tiny_http's queue.
    parked: Condvar,
    /// The same for the threads that hash.
    hash: Condvar,
}

struct State {
    scheduler: Scheduler<Job>,
    placement: Placement,
    /// Commands that are queued or in flight.
    unanswered: usize,
    roles: Roles,
    /// How many commands may be queued before those are dropped that no client waits for.
    most_queued: usize,
}

impl Workers {
    /// Starts the threads: one more than may execute statements, and those that hash. Errors: the system has no more
    /// threads; those that were started are ended.
    pub fn start(
        server: tiny_http::Server,
        responder: Responder,
        app: Arc<App>,
        cores: Arc<Cores>,
        capacity: Capacity,
    ) -> io::Result<Workers> {
        let now = Instant::now();
        let state = State {
            scheduler: Scheduler::new(capacity, now),
            placement: Placement::new(now),
            unanswered: 0,
            roles: Roles::default(),
            most_queued: FEW,
        };
        let shared = Arc::new(Shared {
            server,
            unblocks: AtomicUsize::new(0),
            responder,
            app,
            cores,
            state: Mutex::new(state),
            parked: Condvar::new(),
            hash: Condvar::new(),
        });
        let (end, ended) = mpsc::channel();
        let mut workers_started = Workers { shared, threads: Vec::new(), end, ended };
        for n in 0..capacity.hashes {
            workers_started.spawn(&format!("hasher-{n}"), Shared::hash)?;
        }
        for n in 0..=capacity.statements {
            workers_started.spawn(&format!("worker-{n}"), Shared::work)?;
        }
        Ok(workers_started)
    }

    /// Ends the threads once they have answered what was queued, and waits for them up to `timeout`. Those
    /// that are stuck for longer are left behind.
    pub fn stop(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.state.lock().roles.stop();
        self.shared.wake_all();
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
    fn spawn(&mut self, name: &str, body: fn(&Shared, &Recorder)) -> io::Result<()> {
        let (shared, end) = (self.shared.clone(), self.end.clone());
        let recorder = shared.app.metrics.recorder();
        let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK).spawn(move || {
            while guard(None, || body(&shared, &recorder)).is_err() {}
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
    fn work(&self, recorder: &Recorder) {
        self.cores.add_this_thread();
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            state.scheduler.set_memory(self.app.budget.available());
            let due = match state.scheduler.next(now) {
                Next::Run(batch) => {
                    // The scheduler has seen that it is free.
                    let held = (batch.memory > 0).then(|| {
                        self.app.budget.set_work_waits(state.scheduler.is_short_of_memory());
                        self.app.budget.count(Purpose::Work, batch.memory)
                    });
                    let (is_ready, due) = (state.scheduler.is_ready(now), state.scheduler.next_time(now));
                    let ends_soon = state.scheduler.ends_by(now).is_some();
                    self.wake(state.roles.wake_for_the_rest(is_ready, ends_soon, due));
                    drop(state);
                    state = self.execute(batch, held, recorder);
                    continue;
                }
                Next::Wait(due) => due,
            };
            if state.scheduler.is_short_of_memory() {
                self.app.budget.set_work_waits(true);
                self.app.budget.report_shortage();
            }
            let (ends_soon, is_idle) = (state.scheduler.ends_by(now).is_some(), state.scheduler.is_idle());
            match state.roles.rest(due, ends_soon, is_idle) {
                Role::Receive(until) => {
                    drop(state);
                    state = self.receive(until, recorder);
                }
                Role::Park(until) => self.park(&mut state, until),
                Role::End => {
                    drop(state);
                    return self.wake_all();
                }
            }
        }
    }

    fn hash(&self, recorder: &Recorder) {
        let mut state = self.state.lock();
        loop {
            if let Some(batch) = state.scheduler.next_hash(Instant::now()) {
                drop(state);
                state = self.execute(batch, None, recorder);
                if state.scheduler.is_ready(Instant::now()) {
                    self.wake(state.roles.wake());
                }
            } else if state.roles.is_stopping() && state.scheduler.is_idle() {
                drop(state);
                return self.wake_all();
            } else {
                self.hash.wait(&mut state);
            }
        }
    }

    /// Executes a batch and answers what is done; what is not is queued for its next step. `held` is the memory that is
    /// reserved for it: answers keep their part.
    fn execute(
        &self,
        batch: Batch<Job>,
        mut held: Option<Reservation>,
        recorder: &Recorder,
    ) -> MutexGuard<'_, State> {
        let Batch { lane, items, token, .. } = batch;
        // A client that has been answered 503 has given the request up, or retries it: do not execute it.
        let (mut items, mut ended): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|item| self.responder.begin(item.work.slot));
        let tasks = items.iter_mut().filter_map(|item| Some((item.work.task.take()?, item.work.deadline)));
        let (tasks, deadlines): (Vec<_>, Vec<_>) = tasks.unzip();
        let count = tasks.len();
        if count > 0 {
            recorder.batch(lane as usize, count);
        }
        // A panic is an answer to each.
        let only = items.first().filter(|_| count == 1).map(|item| &item.work.id);
        let outcomes = guard(only, || self.app.execute(tasks, &deadlines))
            .unwrap_or_else(|response| (0..count).map(|_| Ok(Progress::Done(response.clone()))).collect());
        let (mut unfinished, mut contended) = (Vec::new(), Vec::new());
        for (mut item, outcome) in items.into_iter().zip(outcomes) {
            match outcome {
                Ok(Progress::Done(response)) => {
                    let part = held.as_mut().map(|held| held.split(response.memory()));
                    self.answer(&mut item.work, response, part, recorder);
                    ended.push(item);
                }
                Err(error) => {
                    self.refuse(&mut item.work, error, recorder);
                    ended.push(item);
                }
                Ok(Progress::Next(step)) => {
                    item.work.task = Some(step.task);
                    unfinished.push((item, step.needs));
                }
                Ok(Progress::Contended(task)) => {
                    item.work.task = Some(task);
                    contended.push(item);
                }
            }
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        state.scheduler.finished(token, count == 0 || !contended.is_empty(), now);
        for (item, needs) in unfinished {
            state.scheduler.push_next(item, needs);
        }
        for item in contended {
            match state.scheduler.push_again(item, now) {
                Ok(()) => recorder.lock_retries.add(1),
                Err(mut item) => {
                    self.refuse(&mut item.work, Error::Contended, recorder);
                    ended.push(item);
                }
            }
        }
        if state.scheduler.hash_is_ready() {
            self.hash.notify_one();
        }
        state.unanswered -= ended.len();
        for item in &ended {
            state.scheduler.done(item);
        }
        state
    }
}
