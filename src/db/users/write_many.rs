//! The statements that create, change and remove several users at once, each for all requests of a batch.

use super::{
    Users,
    batch::{Batched, address},
    column,
    columns::{Sql, arrays, with_arrays},
    insert::Insert,
    write::{Delete, New, PasswordChange, RowState, Update, Updated, state},
};
use crate::{
    db::{
        clock::Changed,
        session::{Deadlines, Param},
    },
    error::Error,
    users::{revision::Condition, user::User},
};
use postgres::{Row, types::Type};
use std::time::Instant;

/// Each row comes with its position in the arrays. It cannot be told by its values, which a trigger may change, and
/// `returning` sees nothing of `given`. But an insert reads, stores and returns one row before it reads the next: the
/// setting that reading a row writes is the one that `returning` finds.
static CREATE_MANY: Insert = Insert::new(
    "\
    insert into users ({GIVEN}) \
    select {GIVEN} \
    from rows from (pg_catalog.unnest($1::timestamptz[]), {pg_catalog.unnest(VALUE::TYPE[])}) \
        with ordinality as given (deadline, {GIVEN}, position) \
    where pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline \
        and pg_catalog.set_config('userd.position', position::text, true) operator(pg_catalog.<>) '' \
    on conflict (pg_catalog.lower(email collate pg_catalog.\"C\")) do nothing \
    returning {COLUMN}, pg_catalog.current_setting('userd.position')::bigint as position, \
        pg_catalog.clock_timestamp()",
);

/// Changes users whose rows no other transaction has locked.
static UPDATE_MANY: Sql = Sql::new(include_str!("update_many.sql"));

/// Deletes users whose rows no other transaction has locked.
static DELETE_MANY: Sql = Sql::new(include_str!("delete_many.sql"));

impl Batched for New<'_> {
    type Outcome = User;
    type Key = Option<String>;

    fn key(&self) -> (Option<String>, Instant) {
        (address(&self.values), self.deadline)
    }

    fn batched(users: &Users, new: &[&Self], deadlines: &[Instant]) -> Result<Changed, Error> {
        let arrays = arrays(new.iter().map(|new| new.values));
        users.insert(&CREATE_MANY, &with_arrays(&[], &arrays), deadlines)
    }

    fn outcome(&self, users: &Users, row: Option<&Row>, late: Option<Error>) -> Result<User, Error> {
        users.user(row.ok_or_else(|| late.unwrap_or(Error::AlreadyExists))?)
    }

    fn unbatched(&self, users: &Users) -> Result<User, Error> {
        users.create(self, None)
    }
}

impl Batched for Update<'_> {
    type Outcome = Updated;
    type Key = i64;

    fn key(&self) -> (i64, Instant) {
        (self.id, self.deadline)
    }

    fn batched(users: &Users, updates: &[&Self], deadlines: &[Instant]) -> Result<Changed, Error> {
        let (ids, states) = ids_and_states(updates.iter().map(|update| (update.id, update.condition)))?;
        let arrays = arrays(updates.iter().map(|update| update.values));
        let fixed: [Param; 2] = [(&ids, Type::INT8_ARRAY), (&states, Type::BYTEA_ARRAY)];
        users.pool.change(UPDATE_MANY.text(), &with_arrays(&fixed, &arrays), Deadlines::Each(deadlines))
    }

    fn outcome(&self, users: &Users, row: Option<&Row>, late: Option<Error>) -> Result<Updated, Error> {
        match done(row, late)? {
            Some(row) => users.user(row).map(Updated::User),
            None => Ok(Updated::Unbatched),
        }
    }

    fn unbatched(&self, users: &Users) -> Result<Updated, Error> {
        users.update(self, &PasswordChange::Keep).map(Updated::User)
    }
}

impl Batched for Delete<'_> {
    type Outcome = ();
    type Key = i64;

    fn key(&self) -> (i64, Instant) {
        (self.id, self.deadline)
    }

    fn batched(users: &Users, deletes: &[&Self], deadlines: &[Instant]) -> Result<Changed, Error> {
        let (ids, states) = ids_and_states(deletes.iter().map(|delete| (delete.id, delete.condition)))?;
        let params: [Param; 2] = [(&ids, Type::INT8_ARRAY), (&states, Type::BYTEA_ARRAY)];
        users.pool.change(DELETE_MANY.text(), &params, Deadlines::Each(deadlines))
    }

    fn outcome(&self, _: &Users, row: Option<&Row>, late: Option<Error>) -> Result<(), Error> {
        done(row, late).map(drop)
    }

    fn unbatched(&self, users: &Users) -> Result<(), Error> {
        users.delete(self)
    }
}

/// The row of a change that was made; `None` where it is to be made unbatched; else why it was not. The numbers are
/// those of `update_many.sql`.
fn done(row: Option<&Row>, late: Option<Error>) -> Result<Option<&Row>, Error> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    let refused = match column::<i32>(row, "outcome")? {
        0 => return Ok(Some(row)),
        1 => Err(Error::PreconditionFailed),
        2 => Ok(None),
        3 => Err(Error::Contended),
        _ => Err(Error::NotFound),
    };
    late.map_or(refused, Err)
}

/// What a statement for several users is told of each, beside the values. It may change each user once.
fn ids_and_states<'a>(
    changes: impl Iterator<Item = (i64, &'a Condition)>,
) -> Result<(Vec<i64>, Vec<RowState>), Error> {
    let (ids, states): (Vec<i64>, _) = changes.map(|(id, condition)| (id, state(condition))).unzip();
    match ids.windows(2).any(|pair| pair[0] == pair[1]) {
        true => Err(Error::Internal("a user is changed twice in one statement".into())),
        false => Ok((ids, states)),
    }
}
