//! How idle workers wait, which of them wakes, and what they do after the last work.

use super::{Shared, State};
use crate::metrics::Recorder;
use std::{
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

/// How often one idle worker checks on a short batch in flight, in case that it takes longer than expected.
const TICK: Duration = Duration::from_millis(1);

/// Ticks that found nothing to check after which it stops checking, until another worker wakes it.
const QUIET_TICKS: u32 = 20;

/// For how long a worker that has called `on_idle` stays out of tiny_http's queue while others are told to.
const IDLE_TURN: Duration = Duration::from_millis(50);

impl State {
    /// One idle worker wakes by itself when something is due: this one, if no other does by then. Returns when.
    pub(super) fn keep_time(&mut self, due: Option<Instant>) -> Option<Instant> {
        let at = due.filter(|due| self.wakes_at.is_none_or(|earlier| *due < earlier));
        self.wakes_at = at.or(self.wakes_at);
        at
    }

    /// It is awake.
    pub(super) fn kept_time(&mut self, at: Option<Instant>) {
        if at.is_some() && self.wakes_at == at {
            self.wakes_at = None;
        }
    }
}

impl Shared {
    /// Calls `on_idle` where that was asked for since this thread last did.
    pub(super) fn idle<'a>(&'a self, state: MutexGuard<'a, State>, calls: &mut u64) -> MutexGuard<'a, State> {
        if state.idle_calls == *calls {
            return state;
        }
        *calls = state.idle_calls;
        drop(state);
        if let Some(on_idle) = self.on_idle {
            on_idle();
        }
        self.state()
    }

    /// The same for a worker, which then has the next one called that waits in tiny_http's queue. It does not return to
    /// that queue until that one has left it, or it would take the message that is meant for it.
    pub(super) fn idle_in_turn<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        calls: &mut u64,
    ) -> MutexGuard<'a, State> {
        let before = *calls;
        let state = self.idle(state, calls);
        match *calls != before && self.unblock(&state) {
            true => self.park(state, Some(IDLE_TURN)),
            false => state,
        }
    }

    /// Before a worker executes a batch: wakes another one if a second batch is ready, or if no worker receives, or will
    /// wake when something is due.
    pub(super) fn wake_for_the_rest(&self, state: &mut State, now: Instant) {
        let watched = state.receiving > 0 || (state.ticking && state.scheduler.ends_soon());
        let timed = state.wakes_at.is_some() || state.scheduler.next_time(now).is_none();
        if !watched || !timed || state.scheduler.is_ready(now) {
            self.wake_one(state);
        }
    }

    /// Wakes an idle worker, if there is one.
    pub(super) fn wake_one(&self, state: &mut State) {
        if state.parked > 0 {
            self.parked.notify_one();
        } else {
            self.unblock(state);
        }
    }

    /// Tells a worker to leave tiny_http's queue, if there is one in it.
    pub(super) fn unblock(&self, state: &State) -> bool {
        let any = state.receiving > 0;
        if any {
            self.unblocks.fetch_add(1, Ordering::Relaxed);
            self.server.unblock();
        }
        any
    }

    pub(super) fn wake_all(&self) {
        let receiving = self.state().receiving;
        self.parked.notify_all();
        self.hash.notify_all();
        for _ in 0..receiving {
            self.server.unblock();
        }
    }

    /// Waits until it is woken, or for a time.
    pub(super) fn park<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        time: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        state.parked += 1;
        let mut state = match time {
            None => self.parked.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(time) => self.parked.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0,
        };
        state.parked -= 1;
        state
    }

    /// Checks on short batches for as long as there are some: where one has not ended in time, this worker receives the
    /// requests that have arrived meanwhile.
    pub(super) fn tick<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        recorder: &Recorder,
    ) -> MutexGuard<'a, State> {
        let mut quiet = 0;
        while quiet < QUIET_TICKS {
            let before = state.batches;
            state.ticking = true;
            state = self.park(state, Some(TICK));
            state.ticking = false;
            let unwatched = state.batches != before && state.receiving == 0;
            quiet = if unwatched { 0 } else { quiet + 1 };
            if state.scheduler.is_ready(Instant::now()) || state.stopping {
                return state;
            }
            if state.receiving == 0 && !state.scheduler.ends_soon() {
                return state;
            }
            if state.receiving == 0 && state.batches == before {
                drop(state);
                let judged = self.judge(self.try_receive(), recorder);
                return self.push(self.state(), judged, recorder);
            }
        }
        self.park_until_due(state)
    }

    /// Waits until it is woken, or until something is due where no other worker wakes by then.
    pub(super) fn park_until_due<'a>(&self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let now = Instant::now();
        let due = state.scheduler.next_time(now);
        let at = state.keep_time(due);
        let mut state = self.park(state, at.map(|at| at.saturating_duration_since(now)));
        state.kept_time(at);
        state
    }
}
