//! The queues of commands. They decide which commands are executed next, in which batches, and how many batches at
//! once. A pure value: no thread, no lock and no clock of its own.
//!
//! Each kind of statement has a queue, its lane. A batch has the commands that arrived while earlier batches of their
//! lane were in flight; no command waits for a batch to fill. These rules hold for any number of commands and locks:
//! - Batches of writes leave one session to reads, creates and changes leave one to each other, and lists leave one to
//!   finds.
//! - Lanes take turns, and so do the addresses of clients within a lane.
//! - One change of a row is in flight at a time, the oldest of its lane first. The row stays taken until the last
//!   statement of its change has ended.
//! - A command that met a lock is retried alone after a pause. Retries take at most half of the sessions for writes.

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
/// The queue of commands that met a lock. It comes after the queues of the lanes.
const RETRY: usize = Lane::VARIANTS.len();

/// A batch that takes less time counts as short: it waits for no network and no slow disk.
const SHORT_BATCH: Duration = Duration::from_millis(1);

/// The time that each command adds to a batch of writes.
const TIME_PER_WRITE: Duration = Duration::from_micros(20);

/// A batch that is in flight for longer counts as stuck: most likely it waits for a lock.
const STUCK_BATCH_TIME: Duration = Duration::from_millis(5);

/// The most users that the lists in flight may have when another list starts. The lists in flight have at most one page
/// more than this, so the memory of their rows has a bound.
const MAX_LISTED_USERS: usize = page::DEFAULT_MAX_PER_PAGE as usize;

/// The longest time that a password may wait for the threads that hash.
const MAX_HASH_WAIT: Duration = Duration::from_secs(2);

/// The most batches and hashes that may be in flight, and the time for retries.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// The most batches of statements in flight: one for each session.
    pub sessions: usize,
    /// The most passwords that are hashed at once.
    pub hashers: usize,
    /// The processor cores of the machine, which a database may share.
    pub cores: usize,
    /// How long after its arrival a command that meets locks is retried.
    pub retry_for: Duration,
}

/// A command in a queue or in flight.
#[derive(Debug)]
pub struct QueuedCommand<T> {
    /// The command itself.
    pub work: T,
    /// The step that the command was queued for.
    pub queued_step: Step,
    peer: PeerKey,
    arrived: Instant,
    /// The earliest time at which the command may be executed.
    due: Instant,
    /// The number of times that the command has met a lock.
    retries: usize,
    /// True if no other change of the same row may start: this one is in flight or paused.
    owns_row: bool,
}

/// Commands to be executed by one thread.
#[derive(Debug)]
pub struct Batch<T> {
    /// The commands, in the order of their arrival. The caller may take them out before the batch [ends].
    ///
    /// [ends]: Lanes::end_batch
    pub commands: Vec<QueuedCommand<T>>,
    queue: usize,
    started: Instant,
    /// The number of commands that the batch began with.
    size: usize,
    /// The most users that the lists of the batch have; 0 for a batch of other commands.
    pub users: usize,
}

impl<T> Batch<T> {
    /// Returns whether the batch has taken less than [`SHORT_BATCH`] until now.
    pub fn is_short(&self, now: Instant) -> bool {
        now < self.started + SHORT_BATCH
    }
}

struct Queue<T> {
    waiting: VecDeque<QueuedCommand<T>>,
    /// When each batch in flight was started.
    in_flight: Vec<Instant>,
    /// The number of the last batch of this queue. The queue with the lowest number has the next turn.
    last_batch: u64,
    /// The address whose turn was last.
    last_peer: PeerKey,
    /// The time that the last batch took, or an average for hashes. Rises to at most twice its former value, because a
    /// busy core may delay one batch.
    last_duration: Duration,
}

/// The queues of commands, and the batches in flight.
pub struct Lanes<T> {
    capacity: Capacity,
    queues: [Queue<T>; RETRY + 1],
    /// Ids of users with a change that is in flight or paused. Other changes of these users stay queued.
    taken_rows: HashSet<i64>,
    /// The number of batches that were started.
    batches: u64,
    /// The most users that the lists in flight may have.
    users: usize,
}

impl<T> Lanes<T> {
    /// Creates empty lanes.
    pub fn new(capacity: Capacity) -> Lanes<T> {
        let queue = |at| Queue {
            waiting: VecDeque::new(),
            in_flight: Vec::new(),
            last_batch: 0,
            last_peer: None,
            // Estimates before the first batch: a hash with the parameters of OWASP takes 20 ms, and a database on
            // this machine answers at once.
            last_duration: if at == HASH { Duration::from_millis(20) } else { Duration::ZERO },
        };
        let queues = std::array::from_fn(queue);
        Lanes { capacity, queues, taken_rows: HashSet::new(), batches: 0, users: 0 }
    }

