//! The fixed pool of workers: they receive requests from tiny_http, have them judged, and execute what the scheduler
//! says; one log line a request.
//!
//! The highest module that knows tiny_http's types; everything it calls sees [`Request`] and [`Response`].
//!
//! Idle workers block in tiny_http's queue, which wakes one of them for a request: that worker executes it itself, so a
//! lone request takes no further hand-over. While short batches are in flight the idle ones leave that queue and wait
//! ([`Scheduler::ends_soon`]): the worker whose batch ends receives whatever has come meanwhile as one batch. There is
//! one worker more than may execute statements, so that one is always left to receive, judge and refuse. Passwords are
//! hashed by threads of their own, because each takes a core for some 20 ms.

mod receiving;

use super::{
    cores::{Cores, Placement},
    scheduler::{Batch, Capacity, Item, Next, Scheduler},
};
use crate::{
    app::{self, App, Command, Step},
    error::Error,
    frontend::{Responder, Slot},
    http::{Method, Response},
    memory::{Budget, Purpose, Reservation},
    metrics::{Kind, Recorder, Text},
    request_id::RequestId,
};
use std::{
    borrow::Cow,
    fmt, io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How often one idle worker checks on a short batch in flight, in case that it takes longer than expected.
const TICK: Duration = Duration::from_millis(1);

/// Ticks without a batch after which it stops checking, until another worker wakes it.
const QUIET_TICKS: u32 = 20;

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
            shared.unblocks.fetch_add(state.receiving, Ordering::Relaxed);
            drop(state);
            shared.wake_all();
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

/// A request that is queued or in flight.
struct Job {
    /// `None` while it is executed.
    command: Option<Command>,
    slot: Slot,
    id: RequestId,
    received: Instant,
    method: Method,
    /// The method's name for the log.
    name: Cow<'static, str>,
    path: String,
    /// The memory of its request, and then of its answer.
    held: Option<Reservation>,
}

impl Job {
    /// Counts what it holds beside its request.
    fn hold(&mut self, bytes: usize, budget: &Budget) {
        if bytes > 0 {
            let held = self.held.get_or_insert_with(|| budget.count(Purpose::Body, 0));
            held.set(held.bytes() + bytes);
        }
    }
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

    /// Writes what is queued.
    pub fn figures(&self) -> impl Fn(&mut Text) + Send + 'static {
        // It belongs to the figures, and these to what the threads share.
        let shared = Arc::downgrade(&self.shared);
        move |text| {
            let Some(shared) = shared.upgrade() else {
                return;
            };
            let state = shared.state();
            let (queued, hashes) = (state.scheduler.len(), state.scheduler.hashes_waiting());
            drop(state);
            text.gauge("userd_commands_queued", "Commands that wait for a worker or a retry.", queued);
            text.gauge("userd_hashes_waiting", "Passwords that wait to be hashed or checked.", hashes);
            let (connections, most) = shared.responder.connections();
            text.family(
                "userd_http_connections",
                Kind::Gauge,
                "Connections of clients, by what they are doing.",
            );
            connections.for_each(|(state, count)| text.value(&[("state", state)], count));
            text.gauge("userd_http_connections_max", "The most connections of clients at once.", most);
        }
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

impl State {
    /// One idle worker wakes by itself when something is due: this one, if no other does by then. Returns when.
    fn keep_time(&mut self, due: Option<Instant>) -> Option<Instant> {
        let at = due.filter(|due| self.wakes_at.is_none_or(|earlier| *due < earlier));
        self.wakes_at = at.or(self.wakes_at);
        at
    }

    /// It is awake.
    fn kept_time(&mut self, at: Option<Instant>) {
        if at.is_some() && self.wakes_at == at {
            self.wakes_at = None;
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, recorder: &Recorder) {
        self.cores.add_this_thread();
        let mut state = self.state();
        let mut idle_calls = 0;
        loop {
            state = self.idle(state, &mut idle_calls);
            let now = Instant::now();
            state.scheduler.set_memory(self.app.budget().available());
            match state.scheduler.next(now) {
                Next::Run(batch) => {
                    let held = self.reserve(batch.memory);
                    state.batches += 1;
                    self.wake_for_the_rest(&mut state, now);
                    drop(state);
                    state = self.execute(batch, held, recorder);
                }
                Next::Wait(_) if !state.stopping && state.scheduler.is_short_of_memory() => {
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
                Next::Wait(at) if state.receiving == 0 && !state.scheduler.ends_soon() => {
                    state = self.receive(state, at, recorder);
                }
                // Where batches are short, one worker receives, or the one whose batch ends next.
                Next::Wait(_) if state.scheduler.is_short() => {
                    state = match state.ticking {
                        true => self.park_until_due(state),
                        false => self.tick(state, recorder),
                    };
                }
                Next::Wait(at) => state = self.receive(state, at, recorder),
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

    /// Calls `on_idle` where that was asked for since this thread last did.
    fn idle<'a>(&'a self, state: MutexGuard<'a, State>, calls: &mut u64) -> MutexGuard<'a, State> {
        if state.idle_calls == *calls {
            return state;
        }
        *calls = state.idle_calls;
        drop(state);
        if let Some(on_idle) = self.on_idle {
            on_idle();
        }
        self.state()
    }

    /// Before a worker executes a batch: wakes another one if a second batch is ready, or if no worker receives, or will
    /// wake when something is due.
    fn wake_for_the_rest(&self, state: &mut State, now: Instant) {
        let watched = state.receiving > 0 || (state.ticking && state.scheduler.ends_soon());
        let timed = state.wakes_at.is_some() || state.scheduler.next_time(now).is_none();
        if !watched || !timed || state.scheduler.is_ready(now) {
            self.wake_one(state);
        }
    }

    /// Wakes an idle worker, if there is one.
    fn wake_one(&self, state: &mut State) {
        if state.parked > 0 {
            self.parked.notify_one();
        } else if state.receiving > 0 {
            self.unblocks.fetch_add(1, Ordering::Relaxed);
            self.server.unblock();
        }
    }

    fn wake_all(&self) {
        let receiving = self.state().receiving;
        self.parked.notify_all();
        self.hash.notify_all();
        for _ in 0..receiving {
            self.server.unblock();
        }
    }

    /// Waits until it is woken, or for a time.
    fn park<'a>(&self, mut state: MutexGuard<'a, State>, time: Option<Duration>) -> MutexGuard<'a, State> {
        state.parked += 1;
        let mut state = match time {
            None => self.parked.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(time) => self.parked.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0,
        };
        state.parked -= 1;
        state
    }

    /// Checks on short batches for as long as there are some: where one has not ended in time, this worker receives the
    /// requests that have arrived meanwhile.
    fn tick<'a>(&'a self, mut state: MutexGuard<'a, State>, recorder: &Recorder) -> MutexGuard<'a, State> {
        let mut quiet = 0;
        while quiet < QUIET_TICKS {
            let before = state.batches;
            state.ticking = true;
            state = self.park(state, Some(TICK));
            state.ticking = false;
            quiet = if state.batches == before { quiet + 1 } else { 0 };
            if state.scheduler.is_ready(Instant::now()) || state.stopping {
                return state;
            }
            if state.receiving == 0 && !state.scheduler.ends_soon() {
                return state;
            }
            if state.receiving == 0 && state.batches == before {
                drop(state);
                let judged = self.judge(self.try_receive(), recorder);
                return self.push(self.state(), judged, recorder);
            }
        }
        self.park_until_due(state)
    }

    /// Waits until it is woken, or until something is due where no other worker wakes by then.
    fn park_until_due<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let now = Instant::now();
        let due = state.scheduler.next_time(now);
        let at = state.keep_time(due);
        let mut state = self.park(state, at.map(|at| at.saturating_duration_since(now)));
        state.kept_time(at);
        state
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
        let commands: Vec<Command> = items.iter_mut().filter_map(|item| item.work.command.take()).collect();
        let only = match &items[..] {
            [item] => Some(&item.work.id),
            _ => None,
        };
        let steps = match commands.is_empty() {
            true => Vec::new(),
            false => {
                recorder.batch(lane as usize, commands.len());
                self.steps(lane, commands, only)
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
                    item.work.hold(command.held(), self.app.budget());
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
                let (lane, memory) = (command.lane(), self.app.memory_of(command));
                state.scheduler.push_next(item, lane, memory);
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
    fn steps(&self, lane: app::Lane, commands: Vec<Command>, only: Option<&RequestId>) -> Vec<Step> {
        let count = commands.len();
        guard(only, || self.app.execute(lane, commands))
            .unwrap_or_else(|response| (0..count).map(|_| Step::Done(response.clone())).collect())
    }

    /// Answers with an error, and logs it.
    fn refuse(&self, job: &mut Job, error: Error, recorder: &Recorder) {
        let id = Some(&job.id);
        let response = guard(id, || error.into_response(id)).unwrap_or_else(|response| response);
        self.answer(job, response, None, recorder);
    }

    /// Sends an answer. The memory that is reserved for it is that of its request, unless it is given.
    fn answer(&self, job: &mut Job, response: Response, held: Option<Reservation>, recorder: &Recorder) {
        let held = held.or_else(|| job.held.take());
        let (status, took) = (response.status, job.received.elapsed());
        let sent = guard(Some(&job.id), || self.responder.answer(job.slot, response, held)).unwrap_or(None);
        let Job { name, path, id, .. } = job;
        let milliseconds = took.as_secs_f64() * 1000.0;
        let delivery: &dyn fmt::Display = match &sent {
            Some(delivery) => {
                recorder.request(job.method, app::label(path), status, took);
                delivery
            }
            // The frontend has answered it, and counted that.
            None => &"not awaited",
        };
        log::info!(
            method = name.as_ref(), path = path.as_str(), status = status, duration_ms = milliseconds,
            bytes = sent.map_or(0, |delivery| delivery.taken), request_id:% = id;
            "{name} {path} {status} {milliseconds:.1}ms {delivery}"
        );
    }
}

/// Runs `work`; a panic in it is logged, and is the answer 500. `request` is the id of the request that it is done for,
/// where there is one.
fn guard<T>(request: Option<&RequestId>, work: impl FnOnce() -> T) -> Result<T, Response> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Error::Internal(format!("panic: {}", text.unwrap_or("of an unknown kind"))).into_response(request)
    })
}
