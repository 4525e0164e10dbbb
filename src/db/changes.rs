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
        user::{User, Values},
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
    on conflict (pg_catalog.lower(email collate pg_catalog.\"C\")) do nothing \
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

/// Locks, compares and changes a user, and its password.
const UPDATE: &str = include_str!("update.sql");

/// Changes a user where its row may be compared without a lock.
const UPDATE_ONE: &str = include_str!("update_one.sql");

/// Changes users whose rows are not locked.
const UPDATE_MANY: &str = include_str!("update_many.sql");

/// Deletes users whose rows are not locked.
const DELETE_MANY: &str = include_str!("delete_many.sql");

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
        delete from users using target where users.id operator(pg_catalog.=) $1 and allowed returning users.id \
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
    /// The user: all values.
    pub values: Values<'a>,
    /// Nothing is created past this.
    pub deadline: Instant,
}

/// A change of a user, without its password.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The user.
    pub id: i64,
    /// What is new.
    pub values: Values<'a>,
    /// In which state; [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// Nothing is changed past this.
    pub deadline: Instant,
}

/// What became of one of several updates.
#[derive(Debug)]
pub enum Updated {
    /// The user as it then is.
    User(User),
    /// Nothing yet: the address is to be another one, and another transaction may be about to take that. So it is to be
    /// updated unbatched, and holds up no other user meanwhile.
    Unbatched,
}

/// A user to be removed.
#[derive(Debug, Clone, Copy)]
pub struct Delete<'a> {
    /// The user.
    pub id: i64,
    /// In which state; [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// Nothing is removed past this.
    pub deadline: Instant,
}

/// No change begins past its deadline, whatever holds a statement back: then it ends with [`Error::Unavailable`]. One more
/// round trip where a single change is refused for what is stored.
impl Users {
    /// Stores a user, and its password's hash with it. One round trip; [`Error::AlreadyExists`] when the
    /// address is taken.
    pub fn create(
        &self,
        values: Values,
        password: Option<&PasswordHash>,
        deadline: Instant,
    ) -> Result<User, Error> {
        let (name, email) = ((&values.name as _, Type::TEXT), (&values.email as _, Type::TEXT));
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
        let unbatched = |new: &New| self.create(new.values, None, new.deadline);
        // The statement for many takes up to a fourth more for one, and is executed twice where its address is taken.
        if let [user] = new {
            return vec![unbatched(user)];
        }
        self.create_batch(new).unwrap_or_else(|error| unbatched_after(&error, new, unbatched))
    }

