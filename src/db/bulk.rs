//! Statements of exports and imports. An export reads all users from one snapshot. An import stages its users in a
//! temporary table, removes those whose address or id is taken, and stores the others with one insert.

use super::rows::read_user;
use crate::users::password::PasswordHash;
use crate::users::timestamp;
use crate::users::user::{NewUser, User};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::Type;
use postgres::{Client, Error, IsolationLevel, Row, Transaction};
use serde_json::{Value, json};
use time::OffsetDateTime;

/// Lifts the role's time limits for the transaction, because bulk statements take long. Allows sequential scans, which
/// the role's settings may forbid. Turns JIT off, because compiling takes longer than it saves. Skips settings that the
/// server's version does not have.
const SET_BULK_SETTINGS: &str = "
    select set_config(name, value, true)
    from pg_settings join (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('jit', 'off'),
        ('idle_in_transaction_session_timeout', '0'), ('transaction_timeout', '0'),
        ('enable_seqscan', 'on'), ('enable_bitmapscan', 'on')) as needed (name, value) using (name)";

/// Creates the temporary table of staged users. The server drops it at the end of the transaction.
const CREATE_STAGE_TABLE: &str = "
    create temporary table pg_temp.userd_import (
        line bigint, id bigint, password_hash text, created_at timestamptz, updated_at timestamptz,
        name text, email text
    ) on commit drop";

/// Stages users. Uses an insert, because some poolers wait for ever for the answer to a COPY of the extended protocol.
const STAGE_USERS: &str = "
    insert into pg_temp.userd_import
    select * from jsonb_populate_recordset(null::pg_temp.userd_import, cast($1 as jsonb))";

/// Stores the staged users in the order of their lines, and their password hashes. A user without an id gets the next
/// id. The setting `userd.position` holds the line number of the user that is inserted, because the number leads to the
/// user's hash, and a trigger may change every column of the inserted row.
const STORE_STAGED_USERS: &str = "
    with created as (
        insert into users (created_at, updated_at, name, email)
        select coalesce(created_at, now()), coalesce(updated_at, now()), name, email
        from pg_temp.userd_import where id is null and set_config('userd.position', line::text, true) <> ''
        returning id, current_setting('userd.position')::bigint as line
    ), created_with_id as (
        insert into users (id, created_at, updated_at, name, email) overriding system value
        select id, coalesce(created_at, now()), coalesce(updated_at, now()), name, email
        from pg_temp.userd_import where id is not null and set_config('userd.position', line::text, true) <> ''
        returning id, current_setting('userd.position')::bigint as line
    ), stored as not materialized (
        select * from created union all select * from created_with_id
    ), credential as (
        insert into credentials (user_id, password_hash)
        select stored.id, password_hash from stored join pg_temp.userd_import using (line)
        where password_hash is not null
    )
    select count(*) from stored";

/// Moves the sequence of ids past the largest id of the file. Draws the ids up to there one by one, because `setval`
/// could move the sequence back if another session draws an id meanwhile. If there are more than 1000 such ids, calls
/// `setval`, because no session draws 1000 ids in the time of this statement.
const RESERVE_IDS: &str = "
    select case
            when behind > 1000 then setval(sequence, largest)
            when behind > 0 then
                (select max(drawn) from (select nextval(sequence) as drawn from generate_series(bigint '1', behind)) as ids)
        end
    from (select pg_get_serial_sequence('users', 'id')::regclass as sequence) as ids,
        lateral (
            select max(id) as largest, max(id) - coalesce(pg_sequence_last_value(sequence), 0) as behind
            from pg_temp.userd_import offset 0
        ) as staged";

/// Removes the staged lines whose address or id a stored user or an earlier line has, and returns the first $1 of them.
/// `first` is the number of the earlier line, or null for a stored user. A line whose address and id are both taken is
/// reported for its address; an earlier line is reported before a stored user. The last column counts all removed
/// lines.
const REMOVE_DUPLICATES: &str = r#"
    with taken as materialized (
        select distinct on (line) line, is_id, first from (
            select line, false as is_id, min(line) over (partition by lower(email collate "C")) as first
            from pg_temp.userd_import
            union all
            select line, true, min(line) over (partition by id) from pg_temp.userd_import where id is not null
            union all
            select line, false, null from pg_temp.userd_import where exists (
                select from users where lower(users.email::text collate "C") = lower(userd_import.email collate "C"))
            union all
            select line, true, null from pg_temp.userd_import where exists (
                select from users where users.id = userd_import.id)
        ) as clashes
        where first is null or first < line
        order by line, is_id, first
    ), removed as (
        delete from pg_temp.userd_import using taken where userd_import.line = taken.line
    )
    select line, first, is_id, count(*) over () from taken order by line limit $1"#;

/// Removes the staged lines whose address a stored user has.
const SKIP_EXISTING_USERS: &str = r#"
    delete from pg_temp.userd_import where exists (
        select from users where lower(users.email::text collate "C") = lower(userd_import.email collate "C"))"#;

/// Begins a transaction without the role's time limits, and executes the statements `sql` in it.
fn begin_bulk<'a>(client: &'a mut Client, only_reads: bool, sql: &str) -> Result<Transaction<'a>, Error> {
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
    let mut transaction = transaction.read_only(only_reads).start()?;
    transaction.query_typed(SET_BULK_SETTINGS, &[])?;
    transaction.batch_execute(sql)?;
    Ok(transaction)
}

