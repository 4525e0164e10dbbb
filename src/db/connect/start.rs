//! Opens the session of a start, an import or an export. Tries until `db_connect_timeout` is over; an error says what helps.

use super::{ConnectError, DbHosts, MAX_CONNECT_TIME, Sessions};
use crate::db::sqlstate::{asks_for_tls, is_final_refusal, is_no_database, is_refused_by_client};
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

/// The remedy if the client library refuses to prove the password because the server asks for too many iterations of SCRAM.
const ITERATIONS_REMEDY: &str =
    "; scram_iterations of the server may be 100000 at most: set it, and the password anew";

impl DbHosts {
    /// Returns a session whose statements may take any time, as migrations, exports and imports take long. Tries until
    /// `db_connect_timeout` is over, and logs each failed try. Fails at once if a retry would fail, too. If nothing is known about
    /// poolers yet, the look for a pooler and one more connect may take two seconds each beyond the time.
    pub fn connect_for_long(&self) -> Result<Client, StartError> {
        const RETRY_PAUSE: Duration = Duration::from_millis(500);
        const LIFT_TIMEOUTS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let mut deadline = Instant::now() + self.config.db_connect_timeout;
        let mut error = ConnectError::Silent;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.open_session(LIFT_TIMEOUTS, None, left) {
                Ok(client) if self.sessions() != Sessions::Unknown => return Ok(client),
                // Looks for a pooler in this session, and then connects again. This session has no settings, because a
                // pooler may lend it, with its settings, to other clients.
                Ok(client) => {
                    self.record_lent(self.is_lent(client));
                    // Extends the deadline, because the look for a pooler may have used up the time.
                    deadline = deadline.max(Instant::now() + MAX_CONNECT_TIME);
                    continue;
                }
                // Keeps the error of an earlier try, because this last try had too little time for an answer.
                Err(ConnectError::Silent) if left < MAX_CONNECT_TIME => {}
                Err(refusal) => error = refusal,
            }
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final_refusal(error));
            if is_final || Instant::now() + RETRY_PAUSE > deadline {
                let (tried, remedy) = (&self.target, self.remedy(&error));
                return Err(StartError::Database(format!("{error}; tried {tried}{remedy}")));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// Returns what helps against an error, as the end of its line. The text is empty if the error says what helps, or if nothing is
    /// known to help.
    fn remedy(&self, error: &ConnectError) -> &'static str {
        let mut hosts = self.target.hosts.iter();
        let is_plain = hosts.any(|host| {
            matches!(host.get_hosts(), [Host::Tcp(_)]) && host.get_ssl_mode() == SslMode::Disable
        });
        match error {
            ConnectError::Refused(error) if asks_for_tls(error) && is_plain => TLS_REMEDY,
            ConnectError::Refused(error) if is_refused_by_client(error) => ITERATIONS_REMEDY,
            ConnectError::Refused(error) if is_no_database(error) => "",
            _ => DATABASE_REMEDY,
        }
    }
}
