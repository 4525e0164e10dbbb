//! The users of a database: each statement that reads or changes them, beside the function that executes it.
//!
//! The statements can be pasted into psql. Operands have the exact types of PostgreSQL's own operators, and sessions
//! look names up in one schema alone, so that no operator of another role fits better. `limit 1` within a lateral and
//! `= any (array(…))` make look-ups in an index of plans that were made while a table was empty.

use super::{Pool, blocking::outside_of_runtimes, session::Param, sqlstate};
use crate::{
    error::Error,
    users::{
        pagination::{Listed, PageRequest},
        password::PasswordHash,
        relation::{Loader, Relation},
        revision::{Condition, Revision},
        timestamp::Timestamp,
        user::{Credential, User, UserRef, Values},
    },
};
use postgres::{
    Row,
    types::{FromSql, IsNull, ToSql, Type, accepts, private::BytesMut, to_sql_checked},
};
use std::{
    sync::{Arc, atomic::AtomicU32},
    time::{Duration, Instant},
};

const FIND: &str = "select id, name, email, created_at, updated_at, version from users where id = $1";

const FIND_MANY: &str =
    "select id, name, email, created_at, updated_at, version from users where id = any ($1::bigint[])";

/// Two requests may ask for one address: so each row has the position of its address, from 1.
const FIND_BY_EMAIL: &str = r#"
    select found.*, position
    from unnest($1::text[]) with ordinality as asked (address, position), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") = lower(address collate "C") limit 1
    ) found"#;

const FIND_WITH_CREDENTIAL: &str = r#"
    select found.*, position, (select password_hash from credentials where user_id = found.id)
    from unnest($1::text[]) with ordinality as asked (address, position), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") = lower(address collate "C") limit 1
    ) found"#;

const FIND_CREDENTIAL: &str = "select password_hash from credentials where user_id = $1";

/// $1: the positions of the pages' first rows, from 0. $2: the most rows; negative if positions count from the last
/// user. The first row of a page is looked up from the nearer end of its block. An empty page is one row of nulls with
/// the total. See `V2__user_counts.sql`.
const PAGES: &str = "
    with blocks as materialized (
        select block, sum(n)::int as n, sum(sum(n)::int) over (order by block rows unbounded preceding) as upto
        from user_counts group by block
    )
    select u.id, name, email, u.created_at, u.updated_at, version, position, total
    from (
        select position, total, most < 0 as is_from_end,
            case when most < 0 then greatest(rest + most, 0) else first end as first,
            case when most < 0 then least(rest, -most) else most end as most
        from unnest($1::bigint[], $2::bigint[]) with ordinality as asked (first, most, position),
            (select coalesce(max(upto), 0)::bigint as total from blocks) counted,
            lateral (select greatest(total - first, 0) as rest) remaining
    ) asked
    left join lateral (
        select block, first - (upto - n) as before, upto - 1 - first as behind
        from blocks where first >= upto - n and first < upto limit 1
    ) b on true
    left join lateral (
        (select id as first_id from users where id >= block << 12 and before <= behind
            order by id offset before limit 1)
        union all
        (select id from users where id < (block + 1) << 12 and before > behind
            order by id desc offset behind limit 1)
    ) s on true
    left join lateral (select * from users where id >= first_id order by id limit most) u on true
    order by position, case when is_from_end then -u.id else u.id end";

/// $1: the ids that the users follow; else as [`PAGES`].
const WALKS: &str = "
    select u.id, name, email, u.created_at, u.updated_at, version, position, bigint '0' as total
    from unnest($1::bigint[], $2::bigint[]) with ordinality as asked (after, most, position)
    cross join lateral (select * from users where id > after order by id limit most) u
    order by position, u.id";

/// $1: how addresses begin. $2: the most rows; they may end with addresses that begin otherwise.
const BY_PREFIX: &str = r#"
    select found.* from unnest($1::text[], $2::bigint[]) as asked (prefix, most), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") >= lower(prefix collate "C")
        order by lower(email::text collate "C") limit most
    ) found
    order by lower(email::text collate "C")"#;

const CREATE: &str = r#"
    insert into users (name, email) values ($1, $2)
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version"#;

/// `returning` sees nothing of `given`, and a trigger may change each value. But an insert reads, stores and returns
/// one row before it reads the next one: so the setting that reading a row writes is the one that `returning` finds.
const CREATE_MANY: &str = r#"
    insert into users (name, email)
    select name, email from unnest($1::text[], $2::text[]) with ordinality as given (name, email, position)
    where set_config('userd.position', position::text, true) <> ''
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version, current_setting('userd.position')::bigint as position"#;

