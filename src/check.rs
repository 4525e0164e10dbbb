//! The commands `migrate`, `check`, `recount` and `grants` on a database: migrations without a service, a check that
//! changes no row, and the repairs of its findings. Not part of the library's interface.

mod trial;

pub use crate::db::counts::compare as compare_counts;
pub use crate::db::findings::{Finding, Weight};

use crate::db::connect::{Servers, Sessions};
use crate::db::findings::{BLOCKED, add, hazards};
use crate::db::migrate::{Migrations, connect_migrated, refuse_one_session};
use crate::db::session::{Param, lines};
use crate::db::{TABLES, WRITTEN, counts};
use crate::{config::Config, error::StartError};
use Weight::{Fine, Note, Problem};
use postgres::types::Type;

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
    /// None.
    None,
    /// A create, changes and a delete, unless they would fire another program's trigger.
    Usual,
    /// A create, changes and a delete, in any case.
    WithTriggers,
}

/// Names of tables as parameters.
const READS: Param = (&TABLES, Type::TEXT_ARRAY);
const WRITES: Param = (&WRITTEN, Type::TEXT_ARRAY);

/// Limits of the server.
const LIMITS: &str = "\
    select format('its encoding is %s, not UTF8: names and addresses that do not fit get 500', encoding) \
    from current_setting('server_encoding') encoding where encoding <> 'UTF8' \
    union all select 'it accepts no changes: a standby, or default_transaction_read_only is on' \
    where current_setting('transaction_read_only') = 'on'";

/// Rights that requests and commands need and the role lacks; if $1 is set, those of migrations, too. $2: names of tables,
/// $3: of those that are written, $4: of what migrations make. Tables that do not exist yet are left out.
const MISSING_RIGHTS: &str = "\
    select format('the role may not %s %s', lower(action), name) \
    from unnest($2::text[]) name, unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where not has_table_privilege(to_regclass(name)::oid, action) \
        and (action = 'SELECT' or name = any ($3::text[])) \
    union all \
    select format('the role does not own %s', string_agg('the ' || pg_describe_object(class, object, 0), ', ' order by position)) \
    from unnest($4::text[]) with ordinality as made (name, position), lateral ( \
        select 'pg_class'::regclass::oid as class, oid as object, relowner as owner from pg_class \
            where oid = to_regclass(name)::oid and relkind::text = 'r' \
        union all select 'pg_proc'::regclass::oid, oid, proowner from pg_proc where oid = to_regprocedure(name || '()')::oid \
    ) as objects where $1 and not pg_has_role(owner, 'USAGE') having count(*) > bigint '0'";

/// Other roles that may read hashes, by grants on tables, columns and views. The second column is true if all roles may.
const READERS: &str = "\
    with recursive readable as ( \
        select oid from unnest(array['credentials', 'idempotency_keys']) name join pg_class on oid = to_regclass(name)::oid \
        union select ev_class from readable join pg_depend on refobjid = readable.oid and classid = 'pg_rewrite'::regclass::oid \
            join pg_rewrite r on r.oid = objid \
    ), grants as ( \
        select oid, relacl as acl from pg_class where relacl is not null \
        union all select attrelid, attacl from pg_attribute where attacl is not null \
    ), named as ( \
        select distinct grantee, case when grantee = oid '0' then 'public' else quote_ident(rolname::text) end as reader, \
            format('%I.%I', nspname, relname) as name \
        from readable join grants g on g.oid = readable.oid join pg_class c on c.oid = readable.oid \
            join pg_namespace n on n.oid = relnamespace, \
            aclexplode(acl) left join pg_roles on pg_roles.oid = grantee \
        where privilege_type = 'SELECT' and grantee <> relowner and not coalesce(rolsuper, false) \
            and rolname is distinct from current_user and rolname::text is distinct from 'pg_read_all_data' \
    ) \
    select format('%1$s may read %2$s, which has hashes of passwords: `revoke select on %2$s from %1$s`%3$s', \
            reader, name, case when grantee <> oid '0' then ', unless it runs userd' end), \
        grantee = oid '0' \
    from named order by 1";

/// A line if addresses are in another form than NFC, which only a database in UTF8 can tell. The statement leaves out
/// addresses that another user has in NFC.
const NOT_NORMALIZED: &str = "\
    select format('%1$s addresses are not in Unicode''s form NFC, so that no login and no ?email= finds them: \
        `update %2$I.users u set email = normalize(email, nfc) where email is not nfc normalized and not exists ( \
        select from %2$I.users o where o.id <> u.id \
        and lower(normalize(o.email, nfc) collate \"C\") = lower(normalize(u.email, nfc) collate \"C\"))` \
        brings them into it, but for those that another user has then', count(*), current_schema()) \
    from users where case when getdatabaseencoding() = 'UTF8' then email::text is not nfc normalized end \
    having count(*) > 0";

/// Statements that give the role $1 the rights to run a service, one in each row. $2: names of tables, $3: of those that
/// are written.
const GRANTS: &str = "\
    select format(line, current_database(), current_schema(), rolname, pg_get_serial_sequence('users', 'id'), \
        written, read) \
    from pg_roles, (select string_agg(format('%I.%I', current_schema(), name), ', ') \
                filter (where name = any ($3::text[])) as written, \
            string_agg(format('%I.%I', current_schema(), name), ', ') \
                filter (where name <> all ($3::text[])) as read \
        from unnest($2::text[]) name) as tables, unnest(array[ \
        'grant connect on database %1$I to %3$I;', \
        'grant usage on schema %2$I to %3$I;', \
        'grant select, insert, update, delete on %5$s to %3$I;', \
        'grant select on %6$s to %3$I;', \
        'grant select on sequence %4$s to %3$I;']) as line \
    where rolname = $1";

