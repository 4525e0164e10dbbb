//! The commands `migrate`, `check`, `recount` and `grants`. They apply migrations without a service, report what would
//! make a service fail, and repair what was reported. `check` changes no row. Not part of the library's interface.

mod trial;

pub use crate::db::findings::{Finding, Severity};
pub use crate::db::user_counts::compare_user_counts;

use crate::db::connect::DbHosts;
use crate::db::findings::{FIND_MIGRATION_OBSTACLES, add_findings, get_findings};
use crate::db::migrate::{Migrations, connect_if_migrated, find_other_schemas, try_second_session};
use crate::db::{session::query_lines, user_counts};
use crate::{config::Config, error::StartError};
use Severity::{Fine, Note, Problem};
use postgres::{Client, Error, types::Type};

/// The options of a check.
#[derive(Debug, Clone, Copy)]
pub struct CheckOptions {
    /// True if the check counts all users and compares the result with the stored counts, by which pages are found.
    pub compares_user_counts: bool,
    /// The changes that the check tries and rolls back.
    pub changes: TriedChanges,
}

/// Which changes a check tries and rolls back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TriedChanges {
    /// The check tries no change.
    None,
    /// The check tries a create, changes and a delete, unless they would fire a trigger of another program.
    UnlessForeignTriggers,
    /// The check tries a create, changes and a delete, even if they fire a trigger of another program.
    DespiteForeignTriggers,
}

const READ_VERSION_AND_ENCODING: &str =
    "select current_setting('server_version'), current_setting('server_encoding')";

/// Finds the roles, other than the service's, that may read hashes of passwords from a table, column or view, or that
/// may execute a function which changes the tables of userd with the rights of its owner. Columns: the line to report;
/// true if every role has the right.
const FIND_HASH_READERS: &str = "\
    with recursive readable as ( \
        select oid from pg_class where oid in (to_regclass('credentials')::oid, to_regclass('idempotency_keys')::oid) \
        union select ev_class from readable join pg_depend on refobjid = readable.oid and classid = 'pg_rewrite'::regclass::oid \
            join pg_rewrite r on r.oid = objid \
    ), granted as ( \
        select relowner as owner, acl, format('%I.%I', nspname, relname) as name, '%1$s may read %2$s, which has hashes of \
            passwords: `revoke select on %2$s from %1$s`%3$s' as line \
        from readable join pg_class c on c.oid = readable.oid join pg_namespace n on n.oid = relnamespace, \
            lateral (select relacl union all select attacl from pg_attribute where attrelid = c.oid) as acls (acl) \
        union all \
        select proowner, coalesce(proacl, acldefault('f', proowner)), format('%I.%I()', nspname, proname), \
            '%1$s may make %2$s a trigger of its own table, which would write ours: `revoke execute on function %2$s from %1$s`' \
        from pg_proc p join pg_namespace n on n.oid = pronamespace \
        where prosecdef and proname::text in ('user_counts_record', 'user_counts_reset', 'idempotency_erase') \
            and nspname = current_schema() \
    ) \
    select distinct format(line, case when grantee = oid '0' then 'public' else quote_ident(rolname::text) end, name, \
        case when grantee <> oid '0' then ', unless it runs userd' end), grantee = oid '0' \
    from granted, aclexplode(acl) left join pg_roles on pg_roles.oid = grantee \
    where privilege_type in ('SELECT', 'EXECUTE') and grantee <> owner and not coalesce(rolsuper, false) \
        and rolname is distinct from current_user and rolname::text is distinct from 'pg_read_all_data' \
    order by 1";

/// Makes the statements that give the role $1 the rights to run a service, one in each row.
const MAKE_GRANT_STATEMENTS: &str = "\
    select format(line, current_schema(), rolname, current_database(), pg_get_serial_sequence('users', 'id')) \
    from pg_roles, unnest(array[ \
        'grant connect on database %3$I to %2$I;', \
        'grant usage on schema %1$I to %2$I;', \
        'grant select, insert, update, delete on %1$I.users, %1$I.credentials, %1$I.idempotency_keys to %2$I;', \
        'grant select on %1$I.user_counts, %1$I.refinery_schema_history to %2$I;', \
        'grant select on sequence %4$s to %2$I;']) as line \
    where rolname = $1";

