//! Applies the migrations of the schema. The crate refinery applies them in one transaction. An advisory lock makes
//! other replicas wait meanwhile.

use super::connect::DbHosts;
use super::findings::{FIND_HIDDEN_ROWS, FIND_MIGRATION_OBSTACLES, get_findings};
use super::session::query_lines;
use super::sqlstate::{is_missing_table, is_wrong_column, lacks_right};
use super::{ALL_TABLES, explain};
use crate::error::{ConfigError, StartError};
use postgres::{Client, Row, Transaction, types::Type};
use refinery::{Migration, Runner};
use std::{collections::BTreeSet, error::Error, fs, mem, path::Path, thread, time::Duration};

/// The migrations in the program.
mod built_in {
    refinery::embed_migrations!("migrations");
}

/// Tries to get the advisory lock. Its number spells "userd" in ASCII, so that another program is unlikely to use it.
const TRY_MIGRATION_LOCK: &str = "select pg_try_advisory_xact_lock(bigint '504447201892')";

/// The pause between two tries to get the lock.
const LOCK_RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Returns a line that names the first table, function or type of the schema with one of the names $1. Returns no row
/// if there is none.
const FIND_TAKEN_NAME: &str = "\
    select format('the schema \"%s\" has the %s', current_schema(), pg_describe_object(class, oid, 0)) \
    from unnest($1::text[]) with ordinality as given (name, position), \
        lateral (select quote_ident(current_schema()::text) || '.' || quote_ident(name) as name) as qualified, \
        lateral (values ('pg_class'::regclass::oid, to_regclass(qualified.name)::oid), \
            ('pg_proc'::regclass::oid, to_regprocedure(qualified.name || '()')::oid), \
            ('pg_type'::regclass::oid, to_regtype(qualified.name)::oid)) as things (class, oid) \
    where oid is not null order by position, class desc limit 1";

/// Returns the schema in use; whether the connection string or the session has set the search_path; and whether the
/// search_path names exactly one schema.
const FIND_SCHEMA_IN_USE: &str = "\
    select current_schema()::text, source in ('client', 'session'), setting !~ '[,$]' \
    from pg_settings where name = 'search_path'";

/// Returns each schema, except the one in use, in which the role may read all of the tables $1, and a line that says
/// how to use that schema.
const FIND_OTHER_SCHEMAS: &str = "\
    select nspname::text, format('the schema \"%s\" has userd''s tables, and the search_path leads to %s: \
        `alter role %I in database %I set search_path = %I` uses them, as does options=-csearch_path=NAME in DATABASE_URL; \
        `userd migrate` makes other tables', nspname, coalesce('the schema \"' || current_schema()::text || '\"', 'no schema'), \
        session_user, current_database(), nspname) \
    from pg_namespace n \
    where nspname is distinct from current_schema() and has_schema_privilege(n.oid, 'USAGE') and not exists ( \
        select from unnest($1::text[]) name where not exists ( \
            select from pg_class c where relnamespace = n.oid and relname::text = name and relkind::text = 'r' \
                and relpersistence::text = 'p' and has_table_privilege(c.oid, 'SELECT'))) \
    order by 1";

/// The remedy that is appended to an error if the role lacks a right.
pub const GRANTS_REMEDY: &str =
    ": `userd grants ROLE`, as the role that owns the tables, prints the grants of a role";

/// The table in which refinery records the migrations that it has applied.
pub const HISTORY_TABLE: &str = "refinery_schema_history";

/// The names of the migrations that the database lacks or has with another text. `None` if the service can use the
/// database: it has all migrations of the service, and further ones only if they are newer and compatible. An empty
/// list if the database has all migrations of the service, but also an unknown one that is not newer.
type MissingMigrations = Option<Vec<String>>;

/// The version of each migration, with the checksum of its text.
type MigrationKeys = BTreeSet<(i64, String)>;

/// The migrations of this release, or of the directory `MIGRATIONS_DIR`.
pub struct Migrations(Vec<Migration>);

