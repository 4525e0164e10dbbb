//! Statements of exports and imports. An export reads all users from one snapshot. An import stages its users in a temporary table,
//! removes those whose address or id is taken, and stores the others with one insert.

use super::rows::read_user;
use crate::users::password::PasswordHash;
use crate::users::timestamp;
use crate::users::user::{NewUser, User};
use postgres::fallible_iterator::FallibleIterator;
use postgres::types::Type;
use postgres::{Client, Error, IsolationLevel, Row, Transaction};
use serde_json::{Value, json};
use time::OffsetDateTime;

/// Lifts the limits of the role for the transaction, because bulk statements take long, and allows sequential scans. Turns JIT off,
/// because compiling takes longer than it saves. Leaves out the settings that the server's version does not have.
const BULK_SETTINGS: &str = "
    select set_config(name, value, true)
    from pg_settings join (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('jit', 'off'),
        ('idle_in_transaction_session_timeout', '0'), ('transaction_timeout', '0'),
        ('enable_seqscan', 'on'), ('enable_bitmapscan', 'on')) as needed (name, value) using (name)";

/// Makes the table of staged users, which ends with the transaction.
const CREATE_STAGE: &str = "
    create temporary table pg_temp.userd_import (
        line bigint, id bigint, password_hash text, created_at timestamptz, updated_at timestamptz,
        name text, email text
    ) on commit drop";

/// Stages users. Uses an insert, because some poolers wait for ever for the answer to a COPY of the extended protocol.
const STAGE_ROWS: &str = "
    insert into pg_temp.userd_import
    select * from jsonb_populate_recordset(null::pg_temp.userd_import, cast($1 as jsonb))";

/// Stores the staged users, in the order of their lines, and their hashes. A user without an id gets the next id. The
/// setting `userd.position` tells which line a stored row is from, as in `CREATE_MANY`, because a trigger may have
/// changed all values of the row.
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

/// Moves the sequence of ids past the ids of the file. Draws up to 1000 ids one by one, because other sessions may draw
/// ids meanwhile, and `setval` could move the sequence back. If the sequence is further behind, calls `setval`, because
/// no session draws 1000 ids in that time.
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

/// Removes the staged lines whose address or id is taken, and returns the first $1 of them. `first` is the earlier line that has the
/// value, or null for a stored user. A line is returned once: for its address rather than its id, and for an earlier line rather
/// than a stored user. The last column is the number of all removed lines.
const REMOVE_TAKEN_LINES: &str = r#"
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

/// Begins a transaction without the limits of the role, and executes the statements `first` in it.
fn begin_bulk<'a>(client: &'a mut Client, only_reads: bool, first: &str) -> Result<Transaction<'a>, Error> {
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted);
    let mut transaction = transaction.read_only(only_reads).start()?;
    transaction.query_typed(BULK_SETTINGS, &[])?;
    transaction.batch_execute(first)?;
    Ok(transaction)
}

/// Begins a transaction that reads all users. Has the server read users by the index of ids, because a sort would write
/// all users to the server's disk before the first one is sent.
pub fn begin_export(client: &mut Client) -> Result<Transaction<'_>, Error> {
    const BY_INDEX: &str = "set local enable_sort = off; set local max_parallel_workers_per_gather = 0";
    begin_bulk(client, true, BY_INDEX)
}

/// Begins the transaction of an import. If the session ends before the commit, nothing of the import is left.
pub fn begin_import(client: &mut Client) -> Result<Transaction<'_>, Error> {
    begin_bulk(client, false, CREATE_STAGE)
}

/// Calls `each` for every user, in the order of ids, with the hash of the password if `with_hashes` is set and there is one. Stops at
/// the first error.
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

/// A user of a file that is imported.
pub struct StagedUser {
    /// The number of the user's line.
    pub line: i64,
    /// The id in the file, if the import keeps ids.
    pub id: Option<i64>,
    /// The hash of the password.
    pub hash: Option<PasswordHash>,
    /// The time of the creation, if the file has it.
    pub created_at: Option<OffsetDateTime>,
    /// The time of the last change, if the file has it.
    pub updated_at: Option<OffsetDateTime>,
    /// The name and address of the user.
    pub new: NewUser,
}

/// The staged lines that were removed because their address or id is taken.
pub struct Removal {
    /// The number of lines that were skipped because a stored user has their address.
    pub existing: u64,
    /// The number of lines that are refused because their address or id is taken.
    pub taken: u64,
    /// The first lines that are refused.
    pub first_taken: Vec<TakenLine>,
}

/// A staged line with an address or an id that is taken.
pub struct TakenLine {
    /// The number of the line.
    pub line: i64,
    /// The earlier line that has the address or id. `None` if a stored user has it.
    pub earlier: Option<i64>,
    /// True if the id is taken, false if the address is.
    pub is_id: bool,
}

/// Stages users with one statement, which is quickest with some 2000 users.
pub fn stage_users(import: &mut Transaction, users: &[StagedUser]) -> Result<(), Error> {
    let row = |StagedUser { line, id, hash, created_at, updated_at, new }: &StagedUser| {
        let NewUser { name, email, password: _ } = new;
        json!({
            "line": line,
            "id": id,
            "password_hash": hash.as_ref().map(PasswordHash::as_phc),
            "created_at": created_at.map(timestamp::text),
            "updated_at": updated_at.map(timestamp::text),
            "name": name,
            "email": email,
        })
    };
    let rows: Value = users.iter().map(row).collect();
    import.execute_typed(STAGE_ROWS, &[(&rows.to_string(), Type::TEXT)])?;
    Ok(())
}

/// Removes the staged lines whose address or id is taken, and returns the first `limit` of them. If `skips_existing` is set, the lines
/// whose address a stored user has are skipped, not refused.
pub fn remove_taken(import: &mut Transaction, skips_existing: bool, limit: i64) -> Result<Removal, Error> {
    // Collects statistics, because the server does not do so by itself for a temporary table.
    import.batch_execute("analyze pg_temp.userd_import")?;
    let existing = if skips_existing { import.execute_typed(SKIP_EXISTING_USERS, &[])? } else { 0 };
    let rows = import.query_typed(REMOVE_TAKEN_LINES, &[(&limit, Type::INT8)])?;
    let taken = rows.first().map_or(0, |row| row.get::<_, i64>(3).unsigned_abs());
    let line = |row: &Row| TakenLine { line: row.get(0), earlier: row.get(1), is_id: row.get(2) };
    Ok(Removal { existing, taken, first_taken: rows.iter().map(line).collect() })
}

/// Stores the staged users and their hashes, with the ids of the file if `keep_ids` is set. Returns the number of stored users.
pub fn store_staged(import: &mut Transaction, keep_ids: bool) -> Result<u64, Error> {
    if keep_ids {
        // Moves the sequence first, so that no other session draws an id of the file. A rollback does not move it back.
        import.query_typed(RESERVE_IDS, &[])?;
    }
    Ok(import.query_typed_one(STORE_STAGED_USERS, &[])?.try_get::<_, i64>(0)?.unsigned_abs())
}