/// Applies the migrations that the database lacks. Fails if another schema has tables of userd, unless `second_set`
/// allows a second set of tables. Returns a line for each migration that was applied, then a line for each other schema
/// with tables of userd. Blocks as long as the migrations take.
pub fn migrate(config: &Config, second_set: bool) -> Result<Vec<String>, StartError> {
    let (hosts, migrations) = (DbHosts::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let applied = migrations.apply_missing(&hosts, true, second_set)?;
    let mut lines: Vec<_> = applied.iter().map(|name| format!("applied {name}")).collect();
    if !lines.is_empty() {
        lines.extend(describe_unused_schemas(&mut hosts.connect_with_retries()?)?);
    }
    Ok(lines)
}

/// Returns a line for each schema that has tables of userd but is not the schema in use.
fn describe_unused_schemas(client: &mut Client) -> Result<impl Iterator<Item = String>, Error> {
    let line = |(schema, _)| {
        format!("userd's tables are in the schema {schema:?}, too, and their users are not used here")
    };
    Ok(find_other_schemas(client)?.into_iter().map(line))
}

/// Counts all users anew, and stores the counts by which pages are found. Returns a line with the number of users.
/// Blocks while the database counts.
pub fn recount_users(config: &Config) -> Result<String, StartError> {
    user_counts::recount_users(&mut connect_if_migrated(config)?).map_err(StartError::Statement)
}

/// Returns the statements that give a role the rights to run a service. Each ends with a semicolon.
pub fn make_grant_statements(config: &Config, role: &str) -> Result<Vec<String>, StartError> {
    let lines =
        query_lines(&mut connect_if_migrated(config)?, MAKE_GRANT_STATEMENTS, &[(&role, Type::NAME)])?;
    if lines.is_empty() {
        return Err(StartError::Statement(format!("there is no role {role:?}")));
    }
    Ok(lines)
}

/// Checks whether a service can use the database, and returns the findings. Changes no row, but draws a few ids. Blocks
/// up to `db_connect_timeout`, and some seconds more if other sessions hold locks.
pub fn check(config: &Config, options: CheckOptions) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err(error) = check_all(config, options, &mut findings) {
        let subject = if matches!(error, StartError::Config(_)) { "configuration" } else { "database" };
        add_findings(&mut findings, Problem, subject, [error.to_string()]);
    }
    findings
}

/// Adds the findings of all checks. Stops at a finding that makes further checks impossible or misleading.
fn check_all(config: &Config, options: CheckOptions, findings: &mut Vec<Finding>) -> Result<(), StartError> {
    let (hosts, migrations) = (DbHosts::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    add_findings(findings, Fine, "configuration", ["every variable can be used"]);
    let warnings = hosts.target.warnings.iter().map(|line| format!("DATABASE_URL: {line}"));
    add_findings(findings, Note, "configuration", warnings);
    let client = &mut hosts.connect_with_retries()?;
    // Limits how long the check waits for a lock. Leaves the limit out if a pooler lends the session, because the
    // session would keep the limit when the pooler lends it to another client.
    if hosts.pooling().allows_set_command() {
        client.batch_execute("set lock_timeout = '2s'")?;
    }
    let row = client.query_typed_one(READ_VERSION_AND_ENCODING, &[])?;
    let (version, encoding): (String, String) = (row.get(0), row.get(1));
    let connected = [format!("connected to {}", hosts.target), format!("PostgreSQL {version}")];
    add_findings(findings, Fine, "database", connected);
    let line = format!("its encoding is {encoding}, not UTF8: names and addresses that do not fit get 500");
    add_findings(findings, Note, "database", (encoding != "UTF8").then_some(line));
    let missing = migrations.find_missing(&hosts, client, false);
    findings.extend(get_findings(&hosts, client, missing.is_ok())?);
    match missing {
        Err(line) => add_findings(findings, Problem, "migrations", [line]),
        Ok(Some(names)) => {
            let (severity, what) = match (names.is_empty(), config.migrate) {
                (true, _) => (Problem, "the database has others than this userd"),
                (false, true) => (Note, "a start applies what is missing"),
                (false, false) => (Problem, "`userd migrate` applies what is missing"),
            };
            add_findings(findings, severity, "migrations", [format!("{what}: {}", names.join(", "))]);
            if config.migrate {
                let names = migrations.created_names();
                let obstacles = query_lines(client, FIND_MIGRATION_OBSTACLES, &[(&names, Type::TEXT_ARRAY)])?;
                add_findings(findings, Problem, "privileges", obstacles);
                add_findings(findings, Problem, "migrations", try_second_session(&hosts, client).err());
            }
        }
        Ok(None) => {
            add_findings(findings, Fine, "migrations", ["all are applied"]);
            add_findings(findings, Note, "schema", describe_unused_schemas(client)?);
            // Tries the service only if the tables have no finding. Otherwise every create of the trial would fail, or
            // no trigger would fire, and the findings of the trial would bury the finding whose remedy helps.
            if !findings.iter().any(|finding| finding.subject == "tables") {
                findings.extend(find_flaws(client, &migrations, options)?);
            }
        }
    }
    Ok(())
}

/// Tries the statements of a service on a database that has all migrations, and looks at privileges and counts. Returns
/// the findings. If the statements work, a finding says so.
fn find_flaws(client: &mut Client, ours: &Migrations, options: CheckOptions) -> Result<Vec<Finding>, Error> {
    let mut findings = trial::execute_trial(client, ours, options.changes)?;
    if findings.is_empty() {
        let line = "creates, reads, changes and deletes do what they should";
        add_findings(&mut findings, Fine, "service", [line]);
    }
    for row in client.query_typed(FIND_HASH_READERS, &[])? {
        let severity = if row.get(1) { Problem } else { Note };
        add_findings(&mut findings, severity, "privileges", [row.get::<_, String>(0)]);
    }
    if options.compares_user_counts {
        match user_counts::compare_user_counts(client) {
            Ok(line) => add_findings(&mut findings, Fine, "tables", [line]),
            Err(line) => add_findings(&mut findings, Problem, "tables", [line]),
        }
    }
    Ok(findings)
}
