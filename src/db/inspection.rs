//! Inspects a database and the rights of its role without a change, and lists the rights that another role needs.

use super::settings;
use postgres::{
    Client,
    types::{ToSql, Type},
};

/// Meaning of a finding for a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// Correct.
    Fine,
    /// Worth knowing.
    Note,
    /// The service would not start, or would fail requests.
    Problem,
}

const SERVER: &str = "\
    select current_setting('server_version_num')::int, current_setting('server_version'), \
        current_setting('server_encoding'), current_setting('transaction_read_only')::bool, \
        current_setting('max_connections')::int - \
            current_setting('superuser_reserved_connections')::int";

/// The rights that a request or a command needs and the role has not. Tables that are not there yet are left out.
const MISSING_RIGHTS: &str = "\
    select format('the role may not %s %s', lower(action), name) \
    from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts', \
            'refinery_schema_history']) with ordinality as tables (name, position), \
        unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where not has_table_privilege(to_regclass(name)::oid, action) \
        and (position <= 3 or action = 'SELECT') \
    order by position";

/// Why the role cannot migrate: it may not create tables where they would be created, or change those that are there.
const NO_MIGRATIONS: &str = "\
    select 'the role may not create tables in its schema' \
    where not coalesce(has_schema_privilege(current_schema()::text, 'CREATE'), false) \
    union all \
    select 'the role does not own the table users' from pg_class \
    where oid = to_regclass('users')::oid \
        and not pg_has_role(relowner, 'USAGE')";

const MAY_CREATE_TEMPORARY: &str = "select has_database_privilege(current_database(), 'TEMPORARY')";

const DISABLED_TRIGGERS: &str = "\
    select format('the trigger %s of users is disabled: totals and pages may be wrong', tgname) \
    from pg_trigger \
    where tgrelid = to_regclass('users')::oid and not tgisinternal \
        and tgenabled = 'D' order by 1";

/// A line for each fact of the tables, in the words of [`EXPECTED`]: columns, keys, unique indexes and triggers.
const FACTS: &str = "\
    with ours as ( \
        select oid, relname from pg_class where oid = any (array( \
            select to_regclass(name)::oid \
            from unnest(array['users', 'credentials', 'idempotency_keys', 'user_counts']) name)) \
    ) \
    select relname::text from ours \
    union all select format('%s.%s: %s%s%s', relname, attname, format_type(atttypid, atttypmod), \
        case when attnotnull then ' not null' end, \
        case when attidentity = 'a' then ' identity' else ' default ' || pg_get_expr(adbin, adrelid) end) \
        from ours join pg_attribute on attrelid = oid left join pg_attrdef on adrelid = attrelid and adnum = attnum \
        where attnum > 0 and not attisdropped \
    union all select format('%s: %s', relname, pg_get_constraintdef(c.oid, true)) \
        from ours join pg_constraint c on conrelid = ours.oid where contype in ('p', 'u', 'f') and convalidated \
    union all select format('%s: %s', relname, regexp_replace(pg_get_indexdef(indexrelid, 0, true), '^.* USING ', '')) \
        from ours join pg_index on indrelid = oid where indisunique and indisvalid and not indisprimary \
    union all select format('%s: trigger %s calls %s', relname, tgname, proname) \
        from ours join pg_trigger on tgrelid = ours.oid join pg_proc p on p.oid = tgfoid where not tgisinternal";

/// Lines of [`FACTS`] after all migrations.
pub const EXPECTED: &str = include_str!("expected.txt");

/// Functions with the owner's rights whose names are looked up in another schema than that of the tables.
const RENAMED: &str = "\
    select format('the schema was renamed, and the function looks tables up by its old name: \
        alter function %s set search_path = %I, pg_temp', p.oid::regprocedure, nspname) \
    from pg_class c join pg_namespace n on n.oid = relnamespace join pg_proc p on pronamespace = n.oid \
    where c.oid = to_regclass('users')::oid \
        and proname in ('user_counts_record', 'user_counts_reset', 'idempotency_erase') \
        and not coalesce(proconfig, '{}') @> array['search_path=' || quote_ident(nspname::text) || ', pg_temp'] \
    order by 1";

/// The schemas in which names are looked up and in which another role than the owner of the tables, or all of them, may
/// create, and what ends that.
const OPEN_SCHEMAS: &str = "\
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

