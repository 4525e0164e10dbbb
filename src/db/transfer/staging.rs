//! The transaction of an import: users are staged in a temporary table, looked for in what is stored, and stored by one
//! statement; or stored as they come.

use super::begin;
use crate::{
    db::columns::{Sql, write_stored},
    users::{password::PasswordHash, timestamp::Timestamp, user::UserRef},
};
use postgres::{Client, Row, Transaction, types::Type};
use std::io::{self, Write};

/// Moves the sequence of ids past the largest one that is stored, where it is behind; that id. After a replication or a
/// restore of rows alone it is. One session at a time: what it sees of the sequence comes after the lock, and is newer
/// than the largest id.
const MOVE_IDS: &str = "\
    with locked as materialized ( \
        select pg_catalog.pg_advisory_xact_lock('users'::pg_catalog.regclass::pg_catalog.oid::pg_catalog.int4, 256) \
    ) \
    select pg_catalog.setval(sequence, largest) \
    from (select pg_catalog.pg_get_serial_sequence('users', 'id')::pg_catalog.regclass as sequence) as ids, \
        lateral (select (select pg_catalog.nextval(sequence) from locked) as next, \
            (select pg_catalog.max(id) from users) as largest offset 0) as found \
    where largest operator(pg_catalog.>) next";

/// What an import stages before it stores it. Of the session alone, and gone with the transaction.
static STAGE: Sql = Sql::new(
    "\
    create temporary table userd_import on commit drop as \
    select 0::bigint as line, null::text as password_hash, {FIXED}, {TEXT::TYPE as TEXT} from users with no data",
);

static STAGE_ROWS: Sql =
    Sql::new("copy userd_import (line, id, password_hash, {STORED}) from stdin (format binary)");

/// Of an import that stages nothing.
static STORE_ROWS: Sql = Sql::new("copy users ({STORED}) from stdin (format binary)");

/// The rows are stored in the order in which they were staged, which is that of their lines.
static STORE: Sql = Sql::new("insert into users ({STORED}) select {STORED} from userd_import");

/// The same with hashes. Ids rise in the order of the rows, so the n-th id is the n-th line's; the addresses are
/// compared nevertheless, so that no user gets the hash of another one, whatever triggers have made of the rows.
static STORE_WITH_HASHES: Sql = Sql::new(
    "\
    with stored as ( \
        insert into users ({STORED}) select {STORED} from userd_import returning id, email \
    ), given as ( \
        select pg_catalog.row_number() over (order by line) as position, email, password_hash from userd_import \
    ), taken as ( \
        select pg_catalog.row_number() over (order by id) as position, id, email from stored \
    ), hashes as ( \
        insert into credentials (user_id, password_hash) \
        select id, password_hash from taken join given on taken.position operator(pg_catalog.=) given.position \
        where password_hash is not null and pg_catalog.lower(taken.email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(given.email collate pg_catalog.\"C\") \
        returning 1 \
    ) \
    select (select pg_catalog.count(*) from stored), (select pg_catalog.count(*) from hashes)",
);

/// The same where lines have ids of their own.
static STORE_WITH_IDS: Sql = Sql::new(
    "\
    with stored as ( \
        insert into users (id, {STORED}) overriding system value \
        select id, {STORED} from userd_import returning id, email \
    ), hashes as ( \
        insert into credentials (user_id, password_hash) \
        select given.id, password_hash from userd_import given, stored \
        where given.id operator(pg_catalog.=) stored.id and password_hash is not null \
            and pg_catalog.lower(stored.email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(given.email collate pg_catalog.\"C\") \
        returning 1 \
    ) \
    select (select pg_catalog.count(*) from stored), (select pg_catalog.count(*) from hashes)",
);

/// Has the sequence of ids go on behind those of the lines. Up to 1000 are drawn one by one: other sessions do not draw
/// more in the time that a statement takes, so that setting the sequence to an id that is further away never sets it
/// back.
const RESERVE_IDS: &str = "\
    select case \
            when behind operator(pg_catalog.>) 1000 then pg_catalog.setval(sequence, largest) \
            when behind operator(pg_catalog.>) 0 then ( \
                select pg_catalog.max(drawn) \
                from (select pg_catalog.nextval(sequence) as drawn from pg_catalog.generate_series(1, behind)) as ids) \
        end \
    from (select pg_catalog.pg_get_serial_sequence('users', 'id')::pg_catalog.regclass as sequence) as ids, \
        lateral (select pg_catalog.max(id) as largest, pg_catalog.max(id) operator(pg_catalog.-) \
            coalesce(pg_catalog.pg_sequence_last_value(sequence), 0) as behind from userd_import offset 0) as found";

