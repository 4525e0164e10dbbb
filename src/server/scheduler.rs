//! Which commands are executed next, in which batches, and how many batches at once. A pure value: no thread, no lock,
//! no clock of its own; the workers are the thin shell around it.
//!
//! What it guarantees, with any number of writes waiting for any lock:
//! - a read finds a worker and a session that writes cannot take, where there are two or more of both, and a find by id
//!   or by e-mail one that lists cannot take;
//! - a change of a row that no session holds is executed: what met a lock is retried later, on a bounded share of the
//!   sessions, and changes of one row queue behind each other and not beside each other;
//! - lanes take turns, and so do the peers within a lane: a peer that queues a thousand commands delays another peer's
//!   command by at most one batch of each lane;
//! - creates and changes do not starve each other: neither may use every session that writes may have.
//!
//! A batch is what arrived while earlier ones were in flight; no time-out delays a batch so that it fills up. How many
//! batches of a lane may be in flight is learned from the shortest ones of the last second ([`Pace`]).

mod batch;
mod hash_queue;
mod limits;
mod pace;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod turns;

use crate::app::{Lane, Needs, retry_pause};
pub use batch::{Batch, Item, Next, Token};
use hash_queue::HashQueue;
use pace::Pace;
use std::{
    collections::HashMap,
    mem,
    time::{Duration, Instant},
};
pub use turns::Peer;
use turns::Turns;

const LANES: usize = Lane::ALL.len();

/// Memory that the commands of one batch need together, at most, unless one alone needs more.
const BATCH_MEMORY: usize = 8 << 20;

/// How long commands wait that need more memory than is free, before the next look.
const MEMORY_PAUSE: Duration = Duration::from_millis(5);

/// Commands in one batch, at most, by lane. 64 reads or writes are where a statement's fixed cost no longer shows; a
/// page is a thousand rows.
const fn batch_limit(lane: Lane) -> usize {
    match lane {
        Lane::Find | Lane::Create | Lane::Change => 64,
        Lane::List => 16,
        Lane::Single | Lane::Hash => 1,
    }
}

/// What may be in use at once.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// Batches of statements: the smaller of the numbers of workers and of database sessions.
    pub statements: usize,
    /// Hashes.
    pub hashes: usize,
    /// Processor cores, those that a database on the same machine uses included.
    pub cores: usize,
    /// How long a command is retried from its arrival on.
    pub retry_for: Duration,
}

/// Queues, and what is in flight.
pub struct Scheduler<T> {
    capacity: Capacity,
    lanes: [Queue<T>; LANES],
    /// Commands that met a lock, with the time of their retry.
    retries: Vec<(Instant, Item<T>)>,
    /// Until then what has not met a lock goes first: for as long as the last retry took.
    fresh_first_until: Instant,
    /// Rows with a change queued for execution, in flight or to be retried, and the changes behind it.
    rows: HashMap<i64, Turns<T>>,
    hashes: HashQueue<T>,
    /// Commands in any of these queues.
    queued: usize,
    /// Batches that were started and are no retries.
    batches: u64,
    /// Bytes of memory that are free.
    memory: usize,
}

struct Queue<T> {
    waiting: Turns<T>,
    /// The lane's last batch that was no retry, counted from 1 over all lanes.
    last: u64,
    in_flight: usize,
    /// When those began that are no retries.
    began: Vec<Instant>,
    pace: Pace,
    /// Not before that time: the table itself is locked.
    not_before: Option<Instant>,
}

impl<T> Scheduler<T> {
    /// Nothing queued.
    pub fn new(capacity: Capacity, now: Instant) -> Scheduler<T> {
        let queue = |lane: Lane| Queue {
            waiting: Turns::new(),
            last: 0,
            in_flight: 0,
            began: Vec::new(),
            pace: Pace::new(lane.writes(), now),
            not_before: None,
        };
        Scheduler {
            capacity,
            lanes: std::array::from_fn(|lane| queue(Lane::ALL[lane])),
            retries: Vec::new(),
            fresh_first_until: now,
            rows: HashMap::new(),
            hashes: HashQueue::default(),
            queued: 0,
            batches: 0,
            memory: usize::MAX,
        }
    }

    /// How much memory is free now.
    pub fn set_memory(&mut self, bytes: usize) {
        self.memory = bytes;
    }

    /// Whether commands wait for memory.
    pub fn is_short_of_memory(&self) -> bool {
        Lane::ALL.into_iter().any(|lane| self.needs_memory(lane))
    }

    /// Queues a command; gives it back where its hash would have to wait for too long.
    pub fn push(&mut self, work: T, needs: Needs, peer: Peer, now: Instant) -> Result<(), T> {
        if let Some(account) = needs.hash
            && !self.hashes.admit(peer, account, self.capacity.hashes)
        {
            return Err(work);
        }
        self.queue(Item { work, needs, peer, arrived: now, retries: 0 });
        Ok(())
    }

