//! Which commands are executed next, in which batches, and how many batches at once. A pure value: no thread, no lock
//! and no clock of its own.
//!
//! Each lane is one queue. A batch is what arrived while earlier batches of its lane were in flight; no command waits
//! for a batch to fill. Rules that hold for any number of commands and locks:
//! - writes leave one session to reads, creates and changes leave one to each other, and lists leave one to finds;
//! - lanes take turns, and so do the addresses within a lane;
//! - one change of a row is in flight at a time, the oldest of its lane first; the row stays taken until the last
//!   statement of its change has ended;
//! - a command that met a lock is retried alone after a pause, and retries take half of the sessions for writes.

use crate::http::PeerKey;
use crate::operations::{Lane, Step, retry_pause};
use crate::users::page;
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::time::{Duration, Instant};
use strum::VariantNames;

const FIND: usize = Lane::Find as usize;
const LIST: usize = Lane::List as usize;
const CREATE: usize = Lane::Create as usize;
const CHANGE: usize = Lane::Change as usize;
const SINGLE: usize = Lane::Single as usize;
const HASH: usize = Lane::Hash as usize;
/// The queue of commands that met a lock, behind the queues of the lanes.
const RETRY: usize = Lane::VARIANTS.len();

/// The time below which a batch counts as short.
const SHORT_BATCH: Duration = Duration::from_millis(1);

/// Time that each command adds to a batch of writes.
const PER_WRITE: Duration = Duration::from_micros(20);

/// Time in flight after which a batch is taken to be stuck.
const STUCK_BATCH: Duration = Duration::from_millis(5);

/// Users of the lists in flight from which on no further list starts. With one more page, this bounds the memory of rows.
const MAX_LISTED_USERS: usize = page::MAX_USERS as usize;

/// Work that may wait for the threads that hash.
const MAX_HASH_WAIT: Duration = Duration::from_secs(2);

/// Resources that may be in use at once.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// Batches of statements.
    pub sessions: usize,
    /// Passwords that are hashed at once.
    pub hashers: usize,
    /// Processor cores, shared with a database on this machine.
    pub cores: usize,
    /// Time from its arrival on in which a command that meets locks is retried.
    pub retry_for: Duration,
}

/// A command in a queue or in flight.
#[derive(Debug)]
pub struct Queued<T> {
    /// The command itself.
    pub work: T,
    /// The next step of the command.
    pub step: Step,
    peer: PeerKey,
    arrived: Instant,
    /// The command is not executed before this time.
    due: Instant,
    /// The number of times that the command has met a lock.
    retries: usize,
    owns_row: bool,
}

/// Commands to be executed by one thread.
#[derive(Debug)]
pub struct Batch<T> {
    /// The commands, in the order of their arrival. They may be taken out before the batch is [finished].
    ///
    /// [finished]: Lanes::finished
    pub commands: Vec<Queued<T>>,
    queue: usize,
    started: Instant,
    /// The number of commands in the batch.
    size: usize,
    /// The most users that the lists of the batch have; 0 for a batch of other commands.
    pub users: usize,
}

struct Queue<T> {
    waiting: VecDeque<Queued<T>>,
    /// When each batch in flight was started.
    in_flight: Vec<Instant>,
    /// The number of the last batch of this queue: the queue with the lowest number is next.
    last: u64,
    /// The address that was served last.
    last_peer: PeerKey,
    /// The time that the last batch took. Rises to at most twice its former value, as a busy core lengthens batches.
    took: Duration,
}

/// The queues of commands, and the batches in flight.
pub struct Lanes<T> {
    capacity: Capacity,
    queues: [Queue<T>; RETRY + 1],
    /// Rows with a change that is in flight or paused. Other changes of them stay in their queues.
    rows: HashSet<i64>,
    queued: usize,
    batches: u64,
    /// Users of the lists in flight.
    users: usize,
}

impl<T> Lanes<T> {
    /// Creates empty lanes.
    pub fn new(capacity: Capacity) -> Lanes<T> {
        let queue = |at| Queue {
            waiting: VecDeque::new(),
            in_flight: Vec::new(),
            last: 0,
            last_peer: None,
            // First estimates of the pace: a hash with the parameters of OWASP takes 20 ms, and a database on
            // this machine answers at once.
            took: if at == HASH { Duration::from_millis(20) } else { Duration::ZERO },
        };
        let queues = std::array::from_fn(queue);
        Lanes { capacity, queues, rows: HashSet::new(), queued: 0, batches: 0, users: 0 }
    }

    /// Queues a command. Returns the one that is refused for it if too many passwords wait: the newest of the address
    /// that has the most.
    pub fn push(&mut self, work: T, step: Step, peer: PeerKey, now: Instant) -> Option<T> {
        let command = Queued { work, step, peer, arrived: now, due: now, retries: 0, owns_row: false };
        self.queue(command)
    }

    /// Queues a command for its next statement or hash; returns what [`Lanes::push`] does.
    pub fn push_next(&mut self, command: Queued<T>, step: Step) -> Option<T> {
        self.queue(Queued { step, ..command })
    }