    /// Queues a command. If too many passwords wait to be hashed, returns a command that is refused: the newest one of
    /// the address that has the most.
    pub fn push(&mut self, work: T, step: Step, peer: PeerKey, now: Instant) -> Option<T> {
        let command = QueuedCommand {
            work,
            queued_step: step,
            peer,
            arrived: now,
            due: now,
            retries: 0,
            owns_row: false,
        };
        self.push_next(command, step)
    }

    /// Queues a command for its next step. Returns a refused command as [`Lanes::push`] does.
    pub fn push_next(&mut self, command: QueuedCommand<T>, step: Step) -> Option<T> {
        self.queues[step.lane as usize].waiting.push_back(QueuedCommand { queued_step: step, ..command });
        if step.lane == Lane::Hash { self.refuse_a_hash() } else { None }
    }

    /// Queues a command that met a lock, to be executed after a pause of 10 to 80 ms. If its time is up, ends the
    /// command and returns it.
    pub fn retry(&mut self, mut command: QueuedCommand<T>, now: Instant) -> Option<T> {
        command.due = now + retry_pause(command.retries);
        if command.due > command.arrived + self.capacity.retry_for {
            self.free_row(&command);
            return Some(command.work);
        }
        command.retries += 1;
        let queue = if command.queued_step.lane == Lane::Hash { HASH } else { RETRY };
        self.queues[queue].waiting.push_back(command);
        None
    }

    /// Frees the row of a command that is done, or whose client does not wait any more.
    pub fn free_row(&mut self, command: &QueuedCommand<T>) {
        if let Some(row) = command.queued_step.changed_user.filter(|_| command.owns_row) {
            self.taken_rows.remove(&row);
        }
    }

    /// Takes the batch to execute now, from the ready queue whose last batch is the longest ago. With `hashes`, takes
    /// a password to hash, else a batch of statements.
    pub fn take_batch(&mut self, now: Instant, hashes: bool) -> Option<Batch<T>> {
        let at = self.find_ready(now, hashes)?;
        let left = if at == LIST { MAX_LISTED_USERS - self.users } else { usize::MAX };
        let queue = &mut self.queues[at];
        let commands = queue.take_commands(max_batch(at), left, &mut self.taken_rows, now);
        self.batches += 1;
        queue.last_batch = self.batches;
        queue.in_flight.push(now);
        let users = commands.iter().map(|command| command.queued_step.max_users).sum();
        self.users += users;
        Some(Batch { size: commands.len(), commands, queue: at, started: now, users })
    }

    /// Returns the time at which a batch becomes ready by itself: a pause ends, or a batch in flight counts as stuck.
    pub fn next_due(&self, now: Instant, hashes: bool) -> Option<Instant> {
        let queues = self.queues.iter().enumerate().filter(|(at, _)| (*at == HASH) == hashes);
        let times = queues.filter(|(_, queue)| !queue.waiting.is_empty()).flat_map(|(_, queue)| {
            let stalled = queue.in_flight.iter().map(|started| *started + STUCK_BATCH_TIME);
            queue.waiting.iter().map(|command| command.due).chain(stalled)
        });
        times.filter(|at| *at > now).min()
    }

    /// Records the end of a batch. The caller then queues each command of the batch again, or calls [`Lanes::free_row`]
    /// with the command.
    pub fn end_batch(&mut self, batch: &Batch<T>, now: Instant) {
        let queue = &mut self.queues[batch.queue];
        let place = queue.in_flight.iter().position(|other| *other == batch.started);
        queue.in_flight.swap_remove(place.expect("it is in flight"));
        self.users -= batch.users;
        let took = now - batch.started;
        queue.last_duration = match batch.queue {
            HASH => (7 * queue.last_duration + took) / 8,
            at if has_writes(at) => took.saturating_sub(TIME_PER_WRITE * batch.size as u32),
            _ => took,
        }
        .min(2 * queue.last_duration.max(SHORT_BATCH / 8));
    }

    /// Drops the queued commands whose client does not wait any more: `awaited` returns false for them.
    pub fn retain_awaited(&mut self, awaited: impl Fn(&T) -> bool) {
        let mut dropped = Vec::new();
        for waiting in self.queues.iter_mut().map(|queue| &mut queue.waiting) {
            let (kept, gone): (VecDeque<_>, VecDeque<_>) =
                mem::take(waiting).into_iter().partition(|command| awaited(&command.work));
            *waiting = kept;
            dropped.extend(gone);
        }
        dropped.iter().for_each(|command| self.free_row(command));
    }

    /// Returns the number of queued commands.
    pub fn len(&self) -> usize {
        self.queues.iter().map(|queue| queue.waiting.len()).sum()
    }

    /// Returns the number of passwords that wait to be hashed.
    pub fn hashes_waiting(&self) -> usize {
        self.queues[HASH].waiting.len()
    }

