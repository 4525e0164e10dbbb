//! Creates, alone and many at once, also with idempotency keys and passwords.

use super::{Change, Users};
use crate::db::keys::{CREATE_WITH_KEYS, Once};
use crate::db::{Pool, session::Param};
use crate::error::Error;
use crate::users::idempotency::{Fingerprint, Key};
use crate::users::password::PasswordHash;
use postgres::{Row, types::Type};
use std::time::Instant;

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

impl Users {
    pub fn create_many(&self, new: &[New]) -> Vec<Result<Once, Error>> {
        self.batch(new)
    }
}

impl Change for New<'_> {
    type Done = Once;

    fn deadline(&self) -> Instant {
        self.deadline
    }

    fn execute(pool: &Pool, given: &[&Self], deadline: Instant) -> Result<Vec<Row>, Error> {
        if let [New { name, email, password: None, key: None, .. }] = given {
            return pool.execute(CREATE, &[(name, Type::TEXT), (email, Type::TEXT)], Some(deadline));
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
        if given.iter().all(|new| new.password.is_none() && new.key.is_none()) {
            pool.execute(CREATE_MANY, &params[..2], Some(deadline))
        } else {
            pool.execute(CREATE_WITH_KEYS, &params, Some(deadline))
        }
    }

    fn judge(&self, users: &Users, row: Option<&Row>) -> Result<Once, Error> {
        row.map_or_else(|| users.kept_or_taken(self), |row| users.once(row))
    }

    fn alone(&self, users: &Users) -> Result<Once, Error> {
        match New::execute(&users.pool, &[self], self.deadline) {
            Err(Error::AlreadyExists) => users.kept_or_taken(self),
            rows => self.judge(users, rows?.first()),
        }
    }
}
