//! Closes or answers connections whose deadline has passed, and calls `on_idle` after a while without events.

use super::{
    super::connection::{Action, WORKING, linger_time},
    EventLoop, IDLE, SWEEP_PAUSE,
};
use std::time::{Duration, Instant};

impl EventLoop {
    /// Ends what has taken too long.
    ///
    /// The next sweep is when the first deadline seen passes, or when the first one that is yet to be set could: none
    /// of those is closer than the shortest time that anything is given.
    pub(super) fn sweep(&mut self, now: Instant) {
        let mut next = now + self.shortest_deadline();
        let late = self.slots.each(|index, connection| {
            let at = connection.deadline(&self.shared.limits)?;
            if at > now {
                next = next.min(at);
            }
            (at <= now).then_some(index)
        });
        for index in late {
            self.call(index, now, |connection, context| {
                // It may have been answered in between.
                match connection.deadline(&context.shared.limits).is_some_and(|at| at <= now) {
                    true => connection.expire(index, context),
                    false => Action::Wait,
                }
            });
        }
        self.sweep_at = (!self.is_empty()).then(|| next.max(now + SWEEP_PAUSE));
    }

    /// Reports that there is nothing to do, unless there has been since this was due, or a worker has.
    pub(super) fn idle(&mut self, now: Instant) {
        let due = self.active_at + IDLE;
        let is_working = || self.slots.count()[WORKING] > 0;
        self.idle_at = match due > now {
            true => Some(due),
            false if is_working() => Some(now + IDLE),
            false => None,
        };
        if self.idle_at.is_none() {
            (self.resources.on_idle)();
        }
    }

    /// Whether there is no connection.
    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.used as usize
    }

    pub(in super::super) fn shortest_deadline(&self) -> Duration {
        let limits = &self.shared.limits;
        let all = [
            limits.head_timeout,
            limits.body_timeout,
            limits.idle_timeout,
            limits.write_timeout,
            limits.request_timeout,
            linger_time(self.stop_at.is_some()),
        ];
        all.into_iter().min().expect("there are some")
    }
}
