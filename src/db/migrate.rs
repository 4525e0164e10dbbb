//! Brings the schema up to date: refinery's migrations, one replica at a time, nothing half applied.

use super::connect::Servers;
use super::findings::{MIGRATION_OBSTACLES, ROW_SECURITY, hazards};
use super::session::lines;
use super::sqlstate::{is_of_other_columns, lacks_table};
use super::{TABLES, explain};
use crate::error::{ConfigError, StartError};
use postgres::{Client, Row, Transaction, types::Type};
use refinery::{Migration, Runner};
use std::{collections::BTreeSet, error::Error, fs, mem, path::Path, thread, time::Duration};

mod embedded {
    refinery::embed_migrations!("migrations");
}

/// The key of the advisory lock: any number that no other program locks; this one spells "userd".
const LOCK: i64 = 0x0075_7365_7264;

/// The pause between two tries to get the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// The first of some names that is taken in the schema, with the kind of what has it. $1: names.
const TAKEN_NAMES: &str = "\
    select format('the schema \"%s\" has the %s', current_schema(), pg_describe_object(class, oid, 0)) \
    from unnest($1::text[]) with ordinality as given (name, position), \
        lateral (select quote_ident(current_schema()::text) || '.' || quote_ident(name) as name) as qualified, \
        lateral (values ('pg_class'::regclass::oid, to_regclass(qualified.name)::oid), \
            ('pg_proc'::regclass::oid, to_regprocedure(qualified.name || '()')::oid), \
            ('pg_type'::regclass::oid, to_regtype(qualified.name)::oid)) as things (class, oid) \
    where oid is not null order by position, class desc limit 1";

/// The schema that the settings of a session lead to; whether they are those of the connection, and name it alone.
const SCHEMA: &str = "\
    select current_schema()::text, source in ('client', 'session'), setting !~ '[,$]' \
    from pg_settings where name = 'search_path'";

/// Other schemas that have the tables $1 and give the role a use of them, each with a line that says how.
const OTHER_SCHEMAS: &str = "\
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

/// Remedy for a role that lacks rights.
pub const GRANTS_HINT: &str =
    ": `userd grants ROLE`, as the role that owns the tables, prints the grants of a role";

/// The table in which refinery keeps the migrations that were applied.
pub const HISTORY: &str = "refinery_schema_history";

/// Numbers of migrations, each with the checksum of its text.
type Keys = BTreeSet<(i64, String)>;

/// The migrations that a database needs.
pub struct Migrations(Vec<Migration>);

impl Migrations {
    /// Loads the migrations that are built in, or the files of `dir`. Errors name the variable `MIGRATIONS_DIR`.
    pub fn load(dir: Option<&Path>) -> Result<Migrations, ConfigError> {
        let Some(dir) = dir else {
            return Ok(Migrations(embedded::migrations::runner().get_migrations().clone()));
        };
        let problem = |problem: String| ConfigError { variable: "MIGRATIONS_DIR", problem };
        let unreadable = |why| problem(format!("{why}; name a directory of migrations, or none"));
        // Checks the directory first: the loader ignores a directory that it cannot read.
        fs::read_dir(dir).map_err(|error| unreadable(format!("cannot read {}: {error}", dir.display())))?;
        let each = refinery::load_sql_migrations(dir).map_err(|error| unreadable(explain(&error)))?;
        if each.is_empty() {
            return Err(problem(format!("{} holds no migrations (V1__name.sql, …)", dir.display())));
        }
        Ok(Migrations(each))
    }

    /// Returns whether the history of a database has the first of these migrations: then its tables are userd's.
    /// `rows`: the rows of [`Migrations::ASK`].
    fn is_ours(&self, rows: &[Row]) -> bool {
        rows.iter().any(|row| self.keys().first() == Some(&(row.get(0), row.get(1))))
    }

    /// Returns the names of the tables, indexes and functions that the migrations make.
    pub fn made(&self) -> Vec<&str> {
        self.0.iter().flat_map(names_in).collect()
    }

    fn keys(&self) -> Keys {
        self.0.iter().map(key).collect()
    }

