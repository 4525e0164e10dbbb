//! The statements that create, change and remove users, except for creates with a key.

use super::{
    insert::Insert,
    session::Param,
    sqlstate,
    users::{EPOCH, Users, column},
};
use crate::{
    error::Error,
    users::{
        password::PasswordHash,
        revision::{Condition, Revision},
        user::User,
    },
};
use postgres::types::Type;

const CREATE: &str = "\
    insert into users (name, email) values ($1, $2) \
    returning id, name, email, created_at, updated_at, version";

/// Each row comes with its position in the arrays. It cannot be told by its values, which a trigger may change, and
/// `returning` sees nothing of `given`. But an insert reads, stores and returns one row before it reads the next: the
/// setting that reading a row writes is the one that `returning` finds.
static CREATE_MANY: Insert = Insert::new(
    "\
    insert into users (name, email) \
    select name, email from unnest($1::text[], $2::text[]) with ordinality as given (name, email, position) \
    where set_config('userd.position', position::text, true) <> '' \
    on conflict do nothing \
    returning id, name, email, created_at, updated_at, version, current_setting('userd.position')::bigint",
);

const CREATE_WITH_PASSWORD: &str = "\
    with created as ( \
        insert into users (name, email) values ($1, $2) \
        returning id, name, email, created_at, updated_at, version \
    ), credential as ( \
        insert into credentials (user_id, password_hash) select id, $3 from created \
    ) \
    select id, name, email, created_at, updated_at, version from created";

/// Locks, compares and changes a user.
const UPDATE: &str = include_str!("update.sql");

/// The user's own row stays as it is: that the password is kept in another form is no change of the record.
const REPLACE_HASH: &str =
    "update credentials set password_hash = $3 where user_id = $1 and password_hash = $2";

const DELETE: &str = "delete from users where id = $1 returning id";

/// No row when there is no such user; else whether its state is one of $2 (null: any) and none of $3, and whether it was
/// removed. The state is that of the locked row. See `update.sql`.
const DELETE_IF: &str = "\
    with target as materialized ( \
        select id, \
            ($2::bytea[] is null or int8send(version) || timestamptz_send(updated_at) = any ($2)) \
                and ($3::bytea[] is null or int8send(version) || timestamptz_send(updated_at) <> all ($3)) \
                as allowed \
        from users where id = $1 for update \
    ), deleted as ( \
        delete from users using target where users.id = target.id and allowed returning users.id \
    ) \
    select allowed, deleted.id is not null from target left join deleted on deleted.id = target.id";

/// What an update does to the password.
#[derive(Debug, Clone)]
pub enum PasswordChange {
    /// Leaves it.
    Keep,
    /// Takes it away.
    Remove,
    /// Replaces it.
    Set(PasswordHash),
}

impl Users {
    /// Stores a user, and its password's hash with it. One round trip; [`Error::AlreadyExists`] when the
    /// address is taken.
    pub fn create(&self, name: &str, email: &str, password: Option<&PasswordHash>) -> Result<User, Error> {
        let (name, email) = ((&name as _, Type::TEXT), (&email as _, Type::TEXT));
        let rows = match password {
            None => self.pool.write(CREATE, &[name, email])?,
            Some(hash) => {
                self.pool.write(CREATE_WITH_PASSWORD, &[name, email, (&hash.as_phc(), Type::TEXT)])?
            }
        };
        let created = rows.first();
        self.user(created.ok_or_else(|| Error::Internal("an insert returned no row".into()))?)
    }

    /// Stores users (name and address) in one statement and one commit, each with the outcome that it would
    /// have had unbatched. One round trip; two where an address is taken and in the last batches none was. Where the
    /// database refuses the batch for what only some of them may have, one more for each; those that meet a lock, and
    /// those that were not tried for too many that do, end with [`Error::Contended`].
    pub fn create_many(&self, new: &[(&str, &str)]) -> Vec<Result<User, Error>> {
        let unbatched = |(name, email): &(&str, &str)| self.create(name, email, None);
        // The statement for many takes up to a fourth more for one, and is executed twice where its address is taken.
        if let [user] = new {
            return vec![unbatched(user)];
        }
        self.create_batch(new).unwrap_or_else(|error| unbatched_after(&error, new, unbatched))
    }

