//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use super::{
    explain,
    retry::{Backoff, until_unlocked},
};
use crate::config::ConfigError;
use postgres::{Client, Row, types::Type};
use refinery::{Migration, Report, Runner};
use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    mem,
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

mod schema;

use schema::applied;
pub use schema::{Applied, Schema};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// The key of the advisory lock: any number that no other program locks; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// How long a replica waits while another one migrates.
const LOCK_TIMEOUT: Duration = Duration::from_secs(600);

/// How often the other session is asked whether the migrations wait for a lock: twice at least before they give up.
const LOOK: Duration = Duration::from_millis(80);

/// The sessions that hold what `$1` waits for, and the seconds since their queries began, which not every role is told.
const BLOCKERS: &str = "\
    select blocker.pid, \
        pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() operator(pg_catalog.-) activity.query_start)::bigint \
    from pg_catalog.unnest(pg_catalog.pg_blocking_pids($1)) as blocker (pid) \
    left join pg_catalog.pg_stat_activity as activity on activity.pid operator(pg_catalog.=) blocker.pid";

/// Version and checksum of each built-in migration. refinery computes the checksums, too, but compiles a regular
/// expression for it that stays in memory. So refinery is asked only where a migration is missing.
const BUILT_IN: [(i64, u64); 3] =
    [(1, 5_077_283_989_988_423_540), (2, 9_867_118_586_847_828_274), (3, 8_665_029_034_673_831_865)];

/// The migrations that a database needs.
pub enum Migrations {
    BuiltIn,
    Directory(Vec<Migration>),
}

impl Migrations {
    /// The built-in ones, or those of `dir`. Errors name the variable that it is set by.
    pub fn load(dir: Option<&Path>) -> Result<Migrations, ConfigError> {
        let Some(dir) = dir else {
            return Ok(Migrations::BuiltIn);
        };
        let problem = |problem: String| ConfigError { variable: "MIGRATIONS_DIR", problem };
        let unreadable =
            |error| problem(format!("{}; name a directory of migrations, or none", explain(&error)));
        let found = refinery::load_sql_migrations(dir).map_err(unreadable)?;
        if found.is_empty() {
            return Err(problem(format!("{} holds no migrations (V1__name.sql, …)", dir.display())));
        }
        Ok(Migrations::Directory(found))
    }

    fn runner(&self) -> Runner {
        match self {
            Migrations::BuiltIn => embedded::migrations::runner(),
            Migrations::Directory(found) => Runner::new(found),
        }
    }

    /// A number that changes with any of the migrations.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.schema().0.hash(&mut hasher);
        hasher.finish()
    }

    /// What a database has when these were applied to it.
    pub fn schema(&self) -> Schema {
        Schema(match self {
            Migrations::BuiltIn => built_in(),
            Migrations::Directory(found) => found.iter().map(key).collect(),
        })
    }

    /// Whether these were applied to the database, and no others but newer, compatible ones. Only reads, so a role
    /// without the right to write, or a standby, will do; one round trip. The error is one line: the database has newer
    /// ones that are not compatible, or the role may not read which it has.
    pub fn are_applied(&self, client: &mut Client) -> Result<bool, String> {
        let Ok(rows) = client.query_typed(Schema::ASK, &[]) else {
            refuse_a_history_that_may_not_be_read(client)?;
            return refuse_a_missing_schema(client).map(|()| false);
        };
        let applied = self.schema().judge(&rows)?;
        if let Applied::AndNewer(found) = applied {
            log::info!("a newer userd has migrated the database, to migration {found}, which is compatible");
        }
        Ok(applied != Applied::No)
    }

    /// The names of those that the database lacks (`V1__users`), or has in another form. One round trip.
    pub fn missing(&self, client: &mut Client) -> Vec<String> {
        let applied = history(client);
        let runner = self.runner();
        let missing = runner.get_migrations().iter().filter(|one| !applied.contains(&key(one)));
        missing.map(|one| format!("V{}__{}", one.version(), one.name())).collect()
    }

    /// Applies what is missing.
    ///
    /// refinery takes no lock of its own, so a transaction of `locker` holds one meanwhile: not its session, which a
    /// pooler may lend to other clients. And refinery commits a migration apart from its history row unless told to
    /// group them: all that is missing is applied in one transaction. Blocks while another replica migrates, up to ten
    /// minutes, and as long as the migrations take. The names of those that were applied; the error is one line.
    pub fn apply(self, client: &mut Client, locker: &mut Client) -> Result<Vec<String>, String> {
        lock(locker)?;
        if matches!(self, Migrations::BuiltIn) {
            refuse_the_users_of_another_program(client)?;
        }
        let runner = self.runner().set_grouped(true);
        let on_retry = || log::info!("a table is locked; the migrations are retried");
        let report = until_unlocked(|| run(&runner, client, locker), on_retry)?;
        for migration in report.applied_migrations() {
            log::info!("applied migration {migration}");
        }
        // Ending the transaction releases the lock; it holds no other.
        locker.batch_execute("rollback").map_err(|error| explain(&error))?;
        Ok(report.applied_migrations().iter().map(ToString::to_string).collect())
    }
}

