//! Which clients are let in, and which connections are closed for them or for memory.
//!
//! Connections, or bytes, that run out are taken from the client that holds the most. Behind a trusted proxy that is
//! the one that the head of its request names; a connection of the proxy between requests is left alone. A client that
//! is turned away gets a 503 and is read from for a while: closing a socket with unread bytes would reset the
//! connection before the client has seen the answer. Such connections are `surplus` and do not count towards the
//! maximum; if no slot is free, the oldest of them is closed.

use super::{EventLoop, SWEEP_PAUSE};
use crate::frontend::{
    connection::{Action, Admission, Connection},
    peers::{Expendable, Peer, may_displace},
};
use crate::{error::BusyReason, http::PeerKey};
use mio::{Interest, Token, unix::SourceFd};
use socket2::Socket;
use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
use std::time::{Duration, Instant};
use std::{cmp::Reverse, collections::HashMap, net::IpAddr, os::fd::AsRawFd, sync::atomic::Ordering};

/// Connections accepted in one iteration; reading goes on in between.
const MAX_ACCEPTS: usize = 64;
/// The pause of accepting if the system has no descriptor or memory left for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time without a byte after which an answer or an incomplete request may be given up for memory. Clients far away take
/// up to half a second to acknowledge what they have received, and a client may pause.
const STALLED_CLIENT: Duration = Duration::from_secs(1);
/// The part of the budget that is freed when a worker waits for memory: `1 / FREED_PART`.
const FREED_PART: usize = 8;
/// How many connections are tried until one closes: a worker may answer a picked one at that moment.
const MAX_TRIES: usize = 8;

