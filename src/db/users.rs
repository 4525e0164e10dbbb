//! The users of a database: each statement that reads or changes them, beside the function that executes it.
//!
//! The statements can be pasted into psql. Operands have the exact types of PostgreSQL's own operators, and sessions
//! look names up in one schema alone, so that no operator of another role fits better. `limit 1` within a lateral and
//! `= any (array(…))` make look-ups in an index of plans that were made while a table was empty.

use super::{
    Pool,
    blocking::outside_of_runtimes,
    keys::{CREATE_WITH_KEYS, Once},
    session::Param,
    sqlstate::{is_of_rows, none_if_untranslatable},
};
use crate::{
    error::Error,
    users::{
        idempotency::{Fingerprint, Key},
        pagination::{Listed, PageRequest},
        password::PasswordHash,
        relation::{Loader, Relation},
        revision::Condition,
        user::{Credential, User},
    },
};
use postgres::{
    Row,
    types::{FromSql, Type},
};
use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};
use time::OffsetDateTime;

const FIND: &str =
    "select id, name, email, created_at, updated_at, version from users where id = any ($1::bigint[])";

/// Each row has the position of its address, from 1, as two requests may ask for one address.
const FIND_BY_EMAIL: &str = r#"
    select found.*, position, bigint '1' as total
    from unnest($1::text[]) with ordinality as asked (address, position), lateral (
        select id, name, email, created_at, updated_at, version from users
        where lower(email::text collate "C") = lower(address collate "C") limit 1
    ) found"#;

const FIND_WITH_CREDENTIAL: &str = r#"
    select id, name, email, created_at, updated_at, version,
        (select password_hash from credentials where user_id = id) as password_hash
    from users where lower(email::text collate "C") = lower($1 collate "C")"#;

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
    select id, name, email, created_at, updated_at, version, bigint '1' as position, bigint '0' as total from users
    where lower(email::text collate "C") >= lower($1 collate "C")
    order by lower(email::text collate "C") limit $2"#;

const CREATE: &str = r#"
    insert into users (name, email) values ($1, $2)
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version, null::bytea as fingerprint, bigint '1' as position"#;

/// Inserts in the order of addresses, so that two statements wait for each other in one direction only; of equal
/// addresses the first one is stored. `returning` sees nothing of `given`, and a trigger may change each value. But an
/// insert reads, stores and returns one row before it reads the next one: so the setting that reading a row writes is
/// the one that `returning` finds.
const CREATE_MANY: &str = r#"
    with given as materialized (
        select name, email, position
        from unnest($1::text[], $2::text[]) with ordinality as asked (name, email, position)
        order by lower(email collate "C"), position
    )
    insert into users (name, email)
    select name, email from given where set_config('userd.position', position::text, true) <> ''
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version, null::bytea as fingerprint,
        current_setting('userd.position')::bigint as position"#;