    /// Returns true if no command is queued or in flight.
    pub fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.waiting.is_empty() && queue.in_flight.is_empty())
    }

    /// Removes a command if more passwords wait than the threads hash in [`MAX_HASH_WAIT`]: the newest one of the
    /// address that has the most.
    fn refuse_a_hash(&mut self) -> Option<T> {
        let Queue { waiting, last_duration: took, .. } = &mut self.queues[HASH];
        let most = MAX_HASH_WAIT.as_micros() / took.as_micros().max(1) * self.capacity.hashers as u128;
        if waiting.len() as u128 <= most.max(1) {
            return None;
        }
        let mut counts: HashMap<PeerKey, usize> = HashMap::new();
        waiting.iter().for_each(|command| *counts.entry(command.peer).or_default() += 1);
        let at = (0..waiting.len()).max_by_key(|at| (counts[&waiting[*at].peer], *at))?;
        waiting.remove(at).map(|command| command.work)
    }

    /// Returns the queue of the batch that [`Lanes::take_batch`] takes, if there is one.
    pub fn find_ready(&self, now: Instant, hashes: bool) -> Option<usize> {
        let is_ready = |at: &usize| {
            (*at == HASH) == hashes
                && !self.queues[*at].waiting.is_empty()
                && self.may_start(*at, now)
                && self.queues[*at].waiting.iter().any(|command| command.may_start(&self.taken_rows, now))
        };
        (0..=RETRY).filter(is_ready).min_by_key(|at| self.queues[*at].last_batch)
    }

    /// Returns whether one more batch of a queue may be in flight.
    fn may_start(&self, at: usize, now: Instant) -> bool {
        let Capacity { sessions, hashers, .. } = self.capacity;
        let (but_one, but_two) = ((sessions - 1).max(1), sessions.saturating_sub(2).max(1));
        // Groups of queues, and the most batches that the queues of a group may have in flight together.
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
            && self.pace_allows(at, now)
            && (at != LIST || self.users < MAX_LISTED_USERS)
    }

    /// Returns true if the pace of a queue allows one more batch now.
    ///
    /// Short batches occupy a core, as they wait for no network and no slow disk. If they were in flight on more than
    /// half of the cores, they would compete with one another, while a later batch would be larger. Two batches of
    /// writes of one lane may overlap, because each waits for its commit. Longer batches wait for the network or a
    /// disk, so they may use all sessions. A stuck batch does not hold up the next one.
    fn pace_allows(&self, at: usize, now: Instant) -> bool {
        let Queue { in_flight, last_duration, .. } = &self.queues[at];
        let few = (self.capacity.cores / 2).max(1 + usize::from(has_writes(at)));
        let moving = in_flight.iter().filter(|started| now < **started + STUCK_BATCH_TIME).count();
        max_batch(at) == 1 || *last_duration >= SHORT_BATCH || moving < few
    }
}

impl<T> QueuedCommand<T> {
    /// Returns true if a command may start: its pause is over, and no other change of its row is in flight or paused.
    fn may_start(&self, rows: &HashSet<i64>, now: Instant) -> bool {
        self.due <= now
            && (self.owns_row || self.queued_step.changed_user.is_none_or(|row| !rows.contains(&row)))
    }
}

impl<T> Queue<T> {
    /// Takes up to `limit` commands that may start, but no further list once the taken lists may have `users` users.
    /// Takes one command of each address first, beginning behind the address whose turn was last; then the oldest
    /// commands. Of the changes of a row, takes the oldest, which then owns the row.
    fn take_commands(
        &mut self,
        limit: usize,
        mut users: usize,
        rows: &mut HashSet<i64>,
        now: Instant,
    ) -> Vec<QueuedCommand<T>> {
        let (mut counts, mut changed): (HashMap<PeerKey, usize>, HashSet<i64>) = Default::default();
        let mut order: Vec<_> = (0..)
            .zip(&self.waiting)
            .filter(|(_, command)| {
                command.may_start(rows, now)
                    && command.queued_step.changed_user.is_none_or(|row| changed.insert(row))
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
            users = users.saturating_sub(command.queued_step.max_users);
            if let Some(row) = command.queued_step.changed_user {
                rows.insert(row);
                command.owns_row = true;
            }
            is_chosen[at] = true;
            if count == 1 {
                self.last_peer = peer;
            }
        }
        self.remove_chosen(is_chosen)
    }

    /// Removes the chosen commands from the queue, and returns them in their order.
    fn remove_chosen(&mut self, is_chosen: Vec<bool>) -> Vec<QueuedCommand<T>> {
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

/// Returns true if the commands of a queue change rows.
fn has_writes(queue: usize) -> bool {
    matches!(queue, CREATE | CHANGE | SINGLE | RETRY)
}

/// Returns the most commands of a batch. With 64 commands, the fixed cost of a statement does not show any more.
fn max_batch(queue: usize) -> usize {
    if matches!(queue, FIND | LIST | CREATE | CHANGE) { 64 } else { 1 }
}

#[cfg(test)]
mod tests;