fn built_in() -> BTreeSet<(i64, String)> {
    BUILT_IN.map(|(version, checksum)| (version, checksum.to_string())).into()
}

/// What was applied to a database; nothing where that cannot be read.
fn history(client: &mut Client) -> BTreeSet<(i64, String)> {
    applied(&client.query_typed(Schema::ASK, &[]).unwrap_or_default())
}

/// The first row of an answer. The error is one line.
fn first(client: &mut Client, sql: &str) -> Result<Option<Row>, String> {
    let rows = client.query_typed(sql, &[]).map_err(|error| explain(&error))?;
    Ok(rows.into_iter().next())
}

fn key(migration: &Migration) -> (i64, String) {
    (migration.version().into(), migration.checksum().to_string())
}

/// The error is one line: there is no schema that tables could be in.
fn refuse_a_missing_schema(client: &mut Client) -> Result<(), String> {
    const ASK: &str =
        "select pg_catalog.current_setting('search_path') where pg_catalog.current_schema() is null";
    match first(client, ASK)? {
        None => Ok(()),
        Some(row) => Err(format!(
            "the search_path is {:?}, and the database has no such schema (or the role may not use it): make it with \
             `create schema`",
            row.get::<_, String>(0)
        )),
    }
}

/// A table that cannot be read may be missing. The error is one line: it is there, and the role may not read it. In a
/// schema that the role may not use, it looks like a missing one.
fn refuse_a_history_that_may_not_be_read(client: &mut Client) -> Result<(), String> {
    const ASK: &str = "\
        select current_user::text, nspname::text \
        from pg_catalog.pg_class join pg_catalog.pg_namespace on pg_namespace.oid operator(pg_catalog.=) relnamespace \
        where relname operator(pg_catalog.=) 'refinery_schema_history' and nspname operator(pg_catalog.=) any ( \
                select pg_catalog.btrim(name, ' \"') from pg_catalog.unnest( \
                    pg_catalog.string_to_array(pg_catalog.current_setting('search_path'), ',')) name) \
            and not (pg_catalog.has_schema_privilege(pg_namespace.oid, 'USAGE') \
                and pg_catalog.has_table_privilege(pg_class.oid, 'SELECT'))";
    match first(client, ASK)? {
        None => Ok(()),
        Some(row) => {
            let (role, schema): (String, String) = (row.get(0), row.get(1));
            Err(format!(
                "role {role:?} may not read refinery_schema_history in schema {schema:?}, where userd's tables are: \
                 `userd grants {role}`, as the role that owns them, prints the grants that it needs"
            ))
        }
    }
}

/// The first migration creates a table `users`. The error is one line: another program has one where it would be.
pub fn refuse_the_users_of_another_program(client: &mut Client) -> Result<(), String> {
    const ASK: &str = "select pg_catalog.current_schema() from pg_catalog.pg_class \
        where oid operator(pg_catalog.=) \
            pg_catalog.to_regclass(pg_catalog.format('%I.users', pg_catalog.current_schema()))";
    if history(client).iter().any(|(version, _)| *version == 1) {
        return Ok(());
    }
    match first(client, ASK)? {
        None => Ok(()),
        Some(row) => Err(format!(
            "the schema {:?} has a table `users` of another program, which is left as it is: give userd a schema of its \
             own, or move the users over with `userd import` (docs/operations.md, \"What if the database has users already?\")",
            row.get::<_, String>(0)
        )),
    }
}

/// The name of the schema, where it was renamed: functions that run with the owner's rights name the tables with the
/// schema that they were made in. The error is one line.
pub fn renamed_schema(client: &mut Client) -> Result<Option<String>, String> {
    const ASK: &str = "select pg_catalog.quote_ident(nspname) \
        from pg_catalog.pg_class join pg_catalog.pg_proc on pronamespace operator(pg_catalog.=) relnamespace \
            join pg_catalog.pg_namespace on pg_namespace.oid operator(pg_catalog.=) relnamespace \
        where pg_class.oid operator(pg_catalog.=) pg_catalog.to_regclass('users') \
            and proname operator(pg_catalog.=) 'page_fold' \
            and pg_catalog.strpos(prosrc, pg_catalog.format(' %I.page_counts', nspname)) operator(pg_catalog.=) 0";
    Ok(first(client, ASK)?.map(|row| row.get(0)))
}