/// Answers no row if nothing is changed.
const UPDATE: &str = "
    update users
    set name = coalesce($4, name), email = coalesce($5, email),
        updated_at = least(greatest(now(), updated_at + interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    where id = $1 and ($2::bigint is null or version = $2 and updated_at = $3)
        and (name::text <> coalesce($4, name) or email::text <> coalesce($5, email))
    returning id, name, email, created_at, updated_at, version";

/// $6: the hash of the new password, or null, which removes the password. A delete finds only rows of its snapshot: so
/// a password is removed in a state that was read before, as a transaction that inserts one changes the user, too. The
/// user is locked even if nothing is changed then, so that such a transaction is waited for.
const UPDATE_PASSWORD: &str = "
    with target as materialized (
        select id from users where id = $1 and ($2::bigint is null or version = $2 and updated_at = $3)
        for no key update
    ), updated as (
        update users
        set name = coalesce($4, name), email = coalesce($5, email),
            version = version + bigint '1',  -- has the trigger draw another one, also at the last moment that there is
            updated_at = least(greatest(now(), updated_at + interval '1 microsecond'),
                timestamptz '9999-12-31T23:59:59.999999Z')
        where id = any (array(select id from target))
            and ($6::text is not null or exists (select from credentials where user_id = $1)
                or name::text <> coalesce($4, name) or email::text <> coalesce($5, email))
        returning *
    ), stored as (
        insert into credentials (user_id, password_hash) select id, $6 from updated where $6::text is not null
        on conflict (user_id) do update set password_hash = excluded.password_hash
    ), removed as (
        delete from credentials where $6::text is null and user_id = any (array(select id from updated))
    )
    select * from updated";

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

/// Stores another hash of one password. The row of the user stays as it is, as its record does not change.
const REPLACE_HASH: &str =
    "update credentials set password_hash = $3 where user_id = $1 and password_hash::text = $2";

const DELETE: &str = "
    delete from users where id = $1 and ($2::bigint is null or version = $2 and updated_at = $3) returning id";

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
    /// The pool that the statements are executed on.
    pub(crate) pool: Arc<Pool>,
    lazy: Option<Loader<Credential>>,
}

/// A user to be created.
#[derive(Debug, Clone, Copy)]
pub struct New<'a> {
    /// The name.
    pub name: &'a str,
    /// The address.
    pub email: &'a str,
    /// The hash of the password.
    pub password: Option<&'a PasswordHash>,
    /// The digests of the idempotency key and of the body.
    pub key: Option<(&'a Key, &'a Fingerprint)>,
    /// The end of the request.
    pub deadline: Instant,
}

/// A change of a user.
#[derive(Debug, Clone, Copy)]
pub struct Update<'a> {
    /// The user.
    pub id: i64,
    /// A new name.
    pub name: Option<&'a str>,
    /// A new address.
    pub email: Option<&'a str>,
    /// The hash of the new password; `Some(None)` removes it. In a batch `None`.
    pub password: Option<Option<&'a PasswordHash>>,
    /// The states in which it may be changed; in a batch, [simple](Condition::is_simple).
    pub condition: &'a Condition,
    /// The end of the request.
    pub deadline: Instant,
}

