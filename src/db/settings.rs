//! Settings that the statements of a service need in their session. userd sets them at the opening of each. Behind a
//! pooler, which lends another session to each transaction, the role has to have them, and `userd check` compares.

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

/// Returns the statements that set all of them in a session.
pub fn statements() -> String {
    NEEDED.map(|(name, value)| format!("set {name} = '{value}'; ")).concat() + SEARCH_PATH
}
