//! The threads that answer requests. They receive requests from tiny_http, have them judged, and execute batches of
//! commands. Each request gets one log line.
//!
//! This is the only module that handles tickets; the functions that it calls get a [`Request`](crate::http::Request)
//! and return a [`Response`](crate::http::Response).
//!
//! Workers follow the pattern Leader/Followers. Each worker does one of three things:
//! - It waits in tiny_http's queue, as two workers do. The worker that gets a ticket claims its requests, judges them,
//!   queues their commands, and goes on to execute: so a lone request is handed over once, from the frontend to its
//!   worker.
//! - It executes a batch, as up to one worker for each session does. When the statement of the batch has ended, the
//!   worker wakes another one for the next batch, if there is one, and writes the answers.
//! - It waits on a condition. As there are two more workers than sessions, at least one worker waits so while a
//!   session is free. If a retry or a stuck batch is due, its wait has a time limit; other waits have none, and so set
//!   no timer.
//!
//! Before a worker begins to receive or to execute, it wakes another one if more is ready, if no worker receives, or
//! if a wait needs a time limit. So no wake-up is lost, and a lone request causes none. While all sessions are in use,
//! two workers are left to receive and refuse. Threads of their own hash passwords, because a hash occupies a core for
//! some 20 ms.
//!
//! `catch_panic` ends a panic in the request, the batch or the answer that has caused the panic. The caller then gives
//! back what the schedule counts for that request or batch.
#![expect(
    clippy::vec_box,
    reason = "a vector of many large tasks would be mapped and unmapped for each ticket"
)]

mod faults;
mod requests;
#[cfg(test)]
mod tests;

use super::MAX_LAST_WORK_TIME;
use super::lanes::{Batch, Capacity, Lanes, QueuedCommand};
use crate::app::App;
use crate::db::Failure;
use crate::error::{BusyReason, Error};
use crate::http::Response;
use crate::operations::Outcome;
use crate::{frontend::Slots, http::peer_network};
pub use faults::{Fault, HarnessHandler, Intercept, Treatment};
use parking_lot::{Condvar, Mutex, MutexGuard};
use requests::{Job, MAX_MEMORY_WAIT, Task, catch_panic};
use std::sync::{Arc, atomic::Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, iter, mem};

/// The stack of a thread, in bytes. Only the part that is used becomes memory: up to 48 KiB under load of every kind.
const STACK_BYTES: usize = 512 << 10;

/// The most workers that wait in tiny_http's queue: one for the next request, and one for the requests that come while
/// that worker executes it.
const MAX_RECEIVERS: usize = 2;

/// The most clients whose next requests are to make one batch again: more clients make large batches in any case.
const MAX_COALESCED_CLIENTS: usize = 16;

/// The time for which a stop sleeps before it looks again whether a thread has ended.
const END_PAUSE: Duration = Duration::from_millis(1);

/// A queued command, and the request that the command answers.
type QueuedTask = QueuedCommand<Box<Task>>;

/// The threads that answer requests. Dropping this value stops them.
pub struct Workers {
    dispatch: Arc<Dispatch>,
    threads: Vec<JoinHandle<()>>,
}

/// The values that the threads share.
struct Dispatch {
    server: &'static tiny_http::Server,
    slots: Arc<Slots>,
    app: Arc<App>,
    /// Chooses the requests that a test intercepts; `None` in a usual service.
    intercept: Option<Intercept>,
    schedule: Mutex<Schedule>,
    /// Condition on which a worker waits that neither receives nor executes.
    idle: Condvar,
    /// Condition on which a thread that hashes waits.
    hasher: Condvar,
}

/// The queued commands, and the workers that wait for some.
struct Schedule {
    lanes: Lanes<Box<Task>>,
    /// The number of workers that wait in tiny_http's queue.
    receivers: usize,
    /// The earliest time at which a waiting worker wakes by itself.
    wakes_at: Option<Instant>,
    stopping: bool,
}

