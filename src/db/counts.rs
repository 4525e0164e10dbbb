//! The counts behind pages: whether they are those of the table, and counting anew.

use super::{explain, retry::until_unlocked};
use postgres::Client;

/// In one snapshot: how many blocks have another count than users, and how many users there are. What is recorded of a
/// block that is open may be any number; what is recorded of a larger one is the sum of what is recorded in it. See
/// `V2__page_counts.sql`.
const COUNTS: &str = "\
    with counted as materialized ( \
        select id operator(pg_catalog.>>) 9 as block, pg_catalog.count(*) as n from users group by 1 \
    ), recorded as materialized ( \
        select level::pg_catalog.int4 as level, block, pg_catalog.sum(n) as n from page_counts group by 1, 2 \
    ), expected (level, block, n) as ( \
        select 1, block, n from counted \
        union all \
        select above, block operator(pg_catalog.>>) bits, pg_catalog.sum(n) \
            from recorded cross join (values (2, 4), (3, 8)) as levels (above, bits) \
            where level operator(pg_catalog.=) 1 group by 1, 2 \
    ), compared as ( \
        select coalesce(e.level, r.level) as level, coalesce(e.block, r.block) as block, \
            coalesce(e.n, 0) operator(pg_catalog.<>) coalesce(r.n, 0) as differ \
        from expected as e full join recorded as r \
            on e.level operator(pg_catalog.=) r.level and e.block operator(pg_catalog.=) r.block \
    ) \
    select (select pg_catalog.count(*) from compared where differ and (level operator(pg_catalog.<>) 1 \
            or block operator(pg_catalog.<>) all (array(select block from page_open)))), \
        coalesce((select pg_catalog.sum(n) from counted), 0)::pg_catalog.int8";

const RECOUNT: &str = "select page_recount()";

/// Whether the counts are those of the table. Blocks while the users are counted; writers go on.
///
/// # Errors
/// One line: they are not, or cannot be read.
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

/// Counts all users anew, which only the tables' owner may do; the line that says so. Writers wait meanwhile, and so do
/// they for a moment at each attempt to begin, while other transactions have written users: ten minutes at the most.
pub fn recount(client: &mut Client) -> Result<String, String> {
    /// Without bounds of the session: those of a role are meant for a service.
    const SETTINGS: &str = "set local statement_timeout = 0; set local lock_timeout = '100ms'";
    let attempt = || {
        let mut transaction = client.transaction()?;
        transaction.batch_execute(SETTINGS)?;
        transaction.batch_execute(RECOUNT)?;
        transaction.commit()
    };
    until_unlocked::<_, postgres::Error>(attempt, || ())?;
    compare(client)
}
