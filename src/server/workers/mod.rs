//! The threads that answer requests: they receive them from tiny_http, have them judged, and execute batches of
//! commands. One log line a request.
//!
//! The only module that handles tickets; everything it calls sees a [`Request`](crate::http::Request) and a
//! [`Response`](crate::http::Response).
//!
//! Workers follow the pattern Leader/Followers, and each of them is in one of three places:
//! - Two wait in tiny_http's queue. The one that gets a ticket claims its requests, judges them, queues their commands,
//!   and goes on to execute: a lone request is handed over once, from the frontend to its worker.
//! - As many as there are sessions may execute batches. A batch has ended when its statement has; the worker then wakes
//!   another one for the next batch, if there is one, and writes the answers.
//! - All further workers wait on a condition. As there are two more workers than sessions, at least one waits while a session
//!   is free. It has the timer, if a retry or a stuck batch is due; a wait without a need for it sets none.
//!
//! A worker that leaves its place looks if another one is needed: for more that is ready, for tiny_http's queue if no
//! worker is left there, for what is due. So no wake-up is lost, and a lone request causes none. While all sessions are
//! in use, two workers are left to receive and refuse. Passwords are hashed by threads of their own, as each takes a core
//! for some 20 ms.
//!
//! A panic ends in the guard of its request, its batch or its answer; what the schedule counts is given back then, too.
#![expect(
    clippy::vec_box,
    reason = "a vector of many large tasks would be mapped and unmapped for each ticket"
)]

mod faults;
mod requests;
#[cfg(test)]
mod tests;

use super::MAX_LAST_WORK;
use super::lanes::{Batch, Capacity, Lanes, Queued};
use crate::app::App;
use crate::db::Failure;
use crate::error::{BusyReason, Error};
use crate::http::Response;
use crate::operations::Outcome;
use crate::{frontend::Slots, http::counted_as};
pub use faults::{Control, Fault, Intercept, Intercepted};
use parking_lot::{Condvar, Mutex, MutexGuard};
use requests::{Job, MAX_MEMORY_WAIT, Task, guard};
use std::sync::{Arc, atomic::Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, iter, mem};

/// Bytes of a thread's stack. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

/// Workers in tiny_http's queue, at most: one for the next request, and one for the requests that come while that worker
/// executes it.
const MAX_RECEIVERS: usize = 2;

/// The pause between two checks whether a thread has ended, at a stop.
const END_PAUSE: Duration = Duration::from_millis(1);

/// The threads that answer requests. Dropping it stops them.
pub struct Workers {
    dispatch: Arc<Dispatch>,
    threads: Vec<JoinHandle<()>>,
}

/// The resources that the threads share.
struct Dispatch {
    server: &'static tiny_http::Server,
    slots: Arc<Slots>,
    app: Arc<App>,
    /// `None`: every request is executed as usual.
    intercept: Option<Intercept>,
    schedule: Mutex<Schedule>,
    /// Wakes a worker that neither receives nor executes.
    idle: Condvar,
    /// Wakes a thread that hashes.
    hasher: Condvar,
}

/// Commands, and the threads that wait for some.
struct Schedule {
    lanes: Lanes<Box<Task>>,
    /// Workers in tiny_http's queue.
    receiving: usize,
    /// When a worker that waits for work wakes by itself.
    wakes_at: Option<Instant>,
    stopping: bool,
}

impl Workers {
    /// Starts the threads. An error if the system has no more: the threads that were started are ended.
    pub fn start(
        server: &'static tiny_http::Server,
        slots: Arc<Slots>,
        app: Arc<App>,
        capacity: Capacity,
        intercept: Option<Intercept>,
    ) -> io::Result<Workers> {
        let lanes = Lanes::new(capacity);
        let schedule = Schedule { lanes, receiving: 0, wakes_at: None, stopping: false };
        let (schedule, idle, hasher) = (Mutex::new(schedule), Condvar::new(), Condvar::new());
        let dispatch = Arc::new(Dispatch { server, slots, app, intercept, schedule, idle, hasher });
        let mut workers = Workers { dispatch, threads: Vec::new() };
        // While a session is free, one worker neither receives nor executes, and can be woken.
        for n in 0..capacity.hashers + capacity.sessions + MAX_RECEIVERS {
            let hashes = n < capacity.hashers;
            let name = if hashes { format!("hasher-{n}") } else { format!("worker-{n}") };
            let dispatch = workers.dispatch.clone();
            // A panic was logged, and the loop is restarted.
            let work = move || while guard(None, || dispatch.work(hashes)).is_err() {};
            workers.threads.push(thread::Builder::new().name(name).stack_size(STACK).spawn(work)?);
        }
        Ok(workers)
    }

    /// Ends the threads once they have answered what was queued, and waits for them up to `timeout`. Those that are
    /// stuck for longer are left behind.
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
        self.stop(MAX_LAST_WORK);
    }
}

impl Dispatch {
    /// Executes batches, and receives requests meanwhile; returns at a stop when nothing is queued or in flight. A thread
    /// that hashes takes batches of passwords alone and receives nothing.
    fn work(self: &Arc<Self>, hashes: bool) {
        let mut schedule = self.schedule.lock();
        loop {
            let now = Instant::now();
            if let Some(batch) = schedule.lanes.next(now, hashes) {
                self.wake(&schedule, now);
                drop(schedule);
                schedule = self.execute(batch);
            } else if schedule.stopping && schedule.lanes.is_idle() {
                return self.wake_all();
            } else if hashes {
                let due = schedule.lanes.next_due(now, hashes);
                wait(&self.hasher, &mut schedule, due);
            } else if schedule.receiving < MAX_RECEIVERS && !schedule.stopping {
                schedule.receiving += 1;
                self.wake(&schedule, now);
                drop(schedule);
                // Catches a panic, which would lose a receiver.
                let received = guard(None, || self.receive());
                schedule = self.schedule.lock();
                schedule.receiving -= 1;
                self.push(&mut schedule, received.unwrap_or_default());
            } else {
                self.wait(&mut schedule, now);
            }
        }
    }

