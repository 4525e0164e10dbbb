//! The statements that create, change and remove users, except for creates with a key.

use super::{
    clock::Changed,
    insert::Insert,
    session::{Deadlines, Param},
    sqlstate,
    users::{EPOCH, Users, at_positions, column},
};
use crate::{
    error::Error,
    users::{
        password::PasswordHash,
        revision::{Condition, Revision},
        user::User,
    },
};
use postgres::{Row, types::Type};
use std::time::Instant;

const CREATE: &str = "\
    insert into users (name, email) \
    select $1, $2 where pg_catalog.clock_timestamp() operator(pg_catalog.<) $3 \
    returning id, name, email, created_at, updated_at, version, pg_catalog.clock_timestamp()";

/// Each row comes with its position in the arrays. It cannot be told by its values, which a trigger may change, and
/// `returning` sees nothing of `given`. But an insert reads, stores and returns one row before it reads the next: the
/// setting that reading a row writes is the one that `returning` finds.
static CREATE_MANY: Insert = Insert::new(
    "\
    insert into users (name, email) \
    select name, email \
    from rows from (pg_catalog.unnest($1::text[]), pg_catalog.unnest($2::text[]), \
        pg_catalog.unnest($3::timestamptz[])) with ordinality as given (name, email, deadline, position) \
    where pg_catalog.clock_timestamp() operator(pg_catalog.<) deadline \
        and pg_catalog.set_config('userd.position', position::text, true) operator(pg_catalog.<>) '' \
    on conflict do nothing \
    returning id, name, email, created_at, updated_at, version, \
        pg_catalog.current_setting('userd.position')::bigint, pg_catalog.clock_timestamp()",
);

const CREATE_WITH_PASSWORD: &str = "\
    with created as ( \
        insert into users (name, email) \
        select $1, $2 where pg_catalog.clock_timestamp() operator(pg_catalog.<) $4 \
        returning id, name, email, created_at, updated_at, version \
    ), credential as ( \
        insert into credentials (user_id, password_hash) select id, $3 from created \
    ) \
    select id, name, email, created_at, updated_at, version, pg_catalog.clock_timestamp() from created";

/// Locks, compares and changes a user.
const UPDATE: &str = include_str!("update.sql");

/// The user's own row stays as it is: that the password is kept in another form is no change of the record.
const REPLACE_HASH: &str = "\
    update credentials set password_hash = $3 \
    where user_id operator(pg_catalog.=) $1 and password_hash operator(pg_catalog.=) $2 \
        and pg_catalog.clock_timestamp() operator(pg_catalog.<) $4 \
    returning pg_catalog.clock_timestamp()";

const DELETE: &str = "\
    delete from users \
    where id operator(pg_catalog.=) $1 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $2 \
    returning pg_catalog.clock_timestamp()";

/// No row when there is no such user; else whether its state is one of $2 (null: any) and none of $3, and whether it was
/// removed. The state is that of the locked row. See `update.sql`.
const DELETE_IF: &str = "\
    with target as materialized ( \
        select id, \
            ($2::bytea[] is null or pg_catalog.int8send(version) operator(pg_catalog.||) \
                    pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.=) any ($2)) \
                and ($3::bytea[] is null or pg_catalog.int8send(version) operator(pg_catalog.||) \
                    pg_catalog.timestamptz_send(updated_at) operator(pg_catalog.<>) all ($3)) \
                as allowed \
        from users \
        where id operator(pg_catalog.=) $1 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $4 for update \
    ), deleted as ( \
        delete from users using target where users.id operator(pg_catalog.=) target.id and allowed returning users.id \
    ) \
    select allowed, deleted.id is not null, pg_catalog.clock_timestamp() \
    from target left join deleted on deleted.id operator(pg_catalog.=) target.id";

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

/// A user to be created without a password.
#[derive(Debug, Clone, Copy)]
pub struct New<'a> {
    /// The name.
    pub name: &'a str,
    /// The address.
    pub email: &'a str,
    /// Nothing is created past this.
    pub deadline: Instant,
}

