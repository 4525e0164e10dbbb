//! The counts behind pages: compares them with the table, and counts anew. See `V2__user_counts.sql`.

use super::explain;
use postgres::Client;

/// Returns the number of blocks whose count is wrong, and the number of users, from one snapshot.
const COUNTS: &str = "\
    select count(*) filter (where coalesce(c.n, 0) <> coalesce(r.n, 0)), coalesce(sum(c.n), 0)::bigint \
    from (select id >> 12 as block, count(*) as n from users group by 1) c \
    full join (select block, sum(n) as n from user_counts group by 1) r on c.block = r.block";

/// Counts all users anew. Unlike a TRUNCATE, the delete blocks no reader, and older snapshots keep their counts. The
/// lock comes before the first snapshot that looks at rows; at another level, that would be older than the lock. While
/// the lock is waited for, changes of users wait behind it.
const RECOUNT: &str = "\
    begin isolation level read committed; \
    set local statement_timeout = 0; set local lock_timeout = '1s'; \
    lock table users in share row exclusive mode; \
    delete from user_counts; \
    insert into user_counts select id >> 12, count(*) from users group by 1; \
    commit";

/// Compares the counts with the table. Blocks while the users are counted; writers go on.
///
/// # Errors
/// One line: they differ, or cannot be read.
pub fn compare(client: &mut Client) -> Result<String, String> {
    let row = client.query_typed_one(COUNTS, &[]).map_err(|error| explain(&error))?;
    let (blocks, users): (i64, i64) = (row.get(0), row.get(1));
    match blocks {
        0 => Ok(format!("the page counts are those of the {users} users")),
        _ => Err(format!(
            "the page counts differ from the {users} users in {blocks} blocks of ids: totals and pages are wrong until \
             `userd recount`"
        )),
    }
}

/// Counts all users anew, which only the tables' owner may do; returns a line that says so. Writers wait meanwhile, and
/// for a second if another transaction has written users and goes on: then nothing is changed, and the error says so.
pub fn recount(client: &mut Client) -> Result<String, String> {
    client.batch_execute(RECOUNT).map_err(|error| explain(&error))?;
    compare(client)
}