    /// Returns a number that changes with any of the migrations.
    #[cfg(any(test, feature = "testing"))]
    pub fn fingerprint(&self) -> u64 {
        self.0.iter().fold(0, |digest: u64, migration| digest.rotate_left(1) ^ migration.checksum())
    }

    /// Returns the migrations' statement that begins with this text, in one line without comments.
    #[cfg(feature = "command")]
    pub fn statement(&self, begin: &str) -> Option<String> {
        let end = if begin.starts_with("create function") { " $$;" } else { ";" };
        self.0.iter().filter_map(Migration::sql).find_map(|sql| {
            let (statement, _) = sql[sql.find(begin)?..].split_once(end)?;
            Some(in_one_line(statement) + end.trim_end_matches(';'))
        })
    }

    /// Asks for the rows that [`Migrations::judge`] takes. $1: names of tables. The fourth column is true if the server takes no changes, the
    /// fifth if a table is missing. The last two only have to exist, as refinery writes them.
    const ASK: &str = "select version::bigint, checksum::text, \
        obj_description('refinery_schema_history'::regclass, 'pg_class'), \
        current_setting('transaction_read_only') = 'on', \
        exists (select from unnest($1::text[]) name where to_regclass(name) is null), name, applied_on \
        from refinery_schema_history";

    /// Returns the rows of [`Migrations::ASK`]. One round trip.
    pub fn ask(client: &mut Client) -> Result<Vec<Row>, postgres::Error> {
        client.query_typed(Migrations::ASK, &[(&TABLES, Type::TEXT_ARRAY)])
    }

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

    /// Returns the names of those that the database lacks (`V1__users`), as [`Migrations::judge`] does, and has later sessions
    /// use the schema. Only reads, so that a standby, or a role without the right to write, will do. The error is one line:
    /// also if another program has the name of something that they make, or another schema has the tables of a service, unless
    /// `anew` or the connection string asks for others.
    pub fn missing(
        &self,
        servers: &Servers,
        client: &mut Client,
        anew: bool,
    ) -> Result<Option<Vec<String>>, String> {
        let mut find = || {
            let anew = use_schema(servers, client)? || anew;
            // Looks again before a refusal: if another replica has migrated meanwhile, its tables seem to be
            // another program's.
            self.look(client, anew).or_else(|_| self.look(client, anew))
        };
        find().map_err(|error| explain(&*error))
    }

    /// Looks once for [`Migrations::missing`]: at the history, at other schemas, then at names.
    fn look(&self, client: &mut Client, anew: bool) -> Result<Option<Vec<String>>, Box<dyn Error>> {
        let (rows, is_foreign) = match Migrations::ask(client) {
            Ok(rows) => (Some(rows), false),
            Err(error) if lacks_table(&error) => (None, false),
            Err(error) if is_of_other_columns(&error) => (None, true),
            Err(error) => return Err((explain(&error) + GRANTS_HINT).into()),
        };
        let rows = rows.unwrap_or_default();
        let is_ours = self.is_ours(&rows);
        if !is_ours && !anew {
            elsewhere(client)?.into_iter().next().map_or(Ok(()), |(_, line)| Err(line))?;
        }
        if is_foreign || !is_ours && !rows.is_empty() {
            refuse_names_of_another_program(client, &[HISTORY])?;
        }
        if rows.is_empty() {
            let hidden = lines(client, ROW_SECURITY, &[(&vec![HISTORY], Type::TEXT_ARRAY)])?;
            hidden.into_iter().next().map_or(Ok(()), Err)?;
        }
        let missing = self.judge(&rows)?;
        let lacks = |one: &&Migration| missing.as_ref().is_some_and(|names| names.contains(&one.to_string()));
        let (lacking, applied): (Vec<_>, Vec<_>) = self.0.iter().partition(lacks);
        // The names of applied migrations do not count: a migration may replace a function that an earlier one
        // has made.
        let ours: Vec<_> = applied.into_iter().flat_map(names_in).collect();
        let made = lacking.into_iter().flat_map(names_in).filter(|name| !ours.contains(name));
        refuse_names_of_another_program(client, &made.collect::<Vec<_>>())?;
        Ok(missing)
    }

