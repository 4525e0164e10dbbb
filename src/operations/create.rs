//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! Creates without a password share a statement, which looks their keys up and stores their users. A create with a
//! password takes two steps: a thread looks the key up and hashes the password, then a statement of its own stores the
//! user.

use super::{BatchItem, Change, Lane, Operations, Outcome, Step};
use crate::db::{Failure, Pool, session::Param};
use crate::error::Error;
use crate::http::{Request, Response, peer_network};
use crate::input::{self, etag, validation::BodySchema};
use crate::users::idempotency::{BodyFingerprint, KeyDigest};
use crate::users::password::{PasswordHash, PasswordMatch};
use crate::users::user::{NewUser, User};
use postgres::{Row, types::Type};
use std::collections::HashSet;
use std::{net::IpAddr, time::Instant};

/// A create: the user to be created, and the parts of the request by which a repeated request is recognized.
#[derive(Debug)]
pub struct Create {
    /// The user to be created, from the body of the request.
    pub user: NewUser,
    /// The idempotency key, and the fingerprint of the body, which tells a repeated create from another create with
    /// this key.
    pub key: Option<(KeyDigest, BodyFingerprint)>,
    /// The hash of the password; `None` until the password is hashed, or if there is no password.
    pub hash: Option<PasswordHash>,
    /// The address of the client, for which wrong passwords are counted.
    pub peer: Option<IpAddr>,
}

impl Create {
    pub(crate) fn parse(request: &Request, schema: &BodySchema) -> Result<Create, Error> {
        let key = input::parse_idempotency_key(request)?;
        let body = schema.validate(input::parse_body(request, false)?)?;
        let key = key.map(|key| (key, BodyFingerprint::compute(&body)));
        Ok(Create { user: NewUser::from_body(body)?, key, hash: None, peer: request.peer })
    }

    pub(super) fn next_step(&self) -> Step {
        Step::in_lane(match (&self.user.password, &self.hash) {
            (None, _) => Lane::Create,
            (Some(_), None) => Lane::Hash,
            (Some(_), Some(_)) => Lane::Single,
        })
    }
}

/// Creates a user without a password. Returns no row if another user has the address.
pub(crate) const CREATE: &str = r#"
    insert into users (name, email) values ($1, $2)
    on conflict (lower(email::text collate "C")) do nothing
    returning id, name, email, created_at, updated_at, version, null::bytea as fingerprint, bigint '1' as position"#;

/// Creates users in the order of their addresses, so that two batches cannot deadlock. Of users with equal addresses,
/// stores the first.
///
/// Each row has the position of its create in the arguments. `returning` cannot read the position from `given`, so that
/// `set_config` stores it before a row is inserted, and `returning` reads it before the next row. A trigger may
/// change any other value of the row, and a service has no right to draw ids from the sequence first.
pub(crate) const CREATE_MANY: &str = r#"
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

/// Creates users as [`CREATE_MANY`] does, or finds the kept answers of their idempotency keys. Keeps the answer to a
/// create with a key for 24 hours, as JSON of the user's row.
///
/// $1 and $2: names and addresses. $3: hashes of the passwords, or nulls. $4 and $5: digests of the keys, no two of
/// which are equal, and fingerprints of the bodies, or nulls.
pub(crate) const CREATE_WITH_KEYS: &str = r#"
    with given as materialized (
        select * from unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::bytea[])
            with ordinality as given (name, email, password_hash, key, fingerprint, position)
    ), found as materialized (
        select keys.key, keys.answer, given.position, keys.expires_at > now() as is_kept
        from given, lateral (select * from idempotency_keys k where k.key = given.key limit 1) keys
    ), expired as (
        delete from idempotency_keys where key = any (array(select key from found where not is_kept)) returning key
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
        insert into idempotency_keys (key, user_id, expires_at, answer)
        select g.key, c.id, now() + interval '24 hours', to_jsonb(c) - text 'position' ||
            jsonb_build_object('fingerprint', g.fingerprint, 'password_hash', g.password_hash)
        from created c join given g on g.position = c.position
        -- Before a row is written, the expired one that it replaces is gone.
        where g.key is not null and (select count(*) from expired) >= bigint '0'
    )
    select *, null::bytea as fingerprint, null::text as password_hash from created
    union all
    select u.id, u.name, u.email, u.created_at, u.updated_at, u.version, found.position, u.fingerprint, u.password_hash
    from found, jsonb_to_record(answer) as u (id bigint, name text, email text, created_at timestamptz,
        updated_at timestamptz, version bigint, fingerprint bytea, password_hash text)
    where is_kept"#;

