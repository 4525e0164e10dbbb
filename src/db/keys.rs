//! Creates with an idempotency key, or with a password, and the keys that are kept for 24 hours.

use super::{
    session::Param,
    users::{New, Users, address, at_positions, column},
};
use crate::{
    error::Error,
    users::{
        idempotency::{Fingerprint, KeptCreate, Key},
        password::PasswordHash,
        user::{User, Values},
    },
};
use postgres::{Row, types::Type};
use std::{sync::atomic::Ordering, time::Instant};

/// Creates users, or finds answers that were kept of their keys. $1 and $2: names and addresses. $3: hashes of the
/// passwords, or nulls. $4 and $5: digests of the keys, no two of which are equal, and of the bodies, or nulls. A user
/// without a row has an address that is taken. For the position, see `CREATE_MANY`.
const CREATE: &str = r#"
    with given as materialized (
        select * from unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::bytea[])
            with ordinality as given (name, email, password_hash, key, fingerprint, position)
    ), found as materialized (
        select keys.*, given.position, keys.kept_since > now() - interval '24 hours' as is_kept
        from given, lateral (select * from idempotency_keys k where k.key = given.key limit 1) keys
    ), expired as (
        delete from idempotency_keys where key = any (array(select key from found where not is_kept)) returning key
    ), new as materialized (
        select name, email, position from given
        where position <> all (array(select position from found where is_kept)) order by position
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

/// Two requests may ask for one key: so each row has the position of its key, from 1.
const FIND_KEPT: &str = "
    select id, name, email, created_at, updated_at, version, position, fingerprint, password_hash
    from unnest($1::bytea[]) with ordinality as asked (asked_key, position), lateral (
        select * from idempotency_keys
        where key = asked_key and kept_since > now() - interval '24 hours' limit 1
    ) found";

/// Leaves rows that another session is removing.
const REMOVE_EXPIRED: &str = "
    delete from idempotency_keys where key = any (array(
        select key from idempotency_keys
        where kept_since <= now() - interval '24 hours' order by kept_since limit 500 for update skip locked))";

/// The outcome of a create with a key.
#[derive(Debug)]
pub enum Once {
    /// It was the first one.
    Created(User),
    /// One with the same key came before it; the bodies are still to be compared.
    Kept(Box<KeptCreate>),
}

/// A create with a key, without its password.
#[derive(Debug, Clone, Copy)]
pub struct NewOnce<'a> {
    /// The key.
    pub key: &'a Key,
    /// The digest of the body.
    pub fingerprint: &'a Fingerprint,
    /// The user: all values.
    pub values: Values<'a>,
    /// The end of the request.
    pub deadline: Instant,
}

impl Users {
    /// Stores users and their keys, no two of which are equal, in one statement and one commit, each with the outcome
    /// that it would have had alone. As many round trips as [`Users::create_many`], and one more for each address that
    /// is taken.
    pub fn create_many_once(&self, new: &[NewOnce]) -> Vec<Result<Once, Error>> {
        self.remove_keys_now_and_then(new.len());
        self.batch(
            new,
            |new| (address(&new.values), new.deadline),
            |given, deadline| {
                let values: Vec<Values> = given.iter().map(|new| new.values).collect();
                let keys = given.iter().map(|new| Some(new.key.as_bytes())).collect();
                let fingerprints = given.iter().map(|new| Some(new.fingerprint.as_bytes())).collect();
                self.create_all(&values, &vec![None; given.len()], keys, fingerprints, deadline)
            },
            |new, row| self.or_kept(new.key, row.ok_or(Error::AlreadyExists).and_then(|row| self.once(row))),
            |new| self.create_once(new, None),
        )
    }

    /// Stores a user, its password's hash and the key, in one transaction; or finds the answer that was kept of the
    /// key, and stores nothing. One round trip; one more if the address is taken: [`Error::AlreadyExists`].
    pub fn create_once(&self, new: &NewOnce, password: Option<&PasswordHash>) -> Result<Once, Error> {
        let NewOnce { key, fingerprint, values, deadline } = new;
        let (keys, fingerprints) = (vec![Some(key.as_bytes())], vec![Some(fingerprint.as_bytes())]);
        let rows = self.create_all(&[*values], &[password], keys, fingerprints, *deadline);
        let once = rows.and_then(|rows| self.once(rows.first().ok_or(Error::AlreadyExists)?));
        self.or_kept(key, once)
    }

