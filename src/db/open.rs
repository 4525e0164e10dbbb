//! From the settings to the database: its servers, and sessions without bounds for migrations, exports and imports.

use super::{
    migrate::Migrations,
    servers::Servers,
    target::Target,
    tls,
    watchdog::{Connection, Watchdog},
};
use crate::{config::Config, error::StartError};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A database, and all that it takes to connect to it.
pub(crate) struct Opening {
    pub target: Target,
    pub servers: Arc<Servers>,
    timeout: Duration,
    set_up: &'static str,
}

impl Opening {
    /// The database of these settings. Does not connect. Errors: [`StartError::Config`], files of TLS settings that
    /// cannot be used, no thread.
    pub fn new(config: &Config) -> Result<Opening, StartError> {
        config.check()?;
        let target = Target::new(config)?;
        let tls = tls::connector(target.tls.as_ref()).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        let watchdog = Watchdog::start().map_err(StartError::System)?;
        Ok(Opening {
            servers: Arc::new(Servers::new(&target, tls, watchdog)),
            target,
            timeout: config.db_connect_timeout,
            // Migrations take as long as they take, whatever bounds the role has for the statements of a service.
            set_up: match config.db_prepared {
                true => "set statement_timeout = 0; set lock_timeout = 0",
                false => "",
            },
        })
    }

    /// A session of a database that has all migrations; see [`Opening::connect`].
    #[cfg(feature = "command")]
    pub fn connect_migrated(&self, config: &Config) -> Result<Connection, StartError> {
        let migrations = Migrations::load(config.migrations_dir.as_deref())?;
        let mut client = self.connect()?;
        match migrations.are_applied(&mut client).map_err(StartError::Migration)? {
            true => Ok(client),
            false => Err(StartError::NotMigrated(migrations.missing(&mut client))),
        }
    }

    /// A session without bounds for its statements. Tries until `db_connect_timeout` is up. A log line says why it
    /// waits: at first, when the reason changes, and every few seconds. A refusal that a retry would not change ends it
    /// at once.
    pub fn connect(&self) -> Result<Connection, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const LINES_APART: Duration = Duration::from_secs(5);
        let deadline = Instant::now() + self.timeout;
        let mut logged: Option<(Instant, String)> = None;
        loop {
            let error = match self.servers.connect(self.set_up) {
                Ok((connection, _)) => return Ok(connection),
                Err(error) => error,
            };
            let reason = error.to_string();
            if error.is_final() || Instant::now() + PAUSE > deadline {
                return Err(StartError::Database(reason));
            }
            let is_known = |(at, last): &(Instant, String)| *last == reason && at.elapsed() < LINES_APART;
            if !logged.as_ref().is_some_and(is_known) {
                log::warn!("cannot connect to the database yet: {reason}");
                logged = Some((Instant::now(), reason));
            }
            thread::sleep(PAUSE);
        }
    }

    /// Applies the migrations that are missing; returns their names. If `may` is not set, an error says what to do.
    pub fn migrate(&self, migrations: &Migrations, may: bool) -> Result<Vec<String>, StartError> {
        let mut client = self.connect()?;
        if migrations.are_applied(&mut client).map_err(StartError::Migration)? {
            return Ok(Vec::new());
        }
        if !may {
            let missing = migrations.missing(&mut client);
            return Err(StartError::NotMigrated(missing));
        }
        migrations.apply(&mut client, &mut *self.connect()?).map_err(StartError::Migration)
    }
}
