//! The statements that read users.

use super::{
    Users, at_positions, column,
    columns::{ANSWERED, Sql, record},
    credential,
};
use crate::{
    db::{session::Param, sqlstate},
    error::Error,
    users::{
        pagination::{Listing, Range},
        relation::Relation,
        user::User,
    },
};
use postgres::{Row, types::Type};

static FIND: Sql = Sql::new("select {COLUMN} from users where id operator(pg_catalog.=) $1");

static FIND_MANY: Sql = Sql::new("select {COLUMN} from users where id operator(pg_catalog.=) any ($1)");

static FIND_BY_EMAIL: Sql = Sql::new(
    "\
    select {COLUMN}, 1::bigint as position from users \
    where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower($1 collate pg_catalog.\"C\")",
);

/// Each row comes with the position of its address, from 1: two may ask for the same one.
static FIND_MANY_BY_EMAIL: Sql = Sql::new(
    "\
    select found.*, position \
    from pg_catalog.unnest($1::text[]) with ordinality as asked (address, position) cross join lateral ( \
        select {COLUMN} from users \
        where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(address collate pg_catalog.\"C\") limit 1 \
    ) as found",
);

static FIND_MANY_WITH_CREDENTIALS: Sql = Sql::new(
    "\
    select found.*, position, \
        (select password_hash from credentials where user_id operator(pg_catalog.=) found.id) \
    from pg_catalog.unnest($1::text[]) with ordinality as asked (address, position) cross join lateral ( \
        select {COLUMN} from users \
        where pg_catalog.lower(email collate pg_catalog.\"C\") \
            operator(pg_catalog.=) pg_catalog.lower(address collate pg_catalog.\"C\") limit 1 \
    ) as found",
);

/// Any pages with their exact total, in time that grows neither with the users nor with the page number.
pub(in crate::db) static PAGES: Sql = Sql::new(include_str!("pages.sql"));

/// Users that follow an id, for several requests: a range scan of the primary key for each. The columns are those of
/// [`PAGES`], and so is `$3`.
static WALKS: Sql = Sql::new(
    "\
    select {FIXED}, {case when bytes operator(pg_catalog.<=) largest then TEXT end}, ordinal, 0::bigint as total \
    from rows from (pg_catalog.unnest($1::bigint[]), pg_catalog.unnest($2::bigint[]), pg_catalog.unnest($3::int[])) \
        with ordinality as asked (after, most, largest, ordinal) \
    cross join lateral ( \
        select *, {pg_catalog.octet_length(TEXT); operator(pg_catalog.+)} as bytes \
        from users where id operator(pg_catalog.>) asked.after order by id limit asked.most \
    ) as found \
    order by ordinal, id",
);

/// What a row of these takes beside its texts, in bytes.
const ROW: usize = 512;

impl Users {
    /// Those of these users that there are, by id. One round trip.
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<User>, Error> {
        let rows = match ids {
            [] => return Ok(Vec::new()),
            [id] => self.pool.read(FIND.text(), &[(id, Type::INT8)])?,
            several => self.pool.read(FIND_MANY.text(), &[(&several, Type::INT8_ARRAY)])?,
        };
        let mut users = rows.iter().map(|row| self.user(row)).collect::<Result<Vec<_>, _>>()?;
        users.sort_unstable_by_key(|user| user.id);
        Ok(users)
    }

    /// The users with these addresses, in whatever case, each in the place of its address; `None` where there is none.
    /// One round trip.
    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        let rows = match emails {
            [] => return Ok(Vec::new()),
            [email] => self.pool.read(FIND_BY_EMAIL.text(), &[(email, Type::TEXT)])?,
            several => self.pool.read(FIND_MANY_BY_EMAIL.text(), &[(&several, Type::TEXT_ARRAY)])?,
        };
        at_positions(&rows, emails.len(), |row| self.user(row))
    }

    /// The same together with their credentials.
    pub fn find_by_email_with_credential(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        if emails.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.read(FIND_MANY_WITH_CREDENTIALS.text(), &[(&emails, Type::TEXT_ARRAY)])?;
        at_positions(&rows, emails.len(), |row| {
            let hash: Option<String> = column(row, "password_hash")?;
            Ok(User { credential: Relation::loaded("credential", hash.map(credential)), ..self.user(row)? })
        })
    }

    /// Fills several lists of one kind, by id, from one snapshot, pages with their exact total; each is asked for with
    /// the bytes that it may take. One round trip.
    pub fn list_many<L: Listing>(&self, asked: &[(Range, usize)], lists: &mut [L]) -> Result<(), Error> {
        let sql = match asked.first() {
            None => return Ok(()),
            Some((Range::Page(_), _)) => PAGES.text(),
            Some((Range::Walk { .. }, _)) => WALKS.text(),
        };
        let (positions, limits): (Vec<i64>, Vec<i64>) = asked
            .iter()
            .map(|(range, _)| match range {
                Range::Page(request) => (request.offset(), i64::from(request.per_page)),
                // One more tells whether users come after these.
                Range::Walk { after, per_page } => (*after, i64::from(*per_page) + 1),
            })
            .unzip();
        // A row is freed before the next one becomes a part of the body: it takes what the user may, less its columns.
        let largest: Vec<i32> = asked
            .iter()
            .map(|(range, memory)| (memory / range.per_page().max(1) as usize - ROW) as i32)
            .collect();
        let params: [Param; 3] =
            [(&positions, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY), (&largest, Type::INT4_ARRAY)];
        for row in self.pool.read(sql, &params)? {
            push(&row, lists)?;
        }
        Ok(())
    }
}

/// Adds a row to its list.
fn push(row: &Row, lists: &mut [impl Listing]) -> Result<(), Error> {
    let ordinal: i64 = column(row, ANSWERED)?;
    let list = lists.get_mut(ordinal as usize - 1);
    let list = list.ok_or_else(|| Error::Internal("a row of no list".into()))?;
    list.set_total(column(row, ANSWERED + 1)?);
    // The one row of an empty page holds the total alone, and one that is too large no texts.
    match (column::<Option<i64>>(row, "id")?, column::<Option<&str>>(row, ANSWERED - 1)?) {
        (None, _) => {}
        (Some(_), None) => list.leave_out(),
        (Some(_), Some(_)) => list.push(record(row).map_err(|error| sqlstate::condition("", &error))?),
    }
    Ok(())
}
