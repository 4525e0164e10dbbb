//! All users of one snapshot, by id.

use super::begin;
use crate::{
    db::{
        columns::{ANSWERED, Sql},
        users::{PAGES, record},
    },
    users::user::UserRef,
};
use postgres::{Client, Error, Transaction, fallible_iterator::FallibleIterator, types::Type};
use std::iter;

static EXPORT: Sql = Sql::new("select {FIXED}, {TEXT} from users order by id");

static EXPORT_WITH_HASHES: Sql = Sql::new(
    "\
    select {FIXED}, {TEXT}, password_hash \
    from users left join credentials on user_id operator(pg_catalog.=) id order by id",
);

/// Begins what [`each_user`] and [`count`] read.
///
/// The rows come by the index: a sort would hold all of them on the server's disk before the first one is sent.
pub fn begin_export(client: &mut Client, prepared: bool) -> Result<Transaction<'_>, Error> {
    let mut transaction = begin(client, prepared, true)?;
    transaction
        .batch_execute("set local enable_sort = off; set local max_parallel_workers_per_gather = 0")?;
    Ok(transaction)
}

/// How many users there are. One round trip.
pub fn count(transaction: &mut Transaction) -> Result<u64, Error> {
    let (one, none): (&[i64], &[i32]) = (&[1], &[0]);
    let rows = transaction.query_typed(
        PAGES,
        &[(&one, Type::INT8_ARRAY), (&one, Type::INT8_ARRAY), (&none, Type::INT4_ARRAY)],
    )?;
    let total: i64 = rows.first().map_or(Ok(0), |row| row.try_get("total"))?;
    Ok(total.unsigned_abs())
}

/// Calls `each` with every user, by id, and with the hash of its password where it was asked for, and there is one.
pub fn each_user<E: From<Error>>(
    transaction: &mut Transaction,
    with_password_hashes: bool,
    mut each: impl FnMut(UserRef, Option<&str>) -> Result<(), E>,
) -> Result<(), E> {
    let sql = if with_password_hashes { &EXPORT_WITH_HASHES } else { &EXPORT };
    let mut rows = transaction.query_typed_raw(sql.text(), iter::empty::<(&str, Type)>())?;
    while let Some(row) = rows.next()? {
        each(record(&row)?, if with_password_hashes { row.try_get(ANSWERED)? } else { None })?;
    }
    Ok(())
}
