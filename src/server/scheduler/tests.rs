//! Rules of the scheduler, one by one, and all of them under random load; without a database, a thread or a clock.

use super::*;
/// What a test has where it does not say otherwise.
const CAPACITY: Capacity =
    Capacity { statements: 8, hashes: 1, cores: 2, polls: true, retry_for: Duration::from_secs(10) };

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
        self.push_with(work, lane, Keys::default()).expect("it hashes nothing");
    }

    fn push_with(&mut self, work: u32, lane: Lane, keys: Keys) -> Result<(), u32> {
        self.now += Duration::from_micros(1);
        self.scheduler.push(work, lane, keys, self.now)
    }

    fn change(&mut self, work: u32, row: i64) {
        self.push_with(work, Lane::Change, Keys { row: Some(row), ..Keys::default() }).unwrap();
    }

    fn hash(&mut self, work: u32, account: Option<u64>) -> Result<(), u32> {
        self.push_with(work, Lane::Hash, Keys { account, hashes: true, ..Keys::default() })
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

#[test]
fn batches_have_a_limit() {
    for (lane, limit) in
        [(Lane::Find, 64), (Lane::Create, 64), (Lane::List, 16), (Lane::Lookup, 1), (Lane::Change, 1)]
    {
        let mut bench = Bench::new(1);
        (0..100).for_each(|work| bench.push(work, lane));
        let mut found = Vec::new();
        for left in (0..100).rev().step_by(limit).map(|last| last + 1) {
            assert_eq!(bench.scheduler.len(), left as usize, "{lane:?}");
            let works = bench.finish_next();
            assert!(works.len() == limit.min(left as usize), "{lane:?}");
            found.extend(works);
        }
        assert_eq!(found, (0..100).collect::<Vec<_>>(), "{lane:?}");
        assert!(bench.scheduler.is_idle());
    }
}

#[test]
fn reads_that_arrive_together_after_a_gap_are_two_batches() {
    let rows: [(Lane, u32, u64, &[usize]); 9] = [
        (Lane::Find, 1, 0, &[1]),
        (Lane::Find, 5, 0, &[5]),
        (Lane::Find, 6, 0, &[3, 3]),
        (Lane::Find, 9, 0, &[5, 4]),
        (Lane::Find, 32, 0, &[16, 16]),
        (Lane::Find, 33, 0, &[33]),
        (Lane::Find, 100, 0, &[64, 36]),
        (Lane::List, 9, 0, &[9]),
        // A database a network away.
        (Lane::Find, 9, 5, &[9]),
    ];
    for (lane, reads, milliseconds, expected) in rows {
        let mut bench = Bench::new(1);
        bench.push(1000, lane);
        let batch = bench.next().unwrap();
        bench.pass(milliseconds);
        bench.finish(batch);
        bench.scheduler.ran_dry();
        (0..reads).for_each(|work| bench.push(work, lane));
        let sizes: Vec<usize> = expected.iter().map(|_| bench.finish_next().len()).collect();
        assert_eq!((sizes, bench.scheduler.is_idle()), (expected.to_vec(), true), "{reads} of {lane:?}");
        // Those that arrived while a batch was in flight are one.
        (0..reads.min(16)).for_each(|work| bench.push(work, lane));
        assert_eq!(bench.finish_next().len(), reads.min(16) as usize);
    }
}

#[test]
fn the_lane_whose_command_has_waited_longest_is_next() {
    let order = [Lane::List, Lane::Change, Lane::Find, Lane::Create, Lane::Lookup];
    for first in 0..order.len() {
        let mut bench = Bench::new(1);
        let order: Vec<Lane> = (0..order.len()).map(|n| order[(first + n) % order.len()]).collect();
        (0..).zip(&order).for_each(|(work, lane)| bench.push(work, *lane));
        for lane in order {
            let batch = bench.next().unwrap();
            assert_eq!(batch.lane, lane);
            assert!(bench.next().is_none(), "there is one statement");
            bench.finish(batch);
        }
        assert!(bench.scheduler.is_idle());
    }
}

#[test]
fn no_more_batches_of_a_lane_are_in_flight_than_pay() {
    for (lane, pay) in [(Lane::Find, 1), (Lane::Find, 3), (Lane::List, 2), (Lane::Create, 2)] {
        let mut bench = Bench::new(8);
        bench.scheduler.lanes[lane as usize].pace.fix(pay);
        (0..1000).for_each(|work| bench.push(work, lane));
        let batches = bench.all();
        assert_eq!(batches.len(), pay, "{lane:?}");
        batches.into_iter().for_each(|batch| bench.finish(batch));
        assert_eq!(bench.all().len(), pay, "{lane:?}");
    }
}

/// Cores, the commands of the first batch, and how many batches are in flight then.
#[test]
fn short_batches_in_flight_follow_the_cores() {
    for (lane, cores, first, expected) in [
        (Lane::Find, 1, 16, 2),
        (Lane::Find, 2, 16, 2),
        (Lane::Find, 2, 17, 1),
        (Lane::Find, 4, 17, 2),
        (Lane::Find, 8, 17, 4),
        (Lane::List, 2, 1, 1),
        (Lane::List, 4, 1, 2),
        (Lane::Create, 1, 1, 1),
        (Lane::Create, 2, 1, 1),
        (Lane::Create, 4, 1, 2),
        (Lane::Create, 8, 1, 4),
    ] {
        let mut bench = Bench::with(Capacity { cores, ..CAPACITY });
        for short in [Lane::Find, lane] {
            let mut pace = Pace::new(short.writes(), bench.now);
            pace.learn(Duration::from_micros(100), 1, bench.now);
            bench.scheduler.lanes[short as usize].pace = pace;
        }
        (0..first).for_each(|work| bench.push(work, lane));
        let mut batches = vec![bench.next().unwrap()];
        assert_eq!(batches[0].items.len(), first as usize);
        if lane == Lane::Find {
            assert_eq!(bench.scheduler.receivers(), expected - 1, "one for each that may start");
        }
        (0..1000).for_each(|work| bench.push(work, lane));
        batches.extend(bench.all());
        assert_eq!(batches.len(), expected, "{lane:?}, {cores} cores, {first}");
        assert_eq!(bench.scheduler.ends_soon(), !lane.writes());
        // All that they had in flight is forgotten.
        batches.into_iter().for_each(|batch| bench.finish(batch));
        assert_eq!(bench.scheduler.lanes[lane as usize].commands_in_flight, 0);
        assert!(bench.scheduler.receivers() > 0);
    }
}

/// One batch of a lane is executed, and takes so many microseconds.
fn learned(lane: Lane, statements: usize, took: u64) -> Bench {
    let mut bench = Bench::new(statements);
    bench.push(0, lane);
    let batch = bench.next().unwrap();
    bench.now += Duration::from_micros(took);
    bench.finish(batch);
    bench
}

#[test]
fn reads_are_divided_where_the_database_is_distant() {
    let rows = [
        (Lane::Find, 8, 5_600, 29, vec![4, 4, 4, 4, 4, 4, 4, 1]),
        (Lane::Find, 8, 5_600, 80, vec![10; 8]),
        (Lane::Find, 8, 5_600, 6, vec![4, 2]),
        (Lane::Create, 8, 5_600, 29, vec![29]),
        (Lane::List, 4, 5_600, 20, vec![5, 5, 5, 5]),
        // Three batches take an eighth of a core, and later ones are not divided.
        (Lane::Find, 8, 2_000, 29, vec![10, 10, 9]),
        (Lane::Find, 8, 1_100, 29, vec![29]),
        (Lane::Find, 8, 100, 5, vec![5]),
    ];
    for (lane, statements, took, waiting, expected) in rows {
        let mut bench = learned(lane, statements, took);
        // Long after the window for the client that was answered.
        bench.pass(100);
        (0..waiting).for_each(|work| bench.push(work, lane));
        let sizes: Vec<usize> = bench.all().iter().map(|batch| batch.items.len()).collect();
        assert_eq!(sizes, expected, "{waiting} of {lane:?} after {took} µs");
    }
}

/// Batches of two commands each are in flight, and so many of them end. All sessions that the lane may have were in use.
fn answered(lane: Lane, took: u64, batches: usize) -> Bench {
    let mut bench = learned(lane, 8, took);
    // Long after the window for the client that was answered.
    bench.pass(100);
    let sessions = bench.scheduler.free(lane) as u32;
    let mut in_flight = Vec::new();
    for work in 0..sessions {
        bench.push(2 * work, lane);
        bench.push(2 * work + 1, lane);
        in_flight.push(bench.next().unwrap());
    }
    assert!(in_flight.iter().all(|batch| batch.items.len() == 2));
    bench.now += Duration::from_micros(took);
    in_flight.drain(..batches).for_each(|batch| bench.finish(batch));
    bench
}

/// The sizes of the batches that start, and how many of them at once, as time passes by half of the time between batches.
fn started(bench: &mut Bench, lane: Lane) -> (Vec<usize>, Vec<usize>) {
    let apart = bench.scheduler.apart(lane).unwrap_or_default();
    let (mut sizes, mut at_once) = (Vec::new(), Vec::new());
    while bench.scheduler.len() > 0 {
        let batches = bench.all();
        sizes.extend(batches.iter().map(|batch| batch.items.len()));
        at_once.push(batches.len());
        bench.now += apart / 2;
    }
    (sizes, at_once)
}

#[test]
fn a_share_counts_the_commands_in_flight() {
    for (lane, batches, waiting, expected) in [
        (Lane::Find, 1, 5, vec![5]),
        (Lane::Find, 2, 4, vec![2, 2]),
        (Lane::Find, 3, 2, vec![2]),
        (Lane::Find, 3, 3, vec![2, 1]),
        (Lane::Find, 3, 12, vec![4, 4, 4]),
        (Lane::Find, 7, 5, vec![1; 5]),
        // The other kind of write has a session, and reads have one.
        (Lane::Create, 3, 7, vec![3, 3, 1]),
    ] {
        let mut bench = answered(lane, 5_600, batches);
        (0..waiting).for_each(|work| bench.push(work, lane));
        let (sizes, _) = started(&mut bench, lane);
        assert_eq!(sizes, expected, "{waiting} of {lane:?} after {batches}");
    }
}

#[test]
fn clients_that_return_together_are_separated() {
    for (lane, took, batches, after, waiting, expected) in [
        (Lane::Find, 5_600, 7, 0, 12, vec![1; 6]),
        (Lane::Create, 5_600, 5, 0, 12, vec![1; 4]),
        // The clients that were just answered are few.
        (Lane::Find, 5_600, 2, 0, 20, vec![2]),
        // They return late: these are other clients.
        (Lane::Find, 5_600, 7, 10_000, 12, vec![3]),
        (Lane::Create, 5_600, 5, 10_000, 12, vec![1]),
        // They have waited for each other, and would do that again.
        (Lane::Find, 5_600, 8, 0, 12, vec![3]),
        (Lane::Create, 5_600, 6, 0, 12, vec![1]),
        // The database is near.
        (Lane::Find, 100, 7, 0, 12, vec![1]),
    ] {
        let mut bench = answered(lane, took, batches);
        bench.now += Duration::from_micros(after);
        (0..waiting).for_each(|work| bench.push(work, lane));
        let (sizes, at_once) = started(&mut bench, lane);
        let what =
            format!("{waiting} of {lane:?}, {took} µs, {batches} answered, {after} µs later: {sizes:?}");
        assert_eq!(at_once, expected, "{what}");
    }
}

#[test]
fn polling_pays_for_few_clients_of_a_near_database() {
    let rows = [
        // Lane, cores, what its shortest batch took, commands unanswered, for how long.
        (Lane::Find, 2, 50, 1, 400),
        (Lane::Find, 2, 50, 16, 400),
        (Lane::Find, 2, 50, 17, 0),
        (Lane::Find, 4, 50, 8, 400),
        (Lane::Find, 4, 50, 9, 0),
        (Lane::Find, 2, 299, 1, 1000),
        (Lane::Find, 2, 300, 1, 0),
        (Lane::List, 2, 200, 2, 1000),
        (Lane::Create, 2, 420, 16, 1000),
        (Lane::Create, 2, 920, 1, 0),
        (Lane::Change, 2, 500, 1, 1000),
        (Lane::Hash, 2, 1, 1, 0),
    ];
    for (lane, cores, took, unanswered, expected) in rows {
        for polls in [true, false] {
            let mut bench = Bench::with(Capacity { cores, polls, ..CAPACITY });
            assert_eq!(bench.scheduler.poll_time(lane, unanswered), Duration::ZERO, "nothing is known");
            if lane != Lane::Hash {
                let pace = &mut bench.scheduler.lanes[lane as usize].pace;
                pace.learn(Duration::from_micros(took), 1, bench.now);
            }
            let expected = Duration::from_micros(if polls { expected } else { 0 });
            let time = bench.scheduler.poll_time(lane, unanswered);
            assert_eq!(time, expected, "{lane:?}, {took} µs, {unanswered}");
        }
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
        for lane in [Lane::Find, Lane::List, Lane::Lookup] {
            bench.push(2000, lane);
            if capacity == 1 {
                bench.finish(writes.pop().unwrap());
                // The oldest first: the writes that came before it have their turn.
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
fn changes_of_a_row_follow_each_other() {
    let mut bench = Bench::new(8);
    (0..5).for_each(|work| bench.change(work, 1));
    bench.change(5, 2);
    let mut both = bench.all();
    assert_eq!(both.iter().map(works).collect::<Vec<_>>(), [[0], [5]]);
    assert_eq!(bench.scheduler.len(), 4);
    // What met a lock stays before what came later.
    let (first, second) = (both.remove(0), both.remove(0));
    assert!(bench.contend(first).is_empty());
    bench.finish(second);
    assert!(bench.next().is_none());
    assert_eq!(bench.scheduler.len(), 5);
    bench.pass(10);
    for work in 0..5 {
        let batch = bench.next().unwrap();
        assert_eq!(works(&batch), [work]);
        assert!(bench.next().is_none(), "no change of it is beside it");
        bench.finish(batch);
    }
    assert!(bench.scheduler.is_idle());
    assert!(bench.scheduler.rows.is_empty());
}

#[test]
fn what_met_a_lock_is_executed_again_after_pauses() {
    let mut bench = Bench::new(8);
    bench.push(0, Lane::Change);
    assert_eq!(bench.contend_next(), [0]);
    for pause in [10, 20, 50, 100, 100, 100] {
        match bench.scheduler.next(bench.now) {
            Next::Wait(Some(at)) => assert_eq!(at, bench.now + Duration::from_millis(pause)),
            other => panic!("{other:?}"),
        }
        bench.pass(pause - 1);
        assert!(bench.next().is_none());
        bench.pass(1);
        assert_eq!(bench.contend_next(), [0]);
    }
    bench.pass(100);
    assert_eq!(bench.finish_next(), [0]);
    assert!(bench.scheduler.is_idle());
}

#[test]
fn retries_take_half_of_the_writes_at_most() {
    for (capacity, expected) in [(1, 1), (2, 1), (3, 1), (5, 2), (8, 3)] {
        for lane in [Lane::Change, Lane::Create] {
            let mut bench = Bench::new(capacity);
            for work in 0..20 {
                bench.push(work, lane);
                assert_eq!(bench.contend_next(), [work]);
            }
            bench.pass(100);
            let retries = bench.all();
            assert_eq!(retries.len(), expected, "{capacity}, {lane:?}");
            assert!(retries.iter().all(|batch| batch.items.len() == 1), "they are unbatched");
            // Creates and changes that have met no lock go beside them.
            for other in [Lane::Change, Lane::Create].into_iter().filter(|_| capacity > 2) {
                bench.push(100, other);
                assert_eq!(bench.finish_next(), [100], "{capacity}, {other:?} beside {lane:?}");
            }
            assert_eq!(bench.scheduler.len(), 20 - expected);
        }
    }
}

/// Any number of locked rows, and each retry waits for its lock as long as a statement may.
#[test]
fn one_statement_for_writes_is_not_taken_by_retries() {
    for statements in [1, 2] {
        let retry_for = Duration::from_secs(1000);
        let mut bench = Bench::with(Capacity { statements, retry_for, ..CAPACITY });
        for row in 0..50 {
            bench.change(row, row.into());
            assert_eq!(bench.contend_next(), [row]);
        }
        bench.pass(100);
        let mut retried = 0;
        for round in 0..100 {
            let retry = bench.next().unwrap();
            assert!(retry.token.retry, "retries have their turn");
            retried += retry.items.len();
            // A change, a create and a read arrive while it waits.
            bench.change(1000 + round, 1000);
            bench.push(2000 + round, Lane::Create);
            bench.pass(100);
            bench.contend(retry);
            assert_eq!(bench.finish_next(), [1000 + round], "capacity {statements}");
            assert_eq!(bench.finish_next(), [2000 + round], "capacity {statements}");
            if round % 2 == 0 {
                bench.push(3000, Lane::Find);
                assert_eq!(bench.finish_next(), [3000], "capacity {statements}");
            }
            bench.pass(100);
        }
        assert_eq!(retried, 100);
    }
}

#[test]
fn what_meets_a_lock_is_given_up_when_its_time_is_up() {
    for lane in [Lane::Change, Lane::Create, Lane::Find] {
        let retry_for = Duration::from_millis(500);
        let mut bench = Bench::with(Capacity { statements: 2, retry_for, ..CAPACITY });
        bench.push_with(0, lane, Keys { row: Some(1), ..Keys::default() }).unwrap();
        let arrived = bench.now;
        bench.push_with(1, lane, Keys { row: Some(1), ..Keys::default() }).unwrap();
        let mut given_up = Vec::new();
        while given_up.len() < 2 {
            bench.pass(1);
            if let Some(batch) = bench.next() {
                given_up.extend(bench.contend(batch));
            }
            assert!(bench.now <= arrived + retry_for + Duration::from_millis(2), "{lane:?}");
        }
        assert_eq!(given_up, [0, 1], "{lane:?}");
        assert!(bench.now >= arrived + retry_for - Duration::from_millis(110), "{lane:?}");
        assert!(bench.scheduler.is_idle() && bench.scheduler.rows.is_empty(), "{lane:?}");
    }
}

#[test]
fn a_read_that_meets_a_lock_pauses_its_lane_alone() {
    let mut bench = Bench::new(8);
    for work in 0..3 {
        bench.push(work, Lane::Find);
    }
    assert_eq!(bench.contend_next(), [0, 1, 2]);
    assert_eq!(bench.scheduler.len(), 3);
    bench.push(3, Lane::Find);
    for lane in [Lane::List, Lane::Lookup, Lane::Create, Lane::Change] {
        bench.push(9, lane);
        assert_eq!(bench.finish_next(), [9], "{lane:?}");
    }
    assert!(bench.next().is_none());
    bench.pass(10);
    assert_eq!(bench.finish_next(), [0, 1, 2, 3], "in the order of their arrival");
    assert!(bench.scheduler.is_idle());
}

#[test]
fn what_would_wait_too_long_for_a_hash_is_refused() {
    // Before anything was measured a hash is taken for 20 ms.
    for (hashes, expected) in [(1, 101), (2, 201)] {
        for account in [None, Some(1 << 63)] {
            let mut bench = Bench::with(Capacity { statements: 1, hashes, ..CAPACITY });
            let admitted = (0..1000).filter(|work| bench.hash(*work, account).is_ok()).count();
            assert_eq!(admitted, expected);
            assert_eq!(bench.scheduler.len(), expected, "what is refused is not queued");
            // Each that is hashed frees a place for one.
            let batch = bench.scheduler.next_hash(bench.now).unwrap();
            assert_eq!(bench.hash(1000, account), Err(1000), "it is in work yet");
            bench.now = batch.token.started + Duration::from_millis(20);
            bench.finish(batch);
            assert_eq!(bench.hash(1001, account), Ok(()));
            assert_eq!(bench.hash(1002, account), Err(1002));
        }
    }
}

#[test]
fn what_a_hash_takes_is_learned() {
    for (takes, expected) in [(5, 350..=401), (100, 18..=25)] {
        let mut bench = Bench::new(1);
        for work in 0..50 {
            bench.hash(work, None).unwrap();
            let batch = bench.scheduler.next_hash(bench.now).unwrap();
            bench.pass(takes);
            bench.finish(batch);
        }
        // No client waited for these any more, so they were not hashed.
        for work in 0..50 {
            bench.hash(work, None).unwrap();
            let batch = bench.scheduler.next_hash(bench.now).unwrap();
            bench.scheduler.finished(batch.token, true, bench.now);
            batch.items.iter().for_each(|item| bench.scheduler.done(item));
        }
        let admitted = (0..1000).filter(|work| bench.hash(*work, None).is_ok()).count();
        assert!(expected.contains(&admitted), "{takes} ms: {admitted}");
    }
}

#[test]
fn an_account_that_is_guessed_at_holds_up_no_other() {
    const GUESSED: u64 = 1 << 63 | 1;
    let mut bench = Bench::new(1);
    let _ = (0..1000).filter(|work| bench.hash(*work, Some(GUESSED)).is_err()).count();
    for other in 0..20 {
        bench.hash(2000 + other, Some(1 << 63 | (2 + u64::from(other)))).expect("another account");
    }
    bench.hash(3000, None).expect("a new user's password");
    assert!(bench.hash(1000, Some(GUESSED)).is_err());
    let mut order = Vec::new();
    while let Some(batch) = bench.scheduler.next_hash(bench.now) {
        assert!(bench.scheduler.next_hash(bench.now).is_none(), "one at once");
        order.extend(works(&batch));
        bench.pass(20);
        bench.finish(batch);
    }
    let others: Vec<u32> = (2000..2020).chain([3000]).collect();
    assert_eq!(order[1..22], others, "each behind one guess");
    assert!(order[22..].iter().is_sorted() && order.len() == 101 + 21);
    assert!(bench.scheduler.is_idle());
}

/// It is counted from its admission on, whatever step it is in, until its hash is done.
#[test]
fn steps_before_and_after_a_hash() {
    let mut bench = Bench::new(2);
    let keys = Keys { row: Some(7), hashes: true, ..Keys::default() };
    (0..101).for_each(|work| bench.push_with(work, Lane::Find, keys).unwrap());
    assert_eq!(bench.hash(101, None), Err(101), "those that are not looked up yet count");
    // 64 are found, one is not.
    let batch = bench.next().unwrap();
    bench.scheduler.finished(batch.token, false, bench.now);
    let mut items = batch.items.into_iter();
    bench.scheduler.done(&items.next().unwrap());
    items.for_each(|item| bench.scheduler.push_next(item, Lane::Hash, 0));
    assert_eq!(bench.scheduler.len(), 100);
    assert_eq!(bench.hash(101, None), Ok(()));
    assert_eq!(bench.hash(102, None), Err(102));
    // Hashed: what is left to do is no hash.
    let batch = bench.scheduler.next_hash(bench.now).unwrap();
    bench.scheduler.finished(batch.token, true, bench.now);
    batch.items.into_iter().for_each(|item| bench.scheduler.push_next(item, Lane::Change, 0));
    assert_eq!(bench.hash(103, None), Ok(()));
    assert_eq!(bench.scheduler.len(), 102);
    assert_eq!(bench.finish_next(), [1], "it arrived before those that are not looked up yet");
    assert_eq!(bench.finish_next(), (64..101).collect::<Vec<_>>());
    assert!(bench.scheduler.rows.is_empty());
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
    assert_eq!(bench.contend_next(), [10]);
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

mod random;

#[test]
fn what_needs_memory_waits_for_it_and_nothing_else_does() {
    const MIB: usize = 1 << 20;
    let mut bench = Bench::new(8);
    let needs = |memory| Keys { memory, ..Keys::default() };
    bench.scheduler.set_memory(MIB);
    for work in 0..5 {
        bench.push_with(work, Lane::List, needs(MIB / 4)).unwrap();
    }
    bench.push_with(5, Lane::Large, needs(4 * MIB)).unwrap();
    bench.push(6, Lane::Find);
    let pages = bench.next().unwrap();
    assert_eq!((works(&pages), pages.memory), (vec![0, 1, 2, 3], MIB));
    bench.scheduler.set_memory(0);
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
        bench.push_with(work, Lane::List, needs(MIB)).unwrap();
    }
    bench.push_with(20, Lane::List, needs(100 * MIB)).unwrap();
    assert_eq!(bench.finish_next().len(), batch_memory(Lane::List) / MIB);
    while bench.finish_next() != [20] {}
    assert!(bench.scheduler.is_idle());
}

#[test]
fn large_reads_leave_sessions_to_others() {
    let mut bench = Bench::new(8);
    for work in 0..8 {
        bench.push(work, Lane::Large);
    }
    assert_eq!(lanes(&bench.all()), [Lane::Large; 2]);
    bench.push(8, Lane::Find);
    assert_eq!(lanes(&bench.all()), [Lane::Find]);
}
