//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use super::{connect::Servers, explain, sqlstate::is_missing};
use crate::{config::ConfigError, error::StartError};
use postgres::{Client, Row};
use refinery::{Migration, Runner};
use std::{collections::BTreeSet, mem, path::Path, sync::Arc, thread, time::Duration};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// The key of the advisory lock: any number that no other program locks; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// The pause between two tries to get the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

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

/// The migrations that a database needs.
pub struct Migrations(Vec<Migration>);

impl Migrations {
    /// Loads the migrations that are built in, or the files of `dir`. Errors name the variable `MIGRATIONS_DIR`.
    pub fn load(dir: Option<&Path>) -> Result<Migrations, ConfigError> {
        let Some(dir) = dir else {
            return Ok(Migrations(embedded::migrations::runner().get_migrations().clone()));
        };
        let problem = |problem: String| ConfigError { variable: "MIGRATIONS_DIR", problem };
        let unreadable =
            |error| problem(format!("{}; name a directory of migrations, or none", explain(&error)));
        let each = refinery::load_sql_migrations(dir).map_err(unreadable)?;
        if each.is_empty() {
            return Err(problem(format!("{} holds no migrations (V1__name.sql, …)", dir.display())));
        }
        Ok(Migrations(each))
    }

    /// Returns numbers and checksums.
    fn keys(&self) -> BTreeSet<(i64, String)> {
        self.0.iter().map(key).collect()
    }

    /// Returns a number that changes with any of the migrations.
    #[cfg(any(test, feature = "testing"))]
    pub fn fingerprint(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};

        let mut hasher = DefaultHasher::new();
        self.keys().hash(&mut hasher);
        hasher.finish()
    }

    /// The statement whose rows [`Migrations::judge`] takes. The last columns say whether the server takes no changes, and
    /// whether a table is missing.
    pub const ASK: &str = "select version::bigint, checksum::text, \
        obj_description('refinery_schema_history'::regclass, 'pg_class'), \
        current_setting('transaction_read_only') = 'on', \
        exists (select from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts']) name \
            where to_regclass(name) is null) \
        from refinery_schema_history";

    /// Returns the names of those that are not in the rows of [`Migrations::ASK`], or are there in another form; `None` if
    /// these migrations were applied, and no others but newer, compatible ones. The error is one line: there are newer
    /// ones that are not compatible.
    pub fn judge(&self, rows: &[Row]) -> Result<Option<Vec<String>>, String> {
        let applied = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let mark: Option<String> = rows.first().and_then(|row| row.get(2));
        let fit = judge(&applied, &self.keys(), mark.as_deref())?;
        let missing = self.0.iter().filter(|one| !applied.contains(&key(one)));
        Ok((!fit).then(|| missing.map(ToString::to_string).collect()))
    }

    /// Returns the names of those that the database lacks (`V1__users`), as [`Migrations::judge`] does. Only reads, so that
    /// a standby, or a role without the right to write, will do. The error is one line.
    pub fn missing(&self, client: &mut Client) -> Result<Option<Vec<String>>, String> {
        match client.query_typed(Migrations::ASK, &[]) {
            Ok(rows) => self.judge(&rows),
            Err(error) if is_missing(&error) => {
                refuse_the_users_of_another_program(client)?;
                self.judge(&[])
            }
            Err(error) => {
                let hint =
                    "`userd grants ROLE`, as the role that owns the tables, prints the grants of a role";
                Err(format!("{}: {hint}", explain(&error)))
            }
        }
    }

    /// Applies the migrations that the database lacks; returns their names. If `may` is not set, an error says what to do.
    pub fn bring_up(&self, servers: &Arc<Servers>, may: bool) -> Result<Vec<String>, StartError> {
        let mut client = servers.connect_for_long()?;
        // A start goes on if the catalog cannot be read.
        for row in client.query_typed(OPEN_SCHEMAS, &[]).unwrap_or_default() {
            log::warn!("{}", row.get::<_, String>(0));
        }
        match self.missing(&mut client).map_err(StartError::Migration)? {
            None => Ok(Vec::new()),
            Some(missing) if !may => Err(StartError::NotMigrated(missing)),
            Some(_) => {
                self.apply(&mut client, &mut servers.connect_for_long()?).map_err(StartError::Migration)
            }
        }
    }

    /// Applies what is missing, in one transaction; returns the names. Blocks while another replica migrates, and as
    /// long as the migrations take. The error is one line.
    ///
    /// refinery takes no lock of its own, so a transaction of `locker` holds one meanwhile: not its session, which a
    /// pooler may lend to other clients.
    pub fn apply(&self, client: &mut Client, locker: &mut Client) -> Result<Vec<String>, String> {
        let line = |error: postgres::Error| explain(&error);
        // A role's time-outs are meant for a service.
        let no_bound = "set local idle_in_transaction_session_timeout = 0";
        let mut is_waiting = false;
        let lock = loop {
            let mut lock = locker.transaction().map_err(line)?;
            lock.batch_execute(no_bound).map_err(line)?;
            let row = lock.query_typed_one(&format!("select pg_try_advisory_xact_lock({LOCK})"), &[]);
            if row.map_err(line)?.get(0) {
                break lock;
            }
            // A wait within the statement would hold a connection of a pooler that the other replica may need.
            lock.rollback().map_err(line)?;
            if !mem::replace(&mut is_waiting, true) {
                log::info!("waiting for another replica to finish its migrations");
            }
            thread::sleep(LOCK_PAUSE);
        };
        let runner = Runner::new(&self.0).set_grouped(true);
        let report = runner.run(client).map_err(|error| explain(&error))?;
        for migration in report.applied_migrations() {
            log::info!("applied migration {migration}");
        }
        lock.rollback().map_err(line)?;
        Ok(report.applied_migrations().iter().map(ToString::to_string).collect())
    }
}

