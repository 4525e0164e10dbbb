//! How many batches of each lane may be in flight, and when the next one starts: no lane holds up another.

use super::{Item, Lane, Scheduler, batch_limit};
use std::time::{Duration, Instant};

/// Reads by id in flight, at most, beside which another batch starts even if batches are short and cores are few. Two
/// cores got 21,500 reads a second from 8 clients instead of 16,800, and the same from 32; without this bound, a tenth less
/// from 128.
const SMALL: usize = 16;

/// Workers in tiny_http's queue, at most, where batches are not short: one for the next request, and one for those that come
/// while it is executed. Each request wakes a worker that is there, although the first to come takes all of them: with
/// nine, seven woke for nothing when eight clients had been answered, and a create took 99 µs of processor time instead
/// of 85.
const RECEIVERS: usize = 2;

/// For how long the event loop polls after a request, at most.
const LONGEST_POLL: Duration = Duration::from_millis(1);

/// Commands that are not divided, unless their clients can be [separated](Scheduler::separate): fewer cost less than the
/// batch that they would be executed in.
const SMALLEST_SHARE: usize = 4;

/// A write in flight for longer than this waits for a lock, most likely, up to its time-out. Until then, and no longer, the
/// next one of its lane may wait for its end to be a fuller batch.
const STALLED: Duration = Duration::from_millis(5);

impl<T> Scheduler<T> {
    pub(super) fn in_flight(&self, lane: Lane) -> usize {
        self.lanes[lane as usize].in_flight
    }

    /// Batches of statements that writes may have in flight: a read always has one more, if there are two.
    fn write_capacity(&self) -> usize {
        (self.capacity.statements - 1).max(1)
    }

    fn writes(&self) -> usize {
        self.in_flight(Lane::Create) + self.in_flight(Lane::Change) + self.in_flight(Lane::Single)
    }

    fn statements(&self) -> usize {
        self.writes() + [Lane::Find, Lane::List].map(|lane| self.in_flight(lane)).iter().sum::<usize>()
    }

    fn may_write(&self) -> bool {
        self.statements() < self.capacity.statements && self.writes() < self.write_capacity()
    }

    /// One of those that write is left to the other kind of write, creates or changes.
    fn write_share(&self) -> usize {
        (self.write_capacity() - 1).max(1)
    }

    /// Batches in flight that are no retries, of this kind of write.
    fn of_kind(&self, lane: Lane) -> usize {
        match lane.changes_rows() {
            true => {
                [Lane::Change, Lane::Single].map(|lane| self.lanes[lane as usize].began.len()).iter().sum()
            }
            false => self.lanes[lane as usize].began.len(),
        }
    }

    /// Half of what writes may have, so that new ones are executed beside those that meet locks.
    pub(super) fn may_retry(&self) -> bool {
        let in_flight: usize = self.lanes.iter().map(|queue| queue.in_flight - queue.began.len()).sum();
        self.may_write() && in_flight < (self.write_capacity() / 2).max(1)
    }

    pub(super) fn may_start(&self, lane: Lane, now: Instant) -> bool {
        self.free(lane, now) > 0
    }

    /// When the next of the writes in flight counts as stalled.
    pub(super) fn stalls(&self, lane: Lane, now: Instant) -> Option<Instant> {
        let began = self.lanes[lane as usize].began.iter().filter(|_| lane.writes());
        began.map(|began| *began + STALLED).filter(|at| *at > now).min()
    }

    /// Batches of a lane that may be in flight.
    fn limit(&self, lane: Lane) -> usize {
        let share = self.write_share();
        let paced = self.lanes[lane as usize].pace.batches(self.short_batches(lane));
        match lane {
            Lane::Hash => 0,
            Lane::Single => share,
            Lane::Create | Lane::Change => share.min(paced),
            Lane::Find | Lane::List => self.capacity.statements.min(paced),
        }
    }

    /// Batches of a lane that may be in flight where they are short: one for every two cores. One uses the core that the
    /// database leaves. With two, four cores got 95,800 reads a second from 64 clients instead of 65,900, and 50,400
    /// creates from 128 instead of 34,000. Of reads by id a second one in any case, where the first is small.
    fn short_batches(&self, lane: Lane) -> usize {
        let batches = (self.capacity.cores / 2).max(1);
        match lane {
            Lane::Find if self.lanes[lane as usize].commands_in_flight <= SMALL => batches.max(2),
            _ => batches,
        }
    }

    /// For how long it pays that the thread that waits for the next request polls, where the last one is a command of this
    /// lane, and so many are unanswered: until eight of the shortest batches could have ended. With the server's threads on
    /// the one core that is kept awake so, two cores got 7,750 reads a second from one client instead of 5,210, 25,960
    /// instead of 16,180 from four, 39,380 instead of 27,880 from eight, and 13,220 creates instead of 10,930 from eight.
    /// Nothing where batches are not short: a database is a network away, or the work itself takes long.
    pub fn poll_time(&self, lane: Lane, unanswered: usize) -> Duration {
        let pace = &self.lanes[lane as usize].pace;
        match self.capacity.polls && unanswered <= self.few() && pace.is_short() {
            true => (pace.shortest() * 8).min(LONGEST_POLL),
            false => Duration::ZERO,
        }
    }