/// Settings of the session that differ from what is needed, and the statement that changes each for the role. The schema
/// of the tables alone is to be looked in, and that of temporary tables last.
const OTHER_SETTINGS: &str = "\
    select format('%s is %s: alter role %I in database %I set %s = %L', \
        name, setting, current_user, current_database(), name, needed) \
    from rows from (unnest($1::text[]), unnest($2::text[])) as given (name, needed), \
        current_setting(name) as setting \
    where setting <> needed \
    union all \
    select format('search_path is %s: alter role %I in database %I set search_path = %I, pg_temp', \
        setting, current_user, current_database(), current_schema()) \
    from current_setting('search_path') as setting \
    where replace(setting, ' ', '') <> replace(quote_ident(current_schema()::text) || ',pg_temp', ' ', '')";

/// The sequence of ids, and whether the role may look at it.
const SEQUENCE: &str = "\
    select sequence, has_sequence_privilege(sequence, 'SELECT') \
    from pg_get_serial_sequence('users', 'id') as sequence";

/// The tables of which a role may see some rows only.
const ROW_SECURITY: &str = "\
    select format('row-level security is enabled for %1$s, and totals are those of all rows: \
        `alter table %1$s disable row level security`', oid::regclass) from pg_class \
    where relrowsecurity and oid = any (array( \
        select to_regclass(name)::oid from unnest(array['users', 'credentials', 'idempotency_keys', \
            'user_counts', 'refinery_schema_history']) as tables (name))) \
    order by 1";

/// Statements that give a role the rights to run a service, one in each row.
const GRANTS: &str = "\
    select format(line, current_database(), n.nspname, \
        pg_get_serial_sequence('users', 'id'), r.rolname) \
    from pg_roles as r, pg_class as c, pg_namespace as n, unnest(array[ \
        'grant connect on database %1$I to %4$I;', \
        'grant usage on schema %2$I to %4$I;', \
        'grant select, insert, update, delete on %2$I.users, %2$I.credentials, %2$I.idempotency_keys to %4$I;', \
        'grant select on %2$I.user_counts, %2$I.refinery_schema_history to %4$I;', \
        'grant select on sequence %3$s to %4$I;']) as line \
    where r.rolname = $1 \
        and c.oid = to_regclass('users')::oid \
        and n.oid = c.relnamespace";

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

/// Judges the rights of the role. `migrating`: it is to apply migrations.
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

/// Finds objects of the migrations that are missing. [`privileges`] finds triggers that are disabled.
pub fn tables(client: &mut Client) -> Findings {
    let rows = client.query_typed(FACTS, &[])?;
    let facts: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    let missing = |line: &&str| !facts.contains(line);
    let tables: Vec<&str> = EXPECTED.lines().filter(|line| !line.contains(':')).filter(missing).collect();
    // If a table is missing, its columns and keys need no lines.
    let of_missing = |line: &str| {
        tables
            .iter()
            .any(|table| line.starts_with(&format!("{table}.")) || line.starts_with(&format!("{table}:")))
    };
    let lines = EXPECTED.lines().filter(missing).filter(|line| !of_missing(line));
    let mut findings: Vec<_> = lines.map(|line| (Weight::Problem, format!("missing: {line}"))).collect();
    findings.extend(problems(client, RENAMED, &[])?);
    Ok(findings)
}

/// Finds a sequence that would give new users ids that are taken.
pub fn ids(client: &mut Client) -> Findings {
    let row = client.query_typed_one(SEQUENCE, &[])?;
    let name = match (row.get::<_, Option<String>>(0), row.get(1)) {
        (Some(name), Some(true)) => name,
        (Some(name), _) => {
            let line =
                format!("the role may not select {name}: it cannot tell whether that is behind the ids");
            return Ok(vec![(Weight::Note, line)]);
        }
        (None, _) => return Ok(Vec::new()),
    };
    let behind = format!(
        "select format('the sequence of ids is at %2$s and the largest id is %1$s, so that creates fail: \
                `select setval(''%3$s'', %1$s)` moves it', largest, last_value, $1) \
         from {name}, (select max(id) as largest from users) as ids \
         where largest > last_value or (largest = last_value and not is_called)"
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
