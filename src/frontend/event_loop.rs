//! The readiness loop: who may come in, whose turn it is, and whose time is up.
//!
//! Owns the set of connections and the stream to tiny_http. What is done with one connection's bytes is in
//! [`super::connection`]; nothing here looks at them.

use super::{
    Listener,
    connection::{Connection, Next, Turn},
    responder::Shared,
    writing::linger_time,
};
use crate::error::Error;
use mio::{Events, Interest, Poll, Token, net};
use std::{
    io::{self, ErrorKind, Read, Write},
    mem,
    os::unix::net::UnixStream,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

const LISTENER: Token = Token(usize::MAX);
/// Whoever opens the loop makes its waker with this.
pub const WAKER: Token = Token(usize::MAX - 1);
const PRIVATE: Token = Token(usize::MAX - 2);
/// Events taken in one turn.
const EVENTS: usize = 1024;
/// What one read takes at most; it bounds what a pipelining client makes the door keep.
const SCRATCH_BYTES: usize = 16 * 1024;
/// Turns of accepting before the listener closes, which would reset those who wait in its backlog.
const TURNS_OF_THE_LAST: usize = 64;
/// Looking at every connection's deadline is cheap, but not free.
const SWEEP_PAUSE: Duration = Duration::from_millis(20);

/// The loop's own things.
pub struct Room {
    pub(super) poll: Poll,
    pub shared: Arc<Shared>,
    pub(super) listener: Option<Listener>,
    pub(super) private: net::UnixStream,
    pub(super) private_awaits_writable: bool,
    /// Whole requests for tiny_http; the first `batch_sent` bytes are gone already.
    pub(super) batch: Vec<u8>,
    pub(super) batch_sent: usize,
    pub(super) scratch: Box<[u8]>,
    /// Clients that have a place.
    pub(super) open: usize,
    /// Clients that are being told that there is none.
    pub(super) turned_away: usize,
    pub(super) free: Vec<u32>,
    /// Places that were ever used.
    pub(super) used: u32,
    /// Connections that wanted to go on in the next turn.
    pub(super) again: Vec<u32>,
    pub(super) calls: Vec<u32>,
    /// There may be somebody to accept, from then on.
    pub(super) accept_at: Option<Instant>,
    /// The oldest idle connections, youngest first, with the deadline that each had.
    pub(super) idle: Vec<(Instant, u32)>,
    /// No search for them before that.
    pub(super) idle_search_at: Option<Instant>,
    pub(super) sweep_at: Option<Instant>,
    /// When a stop has to be over.
    pub(super) stop_at: Option<Instant>,
}

impl Room {
    /// Registers what the loop listens to.
    pub fn new(
        poll: Poll,
        shared: Arc<Shared>,
        mut listener: Listener,
        private: UnixStream,
    ) -> io::Result<Room> {
        private.set_nonblocking(true)?;
        let mut private = net::UnixStream::from_std(private);
        let registry = poll.registry();
        registry.register(listener.source(), LISTENER, Interest::READABLE)?;
        registry.register(&mut private, PRIVATE, Interest::READABLE)?;
        Ok(Room {
            poll,
            shared,
            listener: Some(listener),
            private,
            private_awaits_writable: false,
            batch: Vec::new(),
            batch_sent: 0,
            scratch: vec![0; SCRATCH_BYTES].into(),
            open: 0,
            turned_away: 0,
            free: Vec::new(),
            used: 0,
            again: Vec::new(),
            calls: Vec::new(),
            accept_at: None,
            idle: Vec::new(),
            idle_search_at: None,
            sweep_at: None,
            stop_at: None,
        })
    }

    /// Runs until a stop is over. Errors are the end of all service.
    pub fn run(&mut self, on_broken: &mut dyn FnMut()) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        loop {
            match self.poll.poll(&mut events, self.patience()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result?,
            }
            let now = Instant::now();
            let mut private = Ok(());
            // An event may have named one of them a second time.
            let mut again = mem::take(&mut self.again);
            again.sort_unstable();
            again.dedup();
            for slot in again {
                self.advance(slot, now);
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept_at = Some(self.accept_at.unwrap_or(now)),
                    WAKER => self.answer_calls(now),
                    PRIVATE => private = self.listen_to_private(),
                    Token(slot) => self.hear(slot as u32, event, now),
                }
            }
            // After the reads, which may find idle connections busy.
            if self.accept_at.is_some_and(|at| at <= now) {
                self.accept(now);
            }
            if self.sweep_at.is_some_and(|at| at <= now) {
                self.sweep(now);
            }
            if let Err(error) = private.and_then(|()| self.flush()) {
                self.break_down(&error, now);
                on_broken();
            }
            if self.stop(now) {
                return Ok(());
            }
        }
    }

    /// How long nothing happens by itself.
    fn patience(&self) -> Option<Duration> {
        if !self.again.is_empty() {
            return Some(Duration::ZERO);
        }
        let times = [self.accept_at, self.sweep_at, self.stop_at];
        let first = times.into_iter().flatten().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Gives one connection its turn, and does what it asks for then.
    pub(super) fn turn(
        &mut self,
        slot: u32,
        now: Instant,
        work: impl FnOnce(&mut Connection, &mut Turn) -> Next,
    ) {
        let shared = &*self.shared;
        let Some(mut connection) = shared.places.get(slot) else {
            return;
        };
        if !connection.is_open() {
            return;
        }
        let mut turn = Turn {
            now,
            limits: &shared.limits,
            registry: self.poll.registry(),
            scratch: &mut self.scratch,
            batch: &mut self.batch,
            pipe: &shared.pipe,
            stopping: self.stop_at.is_some(),
        };
        match work(&mut connection, &mut turn) {
            Next::Wait => {}
            Next::Again => self.again.push(slot),
            Next::Close => {
                match connection.is_turned_away() {
                    true => self.turned_away -= 1,
                    false => self.open -= 1,
                }
                connection.close();
                self.free.push(slot);
            }
        }
    }

    fn advance(&mut self, slot: u32, now: Instant) {
        self.turn(slot, now, |connection, turn| connection.advance(slot, turn));
    }

    fn hear(&mut self, slot: u32, event: &mio::event::Event, now: Instant) {
        self.turn(slot, now, |connection, turn| {
            // A reset: nobody can take the answer, so work that has not begun is spared. (The end of sending
            // alone says nothing of the kind.)
            if event.is_error() && connection.is_working() {
                return Next::Close;
            }
            if event.is_readable() || event.is_read_closed() || event.is_error() {
                connection.note_readable(event.is_read_closed() || event.is_error());
            }
            connection.advance(slot, turn)
        });
    }

    fn answer_calls(&mut self, now: Instant) {
        let mut calls = mem::take(&mut self.calls);
        self.shared.take_calls(&mut calls);
        for slot in calls.drain(..) {
            self.advance(slot, now);
        }
        self.calls = calls;
    }

    /// Ends what has taken too long.
    ///
    /// The next sweep is when the first deadline seen passes, or when the first one that is yet to be set
    /// could: none of those is closer than the shortest time that anything is given.
    fn sweep(&mut self, now: Instant) {
        let mut next = now + self.shortest_deadline();
        for slot in 0..self.used {
            let connection = self.shared.places.get(slot);
            let Some(at) = connection.and_then(|connection| connection.deadline()) else {
                continue;
            };
            if at <= now {
                self.turn(slot, now, |connection, turn| {
                    // It may have been answered in between.
                    match connection.deadline().is_some_and(|at| at <= now) {
                        true => connection.expire(slot, turn),
                        false => Next::Wait,
                    }
                });
            } else {
                next = next.min(at);
            }
        }
        self.sweep_at = (self.open + self.turned_away > 0).then(|| next.max(now + SWEEP_PAUSE));
    }

    pub(super) fn shortest_deadline(&self) -> Duration {
        let limits = &self.shared.limits;
        let all = [
            limits.head_timeout,
            limits.body_timeout,
            limits.idle_timeout,
            limits.write_timeout,
            limits.request_timeout,
            linger_time(self.stop_at.is_some()),
        ];
        all.into_iter().min().expect("there are some")
    }

    /// Sends the requests of this turn to tiny_http with one write.
    fn flush(&mut self) -> io::Result<()> {
        while self.batch_sent < self.batch.len() {
            match self.private.write(&self.batch[self.batch_sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => self.batch_sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let done = self.batch_sent == self.batch.len();
        if self.private_awaits_writable == done {
            self.private_awaits_writable = !done;
            let interest = match done {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            let registry = self.poll.registry();
            registry.reregister(&mut self.private, PRIVATE, interest)?;
        }
        // Half of it, so that each byte is moved once at most.
        if self.batch_sent > self.batch.len() / 2 {
            self.batch.drain(..mem::take(&mut self.batch_sent));
            self.batch.shrink_to(1 << 20);
        }
        Ok(())
    }

    /// tiny_http has nothing to say here, except that it is gone. (A request that a worker dropped makes it
    /// write an answer, which must not fill the stream.)
    fn listen_to_private(&mut self) -> io::Result<()> {
        loop {
            match self.private.read(&mut self.scratch) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn break_down(&mut self, error: &io::Error, now: Instant) {
        self.shared.pipe.break_down(error);
        self.batch = Vec::new();
        self.batch_sent = 0;
        for slot in 0..self.used {
            self.turn(slot, now, |connection, turn| {
                if connection.is_working() {
                    let why = "the way to the workers is broken";
                    connection.refuse(&Error::Unavailable(why.into()), turn);
                }
                connection.advance(slot, turn)
            });
        }
    }

    /// Whether it is over.
    fn stop(&mut self, now: Instant) -> bool {
        if !self.shared.stopping.load(Ordering::SeqCst) {
            return false;
        }
        if self.stop_at.is_none() {
            // Who has been connected to the listener before this moment was let in.
            for _ in 0..TURNS_OF_THE_LAST {
                self.accept(now);
                if self.accept_at != Some(now) {
                    break;
                }
            }
            self.listener = None;
            self.accept_at = None;
            self.stop_at = Some(now + self.shared.limits.stop_timeout);
            for slot in 0..self.used {
                self.turn(slot, now, |connection, turn| {
                    connection.hurry(now);
                    connection.note_readable(false);
                    connection.advance(slot, turn)
                });
            }
            // What came in with the last reads; a failure shows itself in the next turn.
            let _ = self.flush();
            self.sweep_at = Some(now + SWEEP_PAUSE);
        }
        let late = self.stop_at.is_some_and(|at| at <= now);
        self.open + self.turned_away == 0 || late || self.shared.aborted.load(Ordering::SeqCst)
    }

    /// Leaves nothing open. The places outlive the loop in the workers' hands.
    pub fn clear(&mut self) {
        self.listener = None;
        let now = Instant::now();
        for slot in 0..self.used {
            self.turn(slot, now, |connection, turn| {
                connection.cut_off(turn);
                Next::Close
            });
        }
    }
}
