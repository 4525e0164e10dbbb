//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use super::{
    connect::{Servers, within},
    explain, settings,
    sqlstate::{is_missing, is_of_other_columns},
};
use crate::{config::ConfigError, error::StartError};
use postgres::{Client, Row, Transaction, types::Type};
use refinery::{Migration, Runner};
use std::{collections::BTreeSet, mem, path::Path, sync::Arc, thread, time::Duration};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// The key of the advisory lock: any number that no other program locks; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// Description of a pooler in transaction mode.
pub(super) const LENT: &str = "a pooler lends its sessions for one transaction each";

const TWO_SESSIONS: &str = "migrations need two sessions at once (default_pool_size of PgBouncer)";

const TRANSACTIONS: &str = "migrations need transactions (pool_mode of PgBouncer)";

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

/// Obstacles that keep the role from making tables, with the statement that ends each.
pub(super) const BLOCKED: &str = "\
    select case when pg_is_in_recovery() then 'it is a standby: DATABASE_URL has to name the primary' else \
        format('it takes no changes: `begin read write; alter role %I in database %I \
            set default_transaction_read_only = off; commit`', current_user, current_database()) end \
    where current_setting('transaction_read_only') = 'on' \
    union all \
    select format('the role may not create tables in its schema: `grant create on schema %1$I to %2$I`', \
        current_schema(), current_user) \
    where not has_schema_privilege(current_schema()::text, 'CREATE') \
    union all \
    (select format('the role may not create tables in its schema, as its search_path has none (3F000): ' || \
        case when nspname is null then '`create schema %I authorization %I`' \
            when exists (select from pg_class where relnamespace = n.oid and relname = 'refinery_schema_history') \
            then '`grant usage on schema %I to %I`' else '`grant usage, create on schema %I to %I`' end, name, current_user) \
    from regexp_matches(current_setting('search_path'), '\"((?:[^\"]|\"\")+)\"|([^\",\\s]+)', 'g') with ordinality as path (parts, position), \
        lateral (select coalesce(nullif(coalesce(replace(parts[1], '\"\"', '\"'), lower(parts[2])), '$user'), current_user::text) as name) as named \
        left join pg_namespace n on nspname::text = name \
    where current_schema() is null order by nspname is null, position limit 1) \
    union all \
    select format('the role may not create tables, as its search_path is empty (3F000): \
        `alter role %I in database %I set search_path = \"$user\", public`', current_user, current_database()) \
    where current_setting('search_path') in ('', '\"\"')";

/// Columns and rules of another program that fail creates, with the ways out. A rule that another program needs stays if
/// userd goes into another schema.
pub(super) const ADDED: &str = "\
    with ours as ( \
        select oid, relname, format('%I.%I', current_schema(), relname) as qualified \
        from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts']) name \
            join pg_class on oid = to_regclass(name)::oid \
    ) \
    select format('creates get 500, as another program''s column %1$I of %2$s has no default: \
        `alter table %2$s alter %1$I drop not null`, or give userd a schema of its own', attname, qualified) \
    from ours join pg_attribute on attrelid = oid \
    where attnum > 0 and not attisdropped and attnotnull and not atthasdef and attidentity::text = '' \
        and attname::text <> all (array['id', 'name', 'email', 'created_at', 'updated_at', 'version', 'user_id', \
            'password_hash', 'key', 'fingerprint', 'kept_since', 'block', 'n']) \
    union all \
    select format('changes get 500, as another program''s rule %1$I on %2$s rewrites them: \
        `drop rule %1$I on %2$s`, or give userd a schema of its own', rulename, qualified) \
    from ours join pg_rewrite on ev_class = ours.oid";

/// The tables of which the role sees some rows only. $1: their names.
pub(super) const ROW_SECURITY: &str = "\
    select format('row-level security hides rows of %s from the role, and totals are those of all rows: `%s`', name, \
        case when pg_has_role(relowner, 'USAGE') \
            then format('alter table %I.%I no force row level security', current_schema(), name) \
            else format('alter role %I bypassrls', current_user) end) \
    from unnest($1::text[]) name join pg_class on oid = to_regclass(name)::oid \
    where row_security_active(oid)";

