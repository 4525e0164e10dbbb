//! The threads that answer requests: workers, and hashers, which hash passwords. Workers receive requests from
//! tiny_http, judge them, and execute batches of their commands. Each request gets one log line.
//!
//! This is the only module that handles tickets, the messages by which the frontend hands over requests.
//!
//! Workers follow the pattern Leader/Followers. Each worker does one of three things:
//! - It waits for a ticket in tiny_http's queue. Up to two workers do so. A worker that gets a ticket claims its
//!   requests, judges them, queues their commands, and then executes a batch itself. So a lone request passes from one
//!   thread to another only once: from the frontend to its worker.
//! - It executes a batch. Up to one worker for each session does so. When the statement of the batch has ended, the
//!   worker wakes another one if a next batch is ready, and then writes the answers.
//! - It waits on a condition until another worker wakes it. Because there are two more workers than sessions, at least
//!   one worker waits so while a session is free. Its wait has a time limit only if a retry is due or a batch may get
//!   stuck, so usually it sets no timer.
//!
//! Before a worker begins to receive or to execute, it wakes another worker if a batch is ready, if no worker receives,
//! or if a wait needs a time limit. So no wake-up is lost, and a lone request wakes no further worker. While all
//! sessions are in use, two workers are left to receive requests. Passwords are hashed on threads of their own, because
//! a hash occupies a core for some 20 ms.
//!
//! `catch_panic` catches a panic, so that only the request, batch or answer is lost that has caused it.
#![expect(
    clippy::vec_box,
    reason = "a vector of many large tasks would be mapped and unmapped for each ticket"
)]

mod faults;
mod requests;
#[cfg(test)]
mod tests;

use super::MIN_STOP_WAIT;
use super::lanes::{Batch, Capacity, Lanes, QueuedCommand};
use crate::app::App;
use crate::db::Failure;
use crate::error::{BusyReason, Error};
use crate::http::Response;
use crate::operations::Outcome;
use crate::{frontend::Slots, http::peer_network};
pub use faults::{ControlHandler, Fault, InterceptHook, Interception};
use parking_lot::{Condvar, Mutex, MutexGuard};
use requests::{MAX_MEMORY_WAIT, PendingRequest, Task, catch_panic};
use std::sync::{Arc, atomic::Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, iter, mem};

/// The size of a thread's stack, in bytes. Only the pages that the thread has touched take memory: up to 48 KiB, as
/// measured under load.
const STACK_BYTES: usize = 512 << 10;

/// The most workers that receive requests. While one of them judges the requests of its ticket, a message of the
/// frontend, the other one gets the next ticket.
const MAX_RECEIVING_WORKERS: usize = 2;

/// The most clients in a batch after which the frontend waits a moment for their next requests, so that these form one
/// batch again. The requests of more clients form large batches without a wait.
const MAX_COALESCED_CLIENTS: usize = 16;

/// The time for which a stop sleeps between two checks whether a thread has ended.
const STOP_POLL_PAUSE: Duration = Duration::from_millis(1);

/// A command that is queued or in flight, with the request that it belongs to.
type QueuedTask = QueuedCommand<Box<Task>>;

/// The worker threads, and the threads that hash passwords. Dropping this value stops them.
pub struct Workers {
    dispatcher: Arc<Dispatcher>,
    threads: Vec<JoinHandle<()>>,
}

/// The part of the workers that all their threads share: it receives requests and executes batches.
struct Dispatcher {
    /// The server from which the workers receive the tickets of the frontend.
    tiny_http: &'static tiny_http::Server,
    slots: Arc<Slots>,
    app: Arc<App>,
    /// The function that chooses the requests to intercept in a service for tests; `None` in any other service.
    intercept: Option<InterceptHook>,
    state: Mutex<DispatchState>,
    /// Wakes a worker that neither receives requests nor executes a batch.
    worker_wakeup: Condvar,
    /// Wakes a thread that waits for a password to hash.
    hasher_wakeup: Condvar,
}

/// The queued commands, and the state of all workers by which one of them decides whether to wake another one.
struct DispatchState {
    lanes: Lanes<Box<Task>>,
    /// The number of workers that wait for a ticket of the frontend, or judge the requests that their ticket names.
    receiving_workers: usize,
    /// The earliest time at which the wait of a worker ends without a wake-up; `None` if no wait has a time limit.
    next_worker_timeout: Option<Instant>,
    is_stopping: bool,
}

