//! Creates with a key: the statements on what is kept of them.

use super::{
    Pool,
    cleaner::Cleaner,
    session::Param,
    users::{Users, column},
};
use crate::{
    error::Error,
    users::{
        once::{Fingerprint, Kept, Key},
        password::PasswordHash,
        user::User,
    },
};
use postgres::{Row, types::Type};
use std::{io, time::Duration};

/// Creates a user and keeps the answer, or finds one that was kept.
const CREATE_ONCE: &str = include_str!("create_once.sql");

const FIND_KEPT: &str = "\
    select id, name, email, created_at, updated_at, version, fingerprint, password_hash \
    from idempotency_keys where key = $1 and kept_since > now() - interval '24 hours'";

/// Rows that others are removing are left to them.
const REMOVE_EXPIRED: &str = "\
    delete from idempotency_keys where key = any (array( \
        select key from idempotency_keys where kept_since <= now() - interval '24 hours' \
        order by kept_since limit 500 for update skip locked))";

/// Seconds until the next row expires; null where there is none.
const NEXT_EXPIRY: &str = "\
    select extract(epoch from min(kept_since) + interval '24 hours' - now())::float8 from idempotency_keys";

/// The outcome of a create with a key.
#[derive(Debug)]
pub enum Once {
    /// It was the first one.
    Created(User),
    /// One with the same key came before it; whether they have the same body is still to be told.
    Kept(Box<Kept>),
}

impl Users {
    /// Stores a user, its password's hash and the key, in one transaction; or finds what was kept of the same key, and
    /// stores nothing. One round trip. [`Error::AlreadyExists`] when the address is taken, or another session stores the
    /// same key at the same time: then [`Users::find_kept`] finds it.
    pub fn create_once(
        &self,
        key: &Key,
        fingerprint: &Fingerprint,
        name: &str,
        email: &str,
        password: Option<&PasswordHash>,
    ) -> Result<Once, Error> {
        let hash = password.map(PasswordHash::as_phc);
        let params: [Param; 5] = [
            (&key.as_bytes(), Type::BYTEA),
            (&fingerprint.as_bytes(), Type::BYTEA),
            (&name, Type::TEXT),
            (&email, Type::TEXT),
            (&hash, Type::TEXT),
        ];
        let rows = self.pool.write(CREATE_ONCE, &params)?;
        let row = rows.first().ok_or_else(|| Error::Internal("an insert returned no row".into()))?;
        match column::<Option<&[u8]>>(row, 6)? {
            None => Ok(Once::Created(self.user(row)?)),
            Some(_) => Ok(Once::Kept(Box::new(self.kept(row)?))),
        }
    }

    /// What was kept of a key within the last 24 hours. One round trip.
    pub fn find_kept(&self, key: &Key) -> Result<Option<Box<Kept>>, Error> {
        let rows = self.pool.read(FIND_KEPT, &[(&key.as_bytes(), Type::BYTEA)])?;
        rows.first().map(|row| self.kept(row).map(Box::new)).transpose()
    }

    /// Starts what removes the keys that have expired. Errors: the system has no more threads.
    pub(crate) fn start_cleaner(&self) -> io::Result<Cleaner> {
        Cleaner::start(&self.pool)
    }

    /// Removes some of the keys that have expired, now.
    #[doc(hidden)]
    pub fn remove_expired_keys(&self) -> Result<(), Error> {
        remove_expired(&self.pool)
    }

    fn kept(&self, row: &Row) -> Result<Kept, Error> {
        let fingerprint = Fingerprint::from_bytes(column(row, 6)?);
        let hash: Option<String> = column(row, 7)?;
        Ok(Kept {
            fingerprint: fingerprint
                .ok_or_else(|| Error::Internal("a fingerprint of another length".into()))?,
            password_hash: hash.map(PasswordHash::from_phc),
            user: self.user(row)?,
        })
    }
}

/// Removes some of the keys that have expired.
pub(super) fn remove_expired(pool: &Pool) -> Result<(), Error> {
    pool.write(REMOVE_EXPIRED, &[]).map(drop)
}

/// How long until the first of the keys expires; zero where it has, `None` where there is no key.
pub(super) fn next_expiry(pool: &Pool) -> Result<Option<Duration>, Error> {
    let rows = pool.read(NEXT_EXPIRY, &[])?;
    let seconds: Option<f64> = rows.first().map(|row| column(row, 0)).transpose()?.flatten();
    Ok(seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default()))
}
