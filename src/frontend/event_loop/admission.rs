//! Which clients are let in, and which connections are closed for them or for memory.
//!
//! Connections, or bytes, that run out are taken from the peer that holds the most. A client that is turned
//! away gets a 503 and is read from for a while: closing a socket with unread bytes would reset the connection before
//! the client has seen the answer. Such connections are `surplus` and do not count towards the maximum; if there are too
//! many of them, the oldest is closed.

use super::{EventLoop, SWEEP_PAUSE};
use crate::{
    error::Reason,
    frontend::{
        connection::{Action, Connection},
        peers::{Expendable, Peer, PeerKey, may_displace},
    },
};
use mio::{Interest, Token, unix::SourceFd};
use socket2::Socket;
use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, ErrorKind},
    net::IpAddr,
    os::fd::AsRawFd,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// Connections accepted in one iteration; reading goes on in between.
const ACCEPTS_PER_ITERATION: usize = 64;
/// Connections beyond the capacity that are being told so. Each costs a descriptor and some 200 bytes.
pub const MAX_SURPLUS: usize = 256;
/// How long accepting pauses when the system has nothing left to accept with.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long an answer or an incomplete request does not move before it may be given up for memory. Clients far away
/// take up to half a second to acknowledge what they have received, and a client may pause.
const STALLED: Duration = Duration::from_secs(1);
/// The part of the budget that is freed when a worker waits for memory: `1 / FREED_PART`.
const FREED_PART: usize = 8;

/// The connections that may be closed, as one iteration has found them.
pub struct Search {
    at: Instant,
    why: Reason,
    /// Clients were let in since.
    stale: bool,
    /// How many connections, or bytes, each peer holds.
    held: HashMap<PeerKey, usize>,
    /// Best first.
    found: Vec<Candidate>,
}

struct Candidate {
    key: PeerKey,
    state: (Expendable, Instant),
    /// Freed by its end: bytes, or one connection.
    memory: usize,
    index: u32,
}

