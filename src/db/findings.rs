//! Finds what makes a service unsafe or makes its requests fail. A finding is a line of text that a start logs and
//! `userd check` prints. If it is a problem, the line has a statement that removes the cause and changes nothing for
//! other programs.

use super::connect::{DbHosts, POOLER_NOTE, TransactionPooling};
use super::session::query_lines;
use super::{ALL_TABLES, session_settings};
use postgres::{Client, Error, types::Type};

/// How much a finding (a line of `userd check`) matters to the operator of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Severity {
    /// The service has what it needs.
    #[strum(serialize = "ok")]
    Fine,
    /// The service works, but the operator may want to know of the finding.
    Note,
    /// The service would not start, or would fail requests.
    Problem,
}

/// A line that `userd check` prints about the database or the configuration.
#[derive(Debug)]
pub struct Finding {
    pub severity: Severity,
    /// The subject of the finding in one word, such as `database` or `privileges`.
    pub subject: &'static str,
    /// The text of the finding, with the remedy if it is a problem.
    pub line: String,
}

/// Returns a line for each role that may create objects in a schema of the search_path and does not own the tables. The
/// line has the statement that takes the right away. With the right, the role could create a table or a function that
/// userd's statements use instead of userd's own.
const FIND_SCHEMA_WRITERS: &str = "\
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

/// Returns what keeps the role from applying migrations, with the statement that removes each obstacle. $1: names of
/// the tables, indexes and functions that the migrations create. If the search_path has a migration history that the
/// role may not read, the line asks for the right to read it: with the right to create tables instead, the role would
/// create a second, empty set of userd's tables.
pub const FIND_MIGRATION_OBSTACLES: &str = "\
    select case when pg_is_in_recovery() then 'it is a standby: DATABASE_URL has to name the primary' else \
        format('it takes no changes: `begin read write; alter role %I in database %I \
            set default_transaction_read_only = off; commit`', session_user, current_database()) end \
    where current_setting('transaction_read_only') = 'on' \
    union all \
    (select format(case \
            when c.oid is not null then 'the role may not read the history of migrations in the schema %1$I: \
                `grant usage on schema %1$I to %2$I; grant select on %1$I.refinery_schema_history to %2$I`' \
            when n.oid is not null then 'the role may not create tables in its schema: \
                `grant usage, create on schema %1$I to %2$I`' \
            else 'the role may not create tables in its schema, as its search_path has none (3F000): \
                `create schema %1$I authorization %2$I`' end, named.name, current_user) \
    from pg_settings, regexp_matches(reset_val, '\"((?:[^\"]|\"\")+)\"|([^\",\\s]+)', 'g') with ordinality as path (parts, position), \
        lateral (select coalesce(nullif(coalesce(replace(parts[1], '\"\"', '\"'), lower(parts[2])), '$user'), current_user::text) as name) as named \
        left join pg_namespace n on nspname::text = named.name \
        left join pg_class c on relnamespace = n.oid and relname = 'refinery_schema_history' \
            and not (has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT')) \
    where pg_settings.name = 'search_path' and has_schema_privilege(current_schema()::text, 'CREATE') is not true \
        and (c.oid is not null or current_schema() is null or nspname = current_schema()) \
    order by c.oid is null, nspname is null, position limit 1) \
    union all \
    select format('the role may not create tables, as its search_path is empty (3F000): \
        `alter role %I in database %I set search_path = \"$user\", public`', session_user, current_database()) \
    where current_setting('search_path') in ('', '\"\"') \
    union all \
    select format('the role does not own %s', string_agg('the ' || pg_describe_object(class, object, 0), ', ' order by position)) \
    from unnest($1::text[]) with ordinality as made (name, position), lateral ( \
        select tableoid::oid as class, oid as object, relowner as owner from pg_class \
            where oid = to_regclass(name)::oid and relkind::text = 'r' \
        union all select tableoid::oid, oid, proowner from pg_proc where oid = to_regprocedure(name || '()')::oid \
    ) as objects where not pg_has_role(owner, 'USAGE') having count(*) > bigint '0'";

