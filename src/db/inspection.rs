//! What a database is, and what its role may do there: for a check that changes nothing. And what another role needs.

use super::settings;
use postgres::{
    Client,
    types::{ToSql, Type},
};

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
        pg_catalog.current_setting('server_encoding'), pg_catalog.current_setting('transaction_read_only')::bool, \
        pg_catalog.current_setting('max_connections')::int operator(pg_catalog.-) \
            pg_catalog.current_setting('superuser_reserved_connections')::int";

/// The rights that a request or a command needs and the role has not. Tables that are not there yet are left out.
const MISSING_RIGHTS: &str = "\
    select pg_catalog.format('the role may not %s %s', pg_catalog.lower(action), name) \
    from pg_catalog.unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts', \
            'refinery_schema_history']) with ordinality as tables (name, position), \
        pg_catalog.unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where not pg_catalog.has_table_privilege(pg_catalog.to_regclass(name), action) \
        and (position operator(pg_catalog.<=) 3 or action operator(pg_catalog.=) 'SELECT') \
    order by position";

/// Why the role cannot migrate: it may not create tables where they would be created, or change those that are there.
const NO_MIGRATIONS: &str = "\
    select 'the role may not create tables in its schema' \
    where not coalesce(pg_catalog.has_schema_privilege(pg_catalog.current_schema(), 'CREATE'), false) \
    union all \
    select 'the role does not own the table users' from pg_catalog.pg_class \
    where oid operator(pg_catalog.=) pg_catalog.to_regclass('users') \
        and not pg_catalog.pg_has_role(relowner, 'USAGE')";

const MAY_CREATE_TEMPORARY: &str =
    "select pg_catalog.has_database_privilege(pg_catalog.current_database(), 'TEMPORARY')";

const DISABLED_TRIGGERS: &str = "\
    select pg_catalog.format('the trigger %s of users is disabled: totals and pages may be wrong', tgname) \
    from pg_catalog.pg_trigger \
    where tgrelid operator(pg_catalog.=) pg_catalog.to_regclass('users') and not tgisinternal \
        and tgenabled operator(pg_catalog.=) 'D' order by 1";

/// The schemas in which names are looked up and in which another role than the owner of the tables, or all of them, may
/// create, and what ends that.
const OPEN_SCHEMAS: &str = "\
    select pg_catalog.format('other roles may create tables and functions in the schema %1$s: \
            revoke create on schema %1$I from %2$s', nspname, \
        case when grantee operator(pg_catalog.=) 0 then 'public' \
            else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(grantee)) end) \
    from pg_catalog.pg_namespace, pg_catalog.aclexplode(nspacl) \
    where nspname operator(pg_catalog.=) any (pg_catalog.current_schemas(false)) \
        and privilege_type operator(pg_catalog.=) 'CREATE' and grantee operator(pg_catalog.<>) nspowner \
        and grantee operator(pg_catalog.<>) coalesce( \
            (select relowner from pg_catalog.pg_class where oid operator(pg_catalog.=) pg_catalog.to_regclass('users')), \
            (select oid from pg_catalog.pg_roles where rolname operator(pg_catalog.=) current_user)) \
    order by 1";

/// Settings of the session that differ from what is needed, and the line that changes them for the role.
const OTHER_SETTINGS: &str = "\
    select pg_catalog.format('%s is %s: alter role %I set %s = %L', name, setting, current_user, name, needed) \
    from rows from (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[])) as given (name, needed), \
        pg_catalog.current_setting(name) as setting \
    where setting operator(pg_catalog.<>) needed";

/// The sequence of ids, and what the role may do to it.
const SEQUENCE: &str = "\
    select sequence, pg_catalog.has_sequence_privilege(sequence, 'SELECT'), \
        pg_catalog.has_sequence_privilege(sequence, 'UPDATE') \
    from pg_catalog.pg_get_serial_sequence('users', 'id') as sequence";

/// The tables of which a role may see some rows only.
const ROW_SECURITY: &str = "\
    select pg_catalog.format('row-level security is enabled for %1$s, and totals are those of all rows: \
        `alter table %1$s disable row level security`', oid::pg_catalog.regclass) from pg_catalog.pg_class \
    where relrowsecurity and oid operator(pg_catalog.=) any (array( \
        select pg_catalog.to_regclass(name) from pg_catalog.unnest(array['users', 'credentials', 'idempotency_keys', \
            'user_counts', 'refinery_schema_history']) as tables (name))) \
    order by 1";

