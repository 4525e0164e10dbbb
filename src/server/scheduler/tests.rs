//! Rules of the scheduler, one by one, and all of them under random load; without a database, a thread or a clock.

mod batches;
mod hashes;
mod locks;
mod random;
mod shares;

use super::*;
use crate::app::Account;
use std::{collections::VecDeque, net::IpAddr};

/// What a test has where it does not say otherwise.
const CAPACITY: Capacity =
    Capacity { statements: 8, hashes: 1, cores: 2, retry_for: Duration::from_secs(10) };

/// A scheduler, the time, and what it has started.
struct Bench {
    scheduler: Scheduler<u32>,
    now: Instant,
}

impl Bench {
    fn new(statements: usize) -> Bench {
        Bench::with(Capacity { statements, ..CAPACITY })
    }

    fn with(capacity: Capacity) -> Bench {
        let now = Instant::now();
        let mut scheduler = Scheduler::new(capacity, now);
        for lane in &mut scheduler.lanes {
            lane.pace.fix(usize::MAX);
        }
        Bench { scheduler, now }
    }

    fn pass(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
    }

    /// Queues a command; the next one arrives a microsecond later.
    fn push(&mut self, work: u32, lane: Lane) {
        self.push_with(work, Needs::of(lane)).expect("it hashes nothing");
    }

    fn push_with(&mut self, work: u32, needs: Needs) -> Result<(), u32> {
        self.push_from(0, work, needs)
    }

    /// From the peer of that number.
    fn push_from(&mut self, peer: u8, work: u32, needs: Needs) -> Result<(), u32> {
        self.now += Duration::from_micros(1);
        let peer = Some(IpAddr::from([127, 0, 0, peer]));
        self.scheduler.push(work, needs, peer, self.now)
    }

    fn change(&mut self, work: u32, row: i64) {
        self.push_with(work, Needs { row: Some(row), ..Needs::of(Lane::Change) }).unwrap();
    }

    fn hash(&mut self, work: u32, account: Option<u64>) -> Result<(), u32> {
        self.push_with(work, Needs { hash: Some(Account(account)), ..Needs::of(Lane::Hash) })
    }

    fn next(&mut self) -> Option<Batch<u32>> {
        let ready = self.scheduler.is_ready(self.now);
        match self.scheduler.next(self.now) {
            Next::Run(batch) => {
                assert!(ready);
                Some(batch)
            }
            Next::Wait(at) => {
                assert!(!ready);
                assert!(at.is_none_or(|at| at > self.now), "it would be asked again and again");
                None
            }
        }
    }

    /// All batches that may start now.
    fn all(&mut self) -> Vec<Batch<u32>> {
        std::iter::from_fn(|| self.next()).collect()
    }

    fn finish(&mut self, batch: Batch<u32>) {
        self.scheduler.finished(batch.token, false, self.now);
        for item in &batch.items {
            self.scheduler.done(item);
        }
    }

    /// It met a lock; the commands whose time is up.
    fn contend(&mut self, batch: Batch<u32>) -> Vec<u32> {
        self.scheduler.finished(batch.token, true, self.now);
        let mut given_up = Vec::new();
        for item in batch.items {
            if let Err(item) = self.scheduler.push_again(item, self.now) {
                given_up.push(item.work);
                self.scheduler.done(&item);
            }
        }
        given_up
    }

    /// The commands of the next batch, which meets a lock.
    fn contend_next(&mut self) -> Vec<u32> {
        let batch = self.next().expect("something is ready");
        let works = works(&batch);
        assert!(self.contend(batch).is_empty());
        works
    }

    /// The commands of the next batch, which is executed.
    fn finish_next(&mut self) -> Vec<u32> {
        let batch = self.next().expect("something is ready");
        let works = works(&batch);
        self.finish(batch);
        works
    }
}

fn works(batch: &Batch<u32>) -> Vec<u32> {
    batch.items.iter().map(|item| item.work).collect()
}

fn lanes(batches: &[Batch<u32>]) -> Vec<Lane> {
    batches.iter().map(|batch| batch.lane).collect()
}

