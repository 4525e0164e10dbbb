//! The queue of hashes.

use super::*;

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
    let needs = |lane, hash| Needs { row: Some(7), hash, ..Needs::of(lane) };
    let hashes = Some(Account::NEW);
    (0..101).for_each(|work| bench.push_with(work, needs(Lane::Find, hashes)).unwrap());
    assert_eq!(bench.hash(101, None), Err(101), "those that are not looked up yet count");
    // 64 are found, one is not.
    let batch = bench.next().unwrap();
    bench.scheduler.finished(batch.token, false, bench.now);
    let mut items = batch.items.into_iter();
    bench.scheduler.done(&items.next().unwrap());
    items.for_each(|item| bench.scheduler.push_next(item, needs(Lane::Hash, hashes)));
    assert_eq!(bench.scheduler.len(), 100);
    assert_eq!(bench.hash(101, None), Ok(()));
    assert_eq!(bench.hash(102, None), Err(102));
    // Hashed: what is left to do is no hash.
    let batch = bench.scheduler.next_hash(bench.now).unwrap();
    bench.scheduler.finished(batch.token, true, bench.now);
    batch.items.into_iter().for_each(|item| bench.scheduler.push_next(item, needs(Lane::Change, None)));
    assert_eq!(bench.hash(103, None), Ok(()));
    assert_eq!(bench.scheduler.len(), 102);
    assert_eq!(bench.finish_next(), [1], "it arrived before those that are not looked up yet");
    assert_eq!(bench.finish_next(), (64..101).collect::<Vec<_>>());
    assert!(bench.scheduler.rows.is_empty());
}