/// Answers no row if nothing is changed.
const UPDATE: &str = "
    update users
    set name = coalesce($4, name), email = coalesce($5, email),
        updated_at = least(greatest(now(), updated_at + interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    where id = $1 and ($2::bigint is null or version = $2 and updated_at = $3)
        and (name::text <> coalesce($4, name) or email::text <> coalesce($5, email))
    returning id, name, email, created_at, updated_at, version";

/// Waits for the row, and judges it as it then is. $2: the hash of a new password. $3: whether the password is removed.
/// $4 and $5: versions and times that are allowed, or nulls. $6 and $7: those that are not. $8 and $9: the new values.
/// A row says whether the state allowed the change, and whether the statement was overtaken; else there is no user.
///
/// Overtaken: a delete finds only rows of its snapshot, so it misses a credential that another transaction has inserted
/// since. That transaction has changed the user, too, whose row is then another one than the snapshot's.
const UPDATE_LOCKED: &str = "
    with target as materialized (
        select *, ctid <> (select ctid from users where id = $1) as moved,
            ($4::bigint[] is null or (version, updated_at) in (select * from unnest($4::bigint[], $5::timestamptz[])))
                and (version, updated_at) not in (select * from unnest($6::bigint[], $7::timestamptz[])) as allowed
        from users where id = $1 for no key update
    ), stored as (
        insert into credentials (user_id, password_hash)
        select id, $2 from target where $2::text is not null and allowed
        on conflict (user_id) do update set password_hash = excluded.password_hash
        returning user_id
    ), removed as (
        delete from credentials where user_id = any (array(select id from target where $3 and allowed))
        returning user_id
    ), change as materialized (
        select target.*, $3 and moved and removed.user_id is null as overtaken,
            stored.user_id is not null or removed.user_id is not null
                or name::text <> coalesce($8, name) or email::text <> coalesce($9, email) as changed
        from target left join stored on stored.user_id = target.id left join removed on removed.user_id = target.id
    ), updated as (
        update users u set name = coalesce($8, c.name), email = coalesce($9, c.email),
            version = c.version + bigint '1',  -- a password moves it, too
            updated_at = least(greatest(now(), c.updated_at + interval '1 microsecond'),
                timestamptz '9999-12-31T23:59:59.999999Z')
        from change c where u.id = $1 and changed and allowed and not overtaken
        returning u.*
    )
    select id, name, email, created_at, updated_at, version, true as allowed, false as overtaken from updated
    union all
    select id, name, email, created_at, updated_at, version, allowed, overtaken from change
    where not exists (select from updated)";

/// Waits for no row, and locks only rows that will be changed, as a lock is written and committed like a change. A new
/// value of an address is not for batches: another transaction may have to be waited for.
const UPDATE_MANY: &str = r#"
    with given as materialized (
        select * from unnest($1::bigint[], $2::bigint[], $3::timestamptz[], $4::text[], $5::text[])
            with ordinality as given (asked, if_version, if_updated, new_name, new_email, position)
    ), target as materialized (
        select u.id, coalesce(new_name, name) as name, coalesce(new_email, email) as email
        from given, lateral (
            select * from users
            where id = asked and (if_version is null or version = if_version and updated_at = if_updated)
                and (name::text <> coalesce(new_name, name) or email::text <> coalesce(new_email, email))
                and lower(email::text collate "C") = lower(coalesce(new_email, email) collate "C")
            limit 1 for no key update skip locked) u
    ), updated as (
        update users u set name = t.name, email = t.email,
            updated_at = least(greatest(now(), u.updated_at + interval '1 microsecond'),
                timestamptz '9999-12-31T23:59:59.999999Z')
        from target t where u.id = any (array(select id from target)) and t.id = u.id
        returning u.*
    )
    select coalesce(u.id, s.id) as id, coalesce(u.name, s.name) as name, coalesce(u.email, s.email) as email,
        coalesce(u.created_at, s.created_at) as created_at, coalesce(u.updated_at, s.updated_at) as updated_at,
        coalesce(u.version, s.version) as version, position,
        case when u.id is not null then 'done' when s.id is null then 'missing'
            when not (if_version is null or s.version = if_version and s.updated_at = if_updated)
                then 'precondition failed'
            when lower(s.email::text collate "C") <> lower(coalesce(new_email, s.email) collate "C") then 'by itself'
            when s.name::text = coalesce(new_name, s.name) and s.email::text = coalesce(new_email, s.email) then 'done'
            when asked = any (array(select id from target)) then 'by itself'  -- a trigger has left it out
            else 'locked' end as outcome
    from given left join updated u on u.id = asked
        left join lateral (select * from users where id = asked limit 1) s on true"#;

/// The user's own row stays as it is: another form of the same password is no change of the record.
const REPLACE_HASH: &str =
    "update credentials set password_hash = $3 where user_id = $1 and password_hash::text = $2";

const DELETE: &str = "
    delete from users where id = $1 and ($2::bigint is null or version = $2 and updated_at = $3) returning id";

/// Deletes a row once it is locked, as [`UPDATE_LOCKED`] updates one. $2 to $5: versions and times that are allowed, and
/// ones that are not.
const DELETE_LOCKED: &str = "
    with target as materialized (
        select id,
            ($2::bigint[] is null or (version, updated_at) in (select * from unnest($2::bigint[], $3::timestamptz[])))
                and (version, updated_at) not in (select * from unnest($4::bigint[], $5::timestamptz[])) as allowed
        from users where id = $1 for update
    ), deleted as (
        delete from users u using target where u.id = $1 and allowed returning u.id
    )
    select allowed, deleted.id is not null as removed from target left join deleted on deleted.id = target.id";

/// Deletes the rows of a batch, as [`UPDATE_MANY`] updates them.
const DELETE_MANY: &str = "
    with given as materialized (
        select * from unnest($1::bigint[], $2::bigint[], $3::timestamptz[])
            with ordinality as given (asked, if_version, if_updated, position)
    ), target as materialized (
        select u.id from given, lateral (
            select id from users
            where id = asked and (if_version is null or version = if_version and updated_at = if_updated)
            limit 1 for update skip locked) u
    ), deleted as (
        delete from users where id = any (array(select id from target)) returning id
    )
    select position,
        case when d.id is not null then 'done' when s.id is null then 'missing'
            when not (if_version is null or s.version = if_version and s.updated_at = if_updated)
                then 'precondition failed'
            when asked = any (array(select id from target)) then 'missing'  -- a trigger has kept it
            else 'locked' end as outcome
    from given left join deleted d on d.id = asked
        left join lateral (select * from users where id = asked limit 1) s on true";

/// The users of one database; clones share it.
#[derive(Clone)]
pub struct Users {
    pub(super) pool: Arc<Pool>,
    /// Batches of creates since the start, beside which expired keys are removed now and then.
    pub(super) batches: Arc<AtomicU32>,
    lazy: Option<Loader<Credential>>,
}

/// Effect of an update on the password.
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
    /// The end of the request.
    pub deadline: Instant,
}

/// A change of a user, without its password.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The user.
    pub id: i64,
    /// The new values.
    pub values: Values<'a>,
    /// The states in which it may be changed; in a batch, [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// The end of the request.
    pub deadline: Instant,
}

