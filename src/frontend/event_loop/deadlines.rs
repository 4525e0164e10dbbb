//! Whose time is up: deadlines of connections, and the end of a time without any event.

use super::{
    super::connection::{Action, Connection, linger_time},
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
        for index in 0..self.used {
            let limits = &self.shared.limits;
            let entry = self.shared.slots.get(index);
            let connection = entry.as_ref().and_then(|entry| entry.connection.as_ref());
            let Some(at) = connection.and_then(|connection| connection.deadline(limits)) else {
                continue;
            };
            drop(entry);
            if at <= now {
                self.call(index, now, |connection, context| {
                    // It may have been answered in between.
                    match connection.deadline(&context.shared.limits).is_some_and(|at| at <= now) {
                        true => connection.expire(index, context),
                        false => Action::Wait,
                    }
                });
            } else {
                next = next.min(at);
            }
        }
        self.sweep_at = (!self.is_empty()).then(|| next.max(now + SWEEP_PAUSE));
    }

    /// Reports that there is nothing to do, unless there has been since this was due, or a worker has.
    pub(super) fn idle(&mut self, now: Instant) {
        let due = self.active_at + IDLE;
        let is_working = |index| {
            let entry = self.shared.slots.get(index);
            entry.is_some_and(|entry| entry.connection.as_ref().is_some_and(Connection::is_working))
        };
        self.idle_at = match due > now {
            true => Some(due),
            false if (0..self.used).any(is_working) => Some(now + IDLE),
            false => None,
        };
        if self.idle_at.is_none() {
            (self.on_idle)();
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