impl Workers {
    /// Starts the threads. Fails if the system allows no more threads, and ends the threads that it has started.
    pub fn start(
        server: &'static tiny_http::Server,
        slots: Arc<Slots>,
        app: Arc<App>,
        capacity: Capacity,
        intercept: Option<Intercept>,
    ) -> io::Result<Workers> {
        let lanes = Lanes::new(capacity);
        let schedule = Schedule { lanes, receivers: 0, wakes_at: None, stopping: false };
        let (schedule, idle, hasher) = (Mutex::new(schedule), Condvar::new(), Condvar::new());
        let dispatch = Arc::new(Dispatch { server, slots, app, intercept, schedule, idle, hasher });
        let mut workers = Workers { dispatch, threads: Vec::new() };
        // Starts two more workers than there are sessions: while a session is free, one can be woken.
        for n in 0..capacity.hashers + capacity.sessions + MAX_RECEIVERS {
            let hashes = n < capacity.hashers;
            let name = if hashes { format!("hasher-{n}") } else { format!("worker-{n}") };
            let dispatch = workers.dispatch.clone();
            // Restarts the loop after a panic, which `catch_panic` has logged.
            let work = move || while catch_panic(None, || dispatch.work(hashes)).is_err() {};
            workers.threads.push(thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(work)?);
        }
        Ok(workers)
    }

    /// Ends the threads once they have answered the queued commands. Waits for them up to `timeout`, and leaves
    /// threads behind that are stuck for longer.
    pub fn stop(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.dispatch.schedule.lock().stopping = true;
        self.dispatch.wake_all();
        (0..MAX_RECEIVERS).for_each(|_| self.dispatch.server.unblock());
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                if Instant::now() >= deadline {
                    log::warn!(
                        "a request takes longer than STOP_TIMEOUT and was left behind: pg_stat_activity shows \
                         whether its statement still runs, and pg_terminate_backend ends it"
                    );
                    return;
                }
                thread::sleep(END_PAUSE);
            }
            // An error is ignored: a panic of the thread was logged where it was caught.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop(MAX_LAST_WORK_TIME);
    }
}

impl Dispatch {
    /// Executes batches and receives requests, until a stop when no command is queued or in flight. With `hashes`, the
    /// thread takes passwords to hash alone and receives no requests.
    fn work(self: &Arc<Self>, hashes: bool) {
        let mut schedule = self.schedule.lock();
        loop {
            let now = Instant::now();
            if let Some(batch) = schedule.lanes.take_batch(now, hashes) {
                self.wake(&schedule, now);
                drop(schedule);
                schedule = self.execute(batch);
            } else if schedule.stopping && schedule.lanes.is_idle() {
                return self.wake_all();
            } else if hashes {
                let due = schedule.lanes.next_due(now, hashes);
                wait_until(&self.hasher, &mut schedule, due);
            } else if schedule.receivers < MAX_RECEIVERS && !schedule.stopping {
                schedule.receivers += 1;
                self.wake(&schedule, now);
                drop(schedule);
                // Catches a panic, so that the count of receivers stays right.
                let received = catch_panic(None, || self.receive());
                schedule = self.schedule.lock();
                schedule.receivers -= 1;
                self.push(&mut schedule, received.unwrap_or_default());
            } else {
                self.wait_for_work(&mut schedule, now);
            }
        }
    }

    /// Waits for work. If a retry or a stuck batch is due before any waiting worker wakes by itself, this one wakes
    /// then.
    fn wait_for_work(&self, schedule: &mut MutexGuard<'_, Schedule>, now: Instant) {
        let due = schedule.lanes.next_due(now, false);
        let due = due.filter(|due| schedule.wakes_at.is_none_or(|at| *due < at));
        schedule.wakes_at = due.or(schedule.wakes_at);
        wait_until(&self.idle, schedule, due);
        if schedule.wakes_at == due {
            schedule.wakes_at = None;
        }
    }

    /// Wakes a worker, because this thread goes on to receive or to execute: if a batch is ready, if no worker
    /// receives, or if no waiting worker wakes in time for what is due. Wakes a thread that hashes if a password
    /// waits.
    fn wake(&self, schedule: &Schedule, now: Instant) {
        let due = schedule.lanes.next_due(now, false);
        let is_missed = due.is_some_and(|due| schedule.wakes_at.is_none_or(|at| due < at));
        if is_missed || schedule.receivers == 0 || schedule.lanes.find_ready(now, false).is_some() {
            self.idle.notify_one();
        }
        if schedule.lanes.find_ready(now, true).is_some() {
            self.hasher.notify_one();
        }
    }

    fn wake_all(&self) {
        self.idle.notify_all();
        self.hasher.notify_all();
    }

