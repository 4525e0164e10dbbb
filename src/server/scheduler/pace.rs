//! How many batches of a lane are worth having in flight, learned from how long they take.

use std::time::{Duration, Instant};

/// How many batches of a lane are worth having in flight.
///
/// A batch costs this machine processor time, and the time between is waiting: for the network, for a commit. Where a
/// batch is mostly processor time, one for every two cores is best, because more share the same cores and are less full.
/// Where it is mostly waiting, as many are best as fit into one wait. The shortest batch of the last two windows tells which:
/// contention for the cores lengthens batches, and the shortest is the least affected.
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

/// What a batch costs in processor time, here and in a database on the same machine, hand-overs between threads included:
/// a lone read takes 60 to 120 µs.
const BATCH_COST: Duration = Duration::from_micros(80);

/// A batch of reads that takes less has no waiting in it: whatever arrives waits for its end.
const SHORT_READ: Duration = Duration::from_micros(300);

/// The same for creates, whose commit on the same machine takes some 0.45 ms: 32 connections got 23,600 creates a second
/// with one batch in flight, and 19,100 with five, on two cores.
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

    /// Batches in flight that pay; `short` where they have no waiting in them.
    pub fn batches(&self, short: usize) -> usize {
        #[cfg(test)]
        if let Some(batches) = self.fixed {
            return batches;
        }
        match self.shortest() {
            Duration::MAX => 2,
            shortest if shortest < self.short => short,
            shortest => that_fit(shortest),
        }
    }

    /// Batches in flight that take no more than an eighth of a core's time, because they do little but wait: one more
    /// costs next to nothing.
    pub fn cheap_batches(&self) -> usize {
        match self.shortest() {
            Duration::MAX => 0,
            shortest => that_fit(shortest) / 8,
        }
    }

    /// Whether a batch ends so soon that waking another worker meanwhile does not pay.
    pub fn is_short(&self) -> bool {
        self.shortest() < self.short
    }
}

/// Batches whose processor time fits into one that takes so long.
fn that_fit(took: Duration) -> usize {
    (took.as_nanos() / BATCH_COST.as_nanos()) as usize
}