/// The lines whose address an earlier line has, and that line.
const REPEATED: &str = "\
    select line, first, false as is_id from ( \
        select line, pg_catalog.min(line) over (partition by pg_catalog.lower(email collate pg_catalog.\"C\")) as first \
        from userd_import) given \
    where line operator(pg_catalog.>) first";

/// The lines whose id an earlier line has, and that line.
const REPEATED_IDS: &str = "\
    select line, first, true as is_id from ( \
        select line, pg_catalog.min(line) over (partition by id) as first from userd_import) given \
    where line operator(pg_catalog.>) first";

/// The lines whose id a stored user has.
const TAKEN_IDS: &str = "select line, null::bigint as first, true as is_id from userd_import where exists ( \
    select from users where users.id operator(pg_catalog.=) userd_import.id)";

/// The lines whose address a stored user has.
const TAKEN: &str = "select line, null::bigint as first, false as is_id from userd_import where exists ( \
    select from users where pg_catalog.lower(users.email collate pg_catalog.\"C\") \
        operator(pg_catalog.=) pg_catalog.lower(userd_import.email collate pg_catalog.\"C\"))";

/// Appends the row of a user for [`Staging::stage`], in the binary format of COPY. `id`: the one that it keeps; that of
/// `user` means nothing.
pub fn write_staged(
    line: u64,
    id: Option<i64>,
    hash: Option<&PasswordHash>,
    user: &UserRef,
    rows: &mut Vec<u8>,
) {
    let id = id.map(i64::to_be_bytes);
    let hash = hash.map(|hash| hash.as_phc().as_bytes());
    write_stored(&[Some(&line.to_be_bytes()), id.as_ref().map(|id| &id[..]), hash], user, rows);
}

/// Appends its row for [`Staging::store_unstaged`], which has no place for the hash.
pub fn write_unstaged(user: &UserRef, rows: &mut Vec<u8>) {
    write_stored(&[], user, rows);
}

/// Staged lines with an address or an id that an earlier line has, or a stored user.
pub struct Repeated {
    /// The first of them, each with the earlier line, and whether it is the id.
    pub first: Vec<(u64, Option<u64>, bool)>,
    /// All of them.
    pub count: u64,
}

/// The transaction of one import.
pub struct Staging<'a> {
    transaction: Transaction<'a>,
    /// Whether users get the ids of their lines.
    keep_ids: bool,
    /// The time of users that have none in their line.
    pub present: Timestamp,
    /// Whether rows may be stored without staging them: COPY refuses that to a role that is subject to row security,
    /// and to be refused there would end the session, as the driver sends a message too many then.
    pub may_store_unstaged: bool,
}

