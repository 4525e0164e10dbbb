//! The fixed pool of workers: they receive requests from tiny_http, have them judged, and execute what the scheduler
//! says; one log line a request.
//!
//! The highest module that knows tiny_http's types; everything it calls sees [`Request`] and [`Response`].
//!
//! Idle workers block in tiny_http's queue, which wakes one of them for a request: that worker executes it itself, so a
//! lone request takes no further hand-over. There are as many as the scheduler says ([`Scheduler::receivers`]); the other
//! idle ones wait until one is missing. While as many short batches are in flight as pay, none is there: the worker whose
//! batch ends next receives whatever has come meanwhile as one batch. There is one worker more than may execute
//! statements, so that one is always left to receive, judge and refuse. Passwords are hashed by threads of their own,
//! because each takes a core for some 20 ms.

mod answering;
mod idling;
mod job;
mod receiving;

use super::{
    cores::{Cores, Placement},
    scheduler::{Batch, Capacity, Item, Next, Scheduler},
};
use crate::{
    app::{self, App, Command, Step},
    budget::{Purpose, Reservation},
    error::Error,
    frontend::Responder,
    http::RequestId,
    metrics::Recorder,
};
use answering::guard;
use job::Job;
use std::{
    io, mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, atomic::AtomicUsize, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Of a worker, in bytes. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

/// Commands queued before the first check whether clients still wait for them.
const FEW: usize = 64;

/// How long threads that were not stopped in order may take to end.
const LAST_WORK: Duration = Duration::from_millis(300);

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
    on_idle: Option<fn()>,
}

/// Has each of the threads call `on_idle`.
pub struct IdleWorkers(Weak<Shared>);

impl IdleWorkers {
    /// Wakes them for that, and returns at once.
    pub fn call(&self) {
        if let Some(shared) = self.0.upgrade() {
            let mut state = shared.state();
            state.idle_calls += 1;
            shared.parked.notify_all();
            shared.hash.notify_all();
            shared.unblock(&state);
        }
    }
}