/// Returns a line with its remedy for each column without a default and each rewrite rule that makes changes of users
/// fail, and for the setting that keeps triggers from counting users. $1: names of the tables.
const FIND_TABLE_FAULTS: &str = "\
    with ours as ( \
        select oid, relname, format('%I.%I', current_schema(), relname) as qualified \
        from unnest($1::text[]) name join pg_class on oid = to_regclass(name)::oid \
    ) \
    select format('creates get 500, as the column %1$I of %2$s has no default: `alter table %2$s alter %1$I %3$s`', \
        attname, qualified, case attname::text when 'id' then 'add generated always as identity' \
            when 'created_at' then 'set default now()' when 'updated_at' then 'set default now()' \
            when 'version' then 'set default floor(random() * float8 ''1e15'')::bigint' else 'drop not null' end) \
    from ours join pg_attribute on attrelid = oid \
    where attnum > 0 and not attisdropped and attnotnull and not atthasdef and attidentity::text = '' \
        and attname::text <> all (array['name', 'email', 'user_id', 'password_hash', 'key', 'expires_at', 'block', 'n']) \
        and relname::text <> 'refinery_schema_history' \
    union all \
    select format('changes get 500, as another program''s rule %1$I on %2$s rewrites them: \
        `drop rule %1$I on %2$s`, or give userd a schema of its own', rulename, qualified) \
    from ours join pg_rewrite on ev_class = ours.oid \
    union all \
    select format('no trigger is fired, so that totals and pages get wrong: \
        `alter role %I in database %I set session_replication_role = origin`', session_user, current_database()) \
    where current_setting('session_replication_role') = 'replica'";

/// Returns a line for each of the tables $1 in which row-level security hides rows from the role. The line has the
/// `alter` statement that makes the role see all rows.
pub const FIND_HIDDEN_ROWS: &str = "\
    select format('row-level security hides rows of %s from the role, and totals are those of all rows: `%s`', name, \
        case when pg_has_role(relowner, 'USAGE') \
            then format('alter table %I.%I no force row level security', current_schema(), name) \
            else format('alter role %I bypassrls', current_user) end) \
    from unnest($1::text[]) name join pg_class on oid = to_regclass(name)::oid \
    where row_security_active(oid)";

/// Returns the findings that a start logs. If `with_tables` is false, does not look at the tables, because tables with
/// these names may belong to another program.
pub fn get_findings(hosts: &DbHosts, client: &mut Client, with_tables: bool) -> Result<Vec<Finding>, Error> {
    let mut findings = Vec::new();
    let line = (hosts.pooling() == TransactionPooling::Detected).then_some(POOLER_NOTE);
    add_findings(&mut findings, Severity::Note, "database", line);
    // Compares the settings only if the tables are userd's. Otherwise a line would advise the operator to set the
    // search_path to the schema in use, which may be the wrong one.
    if !hosts.pooling().allows_prepared_statements() && with_tables {
        let lacking = session_settings::find_wrong_settings(client, hosts.statement_timeout())?;
        add_findings(&mut findings, Severity::Problem, "settings", lacking);
    }
    add_findings(&mut findings, Severity::Problem, "schema", query_lines(client, FIND_SCHEMA_WRITERS, &[])?);
    if with_tables {
        for sql in [FIND_HIDDEN_ROWS, FIND_TABLE_FAULTS] {
            let lines = query_lines(client, sql, &[(&ALL_TABLES, Type::TEXT_ARRAY)])?;
            add_findings(&mut findings, Severity::Problem, "tables", lines);
        }
    }
    Ok(findings)
}

/// Appends to `findings` one finding for each of `lines`.
pub fn add_findings(
    findings: &mut Vec<Finding>,
    severity: Severity,
    subject: &'static str,
    lines: impl IntoIterator<Item = impl Into<String>>,
) {
    findings.extend(lines.into_iter().map(|line| Finding { severity, subject, line: line.into() }));
}
