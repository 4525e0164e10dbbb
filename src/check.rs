//! The commands `migrate`, `check`, `recount` and `grants` on a database: migrations without a service, a check that
//! changes no row, and the repairs of its findings. Not part of the library's interface.

mod trial;

pub use crate::db::counts::compare as compare_counts;
pub use crate::db::findings::{Finding, Weight};

use crate::db::connect::{Servers, Sessions};
use crate::db::findings::{MIGRATION_OBSTACLES, add, hazards};
use crate::db::migrate::{Migrations, connect_migrated, elsewhere, refuse_one_session};
use crate::db::{counts, session::lines};
use crate::{config::Config, error::StartError};
use Weight::{Fine, Note, Problem};
use postgres::{Client, Error, types::Type};

/// The options of a check.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// All users are counted, too.
    pub counts: bool,
    /// The changes that are tried and rolled back.
    pub changes: Changes,
}

/// Changes that are tried and rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// No change is tried.
    None,
    /// A create, changes and a delete are tried, unless they would fire another program's trigger.
    Usual,
    /// A create, changes and a delete are tried in any case.
    WithTriggers,
}

/// Limits of the server.
const LIMITS: &str = "\
    select format('its encoding is %s, not UTF8: names and addresses that do not fit get 500', encoding) \
    from current_setting('server_encoding') encoding where encoding <> 'UTF8' \
    union all select 'it accepts no changes: a standby, or default_transaction_read_only is on' \
    where current_setting('transaction_read_only') = 'on'";

/// Finds roles beside the service's that may read hashes of passwords, by grants on tables, columns and views, or by a
/// function that runs with its owner's rights. The second column is true if every role may read them.
const HASH_READERS: &str = "\
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

/// Returns one line if some addresses are not in Unicode's form NFC. Only a database in UTF8 can tell. The statement in
/// the line skips addresses that another user has in NFC.
const UNNORMALIZED_ADDRESSES: &str = "\
    select format('%1$s addresses are not in Unicode''s form NFC, so that no login and no ?email= finds them: \
        `update %2$I.users u set email = normalize(email, nfc) where email is not nfc normalized and not exists ( \
        select from %2$I.users o where o.id <> u.id \
        and lower(normalize(o.email, nfc) collate \"C\") = lower(normalize(u.email, nfc) collate \"C\"))` \
        brings them into it, but for those that another user has then', count(*), current_schema()) \
    from users where case when getdatabaseencoding() = 'UTF8' then email::text is not nfc normalized end \
    having count(*) > 0";

/// Statements that give the role $1 the rights to run a service, one in each row.
const GRANTS: &str = "\
    select format(line, current_schema(), rolname, current_database(), pg_get_serial_sequence('users', 'id')) \
    from pg_roles, unnest(array[ \
        'grant connect on database %3$I to %2$I;', \
        'grant usage on schema %1$I to %2$I;', \
        'grant select, insert, update, delete on %1$I.users, %1$I.credentials, %1$I.idempotency_keys to %2$I;', \
        'grant select on %1$I.user_counts, %1$I.refinery_schema_history to %2$I;', \
        'grant select on sequence %4$s to %2$I;']) as line \
    where rolname = $1";

/// Applies the migrations that the database lacks; `anew`: also if another schema has tables of userd. Returns a line for each,
/// and then for each such schema. Blocks as a start does.
pub fn migrate(config: &Config, anew: bool) -> Result<Vec<String>, StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let applied = migrations.apply_missing(&servers, true, anew)?;
    let mut lines: Vec<_> = applied.iter().map(|name| format!("applied {name}")).collect();
    if !lines.is_empty() {
        lines.extend(unused(&mut servers.connect_for_long()?)?);
    }
    Ok(lines)
}

/// Returns a line for each other schema that has tables of userd.
fn unused(client: &mut Client) -> Result<impl Iterator<Item = String>, Error> {
    let line = |(schema, _)| {
        format!("userd's tables are in the schema {schema:?}, too, and their users are not used here")
    };
    Ok(elsewhere(client)?.into_iter().map(line))
}

/// Counts all users anew. Returns a line with their number. Blocks while they are counted.
pub fn recount(config: &Config) -> Result<String, StartError> {
    counts::recount(&mut connect_migrated(config)?).map_err(StartError::Statement)
}