/// The first of these names that something in the schema has. $1: names.
const TAKEN: &str = "\
    select format('the schema \"%s\" has %s `%s`', current_schema(), kind, name) \
    from pg_namespace n, lateral ( \
        select relname::text as name, case relkind when 'v' then 'a view' when 'm' then 'a materialized view' \
            when 'f' then 'a foreign table' when 'S' then 'a sequence' when 'c' then 'a type' \
            when 'i' then 'an index' else 'a table' end as kind \
        from pg_class where relnamespace = n.oid \
        union all select proname::text, 'a function' from pg_proc where pronamespace = n.oid and pronargs = 0 \
        union all select typname::text, 'a type' from pg_type where typnamespace = n.oid and typrelid = oid '0' \
    ) things \
    where nspname::text = current_schema()::text and name = any ($1::text[]) \
    order by array_position($1, name), kind <> 'a table' limit 1";

const HISTORY: &str = "refinery_schema_history";

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
    /// a standby, or a role without the right to write, will do. The error is one line: also if another program has the
    /// name of something that they make.
    pub fn missing(&self, client: &mut Client) -> Result<Option<Vec<String>>, String> {
        // Another replica may have migrated between the two questions: its tables are no other program's.
        self.look(client).or_else(|_| self.look(client))
    }

    /// Looks once for [`Migrations::missing`]: first at the history, then at names.
    fn look(&self, client: &mut Client) -> Result<Option<Vec<String>>, String> {
        let rows = match client.query_typed(Migrations::ASK, &[]) {
            Ok(rows) => rows,
            Err(error) if is_missing(&error) => Vec::new(),
            Err(error) if is_of_other_columns(&error) => {
                refuse_names_of_another_program(client, &[HISTORY])?;
                return Err(explain(&error));
            }
            Err(error) => {
                let hint =
                    "`userd grants ROLE`, as the role that owns the tables, prints the grants of a role";
                return Err(format!("{}: {hint}", explain(&error)));
            }
        };
        if rows.is_empty() {
            let hidden = client.query_typed(ROW_SECURITY, &[(&vec![HISTORY], Type::TEXT_ARRAY)]);
            if let Some(row) = hidden.map_err(|error| explain(&error))?.first() {
                return Err(row.get(0));
            }
        } else if !rows.iter().any(|row| self.keys().first() == Some(&(row.get(0), row.get(1)))) {
            refuse_names_of_another_program(client, &[HISTORY])?;
        }
        let missing = self.judge(&rows)?;
        let lacks = |one: &&Migration| missing.as_ref().is_some_and(|names| names.contains(&one.to_string()));
        let sql = self.0.iter().filter(lacks).filter_map(Migration::sql);
        let names: Vec<&str> = sql.flat_map(names_in).collect();
        if !names.is_empty() {
            refuse_names_of_another_program(client, &names)?;
        }
        Ok(missing)
    }

    /// Applies the migrations that the database lacks; returns their names. If `may` is not set, an error says what to do.
    /// Warns of what makes a service unsafe or fails its requests.
    pub fn bring_up(&self, servers: &Arc<Servers>, may: bool) -> Result<Vec<String>, StartError> {
        let mut client = servers.connect_for_long()?;
        let missing = self.missing(&mut client);
        warn(servers, &mut client, missing.is_ok());
        match missing.map_err(StartError::Migration)? {
            None => Ok(Vec::new()),
            Some(missing) if !may => Err(StartError::NotMigrated(missing)),
            Some(_) => {
                let blocked = lines(&mut client, BLOCKED);
                if !blocked.is_empty() {
                    return Err(StartError::Migration(blocked.join("; ")));
                }
                let locker = second_session(servers)?;
                self.apply(client, locker, servers.connect_timeout()).map_err(StartError::Migration)
            }
        }
    }

    /// Applies what is missing, in one transaction; returns the names. Blocks while another replica migrates, and as
    /// long as the migrations take. The error is one line.
    ///
    /// `client` has to answer within `connect_timeout` while `locker` has its session.
    /// refinery takes no lock of its own, so a transaction of `locker` holds one meanwhile: not its session, which a
    /// pooler may lend to other clients.
    pub fn apply(
        &self,
        client: Client,
        mut locker: Client,
        connect_timeout: Duration,
    ) -> Result<Vec<String>, String> {
        let line = |error: postgres::Error| explain(&error);
        // A role's time-outs are meant for a service.
        let no_bound = "set local idle_in_transaction_session_timeout = 0";
        let mut is_waiting = false;
        let lock = loop {
            let mut lock = begin(&mut locker)?;
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
        let mut client = answering(client, connect_timeout)?;
        let runner = Runner::new(&self.0).set_grouped(true);
        let report = runner.run(&mut client).map_err(|error| explain(&error))?;
        for migration in report.applied_migrations() {
            log::info!("applied migration {migration}");
        }
        lock.rollback().map_err(line)?;
        Ok(report.applied_migrations().iter().map(ToString::to_string).collect())
    }
}

