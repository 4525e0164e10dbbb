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