    /// Applies the migrations that the database lacks, and returns their names. If `may` is false, it applies none, and
    /// an error says what to do. `anew`: applies them even if another schema has the tables of a service. Logs a
    /// warning of what makes a service unsafe or fails its requests. Blocks while another replica migrates, and as long
    /// as the migrations take.
    pub fn apply_missing(&self, servers: &Servers, may: bool, anew: bool) -> Result<Vec<String>, StartError> {
        let mut client = servers.connect_for_long()?;
        let missing = self.missing(servers, &mut client, anew);
        warn_of_hazards(servers, &mut client, missing.is_ok());
        let Some(missing) = missing.map_err(StartError::Migration)? else { return Ok(Vec::new()) };
        if !may {
            return Err(StartError::NotMigrated(missing));
        }
        // An error is ignored: a start goes on if the catalog cannot be read.
        let blocked =
            lines(&mut client, MIGRATION_OBSTACLES, &[(&self.made(), Type::TEXT_ARRAY)]).unwrap_or_default();
        if !blocked.is_empty() {
            return Err(StartError::Migration(blocked.join("; ")));
        }
        self.apply(client, servers).map_err(|error| StartError::Migration(explain(&*error)))
    }

    /// Applies what is missing, in one transaction of another session; returns the names. refinery takes no lock of its own,
    /// so a transaction of `client` holds one meanwhile: not its session, which a pooler may lend to other clients.
    fn apply(&self, mut client: Client, servers: &Servers) -> Result<Vec<String>, Box<dyn Error>> {
        let mut is_waiting = false;
        let _lock = loop {
            let mut lock = begin_transaction(&mut client)?;
            // Lifts the time-outs of the role, which are meant for requests.
            lock.batch_execute("set local idle_in_transaction_session_timeout = 0")?;
            if lock.query_typed_one(&format!("select pg_try_advisory_xact_lock({LOCK})"), &[])?.get(0) {
                break lock;
            }
            // Polls for the lock: a wait within the statement would hold a connection of a pooler that the other
            // replica may need.
            lock.rollback()?;
            if !mem::replace(&mut is_waiting, true) {
                log::info!("waiting for another replica to finish its migrations");
            }
            thread::sleep(LOCK_PAUSE);
        };
        let report = Runner::new(&self.0).set_grouped(true).run(&mut second_session(servers)?)?;
        let applied: Vec<_> = report.applied_migrations().iter().map(ToString::to_string).collect();
        applied.iter().for_each(|migration| log::info!("applied migration {migration}"));
        Ok(applied)
    }
}

/// Has the sessions use the schema that the settings lead to. Returns true if the connection string names it.
fn use_schema(servers: &Servers, client: &mut Client) -> Result<bool, Box<dyn Error>> {
    let row = client.query_typed_one(SCHEMA, &[])?;
    let (schema, is_set, is_one): (Option<String>, bool, bool) = (row.get(0), row.get(1), row.get(2));
    let options = servers.target.hosts[0].get_options().unwrap_or_default().replace('\\', "");
    let asks = options.contains("search_path");
    if let Some(schema) = schema {
        if asks && !is_set && !options.contains(&schema) {
            let line = "a pooler ignores `options` of DATABASE_URL, and the session has the schema";
            return Err(format!("{line} {schema:?}").into());
        }
        servers.keep_schema(client, &schema)?;
    }
    Ok(asks && is_set && is_one)
}

/// Returns the names of other schemas that have userd's tables, each with a line that says how to use them.
pub fn elsewhere(client: &mut Client) -> Result<Vec<(String, String)>, postgres::Error> {
    let rows = client.query_typed(OTHER_SCHEMAS, &[(&TABLES, Type::TEXT_ARRAY)])?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// Checks that migrations could have transactions, and two sessions at once, which some poolers do not give. The error is
/// one line.
#[cfg(feature = "command")]
pub fn refuse_one_session(servers: &Servers, client: &mut Client) -> Result<(), String> {
    let _lock = begin_transaction(client)?;
    second_session(servers).map(drop)
}

fn begin_transaction(client: &mut Client) -> Result<Transaction<'_>, String> {
    let hint = "migrations need transactions (pool_mode of PgBouncer)";
    client.transaction().map_err(|error| format!("{}; {hint}", explain(&error)))
}

