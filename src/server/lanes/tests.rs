//! Tests of the rules of lanes: each rule, and all of them under random load. Without a database, a thread or a clock.

use super::*;
use std::{collections::HashSet, net::Ipv4Addr};

const CAPACITY: Capacity =
    Capacity { sessions: 8, hashers: 1, cores: 2, max_retry_time: Duration::from_secs(10) };

/// Lanes, and the time that a test has set.
struct Bench {
    lanes: Lanes<u32>,
    now: Instant,
}

impl Bench {
    fn new(capacity: Capacity) -> Bench {
        Bench { lanes: Lanes::new(capacity), now: Instant::now() }
    }

    /// Queues a command of the address with this number. Lets a microsecond pass, so that times differ.
    fn push(&mut self, peer: u8, work: u32, step: Step) -> Option<u32> {
        self.now += Duration::from_micros(1);
        self.lanes.push(work, step, Some(Ipv4Addr::new(127, 0, 0, peer).into()), self.now)
    }

    fn next(&mut self) -> Option<Batch<u32>> {
        self.now += Duration::from_micros(1);
        self.lanes.take_batch(self.now, false)
    }

    /// Starts the next batch. Returns its commands.
    fn works(&mut self) -> Vec<u32> {
        self.next().map_or_else(Vec::new, |batch| works(&batch))
    }

    /// Ends a batch after this time, with an answer to each command.
    fn end(&mut self, batch: Batch<u32>, after: Duration) {
        self.now += after;
        self.lanes.end_batch(&batch, self.now);
        batch.commands.iter().for_each(|command| self.lanes.free_row(command));
    }
}

fn works(batch: &Batch<u32>) -> Vec<u32> {
    batch.commands.iter().map(|command| command.task).collect()
}

fn change(row: i64) -> Step {
    Step::changing_user(Lane::Change, row)
}

const LOCAL: Duration = Duration::from_micros(200);

#[test]
fn a_batch_is_what_arrived_meanwhile() {
    let mut bench = Bench::new(CAPACITY);
    let find = Step::in_lane(Lane::Find);
    bench.push(1, 0, find);
    let first = bench.next().unwrap();
    (1..=70).for_each(|n| {
        bench.push(1, n, find);
    });
    assert!(bench.next().is_none(), "a short batch is in flight");
    bench.end(first, LOCAL);
    let second = bench.next().unwrap();
    assert_eq!(works(&second), (1..=64).collect::<Vec<_>>());
    bench.end(second, LOCAL);
    let third = bench.next().unwrap();
    assert_eq!(works(&third), (65..=70).collect::<Vec<_>>());
    assert!(bench.lanes.queued_commands() == 0 && !bench.lanes.is_idle());
    bench.end(third, LOCAL);
    assert!(bench.lanes.is_idle());
}

/// Each row has a lane, the cores, the time that a batch takes, and how many batches are in flight then.
#[test]
fn batches_in_flight() {
    let rows = [
        (Lane::Find, 2, 200, 1),
        (Lane::Find, 8, 200, 4),
        (Lane::Find, 2, 2000, 8),
        (Lane::List, 2, 200, 1),
        (Lane::List, 2, 2000, 7),
        (Lane::Create, 2, 200, 2),
        (Lane::Create, 2, 2000, 6),
        (Lane::Change, 2, 200, 2),
        (Lane::Change, 2, 2000, 6),
        (Lane::Single, 2, 200, 6),
    ];
    for (lane, cores, took, expected) in rows {
        let mut bench = Bench::new(Capacity { cores, ..CAPACITY });
        for n in 0..10 {
            bench.push(1, n, Step::in_lane(lane));
            let batch = bench.next().unwrap();
            bench.end(batch, Duration::from_micros(took));
        }
        let started = (0..20).filter(|n| {
            bench.push(1, *n, Step::in_lane(lane));
            bench.next().is_some()
        });
        assert_eq!(started.count(), expected, "{lane:?}, {cores} cores, {took} µs");
    }
}

#[test]
fn a_batch_that_is_stuck_does_not_stop_its_lane() {
    for lane in [Lane::Find, Lane::List, Lane::Create, Lane::Change] {
        let mut bench = Bench::new(CAPACITY);
        let mut stuck = Vec::new();
        for n in 0..10 {
            bench.push(1, n, Step::in_lane(lane));
            stuck.extend(bench.next());
        }
        let due = bench.lanes.next_ready_time(bench.now, false).expect("more is queued");
        assert_eq!(due, stuck[0].started_at + STUCK_BATCH_TIME, "{lane:?}");
        assert!(bench.lanes.find_ready_queue(due - Duration::from_micros(1), false).is_none(), "{lane:?}");
        bench.now = due;
        assert!(bench.next().is_some(), "{lane:?}");
    }
}

