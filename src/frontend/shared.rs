//! What the event loop and the workers share beside the connections: limits, memory, the number of requests in flight,
//! and how one wakes the other.

use super::{slot::Slot, warnings::Warnings};
use crate::{
    budget::{Budget, Reservation},
    config::Limits,
    error::Reason,
};
use mio::Waker;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// What the event loop and the workers share beside the connections.
pub struct Shared {
    pub in_flight: InFlight,
    /// What the requests hold that no worker has claimed yet.
    pub unclaimed: Unclaimed,
    pub budget: Budget,
    /// Answers that do not move are to be given up.
    pub shortage: AtomicBool,
    pub limits: Limits,
    waker: Waker,
    /// Answers say `Connection: close`, and nothing new is begun.
    pub stopping: AtomicBool,
    /// The stop ends now.
    pub aborted: AtomicBool,
    /// Connections that need the event loop after a worker's answer.
    scheduled: Mutex<Vec<u32>>,
    /// Warnings about clients that are answered 503.
    pub unavailable: Warnings,
}

impl Shared {
    pub fn new(limits: Limits, budget: Budget, waker: Waker) -> Shared {
        Shared {
            // Abandoned requests stay in tiny_http's queue until a worker claims them. Without a bound, stuck workers
            // would let it grow as long as clients retry.
            in_flight: InFlight::new(2 * limits.max_connections),
            unclaimed: Unclaimed::default(),
            budget,
            shortage: AtomicBool::new(false),
            limits,
            waker,
            stopping: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            scheduled: Mutex::default(),
            unavailable: Warnings::default(),
        }
    }

    /// Has the event loop advance a connection. Only the first of several calls wakes it.
    pub fn schedule(&self, index: u32) {
        let mut scheduled = self.scheduled.lock();
        scheduled.push(index);
        if scheduled.len() == 1 {
            drop(scheduled);
            self.wake();
        }
    }

    /// Moves the scheduled connections to the end of a list.
    pub fn take_scheduled(&self, into: &mut Vec<u32>) {
        into.append(&mut self.scheduled.lock());
    }

    pub fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("the frontend cannot be woken: {error}");
        }
    }
}

/// How many requests are between the frontend and the workers.
pub struct InFlight {
    count: AtomicUsize,
    most: usize,
    broken: AtomicBool,
}

impl InFlight {
    fn new(most: usize) -> InFlight {
        InFlight { count: AtomicUsize::new(0), most, broken: AtomicBool::new(false) }
    }

    /// One request more, if the limit allows it; else why not.
    pub fn add(&self) -> Result<(), Reason> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(Reason::Broken);
        }
        if self.count() >= self.most {
            return Err(Reason::TooManyRequests);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// One request less.
    pub fn remove(&self) {
        let less = |count: usize| count.checked_sub(1);
        let result = self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        debug_assert!(result.is_ok(), "a request was claimed twice");
    }

    /// No request gets through any more.
    pub fn break_down(&self, error: &io::Error) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            log::error!("the stream to tiny_http is broken, nothing can be served: {error}");
        }
    }
}

/// The memory of requests that have left the frontend, until a worker claims them: their connections may be gone by
/// then.
#[derive(Default)]
pub struct Unclaimed {
    /// Most requests hold none: this spares the lock.
    count: AtomicUsize,
    held: Mutex<HashMap<(u32, u32), Reservation>>,
}

impl Unclaimed {
    /// To be called before the request is passed on.
    pub fn add(&self, slot: Slot, held: Reservation) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut all = self.held.lock();
        all.insert((slot.index, slot.generation), held);
    }

    /// What a request holds. The stream that it came over orders this after [`Unclaimed::add`].
    pub fn take(&self, slot: Slot) -> Option<Reservation> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut all = self.held.lock();
        let held = all.remove(&(slot.index, slot.generation))?;
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(held)
    }
}
