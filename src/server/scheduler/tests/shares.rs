//! What peers get of a lane, of a row and of the hashes, whatever the others send.

use super::{random::Random, *};
use std::collections::HashMap;

/// The lanes whose commands are taken from a queue, with the most commands of one batch.
const TAKEN: [(Lane, usize); 5] =
    [(Lane::Find, 64), (Lane::List, 16), (Lane::Create, 64), (Lane::Change, 64), (Lane::Single, 1)];

#[test]
fn peers_take_turns_in_each_lane() {
    for (lane, limit) in TAKEN {
        let mut bench = Bench::new(1);
        (0..1000).for_each(|work| bench.push_from(1, work, Needs::of(lane)).unwrap());
        let first = bench.next().unwrap();
        // A second peer comes late, with three commands.
        (1000..1003).for_each(|work| bench.push_from(2, work, Needs::of(lane)).unwrap());
        bench.finish(first);
        let mut order = Vec::new();
        while order.len() < 6 {
            order.extend(bench.finish_next());
        }
        let greedy = limit as u32;
        let expected = [greedy, 1000, greedy + 1, 1001, greedy + 2, 1002];
        assert_eq!(order[..6], expected, "{lane:?}");
        assert!(order[6..].iter().is_sorted(), "{lane:?}: then the first one alone");
    }
}

#[test]
fn changes_of_one_row_are_in_order_of_arrival_within_a_peer_and_in_turns_between_peers() {
    let mut bench = Bench::new(8);
    let change = Needs { row: Some(7), ..Needs::of(Lane::Change) };
    (0..5).for_each(|work| bench.push_from(1, work, change).unwrap());
    (10..13).for_each(|work| bench.push_from(2, work, change).unwrap());
    (20..22).for_each(|work| bench.push_from(3, work, change).unwrap());
    let order: Vec<u32> = (0..10).flat_map(|_| bench.finish_next()).collect();
    assert_eq!(order, [0, 1, 10, 20, 2, 11, 21, 3, 12, 4]);
    assert!(bench.scheduler.is_idle() && bench.scheduler.rows.is_empty());
}

/// A peer that fills the queue leaves each other one a turn, and the same time.
#[test]
fn hashes_are_shared_by_peer_and_then_by_account() {
    let mut bench = Bench::new(1);
    let login =
        |account: u64| Needs { hash: Some(Account(Some(1 << 63 | account))), ..Needs::of(Lane::Hash) };
    let admitted = (0..1000).filter(|work| bench.push_from(1, *work, login((*work).into())).is_ok()).count();
    assert_eq!(admitted, 101, "two seconds of hashes");
    // A guesser at one account, and a login of that peer to another one.
    assert_eq!((2000..2100).filter(|work| bench.push_from(2, *work, login(1)).is_ok()).count(), 50);
    bench.push_from(2, 3000, login(2)).expect("another account of the same peer");
    bench.push_from(3, 4000, login(1)).expect("another peer");
    let mut order = Vec::new();
    while let Some(batch) = bench.scheduler.next_hash(bench.now) {
        order.extend(works(&batch));
        bench.pass(20);
        bench.finish(batch);
    }
    assert_eq!(order[..6], [0, 2000, 4000, 1, 3000, 2]);
    assert!(order[6..].iter().filter(|work| **work >= 2000).is_sorted());
    assert_eq!((order.len(), bench.scheduler.hashes.all_admitted), (101 + 50 + 2, 0));
}

/// Greedy peers that keep any number of commands queued, and one that has a single command at a time: it waits for one
/// round over the active peers, at most, measured in batches; and nothing is lost.
#[test]
fn a_peer_with_one_command_waits_for_one_round() {
    let mut random = Random(7);
    for (lane, limit) in TAKEN {
        for greedy in [1_u8, 3, 20, 200] {
            let mut bench = Bench::new(1);
            let (mut queued, mut work) = (HashMap::<u8, VecDeque<u32>>::new(), 0);
            let mut single = None;
            let mut batches = 0;
            for round in 0..300 {
                for _ in 0..random.below(3 * limit as u64 + 2) {
                    let peer = 1 + random.below(greedy.into()) as u8;
                    bench.push_from(peer, work, Needs::of(lane)).unwrap();
                    queued.entry(peer).or_default().push_back(work);
                    work += 1;
                }
                if single.is_none() {
                    bench.push_from(0, u32::MAX, Needs::of(lane)).unwrap();
                    single = Some(batches);
                }
                let Some(batch) = bench.next() else { continue };
                batches += 1;
                for work in works(&batch) {
                    if work == u32::MAX {
                        let waited = batches - single.take().expect("it was queued");
                        let one_round = (usize::from(greedy) + 1).div_ceil(limit);
                        assert!(waited <= one_round, "{lane:?}, {greedy} peers, round {round}: {waited}");
                    } else {
                        let of = queued.values_mut().find(|of| of.front() == Some(&work));
                        of.expect("in order within its peer").pop_front();
                    }
                }
                bench.finish(batch);
            }
            let rest: usize = queued.values().map(VecDeque::len).sum();
            assert_eq!(
                bench.scheduler.len(),
                rest + usize::from(single.is_some()),
                "{lane:?}, {greedy} peers"
            );
        }
    }
}