#[test]
fn one_slow_batch_does_not_make_a_lane_a_slow_one() {
    let mut bench = Bench::new(CAPACITY);
    let mut in_flight = |took: u64| {
        bench.push(1, 0, Step::in_lane(Lane::Find));
        let batch = bench.next().unwrap();
        bench.end(batch, Duration::from_micros(took));
        bench.lanes.queues[Lane::Find as usize].recent_batch_time < SHORT_BATCH_TIME
    };
    let short = [200, 100_000, 200, 100_000, 100_000].map(&mut in_flight);
    assert_eq!(short, [true; 5]);
    assert!(!in_flight(100_000) && in_flight(200));
}

#[test]
fn changes_of_one_row_follow_each_other() {
    let mut bench = Bench::new(CAPACITY);
    for (work, step) in (1..).zip([change(7), change(7), change(8), Step::changing_user(Lane::Single, 7)]) {
        bench.push(1, work, step);
    }
    // Finds the change of another row behind any number of changes of one row.
    (100..1000).for_each(|n| {
        bench.push(1, n, change(9));
    });
    bench.push(1, 5, change(10));
    let first = bench.next().unwrap();
    assert_eq!(works(&first), [1, 3, 100, 5]);
    bench.now += STUCK_BATCH_TIME;
    assert!(bench.next().is_none());
    bench.end(first, LOCAL);
    // Takes turns between lanes.
    let single = bench.next().unwrap();
    assert_eq!(works(&single), [4]);
    let change = bench.next().unwrap();
    assert_eq!(works(&change), [101]);
    bench.end(single, LOCAL);
    bench.end(change, LOCAL);
    assert_eq!(bench.works(), [2, 102]);
}

#[test]
fn a_row_stays_taken_while_its_change_pauses_or_goes_on() {
    let mut bench = Bench::new(CAPACITY);
    bench.push(1, 1, change(7));
    bench.push(1, 2, change(7));
    let mut batch = bench.next().unwrap();
    bench.lanes.end_batch(&batch, bench.now);
    let command = batch.commands.pop().unwrap();
    assert!(bench.lanes.push_next_step(command, Step::changing_user(Lane::Single, 7)).is_none());
    let mut batch = bench.next().unwrap();
    assert_eq!((batch.commands[0].queued_step.lane, works(&batch)), (Lane::Single, vec![1]));
    bench.lanes.end_batch(&batch, bench.now);
    assert!(bench.lanes.push_retry(batch.commands.pop().unwrap(), bench.now).is_none());
    assert!(bench.next().is_none());
    bench.now = bench.lanes.next_ready_time(bench.now, false).unwrap();
    let batch = bench.next().unwrap();
    assert_eq!(works(&batch), [1]);
    bench.end(batch, LOCAL);
    assert_eq!(bench.works(), [2]);
}

#[test]
fn a_command_that_met_a_lock_is_retried_alone_until_its_time_is_up() {
    let max_retry_time = Duration::from_secs(1);
    let mut bench = Bench::new(Capacity { max_retry_time, ..CAPACITY });
    bench.push(1, 1, change(7));
    let start = bench.now;
    let mut pauses = Vec::new();
    loop {
        let mut batch = bench.next().unwrap();
        bench.lanes.end_batch(&batch, bench.now);
        if bench.lanes.push_retry(batch.commands.pop().unwrap(), bench.now).is_some() {
            break;
        }
        // Retries the command without its neighbours in the batch.
        (10..14).for_each(|n| {
            bench.push(1, n, change(n.into()));
        });
        let batch = bench.next().unwrap();
        assert_eq!(works(&batch), [10, 11, 12, 13]);
        bench.end(batch, LOCAL);
        let due = bench.lanes.next_ready_time(bench.now, false).unwrap();
        pauses.push((due - bench.now).as_millis());
        bench.now = due;
    }
    assert_eq!(pauses[..5], [9, 19, 39, 79, 79]);
    assert!(
        bench.now <= start + max_retry_time && bench.now + Duration::from_millis(80) > start + max_retry_time
    );
    assert!(bench.lanes.is_idle() && bench.lanes.taken_rows.is_empty());
}

