//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use super::explain;
use crate::config::ConfigError;
use postgres::{Client, types::Type};
use refinery::Runner;
use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
    thread,
    time::{Duration, Instant},
};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// The key of the advisory lock: any number that no other program locks; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// How long a replica waits while another one migrates.
const LOCK_TIMEOUT: Duration = Duration::from_secs(600);

/// The migrations that a database needs.
pub struct Migrations(Runner);

impl Migrations {
    /// The built-in ones, or those of `dir`. Errors name the variable that it is set by.
    pub fn load(dir: Option<&Path>) -> Result<Migrations, ConfigError> {
        let Some(dir) = dir else {
            return Ok(Migrations(embedded::migrations::runner()));
        };
        let problem = |problem: String| ConfigError { variable: "MIGRATIONS_DIR", problem };
        let found = refinery::load_sql_migrations(dir).map_err(|error| problem(describe(error)))?;
        if found.is_empty() {
            return Err(problem(format!("{} holds no migrations (V1__name.sql, …)", dir.display())));
        }
        Ok(Migrations(Runner::new(&found)))
    }

    /// A number that changes with any of the migrations.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for migration in self.0.get_migrations() {
            (migration.version(), migration.checksum()).hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Whether exactly these were applied to the database. Only reads, so a role without the right to write, or a
    /// standby, will do; one round trip.
    pub fn are_applied(&self, client: &mut Client) -> bool {
        const ASK: &str = "select version::bigint, checksum::text from refinery_schema_history";
        let Ok(rows) = client.query_typed(ASK, &[]) else {
            return false;
        };
        let applied: HashSet<(i64, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let ours = self.0.get_migrations().iter();
        applied == ours.map(|one| (one.version().into(), one.checksum().to_string())).collect()
    }

    /// Applies what is missing.
    ///
    /// refinery takes no lock of its own, so a transaction of `locker` holds one meanwhile: not its session, which a
    /// pooler may lend to other clients. And refinery commits a migration apart from its history row unless told to group
    /// them: all that is missing is applied in one transaction.
    /// Blocks while another replica migrates, up to ten minutes, and as long as the migrations take. The error is
    /// one line.
    pub fn apply(self, client: &mut Client, locker: &mut Client) -> Result<(), String> {
        lock(locker)?;
        let report = self.0.set_grouped(true).run(client).map_err(describe)?;
        for migration in report.applied_migrations() {
            log::info!("applied migration {migration}");
        }
        // Ending the transaction releases the lock; it holds no other.
        locker.batch_execute("rollback").map_err(|error| explain(&error))
    }
}

/// Leaves a transaction open that holds the lock. It polls instead of waiting in a transaction: behind a pooler, waiting
/// transactions could take all connections, and leave none for the lock's holder to migrate with.
fn lock(locker: &mut Client) -> Result<(), String> {
    const TRY: &str = "select pg_try_advisory_xact_lock($1)";
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut logged = false;
    loop {
        let mut attempt = || {
            // A role's time-out is meant for the transactions of a service; this one waits for migrations.
            locker.batch_execute("begin; set local idle_in_transaction_session_timeout = 0")?;
            let row = locker.query_typed_one(TRY, &[(&LOCK, Type::INT8)])?;
            let locked: bool = row.get(0);
            if !locked {
                locker.batch_execute("rollback")?;
            }
            Ok(locked)
        };
        if attempt().map_err(|error: postgres::Error| explain(&error))? {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err("another session has held the migration lock for too long".to_owned());
        }
        if !logged {
            log::info!("waiting for another replica to finish its migrations");
            logged = true;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// refinery's own text and the database's, in one line.
fn describe(error: refinery::Error) -> String {
    let mut line = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        let text = match inner.downcast_ref::<postgres::Error>() {
            Some(error) => explain(error),
            None => inner.to_string(),
        };
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = inner.source();
    }
    line.replace('\n', " ")
}
