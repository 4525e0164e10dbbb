//! Compares the table `user_counts`, from which totals and the starts of pages are calculated, with the table `users`.
//! Counts the users anew if asked. `V2__user_counts.sql` explains how the counts are kept.

use super::explain;
use postgres::Client;

/// Returns the number of blocks of 4096 ids whose stored count of users is wrong, and the number of users, from one
/// snapshot.
const COMPARE_USER_COUNTS: &str = "\
    select count(*) filter (where coalesce(c.n, 0) <> coalesce(r.n, 0)), coalesce(sum(c.n), 0)::bigint \
    from (select id >> 12 as block, count(*) as n from users group by 1) c \
    full join (select block, sum(n) as n from user_counts group by 1) r on c.block = r.block";

/// Counts all users anew. Removes the old counts by DELETE, because a TRUNCATE would block readers, and would empty the
/// table for older snapshots, too. The transaction is read committed, so that the statements after `lock table` see
/// every change that was committed before the lock. Changes of users wait for the recount.
const RECOUNT_USERS: &str = "\
    begin isolation level read committed; \
    set local statement_timeout = 0; set local lock_timeout = '1s'; \
    lock table users in share row exclusive mode; \
    delete from user_counts; \
    insert into user_counts select id >> 12, count(*) from users group by 1; \
    commit";

/// Compares the stored counts with the users. Returns a line that says that counts and users agree, or an error
/// of one line with the difference. Blocks while the database counts; changes of users go on.
pub fn compare_user_counts(client: &mut Client) -> Result<String, String> {
    let row = client.query_typed_one(COMPARE_USER_COUNTS, &[]).map_err(|error| explain(&error))?;
    let (blocks, users): (i64, i64) = (row.get(0), row.get(1));
    match blocks {
        0 => Ok(format!("the page counts are those of the {users} users")),
        _ => Err(format!(
            "the page counts differ from the {users} users in {blocks} blocks of ids: totals and pages are wrong until \
             `userd recount`"
        )),
    }
}

/// Counts all users anew, and returns a line with their number. Only the owner of the tables may do so. Changes of
/// users wait meanwhile. Fails and changes nothing if another transaction that has changed users does not end within a
/// second. The error is one line.
pub fn recount_users(client: &mut Client) -> Result<String, String> {
    client.batch_execute(RECOUNT_USERS).map_err(|error| explain(&error))?;
    compare_user_counts(client)
}