#[test]
fn retries_leave_sessions_to_what_has_met_no_lock() {
    for (sessions, most) in [(1, 1), (2, 1), (3, 1), (5, 2), (8, 3)] {
        let mut bench = Bench::new(Capacity { sessions, ..CAPACITY });
        for row in 0..20 {
            bench.push(1, row, change(row.into()));
        }
        let batch = bench.next().unwrap();
        bench.lanes.end_batch(&batch, bench.now);
        for command in batch.commands {
            assert!(bench.lanes.push_retry(command, bench.now).is_none());
        }
        bench.now += Duration::from_millis(10);
        let retries: Vec<_> = std::iter::from_fn(|| bench.next()).collect();
        assert_eq!(retries.len(), most, "{sessions}");
        assert!(retries.iter().all(|batch| batch.commands.len() == 1));
        bench.push(1, 100, change(100));
        for batch in retries {
            bench.end(batch, Duration::from_millis(100));
        }
        assert_eq!(bench.works(), [100], "{sessions}: its turn is before the next retry's");
    }
}

#[test]
fn one_address_does_not_keep_others_out() {
    for lane in [Lane::Find, Lane::List, Lane::Create, Lane::Change, Lane::Single] {
        let mut bench = Bench::new(CAPACITY);
        (0..400).for_each(|n| {
            bench.push(1, n, Step::in_lane(lane));
        });
        (400..800).for_each(|n| {
            bench.push(2, n, Step::in_lane(lane));
        });
        bench.push(3, 1000, Step::in_lane(lane));
        let mut batches = 0;
        let is_in = |batch: &Batch<u32>| works(batch).contains(&1000);
        loop {
            batches += 1;
            let batch = bench.next().unwrap();
            let found = is_in(&batch);
            bench.end(batch, LOCAL);
            if found {
                break;
            }
        }
        assert!(batches <= if max_batch_size(lane as usize) == 1 { 3 } else { 1 }, "{lane:?}: {batches}");
    }
}

#[test]
fn lists_in_flight_have_few_users() {
    let mut bench = Bench::new(CAPACITY);
    let list = |users| Step { max_listed_users: users, ..Step::in_lane(Lane::List) };
    bench.push(1, 0, list(4000));
    (1..10).for_each(|n| {
        bench.push(1, n, list(999));
    });
    let large = bench.next().unwrap();
    assert_eq!(works(&large), [0]);
    bench.now += STUCK_BATCH_TIME;
    assert!(bench.next().is_none());
    bench.end(large, LOCAL);
    assert_eq!(bench.works(), [1, 2], "1,998 users");
    bench.now += STUCK_BATCH_TIME;
    assert!(bench.next().is_none());
}

#[test]
fn a_full_queue_of_hashes_refuses_the_address_that_has_most() {
    let hash = Step::in_lane(Lane::Hash);
    for hashers in [1, 2] {
        let mut bench = Bench::new(Capacity { hashers, ..CAPACITY });
        let most = 100 * hashers as u32;
        assert!((0..most).all(|n| bench.push(1, n, hash).is_none()));
        assert_eq!(bench.push(1, 5000, hash), Some(5000));
        assert_eq!(bench.push(2, 6000, hash), Some(most - 1));
        assert_eq!(bench.lanes.queued_commands(), most as usize);
        let order: Vec<u32> = (0..3)
            .map(|_| {
                let batch = bench.lanes.take_batch(bench.now, true).unwrap();
                let work = works(&batch)[0];
                bench.end(batch, Duration::from_millis(20));
                work
            })
            .collect();
        assert_eq!(order, [0, 6000, 1]);
    }
}

/// Checks that two seconds of work may wait. Each row has the time of a hash, and how many passwords may wait for one
/// thread.
#[test]
fn the_queue_of_hashes_counts_their_cost() {
    let hash = Step::in_lane(Lane::Hash);
    for (millis, most) in [(20, 100), (200, 10), (1500, 1)] {
        let mut bench = Bench::new(CAPACITY);
        for n in 0..60 {
            bench.push(1, n, hash);
            let batch = bench.lanes.take_batch(bench.now, true).unwrap();
            bench.end(batch, Duration::from_millis(millis));
        }
        assert!((0..most).all(|n| bench.push(1, n, hash).is_none()), "{millis} ms");
        assert_eq!(bench.push(1, most, hash), Some(most), "{millis} ms");
    }
}