/// No change begins past its deadline, whatever holds a statement back: then it ends with [`Error::Unavailable`]. One more
/// round trip where a single change is refused for what is stored.
impl Users {
    /// Stores a user, and its password's hash with it. One round trip; [`Error::AlreadyExists`] when the
    /// address is taken.
    pub fn create(
        &self,
        name: &str,
        email: &str,
        password: Option<&PasswordHash>,
        deadline: Instant,
    ) -> Result<User, Error> {
        let (name, email) = ((&name as _, Type::TEXT), (&email as _, Type::TEXT));
        let until = Deadlines::One(deadline);
        let created = match password {
            None => self.pool.change(CREATE, &[name, email], until)?,
            Some(hash) => {
                let params = [name, email, (&hash.as_phc() as _, Type::TEXT)];
                self.pool.change(CREATE_WITH_PASSWORD, &params, until)?
            }
        };
        self.user(only(&created, deadline, no_row)?)
    }

    /// Stores users in one statement and one commit, each with the outcome that it would
    /// have had unbatched. One round trip; two where an address is taken and in the last batches none was. Where the
    /// database refuses the batch for what only some of them may have, one more for each; those that meet a lock, and
    /// those that were not tried for too many that do, end with [`Error::Contended`].
    pub fn create_many(&self, new: &[New]) -> Vec<Result<User, Error>> {
        let unbatched = |new: &New| self.create(new.name, new.email, None, new.deadline);
        // The statement for many takes up to a fourth more for one, and is executed twice where its address is taken.
        if let [user] = new {
            return vec![unbatched(user)];
        }
        self.create_batch(new).unwrap_or_else(|error| unbatched_after(&error, new, unbatched))
    }

    fn create_batch(&self, new: &[New]) -> Result<Vec<Result<User, Error>>, Error> {
        let order = in_order_of_addresses(new, |new| new.email);
        let (names, emails): (Vec<&str>, Vec<&str>) =
            order.iter().map(|index| (new[*index].name, new[*index].email)).unzip();
        let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&emails, Type::TEXT_ARRAY)];
        let deadlines: Vec<Instant> = order.iter().map(|index| new[*index].deadline).collect();
        let created = self.insert(&CREATE_MANY, &params, &deadlines)?;
        in_order(&created, &deadlines, &order, 6, |row| self.user(row))
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
        deadline: Instant,
    ) -> Result<User, Error> {
        let (hash, remove) = match password {
            PasswordChange::Keep => (None, false),
            PasswordChange::Remove => (None, true),
            PasswordChange::Set(hash) => (Some(hash.as_phc()), false),
        };
        let [allowed, except] = states(condition);
        let params: [Param; 7] = [
            (&id, Type::INT8),
            (&name, Type::TEXT),
            (&email, Type::TEXT),
            (&hash, Type::TEXT),
            (&remove, Type::BOOL),
            (&allowed, Type::BYTEA_ARRAY),
            (&except, Type::BYTEA_ARRAY),
        ];
        let updated = self.pool.change(UPDATE, &params, Deadlines::One(deadline))?;
        let row = only(&updated, deadline, || Error::NotFound)?;
        match (column(row, 6)?, column(row, 7)?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, true) => Err(Error::Contended),
            (true, false) => self.user(row),
        }
    }

    /// Replaces the hash of a password by another one of the same password, where it is still that. One round trip.
    pub fn replace_hash(
        &self,
        id: i64,
        old: &PasswordHash,
        new: &PasswordHash,
        deadline: Instant,
    ) -> Result<(), Error> {
        let params: [Param; 3] =
            [(&id, Type::INT8), (&old.as_phc(), Type::TEXT), (&new.as_phc(), Type::TEXT)];
        self.pool.change(REPLACE_HASH, &params, Deadlines::One(deadline)).map(drop)
    }

    /// Removes a user and its credential. One round trip; [`Error::NotFound`], and [`Error::PreconditionFailed`] where
    /// the condition does not hold.
    pub fn delete(&self, id: i64, condition: &Condition, deadline: Instant) -> Result<(), Error> {
        let until = Deadlines::One(deadline);
        if condition.is_empty() {
            let deleted = self.pool.change(DELETE, &[(&id, Type::INT8)], until)?;
            return only(&deleted, deadline, || Error::NotFound).map(drop);
        }
        let [allowed, except] = states(condition);
        let params: [Param; 3] =
            [(&id, Type::INT8), (&allowed, Type::BYTEA_ARRAY), (&except, Type::BYTEA_ARRAY)];
        let deleted = self.pool.change(DELETE_IF, &params, until)?;
        let row = only(&deleted, deadline, || Error::NotFound)?;
        match (column(row, 0)?, column(row, 1)?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, false) => Err(Error::NotFound),
            (true, true) => Ok(()),
        }
    }
}