/// However old a lane's commands are, one of each other lane comes between two of its batches.
#[test]
fn lanes_take_turns() {
    let lanes = [Lane::List, Lane::Change, Lane::Find, Lane::Create, Lane::Single];
    for greedy in lanes {
        let mut bench = Bench::new(1);
        (0..1000).for_each(|work| bench.push(work, greedy));
        let first = bench.next().unwrap();
        assert!(bench.next().is_none(), "there is one statement");
        let others: Vec<Lane> = lanes.into_iter().filter(|lane| *lane != greedy).collect();
        (1000..).zip(&others).for_each(|(work, lane)| bench.push(work, *lane));
        bench.finish(first);
        let mut seen = Vec::new();
        for _ in &others {
            let batch = bench.next().unwrap();
            seen.push(batch.lane);
            bench.finish(batch);
        }
        assert!(others.iter().all(|lane| seen.contains(lane)), "{greedy:?}: {seen:?}");
        assert_eq!(bench.next().unwrap().lane, greedy);
    }
}

#[test]
fn one_core_suffices_for_one_command_and_for_few_short_reads() {
    let rows = [
        // What the shortest batch of reads took, commands unanswered.
        (None, 1, true),
        (None, 2, false),
        (Some(50), 1, true),
        (Some(50), 8, true),
        (Some(50), 9, false),
        (Some(299), 8, true),
        (Some(300), 2, false),
    ];
    for (took, unanswered, expected) in rows {
        let mut bench = Bench::new(8);
        if let Some(took) = took {
            let pace = &mut bench.scheduler.lanes[Lane::Find as usize].pace;
            pace.learn(Duration::from_micros(took), 1, bench.now);
        }
        assert_eq!(bench.scheduler.one_core_suffices(unanswered), expected, "{took:?} µs, {unanswered}");
    }
}

#[test]
fn reads_have_a_statement_that_writes_cannot_take() {
    for (capacity, expected) in [(1, 1), (2, 1), (3, 2), (8, 7)] {
        let mut bench = Bench::new(capacity);
        for work in 0..1000 {
            bench.push(work, if work % 2 == 0 { Lane::Create } else { Lane::Change });
        }
        let mut writes = bench.all();
        assert_eq!(writes.len(), expected);
        for lane in [Lane::Find, Lane::List] {
            bench.push(2000, lane);
            if capacity == 1 {
                bench.finish(writes.pop().unwrap());
                // The writes that came before it may have their turn.
                while bench.finish_next() != [2000] {}
                bench.push(3000, Lane::Change);
                writes = bench.all();
            } else {
                assert_eq!(bench.finish_next(), [2000], "{capacity}, {lane:?}");
            }
        }
    }
}

#[test]
fn creates_and_changes_leave_each_other_a_share() {
    for (many, other) in [(Lane::Create, Lane::Change), (Lane::Change, Lane::Create)] {
        for (capacity, expected) in [(1, 1), (2, 1), (3, 1), (8, 6)] {
            let mut bench = Bench::new(capacity);
            (0..1000).for_each(|work| bench.push(work, many));
            let mut batches = bench.all();
            assert_eq!(lanes(&batches), vec![many; expected], "{capacity}");
            bench.push(2000, other);
            if capacity < 3 {
                assert!(bench.next().is_none());
                // The one before them ends; those that came earlier, at most, go first.
                bench.finish(batches.remove(0));
                while bench.finish_next() != [2000] {}
            } else {
                assert_eq!(bench.finish_next(), [2000], "{capacity}");
            }
        }
    }
}

#[test]
fn what_no_client_waits_for_is_dropped() {
    let mut bench = Bench::new(2);
    // In a lane's queue, to be retried, behind a change of its row, for a hash.
    (0..10).for_each(|work| bench.push(work, Lane::Find));
    (10..14).for_each(|work| bench.change(work, 1));
    (20..24).for_each(|work| bench.change(work, 2));
    (30..40).for_each(|work| bench.hash(work, Some(work.into())).unwrap());
    (40..50).for_each(|work| bench.hash(work, None).unwrap());
    assert_eq!(bench.finish_next(), (0..10).collect::<Vec<_>>());
    assert_eq!(bench.contend_next(), [10, 20]);
    (0..10).for_each(|work| bench.push(work, Lane::Find));
    assert_eq!(bench.scheduler.len(), 38);
    // Odd ones are awaited: of row 1 the second is next, of row 2 the second.
    bench.scheduler.retain(|work| work % 2 == 1);
    assert_eq!(bench.scheduler.len(), 19);
    let mut found = Vec::new();
    for _ in 0..5 {
        bench.pass(100);
        while let Some(batch) = bench.next() {
            found.extend(works(&batch));
            bench.finish(batch);
        }
        while let Some(batch) = bench.scheduler.next_hash(bench.now) {
            found.extend(works(&batch));
            bench.now = batch.token.started + Duration::from_millis(20);
            bench.finish(batch);
        }
    }
    found.sort_unstable();
    let expected = [1, 3, 5, 7, 9, 11, 13, 21, 23].into_iter().chain((31..50).step_by(2));
    assert_eq!(found, expected.collect::<Vec<_>>());
    assert!(bench.scheduler.is_idle() && bench.scheduler.rows.is_empty());
    assert_eq!(bench.scheduler.len(), 0);
    // Nothing is counted as admitted any more.
    assert_eq!((0..1000).filter(|work| bench.hash(*work, None).is_ok()).count(), 101);
    bench.scheduler.retain(|_| false);
    assert!(bench.scheduler.is_idle());
}