/// A user to be removed.
#[derive(Debug, Clone, Copy)]
pub struct Delete<'a> {
    /// The user.
    pub id: i64,
    /// The states in which the user may be removed; in a batch, [simple](Condition::is_simple).
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
                let rows = pool.execute(FIND_CREDENTIAL, &[(&owner, Type::INT8)], None)?;
                rows.first().map_or(Ok(None), credential)
            })
        });
        Users { pool, lazy: lazy_loading.then_some(loader) }
    }

    /// Finds users by id, in any order; a user that does not exist is left out. One round trip.
    pub fn find_many(&self, ids: &[i64]) -> Result<Vec<User>, Error> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let rows = self.pool.execute(FIND, &[(&ids, Type::INT8_ARRAY)], None)?;
        rows.iter().map(|row| self.user(row)).collect()
    }

    /// Finds the user of each address, in whatever case. One round trip.
    pub fn find_by_email(&self, emails: &[&str]) -> Result<Vec<Listed>, Error> {
        let found = self.lists(FIND_BY_EMAIL, &[(&emails, Type::TEXT_ARRAY)], emails.len());
        let [email] = emails else { return found };
        let found = none_if_untranslatable(email, found.map(|mut lists| lists.remove(0)));
        found.map(|listed| vec![listed])
    }

    /// Finds a user and its credential by address, in whatever case. One round trip.
    pub fn find_by_email_with_credential(&self, email: &str) -> Result<Option<User>, Error> {
        let rows = self.pool.execute(FIND_WITH_CREDENTIAL, &[(&email, Type::TEXT)], None);
        let rows = none_if_untranslatable(email, rows)?;
        let user = |row| {
            Ok(User { credential: Relation::loaded("credential", credential(row)?), ..self.user(row)? })
        };
        rows.first().map(user).transpose()
    }

    /// Reads several pages, with their exact totals, from one snapshot. One round trip.
    pub fn pages(&self, asked: &[PageRequest]) -> Result<Vec<Listed>, Error> {
        let place = |page: &PageRequest| {
            let most = i64::from(page.per_page);
            (page.offset(), if page.is_from_end { -most } else { most })
        };
        let (firsts, limits): (Vec<_>, Vec<_>) = asked.iter().map(place).unzip();
        self.lists(PAGES, &[(&firsts, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY)], asked.len())
    }

    /// Reads several lists of so many users each that follow an id, from one snapshot. One round trip.
    pub fn walks(&self, asked: &[(i64, u32)]) -> Result<Vec<Listed>, Error> {
        let (ids, limits): (Vec<_>, Vec<_>) =
            asked.iter().map(|(after, most)| (*after, i64::from(*most) + 1)).unzip();
        self.lists(WALKS, &[(&ids, Type::INT8_ARRAY), (&limits, Type::INT8_ARRAY)], asked.len())
    }

    /// Reads so many users whose addresses begin so, whatever the case of ASCII letters, in the order of addresses, and
    /// one more. One round trip.
    pub fn list_by_prefix(&self, prefix: &str, most: u32) -> Result<Listed, Error> {
        let most = i64::from(most) + 1;
        let lists = self.lists(BY_PREFIX, &[(&prefix, Type::TEXT), (&most, Type::INT8)], 1);
        let mut listed = none_if_untranslatable(prefix, lists.map(|mut lists| lists.remove(0)))?;
        let prefix = prefix.to_ascii_lowercase();
        listed.users.retain(|user| user.email.to_ascii_lowercase().starts_with(&prefix));
        Ok(listed)
    }

    /// Executes a statement that answers so many lists, if it is asked for any.
    fn lists(&self, sql: &'static str, asked: &[Param], count: usize) -> Result<Vec<Listed>, Error> {
        let mut lists: Vec<Listed> = (0..count).map(|_| Listed::default()).collect();
        let rows = if count == 0 { Vec::new() } else { self.pool.execute(sql, asked, None)? };
        for row in rows {
            // The statement has counted the positions.
            let list = &mut lists[row.try_get::<_, i64>("position")? as usize - 1];
            list.total = row.try_get("total")?;
            // The one row of an empty page holds the total alone.
            if row.try_get::<_, Option<i64>>("id")?.is_some() {
                list.users.push(self.user(&row)?);
            }
        }
        Ok(lists)
    }

    /// Stores users, no two of which have one key, in one statement and one commit, each with the outcome that it would
    /// have had alone: [`Error::AlreadyExists`] if the address is taken. One round trip; if the database refuses the
    /// batch for what only some of them may have, one more for each, and one more for each key whose address is taken.
    /// Users that meet a lock end with [`Error::Contended`].
    pub fn create_many(&self, new: &[New]) -> Vec<Result<Once, Error>> {
        let insert = |given: &[&New], deadline| {
            if let [New { name, email, password: None, key: None, .. }] = given {
                let params: [Param; 2] = [(name, Type::TEXT), (email, Type::TEXT)];
                return self.pool.execute(CREATE, &params, Some(deadline));
            }
            let names: Vec<_> = given.iter().map(|new| new.name).collect();
            let emails: Vec<_> = given.iter().map(|new| new.email).collect();
            let hashes: Vec<_> = given.iter().map(|new| new.password.map(PasswordHash::as_phc)).collect();
            let keys: Vec<_> = given.iter().map(|new| new.key.map(|(key, _)| key.0.as_slice())).collect();
            let fingerprints: Vec<_> =
                given.iter().map(|new| new.key.map(|(_, body)| body.0.as_slice())).collect();
            let params: [Param; 5] = [
                (&names, Type::TEXT_ARRAY),
                (&emails, Type::TEXT_ARRAY),
                (&hashes, Type::TEXT_ARRAY),
                (&keys, Type::BYTEA_ARRAY),
                (&fingerprints, Type::BYTEA_ARRAY),
            ];
            match given.iter().all(|new| new.password.is_none() && new.key.is_none()) {
                true => self.pool.execute(CREATE_MANY, &params[..2], Some(deadline)),
                false => self.pool.execute(CREATE_WITH_KEYS, &params, Some(deadline)),
            }
        };
        let outcome = |new: &New, row: Option<&Row>| match row {
            Some(row) => self.once(row),
            None => self.kept_or_taken(new),
        };
        let alone = |new: &New| match insert(&[new], new.deadline) {
            Err(Error::AlreadyExists) => self.kept_or_taken(new),
            rows => outcome(new, rows?.first()),
        };
        self.batch(new, |new| new.deadline, insert, outcome, alone)
    }

    /// Changes the given values and returns the user as it then is; if nothing changes, nothing is written. One round
    /// trip; one more before it if the password is removed or the condition is not simple, and one after it if nothing
    /// was changed. [`Error::NotFound`], [`Error::AlreadyExists`], [`Error::PreconditionFailed`] if the condition does
    /// not hold; [`Error::Contended`] if the user was changed meanwhile.
    fn update(&self, update: &Update) -> Result<User, Error> {
        let Update { id, name, email, password, condition, deadline } = update;
        let is_read_first = *password == Some(None) || !condition.is_simple();
        let mut before = if is_read_first { Some(self.allowed(*id, condition)?) } else { None };
        loop {
            let (version, updated_at) = tag(condition, before.as_ref());
            let hash = password.flatten().map(PasswordHash::as_phc);
            let params: [Param; 6] = [
                (id, Type::INT8),
                (&version, Type::INT8),
                (&updated_at, Type::TIMESTAMPTZ),
                (name, Type::TEXT),
                (email, Type::TEXT),
                (&hash, Type::TEXT),
            ];
            let (sql, params) = match password {
                None => (UPDATE, &params[..5]),
                Some(_) => (UPDATE_PASSWORD, &params[..]),
            };
            if let [row] = &self.pool.execute(sql, params, Some(*deadline))?[..] {
                return self.user(row);
            }
            // The committed record may answer at once, also if another transaction has locked it.
            let user = self.allowed(*id, condition)?;
            let is_unchanged = password.is_none()
                && name.is_none_or(|name| name == user.name)
                && email.is_none_or(|email| email == user.email);
            match before {
                _ if is_unchanged => return Ok(user),
                // There was no password to remove, or a trigger has left the change out.
                Some(before) if before.revision() == user.revision() => return Ok(user),
                Some(_) => return Err(Error::Contended),
                None => before = Some(user),
            }
        }
    }

    /// Changes users, no two of which are the same, in one statement and one commit, each with the outcome that it
    /// would have had alone; [`Error::Contended`] if another transaction has locked the user. Round trips as for
    /// [creates](Users::create_many); a lone change has one more if nothing was changed by the first. `None` if the user
    /// is not changed yet: a change of the address is executed alone, as it may wait for another transaction.
    pub fn update_many(&self, updates: &[Update]) -> Vec<Result<Option<User>, Error>> {
        let statement = |given: &[&Update], deadline| {
            let ids: Vec<i64> = given.iter().map(|update| update.id).collect();
            let (versions, times): (Vec<_>, Vec<_>) =
                given.iter().map(|update| tag(update.condition, None)).unzip();
            let names: Vec<_> = given.iter().map(|update| update.name).collect();
            let emails: Vec<_> = given.iter().map(|update| update.email).collect();
            let params: [Param; 5] = [
                (&ids, Type::INT8_ARRAY),
                (&versions, Type::INT8_ARRAY),
                (&times, Type::TIMESTAMPTZ_ARRAY),
                (&names, Type::TEXT_ARRAY),
                (&emails, Type::TEXT_ARRAY),
            ];
            self.pool.execute(UPDATE_MANY, &params, Some(deadline))
        };
        let outcome = |_: &Update, row: Option<&Row>| outcome(row)?.map(|row| self.user(row)).transpose();
        let alone = |update: &Update| self.update(update).map(Some);
        self.batch(updates, |update| update.deadline, statement, outcome, alone)
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
        self.pool.execute(REPLACE_HASH, &params, Some(deadline)).map(drop)
    }

    /// Removes a user and its credential. Round trips and errors as of [`Users::update`].
    fn delete(&self, delete: &Delete) -> Result<(), Error> {
        let Delete { id, condition, deadline } = delete;
        let before = if condition.is_simple() { None } else { Some(self.allowed(*id, condition)?) };
        let (version, updated_at) = tag(condition, before.as_ref());
        let params: [Param; 3] = [(id, Type::INT8), (&version, Type::INT8), (&updated_at, Type::TIMESTAMPTZ)];
        if !self.pool.execute(DELETE, &params, Some(*deadline))?.is_empty() {
            return Ok(());
        }
        if !condition.is_empty() {
            self.allowed(*id, condition)?;
        }
        // The user has moved from one allowed state to another, or a trigger has kept the user.
        Err(if before.is_some() { Error::Contended } else { Error::NotFound })
    }

    /// Removes users, no two of which are the same, and their credentials, as [`Users::update_many`] changes them.
    pub fn delete_many(&self, deletes: &[Delete]) -> Vec<Result<(), Error>> {
        let statement = |given: &[&Delete], deadline| {
            let ids: Vec<i64> = given.iter().map(|delete| delete.id).collect();
            let (versions, times): (Vec<_>, Vec<_>) =
                given.iter().map(|delete| tag(delete.condition, None)).unzip();
            let params: [Param; 3] =
                [(&ids, Type::INT8_ARRAY), (&versions, Type::INT8_ARRAY), (&times, Type::TIMESTAMPTZ_ARRAY)];
            self.pool.execute(DELETE_MANY, &params, Some(deadline))
        };
        let outcome = |_: &Delete, row: Option<&Row>| outcome(row).map(drop);
        self.batch(deletes, |delete| delete.deadline, statement, outcome, |delete| self.delete(delete))
    }

    /// Executes requests in one statement and one commit, each with the outcome that it would have had alone.
    ///
    /// `statement` answers rows with the positions of their requests, from 1; `outcome` judges the row of a request.
    /// `alone` executes a single request, and each of them after a refusal that may concern only some. If the batch met a
    /// lock, each request has met it: retries are alone.
    fn batch<T, O>(
        &self,
        requests: &[T],
        deadline: impl Fn(&T) -> Instant,
        statement: impl Fn(&[&T], Instant) -> Result<Vec<Row>, Error>,
        outcome: impl Fn(&T, Option<&Row>) -> Result<O, Error>,
        alone: impl Fn(&T) -> Result<O, Error>,
    ) -> Vec<Result<O, Error>> {
        /// A request whose time is nearly up is not sent, and does not have the batch wait for a session in vain.
        const MARGIN: Duration = Duration::from_millis(100);
        if let [one] = requests {
            return vec![alone(one)];
        }
        let latest = Instant::now() + self.pool.statement_timeout + MARGIN;
        let is_late = |request: &T| deadline(request) < latest;
        let given: Vec<&T> = requests.iter().filter(|request| !is_late(request)).collect();
        let earliest = given.iter().map(|request| deadline(request)).min();
        let rows = earliest.map_or(Ok(Vec::new()), |deadline| statement(&given, deadline));
        let place = |row: Row| Ok((row.try_get("position")?, row));
        let rows: Result<HashMap<i64, Row>, Error> =
            rows.and_then(|rows| rows.into_iter().map(place).collect());
        let mut position = 0;
        let outcome = |request| match &rows {
            _ if is_late(request) => Err(Error::Unavailable("a change could not be sent in time".into())),
            Err(error) if is_of_rows(error) => alone(request),
            Err(error) => Err(error.clone()),
            Ok(rows) => {
                position += 1;
                outcome(request, rows.get(&position))
            }
        };
        requests.iter().map(outcome).collect()
    }

    /// Finds a user that the condition allows to be changed.
    fn allowed(&self, id: i64, condition: &Condition) -> Result<User, Error> {
        let user = self.find_many(&[id])?.pop().ok_or(Error::NotFound)?;
        if condition.holds(user.revision()) { Ok(user) } else { Err(Error::PreconditionFailed) }
    }

    /// The user of a row.
    pub(super) fn user(&self, row: &Row) -> Result<User, Error> {
        Ok(user(row, self.lazy.clone())?)
    }
}

