//! Removes what was kept of creates with a key, once its time is over: a thread that sleeps until the next row expires,
//! and so wakes once a day where there is none.

use super::{Pool, keys};
use crate::{error::Error, users::once::KEPT_FOR};
use std::{
    io,
    sync::{Arc, Weak, mpsc},
    thread,
    time::Duration,
};

/// The first look at the rows after a start, and the shortest time between two.
const SHORTEST_PAUSE: Duration = Duration::from_secs(60);

/// Between two steps of one removal, for others to get at the database.
const BETWEEN_STEPS: Duration = Duration::from_millis(50);

/// After a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(60 * 60);

/// Of the thread, in bytes.
const STACK: usize = 256 << 10;

/// The thread; it ends soon after this is dropped.
pub struct Cleaner(#[allow(dead_code, reason = "dropping it is what the thread waits for")] mpsc::Sender<()>);

impl Cleaner {
    /// Starts it. Errors: the system has no more threads.
    pub(super) fn start(pool: &Arc<Pool>) -> io::Result<Cleaner> {
        let (sender, ended) = mpsc::channel();
        let pool = Arc::downgrade(pool);
        let thread = thread::Builder::new().name("cleaner".to_owned()).stack_size(STACK);
        thread.spawn(move || work(&pool, &ended))?;
        Ok(Cleaner(sender))
    }
}

fn work(pool: &Weak<Pool>, ended: &mpsc::Receiver<()>) {
    let mut pause = SHORTEST_PAUSE;
    while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
        let Some(pool) = pool.upgrade() else { return };
        pause = match step(&pool) {
            Ok(pause) => pause,
            Err(Error::Contended) => SHORTEST_PAUSE,
            Err(error) => {
                log::warn!("cannot remove the idempotency keys that have expired: {error}");
                AFTER_FAILURE
            }
        };
    }
}

/// Removes some rows if there are any that have expired; returns when to go on.
fn step(pool: &Pool) -> Result<Duration, Error> {
    match keys::next_expiry(pool)? {
        None => Ok(KEPT_FOR),
        Some(left) if !left.is_zero() => Ok(left.clamp(SHORTEST_PAUSE, KEPT_FOR)),
        Some(_) => {
            keys::remove_expired(pool)?;
            Ok(BETWEEN_STEPS)
        }
    }
}