    /// Waits for work. One of the workers that wait wakes for what is due: this one, if no other does by then.
    fn wait(&self, schedule: &mut MutexGuard<'_, Schedule>, now: Instant) {
        let due = schedule.lanes.next_due(now, false);
        let due = due.filter(|due| schedule.wakes_at.is_none_or(|at| *due < at));
        schedule.wakes_at = due.or(schedule.wakes_at);
        wait(&self.idle, schedule, due);
        if schedule.wakes_at == due {
            schedule.wakes_at = None;
        }
    }

    /// Wakes a worker, as this thread goes on to receive or to execute, if more is ready, if no worker receives, or if none
    /// wakes for what is due; and a thread that hashes if there is a password.
    fn wake(&self, schedule: &Schedule, now: Instant) {
        let due = schedule.lanes.next_due(now, false);
        let is_missed = due.is_some_and(|due| schedule.wakes_at.is_none_or(|at| due < at));
        if is_missed || schedule.receiving == 0 || schedule.lanes.ready(now, false).is_some() {
            self.idle.notify_one();
        }
        if schedule.lanes.ready(now, true).is_some() {
            self.hasher.notify_one();
        }
    }

    fn wake_all(&self) {
        self.idle.notify_all();
        self.hasher.notify_all();
    }

    /// Queues commands.
    fn push(&self, schedule: &mut MutexGuard<'_, Schedule>, judged: Vec<Box<Task>>) {
        let (mut refused, now) = (Vec::new(), Instant::now());
        for task in judged {
            let (step, peer) = (task.command.next_step(), task.job.claimed.request.peer.map(counted_as));
            let too_many = schedule.lanes.push(task, step, peer, now);
            refused.extend(too_many.map(|task| (task, Err(Error::Busy(BusyReason::TooManyHashes)))));
        }
        // Clients that give up and retry would let the queue grow without limit. Each connection waits for one command.
        if schedule.lanes.len() > 2 * self.slots.len() {
            schedule.lanes.retain(|task| !self.slots.abandoned(task.job.claimed.slot));
        }
        if !refused.is_empty() {
            MutexGuard::unlocked(schedule, || self.answer_all(refused));
        }
    }

    /// Executes a batch, queues again what is not done, and answers the rest.
    ///
    /// The batch has ended when its statement has: the session, and the rows of its changes, are free before the answers are
    /// written. Lists end with their answers, as these may wait for memory, and as their users take memory until then.
    fn execute(&self, mut batch: Batch<Box<Task>>) -> MutexGuard<'_, Schedule> {
        let commands = mem::take(&mut batch.commands).into_iter();
        // A client that was answered 503 has given the request up, or retries it: it is not executed.
        let (items, gone): (Vec<_>, Vec<_>) =
            commands.partition(|item: &Queued<Box<Task>>| self.slots.begin(item.work.job.claimed.slot));
        let (items, outcomes) = self.run(items);
        let (mut answers, now) = (Vec::with_capacity(items.len()), Instant::now());
        let mut schedule = self.schedule.lock();
        gone.iter().for_each(|item| schedule.lanes.done(item));
        if batch.users == 0 {
            schedule.lanes.finished(&batch, now);
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
                    schedule.lanes.done(&item);
                    Some((item.work, answer))
                }
            };
            answers.extend(given_up);
        }
        self.wake(&schedule, now);
        drop(schedule);
        self.answer_all(answers);
        let mut schedule = self.schedule.lock();
        if batch.users > 0 {
            schedule.lanes.finished(&batch, Instant::now());
        }
        schedule
    }

    /// Executes commands of one lane; a panic is an answer to each.
    fn run(&self, mut items: Vec<Queued<Box<Task>>>) -> (Vec<Queued<Box<Task>>>, Vec<Outcome>) {
        let count = items.len();
        if let Some(item) = items.first() {
            self.app.metrics.batch(item.step.lane as usize, count);
        }
        let only = items.first().filter(|_| count == 1).map(|item| item.work.job.claimed.id.clone());
        let commands = items.iter_mut().map(|item| {
            let Task { command, job } = &mut *item.work;
            (command, job.claimed.deadline)
        });
        let outcomes = guard(only.as_ref(), || self.app.operations.execute(commands.collect()))
            .unwrap_or_else(|response| iter::repeat_n(response, count).map(Outcome::from).collect());
        (items, outcomes)
    }

    /// Answers commands that are done or given up. The caller holds no lock.
    fn answer_all(&self, answers: Vec<(Box<Task>, Result<Response, Error>)>) {
        for (mut task, answer) in answers {
            let (id, job) = (task.job.claimed.id.clone(), &mut task.job);
            // A panic loses one request. The frontend answers it at its deadline.
            let _ = guard(Some(&id), || match answer {
                Ok(response) => self.send(job, response, MAX_MEMORY_WAIT),
                Err(error) => self.refuse(job, error),
            });
        }
    }
}

/// Waits on a condition until another thread notifies it, and at most until a time, if one is given.
fn wait(condition: &Condvar, schedule: &mut MutexGuard<'_, Schedule>, until: Option<Instant>) {
    match until {
        Some(until) => drop(condition.wait_until(schedule, until)),
        None => condition.wait(schedule),
    }
}
