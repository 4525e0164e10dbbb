//! Finds out whether a pooler lends its sessions to each client for one transaction (transaction pooling). Settings and
//! prepared statements of such a session may be gone in the next transaction.

use super::DbHosts;
use super::time_limit::{MAX_CONNECT_TIME, run_within};
use crate::config::Config;
use postgres::Client;
use std::time::Instant;
use std::{mem, sync::Arc};

/// The line for the log and for `userd check` if a pooler lends its sessions.
pub const POOLER_NOTE: &str =
    "a pooler lends its sessions for one transaction each: userd serves as with DB_PREPARED=false";

/// Tells whether there is a pooler that lends its sessions for one transaction each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TransactionPooling {
    /// Not known yet: the first session will show it.
    Unknown,
    /// No pooler lends its sessions: a test has found none, or the settings turn the test off (`find_pooler` is false).
    Absent,
    /// A pooler lends its sessions, as the setting `db_prepared` = false says.
    Configured,
    /// A pooler lends its sessions, as a test or a failed statement has shown.
    Detected,
}

impl TransactionPooling {
    /// Returns what the settings say about a pooler.
    pub fn from_config(config: &Config) -> TransactionPooling {
        match (config.db_prepared, config.find_pooler) {
            (false, _) => TransactionPooling::Configured,
            (true, false) => TransactionPooling::Absent,
            (true, true) => TransactionPooling::Unknown,
        }
    }

    /// Returns true if a session may be changed by `set`. False while it is unknown whether a pooler would lend the
    /// session, with the changed settings, to other clients.
    pub fn allows_set_command(self) -> bool {
        self == TransactionPooling::Absent
    }

    /// Returns true if statements may be prepared. True while it is unknown whether a pooler lends its sessions: the
    /// failure of a prepared statement will show it.
    pub fn allows_prepared_statements(self) -> bool {
        !matches!(self, TransactionPooling::Configured | TransactionPooling::Detected)
    }
}

impl DbHosts {
    /// Returns what is known by now about a pooler that lends its sessions.
    pub fn pooling(&self) -> TransactionPooling {
        *self.pooling.lock()
    }

    /// Records whether a pooler lends its sessions, unless `db_prepared` is false. Returns true if this was not known
    /// before.
    pub fn record_pooler(&self, has_pooler: bool) -> bool {
        let mut pooling = self.pooling.lock();
        let known = match (*pooling, has_pooler) {
            (TransactionPooling::Unknown, false) => TransactionPooling::Absent,
            (TransactionPooling::Unknown | TransactionPooling::Absent, true) => TransactionPooling::Detected,
            (known, _) => known,
        };
        mem::replace(&mut *pooling, known) != known
    }

    /// Returns true if a pooler lends the sessions that serve `client`: several server processes serve this client, or
    /// one of them also serves a second client. Blocks for up to two seconds. May return false although there is a
    /// pooler, for example if the pooler has only one session.
    pub fn is_behind_pooler(&self, mut client: Client) -> bool {
        /// How often the server processes of the two clients are compared. One comparison may miss a pooler, because
        /// another program may use the server process that the two clients would otherwise share.
        const MAX_PROCESS_COMPARISONS: usize = 8;
        let deadline = Instant::now() + MAX_CONNECT_TIME;
        let Ok(mut other) = self.open_session("", None, MAX_CONNECT_TIME) else { return false };
        let look = move || {
            let first = read_process_id(&mut client)?;
            for _ in 0..MAX_PROCESS_COMPARISONS {
                let (second, own) = (read_process_id(&mut other)?, read_process_id(&mut client)?);
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

/// Returns a text that identifies the server process that serves `client` now.
fn read_process_id(client: &mut Client) -> Result<String, postgres::Error> {
    const READ_PROCESS_ID: &str = "select pg_backend_pid()::text || pg_postmaster_start_time()::text";
    client.query_typed_one(READ_PROCESS_ID, &[]).map(|row| row.get(0))
}