    /// Queues a command that met a lock, behind a pause of 10 to 80 ms. Ends it and gives it back if its time is up.
    pub fn retry(&mut self, mut command: Queued<T>, now: Instant) -> Option<T> {
        command.due = now + retry_pause(command.retries);
        if command.due > command.arrived + self.capacity.retry_for {
            self.done(&command);
            return Some(command.work);
        }
        command.retries += 1;
        self.queued += 1;
        let queue = if command.step.lane == Lane::Hash { HASH } else { RETRY };
        self.queues[queue].waiting.push_back(command);
        None
    }

    /// Frees the row of a command that is done, or that no client waits for.
    pub fn done(&mut self, command: &Queued<T>) {
        if let Some(row) = command.step.changed_user.filter(|_| command.owns_row) {
            self.rows.remove(&row);
        }
    }

    /// Takes the batch to execute now, of the queue whose last batch is the longest ago: of passwords if `hashes` is set,
    /// else of statements.
    pub fn next(&mut self, now: Instant, hashes: bool) -> Option<Batch<T>> {
        let at = self.ready(now, hashes)?;
        let left = if at == LIST { MAX_LISTED_USERS - self.users } else { usize::MAX };
        let queue = &mut self.queues[at];
        let commands = queue.take(batch_limit(at), left, &mut self.rows, now);
        self.batches += 1;
        queue.last = self.batches;
        queue.in_flight.push(now);
        self.queued -= commands.len();
        let users = commands.iter().map(|command| command.step.max_users).sum();
        self.users += users;
        Some(Batch { size: commands.len(), commands, queue: at, started: now, users })
    }

    /// Returns when a batch becomes ready even if nothing is pushed and nothing finishes.
    pub fn next_due(&self, now: Instant, hashes: bool) -> Option<Instant> {
        let queues = self.queues.iter().enumerate().filter(|(at, _)| (*at == HASH) == hashes);
        let times = queues.filter(|(_, queue)| !queue.waiting.is_empty()).flat_map(|(_, queue)| {
            let stalled = queue.in_flight.iter().map(|started| *started + STUCK_BATCH);
            queue.waiting.iter().map(|command| command.due).chain(stalled)
        });
        times.filter(|at| *at > now).min()
    }

    /// Reports the end of a batch. Each of its commands is then [done](Lanes::done), or queued again.
    pub fn finished(&mut self, batch: &Batch<T>, now: Instant) {
        let queue = &mut self.queues[batch.queue];
        let place = queue.in_flight.iter().position(|other| *other == batch.started);
        queue.in_flight.swap_remove(place.expect("it is in flight"));
        self.users -= batch.users;
        let took = now - batch.started;
        queue.took = match batch.queue {
            HASH => (7 * queue.took + took) / 8,
            at if writes(at) => took.saturating_sub(PER_WRITE * batch.size as u32),
            _ => took,
        }
        .min(2 * queue.took.max(SHORT_BATCH / 8));
    }

    /// Drops the queued commands that no client waits for.
    pub fn retain(&mut self, awaited: impl Fn(&T) -> bool) {
        let mut dropped = Vec::new();
        for waiting in self.queues.iter_mut().map(|queue| &mut queue.waiting) {
            let (kept, gone): (VecDeque<_>, VecDeque<_>) =
                mem::take(waiting).into_iter().partition(|command| awaited(&command.work));
            *waiting = kept;
            dropped.extend(gone);
        }
        self.queued -= dropped.len();
        dropped.iter().for_each(|command| self.done(command));
    }

    /// Returns the number of queued commands.
    pub fn len(&self) -> usize {
        self.queued
    }

    /// Returns the number of passwords that wait to be hashed.
    pub fn hashes_waiting(&self) -> usize {
        self.queues[HASH].waiting.len()
    }

    /// Returns whether no command is queued and none in flight.
    pub fn is_idle(&self) -> bool {
        self.queued == 0 && self.queues.iter().all(|queue| queue.in_flight.is_empty())
    }

    fn queue(&mut self, command: Queued<T>) -> Option<T> {
        self.queued += 1;
        let lane = command.step.lane;
        self.queues[lane as usize].waiting.push_back(command);
        if lane == Lane::Hash { self.refuse_a_hash() } else { None }
    }

    /// Removes a command from the queue of passwords if they are more than the threads hash in [`MAX_HASH_WAIT`].
    fn refuse_a_hash(&mut self) -> Option<T> {
        let Queue { waiting, took, .. } = &mut self.queues[HASH];
        let most = MAX_HASH_WAIT.as_micros() / took.as_micros().max(1) * self.capacity.hashers as u128;
        if waiting.len() as u128 <= most.max(1) {
            return None;
        }
        let mut counts: HashMap<PeerKey, usize> = HashMap::new();
        waiting.iter().for_each(|command| *counts.entry(command.peer).or_default() += 1);
        let at = (0..waiting.len()).max_by_key(|at| (counts[&waiting[*at].peer], *at))?;
        self.queued -= 1;
        waiting.remove(at).map(|command| command.work)
    }

