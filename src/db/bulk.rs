//! The statements that read or write many users at once.

use super::{
    pool::MOVE_IDS,
    settings,
    users::{EPOCH, PAGES},
};
use crate::users::{password::PasswordHash, user::Timestamp};
use postgres::{
    Client, IsolationLevel, Row, Transaction, binary_copy::BinaryCopyOutIter, error::SqlState,
    fallible_iterator::FallibleIterator, types::Type,
};
use std::{
    borrow::Cow,
    io::{self, Write},
};

const EXPORT: &str = "\
    copy (select id, name, email, created_at, updated_at from users order by id) to stdout (format binary)";

const EXPORT_WITH_HASHES: &str = "\
    copy (select id, name, email, created_at, updated_at, password_hash \
          from users left join credentials on user_id operator(pg_catalog.=) id order by id) to stdout (format binary)";

/// What takes long is meant to. And no statement is compiled: where a table has no statistics yet, the planner takes the
/// page counts for expensive, and compiling the statement that sums them took half a second. Not every version has every
/// setting.
const SETTINGS: &str = "\
    select pg_catalog.set_config(name, '0', true) from pg_catalog.pg_settings \
    where name operator(pg_catalog.=) any (array['statement_timeout', 'lock_timeout', \
        'idle_in_transaction_session_timeout', 'transaction_timeout', 'jit'])";

/// What an import stages before it stores it. Of the session alone, and gone with the transaction.
const STAGE: &str = "\
    create temporary table userd_import (line bigint not null, id bigint, name text not null, email text not null, \
        password_hash text, created_at timestamptz, updated_at timestamptz) on commit drop";

const STAGE_ROWS: &str = "\
    copy userd_import (line, id, name, email, password_hash, created_at, updated_at) from stdin (format binary)";

/// Of an import that stages nothing.
const STORE_ROWS: &str = "\
    copy users (name, email, created_at, updated_at) from stdin (format binary)";

/// The rows are stored in the order in which they were staged, which is that of their lines.
const STORE: &str = "\
    insert into users (name, email, created_at, updated_at) \
    select name, email, coalesce(created_at, pg_catalog.now()), coalesce(updated_at, pg_catalog.now()) \
    from userd_import";

/// The same with hashes. Ids rise in the order of the rows, so the n-th id is the n-th line's; the addresses are compared
/// nevertheless, so that no user gets the hash of another one, whatever triggers have made of the rows.
const STORE_WITH_HASHES: &str = "\
    with stored as ( \
        insert into users (name, email, created_at, updated_at) \
        select name, email, coalesce(created_at, pg_catalog.now()), coalesce(updated_at, pg_catalog.now()) \
        from userd_import \
        returning id, email \
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
    select (select pg_catalog.count(*) from stored), (select pg_catalog.count(*) from hashes)";

/// The same where lines have ids of their own.
const STORE_WITH_IDS: &str = "\
    with stored as ( \
        insert into users (id, name, email, created_at, updated_at) overriding system value \
        select id, name, email, coalesce(created_at, pg_catalog.now()), coalesce(updated_at, pg_catalog.now()) \
        from userd_import \
        returning id, email \
    ), hashes as ( \
        insert into credentials (user_id, password_hash) \
        select given.id, password_hash from userd_import given, stored \
        where given.id operator(pg_catalog.=) stored.id and password_hash is not null \
            and pg_catalog.lower(stored.email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(given.email collate pg_catalog.\"C\") \
        returning 1 \
    ) \
    select (select pg_catalog.count(*) from stored), (select pg_catalog.count(*) from hashes)";

/// The sequence of ids.
macro_rules! sequence {
    () => {
        "pg_catalog.pg_get_serial_sequence('users', 'id')::pg_catalog.regclass"
    };
}

/// The largest id of a line, and how many ids the sequence is behind it.
const IDS_BEHIND: &str = concat!(
    "select pg_catalog.max(id), \
        pg_catalog.max(id) operator(pg_catalog.-) coalesce(pg_catalog.pg_sequence_last_value(",
    sequence!(),
    "), 0) from userd_import"
);

const DRAW_IDS: &str = concat!(
    "select pg_catalog.count(pg_catalog.nextval(",
    sequence!(),
    ")) from pg_catalog.generate_series(1, $1)"
);

const SET_IDS: &str = concat!("select pg_catalog.setval(", sequence!(), ", $1)");

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

/// A user that is imported.
pub struct ImportedUser<'a> {
    pub line: u64,
    /// The id that it keeps.
    pub id: Option<i64>,
    pub name: Cow<'a, str>,
    pub email: Cow<'a, str>,
    pub password_hash: Option<PasswordHash>,
    /// `None`: the present time.
    pub created_at: Option<Timestamp>,
    pub updated_at: Option<Timestamp>,
}