/// Makes these functions for the name that the schema has now, which [`renamed_schema`] has told. Blocks while another
/// replica does so. The error is one line.
pub fn follow_the_schema(schema: &str, client: &mut Client, locker: &mut Client) -> Result<(), String> {
    lock(locker)?;
    let sql = format!(
        "begin; set local search_path = {schema}; select page_functions(), idempotency_functions(); commit"
    );
    client.batch_execute(&sql).map_err(|error| {
        format!("the schema {schema} was renamed, and its functions cannot be made anew: {}", explain(&error))
    })?;
    log::info!("the schema was renamed to {schema}: its functions were made anew");
    locker.batch_execute("rollback").map_err(|error| explain(&error))
}

/// One attempt. Where it waits for a lock, a line in the log names the sessions that hold it.
fn run(runner: &Runner, client: &mut Client, locker: &mut Client) -> Result<Report, refinery::Error> {
    // Behind a pooler this may be another session's by now: then the line is missing.
    let pid =
        client.query_typed_one("select pg_catalog.pg_backend_pid()", &[]).and_then(|row| row.try_get(0));
    thread::scope(|scope| {
        let (ended, end) = mpsc::channel();
        if let Ok(pid) = pid {
            // Without a thread for it the line is missing, too.
            let _ = thread::Builder::new().spawn_scoped(scope, move || name_blockers(locker, pid, &end));
        }
        let report = runner.run(client);
        drop::<mpsc::Sender<()>>(ended);
        report
    })
}

/// Asks until the attempt has ended, or waits for a lock.
fn name_blockers(locker: &mut Client, pid: i32, end: &Receiver<()>) {
    while end.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let Ok(blockers) = locker.query_typed(BLOCKERS, &[(&pid, Type::INT4)]) else { return };
        let name = |row: &Row| {
            let age: Option<i64> = row.get(1);
            let age = age.map(|seconds| format!(" (its query began {seconds} s ago)")).unwrap_or_default();
            format!("process {}{age}", row.get::<_, i32>(0))
        };
        if !blockers.is_empty() {
            let blockers: Vec<String> = blockers.iter().map(name).collect();
            let blockers = blockers.join(", ");
            log::warn!("the migrations wait for a lock of {blockers}; reads and writes wait behind them");
            return;
        }
    }
}

/// Leaves a transaction open that holds the lock. It polls instead of waiting in a transaction: behind a pooler,
/// waiting transactions could take all connections, and leave none for the lock's holder to migrate with.
fn lock(locker: &mut Client) -> Result<(), String> {
    const TRY: &str = "select pg_catalog.pg_try_advisory_xact_lock($1)";
    const PAUSE: Duration = Duration::from_millis(20);
    let mut backoff = Backoff::new(PAUSE, PAUSE, Instant::now() + LOCK_TIMEOUT);
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
        if !mem::replace(&mut logged, true) {
            log::info!("waiting for another replica to finish its migrations");
        }
        if !backoff.pause() {
            return Err("another session has held the migration lock for too long".to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{schema::judge, *};

    #[test]
    fn the_checksums_of_the_built_in_ones_are_those_of_refinery() {
        let runner = Migrations::BuiltIn.runner();
        let mut found: Vec<(i64, u64)> =
            runner.get_migrations().iter().map(|one| (one.version().into(), one.checksum())).collect();
        found.sort();
        assert_eq!(BUILT_IN[..], found, "a migration is new, or was changed");
    }

    #[test]
    fn what_will_do() {
        let set = |versions: &[i64]| versions.iter().map(|version| (*version, "x".to_owned())).collect();
        let mark = |last, oldest| format!("migration {last} is compatible with migration {oldest}");
        let rows: [(&[i64], Option<String>, Option<bool>); 11] = [
            (&[1, 2, 3], None, Some(true)),
            (&[1, 2], None, Some(false)),
            (&[], None, Some(false)),
            (&[1, 2, 3, 4], None, None),
            (&[1, 2, 3, 4], Some(mark(4, 3)), Some(true)),
            (&[1, 2, 3, 4], Some(mark(4, 4)), None),
            (&[1, 2, 3, 4, 5], Some(mark(5, 2)), Some(true)),
            // The last one says nothing.
            (&[1, 2, 3, 4, 5], Some(mark(4, 3)), None),
            (&[1, 2, 3, 4], Some("our users".to_owned()), None),
            // Others, and not after ours.
            (&[0, 1, 2, 3], Some(mark(3, 2)), Some(false)),
            (&[1, 2, 4], Some(mark(4, 3)), Some(false)),
        ];
        for (applied, mark, expected) in rows {
            let found = judge(&set(applied), &set(&[1, 2, 3]), mark.as_deref());
            assert_eq!(
                found.clone().ok().map(|applied| applied != Applied::No),
                expected,
                "{applied:?} {mark:?}: {found:?}"
            );
        }
    }
}
