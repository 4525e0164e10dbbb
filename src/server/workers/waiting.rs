//! How idle workers wait and are woken, as [`Roles`](super::roles::Roles) says.

use super::{
    Shared, State,
    roles::{Role, Wake},
};
use std::{
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::Instant,
};

impl Shared {
    /// Before a worker executes a batch: wakes another one for what else there is to do.
    pub(super) fn wake_for_the_rest(&self, state: &State, now: Instant) {
        let (is_ready, due) = (state.scheduler.is_ready(now), state.scheduler.next_time(now));
        let ends_soon = state.scheduler.ends_by(now).is_some();
        self.wake(state.roles.wake_for_the_rest(is_ready, ends_soon, due));
    }

    /// Wakes this worker.
    pub(super) fn wake(&self, worker: Option<Wake>) {
        match worker {
            Some(Wake::Parked) => self.parked.notify_one(),
            Some(Wake::Receiving) => {
                self.unblocks.fetch_add(1, Ordering::Relaxed);
                self.server.unblock();
            }
            None => {}
        }
    }

    pub(super) fn wake_all(&self) {
        let receiving = self.state().roles.receiving();
        self.parked.notify_all();
        self.hash.notify_all();
        for _ in 0..receiving {
            self.server.unblock();
        }
    }

    /// Waits until it is woken, or until that time.
    pub(super) fn park<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let mut state = match until {
            None => self.parked.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(until) => {
                let time = until.saturating_duration_since(Instant::now());
                self.parked.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.roles.returned(Role::Park(until));
        state
    }
}