/// Looks if migrations could have two sessions at once, and transactions, which some poolers do not give. The error is one line.
#[cfg(feature = "command")]
pub(super) fn refuse_one_session(servers: &Servers, client: &mut Client) -> Result<(), String> {
    let other = second_session(servers).map_err(|error| error.to_string())?;
    let _lock = begin(client)?;
    answering(other, servers.connect_timeout()).map(drop)
}

fn second_session(servers: &Servers) -> Result<Client, StartError> {
    servers.connect_for_long().map_err(|error| match error {
        StartError::Database(line) => StartError::Database(format!("{line}; {TWO_SESSIONS}")),
        error => error,
    })
}

fn begin(client: &mut Client) -> Result<Transaction<'_>, String> {
    client.transaction().map_err(|error| format!("{}; {TRANSACTIONS}", explain(&error)))
}

/// Returns the session, which has to answer within this time while another one has a transaction.
fn answering(mut client: Client, longest: Duration) -> Result<Client, String> {
    let answer = move || client.batch_execute("select 1").map(|()| client);
    let answered = within(longest, &Arc::default(), answer).map_err(|error| error.to_string());
    let answered = answered.and_then(|answered| answered.map_err(|error| explain(&error)));
    answered.map_err(|error| format!("{error}; {TWO_SESSIONS}"))
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

/// Returns the names of the tables, indexes and functions that a migration makes.
fn names_in(sql: &str) -> impl Iterator<Item = &str> {
    let made = sql.lines().filter_map(|line| line.strip_prefix("create "));
    let made = made.filter(|line| !line.starts_with("trigger "));
    made.filter_map(|line| {
        line.split([' ', '(']).find(|word| !["unique", "table", "index", "function"].contains(word))
    })
}

/// Looks for these names in the schema. The error is one line: something of another program has one.
fn refuse_names_of_another_program(client: &mut Client, names: &[&str]) -> Result<(), String> {
    let rows = client.query_typed(TAKEN, &[(&names, Type::TEXT_ARRAY)]).map_err(|error| explain(&error))?;
    rows.first().map_or(Ok(()), |row| {
        let thing: String = row.get(0);
        Err(format!(
            "{thing} of another program, which is left as it is: give userd a schema of its own (docs/operations.md, \
             \"What if the database has users already?\")"
        ))
    })
}

/// Warns of what makes a service unsafe or fails its requests; once of a pooler, with the settings that the role lacks.
/// Columns and rules are another program's business if the tables are.
fn warn(servers: &Servers, client: &mut Client, are_ours: bool) {
    let looks: &[&str] = if are_ours { &[OPEN_SCHEMAS, ADDED] } else { &[OPEN_SCHEMAS] };
    for line in looks.iter().flat_map(|sql| lines(client, sql)) {
        log::warn!("{line}");
    }
    if !servers.prepared() {
        let found = servers.found_pooler().then(|| format!("{LENT}: userd serves as with DB_PREPARED=false"));
        let lacking = settings::lacking(client, servers.statement_timeout()).unwrap_or_default();
        let all: Vec<String> = found.into_iter().chain(lacking).collect();
        if !all.is_empty() {
            log::warn!("{}", all.join("; "));
        }
    }
}

/// The rows of a statement, each of which is a line. A start goes on if the catalog cannot be read.
fn lines(client: &mut Client, sql: &str) -> Vec<String> {
    client.query_typed(sql, &[]).unwrap_or_default().iter().map(|row| row.get(0)).collect()
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