    /// Returns the queue of the batch that [`Lanes::next`] takes, if there is one.
    pub fn ready(&self, now: Instant, hashes: bool) -> Option<usize> {
        let is_ready = |at: &usize| {
            (*at == HASH) == hashes
                && !self.queues[*at].waiting.is_empty()
                && self.may_start(*at, now)
                && self.queues[*at].waiting.iter().any(|command| command.may_start(&self.rows, now))
        };
        (0..=RETRY).filter(is_ready).min_by_key(|at| self.queues[*at].last)
    }

    /// Returns whether one more batch of a queue may be in flight.
    fn may_start(&self, at: usize, now: Instant) -> bool {
        let Capacity { sessions, hashers, .. } = self.capacity;
        let (but_one, but_two) = ((sessions - 1).max(1), sessions.saturating_sub(2).max(1));
        // Queues, and the most batches that they may have in flight together.
        let bounds: [(&[usize], usize); 7] = [
            (&[FIND, LIST, CREATE, CHANGE, SINGLE, RETRY], sessions),
            (&[CREATE, CHANGE, SINGLE, RETRY], but_one),
            (&[LIST], but_one),
            (&[CREATE], but_two),
            (&[CHANGE, SINGLE], but_two),
            (&[RETRY], (but_one / 2).max(1)),
            (&[HASH], hashers),
        ];
        let in_flight = |at: &usize| self.queues[*at].in_flight.len();
        let mut own = bounds.iter().filter(|(queues, _)| queues.contains(&at));
        own.all(|(queues, most)| queues.iter().map(in_flight).sum::<usize>() < *most)
            && self.is_paced(at, now)
            && (at != LIST || self.users < MAX_LISTED_USERS)
    }

    /// Returns whether the pace of a queue allows one more batch now.
    ///
    /// Short batches wait for no network and no slow disk: if they were in flight on more than half of the cores, they
    /// would only compete with one another, while a later batch is larger. Two batches of writes of one lane overlap,
    /// because each waits for its commit. Longer batches wait for the network or a disk, so they may use all sessions.
    /// A batch that is in flight for [`STUCK_BATCH`] waits for a lock, most likely, and does not hold up the next one.
    fn is_paced(&self, at: usize, now: Instant) -> bool {
        let Queue { in_flight, took, .. } = &self.queues[at];
        let few = (self.capacity.cores / 2).max(1 + usize::from(writes(at)));
        let moving = in_flight.iter().filter(|started| now < **started + STUCK_BATCH).count();
        batch_limit(at) == 1 || *took >= SHORT_BATCH || moving < few
    }
}

impl<T> Queued<T> {
    /// Returns whether a command may start: its pause is over, and no other change of its row is in flight or
    /// paused.
    fn may_start(&self, rows: &HashSet<i64>, now: Instant) -> bool {
        self.due <= now && (self.owns_row || self.step.changed_user.is_none_or(|row| !rows.contains(&row)))
    }
}

impl<T> Queue<T> {
    /// Takes up to `limit` commands that may start, and of lists only while they have fewer users than `users`: one of each
    /// address first, beginning behind the address whose turn was last, then by age. Of the changes of a row, takes the
    /// oldest, and the row.
    fn take(
        &mut self,
        limit: usize,
        mut users: usize,
        rows: &mut HashSet<i64>,
        now: Instant,
    ) -> Vec<Queued<T>> {
        let (mut counts, mut changed): (HashMap<PeerKey, usize>, HashSet<i64>) = Default::default();
        let mut order: Vec<_> = (0..)
            .zip(&self.waiting)
            .filter(|(_, command)| {
                command.may_start(rows, now)
                    && command.step.changed_user.is_none_or(|row| changed.insert(row))
            })
            .map(|(at, command)| {
                let count = counts.entry(command.peer).and_modify(|count| *count += 1).or_insert(1);
                (*count, command.peer <= self.last_peer, command.peer, at)
            })
            .collect();
        order.sort_unstable();
        let mut is_chosen = vec![false; self.waiting.len()];
        for (count, _, peer, at) in order.into_iter().take(limit) {
            if users == 0 {
                break;
            }
            let command = &mut self.waiting[at];
            users = users.saturating_sub(command.step.max_users);
            if let Some(row) = command.step.changed_user {
                rows.insert(row);
                command.owns_row = true;
            }
            is_chosen[at] = true;
            if count == 1 {
                self.last_peer = peer;
            }
        }
        self.remove(is_chosen)
    }

    /// Removes the commands that are chosen, and returns them in their order.
    fn remove(&mut self, is_chosen: Vec<bool>) -> Vec<Queued<T>> {
        let mut removed = Vec::new();
        for is_chosen in is_chosen {
            match self.waiting.pop_front() {
                Some(command) if is_chosen => removed.push(command),
                rest => self.waiting.extend(rest),
            }
        }
        removed
    }
}

fn writes(queue: usize) -> bool {
    matches!(queue, CREATE | CHANGE | SINGLE | RETRY)
}

/// Commands in one batch, at most. With 64 a statement's fixed cost no longer shows.
fn batch_limit(queue: usize) -> usize {
    if matches!(queue, FIND | LIST | CREATE | CHANGE) { 64 } else { 1 }
}

#[cfg(test)]
mod tests;