impl<'a> Staging<'a> {
    /// Begins it. Whatever ends the session before [`Staging::commit`] leaves nothing.
    pub fn begin(
        client: &'a mut Client,
        prepared: bool,
        keep_ids: bool,
    ) -> Result<Staging<'a>, postgres::Error> {
        let mut transaction = begin(client, prepared, false)?;
        transaction.batch_execute(STAGE.text())?;
        let sql = "select pg_catalog.now(), not pg_catalog.row_security_active('users')";
        let row = transaction.query_typed_one(sql, &[])?;
        let (present, may_store_unstaged) = (row.try_get(0)?, row.try_get(1)?);
        Ok(Staging { transaction, keep_ids, present, may_store_unstaged })
    }

    /// Stores the rows that `next` returns, each call some of them, until it returns none; how many they were. After an
    /// error nothing of it is left, and others can be staged.
    pub fn store_unstaged<E: From<postgres::Error> + From<io::Error>>(
        &mut self,
        next: impl FnMut() -> Result<Option<Vec<u8>>, E>,
    ) -> Result<u64, E> {
        let mut attempt = self.transaction.transaction()?;
        let count = copy(&mut attempt, STORE_ROWS.text(), next)?;
        attempt.commit()?;
        Ok(count)
    }

    /// Stages the rows that `next` returns, each call some of them, until it returns none.
    pub fn stage<E: From<postgres::Error> + From<io::Error>>(
        &mut self,
        next: impl FnMut() -> Result<Option<Vec<u8>>, E>,
    ) -> Result<(), E> {
        copy(&mut self.transaction, STAGE_ROWS.text(), next).map(drop)
    }

    /// Removes the staged users whose address is stored already; how many.
    pub fn skip_existing(&mut self) -> Result<u64, postgres::Error> {
        self.analyze()?;
        self.transaction.execute(
            &format!(
                "delete from userd_import where line operator(pg_catalog.=) any (select line from ({TAKEN}) taken)"
            ),
            &[],
        )
    }

    /// Removes the staged lines whose address, or whose id if they are kept, an earlier line has, or a stored user.
    /// `most`: of how many it returns the lines.
    pub fn take_repeated(&mut self, most: usize) -> Result<Repeated, postgres::Error> {
        self.analyze()?;
        let ids = match self.keep_ids {
            true => format!(" union all {REPEATED_IDS} union all {TAKEN_IDS}"),
            false => String::new(),
        };
        // Of a line that is there more than once, its address is told first, and what it repeats in the file.
        let found = format!(
            "create temporary table userd_repeated on commit drop as \
             select distinct on (line) line, first, is_id from ({REPEATED} union all {TAKEN}{ids}) found \
             order by line, is_id, first"
        );
        self.transaction.batch_execute("drop table if exists userd_repeated")?;
        let count = self.transaction.execute(found.as_str(), &[])?;
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let first = "select line, first, is_id from userd_repeated order by line limit $1";
        let rows = self.transaction.query_typed(first, &[(&most, Type::INT8)])?;
        self.transaction.batch_execute(
            "delete from userd_import using userd_repeated \
             where userd_import.line operator(pg_catalog.=) userd_repeated.line",
        )?;
        let line = |row: &Row, at| row.get::<_, Option<i64>>(at).map(i64::unsigned_abs);
        Ok(Repeated {
            first: rows
                .iter()
                .map(|row| (line(row, 0).unwrap_or_default(), line(row, 1), row.get(2)))
                .collect(),
            count,
        })
    }

    /// How many users are staged, and how many of them with a hash.
    pub fn count(&mut self) -> Result<(u64, u64), postgres::Error> {
        let sql = "select pg_catalog.count(*), pg_catalog.count(password_hash) from userd_import";
        Ok(counts(&self.transaction.query_typed_one(sql, &[])?))
    }

    /// Stores what is staged; how many users, and how many hashes. After an error everything is staged as before.
    pub fn store(&mut self, with_hashes: bool) -> Result<(u64, u64), postgres::Error> {
        if self.keep_ids {
            // Before they are stored, so that no other session draws one of them. What becomes of the import does not
            // set it back.
            self.transaction.query_typed(RESERVE_IDS, &[])?;
        }
        let mut attempt = self.transaction.transaction()?;
        let stored = match (self.keep_ids, with_hashes) {
            (false, false) => (attempt.execute(STORE.text(), &[])?, 0),
            (true, _) => counts(&attempt.query_typed_one(STORE_WITH_IDS.text(), &[])?),
            (false, true) => counts(&attempt.query_typed_one(STORE_WITH_HASHES.text(), &[])?),
        };
        attempt.commit()?;
        Ok(stored)
    }

    /// Moves the sequence of ids past the largest one, as the pool does. The lock is not kept, and that it was moved
    /// is.
    pub fn move_ids(&mut self) -> Result<(), postgres::Error> {
        let mut attempt = self.transaction.transaction()?;
        attempt.query_typed(MOVE_IDS, &[])?;
        attempt.rollback()
    }

    /// Makes what was stored permanent.
    pub fn commit(self) -> Result<(), postgres::Error> {
        self.transaction.commit()
    }

    /// For the planner: no daemon looks after a temporary table.
    fn analyze(&mut self) -> Result<(), postgres::Error> {
        self.transaction.batch_execute("analyze userd_import")
    }
}

/// Users and hashes.
fn counts(row: &Row) -> (u64, u64) {
    (row.get::<_, i64>(0).unsigned_abs(), row.get::<_, i64>(1).unsigned_abs())
}

/// Sends the rows that `next` returns; how many the server has taken.
fn copy<E: From<postgres::Error> + From<io::Error>>(
    transaction: &mut Transaction,
    sql: &str,
    mut next: impl FnMut() -> Result<Option<Vec<u8>>, E>,
) -> Result<u64, E> {
    /// Signature, flags, and the length of an extension that there is none of.
    const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
    const TRAILER: i16 = -1;
    let mut copy = transaction.copy_in(sql)?;
    copy.write_all(HEADER)?;
    while let Some(rows) = next()? {
        copy.write_all(&rows)?;
    }
    copy.write_all(&TRAILER.to_be_bytes())?;
    Ok(copy.finish()?)
}