struct State {
    scheduler: Scheduler<Job>,
    placement: Placement,
    /// Commands that are queued or in flight.
    unanswered: usize,
    /// How many batches were started.
    batches: u64,
    /// Workers in tiny_http's queue.
    receiving: usize,
    /// Workers that are parked.
    parked: usize,
    /// Whether one of them checks every [`TICK`].
    ticking: bool,
    /// When an idle worker wakes by itself, because something is due then.
    wakes_at: Option<Instant>,
    /// How many commands may be queued before those are dropped that no client waits for.
    most_queued: usize,
    /// How often the threads were asked to call `on_idle`.
    idle_calls: u64,
    stopping: bool,
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
        on_idle: Option<fn()>,
    ) -> io::Result<Workers> {
        let now = Instant::now();
        let state = State {
            scheduler: Scheduler::new(capacity, now),
            placement: Placement::new(now),
            unanswered: 0,
            batches: 0,
            receiving: 0,
            parked: 0,
            ticking: false,
            wakes_at: None,
            most_queued: FEW,
            idle_calls: 0,
            stopping: false,
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
            on_idle,
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

    /// What has the threads call `on_idle`.
    pub fn idle(&self) -> IdleWorkers {
        IdleWorkers(Arc::downgrade(&self.shared))
    }

    /// Ends the threads once they have answered what was queued, and waits for them up to `timeout`. Those
    /// that are stuck for longer are left behind.
    pub fn stop(mut self, timeout: Duration) {
        self.end(timeout);
    }

    fn end(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.state().stopping = true;
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
        let recorder = shared.app.metrics().recorder();
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
        if !self.threads.is_empty() {
            self.end(LAST_WORK);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, recorder: &Recorder) {
        self.cores.add_this_thread(false);
        let mut state = self.state();
        let mut idle_calls = 0;
        loop {
            state = self.idle_in_turn(state, &mut idle_calls);
            let now = Instant::now();
            state.scheduler.set_memory(self.app.budget().available());
            match state.scheduler.next(now) {
                Next::Run(batch) => {
                    let held = self.reserve(batch.memory);
                    if held.is_some() {
                        self.app.budget().set_work_waits(state.scheduler.is_short_of_memory());
                    }
                    state.batches += 1;
                    self.wake_for_the_rest(&mut state, now);
                    drop(state);
                    state = self.execute(batch, held, recorder);
                }
                Next::Wait(_) if !state.stopping && state.scheduler.is_short_of_memory() => {
                    self.app.budget().set_work_waits(true);
                    self.app.budget().report_shortage();
                    let at = state.scheduler.next_time(now);
                    state = match state.receiving == 0 {
                        true => self.receive(state, at, recorder),
                        false => self.park_until_due(state),
                    };
                }
                Next::Wait(_) if state.stopping && state.scheduler.is_idle() => {
                    drop(state);
                    return self.wake_all();
                }
                Next::Wait(_) if state.stopping => state = self.park(state, None),
                Next::Wait(at) if state.receiving < state.scheduler.receivers(now) => {
                    state = self.receive(state, at, recorder);
                }
                // The one whose batch ends next receives; one of the others checks on it.
                Next::Wait(_) if state.scheduler.is_short() && !state.ticking => {
                    state = self.tick(state, recorder);
                }
                Next::Wait(_) => state = self.park_until_due(state),
            }
        }
    }

    fn hash(&self, recorder: &Recorder) {
        let mut state = self.state();
        let mut idle_calls = 0;
        loop {
            state = self.idle(state, &mut idle_calls);
            if let Some(batch) = state.scheduler.next_hash(Instant::now()) {
                drop(state);
                state = self.execute(batch, None, recorder);
                let now = Instant::now();
                if state.scheduler.is_ready(now) {
                    self.wake_one(&mut state);
                }
            } else if state.stopping && state.scheduler.is_idle() {
                drop(state);
                return self.wake_all();
            } else {
                state = self.hash.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Counts the memory that a batch needs. The scheduler has seen that it is free.
    fn reserve(&self, bytes: usize) -> Option<Reservation> {
        (bytes > 0).then(|| self.app.budget().count(Purpose::Work, bytes))
    }

    /// Executes a batch and answers what is done; what is not is queued for its next step. `held` is the memory that is
    /// reserved for it: answers keep their part.
    fn execute(
        &self,
        batch: Batch<Job>,
        mut held: Option<Reservation>,
        recorder: &Recorder,
    ) -> MutexGuard<'_, State> {
        let Batch { lane, mut items, token, .. } = batch;
        let mut ended = Vec::new();
        // A client that has been answered 503 has given the request up, or retries it: do not execute it.
        // For reads by id the check costs more than it saves.
        if lane != app::Lane::Find {
            let (awaited, abandoned) =
                items.into_iter().partition(|item| !self.responder.abandoned(item.work.slot));
            items = awaited;
            ended = abandoned;
        }
        let deadlines: Vec<Instant> = items.iter().map(|item| item.work.deadline).collect();
        let commands: Vec<Command> = items.iter_mut().filter_map(|item| item.work.command.take()).collect();
        let only = match &items[..] {
            [item] => Some(&item.work.id),
            _ => None,
        };
        let steps = match commands.is_empty() {
            true => Vec::new(),
            false => {
                recorder.batch(lane as usize, commands.len());
                self.steps(lane, commands, &deadlines, only)
            }
        };
        let mut unfinished: Vec<(Item<Job>, bool)> = Vec::new();
        let mut atypical = steps.is_empty();
        for (mut item, step) in items.into_iter().zip(steps) {
            match step {
                Step::Done(response) => {
                    let part = held.as_mut().map(|held| held.split(response.memory()));
                    self.answer(&mut item.work, response, part, recorder);
                    ended.push(item);
                }
                Step::Failed(error) => {
                    self.refuse(&mut item.work, error, recorder);
                    ended.push(item);
                }
                Step::Next(command) => {
                    item.work.command = Some(command);
                    unfinished.push((item, false));
                }
                Step::Contended(command) => {
                    atypical = true;
                    item.work.command = Some(command);
                    unfinished.push((item, true));
                }
            }
        }
        let now = Instant::now();
        let mut given_up = Vec::new();
        let mut state = self.state();
        state.scheduler.finished(token, atypical, now);
        state.unanswered -= ended.len();
        for item in &ended {
            state.scheduler.done(item);
        }
        for (item, contended) in unfinished {
            if contended {
                match state.scheduler.push_again(item, now) {
                    Ok(()) => recorder.lock_retry(),
                    Err(item) => given_up.push(item),
                }
            } else if let Some(command) = &item.work.command {
                let needs = command.needs();
                state.scheduler.push_next(item, needs);
            }
        }
        if state.scheduler.hash_is_ready() {
            self.hash.notify_one();
        }
        state.unanswered -= given_up.len();
        for mut item in given_up {
            self.refuse(&mut item.work, Error::Contended, recorder);
            state.scheduler.done(&item);
        }
        state
    }

    /// The outcomes of commands; a panic is an answer to each. `only` is the request's id where there is one command.
    fn steps(
        &self,
        lane: app::Lane,
        commands: Vec<Command>,
        deadlines: &[Instant],
        only: Option<&RequestId>,
    ) -> Vec<Step> {
        let count = commands.len();
        guard(only, || self.app.execute(lane, commands, deadlines))
            .unwrap_or_else(|response| (0..count).map(|_| Step::Done(response.clone())).collect())
    }
}
