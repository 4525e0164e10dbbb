//! Connects with retries for a start, an import or an export, until `db_connect_timeout` is over. The error says what
//! the operator can do.

use super::{ConnectError, DbHosts, MAX_CONNECT_TIME, TransactionPooling};
use crate::db::sqlstate::{is_final_refusal, is_unsupported_auth, may_require_tls, reached_no_database};
use crate::error::StartError;
use postgres::Client;
use postgres::config::{Host, SslMode};
use std::thread;
use std::time::{Duration, Instant};

/// The remedy if userd cannot connect to the database.
const DATABASE_REMEDY: &str = "; DATABASE_URL names another database, `userd --embedded` runs one of its own";

/// The remedy if the server may have refused a session because it had no TLS.
const TLS_REMEDY: &str = "; a server that takes TLS alone needs DB_SSL=true, and DB_SSL_CA if its authority is not the \
                        system's (sslmode and sslrootcert in DATABASE_URL)";

/// The remedy if the client library refuses to authenticate, because the server asks for too many iterations of SCRAM.
const SCRAM_REMEDY: &str =
    "; scram_iterations of the server may be 100000 at most: set it, and the password anew";

impl DbHosts {
    /// Opens a session whose statements may take any time, for migrations, exports and imports. Tries until
    /// `db_connect_timeout` is over, and logs each failed try. Fails without a retry if the error is final, such as a
    /// wrong password. If it is unknown whether a pooler lends its sessions, tests this first, which may take four
    /// seconds more.
    pub fn connect_with_retries(&self) -> Result<Client, StartError> {
        const RETRY_PAUSE: Duration = Duration::from_millis(500);
        const LIFT_TIMEOUTS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let mut deadline = Instant::now() + self.config.db_connect_timeout;
        let mut error = ConnectError::NoAnswer;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.open_session(LIFT_TIMEOUTS, None, left) {
                Ok(client) if self.pooling() != TransactionPooling::Unknown => return Ok(client),
                // Tests with this session whether there is a pooler, and then connects again. This session has no
                // settings, because a pooler may lend it, with its settings, to other clients.
                Ok(client) => {
                    self.record_pooler(self.is_behind_pooler(client));
                    // Extends the deadline, because the test for a pooler may have used up the time.
                    deadline = deadline.max(Instant::now() + MAX_CONNECT_TIME);
                    continue;
                }
                // Keeps the error of an earlier try, because this last try had too little time for an answer.
                Err(ConnectError::NoAnswer) if left < MAX_CONNECT_TIME => {}
                Err(refusal) => error = refusal,
            }
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final_refusal(error));
            if is_final || Instant::now() + RETRY_PAUSE > deadline {
                let (tried, remedy) = (&self.target, self.find_remedy(&error));
                return Err(StartError::Database(format!("{error}; tried {tried}{remedy}")));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// Returns the remedy for a failed connect, as text that is appended to the error. Returns an empty text if the
    /// error itself says what to do, or if no remedy is known.
    fn find_remedy(&self, error: &ConnectError) -> &'static str {
        let mut hosts = self.target.hosts.iter();
        let is_plain = hosts.any(|host| {
            matches!(host.get_hosts(), [Host::Tcp(_)]) && host.get_ssl_mode() == SslMode::Disable
        });
        match error {
            ConnectError::Refused(error) if may_require_tls(error) && is_plain => TLS_REMEDY,
            ConnectError::Refused(error) if is_unsupported_auth(error) => SCRAM_REMEDY,
            ConnectError::Refused(error) if reached_no_database(error) => "",
            _ => DATABASE_REMEDY,
        }
    }
}
