//! What a database is, and what its role may do there: for a check that changes nothing.

use super::settings;
use postgres::{Client, types::Type};

/// What a finding means for a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// As it should be.
    Fine,
    /// Worth knowing.
    Note,
    /// The service would not start, or would fail requests.
    Problem,
}

const SERVER: &str = "\
    select pg_catalog.current_setting('server_version_num')::int, pg_catalog.current_setting('server_version'), \
        pg_catalog.current_setting('server_encoding'), pg_catalog.pg_is_in_recovery(), \
        pg_catalog.current_setting('max_connections')::int operator(pg_catalog.-) \
            pg_catalog.current_setting('superuser_reserved_connections')::int";

/// Each right that a request or a command needs, and whether the role has it. Tables that are not there yet are left out.
const RIGHTS: &str = "\
    select pg_catalog.lower(action) operator(pg_catalog.||) ' ' operator(pg_catalog.||) name, \
        pg_catalog.has_table_privilege(pg_catalog.to_regclass(name), action) \
    from pg_catalog.unnest(array['users', 'credentials', 'idempotency_keys', 'page_counts', 'page_open', \
            'refinery_schema_history']) with ordinality as tables (name, position), \
        pg_catalog.unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where pg_catalog.to_regclass(name) is not null \
        and (position operator(pg_catalog.<=) 3 or action operator(pg_catalog.=) 'SELECT') \
    order by position";

/// Whether the role may create tables where they would be created, change those that are there, and create temporary
/// ones.
const MIGRATING: &str = "\
    select coalesce(pg_catalog.has_schema_privilege(pg_catalog.current_schema(), 'CREATE'), false), \
        coalesce((select pg_catalog.pg_has_role(relowner, 'USAGE') from pg_catalog.pg_class \
            where oid operator(pg_catalog.=) pg_catalog.to_regclass('users')), true), \
        pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')";

const DISABLED_TRIGGERS: &str = "\
    select tgname::text from pg_catalog.pg_trigger \
    where tgrelid operator(pg_catalog.=) pg_catalog.to_regclass('users') and not tgisinternal \
        and tgenabled operator(pg_catalog.=) 'D' order by 1";

/// The schemas in which names are looked up and in which another role than the owner of the tables, or all of them, may
/// create: the line that ends that.
const OPEN_SCHEMAS: &str = "\
    select nspname::text, pg_catalog.format('revoke create on schema %I from %s', nspname, \
        case when grantee operator(pg_catalog.=) 0 then 'public' \
            else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(grantee)) end) \
    from pg_catalog.pg_namespace, pg_catalog.aclexplode(nspacl) \
    where nspname operator(pg_catalog.=) any (pg_catalog.current_schemas(false)) \
        and privilege_type operator(pg_catalog.=) 'CREATE' and grantee operator(pg_catalog.<>) nspowner \
        and grantee operator(pg_catalog.<>) coalesce( \
            (select relowner from pg_catalog.pg_class where oid operator(pg_catalog.=) pg_catalog.to_regclass('users')), \
            (select oid from pg_catalog.pg_roles where rolname operator(pg_catalog.=) current_user)) \
    order by 1, 2";

/// Settings of the session that differ from what is needed, and the line that changes them for the role.
const OTHER_SETTINGS: &str = "\
    select pg_catalog.format('%s is %s: alter role %I set %s = %L', name, setting, current_user, name, needed) \
    from rows from (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[])) as given (name, needed), \
        pg_catalog.current_setting(name) as setting \
    where setting operator(pg_catalog.<>) needed";

/// The server: what it is, and whether it has as many connections as the pool may open.
pub fn server(client: &mut Client, pool: u32) -> Result<Vec<(Weight, String)>, postgres::Error> {
    /// The oldest that is tested.
    const OLDEST: i32 = 130_000;
    let row = client.query_typed_one(SERVER, &[])?;
    let (version, name, encoding): (i32, &str, &str) = (row.get(0), row.get(1), row.get(2));
    let connections: i32 = row.get(4);
    let mut findings = vec![match version >= OLDEST {
        true => (Weight::Fine, format!("PostgreSQL {name}")),
        false => (Weight::Problem, format!("PostgreSQL {name} is older than 13")),
    }];
    if encoding != "UTF8" {
        findings.push((Weight::Note, format!("its encoding is {encoding}: it cannot hold every name")));
    }
    if row.get(3) {
        findings.push((Weight::Note, "it is a standby: it accepts no changes".to_owned()));
    }
    if i64::from(connections) < i64::from(pool) {
        let line = format!("it accepts {connections} connections, and DB_POOL_SIZE is {pool}");
        findings.push((Weight::Problem, line));
    }
    Ok(findings)
}

/// The settings of a session that userd does not make itself, behind a pooler.
pub fn session_settings(client: &mut Client) -> Result<Vec<(Weight, String)>, postgres::Error> {
    let (names, values): (Vec<&str>, Vec<&str>) = settings::NEEDED.into_iter().unzip();
    let rows =
        client.query_typed(OTHER_SETTINGS, &[(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY)])?;
    let lines = rows.iter().map(|row| (Weight::Problem, row.get(0))).collect::<Vec<_>>();
    match lines.is_empty() {
        true => {
            Ok(vec![(Weight::Fine, "the role has the settings that userd needs behind a pooler".to_owned())])
        }
        false => Ok(lines),
    }
}

/// The schemas of the session's `search_path`.
pub fn schemas(client: &mut Client) -> Result<Vec<(Weight, String)>, postgres::Error> {
    let rows = client.query_typed(OPEN_SCHEMAS, &[])?;
    let line = |schema: &str, mend: &str| {
        format!("other roles may create tables and functions in the schema {schema}: {mend}")
    };
    Ok(rows.iter().map(|row| (Weight::Problem, line(row.get(0), row.get(1)))).collect())
}

/// What the role may do. `migrating`: whether it is to apply migrations.
pub fn privileges(client: &mut Client, migrating: bool) -> Result<Vec<(Weight, String)>, postgres::Error> {
    let mut findings = Vec::new();
    for row in client.query_typed(RIGHTS, &[])? {
        if !row.get::<_, bool>(1) {
            findings.push((Weight::Problem, format!("the role may not {}", row.get::<_, &str>(0))));
        }
    }
    let row = client.query_typed_one(MIGRATING, &[])?;
    if migrating && !row.get::<_, bool>(0) {
        findings.push((Weight::Problem, "the role may not create tables in its schema".to_owned()));
    }
    if migrating && !row.get::<_, bool>(1) {
        findings.push((Weight::Problem, "the role does not own the table users".to_owned()));
    }
    if !row.get::<_, bool>(2) {
        findings
            .push((Weight::Note, "the role may not create temporary tables: it cannot import".to_owned()));
    }
    for row in client.query_typed(DISABLED_TRIGGERS, &[])? {
        let trigger: &str = row.get(0);
        let line = format!("the trigger {trigger} of users is disabled: totals and pages may be wrong");
        findings.push((Weight::Problem, line));
    }
    if findings.iter().all(|(weight, _)| *weight != Weight::Problem) {
        findings.insert(0, (Weight::Fine, "the role may do all that is needed".to_owned()));
    }
    Ok(findings)
}