/// The row of a change that was made; `None` if it is to be made alone.
fn outcome(row: Option<&Row>) -> Result<Option<&Row>, Error> {
    let row = row.ok_or_else(|| Error::Internal("a change has no outcome".into()))?;
    match row.try_get("outcome")? {
        "done" => Ok(Some(row)),
        "by itself" => Ok(None),
        "precondition failed" => Err(Error::PreconditionFailed),
        "locked" => Err(Error::Contended),
        _ => Err(Error::NotFound),
    }
}

/// The version and time that a row has to have: of the state that was read before, else of a simple condition. Nulls
/// allow each, and a version that no row has allows none.
fn tag(condition: &Condition, before: Option<&User>) -> (Option<i64>, Option<OffsetDateTime>) {
    match (before.map(User::revision), condition.only.as_deref()) {
        (Some(revision), _) | (None, Some(&[revision, ..])) => {
            (Some(revision.version), Some(revision.updated_at))
        }
        (None, Some([])) => (Some(i64::MIN), None),
        (None, None) => (None, None),
    }
}

/// Reads the first columns of a row, which each statement has in the order of the table. `lazy` loads the credential on
/// access.
pub(super) fn user<'a, T: FromSql<'a>>(
    row: &'a Row,
    lazy: Option<Loader<Credential>>,
) -> Result<User<T>, postgres::Error> {
    let id = row.try_get(0)?;
    Ok(User {
        id,
        name: row.try_get(1)?,
        email: row.try_get(2)?,
        created_at: row.try_get(3)?,
        updated_at: row.try_get(4)?,
        version: row.try_get(5)?,
        credential: Relation::unloaded("credential", lazy.map(|loader| (loader, id))),
    })
}

