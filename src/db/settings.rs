//! Settings that the statements of a service need in their session. userd sets them at the opening of each. Behind a
//! pooler, which lends another session to each transaction, the role has to have them, and `userd check` compares.

use super::session::{Param, lines};
use postgres::{Client, types::Type};
use std::time::Duration;

/// Settings of the session that differ from what is needed, and the statement that changes each for the role. Times may
/// be shorter. Names are to be looked up in the schema of the tables, and in that of temporary tables last.
const OTHER_SETTINGS: &str = "\
    select format('%s is %s: alter role %I in database %I set %s = %L', \
        name, current_setting(name), session_user, current_database(), name, needed) \
    from rows from (unnest($1::text[]), unnest($2::text[])) as given (name, needed) join pg_settings using (name) \
    where case when unit = 'ms' then setting::bigint not between bigint '1' and needed::bigint else setting <> needed end \
    union all \
    select format('search_path is %s: alter role %I in database %I set search_path = %I, pg_temp', \
        setting, session_user, current_database(), current_schema()) \
    from current_setting('search_path') as setting \
    where replace(setting, ' ', '') <> replace(quote_ident(current_schema()::text) || ',pg_temp', ' ', '')";

/// The longest wait of a statement for a lock. Then the statement is executed again later, and its session is free. Many
/// times what a commit takes, and short beside a request. It is set here, not in a statement: a statement locks its tables
/// before it can set anything.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// Returns names and values; times in milliseconds. Statements are written for read committed, whatever the role's default
/// is: each is a transaction.
///
/// All of them use indexes, however large a table was when they were planned, and whatever is known of it: a session
/// keeps its plans for good, as planning a page takes longer than reading it. And nothing is compiled: the planner
/// takes a page for more expensive than it is, and compiling one takes a hundred times as long as reading it.
fn needed(statement_timeout: Duration) -> [(&'static str, String); 7] {
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

/// Returns the statements that set up a session of a service; `set`: the command, as `set local` for one transaction.
pub fn statements(set: &str, statement_timeout: Duration) -> String {
    needed(statement_timeout).map(|(name, value)| format!("{set} {name} = '{value}'; ")).concat()
}

/// Returns a line for each setting that the role lacks, with the statement that gives it. One round trip.
pub fn lacking(client: &mut Client, statement_timeout: Duration) -> Result<Vec<String>, postgres::Error> {
    let (names, values): (Vec<_>, Vec<_>) = needed(statement_timeout).into_iter().unzip();
    let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&values, Type::TEXT_ARRAY)];
    lines(client, OTHER_SETTINGS, &params)
}
