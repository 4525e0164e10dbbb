//! Creates, alone and many at once, also with idempotency keys and passwords.

use super::{Change, Users};
use crate::db::{Pool, keys::CREATE_WITH_KEYS, session::Param};
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
