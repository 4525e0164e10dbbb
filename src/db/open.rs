//! From the settings to the database: its servers, and sessions without bounds for migrations, exports and imports.

use super::{
    connect::{ConnectError, DatabaseConnection, Servers},
    migrate::Migrations,
    settings,
    sqlstate::is_final,
    target::Target,
    tls,
};
use crate::{config::Config, error::StartError};
use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// The schemas in which names are looked up and in which another role than the owner of the tables, or all of them, may
/// create, and what ends that.
pub(super) const OPEN_SCHEMAS: &str = "\
    select format('other roles may create tables and functions in the schema %1$s: \
            revoke create on schema %1$I from %2$s', nspname, \
        case when grantee = oid '0' then 'public' \
            else quote_ident(pg_get_userbyid(grantee)::text) end) \
    from pg_namespace, aclexplode(nspacl) \
    where nspname = any (current_schemas(false)) \
        and privilege_type = 'CREATE' and grantee <> nspowner \
        and grantee <> coalesce( \
            (select relowner from pg_class where oid = to_regclass('users')::oid), \
            (select oid from pg_roles where rolname = current_user)) \
    order by 1";

/// A database, and all that it takes to connect to it.
pub(crate) struct Opening {
    pub target: Target,
    pub servers: Arc<Servers>,
    timeout: Duration,
    set_up: String,
}

impl Opening {
    /// The database of these settings. Does not connect. Errors: [`StartError::Config`], files of TLS settings that
    /// cannot be used.
    pub fn new(config: &Config) -> Result<Opening, StartError> {
        config.check()?;
        let target = Target::new(config)?;
        for warning in &target.warnings {
            log::warn!("DATABASE_URL: {warning}");
        }
        let tls = tls::connector(&target.tls).map_err(|error| {
            StartError::Database(format!("{error} (DB_SSL_CA, or sslrootcert, sslcert or sslkey)"))
        })?;
        Ok(Opening {
            servers: Arc::new(Servers::new(&target, tls)),
            target,
            timeout: config.db_connect_timeout,
            // Migrations take as long as they take, whatever bounds the role has for the statements of a service.
            set_up: match config.db_prepared {
                true => format!("set statement_timeout = 0; set lock_timeout = 0; {}", settings::SEARCH_PATH),
                false => String::new(),
            },
        })
    }

    /// A session of a database that has all migrations; see [`Opening::connect`].
    #[cfg(feature = "command")]
    pub fn connect_migrated(&self, config: &Config) -> Result<DatabaseConnection, StartError> {
        let migrations = Migrations::load(config.migrations_dir.as_deref())?;
        let mut client = self.connect()?;
        match migrations.missing(&mut client).map_err(StartError::Migration)? {
            None => Ok(client),
            Some(missing) => Err(StartError::NotMigrated(missing)),
        }
    }

    /// A session without bounds for its statements. Tries until `db_connect_timeout` is up. A log line says why it
    /// waits: at first, when the reason changes, and every few seconds. A refusal that a retry would not change ends it
    /// at once.
    pub fn connect(&self) -> Result<DatabaseConnection, StartError> {
        const PAUSE: Duration = Duration::from_millis(500);
        const LINES_APART: Duration = Duration::from_secs(5);
        let deadline = Instant::now() + self.timeout;
        let mut logged: Option<(Instant, String)> = None;
        loop {
            // On a thread of its own, as a server that listens and says nothing would be waited for without a bound.
            let (servers, set_up) = (self.servers.clone(), self.set_up.clone());
            let (sender, connected) = mpsc::channel();
            let connect = move || drop(sender.send(servers.connect(&set_up)));
            thread::Builder::new().name("connect".to_owned()).spawn(connect).map_err(StartError::System)?;
            let error = match connected.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Ok((connection, _))) => return Ok(connection),
                Ok(Err(error)) => error,
                Err(_) => return Err(StartError::Database("the server does not answer".to_owned())),
            };
            let reason = error.to_string();
            let is_final = matches!(&error, ConnectError::Refused(error) if is_final(error));
            if is_final || Instant::now() + PAUSE > deadline {
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
        // A start goes on if the catalog cannot be read.
        for row in client.query_typed(OPEN_SCHEMAS, &[]).unwrap_or_default() {
            log::warn!("{}", row.get::<_, String>(0));
        }
        match migrations.missing(&mut client).map_err(StartError::Migration)? {
            None => Ok(Vec::new()),
            Some(missing) if !may => Err(StartError::NotMigrated(missing)),
            Some(_) => migrations.apply(&mut client, &mut *self.connect()?).map_err(StartError::Migration),
        }
    }
}
