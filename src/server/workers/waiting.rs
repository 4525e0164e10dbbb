//! How idle workers wait and are woken, as [`Roles`](super::roles::Roles) says.

use super::{
    Shared, State,
    roles::{Role, Wake},
};
use parking_lot::MutexGuard;
use std::{sync::atomic::Ordering, time::Instant};

impl Shared {
    /// Wakes this worker.
    pub(super) fn wake(&self, worker: Option<Wake>) {
        match worker {
            Some(Wake::Parked) => drop(self.parked.notify_one()),
            Some(Wake::Receiving) => {
                self.unblocks.fetch_add(1, Ordering::Relaxed);
                self.server.unblock();
            }
            None => {}
        }
    }

    pub(super) fn wake_all(&self) {
        let receiving = self.state.lock().roles.receiving();
        self.parked.notify_all();
        self.hash.notify_all();
        for _ in 0..receiving {
            self.server.unblock();
        }
    }

    /// Waits until it is woken, or until that time.
    pub(super) fn park(&self, state: &mut MutexGuard<'_, State>, until: Option<Instant>) {
        match until {
            None => self.parked.wait(state),
            Some(until) => drop(self.parked.wait_until(state, until)),
        }
        state.roles.returned(Role::Park(until));
    }
}