    fn create_batch(&self, new: &[New]) -> Result<Vec<Result<User, Error>>, Error> {
        let order = in_order_of_addresses(new, |new| new.values);
        let values = order.iter().map(|index| new[*index].values);
        let (names, emails): (Vec<_>, Vec<_>) = values.map(|values| (values.name, values.email)).unzip();
        let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&emails, Type::TEXT_ARRAY)];
        let deadlines: Vec<Instant> = order.iter().map(|index| new[*index].deadline).collect();
        let created = self.insert(&CREATE_MANY, &params, &deadlines)?;
        in_order(&created, &deadlines, &order, 6, |row| self.user(row))
    }

    /// Changes what is given and returns the user as it then is; where nothing changes, nothing is written.
    /// One round trip, and one more where another transaction changes the user meanwhile. [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::PreconditionFailed`] where the condition
    /// does not hold; [`Error::Contended`] as well where a password is removed that another transaction may just have
    /// set.
    pub fn update(
        &self,
        id: i64,
        values: Values,
        password: &PasswordChange,
        condition: &Condition,
        deadline: Instant,
    ) -> Result<User, Error> {
        if matches!(password, PasswordChange::Keep) && condition.is_simple() {
            let update = Update { id, values, condition, deadline };
            if let Some(user) = self.update_one(&update)? {
                return Ok(user);
            }
        }
        let (hash, remove) = match password {
            PasswordChange::Keep => (None, false),
            PasswordChange::Remove => (None, true),
            PasswordChange::Set(hash) => (Some(hash.as_phc()), false),
        };
        let [allowed, except] = states(condition);
        let params: [Param; 7] = [
            (&id, Type::INT8),
            (&values.name, Type::TEXT),
            (&values.email, Type::TEXT),
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

    /// `None` where another transaction has changed the user meanwhile, or a trigger has left it out.
    fn update_one(&self, update: &Update) -> Result<Option<User>, Error> {
        let Update { id, values: Values { name, email }, condition, deadline } = update;
        let state = state(condition);
        let params: [Param; 4] =
            [(id, Type::INT8), (name, Type::TEXT), (email, Type::TEXT), (&state, Type::BYTEA)];
        let updated = self.pool.change(UPDATE_ONE, &params, Deadlines::One(*deadline))?;
        let row = only(&updated, *deadline, || Error::NotFound)?;
        match column(row, 6)? {
            None => Ok(None),
            Some(true) => self.user(row).map(Some),
            Some(false) => Err(not_begun(&updated, 0, *deadline).unwrap_or(Error::PreconditionFailed)),
        }
    }

    /// Changes users, no two of which are the same, in one statement and one commit, each with the outcome that it would
    /// have had unbatched; [`Error::Contended`] where another transaction has locked the user. One round trip. Where the
    /// database refuses the batch for what only some of them may have, one more for each, as for
    /// [creates](Users::create_many).
    pub fn update_many(&self, updates: &[Update]) -> Vec<Result<Updated, Error>> {
        let unbatched = |update: &Update| {
            let Update { id, values, condition, deadline } = *update;
            let user = self.update(id, values, &PasswordChange::Keep, condition, deadline);
            user.map(Updated::User)
        };
        if let [update] = updates {
            return vec![unbatched(update)];
        }
        let batch = || {
            let order = in_order_of_ids(updates, |update| update.id)?;
            let given: Vec<&Update> = order.iter().map(|index| &updates[*index]).collect();
            let ids: Vec<i64> = given.iter().map(|update| update.id).collect();
            let (names, emails): (Vec<_>, Vec<_>) =
                given.iter().map(|update| (update.values.name, update.values.email)).unzip();
            let states: Vec<_> = given.iter().map(|update| state(update.condition)).collect();
            let deadlines: Vec<Instant> = given.iter().map(|update| update.deadline).collect();
            let params: [Param; 4] = [
                (&ids, Type::INT8_ARRAY),
                (&names, Type::TEXT_ARRAY),
                (&emails, Type::TEXT_ARRAY),
                (&states, Type::BYTEA_ARRAY),
            ];
            let changed = self.pool.change(UPDATE_MANY, &params, Deadlines::Each(&deadlines))?;
            by_id(&changed, &ids, &deadlines, &order, 6, |row, outcome| match outcome {
                Outcome::Done => self.user(row).map(Updated::User),
                Outcome::Unbatched => Ok(Updated::Unbatched),
                refused => Err(refused.into_error()),
            })
        };
        batch().unwrap_or_else(|error| unbatched_after(&error, updates, unbatched))
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

    /// Removes users, no two of which are the same, and their credentials, as [`Users::update_many`] changes them.
    pub fn delete_many(&self, deletes: &[Delete]) -> Vec<Result<(), Error>> {
        let unbatched = |delete: &Delete| self.delete(delete.id, delete.condition, delete.deadline);
        if let [delete] = deletes {
            return vec![unbatched(delete)];
        }
        let batch = || {
            let order = in_order_of_ids(deletes, |delete| delete.id)?;
            let given: Vec<&Delete> = order.iter().map(|index| &deletes[*index]).collect();
            let ids: Vec<i64> = given.iter().map(|delete| delete.id).collect();
            let states: Vec<_> = given.iter().map(|delete| state(delete.condition)).collect();
            let deadlines: Vec<Instant> = given.iter().map(|delete| delete.deadline).collect();
            let params: [Param; 2] = [(&ids, Type::INT8_ARRAY), (&states, Type::BYTEA_ARRAY)];
            let changed = self.pool.change(DELETE_MANY, &params, Deadlines::Each(&deadlines))?;
            by_id(&changed, &ids, &deadlines, &order, 0, |_, outcome| match outcome {
                Outcome::Done => Ok(()),
                refused => Err(refused.into_error()),
            })
        };
        batch().unwrap_or_else(|error| unbatched_after(&error, deletes, unbatched))
    }
}

/// What a statement says of one of several changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    NotAllowed,
    Unbatched,
    /// Or late.
    Locked,
    Missing,
}

impl Outcome {
    fn of(number: i32) -> Result<Outcome, Error> {
        const ALL: [Outcome; 5] =
            [Outcome::Done, Outcome::NotAllowed, Outcome::Unbatched, Outcome::Locked, Outcome::Missing];
        let outcome = usize::try_from(number).ok().and_then(|number| ALL.get(number));
        outcome.copied().ok_or_else(|| Error::Internal("a change of an unknown outcome".into()))
    }

    fn into_error(self) -> Error {
        match self {
            Outcome::NotAllowed => Error::PreconditionFailed,
            Outcome::Missing => Error::NotFound,
            Outcome::Locked => Error::Contended,
            Outcome::Done | Outcome::Unbatched => Error::Internal("a change that is no refusal".into()),
        }
    }
}

/// The outcomes of a batch of changes that the statement got in this order. Column `asked` of a row is the id of the
/// user, and the next one the outcome.
fn by_id<R>(
    changed: &Changed,
    ids: &[i64],
    deadlines: &[Instant],
    order: &[usize],
    asked: usize,
    outcome: impl Fn(&Row, Outcome) -> Result<R, Error>,
) -> Result<Vec<Result<R, Error>>, Error> {
    let missing = || Err(Error::Internal("a change has no outcome".into()));
    let mut outcomes: Vec<_> = ids.iter().map(|_| missing()).collect();
    for row in &changed.rows {
        let unknown = |_| Error::Internal("a change that was not asked for".into());
        let at = ids.binary_search(&column(row, asked)?).map_err(unknown)?;
        let of_row = Outcome::of(column(row, asked + 1)?)?;
        let not_begun = match of_row {
            Outcome::Done => None,
            _ => not_begun(changed, at, deadlines[at]),
        };
        outcomes[order[at]] = not_begun.map_or_else(|| outcome(row, of_row), Err);
    }
    Ok(outcomes)
}

/// The indices of changes in the order of their ids, in which all statements lock them. Each user may be changed once in a
/// statement.
fn in_order_of_ids<T>(changes: &[T], id: impl Fn(&T) -> i64) -> Result<Vec<usize>, Error> {
    let mut order: Vec<usize> = (0..changes.len()).collect();
    order.sort_unstable_by_key(|index| id(&changes[*index]));
    match order.windows(2).any(|pair| id(&changes[pair[0]]) == id(&changes[pair[1]])) {
        true => Err(Error::Internal("a user is changed twice in one statement".into())),
        false => Ok(order),
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
pub(super) fn in_order_of_addresses<T>(new: &[T], values: impl Fn(&T) -> Values) -> Vec<usize> {
    let mut order: Vec<usize> = (0..new.len()).collect();
    order.sort_by_cached_key(|index| values(&new[*index]).email.map(str::to_ascii_lowercase));
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

/// A state as statements compare it: `int8send(version) || timestamptz_send(updated_at)`.
fn bytes(revision: &Revision) -> Vec<u8> {
    let micros = revision.updated_at.unix_micros() - EPOCH;
    [revision.version.to_be_bytes(), micros.to_be_bytes()].concat()
}

/// The one state that a simple condition allows, or `None` for all of them; no bytes where it allows none.
fn state(condition: &Condition) -> Option<Vec<u8>> {
    let only = condition.only.as_ref()?;
    Some(only.first().map(bytes).unwrap_or_default())
}

/// What a condition allows and what it does not.
fn states(condition: &Condition) -> [Option<Vec<Vec<u8>>>; 2] {
    let states = |revisions: &Vec<Revision>| revisions.iter().map(bytes).collect();
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
        users.create(Values::new("Ada", "ada@example.com"), Some(&hash), soon).unwrap();
        let ada = users.find(1).unwrap();
        fn check<T: Debug>(outcome: Result<T, Error>) {
            assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
        }
        let key = Key::new("k");
        for email in ["ada@example.com", "bob@example.com"] {
            let new = NewUser { name: "n".into(), email: email.into(), password: None };
            let fingerprint = Fingerprint::of(&new);
            for hash in [None, Some(&hash)] {
                check(users.create(new.values(), hash, late));
                check(users.create_once(&key, &fingerprint, new.values(), hash, late));
            }
            let batch = [New { values: new.values(), deadline: late }; 2];
            users.create_many(&batch).into_iter().for_each(check);
        }
        let only = Condition { only: Some(vec![]), except: vec![] };
        let renamed = Values { name: Some("n"), ..Values::default() };
        for id in [1, 2] {
            for condition in [Condition::default(), only.clone()] {
                for password in
                    [PasswordChange::Keep, PasswordChange::Remove, PasswordChange::Set(hash.clone())]
                {
                    check(users.update(id, renamed, &password, &condition, late));
                }
                check(users.delete(id, &condition, late));
            }
        }
        for condition in [Condition::default(), only] {
            let update = |id| Update { id, values: renamed, condition: &condition, deadline: late };
            users.update_many(&[update(1), update(2)]).into_iter().for_each(check);
            let delete = |id| Delete { id, condition: &condition, deadline: late };
            users.delete_many(&[delete(1), delete(2)]).into_iter().for_each(check);
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
