//! What an operator asks of the tables of a userd: the sequence of ids, row security, and what a role needs.
//!
//! For the commands, which have a session of their own; no service asks any of it.

use super::inspection::Weight;
use postgres::{Client, types::Type};

/// The sequence of ids, and what the role may do to it.
const SEQUENCE: &str = "\
    select sequence, pg_catalog.has_sequence_privilege(sequence, 'SELECT'), \
        pg_catalog.has_sequence_privilege(sequence, 'UPDATE') \
    from pg_catalog.pg_get_serial_sequence('users', 'id') as sequence";

const ROW_SECURITY: &str = "\
    select oid::pg_catalog.regclass::pg_catalog.text from pg_catalog.pg_class \
    where relrowsecurity and oid operator(pg_catalog.=) any (array( \
        select pg_catalog.to_regclass(name) from pg_catalog.unnest(array['users', 'credentials', 'idempotency_keys', \
            'page_counts', 'page_open', 'refinery_schema_history']) as tables (name))) \
    order by 1";

/// What a role needs for a service to run with it, a statement a row.
const GRANTS: &str = "\
    select pg_catalog.format(line, pg_catalog.current_database(), n.nspname, \
        pg_catalog.pg_get_serial_sequence('users', 'id'), r.rolname) \
    from pg_catalog.pg_roles as r, pg_catalog.pg_class as c, pg_catalog.pg_namespace as n, pg_catalog.unnest(array[ \
        'grant connect on database %1$I to %4$I;', \
        'grant usage on schema %2$I to %4$I;', \
        'grant select, insert, update, delete on %2$I.users, %2$I.credentials, %2$I.idempotency_keys to %4$I;', \
        'grant select on %2$I.page_counts, %2$I.page_open, %2$I.refinery_schema_history to %4$I;', \
        'grant select, update on sequence %3$s to %4$I;']) as line \
    where r.rolname operator(pg_catalog.=) $1 \
        and c.oid operator(pg_catalog.=) pg_catalog.to_regclass('users') \
        and n.oid operator(pg_catalog.=) c.relnamespace";

/// Whether new users get ids that are free, and who would see to it.
pub fn ids(client: &mut Client) -> Result<Vec<(Weight, String)>, postgres::Error> {
    let row = client.query_typed_one(SEQUENCE, &[])?;
    let (name, may_select, may_update): (String, bool, bool) = (row.get(0), row.get(1), row.get(2));
    if !(may_select && may_update) {
        let line = format!(
            "the role may not select and update {name}: creates fail once it is behind the ids, as after a replication"
        );
        return Ok(vec![(Weight::Note, line)]);
    }
    let behind = format!(
        "select largest, last_value from {name}, (select pg_catalog.max(id) as largest from users) as ids \
         where largest operator(pg_catalog.>) last_value \
            or (largest operator(pg_catalog.=) last_value and not is_called)"
    );
    let rows = client.query_typed(&behind, &[])?;
    let line = |largest: i64, last: i64| {
        format!(
            "the sequence of ids is at {last} and the largest id is {largest}: `select setval('{name}', {largest})` \
             moves it, else the first create that meets a taken id does"
        )
    };
    Ok(rows.iter().map(|row| (Weight::Problem, line(row.get(0), row.get(1)))).collect())
}

/// The tables of which a role may see some rows only.
pub fn row_security(client: &mut Client) -> Result<Vec<(Weight, String)>, postgres::Error> {
    let line = |table: &str| {
        format!(
            "row-level security is enabled for {table}, and totals are those of all rows: \
             `alter table {table} disable row level security`"
        )
    };
    let rows = client.query_typed(ROW_SECURITY, &[])?;
    Ok(rows.iter().map(|row| (Weight::Problem, line(row.get(0)))).collect())
}

/// The statements that let a role run a service on these tables, each with its semicolon. None where there is no such
/// role.
pub fn grants(client: &mut Client, role: &str) -> Result<Vec<String>, postgres::Error> {
    let rows = client.query_typed(GRANTS, &[(&role, Type::TEXT)])?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}
