//! The threads that answer requests: they receive them from tiny_http, have them judged, and execute batches of
//! commands. One log line a request.
//!
//! The only module that handles `tiny_http::Request`; everything it calls sees the service's own [`Request`] and
//! [`Response`](crate::http::Response).
//!
//! Workers follow the pattern Leader/Followers: two wait in tiny_http's queue, and the one that gets a request goes on
//! to execute it, which saves a lone request a hand-over. While all sessions are in use, two workers are left to
//! receive and refuse. Passwords are hashed by threads of their own, as each takes a core for some 20 ms.

mod faults;
mod requests;

use super::{
    LAST_WORK,
    lanes::{Batch, Capacity, Lanes, Queued},
};
use crate::{
    app::{App, Command, Needs},
    config::counted_as,
    error::{Error, Reason},
    frontend::Slots,
};
pub use faults::{Fault, Faults};
use parking_lot::{Condvar, Mutex, MutexGuard};
use requests::{Job, guard};
use std::{
    io, mem,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Bytes of a thread's stack. Only what is used becomes memory: 48 KiB at most under load of every kind.
const STACK: usize = 512 << 10;

/// Workers in tiny_http's queue, at most: one for the next request, and one for those that come while it is executed.
const RECEIVERS: usize = 2;

/// The time for which a thread without a batch sleeps, if nothing is due and nothing wakes it.
const IDLE: Duration = Duration::from_secs(3600);

/// The time between two looks at a thread that is to end.
const POLL_PAUSE: Duration = Duration::from_millis(1);

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
    /// `None`: no request fails on command.
    faults: Option<Faults>,
    schedule: Mutex<Schedule>,
    /// Wakes a worker that neither receives nor executes.
    idle: Condvar,
    /// Wakes a thread that hashes.
    hasher: Condvar,
}

/// Commands, and the threads that wait for some.
struct Schedule {
    lanes: Lanes<Job>,
    /// Workers in tiny_http's queue.
    receiving: usize,
    /// When a worker without a batch wakes by itself.
    wakes_at: Option<Instant>,
    stopping: bool,
}

impl Workers {
    /// Starts the threads. Errors: the system has no more threads; those that were started are ended.
    pub fn start(
        server: &'static tiny_http::Server,
        slots: Arc<Slots>,
        app: Arc<App>,
        capacity: Capacity,
        faults: Option<Faults>,
    ) -> io::Result<Workers> {
        let lanes = Lanes::new(capacity);
        let schedule = Schedule { lanes, receiving: 0, wakes_at: None, stopping: false };
        let (schedule, idle, hasher) = (Mutex::new(schedule), Condvar::new(), Condvar::new());
        let dispatch = Arc::new(Dispatch { server, slots, app, faults, schedule, idle, hasher });
        let mut workers = Workers { dispatch, threads: Vec::new() };
        // While a session is free, one worker neither receives nor executes, and can be woken.
        for n in 0..capacity.hashers + capacity.sessions + RECEIVERS {
            let hashes = n < capacity.hashers;
            let name = if hashes { format!("hasher-{n}") } else { format!("worker-{n}") };
            let dispatch = workers.dispatch.clone();
            // A panic in the loop was logged, and the loop is restarted.
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
        (0..RECEIVERS).for_each(|_| self.dispatch.server.unblock());
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                if Instant::now() >= deadline {
                    log::warn!(
                        "a request takes longer than STOP_TIMEOUT and was left behind: pg_stat_activity shows \
                         whether its statement still runs, and pg_terminate_backend ends it"
                    );
                    return;
                }
                thread::sleep(POLL_PAUSE);
            }
            // A panic in it was logged where it was caught.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop(LAST_WORK);
    }
}

impl Dispatch {
    /// Executes batches, and receives requests meanwhile; returns at a stop when nothing is queued or in flight. A thread
    /// that hashes takes batches of passwords alone and receives nothing.
    fn work(self: &Arc<Self>, hashes: bool) {
        let mut schedule = self.schedule.lock();
        loop {
            let now = Instant::now();
            let batch = schedule.lanes.next(now, hashes);
            self.wake(&schedule, batch.is_some() || hashes, now);
            let due = schedule.lanes.next_due(now, hashes);
            if let Some(batch) = batch {
                drop(schedule);
                schedule = self.execute(batch);
            } else if schedule.stopping && schedule.lanes.is_idle() {
                return self.wake_all();
            } else if hashes {
                self.hasher.wait_until(&mut schedule, due.unwrap_or(now + IDLE));
            } else {
                // One worker wakes for what is due: this one, if no other does by then.
                let due = due.filter(|due| schedule.wakes_at.is_none_or(|at| *due < at));
                schedule.wakes_at = due.or(schedule.wakes_at);
                let until = due.unwrap_or(now + IDLE);
                if schedule.receiving < RECEIVERS && !schedule.stopping {
                    schedule.receiving += 1;
                    drop(schedule);
                    let received = self.receive(until);
                    schedule = self.schedule.lock();
                    schedule.receiving -= 1;
                    self.push(&mut schedule, received);
                } else {
                    self.idle.wait_until(&mut schedule, until);
                }
                if schedule.wakes_at == Some(until) {
                    schedule.wakes_at = None;
                }
            }
        }
    }

