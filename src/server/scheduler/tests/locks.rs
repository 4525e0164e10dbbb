//! Changes of one row, and commands that met a lock.

use super::*;
use std::collections::BTreeSet;

#[test]
fn changes_of_a_row_follow_each_other() {
    let mut bench = Bench::new(8);
    (0..5).for_each(|work| bench.change(work, 1));
    bench.change(5, 2);
    // One change of each row is in a batch.
    let mut batch = bench.next().unwrap();
    assert_eq!(works(&batch), [0, 5]);
    assert_eq!(bench.scheduler.len(), 4);
    // What met a lock stays before what came later.
    let (second, first) = (batch.items.pop().unwrap(), batch.items.pop().unwrap());
    bench.scheduler.finished(batch.token, true, bench.now);
    bench.scheduler.push_again(first, bench.now).unwrap();
    bench.scheduler.done(&second);
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
        for lane in [Lane::Change, Lane::Single, Lane::Create] {
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
            let both = BTreeSet::from([bench.finish_next(), bench.finish_next()]);
            assert_eq!(
                both,
                BTreeSet::from([vec![1000 + round], vec![2000 + round]]),
                "capacity {statements}"
            );
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
        bench.push_with(0, Needs { row: Some(1), ..Needs::of(lane) }).unwrap();
        let arrived = bench.now;
        bench.push_with(1, Needs { row: Some(1), ..Needs::of(lane) }).unwrap();
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
    for lane in [Lane::List, Lane::Create, Lane::Change] {
        bench.push(9, lane);
        assert_eq!(bench.finish_next(), [9], "{lane:?}");
    }
    assert!(bench.next().is_none());
    bench.pass(10);
    assert_eq!(bench.finish_next(), [0, 1, 2, 3], "in the order of their arrival");
    assert!(bench.scheduler.is_idle());
}

/// Where batches are short, one of them is in flight. It counts for as long as such batches take.
#[test]
fn a_write_that_waits_for_a_lock_holds_up_none_behind_it() {
    for lane in [Lane::Create, Lane::Change] {
        let mut bench = Bench::new(8);
        bench.scheduler.lanes[lane as usize].pace.fix(1);
        bench.push(0, lane);
        let waits = bench.next().unwrap();
        (1..4).for_each(|work| bench.push(work, lane));
        match bench.scheduler.next(bench.now) {
            Next::Wait(Some(at)) => assert!(at <= bench.now + Duration::from_millis(5), "{lane:?}"),
            other => panic!("{other:?}"),
        }
        bench.pass(4);
        assert!(bench.next().is_none(), "{lane:?}: it may yet end");
        bench.pass(1);
        assert_eq!(bench.finish_next(), [1, 2, 3], "{lane:?}");
        assert!(bench.contend(waits).is_empty());
        bench.pass(10);
        assert_eq!(bench.finish_next(), [0], "{lane:?}");
        assert!(bench.scheduler.is_idle());
    }
}

/// An update that is to be executed unbatched keeps its row.
#[test]
fn a_change_with_another_step_stays_before_those_behind_it() {
    let mut bench = Bench::new(8);
    (0..3).for_each(|work| bench.change(work, 1));
    bench.change(3, 2);
    let mut batch = bench.next().unwrap();
    assert_eq!(works(&batch), [0, 3]);
    let (second, first) = (batch.items.pop().unwrap(), batch.items.pop().unwrap());
    bench.scheduler.finished(batch.token, false, bench.now);
    bench.scheduler.done(&second);
    bench.scheduler.push_next(first, Needs { row: Some(1), ..Needs::of(Lane::Single) });
    assert_eq!(bench.scheduler.len(), 3);
    let single = bench.next().unwrap();
    assert_eq!((single.lane, works(&single)), (Lane::Single, vec![0]));
    assert!(bench.next().is_none());
    bench.finish(single);
    assert_eq!(bench.finish_next(), [1]);
    assert_eq!(bench.finish_next(), [2]);
    assert!(bench.scheduler.is_idle() && bench.scheduler.rows.is_empty());
}
