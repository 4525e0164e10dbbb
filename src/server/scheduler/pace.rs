//! How many batches of a lane are worth having in flight, learned from how long they take.

use std::time::{Duration, Instant};

/// How many batches of a lane are worth having in flight.
///
/// A batch costs this machine processor time, and the time between is waiting: for the network, for a commit. Where a
/// batch is mostly processor time, few at once are best, because more share the same cores and are less full. Where it
/// is mostly waiting, as many as there are sessions. The shortest batch of the last two windows tells which: contention
/// for the cores lengthens batches, and the shortest is the least affected.
#[derive(Debug)]
pub(super) struct Pace {
    short: Duration,
    command: Duration,
    /// The shortest of the current window and of the one before.
    shortest: [Duration; 2],
    window: Instant,
    #[cfg(test)]
    fixed: Option<usize>,
}

/// A window of [`Pace`]; a change of the database shows after two at the latest.
const WINDOW: Duration = Duration::from_millis(400);

/// A batch of reads that takes less has no waiting in it: whatever arrives waits for its end.
const SHORT_READ: Duration = Duration::from_micros(300);

/// The same for a write, which has a commit.
const SHORT_WRITE: Duration = Duration::from_micros(900);

/// What each command adds to a batch of creates: a full one is as short as one of a single create.
const COMMAND_OF_WRITE: Duration = Duration::from_micros(20);

impl Pace {
    pub fn new(writes: bool, now: Instant) -> Pace {
        let (short, command) = match writes {
            true => (SHORT_WRITE, COMMAND_OF_WRITE),
            false => (SHORT_READ, Duration::ZERO),
        };
        Pace {
            short,
            command,
            shortest: [Duration::MAX; 2],
            window: now,
            #[cfg(test)]
            fixed: None,
        }
    }

    /// A batch of so many commands took so long.
    pub fn learn(&mut self, took: Duration, commands: usize, now: Instant) {
        let took = took.saturating_sub(self.command * u32::try_from(commands).unwrap_or(u32::MAX));
        if now > self.window + WINDOW {
            self.shortest = [Duration::MAX, self.shortest[0]];
            self.window = now;
        }
        self.shortest[0] = self.shortest[0].min(took);
    }

    /// The shortest batch of late, without what each command adds.
    pub fn shortest(&self) -> Duration {
        self.shortest[0].min(self.shortest[1])
    }

    /// Always this many, for comparison.
    #[cfg(test)]
    pub fn fix(&mut self, batches: usize) {
        self.fixed = Some(batches);
    }

    /// Batches in flight that pay: `short` where they have no waiting in them, else any number.
    pub fn batches(&self, short: usize) -> usize {
        #[cfg(test)]
        if let Some(batches) = self.fixed {
            return batches;
        }
        if self.is_short() { short } else { usize::MAX }
    }

    /// Whether a batch ends so soon that waking another worker meanwhile does not pay.
    pub fn is_short(&self) -> bool {
        self.shortest() < self.short
    }
}