/// Finds the kept answer of an idempotency key. All columns are null if the user of the answer was deleted.
pub(crate) const FIND_KEPT_ANSWER: &str = "
    select u.* from idempotency_keys, jsonb_to_record(answer) as u (id bigint, name text, email text,
        created_at timestamptz, updated_at timestamptz, version bigint, fingerprint bytea, password_hash text)
    where key = $1 and expires_at > now()";

/// The user that a create, or an earlier create with the same idempotency key, has stored.
#[derive(Debug)]
pub struct StoredUser {
    /// The user, as the create has stored the row.
    pub user: User,
    /// The fingerprint of the earlier create's body; `None` if the user was stored by the create itself. The caller has
    /// to compare the bodies.
    pub earlier_body: Option<BodyFingerprint>,
    /// The hash of the earlier create's password, if there is one.
    pub earlier_hash: Option<PasswordHash>,
}

impl Create {
    /// Executes the creates with a key in one statement, and the creates without a key in another one.
    pub(super) fn execute(operations: &Operations, mut creates: Vec<BatchItem<Create>>) {
        let mut keys = HashSet::new();
        // Executes the first create of each key. A further create with the same key is retried later, and then finds
        // the answer of the first create.
        creates.retain_mut(|BatchItem { command, outcome, .. }| {
            let is_first = command.key.is_none_or(|(key, _)| keys.insert(key));
            **outcome = (!is_first).then_some(Outcome::RetryLater);
            is_first
        });
        let (keyed, others): (Vec<_>, Vec<_>) =
            creates.into_iter().partition(|item| item.command.key.is_some());
        for creates in [keyed, others] {
            operations.execute_changes(creates);
        }
    }

    /// Answers with the kept answer if an earlier create with the same key has one. Otherwise hashes the password.
    pub(super) fn hash_password(&mut self, operations: &Operations) -> Result<Outcome, Failure> {
        if let Some((key, _)) = &self.key
            && let Some(kept) = operations.find_kept_answer(key)?
        {
            return self.answer_repeat(operations, &kept);
        }
        self.hash = operations.hash_password(self.user.password.as_ref())?;
        Ok(Outcome::Continue)
    }

    /// Executes the create with a statement of its own. Returns the user that this create, or an earlier create with
    /// the same key, has stored.
    pub(crate) fn store(&self, operations: &Operations, deadline: Instant) -> Result<StoredUser, Failure> {
        match Create::execute_batch(&operations.pool, &[self], deadline) {
            Err(Failure::Error(Error::AlreadyExists)) => self.read_or_find_user(operations, None),
            rows => self.read_or_find_user(operations, rows?.first()),
        }
    }

    /// Reads the user from the row that a create has returned. If there is no row, the address or the key is taken:
    /// then finds the user of an earlier create with the same key, or fails with [`Error::AlreadyExists`].
    fn read_or_find_user(&self, operations: &Operations, row: Option<&Row>) -> Result<StoredUser, Failure> {
        if let Some(row) = row {
            return Ok(operations.read_stored_user(row)?);
        }
        let kept = self.key.as_ref().map_or(Ok(None), |(key, _)| operations.find_kept_answer(key))?;
        Ok(kept.ok_or(Error::AlreadyExists)?)
    }
}

impl Operations {
    /// Finds the answer that is kept for a key, unless the answer has expired. Takes one round trip. Fails with
    /// [`Error::CreatedUserDeleted`] if the user of the answer was deleted.
    fn find_kept_answer(&self, key: &KeyDigest) -> Result<Option<StoredUser>, Failure> {
        let rows = self.pool.execute(FIND_KEPT_ANSWER, &[(&key.0.as_slice(), Type::BYTEA)], None)?;
        Ok(rows.first().map(|row| self.read_stored_user(row)).transpose()?)
    }