/// Returns a session of a database that has all migrations; see [`Servers::connect_for_long`].
#[cfg(feature = "command")]
pub fn connect_migrated(config: &crate::Config) -> Result<Client, StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let mut client = servers.connect_for_long()?;
    match migrations.missing(&mut client).map_err(StartError::Migration)? {
        None => Ok(client),
        Some(missing) => Err(StartError::NotMigrated(missing)),
    }
}

/// Tells whether a release with our migrations can use a database. The last migration says so itself, in a comment on
/// the history table: "migration 4 is compatible with migration 3".
fn judge(
    applied: &BTreeSet<(i64, String)>,
    ours: &BTreeSet<(i64, String)>,
    mark: Option<&str>,
) -> Result<bool, String> {
    let newest = |migrations: &BTreeSet<(i64, String)>| migrations.iter().map(|(version, _)| *version).max();
    let (found, known) = (newest(applied).unwrap_or_default(), newest(ours).unwrap_or_default());
    let all_others_are_newer = applied.difference(ours).all(|(version, _)| *version > known);
    let numbers =
        mark.and_then(|mark| mark.strip_prefix("migration ")?.split_once(" is compatible with migration "));
    let (last, oldest) = numbers.unwrap_or_default();
    let compatible = last.parse() == Ok(found) && oldest.parse::<i64>().is_ok_and(|oldest| oldest <= known);
    match applied.len() == ours.len() {
        // refinery says which one is missing or differs.
        _ if !ours.is_subset(applied) || !all_others_are_newer => Ok(false),
        is_equal if is_equal || compatible => Ok(true),
        _ => Err(format!(
            "a newer userd has migrated it, to migration {found}; this one knows those up to {known}, and no later \
             one says that it is compatible with them"
        )),
    }
}

fn key(migration: &Migration) -> (i64, String) {
    (migration.version().into(), migration.checksum().to_string())
}

/// Looks at a schema without migrations. The error is one line: another program has a table `users`, which the first
/// migration would create.
fn refuse_the_users_of_another_program(client: &mut Client) -> Result<(), String> {
    const ASK: &str = "select current_schema()::text \
        where to_regclass(quote_ident(current_schema()::text) || '.users') is not null";
    let rows = client.query_typed(ASK, &[]).map_err(|error| explain(&error))?;
    match rows.first() {
        None => Ok(()),
        Some(row) => Err(format!(
            "the schema {:?} has a table `users` of another program, which is left as it is: give userd a schema of its \
             own, or move the users over with `userd import` (docs/operations.md, \"What if the database has users already?\")",
            row.get::<_, String>(0)
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn databases_of_other_releases() {
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
            // Foreign migrations, not after the known ones.
            (&[0, 1, 2, 3], Some(mark(3, 2)), Some(false)),
            (&[1, 2, 4], Some(mark(4, 3)), Some(false)),
        ];
        for (applied, mark, expected) in rows {
            let found = judge(&set(applied), &set(&[1, 2, 3]), mark.as_deref());
            assert_eq!(found.clone().ok(), expected, "{applied:?} {mark:?}: {found:?}");
        }
    }
}