/// Opens a second session while the first one has a transaction. Returns it once it has answered.
fn second_session(servers: &Servers) -> Result<Client, String> {
    let hint = "migrations need two sessions at once (default_pool_size of PgBouncer)";
    servers.connect_for_long().map_err(|error| format!("{error}; {hint}"))
}

/// Returns a session of a database that has all migrations; see [`Servers::connect_for_long`].
#[cfg(feature = "command")]
pub fn connect_migrated(config: &crate::Config) -> Result<Client, StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let mut client = servers.connect_for_long()?;
    let missing = migrations.missing(&servers, &mut client, false).map_err(StartError::Migration)?;
    missing.map_or(Ok(client), |missing| Err(StartError::NotMigrated(missing)))
}

/// Returns whether a release with the migrations `ours` can use a database. The last migration that was applied says
/// how far back it is compatible, in a comment on the history table: "migration 4 is compatible with migration 3".
fn judge(applied: &Keys, ours: &Keys, mark: Option<&str>) -> Result<bool, String> {
    let newest = |keys: &Keys| keys.last().map_or(0, |(version, _)| *version);
    let (found, known) = (newest(applied), newest(ours));
    // Returns false if a migration is missing or differs: applying the migrations then fails with a line of
    // refinery's that names it.
    if !ours.is_subset(applied) || applied.difference(ours).any(|(version, _)| *version <= known) {
        return Ok(false);
    }
    let words = format!("migration {found} is compatible with migration ");
    let oldest: Option<i64> = mark.and_then(|mark| mark.strip_prefix(&words)?.parse().ok());
    if found == known || oldest.is_some_and(|oldest| oldest <= known) {
        return Ok(true);
    }
    Err(format!(
        "a newer userd has migrated it, to migration {found}; this one knows those up to {known}, and no later one says \
         that it is compatible with them"
    ))
}

fn key(migration: &Migration) -> (i64, String) {
    (migration.version().into(), migration.checksum().to_string())
}

/// Returns SQL in one line without comments.
#[cfg(feature = "command")]
pub fn in_one_line(sql: &str) -> String {
    let lines = sql.lines().map(str::trim).filter(|line| !line.starts_with("--"));
    lines.collect::<Vec<_>>().join(" ")
}

/// Returns the names of the tables, indexes and functions that a migration makes or replaces.
fn names_in(migration: &Migration) -> impl Iterator<Item = &str> {
    let made =
        migration.sql().into_iter().flat_map(str::lines).filter_map(|line| line.strip_prefix("create "));
    made.filter_map(|line| {
        let mut words = line.split([' ', '(']).skip_while(|word| ["or", "replace", "unique"].contains(word));
        words.next().filter(|kind| ["table", "index", "function"].contains(kind)).and(words.next())
    })
}

/// Looks for these names in the schema. An error if something of another program has one.
fn refuse_names_of_another_program(client: &mut Client, names: &[&str]) -> Result<(), Box<dyn Error>> {
    let taken = lines(client, TAKEN_NAMES, &[(&names, Type::TEXT_ARRAY)])?;
    let Some(thing) = taken.first() else { return Ok(()) };
    Err(format!(
        "{thing} of another program, which is left as it is: give userd a schema of its own (docs/operations.md, \
         \"What if the database has users already?\")"
    )
    .into())
}

/// Writes the hazards to the log. Settings that the role lacks are in the line of the pooler. A start goes on if the
/// catalog cannot be read.
fn warn_of_hazards(servers: &Servers, client: &mut Client, are_ours: bool) {
    let mut found = Vec::new();
    let _ = hazards(servers, client, are_ours, &mut found);
    for group in found.chunk_by(|_, next| next.subject == "settings") {
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