    /// Stores a user with its password's hash.
    pub(super) fn create_with_password(
        &self,
        new: &New,
        password: Option<&PasswordHash>,
    ) -> Result<User, Error> {
        let rows = self.create_all(&[new.values], &[password], vec![None], vec![None], new.deadline)?;
        self.user(rows.first().ok_or(Error::AlreadyExists)?)
    }

    fn create_all(
        &self,
        values: &[Values],
        passwords: &[Option<&PasswordHash>],
        keys: Vec<Option<&[u8]>>,
        fingerprints: Vec<Option<&[u8]>>,
        deadline: Instant,
    ) -> Result<Vec<Row>, Error> {
        let names: Vec<Option<&str>> = values.iter().map(|values| values.name).collect();
        let emails: Vec<Option<&str>> = values.iter().map(|values| values.email).collect();
        let hashes: Vec<Option<&str>> =
            passwords.iter().map(|password| password.map(PasswordHash::as_phc)).collect();
        let params: [Param; 5] = [
            (&names, Type::TEXT_ARRAY),
            (&emails, Type::TEXT_ARRAY),
            (&hashes, Type::TEXT_ARRAY),
            (&keys, Type::BYTEA_ARRAY),
            (&fingerprints, Type::BYTEA_ARRAY),
        ];
        self.pool.change(CREATE, &params, deadline)
    }

    /// Finds answers that were kept of keys within the last 24 hours, each in the place of its key. One round trip.
    pub fn find_kept(&self, keys: &[&Key]) -> Result<Vec<Option<Box<KeptCreate>>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let bytes: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let rows = self.pool.read(FIND_KEPT, &[(&bytes, Type::BYTEA_ARRAY)])?;
        at_positions(&rows, keys.len(), |row| self.kept(row).map(Box::new))
    }

    /// Looks the key up if the address or the key is taken: a create with the same key may have been answered since.
    fn or_kept(&self, key: &Key, created: Result<Once, Error>) -> Result<Once, Error> {
        match created {
            Err(Error::AlreadyExists) => {
                let kept = self.find_kept(&[key])?.pop().flatten();
                kept.map(Once::Kept).ok_or(Error::AlreadyExists)
            }
            created => created,
        }
    }

    /// Removes some expired keys beside the first batch of creates, and beside one in 256.
    pub(super) fn remove_keys_now_and_then(&self, creates: usize) {
        const BATCHES: u32 = 256;
        if creates > 0
            && self.batches.fetch_add(1, Ordering::Relaxed).is_multiple_of(BATCHES)
            && let Err(error) = self.remove_expired_keys()
        {
            log::warn!("cannot remove the idempotency keys that have expired: {error}");
        }
    }

    /// Removes at most 500 keys that have expired.
    #[doc(hidden)]
    pub fn remove_expired_keys(&self) -> Result<(), Error> {
        self.pool.write(REMOVE_EXPIRED, &[]).map(drop)
    }

    fn once(&self, row: &Row) -> Result<Once, Error> {
        match column::<Option<&[u8]>>(row, "fingerprint")? {
            None => Ok(Once::Created(self.user(row)?)),
            Some(_) => Ok(Once::Kept(Box::new(self.kept(row)?))),
        }
    }

    fn kept(&self, row: &Row) -> Result<KeptCreate, Error> {
        let fingerprint = match column::<&[u8]>(row, "fingerprint")? {
            [] => None,
            bytes => {
                let unknown = || Error::Internal("a fingerprint of another length".into());
                Some(Fingerprint::from_bytes(bytes).ok_or_else(unknown)?)
            }
        };
        let hash: Option<String> = column(row, "password_hash")?;
        Ok(KeptCreate { fingerprint, password_hash: hash.map(PasswordHash::from_phc), user: self.user(row)? })
    }
}
