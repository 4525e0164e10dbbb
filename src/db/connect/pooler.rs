//! Finds out whether a pooler lends its sessions to each client for one transaction. Such sessions keep no statements and no settings.

use super::DbHosts;
use super::bounded::{MAX_CONNECT_TIME, run_within};
use crate::config::Config;
use postgres::Client;
use std::time::Instant;
use std::{mem, sync::Arc};

/// The finding about a pooler that lends its sessions.
pub const POOLER_LENDS_SESSIONS: &str =
    "a pooler lends its sessions for one transaction each: userd serves as with DB_PREPARED=false";

/// Says whether sessions belong to userd alone, or a pooler lends them to other clients between two transactions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sessions {
    /// Not known yet: the first session will show whether sessions are lent.
    Unknown,
    /// Sessions are userd's own, as far as a look has shown, or because no look is wanted.
    Own,
    /// Sessions are lent: `db_prepared` is false.
    SetLent,
    /// Sessions are lent, as a look or a failed statement has shown.
    FoundLent,
}

impl Sessions {
    /// Returns whether a pooler lends sessions, as far as the settings say.
    pub fn from_config(config: &Config) -> Sessions {
        match (config.db_prepared, config.find_pooler) {
            (false, _) => Sessions::SetLent,
            (true, false) => Sessions::Own,
            (true, true) => Sessions::Unknown,
        }
    }

    /// Returns whether sessions certainly keep settings.
    pub fn keep_settings(self) -> bool {
        self == Sessions::Own
    }

    /// Returns whether sessions may keep prepared statements.
    pub fn keep_statements(self) -> bool {
        !matches!(self, Sessions::SetLent | Sessions::FoundLent)
    }
}

impl DbHosts {
    /// Returns what is known about sessions by now.
    pub fn sessions(&self) -> Sessions {
        *self.sessions.lock()
    }

    /// Records whether a pooler lends sessions, unless `db_prepared` is false. Returns true if that is new.
    pub fn record_lent(&self, is_lent: bool) -> bool {
        let mut sessions = self.sessions.lock();
        let known = match (*sessions, is_lent) {
            (Sessions::Unknown, false) => Sessions::Own,
            (Sessions::Unknown | Sessions::Own, true) => Sessions::FoundLent,
            (known, _) => known,
        };
        mem::replace(&mut *sessions, known) != known
    }

    /// Returns whether a pooler lends the session of a client: several server processes serve this client, or one of them also serves
    /// a second client. Blocks for up to two seconds. Returns false if that shows nothing, as with a pooler that has one session.
    pub fn is_lent(&self, mut client: Client) -> bool {
        /// The most times that the server processes of the two clients are compared. One comparison may miss a pooler,
        /// because another program may use the server process that the two clients would otherwise share.
        const MAX_LOOKS: usize = 8;
        let deadline = Instant::now() + MAX_CONNECT_TIME;
        let Ok(mut other) = self.open_session("", None, MAX_CONNECT_TIME) else { return false };
        let look = move || {
            let first = server_process(&mut client)?;
            for _ in 0..MAX_LOOKS {
                let (second, own) = (server_process(&mut other)?, server_process(&mut client)?);
                if own != first || second == own {
                    return Ok(true);
                }
            }
            Ok::<_, postgres::Error>(false)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        matches!(run_within(left, &Arc::default(), look), Ok(Ok(true)))
    }
}

/// Returns a text that identifies the server process which serves a client now.
fn server_process(client: &mut Client) -> Result<String, postgres::Error> {
    const SERVER_PROCESS: &str = "select pg_backend_pid()::text || pg_postmaster_start_time()::text";
    client.query_typed_one(SERVER_PROCESS, &[]).map(|row| row.get(0))
}