#[test]
fn commands_that_no_client_waits_for_are_dropped() {
    let mut bench = Bench::new(CAPACITY);
    for (work, step) in [(0, change(1)), (1, change(1)), (2, change(1)), (3, Step::in_lane(Lane::Hash))] {
        bench.push(1, work, step);
    }
    bench.lanes.retain_awaited(|work| *work == 2);
    assert_eq!(bench.lanes.queued_commands(), 1);
    let batch = bench.next().unwrap();
    assert_eq!(works(&batch), [2]);
    bench.end(batch, LOCAL);
    assert!(bench.lanes.is_idle() && bench.lanes.taken_rows.is_empty());
}

/// A generator of random numbers (xorshift64*) whose seed repeats a failure.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

/// The number of rows that are changed. Each of the first few is locked half of the time.
const ROWS: u64 = 40;
const LOCKED: i64 = 10;

/// The most commands that are queued at once.
const QUEUED: usize = 300;

/// The most ends of batches before a command is started for the first time. A change starts behind the earlier changes
/// of its row, of which each may meet a lock several times.
const STARTS_WITHIN: u64 = 10 * QUEUED as u64;

/// Checks the rules at every step of random arrivals, ends, locks and abandoned clients.
struct World {
    bench: Bench,
    random: Random,
    in_flight: Vec<Batch<u32>>,
    rows: HashSet<i64>,
    /// For each number of a command: its step, the number of ends of batches when it was queued (until it is started),
    /// and whether it is over.
    commands: Vec<(Step, Option<u64>, bool)>,
    queued: usize,
    ends: u64,
}

impl World {
    fn new(sessions: usize, hashers: usize, seed: u64) -> World {
        // A time that is so long that no command is given up.
        let max_retry_time = Duration::from_secs(1 << 30);
        World {
            bench: Bench::new(Capacity { sessions, hashers, cores: 2, max_retry_time }),
            random: Random(seed),
            in_flight: Vec::new(),
            rows: HashSet::new(),
            commands: Vec::new(),
            queued: 0,
            ends: 0,
        }
    }

    fn arrive(&mut self) {
        let row = self.random.below(ROWS) as i64;
        let step = match self.random.below(20) {
            0..8 => Step::in_lane(Lane::Find),
            8..10 => Step { max_listed_users: self.random.below(1000) as usize, ..Step::in_lane(Lane::List) },
            10..13 => Step::in_lane(Lane::Hash),
            13..16 => Step::in_lane(Lane::Create),
            16 => Step::changing_user(Lane::Single, row),
            _ => change(row),
        };
        let (peer, work) = (self.random.below(5) as u8, self.commands.len() as u32);
        self.commands.push((step, Some(self.ends), false));
        self.queued += 1;
        let refused = self.bench.push(peer, work, step);
        self.refused(refused);
    }

    fn refused(&mut self, refused: Option<u32>) {
        if let Some(work) = refused {
            assert_eq!(self.commands[work as usize].0.lane, Lane::Hash);
            self.commands[work as usize].2 = true;
            self.queued -= 1;
        }
    }

    /// Starts all batches that may start.
    fn start(&mut self) {
        for hashes in [false, true] {
            while let Some(batch) = self.bench.lanes.take_batch(self.bench.now, hashes) {
                assert_eq!(batch.queue_index == HASH, hashes);
                assert!((1..=max_batch_size(batch.queue_index)).contains(&batch.commands.len()));
                self.queued -= batch.commands.len();
                for command in &batch.commands {
                    let (step, since, over) = &mut self.commands[command.task as usize];
                    assert!(!*over && step.lane == batch.commands[0].queued_step.lane);
                    if let Some(row) = step.changed_user_id {
                        assert!(self.rows.insert(row), "a row is changed twice at once");
                    }
                    if let Some(since) = since.take() {
                        assert!(self.ends - since <= STARTS_WITHIN, "{:?} waits for too long", step.lane);
                    }
                }
                self.in_flight.push(batch);
                self.bench.now += Duration::from_nanos(1);
            }
        }
        self.check();
    }

