//! The queues of commands. They decide which commands are executed next, in which batches, and how many batches at
//! once. A pure value: no thread, no lock and no clock of its own.
//!
//! Each kind of statement has a queue, its lane. A batch has the commands that arrived while earlier batches of their
//! lane were in flight; no command waits for a batch to fill. These rules hold for any number of commands and locks:
//! - Batches of writes leave one session to reads. Creates and changes leave a session to each other, and lists
//!   leave one to finds.
//! - Lanes take turns, and so do the addresses of clients within a lane.
//! - Only one change of a row is in flight at a time: the oldest one in its lane. Other changes of the row wait until
//!   the last statement of this change has ended.
//! - A command that meets a lock of another session is retried after a pause, in a batch of its own. Retries take at
//!   most half of the sessions for writes.

use crate::http::PeerKey;
use crate::operations::{Lane, Step, retry_pause};
use crate::users::page;
use std::collections::{HashMap, HashSet, VecDeque};
use std::mem;
use std::time::{Duration, Instant};
use strum::VariantNames;

/// The indexes of the queues in [`Lanes`]: each lane has one.
const FIND: usize = Lane::Find as usize;
const LIST: usize = Lane::List as usize;
const CREATE: usize = Lane::Create as usize;
const CHANGE: usize = Lane::Change as usize;
const SINGLE: usize = Lane::Single as usize;
const HASH: usize = Lane::Hash as usize;
/// The index of the queue for commands that have met a lock and are retried. It follows the indexes of the lanes.
const RETRY: usize = Lane::VARIANTS.len();

/// The time below which a batch counts as short: it has waited for no network and no slow disk.
const SHORT_BATCH_TIME: Duration = Duration::from_millis(1);

/// An estimate of how much longer each command makes a batch of writes. The estimate is subtracted from the time of a
/// batch, so that a large batch can count as short, too.
const ESTIMATED_TIME_PER_WRITE: Duration = Duration::from_micros(20);

/// The time after which a batch in flight counts as stuck: most likely it waits for a lock.
const STUCK_BATCH_TIME: Duration = Duration::from_millis(5);

/// The number of users in the lists in flight from which on no further list starts, so that their rows do not use up
/// the memory. The last list that starts may exceed the number by a page.
const MAX_USERS_IN_LISTS: usize = page::DEFAULT_MAX_PER_PAGE as usize;

/// The longest time that a password may wait until a thread hashes it. If more passwords wait
/// than can be hashed in this time, requests with passwords are refused.
const MAX_HASH_WAIT: Duration = Duration::from_secs(2);

/// The resources for executing commands: they limit the batches and hashes in flight, and the time for retries.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    /// The number of database sessions, and so the most batches of statements in flight.
    pub sessions: usize,
    /// The number of threads that hash, and so the most passwords that are hashed at once.
    pub hashers: usize,
    /// The number of processor cores of the machine. A database on the same machine uses them, too.
    pub cores: usize,
    /// The longest time after its arrival for which a command that meets locks is retried.
    pub max_retry_time: Duration,
}

/// A command that is queued or in flight.
#[derive(Debug)]
pub struct QueuedCommand<T> {
    /// The command, with whatever the caller needs to execute and to answer it.
    pub task: T,
    /// The step for which the command was queued last, such as hashing its password. The step names the lane.
    pub queued_step: Step,
    /// The client address, by which clients take turns within a queue.
    peer: PeerKey,
    arrived_at: Instant,
    /// The earliest time at which the command may be executed: a command that has met a lock pauses until then.
    due_at: Instant,
    /// How often the command has met a lock and was queued again.
    retries: usize,
    /// True if the command changes a row, and is in flight or paused. Other changes of this row stay queued meanwhile.
    owns_row: bool,
}

/// Commands from one queue that one thread executes together.
#[derive(Debug)]
pub struct Batch<T> {
    /// The commands, in the order of their arrival. The caller may take them out before it calls [`Lanes::end_batch`].
    pub commands: Vec<QueuedCommand<T>>,
    queue_index: usize,
    started_at: Instant,
    /// The number of commands in the batch when it was started.
    initial_size: usize,
    /// The most users that the answers to a batch of lists can have together; 0 for a batch of other commands.
    pub max_listed_users: usize,
}

impl<T> Batch<T> {
    /// Returns true if the batch was started less than [`SHORT_BATCH_TIME`] ago.
    pub fn is_short(&self, now: Instant) -> bool {
        now < self.started_at + SHORT_BATCH_TIME
    }
}