/// Begins a transaction that reads all users. Has the server read users by the index of ids, because a sort would write
/// all users to the server's disk before the first one is sent.
pub fn begin_export(client: &mut Client) -> Result<Transaction<'_>, Error> {
    const READ_BY_INDEX: &str = "set local enable_sort = off; set local max_parallel_workers_per_gather = 0";
    begin_bulk(client, true, READ_BY_INDEX)
}

/// Begins the transaction of an import. If the session ends before the commit, nothing of the import is left.
pub fn begin_import(client: &mut Client) -> Result<Transaction<'_>, Error> {
    begin_bulk(client, false, CREATE_STAGE_TABLE)
}

/// Calls `each` for every user, in the order of ids, with the hash of the user's password if `with_hashes` is set and
/// the user has one. Stops at the first error.
pub fn for_each_user<E: From<Error>>(
    transaction: &mut Transaction,
    with_hashes: bool,
    mut each: impl FnMut(User<&str>, Option<&str>) -> Result<(), E>,
) -> Result<(), E> {
    let sql = if with_hashes {
        "select u.id, u.name, u.email, u.created_at, u.updated_at, u.version, c.password_hash
         from users u left join credentials c on c.user_id = u.id order by u.id"
    } else {
        "select id, name, email, created_at, updated_at, version, null as password_hash from users order by id"
    };
    // Reads row by row, so that memory does not grow with the number of users.
    let mut rows = transaction.query_typed_raw(sql, Vec::<(i64, Type)>::new())?;
    while let Some(row) = rows.next()? {
        each(read_user(&row, None)?, row.try_get("password_hash")?)?;
    }
    Ok(())
}

/// A user of the imported file, as the temporary table holds it.
pub struct StagedUser {
    /// The number of the user's line in the file.
    pub line: i64,
    /// The id in the file, if the import keeps ids.
    pub id: Option<i64>,
    pub hash: Option<PasswordHash>,
    /// The time of the user's creation, if the file has it.
    pub created_at: Option<OffsetDateTime>,
    /// The time of the user's last change, if the file has it.
    pub updated_at: Option<OffsetDateTime>,
    pub user: NewUser,
}

/// The number of staged lines that were removed because a stored user or an earlier line has their address or id, and
/// the first of them.
pub struct Duplicates {
    /// The number of lines that were skipped, because a stored user has their address.
    pub skipped_count: u64,
    /// The number of lines that were refused, because a stored user or an earlier line has their address or id.
    pub refused_count: u64,
    /// The refused lines with the lowest numbers.
    pub first_refused: Vec<Duplicate>,
}

/// A staged line whose address or id a stored user or an earlier line has.
pub struct Duplicate {
    /// The number of the line in the file.
    pub line: i64,
    /// The number of the earlier line that has the address or id. `None` if a stored user has it.
    pub earlier_line: Option<i64>,
    /// True if the line repeats an id, false if it repeats an address.
    pub repeats_id: bool,
}

/// Adds users to the temporary table of staged users by one insert, which is quickest with some 2000 users.
pub fn stage_users(import: &mut Transaction, users: &[StagedUser]) -> Result<(), Error> {
    let row = |StagedUser { line, id, hash, created_at, updated_at, user }: &StagedUser| {
        let NewUser { name, email, password: _ } = user;
        json!({
            "line": line,
            "id": id,
            "password_hash": hash.as_ref().map(PasswordHash::as_text),
            "created_at": created_at.map(timestamp::to_text),
            "updated_at": updated_at.map(timestamp::to_text),
            "name": name,
            "email": email,
        })
    };
    let rows: Value = users.iter().map(row).collect();
    import.execute_typed(STAGE_USERS, &[(&rows.to_string(), Type::TEXT)])?;
    Ok(())
}

/// Removes the staged lines whose address or id a stored user or an earlier line has, and returns the first `limit` of
/// them. If `skip_existing` is set, skips the lines whose address a stored user has, instead of refusing them.
pub fn deduplicate(import: &mut Transaction, skip_existing: bool, limit: i64) -> Result<Duplicates, Error> {
    // Collects statistics for the query planner, because the server does not analyze temporary tables by itself.
    import.batch_execute("analyze pg_temp.userd_import")?;
    let skipped_count = if skip_existing { import.execute_typed(SKIP_EXISTING_USERS, &[])? } else { 0 };
    let rows = import.query_typed(REMOVE_DUPLICATES, &[(&limit, Type::INT8)])?;
    let refused_count = rows.first().map_or(0, |row| row.get::<_, i64>(3).unsigned_abs());
    let line = |row: &Row| Duplicate { line: row.get(0), earlier_line: row.get(1), repeats_id: row.get(2) };
    Ok(Duplicates { skipped_count, refused_count, first_refused: rows.iter().map(line).collect() })
}

/// Stores the staged users and their hashes, with the ids of the file if `keep_ids` is set. Returns the number of
/// stored users.
pub fn store_staged_users(import: &mut Transaction, keep_ids: bool) -> Result<u64, Error> {
    if keep_ids {
        // Moves the sequence first, so that no other session draws an id of the file. A rollback does not move it back.
        import.query_typed(RESERVE_IDS, &[])?;
    }
    Ok(import.query_typed_one(STORE_STAGED_USERS, &[])?.try_get::<_, i64>(0)?.unsigned_abs())
}