impl Search {
    /// Takes the best candidate that may be closed for this newcomer.
    fn next(&mut self, newcomer: Option<Peer>) -> Option<Candidate> {
        let of = |key: &PeerKey| self.held.get(key).copied().unwrap_or(0);
        // A trusted proxy holds nothing: the client behind it may hold nothing.
        let newcomer = newcomer.map(|peer| peer.key().map_or(0, |key| of(&key)));
        let may_go = |Candidate { key, state: (state, since), .. }: &Candidate| {
            let displaced = newcomer.is_some_and(|newcomer| may_displace(newcomer, of(key), *state));
            let stalled = self.at >= *since + STALLED;
            match (self.why, state) {
                (Reason::NoMemory, Expendable::Stalled) => stalled,
                (Reason::NoMemory, Expendable::Incomplete) => stalled || displaced,
                (Reason::NoMemory, _) => false,
                (_, Expendable::Idle) => displaced || newcomer.is_none(),
                _ => displaced,
            }
        };
        let at = self.found.iter().position(may_go)?;
        Some(self.found.remove(at))
    }
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
                    self.resources.metrics.accepted.fetch_add(1, Ordering::Relaxed);
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
                    if !self.close_oldest_surplus(now)
                        && !self.make_way(Reason::TooManyConnections, None, now)
                    {
                        self.accept_at = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    /// Gives a client a slot, if only to tell it that there is no capacity.
    fn admit(&mut self, stream: Socket, address: Option<IpAddr>, now: Instant) {
        let shared = Arc::clone(&self.shared);
        let peer = Peer::new(address, &shared.limits.trusted_proxies);
        let full = self.admitted >= shared.limits.max_connections
            && !self.make_way(Reason::TooManyConnections, Some(peer), now);
        // One more may be surplus now.
        while self.surplus() >= MAX_SURPLUS && self.close_oldest_surplus(now) {}
        let index = self.free.pop().unwrap_or_else(|| self.shared.slots.next_unused());
        let (fd, token) = (stream.as_raw_fd(), Token(index as usize));
        if let Err(error) = self.poll.registry().register(&mut SourceFd(&fd), token, Interest::READABLE) {
            self.free.push(index);
            let why = format!("a connection cannot be watched: {error}");
            return shared.unavailable.warn(now, &why, None);
        }
        self.admitted += 1;
        self.opened += 1;
        if let (false, Some(search), Some(key)) = (full, &mut self.search, peer.key()) {
            search.stale = true;
            *search.held.entry(key).or_default() += 1;
        }
        self.sweep_at.get_or_insert(now + SWEEP_PAUSE);
        let connection = Connection::new(stream, peer, self.opened << 32, shared.budget.count(0), now);
        *self.shared.slots.get(index).expect("there is a slot for each") = Some(Box::new(connection));
        if full {
            let why = Reason::TooManyConnections;
            self.call(index, now, |connection, context| connection.turn_away(why, index, context));
        }
    }

    /// Closes a connection of the peer that holds the most, for more connections or for memory, if there is one that may
    /// be closed. Returns whether there was.
    ///
    /// Idle ones come first, then incomplete requests, then answers that do not move, then requests that no worker has
    /// begun to execute, the oldest first. Without a newcomer, closes only connections that are idle, or whose memory
    /// has not moved for a while.
    fn make_way(&mut self, why: Reason, newcomer: Option<Peer>, now: Instant) -> bool {
        let mut search = match self.search.take() {
            Some(search) if search.at == now && search.why == why => search,
            _ => self.search(why, now),
        };
        let mut gone = false;
        while !gone {
            let Some(Candidate { key, state, memory, index }) = search.next(newcomer) else {
                if !search.stale {
                    break;
                }
                search = self.search(why, now);
                continue;
            };
            self.call(index, now, |connection, context| {
                // It may have moved on since it was found.
                if connection.expendable().is_none_or(|(now, _)| now != state.0) {
                    return Action::Wait;
                }
                let action = connection.make_way(why, index, context);
                gone = action == Action::Close || connection.is_surplus();
                action
            });
            if gone && let Some(held) = search.held.get_mut(&key) {
                *held -= memory;
            }
        }
        self.search = Some(search);
        gone
    }

    /// Looks at all connections.
    fn search(&self, why: Reason, now: Instant) -> Search {
        let mut held: HashMap<PeerKey, usize> = HashMap::new();
        let mut found = self.shared.slots.each(|index, connection| {
            let key = connection.peer().key()?;
            let memory = if why == Reason::NoMemory { connection.memory() } else { 1 };
            if !connection.is_surplus() {
                *held.entry(key).or_default() += memory;
            }
            let state = connection.expendable()?;
            (memory > 0).then_some(Candidate { key, state, memory, index })
        });
        found.sort_by_key(|candidate| (Reverse(held[&candidate.key]), candidate.state));
        Search { at: now, why, stale: false, held, found }
    }

    /// Frees the memory that a connection has made counted beyond the limit: at the cost of others, else at its own.
    /// `passed`: the bytes of the request that it has just passed on.
    pub(super) fn make_memory(&mut self, index: u32, peer: Peer, passed: Option<usize>, now: Instant) {
        while self.shared.budget.held() > self.shared.budget.limit() {
            if self.make_way(Reason::NoMemory, Some(peer), now) {
                continue;
            }
            return self.call(index, now, |connection, context| {
                if let Some(length) = passed {
                    context.to_tiny_http.take_back(length);
                    context.shared.requests.fetch_sub(1, Ordering::Relaxed);
                }
                connection.turn_away(Reason::NoMemory, index, context)
            });
        }
    }

    /// Frees a part of the budget for a worker that waits for memory, as far as there are connections that may be closed.
    pub(super) fn free_memory(&mut self, now: Instant) {
        let budget = self.shared.budget.clone();
        let enough = budget.held().saturating_sub(budget.limit() / FREED_PART);
        while budget.held() > enough && self.make_way(Reason::NoMemory, None, now) {}
    }

    fn surplus(&self) -> usize {
        self.shared.slots.used() as usize - self.free.len() - self.admitted
    }

    /// Closes the connection that has been surplus for longest, if there is one.
    fn close_oldest_surplus(&mut self, now: Instant) -> bool {
        let surplus = self.shared.slots.each(|index, connection| {
            connection.is_surplus().then(|| (connection.deadline(&self.shared.limits), index))
        });
        let Some((_, index)) = surplus.into_iter().min() else {
            return false;
        };
        self.call(index, now, |connection, context| {
            // Unread bytes would reset the connection, and the reset overtakes the answer.
            connection.note_readable();
            connection.advance(index, context);
            Action::Close
        });
        true
    }
}

/// Returns whether a failed accept says something of one client only.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
}