/// The queue of a lane, or of commands to retry.
struct Queue<T> {
    /// The commands that wait, in the order in which they were queued.
    commands: VecDeque<QueuedCommand<T>>,
    /// The times at which the batches in flight were started.
    batch_starts: Vec<Instant>,
    /// The number of the last batch that this queue has started. Of the queues that are ready, the one with the lowest
    /// number has the next turn.
    last_batch_number: u64,
    /// The client address that had the last turn within this queue.
    last_peer: PeerKey,
    /// The time that the last batch took; for passwords, an average. One batch raises it to at most twice its former
    /// value, because a busy core may have delayed this batch.
    recent_batch_time: Duration,
}

/// The queues of commands, and the batches in flight.
pub struct Lanes<T> {
    capacity: Capacity,
    /// The queue of each lane, and then the queue of commands to retry.
    queues: [Queue<T>; RETRY + 1],
    /// The ids of users of whom a change is in flight or paused. Other changes of these users stay queued.
    taken_rows: HashSet<i64>,
    /// The number of batches that were started, which is the number of the last one.
    started_batches: u64,
    /// The most users that the answers to the lists in flight can have together.
    max_listed_users: usize,
}

impl<T> Lanes<T> {
    pub fn new(capacity: Capacity) -> Lanes<T> {
        let queue = |at| Queue {
            commands: VecDeque::new(),
            batch_starts: Vec::new(),
            last_batch_number: 0,
            last_peer: None,
            // Estimates the time of the first batch: a hash by the parameters of OWASP takes 20 ms, and a database on
            // this machine answers within a millisecond.
            recent_batch_time: if at == HASH { Duration::from_millis(20) } else { Duration::ZERO },
        };
        let queues = std::array::from_fn(queue);
        Lanes { capacity, queues, taken_rows: HashSet::new(), started_batches: 0, max_listed_users: 0 }
    }

    /// Queues a new command. If too many passwords wait then, removes the command with the newest password of the
    /// client address that has the most passwords waiting, and returns the command for the caller to refuse.
    pub fn push(&mut self, task: T, step: Step, peer: PeerKey, now: Instant) -> Option<T> {
        let (arrived_at, due_at, retries, owns_row) = (now, now, 0, false);
        let command = QueuedCommand { task, queued_step: step, peer, arrived_at, due_at, retries, owns_row };
        self.push_next_step(command, step)
    }

    /// Queues a command again for its next step. May return a command for the caller to refuse, as [`Lanes::push`]
    /// does.
    pub fn push_next_step(&mut self, command: QueuedCommand<T>, step: Step) -> Option<T> {
        self.queues[step.lane as usize].commands.push_back(QueuedCommand { queued_step: step, ..command });
        if step.lane == Lane::Hash { self.remove_surplus_password() } else { None }
    }

    /// Queues a command again because it has met a lock. It may be executed after a pause of 10 to 80 ms. If its time
    /// for retries is over by then, returns the command instead, for the caller to refuse.
    pub fn push_retry(&mut self, mut command: QueuedCommand<T>, now: Instant) -> Option<T> {
        command.due_at = now + retry_pause(command.retries);
        if command.due_at > command.arrived_at + self.capacity.max_retry_time {
            self.free_row(&command);
            return Some(command.task);
        }
        command.retries += 1;
        let queue = if command.queued_step.lane == Lane::Hash { HASH } else { RETRY };
        self.queues[queue].commands.push_back(command);
        None
    }

    /// Frees the row that a command changes, so that other changes of the row may start. The caller must not execute
    /// the command any more: it is done or refused, or its client does not wait for the answer.
    pub fn free_row(&mut self, command: &QueuedCommand<T>) {
        if let Some(row) = command.queued_step.changed_user_id.filter(|_| command.owns_row) {
            self.taken_rows.remove(&row);
        }
    }

    /// Takes the next batch to execute, from the ready queue that had its last turn the longest ago. `is_hasher`:
    /// true for a batch of passwords to hash, false for a batch of statements.
    pub fn take_batch(&mut self, now: Instant, is_hasher: bool) -> Option<Batch<T>> {
        let queue_index = self.find_ready_queue(now, is_hasher)?;
        let left = if queue_index == LIST { MAX_USERS_IN_LISTS - self.max_listed_users } else { usize::MAX };
        let queue = &mut self.queues[queue_index];
        let commands = queue.take_commands(max_batch_size(queue_index), left, &mut self.taken_rows, now);
        self.started_batches += 1;
        queue.last_batch_number = self.started_batches;
        queue.batch_starts.push(now);
        let max_listed_users = commands.iter().map(|command| command.queued_step.max_listed_users).sum();
        self.max_listed_users += max_listed_users;
        Some(Batch { initial_size: commands.len(), commands, queue_index, started_at: now, max_listed_users })
    }

