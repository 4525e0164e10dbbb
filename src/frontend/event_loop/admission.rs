//! Which clients are let in, and which connections are closed to free slots for them.
//!
//! When all connections are taken, room is made at the cost of the peer that holds the most. A client that is turned
//! away gets a 503 and is read from for a while: closing a socket with unread bytes would reset the connection before
//! the client has seen the answer. Such connections are `surplus` and do not count towards the maximum; where there are
//! too many of them, the oldest is closed.

use super::EventLoop;
use crate::frontend::{
    connection::Action,
    listener::Stream,
    peers::{Expendable, Peer, PeerCounts, PeerKey, may_displace},
    slot::Slot,
};
use mio::{Interest, Token, unix::SourceFd};
use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, ErrorKind},
    net::IpAddr,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// Connections accepted in one iteration; reading goes on in between.
const ACCEPTS_PER_ITERATION: usize = 64;
/// Clients beyond the capacity that are being told so. Each costs a descriptor and some 200 bytes.
pub const MAX_SURPLUS: usize = 256;
/// How long accepting pauses when the system has nothing left to accept with.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections found by one search for room.
const CANDIDATES: usize = 64;
/// How long there is no further search after one in vain, for each connection that it looks at.
const SEARCH_PAUSE: Duration = Duration::from_micros(1);

/// How long an answer does not move before it may be given up for its memory. Clients far away take up to half a second
/// to acknowledge what they have received, and a client may pause.
const STALLED: Duration = Duration::from_secs(1);
/// The part of the budget that is freed at once: `1 / FREED_PART`.
const FREED_PART: usize = 8;

/// Connections that may be closed for others, best first.
#[derive(Default)]
pub struct Candidates {
    found: Vec<Candidate>,
    /// No search before that for a newcomer that may displace idle connections only, and for others.
    pause_until: [Option<Instant>; 2],
}

struct Candidate {
    index: u32,
    peer: Peer,
    state: (Expendable, Instant),
}