impl Workers {
    /// Starts the threads. If the system does not allow so many threads, ends the threads that were started, and fails.
    pub fn start(
        tiny_http: &'static tiny_http::Server,
        slots: Arc<Slots>,
        app: Arc<App>,
        capacity: Capacity,
        intercept: Option<InterceptHook>,
    ) -> io::Result<Workers> {
        let lanes = Lanes::new(capacity);
        let state =
            DispatchState { lanes, receiving_workers: 0, next_worker_timeout: None, is_stopping: false };
        let (state, worker_wakeup, hasher_wakeup) = (Mutex::new(state), Condvar::new(), Condvar::new());
        let dispatcher = Dispatcher { tiny_http, slots, app, intercept, state, worker_wakeup, hasher_wakeup };
        let mut workers = Workers { dispatcher: Arc::new(dispatcher), threads: Vec::new() };
        // Starts two more workers than there are sessions. So a worker waits to be woken as long as a session is free.
        for n in 0..capacity.hashers + capacity.sessions + MAX_RECEIVING_WORKERS {
            let is_hasher = n < capacity.hashers;
            let name = if is_hasher { format!("hasher-{n}") } else { format!("worker-{n}") };
            let dispatcher = workers.dispatcher.clone();
            // Calls `run_thread` again after a panic, so that no panic ends the thread.
            let run = move || while catch_panic(None, || dispatcher.run_thread(is_hasher)).is_err() {};
            workers.threads.push(thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(run)?);
        }
        Ok(workers)
    }

    /// Ends the threads once they have answered the queued commands. Blocks up to `timeout`. Threads that take longer
    /// are left running.
    pub fn stop(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.dispatcher.state.lock().is_stopping = true;
        self.dispatcher.wake_all_threads();
        (0..MAX_RECEIVING_WORKERS).for_each(|_| self.dispatcher.tiny_http.unblock());
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                if Instant::now() >= deadline {
                    log::warn!(
                        "a request takes longer than STOP_TIMEOUT and was left behind: pg_stat_activity shows \
                         whether its statement still runs, and pg_terminate_backend ends it"
                    );
                    return;
                }
                thread::sleep(STOP_POLL_PAUSE);
            }
            // Ignores an error, which is a panic of the thread: `catch_panic` has logged it.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop(MIN_STOP_WAIT);
    }
}