impl Migrations {
    /// Loads the files of `dir`, or the built-in migrations if `dir` is `None`. The error names the variable
    /// `MIGRATIONS_DIR`.
    pub fn load(dir: Option<&Path>) -> Result<Migrations, ConfigError> {
        let Some(dir) = dir else {
            return Ok(Migrations(built_in::migrations::runner().get_migrations().clone()));
        };
        let problem = |problem: String| ConfigError { variable: "MIGRATIONS_DIR", problem };
        let unreadable = |why| problem(format!("{why}; name a directory of migrations, or none"));
        // Reads the directory first, because the loader of refinery ignores a directory that it cannot read.
        fs::read_dir(dir).map_err(|error| unreadable(format!("cannot read {}: {error}", dir.display())))?;
        let each = refinery::load_sql_migrations(dir).map_err(|error| unreadable(explain(&error)))?;
        if each.is_empty() {
            return Err(problem(format!("{} holds no migrations (V1__name.sql, …)", dir.display())));
        }
        Ok(Migrations(each))
    }

    /// Returns true if the history has the first migration, which shows that the tables are userd's and not another
    /// program's.
    fn is_history_ours(&self, history: &[Row]) -> bool {
        history.iter().any(|row| self.keys().first() == Some(&(row.get(0), row.get(1))))
    }

    /// Returns the names of the tables, indexes and functions that the migrations create.
    pub fn created_names(&self) -> Vec<&str> {
        self.0.iter().flat_map(names_created_by).collect()
    }

    /// Returns the version and the checksum of each migration.
    fn keys(&self) -> MigrationKeys {
        self.0.iter().map(migration_key).collect()
    }

    /// Returns a number that differs if the text of any migration differs. It is part of the name of the database that
    /// tests clone.
    #[cfg(any(test, feature = "testing"))]
    pub fn fingerprint(&self) -> u64 {
        self.0.iter().fold(0, |digest: u64, migration| digest.rotate_left(1) ^ migration.checksum())
    }

    /// Returns the statement of the migrations that begins with the text `beginning`, in one line without comments.
    #[cfg(feature = "command")]
    pub fn find_statement(&self, beginning: &str) -> Option<String> {
        let end = if beginning.starts_with("create function") { " $$;" } else { ";" };
        self.0.iter().filter_map(Migration::sql).find_map(|sql| {
            let (statement, _) = sql[sql.find(beginning)?..].split_once(end)?;
            Some(in_one_line(statement) + end.trim_end_matches(';'))
        })
    }

    /// Returns the version and the checksum of each migration in the history; the comment on the history; whether the
    /// server takes no changes; and whether one of the tables $1 is missing. Also names the columns `name` and
    /// `applied_on`, so that the query fails if another program's table has the name of the history.
    const READ_HISTORY: &str = "select version::bigint, checksum::text, \
        obj_description('refinery_schema_history'::regclass, 'pg_class'), \
        current_setting('transaction_read_only') = 'on', \
        exists (select from unnest($1::text[]) name where to_regclass(name) is null), name, applied_on \
        from refinery_schema_history";

    /// Returns the history of a database: the rows of [`Migrations::READ_HISTORY`]. One round trip.
    pub fn read_history(client: &mut Client) -> Result<Vec<Row>, postgres::Error> {
        client.query_typed(Migrations::READ_HISTORY, &[(&ALL_TABLES, Type::TEXT_ARRAY)])
    }

    /// Returns the migrations that the history of a database lacks. Fails with one line if the history has a newer
    /// migration that is not compatible.
    pub fn compare_history(&self, history: &[Row]) -> Result<MissingMigrations, String> {
        let applied = history.iter().map(|row| (row.get(0), row.get(1))).collect();
        let mark: Option<String> = history.first().and_then(|row| row.get(2));
        let fits = is_compatible(&applied, &self.keys(), mark.as_deref())?;
        let missing = self.0.iter().filter(|one| !applied.contains(&migration_key(one)));
        Ok((!fits).then(|| missing.map(ToString::to_string).collect()))
    }