/// Returns the statements that let a role run a service on the database, each with its semicolon.
pub fn grants(config: &Config, role: &str) -> Result<Vec<String>, StartError> {
    let grants = lines(&mut connect_migrated(config)?, GRANTS, &[(&role, Type::NAME)])?;
    if grants.is_empty() {
        return Err(StartError::Statement(format!("there is no role {role:?}")));
    }
    Ok(grants)
}

/// Returns findings about the database, as a start and a service would meet them. Changes no row; a few ids are drawn. Blocks up to
/// `db_connect_timeout`, and some seconds if it meets locks; without a bound while another session locks the history of
/// migrations.
pub fn check(config: &Config, options: Options) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err(error) = examine(config, options, &mut findings) {
        let (subject, line) = match error {
            StartError::Config(error) => ("configuration", error.to_string()),
            StartError::Statement(line) => ("database", line),
            error => ("database", error.to_string()),
        };
        add(&mut findings, Problem, subject, [line]);
    }
    findings
}

/// Adds findings up to the first one that makes further checks impossible or misleading.
fn examine(config: &Config, options: Options, findings: &mut Vec<Finding>) -> Result<(), StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    add(findings, Fine, "configuration", ["every variable can be used"]);
    let warnings = servers.target.warnings.iter().map(|line| format!("DATABASE_URL: {line}"));
    add(findings, Note, "configuration", warnings);
    let client = &mut servers.connect_for_long()?;
    let version: String = client.query_typed_one("select current_setting('server_version')", &[])?.get(0);
    let connected = [format!("connected to {}", servers.target), format!("PostgreSQL {version}")];
    add(findings, Fine, "database", connected);
    add(findings, Note, "database", lines(client, LIMITS, &[])?);
    if servers.sessions() == Sessions::SetOwn && servers.lends(servers.connect_for_long()?) {
        let line = "a pooler lends its sessions for one transaction each: userd needs DB_PREPARED=false";
        add(findings, Problem, "database", [line]);
    }
    let missing = migrations.missing(&servers, client, false);
    hazards(&servers, client, missing.is_ok(), findings)?;
    match missing {
        Err(line) => add(findings, Problem, "migrations", [line]),
        Ok(Some(names)) => {
            let (weight, what) = match (names.is_empty(), config.migrate) {
                (true, _) => (Problem, "the database has others than this userd"),
                (false, true) => (Note, "a start applies what is missing"),
                (false, false) => (Problem, "`userd migrate` applies what is missing"),
            };
            add(findings, weight, "migrations", [format!("{what}: {}", names.join(", "))]);
            if config.migrate {
                let blocked = lines(client, MIGRATION_OBSTACLES, &[(&migrations.made(), Type::TEXT_ARRAY)])?;
                add(findings, Problem, "privileges", blocked);
                add(findings, Problem, "migrations", refuse_one_session(&servers, client).err());
            }
        }
        Ok(None) => {
            add(findings, Fine, "migrations", ["all are applied"]);
            add(findings, Note, "schema", unused(client)?);
            // Ends here after a finding about the tables: every create fails then, or no trigger fires, and further
            // findings would hide the only remedy.
            if !findings.iter().any(|finding| finding.subject == "tables") {
                findings.extend(serve(client, &migrations, options)?);
            }
        }
    }
    Ok(())
}

/// Returns the findings of a database that has all migrations.
fn serve(client: &mut Client, migrations: &Migrations, options: Options) -> Result<Vec<Finding>, Error> {
    let mut findings = trial::run(client, migrations, options.changes)?;
    if findings.is_empty() {
        let fine = "creates, reads, changes and deletes do what they should";
        add(&mut findings, Fine, "service", [fine]);
    }
    for row in client.query_typed(HASH_READERS, &[])? {
        let weight = if row.get(1) { Problem } else { Note };
        add(&mut findings, weight, "privileges", [row.get::<_, String>(0)]);
    }
    if options.counts {
        match counts::compare(client) {
            Ok(line) => add(&mut findings, Fine, "tables", [line]),
            Err(line) => add(&mut findings, Problem, "tables", [line]),
        }
        add(&mut findings, Problem, "tables", lines(client, UNNORMALIZED_ADDRESSES, &[])?);
    }
    Ok(findings)
}
