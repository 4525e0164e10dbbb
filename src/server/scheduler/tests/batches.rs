//! How many commands a batch takes, how many batches are in flight, and when the next one starts.

use super::*;

#[test]
fn batches_have_a_limit() {
    for (lane, limit) in
        [(Lane::Find, 64), (Lane::Create, 64), (Lane::List, 16), (Lane::Change, 64), (Lane::Single, 1)]
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
            assert_eq!(bench.scheduler.receivers(bench.now), expected - 1, "one for each that may start");
        }
        (0..1000).for_each(|work| bench.push(work, lane));
        batches.extend(bench.all());
        assert_eq!(batches.len(), expected, "{lane:?}, {cores} cores, {first}");
        assert_eq!(bench.scheduler.ends_soon(), !lane.writes());
        // All that they had in flight is forgotten.
        batches.into_iter().for_each(|batch| bench.finish(batch));
        assert_eq!(bench.scheduler.lanes[lane as usize].commands_in_flight, 0);
        assert!(bench.scheduler.receivers(bench.now) > 0);
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
    let mut in_flight = Vec::new();
    while bench.scheduler.may_start(lane, bench.now) {
        (0..2).for_each(|work| bench.push(work, lane));
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
