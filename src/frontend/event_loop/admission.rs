//! Admits clients, and closes connections if connections or memory run out.
//!
//! The client that holds the most connections, or the most bytes if memory runs out, loses a connection first. Behind a
//! trusted proxy, the head of a request names the client; between requests, a connection of the proxy is never closed.
//!
//! A client that is turned away gets a 503, and the event loop goes on reading from it for a while: closing a socket
//! with unread bytes resets the connection before the client has read the answer. Such *surplus* connections do not
//! count towards `max_connections`. If no slot is free, the oldest surplus connection is closed.

use super::{EventLoop, MIN_SWEEP_PAUSE, register_readable};
use crate::frontend::{
    connection::{Connection, ConnectionPermit, LoopAction},
    peers::{CloseRank, Peer, may_displace},
};
use crate::{error::BusyReason, http::PeerKey};
use mio::Token;
use socket2::Socket;
use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
use std::time::{Duration, Instant};
use std::{cmp::Reverse, collections::HashMap, net::IpAddr, sync::atomic::Ordering};

/// The most clients that one call of [`EventLoop::accept`] accepts. Then the open connections have their turn.
const MAX_ACCEPTS_PER_CALL: usize = 64;
/// How long the event loop accepts no clients if the system has no descriptor or memory left for a connection.
const PAUSE_AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);
/// How long a client must neither send nor take a byte before its incomplete request or its answer may be dropped to
/// free memory. Distant clients need up to half a second to acknowledge bytes, and a client may pause.
const MIN_STALL_TIME: Duration = Duration::from_secs(1);
/// When a worker waits for memory, the event loop frees `limit / FREED_BUDGET_DIVISOR` bytes of the memory budget.
const FREED_BUDGET_DIVISOR: usize = 8;
/// How often the event loop picks a connection to be closed before it gives up. A picked connection stays open if a
/// worker answers its request at that moment.
const MAX_CLOSE_TRIES: usize = 8;