/// The outcome of one of several updates.
#[derive(Debug)]
pub enum Updated {
    /// The user as it then is.
    User(User),
    /// Not changed yet: a change of the address is executed alone, as it may wait for another transaction.
    Unbatched,
}

/// A user to be removed.
#[derive(Debug, Clone, Copy)]
pub struct Delete<'a> {
    /// The user.
    pub id: i64,
    /// The states in which it may be removed; in a batch, [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// The end of the request.
    pub deadline: Instant,
}

impl Users {
    /// The users behind a pool. `lazy_loading`: whether a relation that was not loaded is loaded on access.
    pub fn new(pool: Pool, lazy_loading: bool) -> Users {
        let pool = Arc::new(pool);
        // A user may outlive its service and be dropped anywhere, so it keeps no pool.
        let weak = Arc::downgrade(&pool);
        let loader: Loader<Credential> = Arc::new(move |owner| {
            outside_of_runtimes(|| {
                let pool =
                    weak.upgrade().ok_or_else(|| Error::Unavailable("the service has stopped".into()))?;
                let rows = pool.read(FIND_CREDENTIAL, &[(&owner, Type::INT8)])?;
                let hash: Option<String> =
                    rows.first().map(|row| column(row, "password_hash")).transpose()?;
                Ok(hash.map(credential))
            })
        });
        Users { pool, batches: Arc::default(), lazy: lazy_loading.then_some(loader) }
    }

    /// The pool that the statements are executed on.
    pub(crate) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Finds users by id; a user that does not exist is left out. One round trip.
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<User>, Error> {
        let rows = match ids {
            [] => return Ok(Vec::new()),
            [id] => self.pool.read(FIND, &[(id, Type::INT8)])?,
            several => self.pool.read(FIND_MANY, &[(&several, Type::INT8_ARRAY)])?,
        };
        let mut users = rows.iter().map(|row| self.user(row)).collect::<Result<Vec<_>, _>>()?;
        users.sort_unstable_by_key(|user| user.id);
        Ok(users)
    }

