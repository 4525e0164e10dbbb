//! What a database is, and what its role may do there: for a check that changes nothing.

use postgres::Client;

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
    select current_setting('server_version_num')::int, current_setting('server_version'), \
        current_setting('server_encoding'), pg_is_in_recovery(), \
        current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int";

/// Each right that a request or a command needs, and whether the role has it. Tables that are not there yet are left out.
const RIGHTS: &str = "\
    select lower(action) || ' ' || name, has_table_privilege(to_regclass(name), action) \
    from unnest(array['users', 'credentials', 'idempotency_keys', 'page_counts', 'page_open', 'refinery_schema_history']) \
            with ordinality as tables (name, position), \
        unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) action \
    where to_regclass(name) is not null and (position <= 3 or action = 'SELECT') \
    order by position";

/// Whether the role may create tables where they would be created, change those that are there, and create temporary
/// ones.
const MIGRATING: &str = "\
    select coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), \
        coalesce((select pg_has_role(relowner, 'USAGE') from pg_class where oid = to_regclass('users')), true), \
        has_database_privilege(current_database(), 'TEMPORARY')";

const DISABLED_TRIGGERS: &str = "\
    select tgname::text from pg_trigger \
    where tgrelid = to_regclass('users') and not tgisinternal and tgenabled = 'D' order by 1";

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