    /// Returns the migrations that the database of `client` lacks, and sets the search_path of later sessions to the
    /// schema in use. Writes nothing, so that it works on a standby, too.
    ///
    /// Fails with one line if an object of another program has a name that the migrations create. Fails, too, if
    /// only another schema has userd's tables, because new tables would have no users. `second_set`, or a connection
    /// string that names the schema in use, allows this second set of tables.
    pub fn find_missing(
        &self,
        hosts: &DbHosts,
        client: &mut Client,
        second_set: bool,
    ) -> Result<MissingMigrations, String> {
        let mut find = || {
            let second_set = use_current_schema(hosts, client)? || second_set;
            // Tries a second time before it fails. Another replica may have migrated between two statements of the
            // first try, which would then take the replica's tables for those of another program.
            self.find_once(client, second_set).or_else(|_| self.find_once(client, second_set))
        };
        find().map_err(|error| explain(&*error))
    }

    /// Tries once to find the missing migrations: reads the history, then looks for userd's tables in other schemas,
    /// then for objects with the names that the missing migrations create.
    fn find_once(&self, client: &mut Client, second_set: bool) -> Result<MissingMigrations, Box<dyn Error>> {
        let (rows, is_foreign) = match Migrations::read_history(client) {
            Ok(rows) => (rows, false),
            Err(error) if is_missing_table(&error) => (Vec::new(), false),
            Err(error) if is_wrong_column(&error) => (Vec::new(), true),
            Err(error) if lacks_right(&error) => return Err((explain(&error) + GRANTS_REMEDY).into()),
            Err(error) => return Err(error.into()),
        };
        let are_ours = self.is_history_ours(&rows);
        if !are_ours && !second_set {
            find_other_schemas(client)?.into_iter().next().map_or(Ok(()), |(_, line)| Err(line))?;
        }
        if is_foreign || !are_ours && !rows.is_empty() {
            refuse_taken_names(client, &[HISTORY_TABLE])?;
        }
        if rows.is_empty() {
            let hidden = query_lines(client, FIND_HIDDEN_ROWS, &[(&vec![HISTORY_TABLE], Type::TEXT_ARRAY)])?;
            hidden.into_iter().next().map_or(Ok(()), Err)?;
        }
        let missing = self.compare_history(&rows)?;
        let lacks = |one: &&Migration| missing.as_ref().is_some_and(|names| names.contains(&one.to_string()));
        let (lacking, applied): (Vec<_>, Vec<_>) = self.0.iter().partition(lacks);
        // Accepts names that an applied migration has created, because a missing migration may replace a function of an
        // applied one. Otherwise the function would be refused as another program's.
        let ours: Vec<_> = applied.into_iter().flat_map(names_created_by).collect();
        let created = lacking.into_iter().flat_map(names_created_by).filter(|name| !ours.contains(name));
        refuse_taken_names(client, &created.collect::<Vec<_>>())?;
        Ok(missing)
    }

    /// Applies the migrations that the database lacks, and returns their names. If `may_apply` is false and some are
    /// missing, fails instead. If `second_set` is true, userd's tables may be in another schema, too. Also logs the
    /// findings about the database. Blocks while this or another replica migrates.
    pub fn apply_missing(
        &self,
        hosts: &DbHosts,
        may_apply: bool,
        second_set: bool,
    ) -> Result<Vec<String>, StartError> {
        let mut client = hosts.connect_with_retries()?;
        let missing = self.find_missing(hosts, &mut client, second_set);
        log_findings(hosts, &mut client, missing.is_ok());
        let Some(missing) = missing.map_err(StartError::Migration)? else { return Ok(Vec::new()) };
        if !may_apply {
            return Err(StartError::NotMigrated(missing));
        }
        let names = self.created_names();
        let obstacles = query_lines(&mut client, FIND_MIGRATION_OBSTACLES, &[(&names, Type::TEXT_ARRAY)]);
        // Ignores an error of this query, because the migrations themselves show whether the role may apply them.
        let obstacles = obstacles.unwrap_or_default();
        if !obstacles.is_empty() {
            return Err(StartError::Migration(obstacles.join("; ")));
        }
        self.apply(client, hosts).map_err(|error| StartError::Migration(explain(&*error)))
    }

