//! Opens sessions of the database by the settings. TCP notices within seconds that a server is gone. If a server is stopped
//! and its kernel still answers, a connect is given up, and an open session waits until the server goes on or ends.
//!
//! There is a file for each thing that a connect has to know: `bounded` (how long it may take, and which hosts did not answer),
//! `password`, and `pooler` (whether sessions keep settings). `start` has the first session of a start.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

mod bounded;
mod password;
mod pooler;
mod start;

use super::session::Session;
use super::sqlstate::explain;
use super::target::Target;
use super::tls::{self, Connector};
use crate::config::Config;
use crate::error::StartError;
use bounded::{MAX_CONNECT_TIME, UnansweredConnects};
use parking_lot::Mutex;
use password::Password;
pub use pooler::{POOLER_LENDS_SESSIONS, Sessions};
use postgres::Client;
use postgres::config::TargetSessionAttrs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The servers that a connection string names, and what a connect to them needs.
pub struct DbHosts {
    /// The connection string.
    pub target: Target,
    /// The counter of epochs: sessions that were opened in an earlier epoch are not used any more.
    pub epoch: Epoch,
    tls: Connector,
    config: Config,
    password: Password,
    /// Says whether a pooler lends the sessions, as far as this process has found out.
    sessions: Mutex<Sessions>,
    /// The statement that has sessions use the schema of the tables. Empty until a start has found the schema.
    search_path: OnceLock<String>,
    /// The connects that were not answered, for each host of `target`.
    unanswered: Vec<UnansweredConnects>,
    /// The time of the last look for a server that takes changes.
    last_primary_check: Mutex<Option<Instant>>,
}

impl DbHosts {
    /// Returns the servers that the settings name. Connects to none. Fails if a setting, or a file that the settings of TLS name,
    /// cannot be used.
    pub fn new(config: &Config) -> Result<Arc<DbHosts>, StartError> {
        config.check()?;
        let target = Target::new(config)?;
        for warning in &target.warnings {
            log::warn!("DATABASE_URL: {warning}");
        }
        let tls = tls::connector(&target.tls).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        Ok(Arc::new(DbHosts {
            epoch: Epoch::default(),
            tls,
            config: config.clone(),
            password: Password::new(config, &target),
            sessions: Mutex::new(Sessions::from_config(config)),
            search_path: OnceLock::new(),
            unanswered: target.hosts.iter().map(|_| UnansweredConnects::default()).collect(),
            last_primary_check: Mutex::default(),
            target,
        }))
    }

    /// Returns whether the settings accept only a server that takes changes.
    pub fn wants_primary(&self) -> bool {
        self.target.hosts[0].get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Has this session and later ones use the schema `name`, also if another schema of the search_path appears before it. Temporary
    /// tables are found last. Does nothing if a pooler lends the sessions.
    pub(super) fn keep_schema(&self, client: &mut Client, name: &str) -> Result<(), postgres::Error> {
        let statement = || format!("set search_path = \"{}\", pg_temp; ", name.replace('"', "\"\""));
        let statement = self.search_path.get_or_init(statement);
        if self.sessions().keep_settings() { client.batch_execute(statement) } else { Ok(()) }
    }

    /// Returns the longest time that a statement of a service may take.
    pub fn statement_timeout(&self) -> Duration {
        self.config.limits.statement_timeout()
    }

    /// Returns a new session. Executes `set_up` in it if sessions keep settings. Blocks for at most two seconds with each host, or for
    /// a longer `connect_timeout`.
    pub(super) fn connect(&self, set_up: &str) -> Result<Session, ConnectError> {
        // Reads the epoch before connecting, so that the new session counts as old if the server changes meanwhile.
        let epoch = self.epoch.current();
        let connection = self.open_session(set_up, None, Duration::MAX)?;
        let statements = self.sessions().keep_statements().then(Vec::new);
        Ok(Session { connection, statements, epoch, last_answer_at: Instant::now() })
    }

    /// Returns whether a new session takes changes. Connects for that at most once a second, and returns false in between, because a
    /// database may take no changes for long.
    pub fn finds_primary(&self) -> bool {
        const PRIMARY_CHECK_INTERVAL: Duration = Duration::from_secs(1);
        let Some(mut last) = self.last_primary_check.try_lock() else { return false };
        if last.is_some_and(|at: Instant| at.elapsed() < PRIMARY_CHECK_INTERVAL) {
            return false;
        }
        let opened = self.open_session("", Some(TargetSessionAttrs::ReadWrite), MAX_CONNECT_TIME);
        *last = Some(Instant::now());
        opened.is_ok()
    }

    /// Returns a session of the first host that answers with the attributes `attrs`, or with those of the connection string. Blocks for
    /// at most `max_time`.
    fn open_session(
        &self,
        set_up: &str,
        attrs: Option<TargetSessionAttrs>,
        max_time: Duration,
    ) -> Result<Client, ConnectError> {
        let (began, mut refusal) = (Instant::now(), ConnectError::Silent);
        for (host, unanswered) in self.target.hosts.iter().zip(&self.unanswered) {
            if unanswered.is_paused() {
                refusal = ConnectError::Silent;
                continue;
            }
            let mut host = host.clone();
            host.target_session_attrs(attrs.unwrap_or(host.get_target_session_attrs()));
            if let Some(password) = self.password.read() {
                host.password(password);
            }
            let search_path = self.search_path.get().map_or("", String::as_str);
            let keep_settings = self.sessions().keep_settings();
            let set_up = if keep_settings { format!("{search_path}{set_up}") } else { String::new() };
            let left = max_time.saturating_sub(began.elapsed());
            match unanswered.connect(host, self.tls.clone(), set_up, left) {
                Ok(client) => return Ok(client),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

/// A counter of the times that the servers seem to have changed. An epoch ends if a server has ended a session or does not answer, or
/// if another server has taken its place. Sessions of earlier epochs are not used any more.
#[derive(Default)]
pub struct Epoch(AtomicU64);

impl Epoch {
    /// Returns the number of the current epoch.
    pub fn current(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends the epoch with this number, unless it has ended.
    pub fn end(&self, epoch: u64) {
        self.0.fetch_max(epoch + 1, Ordering::Relaxed);
    }
}

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The network or the server has refused the connection.
    #[error("{}", explain(.0))]
    Refused(postgres::Error),
    /// The server has accepted the connection, but does not answer.
    #[error("the server does not answer")]
    Silent,
    /// The system lacks what a connect needs: a descriptor, or memory for a thread.
    #[error("the system refuses a connection: {0}")]
    System(io::Error),
}
