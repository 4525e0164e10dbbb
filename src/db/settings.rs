//! Settings that the statements of a service need in their session. userd sets them at the opening of each. Behind a
//! pooler, which lends another session to each transaction, the role has to have them, and `userd check` compares.

use std::time::Duration;

/// Name and value. Statements are written for read committed, whatever the role's default is: each is a transaction.
///
/// All of them walk indexes, however large a table was when they were planned, and whatever is known of it: a session
/// keeps its plans for good, as planning a page takes longer than reading it. And nothing is compiled: the planner
/// takes a page for more expensive than it is, and compiling one takes a hundred times as long as reading it.
pub const NEEDED: [(&str, &str); 5] = [
    ("default_transaction_isolation", "read committed"),
    ("plan_cache_mode", "force_generic_plan"),
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("jit", "off"),
];

/// Has names looked up in the schema of the tables alone, and never in that of temporary tables.
pub const SEARCH_PATH: &str = "\
    select set_config('search_path', quote_ident(current_schema()::text) || ', pg_temp', false) \
    where current_schema() is not null; ";

/// The longest wait of a statement for a lock. Then the statement is executed again later, and its session is free. Many
/// times what a commit takes, and short beside a request. It is set here, not in a statement: a statement locks its tables
/// before it can set anything.
const LOCK_TIMEOUT: Duration = Duration::from_millis(100);

/// Returns the statements that set up a session of a service.
pub fn statements(statement_timeout: Duration) -> String {
    let needed = NEEDED.map(|(name, value)| format!("set {name} = '{value}'; ")).concat();
    let [statement, lock] = [statement_timeout, LOCK_TIMEOUT].map(|time| time.as_millis().max(1));
    format!("{needed}set statement_timeout = {statement}; set lock_timeout = {lock}")
}
