//! Creates with a key: the statements on what is kept of them.

use super::{
    Pool,
    changes::{in_order, in_order_of_addresses, no_row, only, unbatched_after},
    cleaner::Cleaner,
    insert::Insert,
    session::{Deadlines, Param},
    users::{Users, at_positions, column},
};
use crate::{
    error::Error,
    users::{
        once::{Fingerprint, Kept, Key},
        password::PasswordHash,
        user::{User, Values},
    },
};
use postgres::{Row, types::Type};
use std::{
    io,
    time::{Duration, Instant},
};

/// Creates a user and keeps the answer, or finds one that was kept.
const CREATE_ONCE: &str = include_str!("create_once.sql");

/// The same for several keys.
static CREATE_MANY_ONCE: Insert = Insert::new(include_str!("create_many_once.sql"));

/// Each row comes with the position of its key, from 1: two may ask for the same one.
const FIND_KEPT: &str = "\
    select found.*, position \
    from pg_catalog.unnest($1::bytea[]) with ordinality as asked (asked_key, position) cross join lateral ( \
        select id, name, email, created_at, updated_at, version, fingerprint, password_hash \
        from idempotency_keys \
        where key operator(pg_catalog.=) asked_key \
            and kept_since operator(pg_catalog.>) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours') \
        limit 1 \
    ) as found";

/// Rows that others are removing are left to them.
const REMOVE_EXPIRED: &str = "\
    delete from idempotency_keys where key operator(pg_catalog.=) any (array( \
        select key from idempotency_keys \
        where kept_since operator(pg_catalog.<=) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours') \
        order by kept_since limit 500 for update skip locked))";

/// Seconds until the next row expires; null where there is none.
const NEXT_EXPIRY: &str = "\
    select pg_catalog.date_part('epoch', pg_catalog.min(kept_since) operator(pg_catalog.+) interval '24 hours' \
        operator(pg_catalog.-) pg_catalog.now()) from idempotency_keys";

/// The outcome of a create with a key.
#[derive(Debug)]
pub enum Once {
    /// It was the first one.
    Created(User),
    /// One with the same key came before it; whether they have the same body is still to be told.
    Kept(Box<Kept>),
}

/// A create with a key and without a password.
#[derive(Debug, Clone, Copy)]
pub struct NewOnce<'a> {
    /// The key.
    pub key: &'a Key,
    /// Of the body.
    pub fingerprint: &'a Fingerprint,
    /// The user: all values.
    pub values: Values<'a>,
    /// Nothing is created past this.
    pub deadline: Instant,
}

impl Users {
    /// Stores users and their keys, no two of which are equal, in one statement and one commit, each with the outcome
    /// that it would have had unbatched. As many round trips as [`Users::create_many`], and one more for each whose
    /// address is taken.
    pub fn create_many_once(&self, new: &[NewOnce]) -> Vec<Result<Once, Error>> {
        let unbatched =
            |new: &NewOnce| self.create_once(new.key, new.fingerprint, new.values, None, new.deadline);
        if let [one] = new {
            return vec![unbatched(one)];
        }
        match self.create_batch_once(new) {
            Ok(outcomes) => {
                outcomes.into_iter().zip(new).map(|(once, new)| self.or_kept(new.key, once)).collect()
            }
            Err(error) => unbatched_after(&error, new, unbatched),
        }
    }

    fn create_batch_once(&self, new: &[NewOnce]) -> Result<Vec<Result<Once, Error>>, Error> {
        let order = in_order_of_addresses(new, |new| new.values);
        let given: Vec<&NewOnce> = order.iter().map(|index| &new[*index]).collect();
        let keys: Vec<&[u8]> = given.iter().map(|new| new.key.as_bytes()).collect();
        let fingerprints: Vec<&[u8]> = given.iter().map(|new| new.fingerprint.as_bytes()).collect();
        let (names, emails): (Vec<_>, Vec<_>) =
            given.iter().map(|new| (new.values.name, new.values.email)).unzip();
        let params: [Param; 4] = [
            (&keys, Type::BYTEA_ARRAY),
            (&fingerprints, Type::BYTEA_ARRAY),
            (&names, Type::TEXT_ARRAY),
            (&emails, Type::TEXT_ARRAY),
        ];
        let deadlines: Vec<Instant> = given.iter().map(|new| new.deadline).collect();
        let created = self.insert(&CREATE_MANY_ONCE, &params, &deadlines)?;
        in_order(&created, &deadlines, &order, 8, |row| self.once(row))
    }

    /// Stores a user, its password's hash and the key, in one transaction; or finds what was kept of the same key, and
    /// stores nothing. One round trip; one more where the address is taken: [`Error::AlreadyExists`].
    pub fn create_once(
        &self,
        key: &Key,
        fingerprint: &Fingerprint,
        values: Values,
        password: Option<&PasswordHash>,
        deadline: Instant,
    ) -> Result<Once, Error> {
        let hash = password.map(PasswordHash::as_phc);
        let params: [Param; 5] = [
            (&key.as_bytes(), Type::BYTEA),
            (&fingerprint.as_bytes(), Type::BYTEA),
            (&values.name, Type::TEXT),
            (&values.email, Type::TEXT),
            (&hash, Type::TEXT),
        ];
        let created = self.pool.change(CREATE_ONCE, &params, Deadlines::One(deadline));
        let created = created.and_then(|created| self.once(only(&created, deadline, no_row)?));
        self.or_kept(key, created)
    }

    /// What was kept of keys within the last 24 hours, each in the place of its key. One round trip.
    pub fn find_kept(&self, keys: &[&Key]) -> Result<Vec<Option<Box<Kept>>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let bytes: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let rows = self.pool.read(FIND_KEPT, &[(&bytes, Type::BYTEA_ARRAY)])?;
        at_positions(&rows, 8, keys.len(), |row| self.kept(row).map(Box::new))
    }

    /// What is taken, the address or the key, may be that of a create with the same key, which was answered meanwhile.
    fn or_kept(&self, key: &Key, created: Result<Once, Error>) -> Result<Once, Error> {
        match created {
            Err(Error::AlreadyExists) => {
                let kept = self.find_kept(&[key])?.pop().flatten();
                kept.map(Once::Kept).ok_or(Error::AlreadyExists)
            }
            created => created,
        }
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

    fn once(&self, row: &Row) -> Result<Once, Error> {
        match column::<Option<&[u8]>>(row, 6)? {
            None => Ok(Once::Created(self.user(row)?)),
            Some(_) => Ok(Once::Kept(Box::new(self.kept(row)?))),
        }
    }

    fn kept(&self, row: &Row) -> Result<Kept, Error> {
        let fingerprint = match column::<&[u8]>(row, 6)? {
            [] => None,
            bytes => {
                let unknown = || Error::Internal("a fingerprint of another length".into());
                Some(Fingerprint::from_bytes(bytes).ok_or_else(unknown)?)
            }
        };
        let hash: Option<String> = column(row, 7)?;
        Ok(Kept { fingerprint, password_hash: hash.map(PasswordHash::from_phc), user: self.user(row)? })
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
