//! Opens sessions of the database by the settings. TCP notices within seconds that a server is gone. If a server is stopped
//! and its kernel still answers, a connect is given up, and an open session waits until the server goes on or ends.
//!
//! One file for each thing that a connect has to know: `bounded` (how long, and which hosts did not answer), `password`,
//! `pooler` (whether sessions keep settings); and one for the first session, `start`.
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
use bounded::{CONNECT_TIMEOUT, Unanswered};
use parking_lot::Mutex;
use password::Password;
pub use pooler::{POOLER_LENDS, Sessions};
use postgres::Client;
use postgres::config::{LoadBalanceHosts, TargetSessionAttrs};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The servers of a connection string, and all that it takes to connect to them.
pub struct Servers {
    /// The connection string.
    pub target: Target,
    /// The epoch in which sessions are opened now.
    pub epoch: Epoch,
    tls: Connector,
    config: Config,
    password: Password,
    /// Own sessions, or sessions that a pooler lends.
    sessions: Mutex<Sessions>,
    /// The statement that has sessions use the schema of the tables, once that is found.
    search_path: OnceLock<String>,
    /// Connects that were not answered, for each host.
    unanswered: Vec<Unanswered>,
    /// When a server that takes changes was looked for last.
    looked_for_primary: Mutex<Option<Instant>>,
}

impl Servers {
    /// Returns the servers of these settings. Connects to none. Errors: [`StartError::Config`], files of TLS settings that cannot
    /// be used.
    pub fn new(config: &Config) -> Result<Arc<Servers>, StartError> {
        config.check()?;
        let target = Target::new(config)?;
        for warning in &target.warnings {
            log::warn!("DATABASE_URL: {warning}");
        }
        let tls = tls::connector(&target.tls).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        Ok(Arc::new(Servers {
            epoch: Epoch::default(),
            tls,
            config: config.clone(),
            password: Password::new(config, &target),
            sessions: Mutex::new(Sessions::of(config)),
            search_path: OnceLock::new(),
            unanswered: target.hosts.iter().map(|_| Unanswered::default()).collect(),
            looked_for_primary: Mutex::default(),
            target,
        }))
    }

    /// Returns true if only a server that takes changes is accepted.
    pub fn wants_primary(&self) -> bool {
        self.target.hosts[0].get_target_session_attrs() == TargetSessionAttrs::ReadWrite
    }

    /// Has this session and later ones look names up in this schema, and in that of temporary tables last, also if a schema
    /// appears that the settings of the role name first. Does nothing if a pooler lends the sessions.
    pub(super) fn keep_schema(&self, client: &mut Client, name: &str) -> Result<(), postgres::Error> {
        let statement = || format!("set search_path = \"{}\", pg_temp; ", name.replace('"', "\"\""));
        let statement = self.search_path.get_or_init(statement);
        if self.sessions().keep_settings() { client.batch_execute(statement) } else { Ok(()) }
    }

    /// Returns the longest time that a statement of a service may take.
    pub fn statement_timeout(&self) -> Duration {
        self.config.limits.statement_timeout()
    }

    /// Returns a session, in which `set_up` was executed if sessions keep settings. Blocks for two seconds with each host, or
    /// for a longer `connect_timeout`.
    pub(super) fn connect(&self, set_up: &str) -> Result<Session, ConnectError> {
        // The epoch is read before connecting: if it ends meanwhile, the new connection is suspect, too.
        let epoch = self.epoch.now();
        let connection = self.open(set_up, None, Duration::MAX)?;
        let statements = self.sessions().keep_statements().then(Vec::new);
        Ok(Session { connection, statements, epoch, answered: Instant::now() })
    }

    /// Returns true if a new session takes changes. Looks at most once a second, as a database may take none for long.
    pub fn finds_primary(&self) -> bool {
        const PAUSE: Duration = Duration::from_secs(1);
        let Some(mut last) = self.looked_for_primary.try_lock() else { return false };
        if last.is_some_and(|at: Instant| at.elapsed() < PAUSE) {
            return false;
        }
        let found = self.open("", Some(TargetSessionAttrs::ReadWrite), CONNECT_TIMEOUT);
        *last = Some(Instant::now());
        found.is_ok()
    }

    /// Returns a session of the first host that gives one within this time.
    fn open(
        &self,
        set_up: &str,
        attrs: Option<TargetSessionAttrs>,
        longest: Duration,
    ) -> Result<Client, ConnectError> {
        let (began, mut refusal) = (Instant::now(), ConnectError::Silent);
        let mut hosts: Vec<_> = self.target.hosts.iter().zip(&self.unanswered).collect();
        if self.target.hosts[0].get_load_balance_hosts() == LoadBalanceHosts::Random {
            hosts.sort_by_cached_key(|_| RandomState::new().hash_one(()));
        }
        for (host, unanswered) in hosts {
            if unanswered.is_spared() {
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
            let left = longest.saturating_sub(began.elapsed());
            match unanswered.connect(host, self.tls.clone(), set_up, left) {
                Ok(client) => return Ok(client),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

/// The number of the epoch in which sessions are opened. Sessions of earlier ones are not used any more: a server has ended
/// one of them or does not answer, or another server has taken its place.
#[derive(Default)]
pub struct Epoch(AtomicU64);

impl Epoch {
    /// Returns the number of this epoch.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends an epoch, if it has not ended yet.
    pub fn end(&self, epoch: u64) {
        self.0.fetch_max(epoch + 1, Ordering::Relaxed);
    }
}

/// The reason why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The network, or the server, refused.
    #[error("{}", explain(.0))]
    Refused(postgres::Error),
    /// The server has accepted the connection, and does not answer.
    #[error("the server does not answer")]
    Silent,
    /// The system has nothing to connect with: no descriptor is left, or no memory for a thread.
    #[error("the system refuses a connection: {0}")]
    System(io::Error),
}