    /// Finds users by address, in whatever case, each in the place of its address. One round trip.
    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        if emails.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.read(FIND_BY_EMAIL, &[(&emails, Type::TEXT_ARRAY)])?;
        at_positions(&rows, emails.len(), |row| self.user(row))
    }

    /// Finds users and their credentials, as [`Users::find_by_email`] does.
    pub fn find_by_email_with_credential(&self, emails: &[&str]) -> Result<Vec<Option<User>>, Error> {
        if emails.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.read(FIND_WITH_CREDENTIAL, &[(&emails, Type::TEXT_ARRAY)])?;
        at_positions(&rows, emails.len(), |row| {
            let hash: Option<String> = column(row, "password_hash")?;
            Ok(User { credential: Relation::loaded("credential", hash.map(credential)), ..self.user(row)? })
        })
    }

    /// Reads several pages, with their exact totals, from one snapshot. One round trip.
    pub fn pages(&self, asked: &[PageRequest]) -> Result<Vec<Listed>, Error> {
        let place = |page: &PageRequest| {
            let most = i64::from(page.per_page);
            (page.offset(), if page.is_from_end { -most } else { most })
        };
        self.lists(PAGES, asked.iter().map(place).unzip())
    }

    /// Reads several lists of so many users each that follow an id, from one snapshot. One round trip.
    pub fn walks(&self, asked: &[(i64, u32)]) -> Result<Vec<Listed>, Error> {
        self.lists(WALKS, asked.iter().map(|(after, most)| (*after, i64::from(*most) + 1)).unzip())
    }

    fn lists(
        &self,
        sql: &'static str,
        (positions, limits): (Vec<i64>, Vec<i64>),
    ) -> Result<Vec<Listed>, Error> {
        let mut lists: Vec<Listed> = positions.iter().map(|_| Listed::default()).collect();
        if lists.is_empty() {
            return Ok(lists);
        }
        let params: [Param; 2] = [(&positions, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY)];
        for row in self.pool.read(sql, &params)? {
            let position: i64 = column(&row, "position")?;
            let list = lists.get_mut(position as usize - 1);
            let list = list.ok_or_else(|| Error::Internal("a row of no list".into()))?;
            list.total = column(&row, "total")?;
            // The one row of an empty page holds the total alone.
            if column::<Option<i64>>(&row, "id")?.is_some() {
                list.users.push(self.user(&row)?);
            }
        }
        Ok(lists)
    }

    /// Reads so many users whose addresses begin so, whatever the case of ASCII letters, in the order of addresses, and
    /// one more. One round trip.
    pub fn list_by_prefix(&self, prefix: &str, most: u32) -> Result<Listed, Error> {
        let (prefixes, most) = (vec![prefix], vec![i64::from(most) + 1]);
        let params: [Param; 2] = [(&prefixes, Type::TEXT_ARRAY), (&most, Type::INT8_ARRAY)];
        let rows = self.pool.read(BY_PREFIX, &params)?;
        let mut users = rows.iter().map(|row| self.user(row)).collect::<Result<Vec<_>, _>>()?;
        let prefix = prefix.to_ascii_lowercase();
        users.retain(|user| user.email.to_ascii_lowercase().starts_with(&prefix));
        Ok(Listed { total: 0, users })
    }

    /// Stores a user, and its password's hash with it. One round trip; [`Error::AlreadyExists`] if the address is
    /// taken.
    pub fn create(&self, new: &New, password: Option<&PasswordHash>) -> Result<User, Error> {
        let New { values, deadline } = new;
        if password.is_some() {
            return self.create_with_password(new, password);
        }
        let params: [Param; 2] = [(&values.name, Type::TEXT), (&values.email, Type::TEXT)];
        let rows = self.pool.change(CREATE, &params, *deadline)?;
        self.user(rows.first().ok_or(Error::AlreadyExists)?)
    }

    /// Stores users in one statement and one commit, each with the outcome that it would have had alone. One round
    /// trip; if the database refuses the batch for what only some of them may have, one more for each. Users that meet a
    /// lock end with [`Error::Contended`].
    pub fn create_many(&self, new: &[New]) -> Vec<Result<User, Error>> {
        self.remove_keys_now_and_then(new.len());
        self.batch(
            new,
            |new| (address(&new.values), new.deadline),
            |given, deadline| {
                let names: Vec<Option<&str>> = given.iter().map(|new| new.values.name).collect();
                let emails: Vec<Option<&str>> = given.iter().map(|new| new.values.email).collect();
                let params: [Param; 2] = [(&names, Type::TEXT_ARRAY), (&emails, Type::TEXT_ARRAY)];
                self.pool.change(CREATE_MANY, &params, deadline)
            },
            |_, row| self.user(row.ok_or(Error::AlreadyExists)?),
            |new| self.create(new, None),
        )
    }

    /// Changes the given values and returns the user as it then is; if nothing changes, nothing is written. One round
    /// trip, and one more if nothing was changed by the first. [`Error::NotFound`], [`Error::AlreadyExists`],
    /// [`Error::PreconditionFailed`] if the condition does not hold; [`Error::Contended`] as well if a password is
    /// removed that another transaction may just have set.
    pub fn update(&self, update: &Update, password: &PasswordChange) -> Result<User, Error> {
        let Update { id, values, condition, deadline } = update;
        let (hash, remove) = match password {
            PasswordChange::Keep if condition.is_simple() => {
                let (version, updated_at) = tag(condition);
                let params: [Param; 5] = [
                    (id, Type::INT8),
                    (&version, Type::INT8),
                    (&updated_at, Type::TIMESTAMPTZ),
                    (&values.name, Type::TEXT),
                    (&values.email, Type::TEXT),
                ];
                if let [row] = &self.pool.change(UPDATE, &params, *deadline)?[..] {
                    return self.user(row);
                }
                // The committed record may answer at once, also if another transaction has locked it.
                let user = self.find_many(&[*id])?.pop().ok_or(Error::NotFound)?;
                if !condition.holds(user.revision()) {
                    return Err(Error::PreconditionFailed);
                }
                if values.name.is_none_or(|name| name == user.name)
                    && values.email.is_none_or(|email| email == user.email)
                {
                    return Ok(user);
                }
                (None, false)
            }
            PasswordChange::Keep => (None, false),
            PasswordChange::Remove => (None, true),
            PasswordChange::Set(hash) => (Some(hash.as_phc()), false),
        };
        let (only, except) = (condition.only.as_deref().map(tags), tags(&condition.except));
        let (versions, times) = only.unzip();
        let params: [Param; 9] = [
            (id, Type::INT8),
            (&hash, Type::TEXT),
            (&remove, Type::BOOL),
            (&versions, Type::INT8_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
            (&except.0, Type::INT8_ARRAY),
            (&except.1, Type::TIMESTAMPTZ_ARRAY),
            (&values.name, Type::TEXT),
            (&values.email, Type::TEXT),
        ];
        let rows = self.pool.change(UPDATE_LOCKED, &params, *deadline)?;
        let row = rows.first().ok_or(Error::NotFound)?;
        match (column(row, "allowed")?, column(row, "overtaken")?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, true) => Err(Error::Contended),
            (true, false) => self.user(row),
        }
    }

    /// Changes users, no two of which are the same, in one statement and one commit, each with the outcome that it
    /// would have had alone; [`Error::Contended`] if another transaction has locked the user. Round trips as for
    /// [creates](Users::create_many).
    pub fn update_many(&self, updates: &[Update]) -> Vec<Result<Updated, Error>> {
        self.batch(
            updates,
            |update| (update.id, update.deadline),
            |given, deadline| {
                let ids: Vec<i64> = given.iter().map(|update| update.id).collect();
                let (versions, times): (Vec<_>, Vec<_>) =
                    given.iter().map(|update| tag(update.condition)).unzip();
                let names: Vec<Option<&str>> = given.iter().map(|update| update.values.name).collect();
                let emails: Vec<Option<&str>> = given.iter().map(|update| update.values.email).collect();
                let params: [Param; 5] = [
                    (&ids, Type::INT8_ARRAY),
                    (&versions, Type::INT8_ARRAY),
                    (&times, Type::TIMESTAMPTZ_ARRAY),
                    (&names, Type::TEXT_ARRAY),
                    (&emails, Type::TEXT_ARRAY),
                ];
                self.pool.change(UPDATE_MANY, &params, deadline)
            },
            |_, row| match outcome(row)? {
                Some(row) => self.user(row).map(Updated::User),
                None => Ok(Updated::Unbatched),
            },
            |update| self.update(update, &PasswordChange::Keep).map(Updated::User),
        )
    }

    /// Replaces the hash of a password by another one of the same password, if it is still stored. One round trip.
    pub fn replace_hash(
        &self,
        id: i64,
        old: &PasswordHash,
        new: &PasswordHash,
        deadline: Instant,
    ) -> Result<(), Error> {
        let params: [Param; 3] =
            [(&id, Type::INT8), (&old.as_phc(), Type::TEXT), (&new.as_phc(), Type::TEXT)];
        self.pool.change(REPLACE_HASH, &params, deadline).map(drop)
    }

    /// Removes a user and its credential. One round trip, two if there is a condition that does not hold;
    /// [`Error::NotFound`], and [`Error::PreconditionFailed`].
    pub fn delete(&self, delete: &Delete) -> Result<(), Error> {
        let Delete { id, condition, deadline } = *delete;
        if condition.is_simple() {
            let (version, updated_at) = tag(condition);
            let params: [Param; 3] =
                [(&id, Type::INT8), (&version, Type::INT8), (&updated_at, Type::TIMESTAMPTZ)];
            match self.pool.change(DELETE, &params, deadline)?.is_empty() {
                false => return Ok(()),
                true if condition.is_empty() => return Err(Error::NotFound),
                true => {}
            }
        }
        let (only, except) = (condition.only.as_deref().map(tags), tags(&condition.except));
        let (versions, times) = only.unzip();
        let params: [Param; 5] = [
            (&id, Type::INT8),
            (&versions, Type::INT8_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
            (&except.0, Type::INT8_ARRAY),
            (&except.1, Type::TIMESTAMPTZ_ARRAY),
        ];
        let rows = self.pool.change(DELETE_LOCKED, &params, deadline)?;
        let row = rows.first().ok_or(Error::NotFound)?;
        match (column(row, "allowed")?, column(row, "removed")?) {
            (false, _) => Err(Error::PreconditionFailed),
            (true, false) => Err(Error::NotFound),
            (true, true) => Ok(()),
        }
    }

    /// Removes users, no two of which are the same, and their credentials, as [`Users::update_many`] changes them.
    pub fn delete_many(&self, deletes: &[Delete]) -> Vec<Result<(), Error>> {
        self.batch(
            deletes,
            |delete| (delete.id, delete.deadline),
            |given, deadline| {
                let ids: Vec<i64> = given.iter().map(|delete| delete.id).collect();
                let (versions, times): (Vec<_>, Vec<_>) =
                    given.iter().map(|delete| tag(delete.condition)).unzip();
                let params: [Param; 3] = [
                    (&ids, Type::INT8_ARRAY),
                    (&versions, Type::INT8_ARRAY),
                    (&times, Type::TIMESTAMPTZ_ARRAY),
                ];
                self.pool.change(DELETE_MANY, &params, deadline)
            },
            |_, row| outcome(row).map(drop),
            |delete| self.delete(delete),
        )
    }

    /// Executes requests in one statement and one commit, each with the outcome that it would have had alone.
    ///
    /// `key`: the order of the requests in the statement, so that two statements wait for each other in one direction
    /// only, and the deadline. `statement` answers rows with the positions of their requests, from 1; `outcome` judges
    /// the row of a request. `alone` executes a single request, and each of them after a failure that may concern only
    /// some.
    pub(super) fn batch<T, K: Ord, O>(
        &self,
        requests: &[T],
        key: impl Fn(&T) -> (K, Instant),
        statement: impl Fn(&[&T], Instant) -> Result<Vec<Row>, Error>,
        outcome: impl Fn(&T, Option<&Row>) -> Result<O, Error>,
        alone: impl Fn(&T) -> Result<O, Error>,
    ) -> Vec<Result<O, Error>> {
        /// A request whose time is nearly up is not sent, and does not have the batch wait for a session in vain.
        const MARGIN: Duration = Duration::from_millis(100);
        if let [one] = requests {
            return vec![alone(one)];
        }
        let late = || Err(Error::Unavailable("a change could not be sent in time".into()));
        let mut outcomes: Vec<_> = requests.iter().map(|_| late()).collect();
        let latest = Instant::now() + self.pool.statement_timeout() + MARGIN;
        let keyed = requests.iter().map(key).enumerate();
        let mut order: Vec<_> = keyed.filter(|(_, (_, deadline))| *deadline >= latest).collect();
        // The first one of equal addresses wins.
        order.sort_by(|(at, (key, _)), (other_at, (other, _))| (key, at).cmp(&(other, other_at)));
        let Some(deadline) = order.iter().map(|(_, (_, deadline))| *deadline).min() else {
            return outcomes;
        };
        let order: Vec<usize> = order.into_iter().map(|(at, _)| at).collect();
        let given: Vec<&T> = order.iter().map(|at| &requests[*at]).collect();
        let executed = statement(&given, deadline).and_then(|rows| {
            let rows = at_positions(&rows, given.len(), Ok)?;
            Ok(given.iter().zip(rows).map(|(request, row)| outcome(request, row)).collect())
        });
        let executed = executed.unwrap_or_else(|error| after_failure(&error, &given, alone));
        for (at, outcome) in order.into_iter().zip(executed) {
            outcomes[at] = outcome;
        }
        outcomes
    }

    /// The user of a row.
    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        let UserRef { id, name, email, created_at, updated_at } =
            record(row).map_err(|error| sqlstate::condition("", &error))?;
        let version = column(row, "version")?;
        let lazy = self.lazy.clone().map(|loader| (loader, id));
        let credential = Relation::unloaded("credential", lazy);
        let (name, email) = (name.to_owned(), email.to_owned());
        Ok(User { id, name, email, created_at, updated_at, version, credential })
    }
}