    fn check(&self) {
        let Capacity { sessions, hashers, .. } = self.bench.lanes.capacity;
        let count = |queue: usize| self.in_flight.iter().filter(|batch| batch.queue_index == queue).count();
        let of = |lane: Lane| count(lane as usize);
        let changes = of(Lane::Change) + of(Lane::Single);
        let (writes, hashes) = (of(Lane::Create) + changes + count(RETRY), count(HASH));
        let (but_one, but_two) = ((sessions - 1).max(1), sessions.saturating_sub(2).max(1));
        assert!(self.in_flight.len() - hashes <= sessions && writes <= but_one && hashes <= hashers);
        assert!(of(Lane::Create) <= but_two && changes <= but_two && of(Lane::List) <= but_one);
        assert!(count(RETRY) <= (but_one / 2).max(1));
        let users = |batch: &Batch<u32>| {
            batch.commands.iter().map(|command| command.queued_step.max_listed_users).sum::<usize>()
        };
        let lists = self.in_flight.iter().filter(|batch| batch.queue_index == Lane::List as usize);
        assert!(lists.map(users).sum::<usize>() < 2 * MAX_USERS_IN_LISTS);
        // Checks that reads are in flight if one may be executed, unless a short batch is.
        let waiting = |lane: Lane| !self.bench.lanes.queues[lane as usize].commands.is_empty();
        let full = self.in_flight.len() - hashes == sessions;
        assert!(!waiting(Lane::Find) || full || of(Lane::Find) > 0, "a find waits for nothing");
        assert_eq!(self.bench.lanes.queued_commands(), self.queued);
        assert_eq!(self.bench.lanes.is_idle(), self.queued + self.in_flight.len() == 0);
    }

    /// Ends a batch in flight in a random way; at the end of the test without locks.
    fn end(&mut self, locks: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = self.random.below(self.in_flight.len() as u64) as usize;
        let batch = self.in_flight.swap_remove(at);
        self.ends += 1;
        self.bench.lanes.end_batch(&batch, self.bench.now);
        let table_is_locked = self.random.below(1000) < 5;
        for command in batch.commands {
            let step = self.commands[command.task as usize].0;
            assert!(step.changed_user_id.is_none_or(|row| self.rows.remove(&row)));
            let is_locked = step.changed_user_id.is_some_and(|row| row < LOCKED) && self.random.below(2) == 0;
            if locks && (is_locked || table_is_locked) {
                self.queued += 1;
                assert!(self.bench.lanes.push_retry(command, self.bench.now).is_none(), "it is not given up");
                continue;
            }
            let next = match step.lane {
                // Continues after a hash: stores a new user, or a change of one.
                Lane::Hash => match self.random.below(4) {
                    0 => Some(Step::in_lane(Lane::Single)),
                    1 => Some(Step::changing_user(Lane::Single, self.random.below(ROWS) as i64)),
                    _ => None,
                },
                // Continues an update of an address.
                Lane::Change if self.random.below(4) == 0 => Some(Step { lane: Lane::Single, ..step }),
                Lane::Create if self.random.below(40) == 0 => Some(Step::in_lane(Lane::Hash)),
                _ => None,
            };
            if let Some(step) = next {
                self.commands[command.task as usize].0 = step;
                self.queued += 1;
                let refused = self.bench.lanes.push_next_step(command, step);
                self.refused(refused);
                continue;
            }
            self.commands[command.task as usize].2 = true;
            self.bench.lanes.free_row(&command);
        }
    }

    /// Lets some clients go.
    fn abandon(&mut self) {
        let gone: HashSet<u32> =
            (0..self.commands.len() as u32).filter(|_| self.random.below(8) == 0).collect();
        let before = self.bench.lanes.queued_commands();
        self.bench.lanes.retain_awaited(|work| !gone.contains(work));
        self.queued -= before - self.bench.lanes.queued_commands();
        let in_flight: HashSet<u32> = self.in_flight.iter().flat_map(works).collect();
        for work in gone.difference(&in_flight) {
            self.commands[*work as usize].2 = true;
        }
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            match self.random.below(1000) {
                0..450 if self.queued < QUEUED => self.arrive(),
                999 => self.abandon(),
                _ => self.end(true),
            }
            self.start();
            let microseconds = self.random.below(1000);
            self.bench.now += Duration::from_micros(microseconds);
        }
        // Ends the locks and arrivals: all commands are executed.
        while !self.bench.lanes.is_idle() {
            self.end(false);
            self.bench.now += Duration::from_millis(1);
            self.start();
        }
        assert!(self.commands.iter().all(|(.., over)| *over));
        assert!(
            self.bench.lanes.taken_rows.is_empty()
                && self.rows.is_empty()
                && self.bench.lanes.max_listed_users == 0
        );
    }
}

#[test]
fn any_history_keeps_the_rules() {
    for (sessions, hashers, seed) in [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 4), (8, 2, 5)] {
        World::new(sessions, hashers, seed).run(50_000);
    }
}