    /// Applies the missing migrations in one transaction, and returns their names. refinery takes no lock, so a
    /// transaction of `client` holds the advisory lock, while a second session migrates. The lock belongs to a
    /// transaction and not to the session, because a pooler may lend the session to another client.
    fn apply(&self, mut client: Client, hosts: &DbHosts) -> Result<Vec<String>, Box<dyn Error>> {
        let mut is_waiting = false;
        let _lock = loop {
            let mut lock = begin_transaction(&mut client)?;
            // Switches off the role's time-out for idle transactions, which would end the lock while the other session
            // migrates.
            lock.batch_execute("set local idle_in_transaction_session_timeout = 0")?;
            if lock.query_typed_one(TRY_MIGRATION_LOCK, &[])?.get(0) {
                break lock;
            }
            // Polls for the lock. A statement that waits for the lock would occupy a connection of a pooler, which the
            // replica that migrates may need.
            lock.rollback()?;
            if !mem::replace(&mut is_waiting, true) {
                log::info!("waiting for another replica to finish its migrations");
            }
            thread::sleep(LOCK_RETRY_PAUSE);
        };
        let report = Runner::new(&self.0).set_grouped(true).run(&mut open_second_session(hosts)?)?;
        let applied: Vec<_> = report.applied_migrations().iter().map(ToString::to_string).collect();
        applied.iter().for_each(|migration| log::info!("applied migration {migration}"));
        Ok(applied)
    }
}

/// Sets the search_path of this session and of later ones to the schema in use. Returns true if the connection string
/// names this schema alone.
fn use_current_schema(hosts: &DbHosts, client: &mut Client) -> Result<bool, Box<dyn Error>> {
    let row = client.query_typed_one(FIND_SCHEMA_IN_USE, &[])?;
    let (schema, is_set, is_one): (Option<String>, bool, bool) = (row.get(0), row.get(1), row.get(2));
    let options = hosts.target.hosts[0].get_options().unwrap_or_default().replace('\\', "");
    let asks = options.contains("search_path");
    if let Some(schema) = schema {
        if asks && !is_set && !options.contains(&schema) {
            let line = "a pooler ignores `options` of DATABASE_URL, and the session has the schema";
            return Err(format!("{line} {schema:?}").into());
        }
        hosts.set_schema(client, &schema)?;
    }
    Ok(asks && is_set && is_one)
}

/// Returns each schema, except the one in use, that has userd's tables: its name, and a line that says how to use it.
pub fn find_other_schemas(client: &mut Client) -> Result<Vec<(String, String)>, postgres::Error> {
    let rows = client.query_typed(FIND_OTHER_SCHEMAS, &[(&ALL_TABLES, Type::TEXT_ARRAY)])?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Checks that the database allows a transaction and a second session beside it, as migrations need them. Some poolers
/// allow only one. The error is one line.
#[cfg(feature = "command")]
pub fn try_second_session(hosts: &DbHosts, client: &mut Client) -> Result<(), String> {
    let _lock = begin_transaction(client)?;
    open_second_session(hosts).map(drop)
}

fn begin_transaction(client: &mut Client) -> Result<Transaction<'_>, String> {
    let hint = "migrations need transactions (pool_mode of PgBouncer)";
    client.transaction().map_err(|error| format!("{}; {hint}", explain(&error)))
}

/// Opens a second session beside one that is in a transaction. The error says which setting of PgBouncer may forbid
/// this.
fn open_second_session(hosts: &DbHosts) -> Result<Client, String> {
    let hint = "migrations need two sessions at once (default_pool_size of PgBouncer)";
    hosts.connect_with_retries().map_err(|error| format!("{error}; {hint}"))
}

