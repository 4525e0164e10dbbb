//! What the scheduler is given, and what it gives to a worker.

use super::Peer;
use crate::app::{Lane, Needs};
use std::time::Instant;

/// A command in a queue or in flight.
#[derive(Debug)]
pub struct Item<T> {
    /// The command itself.
    pub work: T,
    pub(super) needs: Needs,
    pub(super) peer: Peer,
    pub(super) arrived: Instant,
    /// How often it has met a lock.
    pub(super) retries: usize,
}

/// Commands of one lane, to be executed by one worker; see [`Scheduler::finished`](super::Scheduler::finished).
#[derive(Debug)]
pub struct Batch<T> {
    /// Their lane.
    pub lane: Lane,
    /// The commands, in the order of their turns.
    pub items: Vec<Item<T>>,
    /// Bytes of memory that they need.
    pub memory: usize,
    /// What its end is reported with.
    pub token: Token,
}

/// What the scheduler has to know of a batch when it has finished.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    pub(super) lane: Lane,
    pub(super) started: Instant,
    pub(super) commands: usize,
    /// Of commands that have met a lock before.
    pub(super) retry: bool,
}

/// What a worker does now.
#[derive(Debug)]
pub enum Next<T> {
    /// Execute this.
    Run(Batch<T>),
    /// Nothing before that time, unless something is pushed or finishes.
    Wait(Option<Instant>),
}
