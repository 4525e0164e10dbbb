//! Creates with an idempotency key, or with a password, and the keys that are kept for 24 hours.

use super::users::{Created, Users};
use crate::error::Error;
use crate::users::idempotency::{Fingerprint, Key};
use crate::users::password::PasswordHash;
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

impl Users {
    /// Finds the answer that was kept of a key within the last 24 hours. One round trip. [`Error::Gone`] if its user was
    /// deleted since.
    pub fn find_kept(&self, key: &Key) -> Result<Option<Created>, Error> {
        let rows = self.pool.execute(FIND_KEPT, &[(&key.0.as_slice(), Type::BYTEA)], None)?;
        rows.first().map(|row| self.created(row)).transpose()
    }

    /// Reads the outcome of a create.
    pub(super) fn created(&self, row: &Row) -> Result<Created, Error> {
        let (mut earlier, mut password_hash) = (None, None);
        if let Some(digest) = row.try_get::<_, Option<&[u8]>>("fingerprint")? {
            // A delete of the user has emptied the fingerprint.
            earlier = Some(Fingerprint(digest.try_into().map_err(|_| Error::Gone)?));
            password_hash = row.try_get::<_, Option<String>>("password_hash")?.map(PasswordHash::from_phc);
        }
        Ok(Created { user: self.user(row)?, earlier, password_hash })
    }
}