/// The outcomes of requests after a batch of them has failed: of each alone, if that may be another one.
fn after_failure<T, O>(
    error: &Error,
    requests: &[&T],
    alone: impl Fn(&T) -> Result<O, Error>,
) -> Vec<Result<O, Error>> {
    /// The batch and two of its users. An address that another transaction has stored and not committed yet blocks
    /// its own user alone; a lock of the table blocks all of them, each for the whole of `lock_timeout`.
    const REFUSALS: usize = 3;
    let contended = matches!(error, Error::Contended);
    if !(contended || sqlstate::is_of_rows(error)) {
        return requests.iter().map(|_| Err(error.clone())).collect();
    }
    let mut refusals = usize::from(contended);
    let one = |request: &&T| {
        if refusals == REFUSALS {
            return Err(Error::Contended);
        }
        let outcome = alone(request);
        refusals += usize::from(matches!(outcome, Err(Error::Contended)));
        outcome
    };
    requests.iter().map(one).collect()
}

/// The row of a change that was made; `None` if it is to be made alone.
fn outcome(row: Option<&Row>) -> Result<Option<&Row>, Error> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    match column(row, "outcome")? {
        "done" => Ok(Some(row)),
        "by itself" => Ok(None),
        "precondition failed" => Err(Error::PreconditionFailed),
        "locked" => Err(Error::Contended),
        _ => Err(Error::NotFound),
    }
}