/// Opens a session, and fails if migrations are missing. Blocks as [`DbHosts::connect_with_retries`] does.
#[cfg(feature = "command")]
pub fn connect_if_migrated(config: &crate::Config) -> Result<Client, StartError> {
    let (hosts, migrations) = (DbHosts::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let mut client = hosts.connect_with_retries()?;
    let missing = migrations.find_missing(&hosts, &mut client, false).map_err(StartError::Migration)?;
    missing.map_or(Ok(client), |missing| Err(StartError::NotMigrated(missing)))
}

/// Returns whether a release with the migrations `ours` can use a database with the migrations `applied`. `mark` is the
/// comment on the history. In it the newest migration says which older releases can go on: "migration 4 is compatible
/// with migration 3".
fn is_compatible(applied: &MigrationKeys, ours: &MigrationKeys, mark: Option<&str>) -> Result<bool, String> {
    let newest = |keys: &MigrationKeys| keys.last().map_or(0, |(version, _)| *version);
    let (last, known) = (newest(applied), newest(ours));
    // Returns false also if an applied migration has another text, because refinery then refuses to migrate, with a
    // line that names the migration.
    if !ours.is_subset(applied) || applied.difference(ours).any(|(version, _)| *version <= known) {
        return Ok(false);
    }
    let words = format!("migration {last} is compatible with migration ");
    let oldest: Option<i64> = mark.and_then(|mark| mark.strip_prefix(&words)?.parse().ok());
    if last == known || oldest.is_some_and(|oldest| oldest <= known) {
        return Ok(true);
    }
    Err(format!(
        "a newer userd has migrated it, to migration {last}; this one knows those up to {known}, and no later one says \
         that it is compatible with them"
    ))
}

/// Returns the version and the checksum of a migration, by which the history of the database names it.
fn migration_key(migration: &Migration) -> (i64, String) {
    (migration.version().into(), migration.checksum().to_string())
}

/// Returns SQL in one line without comments.
#[cfg(feature = "command")]
pub fn in_one_line(sql: &str) -> String {
    let lines = sql.lines().map(str::trim).filter(|line| !line.starts_with("--"));
    lines.collect::<Vec<_>>().join(" ")
}

/// Returns the names of the tables, indexes and functions that a migration creates or replaces.
fn names_created_by(migration: &Migration) -> impl Iterator<Item = &str> {
    let lines = migration.sql().into_iter().flat_map(str::lines);
    lines.filter_map(|line| line.strip_prefix("create ")).filter_map(|line| {
        let mut words = line.split([' ', '(']).skip_while(|word| ["or", "replace", "unique"].contains(word));
        words.next().filter(|kind| ["table", "index", "function"].contains(kind)).and(words.next())
    })
}

/// Fails if the schema has an object with one of `names`, because another program must have created the object.
fn refuse_taken_names(client: &mut Client, names: &[&str]) -> Result<(), Box<dyn Error>> {
    let taken = query_lines(client, FIND_TAKEN_NAME, &[(&names, Type::TEXT_ARRAY)])?;
    let Some(thing) = taken.first() else { return Ok(()) };
    Err(format!(
        "{thing} of another program, which is left as it is: give userd a schema of its own (docs/operations.md, \
         \"What if the database has users already?\")"
    )
    .into())
}

/// Logs the findings about a database. Puts the settings that a pooler's sessions lack on the line about the pooler.
/// Ignores an error of reading the catalog, because a start goes on nevertheless.
fn log_findings(hosts: &DbHosts, client: &mut Client, with_tables: bool) {
    let findings = get_findings(hosts, client, with_tables).unwrap_or_default();
    for group in findings.chunk_by(|_, next| next.subject == "settings") {
        let lines: Vec<&str> = group.iter().map(|finding| &*finding.line).collect();
        log::warn!("{}", lines.join("; "));
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
            // The comment is about migration 4, so that migration 5 says nothing.
            (&[1, 2, 3, 4, 5], Some(mark(4, 3)), None),
            (&[1, 2, 3, 4], Some("our users".to_owned()), None),
            // Migrations of another program, with numbers up to the newest known one.
            (&[0, 1, 2, 3], Some(mark(3, 2)), Some(false)),
            (&[1, 2, 4], Some(mark(4, 3)), Some(false)),
        ];
        for (applied, mark, expected) in rows {
            let fits = is_compatible(&set(applied), &set(&[1, 2, 3]), mark.as_deref());
            assert_eq!(fits.clone().ok(), expected, "{applied:?} {mark:?}: {fits:?}");
        }
    }
}
