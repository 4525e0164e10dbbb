//! Settings that the statements of a service need in their session. userd sets them in each session that it opens.
//! Behind a pooler that lends sessions, the role has to have these settings, and `userd check` compares them.

use super::session::{Param, query_lines};
use postgres::{Client, Error, types::Type};
use std::time::Duration;

/// Returns a line for each setting of the session that differs from the needed value, with the statement that sets it
/// for the role. Accepts a time-out that is shorter than needed. The search_path has to be the schema of the tables,
/// then `pg_temp`. $1: names. $2: needed values.
const FIND_WRONG_SETTINGS: &str = "\
    select format('%s is %s: alter role %I in database %I set %s = %L', \
        name, current_setting(name), session_user, current_database(), name, needed) \
    from rows from (unnest($1::text[]), unnest($2::text[])) as expected (name, needed) join pg_settings using (name) \
    where case when unit = 'ms' then setting::bigint not between bigint '1' and needed::bigint else setting <> needed end \
    union all \
    select format('search_path is %s: alter role %I in database %I set search_path = %I, pg_temp', \
        setting, session_user, current_database(), current_schema()) \
    from current_setting('search_path') as setting \
    where replace(setting, ' ', '') <> replace(quote_ident(current_schema()::text) || ',pg_temp', ' ', '')";

/// The longest wait of a statement for a lock. Then the session serves other requests, and the statement is executed
/// again later. The wait is longer than a commit takes, so that no statement fails because of a single commit.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// Returns the names of the needed settings with their values; times are in milliseconds. Each statement of a service
/// is a transaction of its own, and is written for read committed, whatever the role's default is.
///
/// Plans are generic and use indexes, because a session keeps each plan, even if the table was empty when the plan was
/// made. JIT is off, because compiling the statement of a page takes longer than executing it.
fn needed_settings(statement_timeout: Duration) -> [(&'static str, String); 7] {
    let [statement, lock] = [statement_timeout, LOCK_TIMEOUT].map(|time| time.as_millis().max(1).to_string());
    [
        ("default_transaction_isolation", "read committed".to_owned()),
        ("plan_cache_mode", "force_generic_plan".to_owned()),
        ("enable_seqscan", "off".to_owned()),
        ("enable_bitmapscan", "off".to_owned()),
        ("jit", "off".to_owned()),
        ("statement_timeout", statement),
        ("lock_timeout", lock),
    ]
}

/// Returns the statements that set up a session of a service. `set` is the command to use: `set`, or `set local` for
/// one transaction.
pub fn setup_sql(set: &str, statement_timeout: Duration) -> String {
    needed_settings(statement_timeout).map(|(name, value)| format!("{set} {name} = '{value}'; ")).concat()
}

/// Returns a line for each setting that differs from the needed value, with the statement that sets it for the role.
/// One round trip.
pub fn find_wrong_settings(client: &mut Client, statement_timeout: Duration) -> Result<Vec<String>, Error> {
    let (names, values): (Vec<_>, Vec<_>) = needed_settings(statement_timeout).into_iter().unzip();
    let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY)];
    query_lines(client, FIND_WRONG_SETTINGS, &params)
}