#[test]
fn idle_is_neither_queued_nor_in_flight() {
    let mut bench = Bench::new(2);
    assert!(bench.scheduler.is_idle());
    bench.push(0, Lane::Find);
    assert!(!bench.scheduler.is_idle());
    let batch = bench.next().unwrap();
    assert_eq!((bench.scheduler.len(), bench.scheduler.is_idle()), (0, false));
    bench.finish(batch);
    assert!(bench.scheduler.is_idle());
    bench.hash(0, None).unwrap();
    assert!(bench.scheduler.hash_is_ready() && !bench.scheduler.is_idle());
    let batch = bench.scheduler.next_hash(bench.now).unwrap();
    assert!(!bench.scheduler.hash_is_ready() && !bench.scheduler.is_idle());
    bench.finish(batch);
    assert!(bench.scheduler.is_idle());
}

#[test]
fn what_needs_memory_waits_for_it_and_nothing_else_does() {
    const MIB: usize = 1 << 20;
    let mut bench = Bench::new(8);
    let needs = |memory| Needs { memory, ..Needs::of(Lane::List) };
    bench.scheduler.set_memory(MIB);
    for work in 0..5 {
        bench.push_with(work, needs(MIB / 4)).unwrap();
    }
    bench.push_with(5, needs(4 * MIB)).unwrap();
    let pages = bench.next().unwrap();
    assert_eq!((works(&pages), pages.memory), (vec![0, 1, 2, 3], MIB));
    bench.scheduler.set_memory(0);
    bench.push(6, Lane::Find);
    assert_eq!(bench.finish_next(), [6]);
    assert!(bench.next().is_none() && bench.scheduler.is_short_of_memory());
    // It is asked again before long, and not at once.
    let at = bench.scheduler.next_time(bench.now).unwrap();
    assert!(at > bench.now && at <= bench.now + Duration::from_millis(5));
    bench.finish(pages);
    bench.scheduler.set_memory(4 * MIB);
    assert_eq!((bench.finish_next(), bench.finish_next()), (vec![4], vec![5]));
    assert!(!bench.scheduler.is_short_of_memory());
    // However much is free, a batch takes a part of it; one command may take more.
    bench.scheduler.set_memory(usize::MAX);
    for work in 0..20 {
        bench.push_with(work, needs(MIB)).unwrap();
    }
    bench.push_with(20, needs(100 * MIB)).unwrap();
    assert_eq!(bench.finish_next().len(), BATCH_MEMORY / MIB);
    while bench.finish_next() != [20] {}
    assert!(bench.scheduler.is_idle());
}

/// While a password is hashed, what needs little overtakes what waits for its memory; and not while other work has
/// that.
#[test]
fn what_waits_for_a_hash_holds_up_nothing() {
    let mut bench = Bench::new(8);
    let needs = |memory| Needs { memory, ..Needs::of(Lane::List) };
    bench.hash(0, None).unwrap();
    let hash = bench.scheduler.next_hash(bench.now).unwrap();
    bench.scheduler.set_memory(100);
    for (work, memory) in [(1, 500), (2, 60), (3, 500), (4, 40), (5, 10)] {
        bench.push_with(work, needs(memory)).unwrap();
    }
    assert_eq!((bench.finish_next(), bench.finish_next()), (vec![2, 4], vec![5]));
    assert!(bench.next().is_none() && bench.scheduler.is_short_of_memory());
    bench.push_with(6, needs(10)).unwrap();
    bench.finish(hash);
    assert!(bench.next().is_none(), "it has its turn first");
    bench.scheduler.set_memory(600);
    assert_eq!((bench.finish_next(), bench.finish_next()), (vec![1], vec![3, 6]));
}
