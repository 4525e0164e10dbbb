//! How many batches of each lane may be in flight, and when the next one starts: no lane holds up another.

use super::{Lane, Scheduler};
use std::time::{Duration, Instant};

/// Commands unanswered, at most, for which one core suffices to the threads of the server.
const FEW: usize = 8;

/// A short batch of reads in flight for longer than this takes longer than expected.
const LATE: Duration = Duration::from_millis(1);

/// A write in flight for longer than this waits for a lock, most likely, up to its time-out. Until then, and no longer,
/// the next one of its lane may wait for its end to be a fuller batch.
const STALLED: Duration = Duration::from_millis(5);

impl<T> Scheduler<T> {
    pub(super) fn in_flight(&self, lane: Lane) -> usize {
        self.lanes[lane as usize].in_flight
    }

    /// Batches of statements that writes, or lists, may have in flight: a find always has one more, if there are two,
    /// and a list beside writes.
    fn all_but_one(&self) -> usize {
        (self.capacity.statements - 1).max(1)
    }

    fn writes(&self) -> usize {
        self.in_flight(Lane::Create) + self.in_flight(Lane::Change) + self.in_flight(Lane::Single)
    }

    fn statements(&self) -> usize {
        self.writes() + [Lane::Find, Lane::List].map(|lane| self.in_flight(lane)).iter().sum::<usize>()
    }

    fn may_write(&self) -> bool {
        self.statements() < self.capacity.statements && self.writes() < self.all_but_one()
    }

    /// One of those that write is left to the other kind of write, creates or changes.
    fn write_share(&self) -> usize {
        (self.all_but_one() - 1).max(1)
    }

    /// Batches in flight that are no retries, of this kind of write.
    fn of_kind(&self, lane: Lane) -> usize {
        let lanes = if lane.changes_rows() { &[Lane::Change, Lane::Single][..] } else { &[lane] };
        lanes.iter().map(|lane| self.lanes[*lane as usize].began.len()).sum()
    }

    /// Half of what writes may have, so that new ones are executed beside those that meet locks.
    pub(super) fn may_retry(&self) -> bool {
        let in_flight: usize = self.lanes.iter().map(|queue| queue.in_flight - queue.began.len()).sum();
        self.may_write() && in_flight < (self.all_but_one() / 2).max(1)
    }

    /// When the next of the writes in flight counts as stalled.
    pub(super) fn stalls(&self, lane: Lane, now: Instant) -> Option<Instant> {
        let began = self.lanes[lane as usize].began.iter().filter(|_| lane.writes());
        began.map(|began| *began + STALLED).filter(|at| *at > now).min()
    }

    /// Batches of a lane that may be in flight: where they are short, one for every two cores, as one uses the core
    /// that the database leaves.
    fn limit(&self, lane: Lane) -> usize {
        let share = self.write_share();
        let paced = self.lanes[lane as usize].pace.batches((self.capacity.cores / 2).max(1));
        match lane {
            Lane::Hash => 0,
            Lane::Single => share,
            Lane::Create | Lane::Change => share.min(paced),
            Lane::Find => self.capacity.statements.min(paced),
            // A list reads a thousand users: one is left to those that read a single one.
            Lane::List => self.all_but_one().min(paced),
        }
    }

    /// As many short batches of reads are in flight as pay: until when one of them ends, most likely. What arrives
    /// until then had better wait for its end, and be received and executed as one batch.
    pub fn ends_by(&self, now: Instant) -> Option<Instant> {
        let first_end = |lane: Lane| {
            let queue = &self.lanes[lane as usize];
            let first = queue.began.iter().min()?;
            let full = queue.in_flight >= self.limit(lane) && queue.pace.is_short();
            full.then_some(*first + LATE)
        };
        [Lane::Find, Lane::List].into_iter().filter_map(first_end).max().filter(|at| *at > now)
    }

    /// Whether a single core suffices to the threads of the server for so many commands unanswered: for a few reads of
    /// a database on the same machine.
    pub fn one_core_suffices(&self, unanswered: usize) -> bool {
        unanswered <= 1 || unanswered <= FEW && self.lanes[Lane::Find as usize].pace.is_short()
    }

    /// Whether one more batch of a lane may start.
    pub(super) fn may_start(&self, lane: Lane, now: Instant) -> bool {
        // Retries have a share of their own, and take nothing of what has not met a lock yet.
        let began = self.lanes[lane as usize].began.iter();
        let in_flight = began.filter(|began| !lane.writes() || now < **began + STALLED).count();
        in_flight < self.limit(lane)
            && self.statements() < self.capacity.statements
            && (!lane.writes()
                || (self.writes() < self.all_but_one() && self.of_kind(lane) < self.write_share()))
    }
}