/// The row of a change; `missing` is why there is none, unless its deadline had passed.
pub(super) fn only(
    changed: &Changed,
    deadline: Instant,
    missing: impl FnOnce() -> Error,
) -> Result<&Row, Error> {
    changed.rows.first().ok_or_else(|| not_begun(changed, 0, deadline).unwrap_or_else(missing))
}

/// A trigger may leave a row out.
pub(super) fn no_row() -> Error {
    Error::Internal("an insert returned no row".into())
}

/// Why a change without a row was not begun, if its deadline may have passed. Where it has not, by our own clock, the
/// database's was set, or answers take long.
fn not_begun(changed: &Changed, index: usize, deadline: Instant) -> Option<Error> {
    let in_time = deadline > Instant::now();
    changed.is_late(index).then(|| match in_time {
        true => Error::Contended,
        false => Error::Unavailable("the database did not begin a change in time".into()),
    })
}

/// The outcomes of a batch of creates that the statement got in this order. Column `position` of a row is its position
/// there, from 1; those without a row have something that is taken.
pub(super) fn in_order<R>(
    created: &Changed,
    deadlines: &[Instant],
    order: &[usize],
    position: usize,
    outcome: impl Fn(&Row) -> Result<R, Error>,
) -> Result<Vec<Result<R, Error>>, Error> {
    let found = at_positions(&created.rows, position, order.len(), outcome)?;
    let mut outcomes: Vec<_> = order.iter().map(|_| Err(Error::AlreadyExists)).collect();
    for (at, found) in found.into_iter().enumerate() {
        let missing = || not_begun(created, at, deadlines[at]).unwrap_or(Error::AlreadyExists);
        outcomes[order[at]] = found.ok_or_else(missing);
    }
    Ok(outcomes)
}

/// The indices of creates in the order of their addresses, so that two statements that share some wait for each other in
/// one direction only; of equal addresses the first wins.
pub(super) fn in_order_of_addresses<T>(new: &[T], email: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut order: Vec<usize> = (0..new.len()).collect();
    order.sort_by_cached_key(|index| email(&new[*index]).to_ascii_lowercase());
    order
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, ScratchDatabase,
        db::silent::LONG,
        users::{
            once::{Fingerprint, Key},
            user::NewUser,
        },
    };
    use std::fmt::Debug;

    /// Whatever is stored: what is late is not told from what is taken, missing or in another state.
    #[test]
    fn what_is_late_is_neither_done_nor_refused() {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&database.config()).unwrap();
        let users = app.users();
        let hash = PasswordHash::from_phc("hash".into());
        let (soon, late) = (Instant::now() + LONG, Instant::now());
        users.create("Ada", "ada@example.com", Some(&hash), soon).unwrap();
        let ada = users.find(1).unwrap();
        fn check<T: Debug>(outcome: Result<T, Error>) {
            assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
        }
        let key = Key::new("k");
        for email in ["ada@example.com", "bob@example.com"] {
            let new = NewUser { name: "n".into(), email: email.into(), password: None };
            let fingerprint = Fingerprint::of(&new);
            for hash in [None, Some(&hash)] {
                check(users.create("n", email, hash, late));
                check(users.create_once(&key, &fingerprint, "n", email, hash, late));
            }
            let batch = [New { name: "n", email, deadline: late }; 2];
            users.create_many(&batch).into_iter().for_each(check);
        }
        let only = Condition { only: Some(vec![]), except: vec![] };
        for id in [1, 2] {
            for condition in [Condition::default(), only.clone()] {
                for password in
                    [PasswordChange::Keep, PasswordChange::Remove, PasswordChange::Set(hash.clone())]
                {
                    check(users.update(id, Some("n"), None, &password, &condition, late));
                }
                check(users.delete(id, &condition, late));
            }
        }
        users.replace_hash(1, &hash, &PasswordHash::from_phc("other".into()), late).unwrap();
        let emails = ["ada@example.com", "bob@example.com"];
        let mut found = users.find_by_email_with_credential(&emails).unwrap();
        assert!(found.pop().unwrap().is_none());
        let found = found.pop().unwrap().unwrap();
        assert_eq!((found.name.as_str(), found.version), ("Ada", ada.version));
        assert_eq!(found.credential.get().unwrap().as_ref().map(|found| &found.password_hash), Some(&hash));
        assert!(users.find_kept(&[&key]).unwrap()[0].is_none());
    }
}