/// What a role needs for a service to run with it, a statement a row.
const GRANTS: &str = "\
    select pg_catalog.format(line, pg_catalog.current_database(), n.nspname, \
        pg_catalog.pg_get_serial_sequence('users', 'id'), r.rolname) \
    from pg_catalog.pg_roles as r, pg_catalog.pg_class as c, pg_catalog.pg_namespace as n, pg_catalog.unnest(array[ \
        'grant connect on database %1$I to %4$I;', \
        'grant usage on schema %2$I to %4$I;', \
        'grant select, insert, update, delete on %2$I.users, %2$I.credentials, %2$I.idempotency_keys to %4$I;', \
        'grant select on %2$I.user_counts, %2$I.refinery_schema_history to %4$I;', \
        'grant select, update on sequence %3$s to %4$I;']) as line \
    where r.rolname operator(pg_catalog.=) $1 \
        and c.oid operator(pg_catalog.=) pg_catalog.to_regclass('users') \
        and n.oid operator(pg_catalog.=) c.relnamespace";

pub type Findings = Result<Vec<(Weight, String)>, postgres::Error>;

/// The server: what it is, and whether it has as many connections as the pool may open.
pub fn server(client: &mut Client, pool: u32) -> Findings {
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
        findings.push((
            Weight::Note,
            "it accepts no changes: a standby, or default_transaction_read_only is on".to_owned(),
        ));
    }
    if i64::from(connections) < i64::from(pool) {
        let line = format!("it accepts {connections} connections, and DB_POOL_SIZE is {pool}");
        findings.push((Weight::Problem, line));
    }
    Ok(findings)
}

/// The settings of a session that userd does not make itself, behind a pooler.
pub fn session_settings(client: &mut Client) -> Findings {
    let (names, values): (Vec<&str>, Vec<&str>) = settings::NEEDED.into_iter().unzip();
    let params: [(&(dyn ToSql + Sync), Type); 2] = [(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY)];
    let found = problems(client, OTHER_SETTINGS, &params)?;
    match found.is_empty() {
        true => {
            Ok(vec![(Weight::Fine, "the role has the settings that userd needs behind a pooler".to_owned())])
        }
        false => Ok(found),
    }
}

/// The schemas of the session's `search_path`.
pub fn schemas(client: &mut Client) -> Findings {
    problems(client, OPEN_SCHEMAS, &[])
}

/// What the role may do. `migrating`: whether it is to apply migrations.
pub fn privileges(client: &mut Client, migrating: bool) -> Findings {
    let mut findings = problems(client, MISSING_RIGHTS, &[])?;
    if migrating {
        findings.extend(problems(client, NO_MIGRATIONS, &[])?);
    }
    findings.extend(problems(client, DISABLED_TRIGGERS, &[])?);
    if findings.is_empty() {
        findings.push((Weight::Fine, "the role may do all that is needed".to_owned()));
    }
    if !client.query_typed_one(MAY_CREATE_TEMPORARY, &[])?.get::<_, bool>(0) {
        findings
            .push((Weight::Note, "the role may not create temporary tables: it cannot import".to_owned()));
    }
    Ok(findings)
}

/// Whether new users get ids that are free, and who would see to it.
pub fn ids(client: &mut Client) -> Findings {
    let row = client.query_typed_one(SEQUENCE, &[])?;
    let (name, may_select, may_update): (String, bool, bool) = (row.get(0), row.get(1), row.get(2));
    if !(may_select && may_update) {
        let line = format!(
            "the role may not select and update {name}: creates fail once it is behind the ids, as after a replication"
        );
        return Ok(vec![(Weight::Note, line)]);
    }
    let behind = format!(
        "select pg_catalog.format('the sequence of ids is at %2$s and the largest id is %1$s: \
                `select setval(''%3$s'', %1$s)` moves it, else the first create that meets a taken id does', \
             largest, last_value, $1) \
         from {name}, (select pg_catalog.max(id) as largest from users) as ids \
         where largest operator(pg_catalog.>) last_value \
            or (largest operator(pg_catalog.=) last_value and not is_called)"
    );
    problems(client, &behind, &[(&name, Type::TEXT)])
}

/// The tables of which a role may see some rows only.
pub fn row_security(client: &mut Client) -> Findings {
    problems(client, ROW_SECURITY, &[])
}

/// The statements that let a role run a service on these tables, each with its semicolon. None where there is no such
/// role.
pub fn grants(client: &mut Client, role: &str) -> Result<Vec<String>, postgres::Error> {
    let rows = client.query_typed(GRANTS, &[(&role, Type::TEXT)])?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// A problem for each row, which has its line.
fn problems(client: &mut Client, sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Findings {
    let rows = client.query_typed(sql, params)?;
    Ok(rows.iter().map(|row| (Weight::Problem, row.get(0))).collect())
}