impl Dispatcher {
    /// Runs a thread of the workers: receives requests and executes batches. Returns after a stop has begun, once no
    /// command is queued or in flight. `is_hasher`: the thread only hashes passwords.
    fn run_thread(self: &Arc<Self>, is_hasher: bool) {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            if let Some(batch) = state.lanes.take_batch(now, is_hasher) {
                self.wake_thread_if_needed(&state, now);
                drop(state);
                state = self.execute_batch(batch);
            } else if state.is_stopping && state.lanes.is_idle() {
                return self.wake_all_threads();
            } else if is_hasher {
                let ready_at = state.lanes.next_ready_time(now, is_hasher);
                wait_until(&self.hasher_wakeup, &mut state, ready_at);
            } else if state.receiving_workers < MAX_RECEIVING_WORKERS && !state.is_stopping {
                state.receiving_workers += 1;
                self.wake_thread_if_needed(&state, now);
                drop(state);
                // Catches a panic, so that this worker is not counted as receiving for ever.
                let tasks = catch_panic(None, || self.receive_requests());
                state = self.state.lock();
                state.receiving_workers -= 1;
                self.queue_tasks(&mut state, tasks.unwrap_or_default());
            } else {
                self.wait_for_work(&mut state, now);
            }
        }
    }

    /// Waits until another thread wakes this worker, or until a retry is due or a batch takes too long. Leaves this
    /// time out if the wait of another worker ends no later, because one worker is enough for what is due then.
    fn wait_for_work(&self, state: &mut MutexGuard<'_, DispatchState>, now: Instant) {
        let timeout = state.lanes.next_ready_time(now, false);
        let timeout = timeout.filter(|timeout| state.next_worker_timeout.is_none_or(|next| *timeout < next));
        state.next_worker_timeout = timeout.or(state.next_worker_timeout);
        wait_until(&self.worker_wakeup, state, timeout);
        if state.next_worker_timeout == timeout {
            state.next_worker_timeout = None;
        }
    }

    /// Wakes another worker if one is needed while this thread receives or executes: if a batch is ready, if no worker
    /// receives, or if a retry or a stuck batch is due before the wait of any worker ends. Also wakes a hasher if a
    /// password waits to be hashed.
    fn wake_thread_if_needed(&self, state: &DispatchState, now: Instant) {
        let ready_at = state.lanes.next_ready_time(now, false);
        let is_missed = ready_at.is_some_and(|at| state.next_worker_timeout.is_none_or(|next| at < next));
        if is_missed || state.receiving_workers == 0 || state.lanes.find_ready_queue(now, false).is_some() {
            self.worker_wakeup.notify_one();
        }
        if state.lanes.find_ready_queue(now, true).is_some() {
            self.hasher_wakeup.notify_one();
        }
    }

    fn wake_all_threads(&self) {
        self.worker_wakeup.notify_all();
        self.hasher_wakeup.notify_all();
    }

    /// Queues the commands of requests. If more passwords wait than can be hashed in time, answers 503 to some of these
    /// requests.
    fn queue_tasks(&self, state: &mut MutexGuard<'_, DispatchState>, tasks: Vec<Box<Task>>) {
        let (mut refused, now) = (Vec::new(), Instant::now());
        for task in tasks {
            let (step, peer) =
                (task.command.next_step(), task.pending.claimed.request.peer.map(peer_network));
            let too_many = state.lanes.push(task, step, peer, now);
            refused.extend(too_many.map(|task| (task, Err(Error::Busy(BusyReason::TooManyHashes)))));
        }
        // Drops commands whose clients do not wait for an answer any more. Otherwise clients that close the connection
        // and send their request again would let the queue grow without limit.
        if state.lanes.queued_commands() > 2 * self.slots.len() {
            state.lanes.retain_awaited(|task| !self.slots.is_abandoned(task.pending.claimed.handle));
        }
        if !refused.is_empty() {
            MutexGuard::unlocked(state, || self.send_answers(refused));
        }
    }

    /// Executes a batch. Then answers the requests whose commands are done, and queues the other commands again.
    ///
    /// A batch ends when its statement has ended, so that its session and its rows are free while the answers are
    /// written. A batch of lists ends after its answers are written, because the listed users take memory until then.
    fn execute_batch(&self, mut batch: Batch<Box<Task>>) -> MutexGuard<'_, DispatchState> {
        // Leaves out commands whose client does not wait for the answer any more: it was answered 503 at its deadline,
        // or it has closed its connection.
        let is_live = |item: &QueuedTask| self.slots.mark_executing(item.task.pending.claimed.handle);
        let (tasks, gone): (Vec<_>, Vec<_>) = mem::take(&mut batch.commands).into_iter().partition(is_live);
        let (tasks, outcomes) = self.execute_commands(tasks);
        let (mut answers, now) = (Vec::with_capacity(tasks.len()), Instant::now());
        let mut state = self.state.lock();
        gone.iter().for_each(|item| state.lanes.free_row(item));
        if batch.max_listed_users == 0 {
            state.lanes.end_batch(&batch, now);
        }
        for (item, outcome) in tasks.into_iter().zip(outcomes) {
            let given_up = match outcome {
                Outcome::Continue => {
                    let step = item.task.command.next_step();
                    let too_many = state.lanes.push_next_step(item, step);
                    too_many.map(|task| (task, Err(Error::Busy(BusyReason::TooManyHashes))))
                }
                Outcome::RetryLater => {
                    let given_up = state.lanes.push_retry(item, now);
                    self.app.metrics.lock_retries.fetch_add(given_up.is_none().into(), Ordering::Relaxed);
                    given_up.map(|task| (task, Err(Failure::Contended.into_error())))
                }
                Outcome::Answer(answer) => {
                    state.lanes.free_row(&item);
                    Some((item.task, answer))
                }
            };
            answers.extend(given_up);
        }
        self.wake_thread_if_needed(&state, now);
        drop(state);
        // Makes the frontend wait for the next requests of these clients, so that they form one batch again. Does
        // not do so after a slow batch: its clients have waited for a lock or the network, and would gain little.
        if batch.is_short(now) && (2..=MAX_COALESCED_CLIENTS).contains(&answers.len()) {
            self.slots.expect_requests(answers.len());
        }
        self.send_answers(answers);
        let mut state = self.state.lock();
        if batch.max_listed_users > 0 {
            state.lanes.end_batch(&batch, Instant::now());
        }
        state
    }

    /// Executes the commands of a batch. If that panics, the outcome of each command is the answer 500.
    fn execute_commands(&self, mut tasks: Vec<QueuedTask>) -> (Vec<QueuedTask>, Vec<Outcome>) {
        let count = tasks.len();
        if let Some(item) = tasks.first() {
            self.app.metrics.count_batch(item.queued_step.lane as usize, count);
        }
        let only = tasks.first().filter(|_| count == 1).map(|item| item.task.pending.claimed.id.clone());
        let commands = tasks.iter_mut().map(|item| {
            let Task { command, pending } = &mut *item.task;
            (command, pending.claimed.deadline)
        });
        let outcomes = catch_panic(only.as_ref(), || self.app.operations.execute(commands.collect()))
            .unwrap_or_else(|response| iter::repeat_n(response, count).map(Outcome::from).collect());
        (tasks, outcomes)
    }

    /// Sends the answers to requests whose commands are done, or are not executed any more. The caller must hold no
    /// lock, because logging may take time.
    fn send_answers(&self, answers: Vec<(Box<Task>, Result<Response, Error>)>) {
        for (mut task, answer) in answers {
            let (id, pending) = (task.pending.claimed.id.clone(), &mut task.pending);
            // Catches a panic, so that only one answer is lost. The frontend answers that request at its deadline.
            let _ = catch_panic(Some(&id), || match answer {
                Ok(response) => self.send_answer(pending, response, MAX_MEMORY_WAIT),
                Err(error) => self.refuse(pending, error),
            });
        }
    }
}

/// Waits on a condition until another thread notifies it, or until the time `until`.
fn wait_until(condition: &Condvar, state: &mut MutexGuard<'_, DispatchState>, until: Option<Instant>) {
    match until {
        Some(until) => drop(condition.wait_until(state, until)),
        None => condition.wait(state),
    }
}
