//! Creates with an idempotency key, or with a password, and the keys that are kept for 24 hours.

use super::users::{New, Users};
use crate::{
    error::Error,
    users::{
        idempotency::{Fingerprint, KeptCreate, Key},
        password::PasswordHash,
        user::User,
    },
};
use postgres::{Row, types::Type};

/// Creates users, or finds answers that were kept of their keys. $1 and $2: names and addresses. $3: hashes of the
/// passwords, or nulls. $4 and $5: digests of the keys, no two of which are equal, and of the bodies, or nulls. A user
/// without a row has an address that is taken. For the position, see `CREATE_MANY`. Removes some keys that have expired,
/// more than a batch stores, but no row that another session is removing.
pub(super) const CREATE_WITH_KEYS: &str = r#"
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

/// Removes keys that have expired, but no row that another session is removing.
pub(super) const REMOVE_EXPIRED: &str = "
    delete from idempotency_keys where key = any (array(
        select key from idempotency_keys where kept_since <= now() - interval '24 hours'
        order by kept_since limit 1000 for update skip locked))
    returning key";

/// The most rows that [`REMOVE_EXPIRED`] removes.
pub(super) const REMOVED_AT_ONCE: usize = 1000;

const FIND_KEPT: &str = "
    select id, name, email, created_at, updated_at, version, fingerprint, password_hash from idempotency_keys
    where key = $1 and kept_since > now() - interval '24 hours'";

/// The outcome of a create.
#[derive(Debug)]
pub enum Once {
    /// The user was stored.
    Created(User),
    /// An earlier create had this key; the bodies are still to be compared.
    Kept(Box<KeptCreate>),
}

impl Once {
    /// Returns the user as it was stored.
    pub fn into_user(self) -> User {
        match self {
            Once::Created(user) => user,
            Once::Kept(kept) => kept.user,
        }
    }
}

impl Users {
    /// Finds the answer that was kept of a key within the last 24 hours. One round trip.
    pub fn find_kept(&self, key: &Key) -> Result<Option<Box<KeptCreate>>, Error> {
        let rows = self.pool.execute(FIND_KEPT, &[(&key.0.as_slice(), Type::BYTEA)], None)?;
        rows.first().map(|row| self.kept(row).map(Box::new)).transpose()
    }

    /// Returns the outcome if the address or the key is taken: an earlier create with this key may have been answered.
    pub(super) fn kept_or_taken(&self, new: &New) -> Result<Once, Error> {
        let kept = new.key.map_or(Ok(None), |(key, _)| self.find_kept(key))?;
        kept.map(Once::Kept).ok_or(Error::AlreadyExists)
    }

    /// The outcome of a create that has a row.
    pub(super) fn once(&self, row: &Row) -> Result<Once, Error> {
        match row.try_get::<_, Option<&[u8]>>("fingerprint")? {
            None => Ok(Once::Created(self.user(row)?)),
            Some(_) => Ok(Once::Kept(Box::new(self.kept(row)?))),
        }
    }

    fn kept(&self, row: &Row) -> Result<KeptCreate, Error> {
        // The fingerprint is empty if the user was deleted.
        let fingerprint = row.try_get::<_, &[u8]>("fingerprint")?.try_into().ok().map(Fingerprint);
        let hash: Option<String> = row.try_get("password_hash")?;
        Ok(KeptCreate { fingerprint, password_hash: hash.map(PasswordHash::from_phc), user: self.user(row)? })
    }
}