impl ImportedUser<'_> {
    /// Appends its row for [`Staging::stage`], in the binary format of COPY.
    pub fn write_staged(&self, rows: &mut Vec<u8>) {
        rows.extend_from_slice(&7_i16.to_be_bytes());
        field(rows, Some(&self.line.to_be_bytes()));
        field(rows, self.id.map(i64::to_be_bytes).as_ref().map(|bytes| &bytes[..]));
        field(rows, Some(self.name.as_bytes()));
        field(rows, Some(self.email.as_bytes()));
        field(rows, self.password_hash.as_ref().map(|hash| hash.as_phc().as_bytes()));
        field(rows, self.created_at.map(moment).as_ref().map(|bytes| &bytes[..]));
        field(rows, self.updated_at.map(moment).as_ref().map(|bytes| &bytes[..]));
    }

    /// Appends its row for [`Staging::store_unstaged`], which has no place for the hash.
    pub fn write_stored(&self, present: Timestamp, rows: &mut Vec<u8>) {
        rows.extend_from_slice(&4_i16.to_be_bytes());
        field(rows, Some(self.name.as_bytes()));
        field(rows, Some(self.email.as_bytes()));
        field(rows, Some(&moment(self.created_at.unwrap_or(present))));
        field(rows, Some(&moment(self.updated_at.unwrap_or(present))));
    }
}

fn field(rows: &mut Vec<u8>, value: Option<&[u8]>) {
    // A record is much shorter than what 32 bits count.
    let length = value.map_or(-1, |value| value.len() as i32);
    rows.extend_from_slice(&length.to_be_bytes());
    rows.extend_from_slice(value.unwrap_or_default());
}

fn moment(time: Timestamp) -> [u8; 8] {
    (time.unix_micros() - EPOCH).to_be_bytes()
}

/// Staged lines with an address or an id that an earlier line has, or a stored user.
pub struct Repeated {
    /// The first of them, each with the earlier line, and whether it is the id.
    pub first: Vec<(u64, Option<u64>, bool)>,
    /// All of them.
    pub count: u64,
}

/// Why rows were not stored.
pub enum StoreError {
    /// A line has the address or the id of an earlier one, or of a stored user.
    Repeated,
    /// A line drew an id that is taken: the sequence of ids is behind them.
    IdTaken,
    /// The rows that were stored are not those that were sent; users and hashes of both.
    Altered {
        stored: (u64, u64),
        sent: (u64, u64),
    },
    Database(postgres::Error),
}

impl From<postgres::Error> for StoreError {
    fn from(error: postgres::Error) -> StoreError {
        let constraint = error.as_db_error().and_then(|error| error.constraint());
        match (error.code(), constraint) {
            (Some(&SqlState::UNIQUE_VIOLATION), Some("users_email_key")) => StoreError::Repeated,
            (Some(&SqlState::UNIQUE_VIOLATION), Some("users_pkey")) => StoreError::IdTaken,
            _ => StoreError::Database(error),
        }
    }
}

/// The transaction of one import.
pub struct Staging<'a> {
    transaction: Transaction<'a>,
    /// Whether users get the ids of their lines.
    keep_ids: bool,
}

impl<'a> Staging<'a> {
    /// Begins it. Whatever ends the session before [`Staging::commit`] leaves nothing.
    pub fn begin(
        client: &'a mut Client,
        prepared: bool,
        keep_ids: bool,
    ) -> Result<Staging<'a>, postgres::Error> {
        notice_its_end(client, prepared);
        let mut transaction =
            client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start()?;
        start(&mut transaction, prepared)?;
        transaction.batch_execute(STAGE)?;
        Ok(Staging { transaction, keep_ids })
    }

    /// The time of users that have none in their line; `None` where rows have to be staged: COPY refuses them for a role
    /// that is subject to row security.
    pub fn present(&mut self) -> Result<Option<Timestamp>, postgres::Error> {
        // To be refused by COPY would end the session: the driver sends a message too many then.
        let sql = "select case when not pg_catalog.row_security_active('users') then pg_catalog.now() end";
        self.transaction.query_typed_one(sql, &[])?.try_get(0)
    }

    /// Stores the rows that `next` returns, each call some of them, until it returns none; how many they were. After an
    /// error nothing of it is left, and others can be staged.
    pub fn store_unstaged<E: From<postgres::Error> + From<io::Error>>(
        &mut self,
        next: impl FnMut() -> Result<Option<Vec<u8>>, E>,
    ) -> Result<u64, E> {
        let mut attempt = self.transaction.transaction()?;
        let count = copy(&mut attempt, STORE_ROWS, next)?;
        attempt.commit()?;
        Ok(count)
    }

    /// Stages the rows that `next` returns, each call some of them, until it returns none.
    pub fn stage<E: From<postgres::Error> + From<io::Error>>(
        &mut self,
        next: impl FnMut() -> Result<Option<Vec<u8>>, E>,
    ) -> Result<(), E> {
        copy(&mut self.transaction, STAGE_ROWS, next).map(drop)
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

    /// Removes the staged lines whose address, or whose id if they are kept, an earlier line has, or a stored user. `most`:
    /// of how many it returns the lines.
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
        let row = self.transaction.query_typed_one(sql, &[])?;
        Ok((row.get::<_, i64>(0).unsigned_abs(), row.get::<_, i64>(1).unsigned_abs()))
    }

    /// Stores what is staged: so many users, so many of them with a hash. After an error everything is staged as before.
    pub fn store(&mut self, users: u64, hashes: u64) -> Result<(), StoreError> {
        if self.keep_ids {
            self.reserve_ids()?;
        }
        let mut attempt = self.transaction.transaction()?;
        let stored = match hashes {
            0 if !self.keep_ids => (attempt.execute(STORE, &[])?, 0),
            _ => {
                let sql = if self.keep_ids { STORE_WITH_IDS } else { STORE_WITH_HASHES };
                let row = attempt.query_typed_one(sql, &[])?;
                (row.get::<_, i64>(0).unsigned_abs(), row.get::<_, i64>(1).unsigned_abs())
            }
        };
        match stored == (users, hashes) {
            true => Ok(attempt.commit()?),
            false => Err(StoreError::Altered { stored, sent: (users, hashes) }),
        }
    }

    /// Has the sequence of ids go on behind those of the lines: before they are stored, so that no other session draws one
    /// of them. What becomes of the import does not set it back.
    fn reserve_ids(&mut self) -> Result<(), postgres::Error> {
        /// So few are drawn one by one. Other sessions do not draw more in the time that a statement takes, so that setting
        /// the sequence to an id that is further away never sets it back.
        const FEW: i64 = 1000;
        let row = self.transaction.query_typed_one(IDS_BEHIND, &[])?;
        let (Some(largest), Some(behind)) = (row.try_get::<_, Option<i64>>(0)?, row.try_get(1)?) else {
            return Ok(());
        };
        let (sql, number) = match behind {
            ..=0 => return Ok(()),
            1..=FEW => (DRAW_IDS, behind),
            _ => (SET_IDS, largest),
        };
        self.transaction.query_typed_one(sql, &[(&number, Type::INT8)]).map(drop)
    }

    /// Moves the sequence of ids past the largest one, as the pool does. The lock is not kept, and that it was moved is.
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