/// Applies the migrations that the database lacks; `anew`: also if another schema has tables of userd. Returns a line for each,
/// and then for each such schema. Blocks as a start does.
pub fn migrate(config: &Config, anew: bool) -> Result<Vec<String>, StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    let applied = migrations.bring_up(&servers, true, anew)?;
    let mut lines: Vec<_> = applied.iter().map(|name| format!("applied {name}")).collect();
    if !lines.is_empty() {
        let others = migrations.elsewhere(&mut servers.connect_for_long()?)?;
        lines.extend(others.into_iter().map(not_used));
    }
    Ok(lines)
}

/// Says that another schema has tables of userd.
fn not_used((schema, _): (String, String)) -> String {
    format!("userd's tables are in the schema {schema:?}, too, and their users are not used here")
}

/// Counts all users anew. Returns a line with their number. Blocks while they are counted.
pub fn recount(config: &Config) -> Result<String, StartError> {
    counts::recount(&mut connect_migrated(config)?).map_err(StartError::Statement)
}

/// Returns the statements that let a role run a service on the database, each with its semicolon.
pub fn grants(config: &Config, role: &str) -> Result<Vec<String>, StartError> {
    let grants = lines(&mut connect_migrated(config)?, GRANTS, &[(&role, Type::TEXT), READS, WRITES])?;
    if grants.is_empty() {
        return Err(StartError::Statement(format!("there is no role {role:?}")));
    }
    Ok(grants)
}

/// Returns findings about the database, as a start and a service would meet them. Changes no row; a few ids are drawn. Blocks up to
/// `db_connect_timeout`, and some seconds if it meets locks.
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

/// Adds findings until one hides all that would follow.
fn examine(config: &Config, options: Options, findings: &mut Vec<Finding>) -> Result<(), StartError> {
    let (servers, migrations) = (Servers::new(config)?, Migrations::load(config.migrations_dir.as_deref())?);
    add(findings, Fine, "configuration", ["every variable can be used"]);
    let warnings = servers.target.warnings.iter().map(|line| format!("DATABASE_URL: {line}"));
    add(findings, Note, "configuration", warnings);
    let client = &mut servers.connect_for_long()?;
    add(findings, Fine, "database", [format!("connected to {}", servers.target)]);
    let version: String = client.query_typed_one("select current_setting('server_version')", &[])?.get(0);
    add(findings, Fine, "database", [format!("PostgreSQL {version}")]);
    add(findings, Note, "database", lines(client, LIMITS, &[])?);
    if servers.sessions() == Sessions::SetOwn && servers.lends(servers.connect_for_long()?) {
        let line = "a pooler lends its sessions for one transaction each: userd needs DB_PREPARED=false";
        add(findings, Problem, "database", [line]);
    }
    let missing = migrations.missing(&servers, client, false);
    hazards(&servers, client, missing.is_ok(), findings)?;
    if !servers.sessions().keep_statements()
        && missing.is_ok()
        && !findings.iter().any(|finding| finding.subject == "settings")
    {
        add(findings, Fine, "settings", ["the role has the settings that userd needs behind a pooler"]);
    }
    match &missing {
        Err(line) => add(findings, Problem, "migrations", [line]),
        Ok(None) => {
            add(findings, Fine, "migrations", ["all are applied"]);
            let others = migrations.elsewhere(client)?.into_iter().map(not_used);
            add(findings, Note, "schema", others);
        }
        Ok(Some(names)) => {
            let (weight, what) = match (names.is_empty(), config.migrate) {
                (true, _) => (Problem, "the database has others than this userd"),
                (false, true) => (Note, "a start applies what is missing"),
                (false, false) => (Problem, "`userd migrate` applies what is missing"),
            };
            add(findings, weight, "migrations", [format!("{what}: {}", names.join(", "))]);
        }
    }
    let migrates = config.migrate && matches!(missing, Ok(Some(_)));
    let mut lacking = if migrates { lines(client, BLOCKED, &[])? } else { Vec::new() };
    let rights = [(&migrates as &_, Type::BOOL), READS, WRITES, (&migrations.made(), Type::TEXT_ARRAY)];
    lacking.extend(lines(client, MISSING_RIGHTS, &rights)?);
    let fine = lacking.is_empty().then_some("the role may do all that is needed");
    add(findings, Fine, "privileges", fine);
    let lacking_rights = !lacking.is_empty();
    add(findings, Problem, "privileges", lacking);
    if migrates {
        add(findings, Problem, "migrations", refuse_one_session(&servers, client).err());
    }
    if !matches!(missing, Ok(None)) || lacking_rights {
        return Ok(());
    }
    let found = trial::run(client, &migrations, options.changes)?;
    let fine = found.is_empty().then_some("creates, reads, changes and deletes do what they should");
    add(findings, Fine, "service", fine);
    findings.extend(found);
    for row in client.query_typed(READERS, &[])? {
        let weight = if row.get(1) { Problem } else { Note };
        add(findings, weight, "privileges", [row.get::<_, String>(0)]);
    }
    if options.counts {
        match counts::compare(client) {
            Ok(line) => add(findings, Fine, "tables", [line]),
            Err(line) => add(findings, Problem, "tables", [line]),
        }
        add(findings, Problem, "tables", lines(client, NOT_NORMALIZED, &[])?);
    }
    Ok(())
}