    /// Returns the next time at which a batch may become ready although no batch ends: the pause of a command is over,
    /// or a batch in flight counts as stuck.
    pub fn next_ready_time(&self, now: Instant, is_hasher: bool) -> Option<Instant> {
        let queues = self.queues.iter().enumerate().filter(|(at, _)| (*at == HASH) == is_hasher);
        let times = queues.filter(|(_, queue)| !queue.commands.is_empty()).flat_map(|(_, queue)| {
            let stuck = queue.batch_starts.iter().map(|started_at| *started_at + STUCK_BATCH_TIME);
            queue.commands.iter().map(|command| command.due_at).chain(stuck)
        });
        times.filter(|at| *at > now).min()
    }

    /// Records that a batch has ended. Afterwards, the caller queues each command of the batch again, or calls
    /// [`Lanes::free_row`] with the command.
    pub fn end_batch(&mut self, batch: &Batch<T>, now: Instant) {
        let queue = &mut self.queues[batch.queue_index];
        let index = queue.batch_starts.iter().position(|other| *other == batch.started_at);
        queue.batch_starts.swap_remove(index.expect("it is in flight"));
        self.max_listed_users -= batch.max_listed_users;
        let took = now - batch.started_at;
        queue.recent_batch_time = match batch.queue_index {
            HASH => (7 * queue.recent_batch_time + took) / 8,
            at if has_writes(at) => took.saturating_sub(ESTIMATED_TIME_PER_WRITE * batch.initial_size as u32),
            _ => took,
        }
        .min(2 * queue.recent_batch_time.max(SHORT_BATCH_TIME / 8));
    }

    /// Drops the queued commands for which `is_awaited` returns false, because their client does not wait for the
    /// answer any more.
    pub fn retain_awaited(&mut self, is_awaited: impl Fn(&T) -> bool) {
        let mut dropped = Vec::new();
        for commands in self.queues.iter_mut().map(|queue| &mut queue.commands) {
            let (kept, gone): (VecDeque<_>, VecDeque<_>) =
                mem::take(commands).into_iter().partition(|command| is_awaited(&command.task));
            *commands = kept;
            dropped.extend(gone);
        }
        dropped.iter().for_each(|command| self.free_row(command));
    }

    /// Returns the number of queued commands.
    pub fn queued_commands(&self) -> usize {
        self.queues.iter().map(|queue| queue.commands.len()).sum()
    }

    /// Returns the number of passwords that wait to be hashed.
    pub fn waiting_passwords(&self) -> usize {
        self.queues[HASH].commands.len()
    }

    /// Returns true if no command is queued or in flight.
    pub fn is_idle(&self) -> bool {
        self.queues.iter().all(|queue| queue.commands.is_empty() && queue.batch_starts.is_empty())
    }

    /// Removes a command and returns it if more passwords wait than can be hashed within [`MAX_HASH_WAIT`]. Chooses the
    /// command with the newest password of the client address that has the most passwords waiting.
    fn remove_surplus_password(&mut self) -> Option<T> {
        let Queue { commands, recent_batch_time: took, .. } = &mut self.queues[HASH];
        let most = MAX_HASH_WAIT.as_micros() / took.as_micros().max(1) * self.capacity.hashers as u128;
        if commands.len() as u128 <= most.max(1) {
            return None;
        }
        let mut counts: HashMap<PeerKey, usize> = HashMap::new();
        commands.iter().for_each(|command| *counts.entry(command.peer).or_default() += 1);
        let at = (0..commands.len()).max_by_key(|at| (counts[&commands[*at].peer], *at))?;
        commands.remove(at).map(|command| command.task)
    }

    /// Returns the index of the queue from which [`Lanes::take_batch`] would take a batch now, if there is one.
    pub fn find_ready_queue(&self, now: Instant, is_hasher: bool) -> Option<usize> {
        let is_ready = |at: &usize| {
            (*at == HASH) == is_hasher
                && !self.queues[*at].commands.is_empty()
                && self.may_start_batch(*at, now)
                && self.queues[*at].commands.iter().any(|command| command.may_start(&self.taken_rows, now))
        };
        (0..=RETRY).filter(is_ready).min_by_key(|at| self.queues[*at].last_batch_number)
    }