/// A user as it is exported.
pub struct ExportedUser<'a> {
    pub id: i64,
    pub name: &'a str,
    pub email: &'a str,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// Where it was asked for, and the user has one.
    pub password_hash: Option<&'a str>,
}

/// Begins what [`each_user`] and [`count`] read.
///
/// The rows come by the index: a sort would hold all of them on the server's disk before the first one is sent.
pub fn begin_export(client: &mut Client, prepared: bool) -> Result<Transaction<'_>, postgres::Error> {
    notice_its_end(client, prepared);
    let mut transaction = client.build_transaction().read_only(true).start()?;
    start(&mut transaction, prepared)?;
    transaction
        .batch_execute("set local enable_sort = off; set local max_parallel_workers_per_gather = 0")?;
    Ok(transaction)
}

/// Has the server notice within a second that this process has ended, whatever it is at.
fn notice_its_end(client: &mut Client, prepared: bool) {
    // A pooler's session is not ours to set.
    if prepared {
        // Before version 14, and on other systems, there is no such setting: a statement is finished first.
        let _ = client.batch_execute("set client_connection_check_interval = 1000");
    }
}

fn start(transaction: &mut Transaction, prepared: bool) -> Result<(), postgres::Error> {
    transaction.query_typed(SETTINGS, &[])?;
    transaction.batch_execute(&settings::statements_of_bulk())?;
    if !prepared {
        // A pooler's session may hold a statement of another client's that has the name of one of ours.
        transaction.batch_execute("deallocate all")?;
    }
    Ok(())
}

/// How many users there are. One round trip.
pub fn count(transaction: &mut Transaction) -> Result<u64, postgres::Error> {
    let (one, none): (&[i64], &[i32]) = (&[1], &[0]);
    let rows = transaction.query_typed(
        PAGES,
        &[(&one, Type::INT8_ARRAY), (&one, Type::INT8_ARRAY), (&none, Type::INT4_ARRAY)],
    )?;
    let total: i64 = rows.first().map_or(Ok(0), |row| row.try_get(1))?;
    Ok(total.unsigned_abs())
}

/// Calls `each` with every user, by id.
pub fn each_user<E: From<postgres::Error>>(
    transaction: &mut Transaction,
    with_password_hashes: bool,
    mut each: impl FnMut(ExportedUser) -> Result<(), E>,
) -> Result<(), E> {
    const TYPES: [Type; 6] =
        [Type::INT8, Type::TEXT, Type::VARCHAR, Type::TIMESTAMPTZ, Type::TIMESTAMPTZ, Type::TEXT];
    let (sql, columns) = if with_password_hashes { (EXPORT_WITH_HASHES, 6) } else { (EXPORT, 5) };
    let mut rows = BinaryCopyOutIter::new(transaction.copy_out(sql)?, &TYPES[..columns]);
    while let Some(row) = rows.next()? {
        each(ExportedUser {
            id: row.try_get(0)?,
            name: row.try_get(1)?,
            email: row.try_get(2)?,
            created_at: row.try_get(3)?,
            updated_at: row.try_get(4)?,
            password_hash: if with_password_hashes { row.try_get(5)? } else { None },
        })?;
    }
    Ok(())
}