    /// Wakes a thread that hashes if there is a password; and a worker, if this thread goes on to execute and more is
    /// ready, no worker receives, or none wakes for what is due.
    fn wake(&self, schedule: &Schedule, executes: bool, now: Instant) {
        let due = schedule.lanes.next_due(now, false);
        let is_missed = due.is_some_and(|due| schedule.wakes_at.is_none_or(|at| due < at));
        if executes && (is_missed || schedule.receiving == 0 || schedule.lanes.ready(now, false).is_some()) {
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
    fn push(&self, schedule: &mut MutexGuard<'_, Schedule>, judged: Vec<(Job, Needs)>) {
        let (mut refused, now) = (Vec::new(), Instant::now());
        for (job, needs) in judged {
            let peer = job.claimed.request.peer.map(counted_as);
            let too_many = schedule.lanes.push(job, needs, peer, now);
            refused.extend(too_many.map(|job| (job, Error::Busy(Reason::TooManyHashes))));
        }
        // Clients that give up and retry would let the queue grow without limit. Each connection waits for one command.
        if schedule.lanes.len() > 2 * self.slots.len() {
            schedule.lanes.retain(|job| !self.slots.abandoned(job.claimed.slot));
        }
        self.refuse_all(schedule, refused);
    }

    /// Answers commands that are given up, and holds no lock meanwhile.
    fn refuse_all(&self, schedule: &mut MutexGuard<'_, Schedule>, refused: Vec<(Job, Error)>) {
        if !refused.is_empty() {
            let refuse = |(mut job, error)| self.refuse(&mut job, error);
            MutexGuard::unlocked(schedule, || refused.into_iter().for_each(refuse));
        }
    }

    /// Executes a batch and answers what is done; what is not is queued again.
    fn execute(&self, mut batch: Batch<Job>) -> MutexGuard<'_, Schedule> {
        let commands = mem::take(&mut batch.commands).into_iter();
        // A client that was answered 503 has given the request up, or retries it: it is not executed.
        let (mut items, mut ended): (Vec<_>, Vec<_>) =
            commands.partition(|item: &Queued<Job>| self.slots.begin(item.work.claimed.slot));
        let count = items.len();
        if let Some(item) = items.first() {
            self.app.metrics.batch(item.needs.lane as usize, count);
        }
        // A panic is an answer to each.
        let only = items.first().filter(|_| count == 1).map(|item| item.work.claimed.id.clone());
        let commands = items
            .iter_mut()
            .filter_map(|Queued { work, .. }| Some((work.command.as_mut()?, work.claimed.deadline)));
        let outcomes = guard(only.as_ref(), || self.app.execute(commands.collect()))
            .unwrap_or_else(|response| vec![Ok(Some(response)); count]);
        let mut unfinished = Vec::new();
        for (mut item, outcome) in items.into_iter().zip(outcomes) {
            match outcome {
                Ok(Some(response)) => self.answer(&mut item.work, response),
                Ok(None) | Err(Error::Contended) => {
                    unfinished.push((item, outcome.is_err()));
                    continue;
                }
                Err(error) => self.refuse(&mut item.work, error),
            }
            ended.push(item);
        }
        let (now, mut refused) = (Instant::now(), Vec::new());
        let mut schedule = self.schedule.lock();
        schedule.lanes.finished(&batch, now);
        ended.iter().for_each(|item| schedule.lanes.done(item));
        for (item, is_contended) in unfinished {
            let given_up = if is_contended {
                schedule.lanes.retry(item, now).map(|job| (job, Error::Contended))
            } else {
                let needs = item.work.command.as_ref().map_or(item.needs, Command::needs);
                let too_many = schedule.lanes.push_next(item, needs);
                too_many.map(|job| (job, Error::Busy(Reason::TooManyHashes)))
            };
            let is_retried = is_contended && given_up.is_none();
            self.app.metrics.lock_retries.fetch_add(is_retried.into(), Ordering::Relaxed);
            refused.extend(given_up);
        }
        self.refuse_all(&mut schedule, refused);
        schedule
    }
}
