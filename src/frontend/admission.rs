//! Who may come in, and who has to make room.

use super::{connection::Next, event_loop::Room, listener::Stream};
use mio::{Interest, Token};
use std::{
    io::{self, ErrorKind},
    sync::Arc,
    time::{Duration, Instant},
};

/// Connections accepted in one turn; reading goes on in between.
const ACCEPTS_PER_TURN: usize = 64;
/// Clients beyond the cap that are told so at once; the next ones just see their connection close.
pub const TURNED_AWAY: usize = 64;
/// How long accepting pauses when the system has nothing left to accept with.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long no idle connection is looked for again when there was none, for each connection to look at.
const SEARCH_PAUSE: Duration = Duration::from_nanos(500);

impl Room {
    /// Lets in who waits, up to a number.
    pub(super) fn accept(&mut self, now: Instant) {
        self.accept_at = Some(now);
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &self.listener else {
                self.accept_at = None;
                return;
            };
            match listener.accept() {
                Ok(stream) => self.admit(stream, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.accept_at = None;
                    return;
                }
                Err(error) if is_of_one_client(&error) => {}
                // Out of descriptors or memory, most likely: somebody has to go, or time has to pass.
                Err(error) => {
                    let warned = &self.shared.pipe.unavailable;
                    warned.warn(now, &format!("no connection can be accepted: {error}"));
                    if !self.make_room(now) {
                        self.accept_at = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                }
            }
        }
    }

    /// Gives a client a place, or tells it that there is none.
    fn admit(&mut self, mut stream: Stream, now: Instant) {
        let most = self.shared.limits.max_connections;
        let full = self.open >= most && !self.make_room(now);
        if full && self.turned_away >= TURNED_AWAY {
            let warned = &self.shared.pipe.unavailable;
            return warned.warn(now, "too many connections");
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.shared.places.make(self.used);
            self.used += 1;
            self.used - 1
        });
        let token = Token(slot as usize);
        let registry = self.poll.registry();
        if let Err(error) = registry.register(stream.source(), token, Interest::READABLE) {
            self.free.push(slot);
            let warned = &self.shared.pipe.unavailable;
            return warned.warn(now, &format!("a connection cannot be watched: {error}"));
        }
        self.open += 1;
        self.sweep_at.get_or_insert(now + self.shortest_deadline());
        let shared = Arc::clone(&self.shared);
        let mut place = shared.places.get(slot).expect("its place was just made");
        place.open(stream, now, &shared.limits);
        drop(place);
        if full {
            self.open -= 1;
            self.turned_away += 1;
            self.turn(slot, now, |connection, turn| {
                connection.turn_away(turn);
                connection.advance(slot, turn)
            });
        }
    }

    /// Closes the connection that has been idle for longest, if there is one.
    fn make_room(&mut self, now: Instant) -> bool {
        let open = self.open;
        if self.idle.is_empty() {
            self.find_idle(now);
        }
        while let Some((until, slot)) = self.idle.pop() {
            self.turn(slot, now, |connection, turn| {
                match connection.spare_until() == Some(until) {
                    true => connection.close_if_idle(slot, turn),
                    // It has been busy since.
                    false => Next::Wait,
                }
            });
            if self.open < open {
                return true;
            }
        }
        false
    }

    /// Looking for idle connections costs a look at all of them, so it is done for many at once, and when
    /// there were none it is not done again before a multiple of that time has passed.
    fn find_idle(&mut self, now: Instant) {
        if self.idle_search_at.is_some_and(|at| now < at) {
            return;
        }
        const FOUND: usize = 64;
        for slot in 0..self.used {
            let connection = self.shared.places.get(slot);
            let spare = connection.and_then(|connection| connection.spare_until());
            self.idle.extend(spare.map(|until| (until, slot)));
        }
        self.idle.sort_unstable();
        self.idle.truncate(FOUND);
        self.idle.reverse();
        let pause = SEARCH_PAUSE * self.used;
        self.idle_search_at = self.idle.is_empty().then(|| now + pause);
    }
}

/// Whether a failed accept says something of one client only.
fn is_of_one_client(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted)
}