    /// Reads the user from a row of a create or of a kept answer.
    fn read_stored_user(&self, row: &Row) -> Result<StoredUser, Error> {
        // The row has nulls if the user was deleted, because a delete erases the kept answers of its user.
        row.try_get::<_, Option<i64>>("id")?.ok_or(Error::CreatedUserDeleted)?;
        let (mut earlier_body, mut earlier_hash) = (None, None);
        if let Some(digest) = row.try_get::<_, Option<&[u8]>>("fingerprint")? {
            let digest = digest.try_into().map_err(|_| Error::Internal("a fingerprint is damaged".into()))?;
            earlier_body = Some(BodyFingerprint(digest));
            earlier_hash = row.try_get::<_, Option<String>>("password_hash")?.map(PasswordHash::from_stored);
        }
        Ok(StoredUser { user: self.read_user(row)?, earlier_body, earlier_hash })
    }
}

impl Change for Create {
    fn execute_batch(pool: &Pool, changes: &[&Self], deadline: Instant) -> Result<Vec<Row>, Failure> {
        if let [Create { user: NewUser { name, email, password: _ }, key: None, hash: None, .. }] = changes {
            return pool.execute(CREATE, &[(name, Type::TEXT), (email, Type::TEXT)], Some(deadline));
        }
        let (names, emails): (Vec<_>, Vec<_>) =
            changes.iter().map(|create| (&create.user.name, &create.user.email)).unzip();
        let hashes: Vec<_> =
            changes.iter().map(|create| create.hash.as_ref().map(PasswordHash::as_text)).collect();
        let keyed = changes.iter().map(|create| create.key.as_ref());
        let (keys, fingerprints): (Vec<_>, Vec<_>) =
            keyed.map(|key| key.map(|(key, body)| (&key.0[..], &body.0[..])).unzip()).unzip();
        let params: [Param; 5] = [
            (&names, Type::TEXT_ARRAY),
            (&emails, Type::TEXT_ARRAY),
            (&hashes, Type::TEXT_ARRAY),
            (&keys, Type::BYTEA_ARRAY),
            (&fingerprints, Type::BYTEA_ARRAY),
        ];
        if changes.iter().all(|create| create.hash.is_none() && create.key.is_none()) {
            pool.execute(CREATE_MANY, &params[..2], Some(deadline))
        } else {
            pool.execute(CREATE_WITH_KEYS, &params, Some(deadline))
        }
    }

    fn row_outcome(&mut self, operations: &Operations, row: Option<&Row>) -> Result<Outcome, Failure> {
        let created = self.read_or_find_user(operations, row)?;
        self.answer(operations, &created)
    }

    fn execute_unbatched(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure> {
        let created = self.store(operations, deadline)?;
        self.answer(operations, &created)
    }
}

impl Create {
    /// Answers with the created user, or goes on to compare this create with the earlier create of its key.
    fn answer(&mut self, operations: &Operations, created: &StoredUser) -> Result<Outcome, Failure> {
        if created.earlier_body.is_none() {
            Ok(created.answer().into())
        } else if self.hash.take().is_some() {
            // Continues in the lane of hashes, where a thread verifies the password against the hash of the earlier
            // create.
            Ok(Outcome::Continue)
        } else {
            self.answer_repeat(operations, created)
        }
    }

    /// Answers with the kept answer of an earlier create. Fails with [`Error::IdempotencyKeyReused`] if
    /// the earlier create had another body or password.
    fn answer_repeat(&self, operations: &Operations, kept: &StoredUser) -> Result<Outcome, Failure> {
        if self.key.map(|(_, own)| own) != kept.earlier_body {
            return Err(Error::IdempotencyKeyReused.into());
        }
        // Counts the password as an attempt, because the answer tells whether the password is right, as the answer to a
        // login does.
        if let (hash @ Some(_), Some(password)) = (kept.earlier_hash.as_ref(), &self.user.password) {
            let attempt = operations.throttle.admit(&self.user.email, self.peer.map(peer_network))?;
            if operations.use_hasher(hash, |hasher| hasher.verify(password, hash))? == PasswordMatch::None {
                attempt.mark_wrong();
                return Err(Error::IdempotencyKeyReused.into());
            }
        }
        Ok(kept.answer().with("Idempotency-Replayed", "true").into())
    }
}

impl StoredUser {
    /// Returns the answer 201 to a create that has stored this user.
    fn answer(&self) -> Response {
        let location = format!("/users/{}", self.user.id);
        Response::json(201, &self.user).with("Location", location).with("ETag", etag(self.user.revision()))
    }
}