    /// Commands in flight, at most, for which one core suffices to the threads of the server. Two cores got 44,560 reads a
    /// second from 16 clients instead of 38,680, and from 32 clients as many (built with the profile `dist`). Four cores got
    /// 34,720 from 8 clients instead of 28,130, and from 16 a tenth less than with the threads on all cores.
    fn few(&self) -> usize {
        match self.capacity.cores {
            ..4 => 16,
            _ => 8,
        }
    }

    /// How many workers had better wait for requests: one for each batch that may start.
    pub fn receivers(&self, now: Instant) -> usize {
        match (self.is_short(), self.ends_soon()) {
            (false, _) => RECEIVERS,
            (true, true) => 0,
            (true, false) => self.free(Lane::Find, now).max(1),
        }
    }

    /// Whether so many batches are in flight as may be, and one of them ends so soon that what arrives meanwhile had better
    /// wait for its end, and be received and executed as one batch.
    pub fn ends_soon(&self) -> bool {
        let soon = |lane: &Lane| {
            let queue = &self.lanes[*lane as usize];
            queue.in_flight >= self.limit(*lane) && queue.pace.is_short()
        };
        [Lane::Find, Lane::List].iter().any(soon)
    }

    /// Batches of a lane that may start.
    fn free(&self, lane: Lane, now: Instant) -> usize {
        // Retries have a share of their own, and take nothing of what has not met a lock yet.
        let began = self.lanes[lane as usize].began.iter();
        let in_flight = began.filter(|began| !lane.writes() || now < **began + STALLED).count();
        let mut free = self.limit(lane).saturating_sub(in_flight);
        free = free.min(self.capacity.statements.saturating_sub(self.statements()));
        if lane.writes() {
            free = free.min(self.write_capacity().saturating_sub(self.writes()));
            free = free.min(self.write_share().saturating_sub(self.of_kind(lane)));
        }
        free
    }

    /// How many of the commands that wait the next batch takes, at most. Where batches do little but wait and sessions are
    /// free, it takes one share of the lane's commands, those in flight included: in one batch, each of them would wait for
    /// the whole group at every stage, here and in the database. Creates only where their clients can be
    /// [separated](Scheduler::separate), because each batch is a commit: 64 at once, of clients that wait for each other, were
    /// answered after 8.6 ms instead of 7.7 ms.
    pub(super) fn batch_size(&self, lane: Lane, now: Instant) -> usize {
        let queue = &self.lanes[lane as usize];
        let waiting = queue.waiting.len();
        let shares = self.limit(lane).min(queue.pace.cheap_batches());
        let size = match self.free(lane, now).min(shares.saturating_sub(queue.in_flight)) {
            free @ 2.. => {
                let share = (queue.commands_in_flight + waiting).div_ceil(shares);
                let least = match queue.waiting.front() {
                    Some(first) if first.returned => 1,
                    _ if lane.writes() => waiting,
                    _ => SMALLEST_SHARE,
                };
                share.max(waiting.div_ceil(free)).max(least)
            }
            _ => waiting,
        };
        size.min(batch_limit(lane))
    }

    /// Lets the rest of a group, of which this batch is about to be started, follow half of the time between batches later.
    /// Its clients are then answered later, return later, and stay apart from the first ones; otherwise the group would be
    /// divided anew in each round. Only where most of the clients had just been answered: what one round costs them is
    /// gained in the next ones. Clients that all wait until the last one is answered cannot be separated: eight of them
    /// would wait 7.6 ms instead of 5.8 ms in each round. Two cores that userd, a database 5 ms away and the clients
    /// shared got 5,440 reads a second from 32 clients instead of 5,250, 20,400 from 128 instead of 19,400, and 4,620 creates
    /// from 32 instead of 4,510. A pause of the whole time gained as much.
    pub(super) fn separate(&mut self, lane: Lane, batch: &[Item<T>], now: Instant) {
        let queue = &self.lanes[lane as usize];
        if queue.pace.is_short() || 2 * batch.iter().filter(|item| item.returned).count() < batch.len() {
            return;
        }
        if let Some(apart) = self.apart(lane) {
            self.lanes[lane as usize].not_before = Some(now + apart / 2);
        }
    }

    /// Not before that time: the table itself is locked, a group is to be separated, or clients are about to return.
    pub(super) fn not_before(&self, lane: Lane, now: Instant) -> Option<Instant> {
        let queue = &self.lanes[lane as usize];
        let paused = queue.not_before.filter(|at| *at > now);
        let waiting = queue.waiting.len();
        if paused.is_some() || waiting >= batch_limit(lane) {
            return paused;
        }
        queue.window.waits(waiting, self.free(lane, now), self.apart(lane)?, now)
    }

    /// How long it takes on average until the next batch may start, where all that may are in flight. A batch waits for more
    /// commands for no longer than that; `None` where it does not wait for them.
    pub(super) fn apart(&self, lane: Lane) -> Option<Duration> {
        let pace = &self.lanes[lane as usize].pace;
        let coalesces = match lane {
            Lane::Create => true,
            Lane::Find | Lane::List => !pace.is_short(),
            Lane::Change | Lane::Single | Lane::Hash => false,
        };
        let batches = u32::try_from(self.limit(lane)).unwrap_or(u32::MAX);
        (coalesces && pace.shortest() < Duration::MAX).then(|| pace.shortest() / batches)
    }
}
