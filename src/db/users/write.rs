//! The statements that create, change and remove users, except for creates with a key. Their first parameter is the
//! deadline, and the last column of their rows the database's clock: see `clock`.

use super::{
    Users, column,
    columns::{Sql, moment, with_values},
};
use crate::{
    db::{
        clock::no_row,
        session::{Deadlines, Param},
    },
    error::Error,
    users::{
        password::PasswordHash,
        revision::{Condition, Revision},
        user::{User, Values},
    },
};
use postgres::types::Type;
use std::time::Instant;

static CREATE: Sql = Sql::new(
    "\
    insert into users ({GIVEN}) \
    select {VALUE} where pg_catalog.clock_timestamp() operator(pg_catalog.<) $1 \
    returning {COLUMN}, pg_catalog.clock_timestamp()",
);

static CREATE_WITH_PASSWORD: Sql = Sql::new(
    "\
    with created as ( \
        insert into users ({GIVEN}) \
        select {VALUE} where pg_catalog.clock_timestamp() operator(pg_catalog.<) $1 \
        returning {COLUMN} \
    ), credential as ( \
        insert into credentials (user_id, password_hash) select id, $2 from created \
    ) \
    select {COLUMN}, pg_catalog.clock_timestamp() from created",
);

/// Locks, compares and changes a user, and its password.
static UPDATE: Sql = Sql::new(include_str!("update.sql"));

/// Changes a user where its row may be compared without a lock.
static UPDATE_ONE: Sql = Sql::new(include_str!("update_one.sql"));

/// The user's own row stays as it is: that the password is kept in another form is no change of the record.
const REPLACE_HASH: &str = "\
    update credentials set password_hash = $4 \
    where user_id operator(pg_catalog.=) $2 and password_hash operator(pg_catalog.=) $3 \
        and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1 \
    returning pg_catalog.clock_timestamp()";

const DELETE: &str = "\
    delete from users \
    where id operator(pg_catalog.=) $2 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1 \
    returning pg_catalog.clock_timestamp()";

/// No row when there is no such user; else whether its state is one of $3 (null: any) and none of $4, and whether it
/// was removed. The state is that of the locked row. See `update.sql`.
static DELETE_IF: Sql = Sql::new(
    "\
    with target as materialized ( \
        select id, \
            ($3::bytea[] is null or {STATE} operator(pg_catalog.=) any ($3)) \
                and ($4::bytea[] is null or {STATE} operator(pg_catalog.<>) all ($4)) as allowed \
        from users \
        where id operator(pg_catalog.=) $2 and pg_catalog.clock_timestamp() operator(pg_catalog.<) $1 for update \
    ), deleted as ( \
        delete from users using target where users.id operator(pg_catalog.=) $2 and allowed returning users.id \
    ) \
    select allowed, deleted.id is not null as removed, pg_catalog.clock_timestamp() \
    from target left join deleted on deleted.id operator(pg_catalog.=) target.id",
);

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

/// A user to be created, without its password.
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
    /// In which state; of several in one statement, [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// Nothing is changed past this.
    pub deadline: Instant,
}

/// What became of one of several updates.
#[derive(Debug)]
pub enum Updated {
    /// The user as it then is.
    User(User),
    /// Nothing yet: the address is to be another one, and another transaction may be about to take that; or a trigger
    /// has left it out. So it is to be updated unbatched, and holds up no other user meanwhile.
    Unbatched,
}

/// A user to be removed.
#[derive(Debug, Clone, Copy)]
pub struct Delete<'a> {
    /// The user.
    pub id: i64,
    /// In which state; of several in one statement, [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// Nothing is removed past this.
    pub deadline: Instant,
}

/// No change begins past its deadline, whatever holds a statement back: then it ends with [`Error::Unavailable`]. One
/// more round trip where a single change is refused for what is stored.
impl Users {
    /// Stores a user, and its password's hash with it. One round trip; [`Error::AlreadyExists`] when the
    /// address is taken.
    pub fn create(&self, new: &New, password: Option<&PasswordHash>) -> Result<User, Error> {
        let New { values, deadline } = new;
        let until = Deadlines::One(*deadline);
        let created = match password.map(PasswordHash::as_phc) {
            None => self.pool.change(CREATE.text(), &with_values(&[], values), until)?,
            Some(hash) => {
                let params = with_values(&[(&hash, Type::TEXT)], values);
                self.pool.change(CREATE_WITH_PASSWORD.text(), &params, until)?
            }
        };
        self.user(created.only(*deadline, no_row)?)
    }

    /// Stores users in one statement and one commit, each with the outcome that it would have had unbatched. One round
    /// trip; two where an address is taken and in the last batches none was. Where the database refuses the batch for
    /// what only some of them may have, one more for each; those that meet a lock, and those that were not tried for
    /// too many that do, end with [`Error::Contended`].
    pub fn create_many(&self, new: &[New]) -> Vec<Result<User, Error>> {
        self.batch(new)
    }

