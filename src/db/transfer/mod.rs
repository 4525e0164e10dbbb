//! The statements that read or write many users at once: what exports and imports share of their transaction.

mod export;
mod staging;

pub use export::{begin_export, count, each_user};
pub use staging::{Repeated, Staging, write_staged, write_unstaged};

pub use super::sqlstate::taken;

use super::settings;
use postgres::{Client, IsolationLevel, Transaction};

/// What takes long is meant to. And no statement is compiled: where a table has no statistics yet, the planner takes
/// the page counts for expensive, and compiling the statement that sums them takes half a second. Not every version has
/// every setting.
const SETTINGS: &str = "\
    select pg_catalog.set_config(name, '0', true) from pg_catalog.pg_settings \
    where name operator(pg_catalog.=) any (array['statement_timeout', 'lock_timeout', \
        'idle_in_transaction_session_timeout', 'transaction_timeout', 'jit'])";

/// The transaction of an export, which only reads, or of an import.
fn begin(client: &mut Client, prepared: bool, only_reads: bool) -> Result<Transaction<'_>, postgres::Error> {
    // A pooler's session is not ours to set.
    if prepared {
        // Has the server notice within a second that this process has ended, whatever it is at. Before version 14, and
        // on other systems, there is no such setting: a statement is finished first.
        let _ = client.batch_execute("set client_connection_check_interval = 1000");
    }
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
    let mut transaction = transaction.read_only(only_reads).start()?;
    transaction.query_typed(SETTINGS, &[])?;
    transaction.batch_execute(&settings::statements_of_bulk())?;
    if !prepared {
        // A pooler's session may hold a statement of another client's that has the name of one of ours.
        transaction.batch_execute("deallocate all")?;
    }
    Ok(transaction)
}