    /// Queues a command of a batch that was executed for its next step. A hash that was not admitted at first is not
    /// counted.
    pub fn push_next(&mut self, mut item: Item<T>, needs: Needs) {
        let before = mem::replace(&mut item.needs, needs);
        match (before.hash, needs.hash) {
            (Some(account), None) => self.hashes.leave(item.peer, account),
            (admitted, _) => item.needs.hash = admitted,
        }
        // Its row is still its own.
        match before.lane.changes_rows() && before.row.is_some() && needs.lane.changes_rows() {
            true => {
                self.queued += 1;
                self.lanes[needs.lane as usize].waiting.push(item);
            }
            false => self.queue(item),
        }
    }

    /// Queues a command that met a lock, to be retried after a pause; gives it back where its time is up.
    pub fn push_again(&mut self, mut item: Item<T>, now: Instant) -> Result<(), Item<T>> {
        let due = now + retry_pause(item.retries);
        if due > item.arrived + self.capacity.retry_for {
            return Err(item);
        }
        item.retries += 1;
        if item.needs.lane.writes() {
            self.retries.push((due, item));
            self.queued += 1;
        } else {
            // Only a lock on the table makes a read wait, and makes all of the lane wait.
            let queue = &mut self.lanes[item.needs.lane as usize];
            queue.not_before = Some(due);
            queue.waiting.push(item);
            self.queued += 1;
        }
        Ok(())
    }

    /// The end of a command that was answered, or that no client waits for. The next change of its row may go on.
    pub fn done(&mut self, item: &Item<T>) {
        if let Some(account) = item.needs.hash {
            self.hashes.leave(item.peer, account);
        }
        if let Some(row) = item.needs.row.filter(|_| item.needs.lane.changes_rows())
            && let Some(behind) = self.rows.get_mut(&row)
        {
            match behind.pop() {
                Some(next) => self.lanes[next.needs.lane as usize].waiting.push(next),
                None => drop(self.rows.remove(&row)),
            }
        }
    }

    /// The end of a batch; `atypical` where its time says nothing of the next one's, because it met a lock, or no
    /// client waited for it any more. Each of its commands is then [done](Scheduler::done), or queued for a retry.
    pub fn finished(&mut self, token: Token, atypical: bool, now: Instant) {
        let Token { lane, started, commands, retry } = token;
        let queue = &mut self.lanes[lane as usize];
        queue.in_flight -= 1;
        let took = now.saturating_duration_since(started);
        if retry {
            self.fresh_first_until = now + took;
        } else if let Some(at) = queue.began.iter().position(|began| *began == started) {
            queue.began.swap_remove(at);
        }
        match lane {
            _ if atypical => {}
            Lane::Hash => self.hashes.learn(took),
            _ => queue.pace.learn(took, commands, now),
        }
    }

    /// The password to hash or check now.
    pub fn next_hash(&mut self, now: Instant) -> Option<Batch<T>> {
        if self.in_flight(Lane::Hash) >= self.capacity.hashes {
            return None;
        }
        let item = self.hashes.pop()?;
        Some(self.start(Lane::Hash, vec![item], false, now))
    }

    /// The statement to execute now: of the lanes that may have one more batch in flight, the one whose last batch is
    /// the longest ago. What met a lock goes before, except for as long as the last retry took: where there is capacity
    /// for one write, retries get half of its time.
    pub fn next(&mut self, now: Instant) -> Next<T> {
        let ready = self.ready_lane(now);
        if (ready.is_none() || now >= self.fresh_first_until)
            && let Some(batch) = self.retry(now)
        {
            return Next::Run(batch);
        }
        let Some(lane) = ready else {
            return Next::Wait(self.next_time(now));
        };
        let overtakes = self.overtakes();
        let (mut items, mut free, mut left) = (Vec::new(), self.memory, BATCH_MEMORY);
        let waiting = &mut self.lanes[lane as usize].waiting;
        while items.len() < batch_limit(lane)
            && let Some(item) = waiting.take(free, overtakes)
        {
            left = left.saturating_sub(item.needs.memory);
            free = (free - item.needs.memory).min(left);
            items.push(item);
        }
        Next::Run(self.start(lane, items, false, now))
    }

    /// Whether [`Scheduler::next`] has something to execute now.
    pub fn is_ready(&self, now: Instant) -> bool {
        self.ready_lane(now).is_some()
            || (self.may_retry() && self.retries.iter().any(|(due, _)| *due <= now))
    }

