//! Creates, alone and many at once, also with idempotency keys and passwords.

use super::{Change, Users};
use crate::db::{Pool, session::Param};
use crate::error::Error;
use crate::users::idempotency::{Fingerprint, Key};
use crate::users::password::PasswordHash;
use crate::users::user::{NewUser, User};
use postgres::{Row, types::Type};
use std::{net::IpAddr, time::Instant};

const CREATE: &str = r#"
    insert into users (name, email) values ($1, $2)
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version, null::bytea as fingerprint, bigint '1' as position"#;

/// Inserts in the order of addresses, so that two statements wait for each other in one direction only; of equal
/// addresses the first one is stored. `returning` sees nothing of `given`, and a trigger may change each value. But an
/// insert reads, stores and returns one row before it reads the next one: so the setting that reading a row writes is
/// the one that `returning` finds. Drawing ids first, to join by them, would need a right on the sequence that roles with
/// the rights of `userd grants` lack.
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

/// Creates users, or finds answers that were kept of their keys. $1 and $2: names and addresses. $3: hashes of the
/// passwords, or nulls. $4 and $5: digests of the keys, no two of which are equal, and of the bodies, or nulls. A user
/// without a row has an address that is taken. For the position, see `CREATE_MANY`. Removes some keys that have expired,
/// more than a batch stores, but no row that another session is removing.
const CREATE_WITH_KEYS: &str = r#"
    with given as materialized (
        select * from unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::bytea[])
            with ordinality as given (name, email, password_hash, key, fingerprint, position)
    ), found as materialized (
        select keys.*, given.position, keys.kept_since > now() - interval '24 hours' as is_kept
        from given, lateral (select * from idempotency_keys k where k.key = given.key limit 1) keys
    ), old as materialized (
        select key from idempotency_keys
        where kept_since <= now() - interval '24 hours' order by kept_since limit 100 for update skip locked
    ), expired as (
        delete from idempotency_keys
        where key = any (array(select key from found where not is_kept union select key from old)) returning key
    ), new as materialized (
        select name, email, position from given
        where position <> all (array(select position from found where is_kept)) order by lower(email collate "C"), position
    ), created as (
        insert into users (name, email)
        select name, email from new where set_config('userd.position', position::text, true) <> ''
        on conflict (lower(email::text collate "C")) do nothing
        returning id, name, email, created_at, updated_at, version,
            current_setting('userd.position')::bigint as position
    ), credential as (
        insert into credentials (user_id, password_hash)
        select c.id, g.password_hash from created c join given g on g.position = c.position
        where g.password_hash is not null
    ), keeping as (
        insert into idempotency_keys
            (key, fingerprint, password_hash, id, name, email, created_at, updated_at, version)
        select key, fingerprint, password_hash, id, c.name, c.email, created_at, updated_at, version
        from created c join given g on g.position = c.position
        -- Before a row is written, the expired one that it replaces is gone.
        where key is not null and (select count(*) from expired) >= bigint '0'
    )
    select id, name, email, created_at, updated_at, version, position,
        null::bytea as fingerprint, null::text as password_hash
    from created
    union all
    select id, name, email, created_at, updated_at, version, position, fingerprint, password_hash
    from found where is_kept"#;

const FIND_KEPT: &str = "
    select id, name, email, created_at, updated_at, version, fingerprint, password_hash from idempotency_keys
    where key = $1 and kept_since > now() - interval '24 hours'";

/// A user to be created.
#[derive(Debug)]
pub struct Create {
    /// The fields of the body.
    pub user: NewUser,
    /// The idempotency key, and the fingerprint that tells a repeat from another create with the key.
    pub key: Option<(Key, Fingerprint)>,
    /// The hash of the password, once it is made.
    pub hash: Option<PasswordHash>,
    /// The client that asks, whose wrong passwords are counted.
    pub peer: Option<IpAddr>,
}

/// The user that a create has stored, or that an earlier create with its key has.
#[derive(Debug)]
pub struct Created {
    /// The user as it was stored.
    pub user: User,
    /// The fingerprint of the earlier create, if that has stored the user: the bodies are still to be compared.
    pub earlier: Option<Fingerprint>,
    /// The hash of the password of the earlier create.
    pub password_hash: Option<PasswordHash>,
}

impl Users {
    /// Finds the answer that was kept of a key within the last 24 hours. One round trip. [`Error::Gone`] if its user was
    /// deleted since.
    pub fn find_kept(&self, key: &Key) -> Result<Option<Created>, Error> {
        let rows = self.pool.execute(FIND_KEPT, &[(&key.0.as_slice(), Type::BYTEA)], None)?;
        rows.first().map(|row| self.created(row)).transpose()
    }

    /// Reads the outcome of a create.
    fn created(&self, row: &Row) -> Result<Created, Error> {
        let (mut earlier, mut password_hash) = (None, None);
        if let Some(digest) = row.try_get::<_, Option<&[u8]>>("fingerprint")? {
            // A delete of the user has emptied the fingerprint.
            earlier = Some(Fingerprint(digest.try_into().map_err(|_| Error::Gone)?));
            password_hash = row.try_get::<_, Option<String>>("password_hash")?.map(PasswordHash::from_phc);
        }
        Ok(Created { user: self.user(row)?, earlier, password_hash })
    }
}

impl Change for Create {
    type Done = Created;

    fn batch(pool: &Pool, given: &[&Self], deadline: Instant) -> Result<Vec<Row>, Error> {
        if let [Create { user: NewUser { name, email, .. }, key: None, hash: None, .. }] = given {
            return pool.execute(CREATE, &[(name, Type::TEXT), (email, Type::TEXT)], Some(deadline));
        }
        let (names, emails): (Vec<_>, Vec<_>) =
            given.iter().map(|create| (&create.user.name, &create.user.email)).unzip();
        let hashes: Vec<_> =
            given.iter().map(|create| create.hash.as_ref().map(PasswordHash::as_phc)).collect();
        let keyed = given.iter().map(|create| create.key.as_ref());
        let (keys, fingerprints): (Vec<_>, Vec<_>) =
            keyed.map(|key| key.map(|(key, body)| (&key.0[..], &body.0[..])).unzip()).unzip();
        let params: [Param; 5] = [
            (&names, Type::TEXT_ARRAY),
            (&emails, Type::TEXT_ARRAY),
            (&hashes, Type::TEXT_ARRAY),
            (&keys, Type::BYTEA_ARRAY),
            (&fingerprints, Type::BYTEA_ARRAY),
        ];
        if given.iter().all(|create| create.hash.is_none() && create.key.is_none()) {
            pool.execute(CREATE_MANY, &params[..2], Some(deadline))
        } else {
            pool.execute(CREATE_WITH_KEYS, &params, Some(deadline))
        }
    }

    fn judge(&self, users: &Users, row: Option<&Row>) -> Result<Created, Error> {
        if let Some(row) = row {
            return users.created(row);
        }
        // The address or the key is taken: an earlier create with this key may have been answered.
        let kept = self.key.as_ref().map_or(Ok(None), |(key, _)| users.find_kept(key))?;
        kept.ok_or(Error::AlreadyExists)
    }

    fn alone(&self, users: &Users, deadline: Instant) -> Result<Created, Error> {
        match Create::batch(&users.pool, &[self], deadline) {
            Err(Error::AlreadyExists) => self.judge(users, None),
            rows => self.judge(users, rows?.first()),
        }
    }
}
