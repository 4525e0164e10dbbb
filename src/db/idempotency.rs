//! Creates with a key: the statements on what is kept of them, and the thread that removes it once its time is over.

use super::{
    Pool,
    clock::{Changed, no_row},
    session::{Deadlines, Param},
    users::{Batched, Insert, Sql, Users, address, arrays, at_positions, column, with_arrays, with_values},
};
use crate::{
    error::Error,
    users::{
        idempotency::{Fingerprint, KEPT_FOR, KeptCreate, Key},
        password::PasswordHash,
        user::{User, Values},
    },
};
use postgres::{Row, types::Type};
use std::{
    io,
    sync::{Arc, Weak, mpsc},
    thread,
    time::{Duration, Instant},
};

/// Creates a user and keeps the answer, or finds one that was kept.
static CREATE_ONCE: Sql = Sql::new(include_str!("create_once.sql"));

/// The same for several keys.
static CREATE_MANY_ONCE: Insert = Insert::new(include_str!("create_many_once.sql"));

/// Each row comes with the position of its key, from 1: two may ask for the same one.
static FIND_KEPT: Sql = Sql::new(
    "\
    select found.*, position \
    from pg_catalog.unnest($1::bytea[]) with ordinality as asked (asked_key, position) cross join lateral ( \
        select {COLUMN}, fingerprint, password_hash \
        from idempotency_keys \
        where key operator(pg_catalog.=) asked_key \
            and kept_since operator(pg_catalog.>) (pg_catalog.now() operator(pg_catalog.-) interval '24 hours') \
        limit 1 \
    ) as found",
);

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
    Kept(Box<KeptCreate>),
}

/// A create with a key, without its password.
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
        self.batch(new)
    }

    /// Stores a user, its password's hash and the key, in one transaction; or finds what was kept of the same key, and
    /// stores nothing. One round trip; one more where the address is taken: [`Error::AlreadyExists`].
    pub fn create_once(&self, new: &NewOnce, password: Option<&PasswordHash>) -> Result<Once, Error> {
        let NewOnce { key, fingerprint, values, deadline } = new;
        let hash = password.map(PasswordHash::as_phc);
        let params: [Param; 3] =
            [(&key.as_bytes(), Type::BYTEA), (&fingerprint.as_bytes(), Type::BYTEA), (&hash, Type::TEXT)];
        let params = with_values(&params, values);
        let created = self.pool.change(CREATE_ONCE.text(), &params, Deadlines::One(*deadline));
        let created = created.and_then(|created| self.once(created.only(*deadline, no_row)?));
        self.or_kept(key, created)
    }

    /// What was kept of keys within the last 24 hours, each in the place of its key. One round trip.
    pub fn find_kept(&self, keys: &[&Key]) -> Result<Vec<Option<Box<KeptCreate>>>, Error> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let bytes: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let rows = self.pool.read(FIND_KEPT.text(), &[(&bytes, Type::BYTEA_ARRAY)])?;
        at_positions(&rows, keys.len(), |row| self.kept(row).map(Box::new))
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

    /// Removes some of the keys that have expired, now.
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

impl Batched for NewOnce<'_> {
    type Outcome = Once;
    type Key = Option<String>;

    fn key(&self) -> (Option<String>, Instant) {
        (address(&self.values), self.deadline)
    }

    fn batched(users: &Users, new: &[&Self], deadlines: &[Instant]) -> Result<Changed, Error> {
        let keys: Vec<&[u8]> = new.iter().map(|new| new.key.as_bytes()).collect();
        let fingerprints: Vec<&[u8]> = new.iter().map(|new| new.fingerprint.as_bytes()).collect();
        let arrays = arrays(new.iter().map(|new| new.values));
        let fixed: [Param; 2] = [(&keys, Type::BYTEA_ARRAY), (&fingerprints, Type::BYTEA_ARRAY)];
        users.insert(&CREATE_MANY_ONCE, &with_arrays(&fixed, &arrays), deadlines)
    }

    fn outcome(&self, users: &Users, row: Option<&Row>, late: Option<Error>) -> Result<Once, Error> {
        let once = row.map(|row| users.once(row));
        users.or_kept(self.key, once.unwrap_or_else(|| Err(late.unwrap_or(Error::AlreadyExists))))
    }

    fn unbatched(&self, users: &Users) -> Result<Once, Error> {
        users.create_once(self, None)
    }
}

/// The first look at the rows after a start, and the shortest time between two.
const SHORTEST_PAUSE: Duration = Duration::from_secs(60);

/// Between two steps of one removal, for others to get at the database.
const BETWEEN_STEPS: Duration = Duration::from_millis(50);

/// After a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(60 * 60);

/// Of the thread, in bytes.
const STACK: usize = 256 << 10;

/// The thread that removes expired keys: it sleeps until the next one expires, a day at the most. It ends soon after
/// this is dropped.
pub struct Cleaner(#[allow(dead_code, reason = "dropping it is what the thread waits for")] mpsc::Sender<()>);

impl Cleaner {
    /// Starts it. Errors: the system has no more threads.
    pub(crate) fn start(pool: &Arc<Pool>) -> io::Result<Cleaner> {
        let (sender, ended) = mpsc::channel();
        let pool = Arc::downgrade(pool);
        let thread = thread::Builder::new().name("cleaner".to_owned()).stack_size(STACK);
        thread.spawn(move || work(&pool, &ended))?;
        Ok(Cleaner(sender))
    }
}

fn work(pool: &Weak<Pool>, ended: &mpsc::Receiver<()>) {
    let mut pause = SHORTEST_PAUSE;
    while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(pause) {
        let Some(pool) = pool.upgrade() else { return };
        pause = match step(&pool) {
            Ok(pause) => pause,
            Err(Error::Contended) => SHORTEST_PAUSE,
            Err(error) => {
                log::warn!("cannot remove the idempotency keys that have expired: {error}");
                AFTER_FAILURE
            }
        };
    }
}

/// Removes some rows if there are any that have expired; returns when to go on.
fn step(pool: &Pool) -> Result<Duration, Error> {
    let rows = pool.read(NEXT_EXPIRY, &[])?;
    let seconds: Option<f64> = rows.first().map(|row| column(row, 0)).transpose()?.flatten();
    let left = seconds.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default());
    match left {
        None => Ok(KEPT_FOR),
        Some(left) if !left.is_zero() => Ok(left.clamp(SHORTEST_PAUSE, KEPT_FOR)),
        Some(_) => {
            pool.write(REMOVE_EXPIRED, &[])?;
            Ok(BETWEEN_STEPS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SQL has the time in words of its own.
    #[test]
    fn statements_keep_keys_for_the_time_that_is_said() {
        let texts = [
            include_str!("create_once.sql"),
            include_str!("create_many_once.sql"),
            include_str!("idempotency.rs"),
        ];
        let before = ["interval", "'"].join(" ");
        let hours = format!("{} hours'", KEPT_FOR.as_secs() / 3600);
        for text in texts {
            let found: Vec<&str> = text.split(&before).skip(1).collect();
            assert!(!found.is_empty() && found.iter().all(|rest| rest.starts_with(&hours)), "{found:?}");
        }
    }
}