    /// Returns true if one more batch of the queue with this index may be in flight.
    fn may_start_batch(&self, queue: usize, now: Instant) -> bool {
        let Capacity { sessions, hashers, .. } = self.capacity;
        let (but_one, but_two) = ((sessions - 1).max(1), sessions.saturating_sub(2).max(1));
        // Each row has a group of queues, and the most batches that these queues may have in flight together.
        let bounds: [(&[usize], usize); 7] = [
            (&[FIND, LIST, CREATE, CHANGE, SINGLE, RETRY], sessions),
            (&[CREATE, CHANGE, SINGLE, RETRY], but_one),
            (&[LIST], but_one),
            (&[CREATE], but_two),
            (&[CHANGE, SINGLE], but_two),
            (&[RETRY], (but_one / 2).max(1)),
            (&[HASH], hashers),
        ];
        let in_flight = |at: &usize| self.queues[*at].batch_starts.len();
        let mut own = bounds.iter().filter(|(queues, _)| queues.contains(&queue));
        own.all(|(queues, most)| queues.iter().map(in_flight).sum::<usize>() < *most)
            && self.may_overlap(queue, now)
            && (queue != LIST || self.max_listed_users < MAX_USERS_IN_LISTS)
    }

    /// Returns true if one more batch of a queue would be of use beside its batches in flight.
    ///
    /// Short batches occupy a core, because they do not wait for a network or a slow disk. They get half of the cores:
    /// on more they would compete with one another and with the database. Two batches of writes may overlap on any
    /// machine, because each waits for its commit. Longer batches wait for the network or a disk, so they may use all
    /// sessions. Stuck batches are not counted, so that they do not delay the next one.
    fn may_overlap(&self, queue: usize, now: Instant) -> bool {
        let Queue { batch_starts, recent_batch_time, .. } = &self.queues[queue];
        let few = (self.capacity.cores / 2).max(1 + usize::from(has_writes(queue)));
        let moving = batch_starts.iter().filter(|started_at| now < **started_at + STUCK_BATCH_TIME).count();
        max_batch_size(queue) == 1 || *recent_batch_time >= SHORT_BATCH_TIME || moving < few
    }
}

impl<T> QueuedCommand<T> {
    /// Returns true if a command may start: its pause is over, and no other change of its row is in flight or paused.
    fn may_start(&self, taken_rows: &HashSet<i64>, now: Instant) -> bool {
        let row = self.queued_step.changed_user_id.filter(|_| !self.owns_row);
        self.due_at <= now && row.is_none_or(|row| !taken_rows.contains(&row))
    }
}

impl<T> Queue<T> {
    /// Takes up to `max_commands` commands that may start, and no further list once the answers to the taken lists can
    /// have `max_listed_users` users together.
    ///
    /// Takes the commands in rounds: each round takes the next command of each client address, beginning with the
    /// address after the one that had the last turn. Takes only the oldest change of a row, and marks the row as taken.
    fn take_commands(
        &mut self,
        max_commands: usize,
        mut max_listed_users: usize,
        taken_rows: &mut HashSet<i64>,
        now: Instant,
    ) -> Vec<QueuedCommand<T>> {
        let (mut counts, mut changed): (HashMap<PeerKey, usize>, HashSet<i64>) = Default::default();
        let mut order: Vec<_> = (0..)
            .zip(&self.commands)
            .filter(|(_, command)| {
                command.may_start(taken_rows, now)
                    && command.queued_step.changed_user_id.is_none_or(|row| changed.insert(row))
            })
            .map(|(at, command)| {
                let count = counts.entry(command.peer).and_modify(|count| *count += 1).or_insert(1);
                (*count, command.peer <= self.last_peer, command.peer, at)
            })
            .collect();
        order.sort_unstable();
        let mut is_chosen = vec![false; self.commands.len()];
        for (count, _, peer, at) in order.into_iter().take(max_commands) {
            if max_listed_users == 0 {
                break;
            }
            let command = &mut self.commands[at];
            max_listed_users = max_listed_users.saturating_sub(command.queued_step.max_listed_users);
            if let Some(row) = command.queued_step.changed_user_id {
                taken_rows.insert(row);
                command.owns_row = true;
            }
            is_chosen[at] = true;
            if count == 1 {
                self.last_peer = peer;
            }
        }
        self.remove_chosen(is_chosen)
    }

    /// Removes the commands from the queue for whose position `is_chosen` is true, and returns them in their order.
    fn remove_chosen(&mut self, is_chosen: Vec<bool>) -> Vec<QueuedCommand<T>> {
        let mut removed = Vec::new();
        for is_chosen in is_chosen {
            match self.commands.pop_front() {
                Some(command) if is_chosen => removed.push(command),
                rest => self.commands.extend(rest),
            }
        }
        removed
    }
}

/// Returns true if the commands in the queue with this index change rows.
fn has_writes(queue: usize) -> bool {
    matches!(queue, CREATE | CHANGE | SINGLE | RETRY)
}

/// Returns the most commands of a batch from the queue with this index. With 64 commands, the fixed cost of a statement
/// is small beside the cost of the commands.
fn max_batch_size(queue: usize) -> usize {
    if matches!(queue, FIND | LIST | CREATE | CHANGE) { 64 } else { 1 }
}

#[cfg(test)]
mod tests;
