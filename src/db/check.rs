//! The commands `migrate`, `check`, `recount` and `grants` on a database: migrations without a service, a check that
//! changes nothing, and the repairs of its findings. Not part of the library's interface.

pub use super::counts::compare as compare_counts;

use super::{
    connect::Servers,
    counts, explain,
    migrate::{
        ADDED, BLOCKED, LENT, Migrations, OPEN_SCHEMAS, ROW_SECURITY, connect_migrated, refuse_one_session,
    },
    session::Param,
    settings,
};
use crate::{config::Config, error::StartError};
use postgres::{Client, types::Type};

/// Remedy for a database that cannot be connected to.
pub const ANOTHER_DATABASE: &str =
    "DATABASE_URL names another database, `userd --embedded` runs one of its own";

/// Meaning of a finding for a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Weight {
    /// Correct.
    #[strum(serialize = "ok")]
    Fine,
    /// Worth knowing.
    Note,
    /// The service would not start, or would fail requests.
    Problem,
}

/// A subject in a word, and a line.
type Finding = (Weight, &'static str, String);
type Problem = (&'static str, String);

const SERVER: &str = "select current_setting('server_version'), current_setting('server_encoding'), \
    current_setting('transaction_read_only') = 'on'";

/// The rights that a request or a command needs and the role has not; with $1, those of migrations, too. Tables that are
/// not there yet are left out.
const MISSING_RIGHTS: &str = "\
    select format('the role may not %s %s', lower(action), name) \
    from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts', \
            'refinery_schema_history']) with ordinality as tables (name, position), \
        unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where not has_table_privilege(to_regclass(name)::oid, action) \
        and (position <= 3 or action = 'SELECT') \
    union all \
    select 'the role does not own the table users' from pg_class \
    where $1 and oid = to_regclass('users')::oid and not pg_has_role(relowner, 'USAGE')";

/// A line for each fact of the tables, in the words of [`EXPECTED`]: columns, keys, unique indexes and enabled triggers.
const FACTS: &str = "\
    with ours as ( \
        select oid, relname from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts']) name \
            join pg_class on oid = to_regclass(name)::oid \
    ) \
    select relname::text from ours \
    union all select format('%s.%s: %s%s%s', relname, attname, format_type(atttypid, atttypmod), \
        case when attnotnull then ' not null' end, \
        case when attidentity <> '' then ' identity' else ' default ' || pg_get_expr(adbin, adrelid) end) \
        from ours join pg_attribute on attrelid = oid left join pg_attrdef on adrelid = attrelid and adnum = attnum \
        where attnum > 0 and not attisdropped \
    union all select format('%s: %s', relname, pg_get_constraintdef(c.oid, true)) \
        from ours join pg_constraint c on conrelid = ours.oid where contype in ('p', 'u', 'f') and convalidated \
    union all select format('%s: %s', relname, regexp_replace(pg_get_indexdef(indexrelid, 0, true), '^.* USING ', '')) \
        from ours join pg_index on indrelid = oid where indisunique and indisvalid and not indisprimary \
    union all select format('%s: trigger %s calls %s', relname, tgname, proname) \
        from ours join pg_trigger on tgrelid = ours.oid join pg_proc p on p.oid = tgfoid \
        where not tgisinternal and tgenabled <> 'D'";

/// Lines of [`FACTS`] after all migrations.
const EXPECTED: &str = include_str!("expected.txt");

/// The sequence that ids are drawn from, whatever its name is.
const SEQUENCE: &str = "select pg_get_serial_sequence('users', 'id')";

/// A line if the sequence `SEQUENCE` of ids would give new users ids that are taken.
const BEHIND: &str = "\
    select format('the sequence of ids is at %s and the largest id is %s, so that creates fail: \
        `select setval(%3$L, %4$s)` moves it', last_value, coalesce(largest::text, 'none'), \
        pg_get_serial_sequence('users', 'id'), coalesce(largest, bigint '1')) \
    from SEQUENCE, (select max(id) as largest from users) as ids \
    where largest > last_value or largest = last_value and not is_called \
        or last_value = bigint '9223372036854775807'";

/// The roles that may read hashes and do not run a service, by grants of tables, of columns and of views, and whether all
/// roles may.
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
            and not coalesce((select bool_and(has_table_privilege(grantee, one, action)) \
                from unnest(array['users', 'credentials', 'idempotency_keys']) one, \
                    unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action where grantee <> oid '0'), false) \
    ) \
    select format('%1$s may read %2$s, which has hashes of passwords: `revoke select on %2$s from %1$s`', reader, name), \
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

/// Statements that give a role the rights to run a service, one in each row.
const GRANTS: &str = "\
    select format(line, current_database(), current_schema(), rolname, pg_get_serial_sequence('users', 'id')) \
    from pg_roles, unnest(array[ \
        'grant connect on database %1$I to %3$I;', \
        'grant usage on schema %2$I to %3$I;', \
        'grant select, insert, update, delete on %2$I.users, %2$I.credentials, %2$I.idempotency_keys to %3$I;', \
        'grant select on %2$I.user_counts, %2$I.refinery_schema_history to %3$I;', \
        'grant select on sequence %4$s to %3$I;']) as line \
    where rolname = $1";

/// Applies the migrations that the database lacks; their names. Blocks as a start does.
pub fn migrate(config: &Config) -> Result<Vec<String>, StartError> {
    let servers = Servers::new(config)?;
    Migrations::load(config.migrations_dir.as_deref())?.bring_up(&servers, true)
}

/// Counts all users anew; a line with how many they are. Blocks while they are counted.
pub fn recount(config: &Config) -> Result<String, StartError> {
    counts::recount(&mut connect_migrated(config)?).map_err(StartError::Statement)
}

/// The statements that let a role run a service on the database, each with its semicolon.
pub fn grants(config: &Config, role: &str) -> Result<Vec<String>, StartError> {
    let rows = connect_migrated(config)?.query_typed(GRANTS, &[(&role, Type::TEXT)]);
    let rows = rows.map_err(|error| StartError::Statement(explain(&error)))?;
    if rows.is_empty() {
        return Err(StartError::Statement(format!("there is no role {role:?}")));
    }
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Returns findings about the database, as a start would meet them. Changes nothing. Blocks up to `db_connect_timeout`.
/// `with_counts`: all users are counted, too.
pub fn check(config: &Config, with_counts: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Err((subject, line)) = examine(config, with_counts, &mut findings) {
        findings.push((Weight::Problem, subject, line));
    }
    findings
}

/// Everything up to the first problem that hides the others.
fn examine(config: &Config, with_counts: bool, findings: &mut Vec<Finding>) -> Result<(), Problem> {
    let unusable = |error: StartError| match error {
        StartError::Config(error) => ("configuration", error.to_string()),
        error @ StartError::Database(_) => ("database", format!("{error}; {ANOTHER_DATABASE}")),
        error => ("database", error.to_string()),
    };
    let servers = Servers::new(config).map_err(unusable)?;
    let migrations = Migrations::load(config.migrations_dir.as_deref());
    let migrations = migrations.map_err(|error| unusable(error.into()))?;
    findings.push((Weight::Fine, "configuration", "every variable can be used".to_owned()));
    let warnings = servers.target.warnings.iter().map(|line| format!("DATABASE_URL: {line}"));
    findings.extend(warnings.map(|line| (Weight::Note, "configuration", line)));
    let client = &mut servers.connect_for_long().map_err(unusable)?;
    findings.push((Weight::Fine, "database", format!("connected to {}", servers.target)));
    let row = client.query_typed_one(SERVER, &[]).map_err(failed)?;
    findings.push((Weight::Fine, "database", format!("PostgreSQL {}", row.get::<_, &str>(0))));
    let encoding: &str = row.get(1);
    if encoding != "UTF8" {
        let line =
            format!("its encoding is {encoding}, not UTF8: names and addresses that do not fit get 500");
        findings.push((Weight::Note, "database", line));
    }
    if row.get(2) {
        let line = "it accepts no changes: a standby, or default_transaction_read_only is on";
        findings.push((Weight::Note, "database", line.to_owned()));
    }
    if servers.found_pooler() {
        let line = format!("{LENT}: userd serves as with DB_PREPARED=false");
        findings.push((Weight::Note, "database", line));
    }
    if !servers.prepared() {
        let fine = "the role has the settings that userd needs behind a pooler";
        let lacking = settings::lacking(client, servers.statement_timeout()).map_err(failed)?;
        add(findings, "settings", Some(fine), lacking);
    } else if !config.find_pooler && servers.lends(client) {
        let line = format!("{LENT}: userd needs DB_PREPARED=false");
        findings.push((Weight::Problem, "database", line));
    }
    add(findings, "schema", None, rows(client, OPEN_SCHEMAS, &[])?);
    // If it cannot be told, missing rights may be the cause.
    let lacking = migrations.missing(client).map_err(|line| ("migrations", line));
    match &lacking {
        Err(_) => {}
        Ok(None) => findings.push((Weight::Fine, "migrations", "all are applied".to_owned())),
        Ok(Some(missing)) => {
            let (weight, what) = match (missing.is_empty(), config.migrate) {
                (true, _) => (Weight::Problem, "the database has others than this userd"),
                (false, true) => (Weight::Note, "a start applies what is missing"),
                (false, false) => (Weight::Problem, "`userd migrate` applies what is missing"),
            };
            findings.push((weight, "migrations", format!("{what}: {}", missing.join(", "))));
        }
    }
    let migrates = config.migrate && matches!(lacking, Ok(Some(_)));
    let mut lines = if migrates { rows(client, BLOCKED, &[])? } else { Vec::new() };
    lines.extend(rows(client, MISSING_RIGHTS, &[(&migrates, Type::BOOL)])?);
    add(findings, "privileges", Some("the role may do all that is needed"), lines);
    if migrates {
        refuse_one_session(&servers, client).map_err(|line| ("migrations", line))?;
    }
    if lacking?.is_some() {
        return Ok(());
    }
    let facts = rows(client, FACTS, &[])?;
    let missing: Vec<_> = EXPECTED.lines().filter(|line| !facts.iter().any(|fact| fact == line)).collect();
    if !missing.is_empty() {
        // The rest would fail, or say it once more.
        let lines = missing.iter().map(|line| format!("missing or disabled: {line}"));
        add(findings, "tables", None, lines.collect());
        return Ok(());
    }
    let sequence: String = client.query_typed_one(SEQUENCE, &[]).map_err(failed)?.get(0);
    match client.query_typed(&BEHIND.replace("SEQUENCE", &sequence), &[]) {
        Ok(rows) => add(findings, "tables", None, rows.iter().map(|row| row.get(0)).collect()),
        Err(error) => {
            let line =
                format!("the role may not see the sequence of ids, which may be behind: {}", explain(&error));
            findings.push((Weight::Note, "tables", line));
        }
    }
    let ours = vec!["users", "credentials", "idempotency_keys", "user_counts", "refinery_schema_history"];
    add(findings, "tables", None, rows(client, ROW_SECURITY, &[(&ours, Type::TEXT_ARRAY)])?);
    add(findings, "tables", None, rows(client, ADDED, &[])?);
    for row in client.query_typed(READERS, &[]).map_err(failed)? {
        let weight = if row.get(1) { Weight::Problem } else { Weight::Note };
        findings.push((weight, "privileges", row.get(0)));
    }
    if with_counts {
        let line = counts::compare(client).map_err(|line| ("tables", line))?;
        findings.push((Weight::Fine, "tables", line));
        add(findings, "tables", None, rows(client, NOT_NORMALIZED, &[])?);
    }
    Ok(())
}

/// Adds a problem for each line; if there is none, `fine`.
fn add(findings: &mut Vec<Finding>, subject: &'static str, fine: Option<&str>, problems: Vec<String>) {
    if let (true, Some(fine)) = (problems.is_empty(), fine) {
        findings.push((Weight::Fine, subject, fine.to_owned()));
    }
    findings.extend(problems.into_iter().map(|line| (Weight::Problem, subject, line)));
}

/// The rows of a statement, each of which is a line.
fn rows(client: &mut Client, sql: &str, params: &[Param]) -> Result<Vec<String>, Problem> {
    let rows = client.query_typed(sql, params).map_err(failed)?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

fn failed(error: postgres::Error) -> Problem {
    ("database", explain(&error))
}