impl EventLoop {
    /// Accepts waiting clients, up to [`MAX_ACCEPTS`].
    pub(super) fn accept(&mut self) {
        let now = self.context.now;
        self.accept_at = Some(now);
        for _ in 0..MAX_ACCEPTS {
            let Some(listener) = &mut self.listener else {
                self.accept_at = None;
                return;
            };
            match listener.accept() {
                Ok((stream, address)) => {
                    self.context.resources.metrics.accepted.fetch_add(1, Ordering::Relaxed);
                    self.admit(stream, address);
                }
                Err(error) if error.kind() == WouldBlock => {
                    self.accept_at = None;
                    return;
                }
                // Goes on accepting, because the error concerns one client only.
                Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) => {}
                // The process has no descriptor or no memory left, most likely: closes a connection, or else pauses
                // accepting.
                Err(error) => {
                    let detail = format_args!(": {error}");
                    self.context.warnings.warn("no connection can be accepted", detail, None);
                    if !self.close_oldest_surplus() && !self.make_way(BusyReason::TooManyConnections, None) {
                        self.accept_at = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    /// Gives a client a slot, if only to tell it that there is no capacity.
    fn admit(&mut self, stream: Socket, address: Option<IpAddr>) {
        let (now, limits) = (self.context.now, &self.context.limits);
        let peer = Peer::new(address, &limits.trusted_proxies);
        let why = BusyReason::TooManyConnections;
        let admitted = Admission::strong_count(&self.admission) - 1;
        let full = admitted >= limits.max_connections && !self.make_way(why, Some(peer));
        if self.free.is_empty() {
            self.close_oldest_surplus();
        }
        let index = self.free.pop().expect("there is a slot for each");
        let (fd, token) = (stream.as_raw_fd(), Token(index as usize));
        if let Err(error) =
            self.context.poll.registry().register(&mut SourceFd(&fd), token, Interest::READABLE)
        {
            self.free.push(index);
            let detail = format_args!(": {error}");
            return self.context.warnings.warn("a connection cannot be watched", detail, None);
        }
        self.opened += 1;
        self.sweep_at.get_or_insert(now + SWEEP_PAUSE);
        let (admission, generation) = (self.admission.clone(), self.opened << 32);
        let connection = Connection::new(stream, peer, generation, admission, &self.context);
        self.slots.lock(index).expect("there is a slot for each").connection = Some(Box::new(connection));
        if full {
            self.call(index, |connection, context| connection.turn_away(why, index, context));
        }
    }

    /// Closes a connection to make way for a new one or to free memory. Returns false if none may be closed.
    fn make_way(&mut self, why: BusyReason, newcomer: Option<Peer>) -> bool {
        for _ in 0..MAX_TRIES {
            let Some(index) = self.pick(why, newcomer) else { return false };
            let mut gone = false;
            self.call(index, |connection, context| {
                let action = connection.end(Some(why), index, context);
                gone = action == Action::Close || connection.admission.is_none();
                action
            });
            if gone {
                return true;
            }
        }
        false
    }

    /// Picks the connection that is closed next: of the client that holds the most connections, or bytes.
    ///
    /// Idle ones come first, then incomplete requests, then answers that do not move, then requests that no worker has
    /// begun to execute, the oldest first. Without a newcomer, picks only connections that are idle, or whose memory
    /// has not moved for a while.
    fn pick(&self, why: BusyReason, newcomer: Option<Peer>) -> Option<u32> {
        let mut held: HashMap<PeerKey, usize> = HashMap::new();
        let found = self.slots.each(|index, connection| {
            let key = connection.holder.key()?;
            let holds = if why == BusyReason::NoMemory { connection.held.bytes() } else { 1 };
            if connection.admission.is_some() {
                *held.entry(key).or_default() += holds;
            }
            let (state, since) = connection.expendable()?;
            (holds > 0).then_some((key, state, since, index))
        });
        let of = |key| held.get(&key).copied().unwrap_or_default();
        // A newcomer that is a trusted proxy counts as a client that holds nothing: the client behind it is not
        // known yet.
        let newcomer = newcomer.map(|peer| peer.key().map_or(0, of));
        let may_go = |&(key, state, since, _): &(PeerKey, Expendable, Instant, u32)| {
            let displaced = newcomer.is_some_and(|newcomer| may_displace(newcomer, of(key), state));
            let stalled = self.context.now >= since + STALLED_CLIENT;
            match (why, state) {
                (BusyReason::NoMemory, Expendable::Stalled) => stalled,
                (BusyReason::NoMemory, Expendable::Incomplete) => stalled || displaced,
                (BusyReason::NoMemory, _) => false,
                (_, Expendable::Idle) => displaced || newcomer.is_none(),
                _ => displaced,
            }
        };
        let candidates = found.into_iter().filter(may_go);
        candidates
            .min_by_key(|(key, state, since, _)| (Reverse(of(*key)), *state, *since))
            .map(|found| found.3)
    }

    /// Brings the budget back below its limit after a connection has grown: closes other connections, or else the
    /// grown one. A request that a worker has claimed by now keeps its memory.
    pub(super) fn make_memory(&mut self, index: u32, holder: Peer) {
        while self.context.resources.budget.is_exceeded() {
            if !self.make_way(BusyReason::NoMemory, Some(holder)) {
                return self.call(index, |connection, context| {
                    if !connection.is_unclaimed() {
                        return Action::Wait;
                    }
                    connection.turn_away(BusyReason::NoMemory, index, context)
                });
            }
        }
    }

    /// Frees a part of the budget for a worker that waits for memory, as far as there are connections that may be
    /// closed.
    pub(super) fn free_memory(&mut self) {
        let budget = self.context.resources.budget.clone();
        let enough = budget.held().saturating_sub(budget.limit() / FREED_PART);
        while budget.held() > enough && self.make_way(BusyReason::NoMemory, None) {}
    }

    /// Closes the connection that has been surplus for longest, if there is one.
    fn close_oldest_surplus(&mut self) -> bool {
        let surplus = self.slots.each(|index, connection| {
            connection.admission.is_none().then(|| (connection.deadline(&self.context.limits), index))
        });
        let Some((_, index)) = surplus.into_iter().min() else { return false };
        self.call(index, |connection, context| {
            // Reads before closing: unread bytes would reset the connection, and the reset overtakes the answer.
            connection.readable = true;
            connection.advance(index, context);
            Action::Close
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::{Listener, Resources};
    use crate::{budget::Budget, config::Limits, http::Response, metrics::Metrics};
    use std::io::{Read, Write};
    use std::{net::TcpStream, os::unix::net::UnixStream, sync::Arc};

    /// A worker may claim a request between its arrival and the look at the memory, as an older ticket may name its
    /// slot: then it is executed, and its client must not be told otherwise. Whether it was claimed, and the status of
    /// its answer.
    #[test]
    fn a_claimed_request_is_not_turned_away_for_memory() {
        for (is_claimed, status) in [(false, 503), (true, 200)] {
            let listener = Listener::bind("127.0.0.1", 0).unwrap();
            listener.listen().unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let budget = Budget::new(128 << 10);
            let resources = Resources {
                budget: budget.clone(),
                answer_at_once: Box::new(|_, _| None),
                metrics: Arc::new(Metrics::new(&[])),
            };
            let (private, _other_end) = UnixStream::pair().unwrap();
            let mut frontend =
                EventLoop::new(listener, Limits::default().into(), resources, private).unwrap();
            frontend.accept();
            let body = [b'x'; 10_000];
            client.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n").unwrap();
            client.write_all(&body).unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            while !frontend.slots.lock(0).unwrap().connection.as_ref().unwrap().is_working() {
                assert!(Instant::now() < deadline);
                frontend.call(0, |connection, context| {
                    connection.readable = true;
                    connection.advance(0, context)
                });
            }
            let claimed = frontend.slots.claim(if is_claimed { "/0," } else { "" }).next();
            let _others = budget.count(128 << 10);
            let holder = frontend.slots.lock(0).unwrap().connection.as_ref().unwrap().holder;
            frontend.make_memory(0, holder);
            if let Some(claimed) = claimed {
                assert_eq!(claimed.request.body, body);
                let answer = Response::json(200, &());
                assert!(frontend.slots.send(claimed.slot, answer, None, claimed.held).is_some());
            }
            let mut start = [0; 12];
            client.read_exact(&mut start).unwrap();
            assert_eq!(start, *format!("HTTP/1.1 {status}").as_bytes());
        }
    }
}