    /// Queues commands. Refuses those for which too many passwords wait.
    fn push(&self, schedule: &mut MutexGuard<'_, Schedule>, judged: Vec<Box<Task>>) {
        let (mut refused, now) = (Vec::new(), Instant::now());
        for task in judged {
            let (step, peer) = (task.command.next_step(), task.job.claimed.request.peer.map(peer_network));
            let too_many = schedule.lanes.push(task, step, peer, now);
            refused.extend(too_many.map(|task| (task, Err(Error::Busy(BusyReason::TooManyHashes)))));
        }
        // Drops commands whose clients have given up. Such clients retry, which would let the queue grow without
        // limit: each connection waits for one command.
        if schedule.lanes.len() > 2 * self.slots.len() {
            schedule.lanes.retain_awaited(|task| !self.slots.is_abandoned(task.job.claimed.handle));
        }
        if !refused.is_empty() {
            MutexGuard::unlocked(schedule, || self.answer_all(refused));
        }
    }

    /// Executes a batch. Queues the commands again that are not done, and answers the other ones.
    ///
    /// A batch ends with its statement: its session and the rows of its changes are free before the answers are
    /// written. A batch of lists ends with its answers, because their users take memory until then.
    fn execute(&self, mut batch: Batch<Box<Task>>) -> MutexGuard<'_, Schedule> {
        // Leaves out requests whose client was answered 503 or is gone, because such a client has given up, or
        // retries.
        let awaited = |item: &QueuedTask| self.slots.mark_executing(item.work.job.claimed.handle);
        let (items, gone): (Vec<_>, Vec<_>) = mem::take(&mut batch.commands).into_iter().partition(awaited);
        let (items, outcomes) = self.execute_commands(items);
        let (mut answers, now) = (Vec::with_capacity(items.len()), Instant::now());
        let mut schedule = self.schedule.lock();
        gone.iter().for_each(|item| schedule.lanes.free_row(item));
        if batch.users == 0 {
            schedule.lanes.end_batch(&batch, now);
        }
        for (item, outcome) in items.into_iter().zip(outcomes) {
            let given_up = match outcome {
                Outcome::Continued => {
                    let step = item.work.command.next_step();
                    let too_many = schedule.lanes.push_next(item, step);
                    too_many.map(|task| (task, Err(Error::Busy(BusyReason::TooManyHashes))))
                }
                Outcome::Retried => {
                    let given_up = schedule.lanes.retry(item, now);
                    self.app.metrics.lock_retries.fetch_add(given_up.is_none().into(), Ordering::Relaxed);
                    given_up.map(|task| (task, Err(Failure::Contended.into_error())))
                }
                Outcome::Answered(answer) => {
                    schedule.lanes.free_row(&item);
                    Some((item.work, answer))
                }
            };
            answers.extend(given_up);
        }
        self.wake(&schedule, now);
        drop(schedule);
        // The clients of a slow batch gain nothing: it has waited for a lock, or for a database on another machine.
        if batch.is_short(now) && (2..=MAX_COALESCED_CLIENTS).contains(&answers.len()) {
            self.slots.expect_requests(answers.len());
        }
        self.answer_all(answers);
        let mut schedule = self.schedule.lock();
        if batch.users > 0 {
            schedule.lanes.end_batch(&batch, Instant::now());
        }
        schedule
    }

    /// Executes commands of one lane. A panic is the answer 500 to each.
    fn execute_commands(&self, mut items: Vec<QueuedTask>) -> (Vec<QueuedTask>, Vec<Outcome>) {
        let count = items.len();
        if let Some(item) = items.first() {
            self.app.metrics.count_batch(item.queued_step.lane as usize, count);
        }
        let only = items.first().filter(|_| count == 1).map(|item| item.work.job.claimed.id.clone());
        let commands = items.iter_mut().map(|item| {
            let Task { command, job } = &mut *item.work;
            (command, job.claimed.deadline)
        });
        let outcomes = catch_panic(only.as_ref(), || self.app.operations.execute(commands.collect()))
            .unwrap_or_else(|response| iter::repeat_n(response, count).map(Outcome::from).collect());
        (items, outcomes)
    }

    /// Answers commands that are done or given up. The caller holds no lock.
    fn answer_all(&self, answers: Vec<(Box<Task>, Result<Response, Error>)>) {
        for (mut task, answer) in answers {
            let (id, job) = (task.job.claimed.id.clone(), &mut task.job);
            // Lets a panic lose one request alone, which the frontend answers at its deadline.
            let _ = catch_panic(Some(&id), || match answer {
                Ok(response) => self.send(job, response, MAX_MEMORY_WAIT),
                Err(error) => self.refuse(job, error),
            });
        }
    }
}

/// Waits on a condition until another thread notifies it, or until the time `until`.
fn wait_until(condition: &Condvar, schedule: &mut MutexGuard<'_, Schedule>, until: Option<Instant>) {
    match until {
        Some(until) => drop(condition.wait_until(schedule, until)),
        None => condition.wait(schedule),
    }
}
