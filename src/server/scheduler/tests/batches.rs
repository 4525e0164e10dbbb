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
        (Lane::Find, 1, 16, 1),
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
        (0..300).for_each(|work| bench.push(work, lane));
        batches.extend(bench.all());
        assert_eq!(batches.len(), expected, "{lane:?}, {cores} cores, {first}");
        assert_eq!(bench.scheduler.ends_by(bench.now).is_some(), !lane.writes());
        assert_eq!(bench.scheduler.ends_by(bench.now + Duration::from_millis(1)), None, "it is late");
        batches.into_iter().for_each(|batch| bench.finish(batch));
        assert_eq!(bench.scheduler.ends_by(bench.now), None);
    }
}

/// Where batches do little but wait, each session has one, but for what lanes leave to others; else whatever comes
/// waits for the end of those that pay.
#[test]
fn all_sessions_are_used_where_batches_wait() {
    for (lane, took, expected) in [
        (Lane::Find, 299, 1),
        (Lane::Find, 300, 8),
        (Lane::List, 100, 1),
        (Lane::List, 1_000, 7),
        (Lane::Create, 900, 1),
        (Lane::Create, 920, 6),
        (Lane::Change, 900, 1),
        (Lane::Change, 920, 6),
    ] {
        let mut bench = Bench::new(8);
        let mut pace = Pace::new(lane.writes(), bench.now);
        pace.learn(Duration::from_micros(took), 1, bench.now);
        bench.scheduler.lanes[lane as usize].pace = pace;
        let mut started = 0;
        for work in 0..20 {
            bench.push(work, lane);
            started += bench.all().len();
        }
        assert_eq!(started, expected, "{lane:?}, {took} µs");
    }
}
