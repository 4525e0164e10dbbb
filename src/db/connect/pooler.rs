//! Looks for a pooler that lends its sessions for one transaction each: then they keep no statements and no settings.

use super::Servers;
use super::bounded::{CONNECT_TIMEOUT, within};
use crate::config::Config;
use postgres::Client;
use std::time::Instant;
use std::{mem, sync::Arc};

/// Finding about a pooler in transaction mode.
pub const POOLER_LENDS: &str =
    "a pooler lends its sessions for one transaction each: userd serves as with DB_PREPARED=false";

/// Tells whether each session belongs to one client, or a pooler lends sessions, and how that is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sessions {
    /// Sessions are userd's own: `db_prepared` is true and no look is wanted.
    SetOwn,
    /// Sessions are lent: `db_prepared` is false.
    SetLent,
    /// Not known yet: the first session shows it.
    Unknown,
    /// Sessions are userd's own, as far as a look has shown.
    FoundOwn,
    /// Sessions are lent, as a look or a statement has shown.
    FoundLent,
}

impl Sessions {
    /// Returns what the settings say about sessions.
    pub fn of(config: &Config) -> Sessions {
        match (config.db_prepared, config.find_pooler) {
            (false, _) => Sessions::SetLent,
            (true, false) => Sessions::SetOwn,
            (true, true) => Sessions::Unknown,
        }
    }

    /// Returns whether sessions certainly keep settings.
    pub fn keep_settings(self) -> bool {
        matches!(self, Sessions::SetOwn | Sessions::FoundOwn)
    }

    /// Returns whether sessions may keep statements.
    pub fn keep_statements(self) -> bool {
        !matches!(self, Sessions::SetLent | Sessions::FoundLent)
    }
}

impl Servers {
    /// Returns what is known of the sessions.
    pub fn sessions(&self) -> Sessions {
        *self.sessions.lock()
    }

    /// Records whether a pooler lends sessions, unless the settings decide it. Returns true if the knowledge is
    /// new.
    pub fn learn(&self, is_lent: bool) -> bool {
        let mut sessions = self.sessions.lock();
        let known = match (*sessions, is_lent) {
            (Sessions::Unknown, false) => Sessions::FoundOwn,
            (Sessions::Unknown | Sessions::FoundOwn, true) => Sessions::FoundLent,
            (known, _) => known,
        };
        mem::replace(&mut *sessions, known) != known
    }

    /// Returns whether a pooler lends its sessions for one transaction each: several of them serve one client, or one serves
    /// two. Blocks for up to two seconds; false if it cannot be told by then, as of a pooler with one session.
    pub fn lends(&self, mut client: Client) -> bool {
        /// The most looks: another client of the pooler may use the session between two statements.
        const MAX_LOOKS: usize = 8;
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let Ok(mut other) = self.open("", None, CONNECT_TIMEOUT) else { return false };
        let look = move || {
            let began = session(&mut client)?;
            for _ in 0..MAX_LOOKS {
                let (of_other, own) = (session(&mut other)?, session(&mut client)?);
                if own != began || of_other == own {
                    return Ok(true);
                }
            }
            Ok::<_, postgres::Error>(false)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        matches!(within(left, &Arc::default(), look), Ok(Ok(true)))
    }
}

/// Returns the session of the server that serves a client now.
fn session(client: &mut Client) -> Result<String, postgres::Error> {
    const SESSION: &str = "select pg_backend_pid()::text || pg_postmaster_start_time()::text";
    client.query_typed_one(SESSION, &[]).map(|row| row.get(0))
}
