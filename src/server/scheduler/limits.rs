//! How many batches of each lane may be in flight, and when the next one starts: no lane holds up another.

use super::{Lane, Scheduler, batch_limit};
use std::time::{Duration, Instant};

impl<T> Scheduler<T> {
    pub(super) fn in_flight(&self, lane: Lane) -> usize {
        self.lanes[lane as usize].in_flight
    }

    /// Batches of statements that writes may have in flight: a read always has one more, if there are two.
    fn write_capacity(&self) -> usize {
        (self.capacity.statements - 1).max(1)
    }

    fn writes(&self) -> usize {
        self.in_flight(Lane::Create) + self.in_flight(Lane::Change)
    }

    fn statements(&self) -> usize {
        self.writes()
            + [Lane::Find, Lane::List, Lane::Large, Lane::Lookup]
                .map(|lane| self.in_flight(lane))
                .iter()
                .sum::<usize>()
    }

    fn may_write(&self) -> bool {
        self.statements() < self.capacity.statements && self.writes() < self.write_capacity()
    }

    /// Half of what writes may have, so that new ones are executed beside those that meet locks.
    pub(super) fn may_retry(&self) -> bool {
        let in_flight: usize = self.retries_in_flight.iter().sum();
        self.may_write() && in_flight < (self.write_capacity() / 2).max(1)
    }

    pub(super) fn may_start(&self, lane: Lane) -> bool {
        self.free(lane) > 0
    }

    /// Batches of a lane that may be in flight.
    fn limit(&self, lane: Lane) -> usize {
        // One of those that write is left to the other kind of write.
        let share = (self.write_capacity() - 1).max(1);
        let paced = self.lanes[lane as usize].pace.batches();
        match lane {
            Lane::Hash => 0,
            Lane::Change => share,
            Lane::Create => share.min(paced),
            // Each takes long, and the other reads need the sessions.
            Lane::Large => (self.capacity.statements / 4).max(1),
            Lane::Find | Lane::List | Lane::Lookup => self.capacity.statements.min(paced),
        }
    }

    /// Batches of a lane that may start.
    fn free(&self, lane: Lane) -> usize {
        // Retries have a share of their own, and take nothing of what has not met a lock yet.
        let in_flight = self.in_flight(lane) - self.retries_in_flight[lane as usize];
        let mut free = self.limit(lane).saturating_sub(in_flight);
        free = free.min(self.capacity.statements.saturating_sub(self.statements()));
        if lane.writes() {
            free = free.min(self.write_capacity().saturating_sub(self.writes()));
        }
        free
    }

    /// Not before that time: the table itself is locked, or clients are about to return.
    pub(super) fn not_before(&self, lane: Lane, now: Instant) -> Option<Instant> {
        let queue = &self.lanes[lane as usize];
        let locked = queue.not_before.filter(|at| *at > now);
        let waiting = queue.waiting.len();
        if locked.is_some() || waiting >= batch_limit(lane) {
            return locked;
        }
        queue.window.waits(waiting, self.free(lane), self.apart(lane)?, now)
    }

    /// How long it takes on average until the next batch may start, where all that may are in flight. A batch waits for more
    /// commands for no longer than that; `None` where it does not wait for them.
    pub(super) fn apart(&self, lane: Lane) -> Option<Duration> {
        let pace = &self.lanes[lane as usize].pace;
        let coalesces = match lane {
            Lane::Create => true,
            Lane::Find | Lane::List => !pace.is_short(),
            Lane::Large | Lane::Lookup | Lane::Change | Lane::Hash => false,
        };
        let batches = u32::try_from(self.limit(lane)).unwrap_or(u32::MAX);
        (coalesces && pace.shortest() < Duration::MAX).then(|| pace.shortest() / batches)
    }
}
