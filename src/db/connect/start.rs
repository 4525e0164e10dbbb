//! The first session of a start, and of each import and export: it is tried for until `db_connect_timeout` is up, and an
//! error says what helps.

use super::{CONNECT_TIMEOUT, ConnectError, Servers, Sessions};
use crate::db::sqlstate::{asks_for_tls, is_answered, is_final, is_unusable_answer};
use crate::error::StartError;
use postgres::Client;
use postgres::config::{Host, SslMode};
use std::thread;
use std::time::{Duration, Instant};

/// Remedy for a database that cannot be connected to.
const ANOTHER_DATABASE: &str =
    "; DATABASE_URL names another database, `userd --embedded` runs one of its own";

/// Remedy for a server that has refused a session without TLS.
const ONLY_TLS: &str = "; a server that takes TLS alone needs DB_SSL=true, and DB_SSL_CA if its authority is not the \
                        system's (sslmode and sslrootcert in DATABASE_URL)";

/// Remedy for a password that the client library refuses to prove, as that would take too long.
const MAX_ITERATIONS: &str =
    "; scram_iterations of the server may be 100000 at most: set it, and the password anew";

impl Servers {
    /// Returns a session without bounds for its statements, as migrations, exports and imports take long. Tries until
    /// `db_connect_timeout` is up, with a line in the log for each try. A refusal that a retry would not change ends it at
    /// once. The first session shows if a pooler lends it: that, and one more connect, may take two seconds each beyond it.
    pub fn connect_for_long(&self) -> Result<Client, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const NO_BOUNDS: &str = "set statement_timeout = 0; set lock_timeout = 0";
        let mut deadline = Instant::now() + self.config.db_connect_timeout;
        let mut error = ConnectError::Silent;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.open(NO_BOUNDS, None, left) {
                Ok(client) if self.sessions() != Sessions::Unknown => return Ok(client),
                // Looks for a pooler, and connects again: the next session is set up, unless a pooler lends it.
                Ok(client) => {
                    self.learn(self.lends(client));
                    // Extends the deadline: the server has answered, and the look for a pooler may have used up
                    // the time.
                    deadline = deadline.max(Instant::now() + CONNECT_TIMEOUT);
                    continue;
                }
                // Keeps the error of an earlier try: the last try has too little time for an answer.
                Err(ConnectError::Silent) if left < CONNECT_TIMEOUT => {}
                Err(refusal) => error = refusal,
            }
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final(error));
            if is_final || Instant::now() + PAUSE > deadline {
                let (tried, remedy) = (&self.target, self.remedy(&error));
                return Err(StartError::Database(format!("{error}; tried {tried}{remedy}")));
            }
            log::warn!("cannot connect to the database yet: {error}");
            thread::sleep(PAUSE);
        }
    }

    /// Returns the remedy for a failed start, to end its line; an empty text if the error has it, or there is none.
    fn remedy(&self, error: &ConnectError) -> &'static str {
        let mut hosts = self.target.hosts.iter();
        let is_plain = hosts.any(|host| {
            matches!(host.get_hosts(), [Host::Tcp(_)]) && host.get_ssl_mode() == SslMode::Disable
        });
        match error {
            ConnectError::Refused(error) if asks_for_tls(error) && is_plain => ONLY_TLS,
            ConnectError::Refused(error) if is_unusable_answer(error) => MAX_ITERATIONS,
            ConnectError::Refused(error) if is_answered(error) => "",
            _ => ANOTHER_DATABASE,
        }
    }
}