/// The key by which creates are ordered.
pub(super) fn address(values: &Values) -> Option<String> {
    values.email.map(str::to_ascii_lowercase)
}

/// The version and time that a simple condition allows; nulls allow each, and a version that no row has allows none.
fn tag(condition: &Condition) -> (Option<i64>, Option<Timestamp>) {
    match condition.only.as_deref() {
        None => (None, None),
        Some([]) => (Some(i64::MIN), None),
        Some([revision, ..]) => (Some(revision.version), Some(revision.updated_at)),
    }
}

fn tags(revisions: &[Revision]) -> (Vec<i64>, Vec<Timestamp>) {
    revisions.iter().map(|revision| (revision.version, revision.updated_at)).unzip()
}

/// Reads the columns of a record.
pub(super) fn record(row: &Row) -> Result<UserRef<'_>, postgres::Error> {
    Ok(UserRef {
        id: row.try_get("id")?,
        name: row.try_get("name")?,
        email: row.try_get("email")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn credential(hash: String) -> Credential {
    Credential { password_hash: PasswordHash::from_phc(hash) }
}

/// A column of a row.
pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, name: &str) -> Result<T, Error> {
    row.try_get(name).map_err(|error| sqlstate::condition("", &error))
}

/// Values that are made of rows, each at the place that its column `position` has, from 1.
pub(super) fn at_positions<'a, T>(
    rows: &'a [Row],
    count: usize,
    value: impl Fn(&'a Row) -> Result<T, Error>,
) -> Result<Vec<Option<T>>, Error> {
    let mut values: Vec<Option<T>> = (0..count).map(|_| None).collect();
    for row in rows {
        let position: i64 = column(row, "position")?;
        let at = usize::try_from(position - 1).ok().and_then(|at| values.get_mut(at));
        *at.ok_or_else(|| Error::Internal("a row of no position".into()))? = Some(value(row)?);
    }
    Ok(values)
}

/// 2000-01-01T00:00:00Z, from which PostgreSQL counts microseconds, in microseconds since 1970.
const EPOCH: i64 = 946_684_800_000_000;

/// A moment in PostgreSQL's binary format.
pub(super) fn moment(time: Timestamp) -> [u8; 8] {
    (time.unix_micros() - EPOCH).to_be_bytes()
}

type BoxedError = Box<dyn std::error::Error + Sync + Send>;

impl FromSql<'_> for Timestamp {
    fn from_sql(_: &Type, raw: &[u8]) -> Result<Timestamp, BoxedError> {
        let micros = i64::from_be_bytes(raw.try_into()?);
        let since_1970 = micros.checked_add(EPOCH);
        since_1970
            .and_then(Timestamp::from_unix_micros)
            .ok_or_else(|| "a timestamp outside the years 1 to 9999".into())
    }

    accepts!(TIMESTAMPTZ);
}

