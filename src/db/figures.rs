//! Counts of the pool. Only waits and retries change them, so threads share these numbers.

use crate::metrics::Text;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of waits for sessions, and of statements that were executed again.
#[derive(Debug, Default)]
pub(super) struct Figures {
    /// Waits for a session.
    pub(super) waits: AtomicU64,
    /// Waits in which none became free.
    pub(super) timeouts: AtomicU64,
    /// Statements that were executed again because a connection broke.
    pub(super) broken: AtomicU64,
    /// Statements that were executed again because the session was too old.
    pub(super) stale: AtomicU64,
}

impl Figures {
    /// Writes the figures. `most`: the most sessions at once. `lock_retries`: retries of commands that met a lock.
    pub(super) fn write(&self, text: &mut Text, sessions: &r2d2::State, most: u32, lock_retries: u64) {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (open, idle) = (sessions.connections, sessions.idle_connections);
        let help = "Sessions of the database that are open, by state.";
        text.family("userd_database_sessions", "gauge", help);
        text.value(&[("state", "idle")], idle.min(open));
        text.value(&[("state", "busy")], open.saturating_sub(idle));
        text.gauge("userd_database_sessions_max", "The most sessions that the pool opens.", most);
        let help = "How often a session was waited for.";
        text.counter("userd_database_session_waits_total", help, get(&self.waits));
        let help = "Waits for a session that were in vain.";
        text.counter("userd_database_session_timeouts_total", help, get(&self.timeouts));
        let help =
            "Statements executed again, by what they met: a lock, a broken connection, a session of no use.";
        text.family("userd_database_retries_total", "counter", help);
        text.value(&[("reason", "lock")], lock_retries);
        text.value(&[("reason", "connection")], get(&self.broken));
        text.value(&[("reason", "session")], get(&self.stale));
    }
}