    fn create_batch(&self, new: &[(&str, &str)]) -> Result<Vec<Result<User, Error>>, Error> {
        let order = in_order_of_addresses(new, |(_, email)| email);
        let (names, emails): (Vec<&str>, Vec<&str>) = order.iter().map(|index| new[*index]).unzip();
        let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&emails, Type::TEXT_ARRAY)];
        let rows = self.insert(&CREATE_MANY, &params, new.len())?;
        let mut outcomes: Vec<_> = new.iter().map(|_| Err(Error::AlreadyExists)).collect();
        for row in &rows {
            outcomes[at_position(column(row, 6)?, &order)?] = self.user(row);
        }
        Ok(outcomes)
    }

    /// Changes what is given and returns the user as it then is; where nothing changes, nothing is written.
    /// One round trip. [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::PreconditionFailed`] where the condition
    /// does not hold; [`Error::Contended`] as well where a password is removed that another transaction may just have
    /// set.
    pub fn update(
        &self,
        id: i64,
        name: Option<&str>,
        email: Option<&str>,
        password: &PasswordChange,
        condition: &Condition,
    ) -> Result<User, Error> {
        let (hash, remove) = match password {
            PasswordChange::Keep => (None, false),
            PasswordChange::Remove => (None, true),
            PasswordChange::Set(hash) => (Some(hash.as_phc()), false),
        };
        let [only, except] = states(condition);
        let params: [Param; 7] = [
            (&id, Type::INT8),
            (&name, Type::TEXT),
            (&email, Type::TEXT),
            (&hash, Type::TEXT),
            (&remove, Type::BOOL),
            (&only, Type::BYTEA_ARRAY),
            (&except, Type::BYTEA_ARRAY),
        ];
        let rows = self.pool.write(UPDATE, &params)?;
        let row = rows.first().ok_or(Error::NotFound)?;
        match (column(row, 6)?, column(row, 7)?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, true) => Err(Error::Contended),
            (true, false) => self.user(row),
        }
    }

    /// Replaces the hash of a password by another one of the same password, where it is still that. One round trip.
    pub fn replace_hash(&self, id: i64, old: &PasswordHash, new: &PasswordHash) -> Result<(), Error> {
        let params: [Param; 3] =
            [(&id, Type::INT8), (&old.as_phc(), Type::TEXT), (&new.as_phc(), Type::TEXT)];
        self.pool.write(REPLACE_HASH, &params).map(drop)
    }

    /// Removes a user and its credential. One round trip; [`Error::NotFound`], and [`Error::PreconditionFailed`] where
    /// the condition does not hold.
    pub fn delete(&self, id: i64, condition: &Condition) -> Result<(), Error> {
        if condition.is_empty() {
            let deleted = self.pool.write(DELETE, &[(&id, Type::INT8)])?;
            return deleted.first().map(drop).ok_or(Error::NotFound);
        }
        let [only, except] = states(condition);
        let params: [Param; 3] =
            [(&id, Type::INT8), (&only, Type::BYTEA_ARRAY), (&except, Type::BYTEA_ARRAY)];
        let rows = self.pool.write(DELETE_IF, &params)?;
        let row = rows.first().ok_or(Error::NotFound)?;
        match (column(row, 0)?, column(row, 1)?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, false) => Err(Error::NotFound),
            (true, true) => Ok(()),
        }
    }
}

/// The indices of creates in the order of their addresses, so that two statements that share some wait for each other in
/// one direction only; of equal addresses the first wins.
pub(super) fn in_order_of_addresses<T>(new: &[T], email: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut order: Vec<usize> = (0..new.len()).collect();
    order.sort_by_cached_key(|index| email(&new[*index]).to_lowercase());
    order
}

/// The index that has this position, from 1, in an order.
pub(super) fn at_position(position: i64, order: &[usize]) -> Result<usize, Error> {
    let index = usize::try_from(position - 1).ok().and_then(|position| order.get(position));
    index.copied().ok_or_else(|| Error::Internal("a created row has no position".into()))
}

/// The outcomes of creates after a batch of them has failed: each by itself, where that may have another outcome.
pub(super) fn unbatched_after<T, R>(
    error: &Error,
    new: &[T],
    create: impl Fn(&T) -> Result<R, Error>,
) -> Vec<Result<R, Error>> {
    /// The batch and two of its users. An address that another transaction has stored and not committed yet blocks
    /// its own user alone; a lock of the table blocks all of them, each for the whole of `lock_timeout`.
    const REFUSALS: usize = 3;
    let contended = matches!(error, Error::Contended);
    if new.len() < 2 || !(contended || sqlstate::is_of_rows(error)) {
        return new.iter().map(|_| Err(error.clone())).collect();
    }
    let mut refusals = usize::from(contended);
    let one = |user: &T| {
        if refusals == REFUSALS {
            return Err(Error::Contended);
        }
        let outcome = create(user);
        refusals += usize::from(matches!(outcome, Err(Error::Contended)));
        outcome
    };
    new.iter().map(one).collect()
}

/// What a condition allows and what it does not, as statements compare states: `int8send(version) ||
/// timestamptz_send(updated_at)`.
fn states(condition: &Condition) -> [Option<Vec<Vec<u8>>>; 2] {
    let state = |revision: &Revision| {
        let micros = revision.updated_at.unix_micros() - EPOCH;
        [revision.version.to_be_bytes(), micros.to_be_bytes()].concat()
    };
    let states = |revisions: &Vec<Revision>| revisions.iter().map(state).collect();
    let except = Some(&condition.except).filter(|except| !except.is_empty());
    [condition.only.as_ref().map(states), except.map(states)]
}
