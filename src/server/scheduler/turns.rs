//! Commands that wait, and whose turn it is: peers take turns, and what one peer sent is in the order of its arrival.

use super::Item;
use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
};

/// Whom a command is from, as connections are counted: an address, an IPv6 network, or all of a Unix socket.
pub type Peer = Option<IpAddr>;

/// Queues that take turns: one by one, the one that has waited for longest first. Only those with something in them are
/// there.
pub(super) struct RoundRobin<K, Q> {
    queues: BTreeMap<K, Q>,
    /// The next one first.
    order: VecDeque<K>,
}

/// Commands that wait, of each peer.
pub(super) struct Turns<T> {
    peers: RoundRobin<Peer, VecDeque<Item<T>>>,
}

impl<K, Q> Default for RoundRobin<K, Q> {
    fn default() -> Self {
        RoundRobin { queues: BTreeMap::new(), order: VecDeque::new() }
    }
}

impl<K: Copy + Ord, Q: Default> RoundRobin<K, Q> {
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The queue to add something to. One that is new has its turn after all others.
    pub fn queue(&mut self, key: K) -> &mut Q {
        self.queues.entry(key).or_insert_with(|| {
            self.order.push_back(key);
            Q::default()
        })
    }

    /// The queues, the next one first.
    pub fn iter(&self) -> impl Iterator<Item = &Q> {
        self.order.iter().map(|key| &self.queues[key])
    }

    /// Takes something from the queue that is so many turns away, whose turn is then over; `take` says whether there is
    /// more in it.
    pub fn take<R>(&mut self, turn: usize, take: impl FnOnce(&mut Q) -> (R, bool)) -> Option<R> {
        let key = self.order.remove(turn)?;
        let (taken, more) = take(self.queues.get_mut(&key)?);
        match more {
            true => self.order.push_back(key),
            false => drop(self.queues.remove(&key)),
        }
        Some(taken)
    }
}

impl<T> Turns<T> {
    pub fn new() -> Turns<T> {
        Turns { peers: RoundRobin::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    /// Behind what arrived before it from the same peer.
    pub fn push(&mut self, item: Item<T>) {
        let queue = self.peers.queue(item.peer);
        let at = queue.partition_point(|queued| queued.arrived <= item.arrived);
        queue.insert(at, item);
    }

    /// The command whose turn it is.
    pub fn first(&self) -> Option<&Item<T>> {
        self.peers.iter().next()?.front()
    }

    /// Whether there is a command that may be taken.
    pub fn fits(&self, free: usize, overtakes: bool) -> bool {
        self.position(free, overtakes).is_some()
    }

    /// Takes the next command that needs no more memory than is `free`, which ends its peer's turn. One that needs more
    /// holds up the others, so that its turn comes, unless it may be overtaken.
    pub fn take(&mut self, free: usize, overtakes: bool) -> Option<Item<T>> {
        let (turn, at) = self.position(free, overtakes)?;
        self.peers.take(turn, |queue| (queue.remove(at), !queue.is_empty())).flatten()
    }

    /// The command whose turn it is, whatever it needs.
    pub fn pop(&mut self) -> Option<Item<T>> {
        self.take(usize::MAX, false)
    }

    /// Takes those out that no client waits for any more.
    pub fn take_unless(&mut self, awaited: &mut impl FnMut(&T) -> bool) -> Vec<Item<T>> {
        let (kept, dropped): (Vec<_>, Vec<_>) =
            std::iter::from_fn(|| self.pop()).partition(|item| awaited(&item.work));
        kept.into_iter().for_each(|item| self.push(item));
        dropped
    }

    /// How many turns away it is, and how many of the same peer are before it.
    fn position(&self, free: usize, overtakes: bool) -> Option<(usize, usize)> {
        let may_be_next = if overtakes { usize::MAX } else { 1 };
        let fits = |queue: &VecDeque<Item<T>>| {
            queue.iter().take(may_be_next).position(|item| item.needs.memory <= free)
        };
        let mut peers = self.peers.iter().take(may_be_next).enumerate();
        peers.find_map(|(turn, queue)| Some((turn, fits(queue)?)))
    }
}
