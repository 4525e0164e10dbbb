//! Opens database sessions as the settings say. If a server is gone, TCP keepalives end its sessions within seconds. If
//! a server process is suspended and its kernel still answers, a connect is given up after a time limit, and an open
//! session waits until the process goes on or ends.
//!
//! `time_limit` connects to one host within a time limit, `password` reads the password, `pooler` finds out whether a
//! pooler lends its sessions, and `retries` connects with retries.
#![cfg_attr(not(feature = "tls"), allow(clippy::clone_on_copy, reason = "without TLS, a connector is empty"))]

mod password;
mod pooler;
mod retries;
mod time_limit;

use super::session::Session;
use super::sqlstate::explain;
use super::target::DbTarget;
use super::tls::{self, Connector};
use crate::config::Config;
use crate::error::StartError;
use parking_lot::Mutex;
use password::PasswordSource;
pub use pooler::{POOLER_NOTE, TransactionPooling};
use postgres::Client;
use postgres::config::TargetSessionAttrs;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use time_limit::{ConnectBackoff, MAX_CONNECT_TIME};

/// The database servers that the settings name, and all that is needed to connect to them.
pub struct DbHosts {
    /// The parsed connection string.
    pub target: DbTarget,
    /// The current epoch. A new one begins when a server fails or is replaced, and ends the use of older sessions.
    pub epoch: SessionEpoch,
    tls: Connector,
    config: Config,
    password_source: PasswordSource,
    /// Tells whether a pooler lends its sessions for one transaction each, as far as this process knows.
    pooling: Mutex<TransactionPooling>,
    /// The statement that sets the search_path of a new session to the schema of the tables. Not set until the start
    /// has found this schema.
    search_path_sql: OnceLock<String>,
    /// The backoff of connects, for each host of `target`.
    connect_backoffs: Vec<ConnectBackoff>,
    /// The time of the last search for a server that takes changes.
    last_primary_check_at: Mutex<Option<Instant>>,
}

impl DbHosts {
    /// Returns the servers that the settings name, without connecting. Fails if a setting, or a file that the TLS
    /// settings name, cannot be used.
    pub fn new(config: &Config) -> Result<Arc<DbHosts>, StartError> {
        config.check()?;
        let target = DbTarget::new(config)?;
        for warning in &target.warnings {
            log::warn!("DATABASE_URL: {warning}");
        }
        let tls = tls::connector(&target.tls).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        Ok(Arc::new(DbHosts {
            epoch: SessionEpoch::default(),
            tls,
            config: config.clone(),
            password_source: PasswordSource::new(config, &target),
            pooling: Mutex::new(TransactionPooling::from_config(config)),
            search_path_sql: OnceLock::new(),
            connect_backoffs: target.hosts.iter().map(|_| ConnectBackoff::default()).collect(),
            last_primary_check_at: Mutex::default(),
            target,
        }))
    }

    /// Returns true if the settings accept only a server that takes changes (a primary).
    pub fn wants_primary(&self) -> bool {
        self.target.hosts[0].get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Sets the search_path of this session and of later sessions to the schema `name`, so that userd keeps its tables
    /// if another schema is created. Puts `pg_temp` last, so that no temporary table hides one of userd's. Does not
    /// change this session if a pooler may lend the session to other clients.
    pub(super) fn set_schema(&self, client: &mut Client, name: &str) -> Result<(), postgres::Error> {
        let statement = || format!("set search_path = \"{}\", pg_temp; ", name.replace('"', "\"\""));
        let statement = self.search_path_sql.get_or_init(statement);
        if self.pooling().allows_set_command() { client.batch_execute(statement) } else { Ok(()) }
    }

    pub fn statement_timeout(&self) -> Duration {
        self.config.limits.statement_timeout()
    }

    /// Opens a session, and executes `setup_sql` in it unless a pooler may lend the session to other clients. Blocks
    /// for at most two seconds for each host, or for a longer `connect_timeout`.
    pub(super) fn connect(&self, setup_sql: &str) -> Result<Session, ConnectError> {
        // Reads the epoch before connecting. If another server takes over meanwhile, the new session then belongs to
        // the earlier epoch, and is not used.
        let epoch = self.epoch.current();
        let connection = self.open_session(setup_sql, None, Duration::MAX)?;
        let prepared_statements = self.pooling().allows_prepared_statements().then(Vec::new);
        Ok(Session { connection, prepared_statements, epoch, last_answer_at: Instant::now() })
    }

    /// Connects to find out whether a server takes changes (is a primary). Tries at most once a second, and returns
    /// false in between, because a database may take no changes for a long time, and each refused change would connect.
    pub fn finds_primary(&self) -> bool {
        const PRIMARY_CHECK_INTERVAL: Duration = Duration::from_secs(1);
        let Some(mut last) = self.last_primary_check_at.try_lock() else { return false };
        if last.is_some_and(|at: Instant| at.elapsed() < PRIMARY_CHECK_INTERVAL) {
            return false;
        }
        let opened = self.open_session("", Some(TargetSessionAttrs::ReadWrite), MAX_CONNECT_TIME);
        *last = Some(Instant::now());
        opened.is_ok()
    }

    /// Opens a session with the first host that answers and is of the kind `attrs`, such as a primary. If `attrs` is
    /// `None`, the kind is that of the connection string. Blocks for at most `max_time`.
    fn open_session(
        &self,
        setup_sql: &str,
        attrs: Option<TargetSessionAttrs>,
        max_time: Duration,
    ) -> Result<Client, ConnectError> {
        let (began, mut refusal) = (Instant::now(), ConnectError::NoAnswer);
        for (host, backoff) in self.target.hosts.iter().zip(&self.connect_backoffs) {
            if backoff.is_paused() {
                refusal = ConnectError::NoAnswer;
                continue;
            }
            let mut host = host.clone();
            host.target_session_attrs(attrs.unwrap_or(host.get_target_session_attrs()));
            if let Some(password) = self.password_source.read() {
                host.password(password);
            }
            let search_path = self.search_path_sql.get().map_or("", String::as_str);
            let allows_set = self.pooling().allows_set_command();
            let setup_sql = if allows_set { format!("{search_path}{setup_sql}") } else { String::new() };
            let left = max_time.saturating_sub(began.elapsed());
            match backoff.connect(host, self.tls.clone(), setup_sql, left) {
                Ok(client) => return Ok(client),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

/// The number of the current epoch. An epoch ends when a server has ended a session or does not answer, or when another
/// server has taken its place. Sessions of earlier epochs are not used any more.
#[derive(Default)]
pub struct SessionEpoch(AtomicU64);

impl SessionEpoch {
    /// Returns the number of the current epoch.
    pub fn current(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends the epoch with the number `epoch`, unless it has ended already.
    pub fn end(&self, epoch: u64) {
        self.0.fetch_max(epoch + 1, Ordering::Relaxed);
    }
}

/// The reason why a connect has failed.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The network or the server has refused the connection.
    #[error("{}", explain(.0))]
    Refused(postgres::Error),
    /// The host has not answered in time, or it is too early to connect to the host again.
    #[error("the server does not answer")]
    NoAnswer,
    /// The system lacks what a connect needs: a file descriptor, or memory for a thread.
    #[error("the system refuses a connection: {0}")]
    NoResources(io::Error),
}