impl EventLoop {
    /// Accepts clients that are waiting, up to a number.
    pub(super) fn accept(&mut self, now: Instant) {
        self.accept_at = Some(now);
        for _ in 0..ACCEPTS_PER_ITERATION {
            let Some(listener) = &self.listener else {
                self.accept_at = None;
                return;
            };
            match listener.accept() {
                Ok((stream, address)) => {
                    self.resources.metrics.accepted.add(1);
                    self.admit(stream, address, now);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.accept_at = None;
                    return;
                }
                Err(error) if is_of_one_client(&error) => {}
                // Out of descriptors or memory, most likely: a connection has to go, or time has to pass.
                Err(error) => {
                    let why = format!("no connection can be accepted: {error}");
                    self.shared.unavailable.warn(now, &why, None);
                    if !self.close_oldest_surplus(now) && !self.make_room(None, now) {
                        self.accept_at = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    /// Gives a client a slot, if only to tell it that there is no capacity.
    fn admit(&mut self, stream: Stream, address: Option<IpAddr>, now: Instant) {
        let shared = Arc::clone(&self.shared);
        let peer = Peer::new(address, &shared.limits.trusted_proxies);
        // At most one connection becomes surplus below.
        while self.surplus.len() >= MAX_SURPLUS {
            self.close_oldest_surplus(now);
        }
        let full = self.admitted >= shared.limits.max_connections && !self.make_room(Some(peer), now);
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.allocate(self.used);
            self.used += 1;
            self.used - 1
        });
        let token = Token(index as usize);
        let registry = self.poll.registry();
        if let Err(error) = registry.register(&mut SourceFd(&stream.fd()), token, Interest::READABLE) {
            self.free.push(index);
            let why = format!("a connection cannot be watched: {error}");
            return shared.unavailable.warn(now, &why, None);
        }
        self.admitted += 1;
        self.peers.add(peer);
        self.sweep_at.get_or_insert(now + self.shortest_deadline());
        self.slots.get(index).expect("it was just allocated").open(stream, peer, now);
        if full {
            self.call(index, now, |connection, context| connection.turn_away(index, context));
        }
    }

    /// Closes a connection for a newcomer's sake, if there is one that may be. Without a newcomer only idle ones are.
    fn make_room(&mut self, newcomer: Option<Peer>, now: Instant) -> bool {
        let before = self.admitted;
        while let Some(Candidate { index, state, .. }) = self.candidate(newcomer, now) {
            self.call(index, now, |connection, context| match connection.expendable() == Some(state) {
                true => connection.make_way(index, context),
                // It has moved on since it was found.
                false => Action::Wait,
            });
            if self.admitted < before {
                return true;
            }
        }
        false
    }

    /// The connection whose peer holds the most, and of its connections the idle ones first, then incomplete requests,
    /// then answers that do not move, then requests that no worker has begun to execute, the oldest first.
    fn candidate(&mut self, newcomer: Option<Peer>, now: Instant) -> Option<Candidate> {
        let held_by_newcomer = newcomer.map(|peer| self.peers.of(peer));
        let peers = &self.peers;
        let may_go = |candidate: &Candidate| {
            let held = peers.of(candidate.peer);
            match held_by_newcomer {
                None => candidate.state.0 == Expendable::Idle,
                Some(newcomer) => {
                    may_displace(newcomer, held)
                        || (candidate.state.0 == Expendable::Idle && newcomer <= held)
                }
            }
        };
        let at = self.candidates.found.iter().position(may_go);
        if let Some(at) = at {
            return Some(self.candidates.found.remove(at));
        }
        // A search costs a look at all connections. It finds many at once, and is not repeated for a while if it was
        // in vain.
        let most = peers.most()?.1;
        let displaces = held_by_newcomer.is_some_and(|newcomer| may_displace(newcomer, most));
        let pause_until = &mut self.candidates.pause_until[usize::from(displaces)];
        if pause_until.is_some_and(|until| now < until) {
            return None;
        }
        let mut found = self.slots.each(|index, connection| {
            let candidate = Candidate { index, peer: connection.peer(), state: connection.expendable()? };
            may_go(&candidate).then_some(candidate)
        });
        found.sort_by_cached_key(|candidate| (Reverse(peers.of(candidate.peer)), candidate.state));
        found.truncate(CANDIDATES);
        self.candidates.found = found;
        if self.candidates.found.is_empty() {
            *pause_until = Some(now + SEARCH_PAUSE * self.used);
            return None;
        }
        Some(self.candidates.found.remove(0))
    }

    /// Closes connections whose answers hold much memory and have not moved for long, the worst first, until a part of
    /// the budget is free again. Those of trusted proxies, which carry many clients, only after all others.
    pub(super) fn give_up_answers(&mut self, now: Instant) {
        self.shared.shortage.store(false, Ordering::Relaxed);
        let shared = Arc::clone(&self.shared);
        let mut stalled = self.slots.each(|index, connection| {
            let (bytes, time) = connection.stalled(now, STALLED)?;
            Some((connection.peer().trusted, Reverse(bytes as u128 * time.as_millis()), index))
        });
        stalled.sort_unstable();
        let enough = shared.budget.held().saturating_sub(shared.budget.limit() / FREED_PART);
        for (_, _, index) in stalled {
            if shared.budget.held() <= enough {
                break;
            }
            self.call(index, now, |connection, _| match connection.stalled(now, STALLED) {
                Some(_) => connection.give_up_answer(),
                // It has moved on since it was found.
                None => Action::Wait,
            });
        }
    }

    /// Makes memory for a connection's body, and has it taken. The peer that has the most reserved for incomplete
    /// bodies gives up the largest of them, as long as it has more than the connection's peer would have then.
    pub(super) fn make_memory(&mut self, index: u32, peer: Peer, bytes: usize, now: Instant) {
        let shared = Arc::clone(&self.shared);
        let mut peers: HashMap<PeerKey, (usize, Vec<(usize, u32)>)> = HashMap::new();
        let incomplete = self.slots.each(|other, connection| {
            Some((PeerCounts::key(connection.peer())?, (connection.incomplete()?, other)))
        });
        for (key, body) in incomplete {
            let (all, bodies) = peers.entry(key).or_default();
            *all += body.0;
            bodies.push(body);
        }
        peers.values_mut().for_each(|(_, bodies)| bodies.sort_unstable());
        let own = bytes + PeerCounts::key(peer).and_then(|key| peers.get(&key)).map_or(0, |(all, _)| *all);
        while shared.budget.free_for_input() < bytes
            && let Some((all, bodies)) = peers.values_mut().max_by_key(|(all, _)| *all)
            && *all > own
            && let Some((largest, other)) = bodies.pop()
        {
            *all -= largest;
            self.call(other, now, |connection, context| connection.give_up_body(other, context));
        }
        self.call(index, now, |connection, context| connection.take_memory(index, context));
    }

    /// Closes the connection that has been surplus for longest, unless it has ended by itself.
    fn close_oldest_surplus(&mut self, now: Instant) -> bool {
        let Some(Slot { index, generation, .. }) = self.surplus.pop_front() else {
            return false;
        };
        self.call(index, now, |connection, context| {
            if !connection.is_surplus() || connection.generation() != generation {
                return Action::Wait;
            }
            // Unread bytes would reset the connection, and the reset overtakes the answer.
            connection.note_readable();
            connection.advance(index, context);
            Action::Close
        });
        true
    }
}

/// Whether a failed accept says something of one client only.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
}