    /// Changes what is given and returns the user as it then is; where nothing changes, nothing is written. One round
    /// trip, and one more where another transaction changes the user meanwhile. [`Error::NotFound`],
    /// [`Error::AlreadyExists`], [`Error::PreconditionFailed`] where the condition does not hold; [`Error::Contended`]
    /// as well where a password is removed that another transaction may just have set.
    pub fn update(&self, update: &Update, password: &PasswordChange) -> Result<User, Error> {
        let Update { id, values, condition, deadline } = update;
        let (hash, remove) = match password {
            PasswordChange::Keep if condition.is_simple() => match self.update_one(update)? {
                Some(user) => return Ok(user),
                None => (None, false),
            },
            PasswordChange::Keep => (None, false),
            PasswordChange::Remove => (None, true),
            PasswordChange::Set(hash) => (Some(hash.as_phc()), false),
        };
        let [allowed, except] = states(condition);
        let params: [Param; 5] = [
            (id, Type::INT8),
            (&hash, Type::TEXT),
            (&remove, Type::BOOL),
            (&allowed, Type::BYTEA_ARRAY),
            (&except, Type::BYTEA_ARRAY),
        ];
        let params = with_values(&params, values);
        let updated = self.pool.change(UPDATE.text(), &params, Deadlines::One(*deadline))?;
        let row = updated.only(*deadline, || Error::NotFound)?;
        match (column(row, "allowed")?, column(row, "overtaken")?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, true) => Err(Error::Contended),
            (true, false) => self.user(row),
        }
    }

    /// `None` where another transaction has changed the user meanwhile, or a trigger has left it out.
    fn update_one(&self, update: &Update) -> Result<Option<User>, Error> {
        let Update { id, values, condition, deadline } = update;
        let state = state(condition);
        let params = with_values(&[(id, Type::INT8), (&state, Type::BYTEA)], values);
        let updated = self.pool.change(UPDATE_ONE.text(), &params, Deadlines::One(*deadline))?;
        let row = updated.only(*deadline, || Error::NotFound)?;
        match column(row, "allowed")? {
            None => Ok(None),
            Some(true) => self.user(row).map(Some),
            Some(false) => Err(updated.not_begun(0, *deadline).unwrap_or(Error::PreconditionFailed)),
        }
    }

    /// Changes users, no two of which are the same, in one statement and one commit, each with the outcome that it
    /// would have had unbatched; [`Error::Contended`] where another transaction has locked the user. One round trip.
    /// Where the database refuses the batch for what only some of them may have, one more for each, as for
    /// [creates](Users::create_many).
    pub fn update_many(&self, updates: &[Update]) -> Vec<Result<Updated, Error>> {
        self.batch(updates)
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
    pub fn delete(&self, delete: &Delete) -> Result<(), Error> {
        let Delete { id, condition, deadline } = *delete;
        let until = Deadlines::One(deadline);
        if condition.is_empty() {
            let deleted = self.pool.change(DELETE, &[(&id, Type::INT8)], until)?;
            return deleted.only(deadline, || Error::NotFound).map(drop);
        }
        let [allowed, except] = states(condition);
        let params: [Param; 3] =
            [(&id, Type::INT8), (&allowed, Type::BYTEA_ARRAY), (&except, Type::BYTEA_ARRAY)];
        let deleted = self.pool.change(DELETE_IF.text(), &params, until)?;
        let row = deleted.only(deadline, || Error::NotFound)?;
        match (column(row, "allowed")?, column(row, "removed")?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, false) => Err(Error::NotFound),
            (true, true) => Ok(()),
        }
    }

    /// Removes users, no two of which are the same, and their credentials, as [`Users::update_many`] changes them.
    pub fn delete_many(&self, deletes: &[Delete]) -> Vec<Result<(), Error>> {
        self.batch(deletes)
    }
}

/// The state in which a user may be changed, as statements compare it; `None` for any.
pub(super) type RowState = Option<Vec<u8>>;

/// A state as statements compare it: see `columns::STATE`.
fn bytes(revision: &Revision) -> Vec<u8> {
    [revision.version.to_be_bytes(), moment(revision.updated_at)].concat()
}

/// The one state that a simple condition allows, or `None` for all of them; no bytes where it allows none.
pub(super) fn state(condition: &Condition) -> RowState {
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
        db::{NewOnce, tests::LONG},
        users::{
            idempotency::{Fingerprint, Key},
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
        let ada = New { values: Values::new("Ada", "ada@example.com"), deadline: soon };
        users.create(&ada, Some(&hash)).unwrap();
        let ada = users.find_many(&[1]).unwrap().remove(0);
        fn check<T: Debug>(outcome: Result<T, Error>) {
            assert!(matches!(outcome, Err(Error::Unavailable(_))), "{outcome:?}");
        }
        let key = Key::new("k");
        for email in ["ada@example.com", "bob@example.com"] {
            let new = NewUser { name: "n".into(), email: email.into(), password: None };
            let fingerprint = &Fingerprint::of(&new);
            let new = New { values: new.values(), deadline: late };
            let once = NewOnce { key: &key, fingerprint, values: new.values, deadline: late };
            for hash in [None, Some(&hash)] {
                check(users.create(&new, hash));
                check(users.create_once(&once, hash));
            }
            users.create_many(&[new; 2]).into_iter().for_each(check);
        }
        let only = Condition { only: Some(vec![]), except: vec![] };
        let renamed = Values { name: Some("n"), ..Values::default() };
        for id in [1, 2] {
            for condition in [Condition::default(), only.clone()] {
                for password in
                    [PasswordChange::Keep, PasswordChange::Remove, PasswordChange::Set(hash.clone())]
                {
                    let update = Update { id, values: renamed, condition: &condition, deadline: late };
                    check(users.update(&update, &password));
                }
                check(users.delete(&Delete { id, condition: &condition, deadline: late }));
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