    /// Whether [`Scheduler::next_hash`] has.
    pub fn hash_is_ready(&self) -> bool {
        self.hashes.queued > 0 && self.in_flight(Lane::Hash) < self.capacity.hashes
    }

    /// When something becomes ready without anything being pushed or finished.
    pub fn next_time(&self, now: Instant) -> Option<Instant> {
        let retries = self.retries.iter().map(|(due, _)| *due).filter(|_| self.may_retry());
        let queues = Lane::ALL.into_iter().filter_map(|lane| {
            let queue = &self.lanes[lane as usize];
            if queue.waiting.is_empty() {
                return None;
            }
            match self.may_start(lane, now) {
                true => queue.not_before.filter(|at| *at > now),
                false => self.stalls(lane, now),
            }
        });
        let memory = self.is_short_of_memory().then_some(now + MEMORY_PAUSE);
        retries.chain(queues).chain(memory).chain(self.ends_by(now)).min()
    }

    /// Whether nothing is queued and nothing in flight.
    pub fn is_idle(&self) -> bool {
        self.queued == 0 && self.lanes.iter().all(|queue| queue.in_flight == 0)
    }

    /// How many commands are queued.
    pub fn len(&self) -> usize {
        self.queued
    }

    /// How many passwords wait to be hashed or checked.
    pub fn hashes_waiting(&self) -> usize {
        self.hashes.queued
    }

    /// Drops the queued commands that no client waits for any more.
    pub fn retain(&mut self, mut awaited: impl FnMut(&T) -> bool) {
        let mut dropped = Vec::new();
        for queue in &mut self.lanes {
            dropped.extend(queue.waiting.take_unless(&mut awaited));
        }
        let retries = mem::take(&mut self.retries);
        let (kept, ended): (Vec<_>, Vec<_>) = retries.into_iter().partition(|(_, item)| awaited(&item.work));
        self.retries = kept;
        dropped.extend(ended.into_iter().map(|(_, item)| item));
        dropped.extend(self.hashes.take_unless(&mut awaited));
        for behind in self.rows.values_mut() {
            self.queued -= behind.take_unless(&mut awaited).len();
        }
        self.queued -= dropped.len();
        for item in &dropped {
            self.done(item);
        }
    }

    fn queue(&mut self, item: Item<T>) {
        let Needs { lane, row, .. } = item.needs;
        self.queued += 1;
        if lane == Lane::Hash {
            return self.hashes.push(item);
        }
        if let Some(row) = row.filter(|_| lane.changes_rows()) {
            match self.rows.get_mut(&row) {
                Some(behind) => return behind.push(item),
                None => drop(self.rows.insert(row, Turns::new())),
            }
        }
        self.lanes[lane as usize].waiting.push(item);
    }

    fn start(&mut self, lane: Lane, items: Vec<Item<T>>, retry: bool, now: Instant) -> Batch<T> {
        let queue = &mut self.lanes[lane as usize];
        queue.in_flight += 1;
        if !retry {
            queue.began.push(now);
            self.batches += 1;
            queue.last = self.batches;
        }
        self.queued -= items.len();
        let memory = items.iter().map(|item| item.needs.memory).sum();
        let token = Token { lane, started: now, commands: items.len(), retry };
        Batch { lane, items, memory, token }
    }

    /// The command whose retry is due first, unbatched.
    fn retry(&mut self, now: Instant) -> Option<Batch<T>> {
        let due = self.retries.iter().enumerate().filter(|(_, (due, _))| *due <= now);
        let (at, _) = due.min_by_key(|(_, (due, _))| *due)?;
        if !self.may_retry() {
            return None;
        }
        let (_, item) = self.retries.swap_remove(at);
        Some(self.start(item.needs.lane, vec![item], true, now))
    }

    fn ready_lane(&self, now: Instant) -> Option<Lane> {
        let overtakes = self.overtakes();
        let is_ready = |lane: &Lane| {
            let queue = &self.lanes[*lane as usize];
            !queue.waiting.is_empty()
                && queue.waiting.fits(self.memory, overtakes)
                && self.may_start(*lane, now)
                && queue.not_before.is_none_or(|at| at <= now)
        };
        let ready = Lane::ALL.into_iter().filter(is_ready);
        ready.min_by_key(|lane| self.lanes[*lane as usize].last)
    }

    /// Whether what needs little memory overtakes what waits for its own: while a password is hashed, which ends soon
    /// and frees much.
    fn overtakes(&self) -> bool {
        self.in_flight(Lane::Hash) > 0
    }

    /// Whether the next command of a lane needs more memory than is free.
    fn needs_memory(&self, lane: Lane) -> bool {
        self.lanes[lane as usize].waiting.first().is_some_and(|item| item.needs.memory > self.memory)
    }
}