impl ToSql for Timestamp {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, BoxedError> {
        out.extend_from_slice(&moment(*self));
        Ok(IsNull::No)
    }

    accepts!(TIMESTAMPTZ);
    to_sql_checked!();
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, Config, ScratchDatabase,
        config::PasswordHashing,
        db::PasswordChange,
        users::{password::Hasher, revision::Condition, user::Values},
    };
    use std::{
        thread,
        time::{Duration, Instant},
    };

    const PASSWORD: &str = "correct horse";

    /// Longer than anything takes on a busy machine.
    const LONG: Duration = Duration::from_secs(20);

    /// A service with Ada, who has a password, and Bob, who has none.
    fn ada_and_bob(production: bool) -> (ScratchDatabase, App) {
        let database = ScratchDatabase::create().unwrap();
        let app = App::open(&Config { production, db_pool_size: 2, ..database.config() }).unwrap();
        let hash = Hasher::new(PasswordHashing::Owasp).hash(&PASSWORD.into()).unwrap();
        let deadline = Instant::now() + LONG;
        let new = |name, email| New { values: Values::new(name, email), deadline };
        app.users().create(&new("Ada", "ada@example.com"), Some(&hash)).unwrap();
        app.users().create(&new("Bob", "bob@example.com"), None).unwrap();
        (database, app)
    }

    fn sql(database: &ScratchDatabase) -> postgres::Client {
        postgres::Client::connect(database.url(), postgres::NoTls).unwrap()
    }

    #[test]
    fn outside_production_a_lazy_load_is_a_violation() {
        let (_database, app) = ada_and_bob(false);
        let users = app.users();
        let mut unloaded =
            vec![users.find_many(&[1]).unwrap().remove(0), users.find_many(&[2]).unwrap().remove(0)];
        unloaded.extend(users.find_by_email(&["ada@example.com"]).unwrap().pop().unwrap());
        let deadline = Instant::now() + LONG;
        let values = Values { name: Some("Robert"), ..Values::default() };
        let eve = New { values: Values::new("Eve", "eve@example.com"), deadline };
        unloaded.push(users.create(&eve, None).unwrap());
        let renamed = Update { id: 2, values, condition: &Condition::default(), deadline };
        unloaded.push(users.update(&renamed, &PasswordChange::Keep).unwrap());
        assert_eq!(unloaded.len(), 5);
        for user in unloaded {
            assert!(!user.credential.is_loaded());
            for _ in 0..2 {
                let violation = user.credential.get().unwrap_err();
                assert!(matches!(violation, Error::LazyLoadingViolation("credential")), "{violation:?}");
            }
        }
    }

    #[test]
    fn in_production_a_lazy_load_is_a_query() {
        let (database, app) = ada_and_bob(true);
        let users = app.users();
        let (ada, bob) = (users.find_many(&[1]).unwrap().remove(0), users.find_many(&[2]).unwrap().remove(0));
        assert!(!ada.credential.is_loaded() && !bob.credential.is_loaded());
        let credential = ada.credential.get().unwrap().expect("Ada has a password");
        assert!(
            Hasher::new(PasswordHashing::Owasp).verify(&PASSWORD.into(), Some(&credential.password_hash))
        );
        assert!(
            !Hasher::new(PasswordHashing::Owasp)
                .verify(&"battery staple".into(), Some(&credential.password_hash))
        );
        assert!(bob.credential.get().unwrap().is_none());
        // Once loaded, it is kept; what is not loaded yet asks the database, and has its errors.
        let another = users.find_many(&[1]).unwrap().remove(0);
        sql(&database).batch_execute("drop table credentials").unwrap();
        assert!(ada.credential.get().unwrap().is_some() && bob.credential.get().unwrap().is_none());
        assert!(matches!(another.credential.get(), Err(Error::Database { .. })));
    }

    #[test]
    fn an_eager_load_is_never_a_violation() {
        for production in [true, false] {
            let (_database, app) = ada_and_bob(production);
            for (email, has_password) in [("ADA@example.com", true), ("bob@example.com", false)] {
                let found = app.users().find_by_email_with_credential(&[email]).unwrap().pop();
                let user = found.unwrap().unwrap();
                assert!(user.credential.is_loaded());
                assert_eq!(user.credential.get().unwrap().is_some(), has_password, "{email}");
            }
        }
    }

    #[test]
    fn a_user_may_outlive_its_service_and_be_dropped_in_an_async_task() {
        let (database, app) = ada_and_bob(true);
        let (ada, bob) =
            (app.users().find_many(&[1]).unwrap().remove(0), app.users().find_many(&[2]).unwrap().remove(0));
        let mut sql = sql(&database);
        let mut sessions = || -> i64 {
            let count = "select count(*) from pg_stat_activity \
                where datname = current_database() and application_name = 'userd'";
            sql.query_one(count, &[]).unwrap().get(0)
        };
        assert!(sessions() > 0);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { assert!(ada.credential.get().unwrap().is_some()) });
        drop(app);
        let deadline = Instant::now() + LONG;
        while sessions() > 0 {
            assert!(Instant::now() < deadline, "a user keeps {} sessions", sessions());
            thread::sleep(Duration::from_millis(5));
        }
        runtime.block_on(async {
            assert!(matches!(bob.credential.get(), Err(Error::Unavailable(_))));
            drop((ada, bob));
        });
    }
}