impl EventLoop {
    /// Accepts clients that wait, at most [`MAX_ACCEPTS_PER_CALL`].
    pub(super) fn accept(&mut self) {
        let now = self.context.now;
        self.next_accept_at = Some(now);
        for _ in 0..MAX_ACCEPTS_PER_CALL {
            let Some(listener) = &mut self.listener else {
                self.next_accept_at = None;
                return;
            };
            match listener.accept() {
                Ok((socket, address)) => {
                    self.context.resources.metrics.accepted_connections.fetch_add(1, Ordering::Relaxed);
                    self.admit(socket, address);
                }
                Err(error) if error.kind() == WouldBlock => {
                    self.next_accept_at = None;
                    return;
                }
                // Goes on accepting, because the error concerns one client only.
                Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted) => {}
                // Most likely the process has no descriptor or memory left. Closes a connection; pauses accepting if
                // none may be closed.
                Err(error) => {
                    let detail = format_args!(": {error}");
                    self.context.warnings.warn("no connection can be accepted", detail, None);
                    if !self.close_surplus() && !self.close_another(BusyReason::TooManyConnections, None) {
                        self.next_accept_at = Some(now + PAUSE_AFTER_FAILED_ACCEPT);
                        return;
                    }
                }
            }
        }
    }

    /// Gives a new client a slot. If all connections are taken and none may be closed for the client, answers 503.
    fn admit(&mut self, socket: Socket, address: Option<IpAddr>) {
        let (now, limits) = (self.context.now, &self.context.limits);
        let peer = Peer::new(address, &limits.trusted_proxies);
        let why = BusyReason::TooManyConnections;
        let admitted = ConnectionPermit::strong_count(&self.shared_permit) - 1;
        let full = admitted >= limits.max_connections && !self.close_another(why, Some(peer));
        if self.free_slots.is_empty() {
            self.close_surplus();
        }
        let slot = self.free_slots.pop().expect("there is a slot for each");
        if let Err(error) = register_readable(&self.context.poll, &socket, Token(slot as usize)) {
            self.free_slots.push(slot);
            let detail = format_args!(": {error}");
            return self.context.warnings.warn("a connection cannot be watched", detail, None);
        }
        self.accepted_connections += 1;
        self.next_sweep_at.get_or_insert(now + MIN_SWEEP_PAUSE);
        let (permit, request_number) = (self.shared_permit.clone(), self.accepted_connections << 32);
        let connection = Connection::new(socket, peer, request_number, permit, &self.context);
        self.slots.lock(slot).expect("there is a slot for each").connection = Some(Box::new(connection));
        if full {
            self.act_in_slot(slot, |connection, context| connection.refuse_as_busy(why, slot, context));
        }
    }

    /// Closes a connection, to make way for a new one or to free memory. `newcomer` is the client that needs the
    /// connection or the memory; `None` if a worker or the process needs it. Returns false if no connection may be
    /// closed.
    fn close_another(&mut self, why: BusyReason, newcomer: Option<Peer>) -> bool {
        for _ in 0..MAX_CLOSE_TRIES {
            let Some(slot) = self.pick_slot_to_close(why, newcomer) else { return false };
            let mut gone = false;
            self.act_in_slot(slot, |connection, context| {
                let action = connection.end_early(Some(why), slot, context);
                gone = action == LoopAction::Close || connection.permit.is_none();
                action
            });
            if gone {
                return true;
            }
        }
        false
    }

    /// Returns the slot of the connection to be closed next: one of the client that holds the most connections, or the
    /// most bytes if memory runs out.
    ///
    /// Idle connections of this client come first, then incomplete requests, then answers that the client does not
    /// take, then requests that no worker has begun to execute; of several such connections the oldest. Without a
    /// `newcomer`, only connections that are idle, or whose client has stalled, may be closed.
    fn pick_slot_to_close(&self, why: BusyReason, newcomer: Option<Peer>) -> Option<u32> {
        let mut held: HashMap<PeerKey, usize> = HashMap::new();
        let expendable = self.slots.map_connections(|slot, connection| {
            let key = connection.counted_client.counting_key()?;
            let units = if why == BusyReason::NoMemory { connection.memory.reserved_bytes() } else { 1 };
            if connection.permit.is_some() {
                *held.entry(key).or_default() += units;
            }
            let (rank, since) = connection.close_rank()?;
            (units > 0).then_some((key, rank, since, slot))
        });
        let held_by = |key| held.get(&key).copied().unwrap_or_default();
        // Counts a newcomer that is a trusted proxy as a client that holds nothing: the client behind the proxy is not
        // known yet.
        let newcomer = newcomer.map(|peer| peer.counting_key().map_or(0, held_by));
        let may_close = |&(key, rank, since, _): &(PeerKey, CloseRank, Instant, u32)| {
            let displaced = newcomer.is_some_and(|newcomer| may_displace(newcomer, held_by(key), rank));
            let stalled = self.context.now >= since + MIN_STALL_TIME;
            match (why, rank) {
                (BusyReason::NoMemory, CloseRank::Stalled) => stalled,
                (BusyReason::NoMemory, CloseRank::IncompleteRequest) => stalled || displaced,
                (BusyReason::NoMemory, _) => false,
                (_, CloseRank::Idle) => displaced || newcomer.is_none(),
                _ => displaced,
            }
        };
        let candidates = expendable.into_iter().filter(may_close);
        candidates
            .min_by_key(|(key, rank, since, _)| (Reverse(held_by(*key)), *rank, *since))
            .map(|(.., slot)| slot)
    }

    /// Brings the held memory below its limit, after the connection in the slot `slot` has grown. Closes other
    /// connections; if none may be closed, answers 503 on the grown one. A request that a worker has claimed by now
    /// keeps its memory.
    pub(super) fn enforce_memory_limit(&mut self, slot: u32, client: Peer) {
        while self.slots.budget.held_bytes() > self.slots.budget.limit {
            if !self.close_another(BusyReason::NoMemory, Some(client)) {
                return self.act_in_slot(slot, |connection, context| {
                    if !connection.request_may_be_refused() {
                        return LoopAction::Wait;
                    }
                    connection.refuse_as_busy(BusyReason::NoMemory, slot, context)
                });
            }
        }
    }

    /// Frees a part of the budget for a worker that waits for memory, by closing connections as long as there are any
    /// that may be closed.
    pub(super) fn free_memory_for_worker(&mut self) {
        let budget = self.slots.budget.clone();
        let enough = budget.held_bytes().saturating_sub(budget.limit / FREED_BUDGET_DIVISOR);
        while budget.held_bytes() > enough && self.close_another(BusyReason::NoMemory, None) {}
    }

    /// Closes the oldest surplus connection: one that stays open only until its client has read a 503. Returns false if
    /// there is none.
    fn close_surplus(&mut self) -> bool {
        let surplus = self.slots.map_connections(|slot, connection| {
            connection.permit.is_none().then(|| (connection.deadline(&self.context.limits), slot))
        });
        let Some((_, slot)) = surplus.into_iter().min() else { return false };
        self.act_in_slot(slot, |connection, context| {
            // Reads before closing: unread bytes would reset the connection, and the reset would overtake the answer.
            connection.may_have_input = true;
            connection.advance(slot, context);
            LoopAction::Close
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::{Listener, SharedResources};
    use crate::{budget::MemoryBudget, config::Limits, http::Response, metrics::Metrics};
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
            let budget = MemoryBudget::new(128 << 10);
            let resources = SharedResources {
                budget: budget.clone(),
                answer_without_worker: Box::new(|_, _| None),
                metrics: Arc::new(Metrics::new(&[])),
            };
            let (ticket_stream, _other_end) = UnixStream::pair().unwrap();
            let mut frontend =
                EventLoop::new(listener, Limits::default().into(), resources, ticket_stream).unwrap();
            frontend.accept();
            let body = [b'x'; 10_000];
            client.write_all(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n").unwrap();
            client.write_all(&body).unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            while !frontend.slots.lock(0).unwrap().connection.as_ref().unwrap().request_may_be_refused() {
                assert!(Instant::now() < deadline);
                frontend.act_in_slot(0, |connection, context| {
                    connection.may_have_input = true;
                    connection.advance(0, context)
                });
            }
            let claimed = frontend.slots.claim(if is_claimed { "/0," } else { "" }).next();
            let _others = budget.reserve_unchecked(128 << 10);
            let counted_client = frontend.slots.lock(0).unwrap().connection.as_ref().unwrap().counted_client;
            frontend.enforce_memory_limit(0, counted_client);
            if let Some(claimed) = claimed {
                assert_eq!(claimed.request.body, body);
                let answer = Response::json(200, &());
                assert!(frontend.slots.send(claimed.handle, answer, None, claimed.memory).is_some());
            }
            let mut start = [0; 12];
            client.read_exact(&mut start).unwrap();
            assert_eq!(start, *format!("HTTP/1.1 {status}").as_bytes());
        }
    }
}
