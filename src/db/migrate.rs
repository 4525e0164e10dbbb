//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use crate::error::explain;
use postgres::{Client, types::Type};
use refinery::Runner;
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
    thread,
    time::{Duration, Instant},
};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// Any number will do that other users of the database do not lock; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// How long a replica waits while another one migrates.
const LOCK_TIMEOUT: Duration = Duration::from_secs(600);

/// Applies what is missing: the built-in migrations, or those of `dir`.
///
/// refinery takes no lock of its own, so a transaction of `locker` holds one meanwhile: not the session, which a
/// pooler may lend to others. And refinery commits a migration apart from its history row unless told to group
/// them: all that is missing is applied in one transaction.
/// Blocks while another replica migrates, and as long as the migrations take. The error is one line.
pub fn migrate(client: &mut Client, locker: &mut Client, dir: Option<&Path>) -> Result<(), String> {
    let runner = runner(dir)?;
    lock(locker)?;
    let report = runner.set_grouped(true).run(client).map_err(describe)?;
    for migration in report.applied_migrations() {
        log::info!("applied migration {migration}");
    }
    // It locks nothing else, so its end is the unlocking.
    locker.batch_execute("rollback").map_err(|error| explain(&error))
}

/// A number that changes with any of the migrations that [`migrate`] would apply.
pub fn fingerprint(dir: Option<&Path>) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    for migration in runner(dir)?.get_migrations() {
        (migration.version(), migration.checksum()).hash(&mut hasher);
    }
    Ok(hasher.finish())
}

fn runner(dir: Option<&Path>) -> Result<Runner, String> {
    Ok(match dir {
        None => embedded::migrations::runner(),
        Some(dir) => Runner::new(&load(dir)?),
    })
}

fn load(dir: &Path) -> Result<Vec<refinery::Migration>, String> {
    let found = refinery::load_sql_migrations(dir).map_err(describe)?;
    if found.is_empty() {
        return Err(format!("{} holds no migrations (V1__name.sql, …)", dir.display()));
    }
    Ok(found)
}

/// Leaves a transaction open that holds the lock. None is open while it waits: behind a pooler that would keep
/// others, the lock's holder among them, from the few connections that there are.
fn lock(locker: &mut Client) -> Result<(), String> {
    const TRY: &str = "select pg_try_advisory_xact_lock($1)";
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut told = false;
    loop {
        let mut attempt = || {
            locker.batch_execute("begin")?;
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
        if !told {
            log::info!("waiting for another replica to finish its migrations");
            told = true;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// refinery's own text with the database's beneath it, in one line.
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