/// Returns the credential of a row, if there is one.
fn credential(row: &Row) -> Result<Option<Credential>, Error> {
    let hash: Option<String> = row.try_get("password_hash")?;
    Ok(hash.map(|hash| Credential { password_hash: PasswordHash::from_phc(hash) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        App, Config, ScratchDatabase,
        config::PasswordHashing,
        users::{
            password::{Hasher, Match},
            revision::Condition,
        },
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
        let new = |name, email| New { name, email, password: None, key: None, deadline };
        for created in app.users().create_many(&[
            New { password: Some(&hash), ..new("Ada", "ada@example.com") },
            new("Bob", "bob@example.com"),
        ]) {
            created.unwrap();
        }
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
        unloaded.append(&mut users.find_by_email(&["ada@example.com"]).unwrap()[0].users);
        let deadline = Instant::now() + LONG;
        let eve = New { name: "Eve", email: "eve@example.com", password: None, key: None, deadline };
        unloaded.push(users.create_many(&[eve]).remove(0).unwrap().into_user());
        let (name, condition) = (Some("Robert"), &Condition::default());
        let renamed = Update { id: 2, name, email: None, password: None, condition, deadline };
        unloaded.push(users.update(&renamed).unwrap());
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
        let hasher = Hasher::new(PasswordHashing::Owasp);
        let check = |password: &str| hasher.check(&password.into(), Some(&credential.password_hash));
        assert!(check(PASSWORD) != Match::None && check("battery staple") == Match::None);
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
                let user = app.users().find_by_email_with_credential(email).unwrap().unwrap();
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
