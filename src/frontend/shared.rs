//! The state that the event loop and the workers share: connections, limits, memory, the number of requests in flight,
//! and how one wakes the other.

use super::{event_loop::MAX_SURPLUS, slots::Slots, warnings::Warnings};
use crate::{budget::Budget, config::Limits, error::Reason};
use mio::Waker;
use parking_lot::Mutex;
use std::{
    io,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// The state that the event loop and the workers share.
pub struct Shared {
    pub slots: Slots,
    /// The number of requests between the frontend and the workers.
    pub requests: AtomicUsize,
    /// The stream to tiny_http is broken: no request gets through any more.
    pub broken: AtomicBool,
    pub budget: Budget,
    /// A worker waits for memory: connections are to be closed.
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
            slots: Slots::new(limits.max_connections + MAX_SURPLUS),
            requests: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
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

    /// Counts one request more if that is possible; else returns why not.
    ///
    /// Abandoned requests stay in tiny_http's queue until a worker claims them. Without a bound, stuck workers would let
    /// it grow as long as clients retry.
    pub fn add_request(&self) -> Result<(), Reason> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(Reason::Broken);
        }
        if self.requests.load(Ordering::Relaxed) >= 2 * self.limits.max_connections {
            return Err(Reason::TooManyRequests);
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Refuses all requests from now on.
    pub fn break_down(&self, error: &io::Error) {
        if !self.broken.swap(true, Ordering::Relaxed) {
            log::error!("the stream to tiny_http is broken, nothing can be served: {error}");
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

    /// Ends the event loop's wait for events.
    pub fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            log::error!("the frontend cannot be woken: {error}");
        }
    }
}
