//! `PUT /users/{id}` and `PATCH /users/{id}`: changes a user.
//!
//! A missing user is answered 404 even if the body is invalid. Therefore the user is looked up before a body is refused
//! or a password is hashed. For all other requests, the statement of the change finds out whether the user exists.

use super::{Change, Command, Find, Lane, Operations, Outcome, Step, answer_with, changed_row, etag_params};
use crate::db::{Failure, Pool, session::Param};
use crate::error::Error;
use crate::http::Request;
use crate::input::{self, validation::BodySchema};
use crate::users::password::PasswordHash;
use crate::users::revision::Condition;
use crate::users::user::{User, UserChanges};
use postgres::{Row, types::Type};
use std::time::Instant;

/// A request to change a user.
#[derive(Debug)]
pub struct Update {
    /// The id of the user to be changed.
    pub id: i64,
    /// The fields to be changed. An update in a batch changes no password.
    pub changes: UserChanges,
    /// The precondition (`If-Match`). If the condition does not [fit a batch](Condition::fits_batch), the request is
    /// executed alone.
    pub condition: Condition,
    /// The hash of the new password; `None` until the password is hashed, or if no password is set.
    pub hash: Option<PasswordHash>,
    /// True if the update is executed alone: the update changes the password, has a condition that does not fit a
    /// batch, or was left out of a batch because of a new address.
    pub is_unbatched: bool,
}

impl Update {
    /// Parses a PATCH if `patch_schema`, the schema of its body, is given; else a PUT. Returns a look-up of the user if
    /// the body is refused, because a missing user is answered 404.
    pub(crate) fn parse(
        request: &Request,
        id: Option<i64>,
        patch_schema: Option<&BodySchema>,
    ) -> Result<Command, Error> {
        let condition = input::parse_condition(request)?;
        let id = id.ok_or(Error::NotFound)?;
        let body = input::parse_body(request, patch_schema.is_some()).and_then(|body| match patch_schema {
            Some(schema) => schema.validate(body),
            None => Ok(body),
        });
        Ok(match body.and_then(UserChanges::from_body) {
            Err(refusal) => Command::Find(Find::with_refusal(id, refusal)),
            Ok(changes) => {
                let is_unbatched = changes.password.is_some() || !condition.fits_batch();
                Command::Update(Update { id, changes, condition, hash: None, is_unbatched })
            }
        })
    }

    pub(super) fn next_step(&self) -> Step {
        match (&self.hash, &self.changes.password) {
            (None, Some(Some(_))) => Step::in_lane(Lane::Hash),
            _ if self.is_unbatched => Step::changing_user(Lane::Single, self.id),
            _ => Step::changing_user(Lane::Change, self.id),
        }
    }
}

/// Changes a user. Returns no row if nothing was changed.
pub(crate) const UPDATE: &str = "
    update users
    set name = coalesce($5::text, name), email = coalesce($6::text, email),
        updated_at = least(greatest(now(), updated_at + interval '1 microsecond'),
            timestamptz '9999-12-31T23:59:59.999999Z')
    where id = $1 and ($2::boolean or version = $3::bigint and updated_at = $4::timestamptz)
        and (name::text <> coalesce($5::text, name) or email::text <> coalesce($6::text, email))
    returning id, name, email, created_at, updated_at, version";

/// Changes a user and the password. $7: the hash of the new password; null removes the password.
///
/// The `delete` does not see a password that another transaction stores while this statement waits for its lock.
/// Therefore a stored password changes the version of the user, and the caller removes a password only from the version
/// that it has read. The statement locks the user first, even if nothing is to be changed, so that it meets the new
/// version.
pub(crate) const UPDATE_PASSWORD: &str = "
    with target as materialized (
        select id from users where id = $1 and ($2::boolean or version = $3::bigint and updated_at = $4::timestamptz)
        for no key update
    ), updated as (
        update users
        set name = coalesce($5::text, name), email = coalesce($6::text, email),
            version = version + bigint '1',  -- has the trigger draw another one, also at the last moment that there is
            updated_at = least(greatest(now(), updated_at + interval '1 microsecond'),
                timestamptz '9999-12-31T23:59:59.999999Z')
        where id = any (array(select id from target))
            and ($7::text is not null or exists (select from credentials where user_id = $1)
                or name::text <> coalesce($5::text, name) or email::text <> coalesce($6::text, email))
        returning id, name, email, created_at, updated_at, version
    ), stored as (
        insert into credentials (user_id, password_hash) select id, $7 from updated where $7::text is not null
        on conflict (user_id) do update set password_hash = excluded.password_hash
    ), removed as (
        delete from credentials where $7::text is null and user_id = any (array(select id from updated))
    )
    select * from updated";

/// Changes several users. Returns the outcome of each change: `locked` if another transaction has locked the user, and
/// `by itself` for a new address, because such a change may have to wait for a transaction that takes the address.
/// Locks only rows that will change, because a lock is written and committed like a change.
pub(crate) const UPDATE_MANY: &str = r#"
    with given as materialized (
        select * from unnest($1::bigint[], $2::boolean[], $3::bigint[], $4::timestamptz[], $5::text[], $6::text[])
            with ordinality as given (asked, if_any, if_version, if_updated, new_name, new_email, position)
    ), target as materialized (
        select u.id, coalesce(given.new_name, u.name) as name, coalesce(given.new_email, u.email) as email
        from given, lateral (
            select * from users
            where id = given.asked and (given.if_any or version = given.if_version and updated_at = given.if_updated)
                and (name::text <> coalesce(given.new_name, name) or email::text <> coalesce(given.new_email, email))
                and lower(email::text collate "C") = lower(coalesce(given.new_email, email) collate "C")
            limit 1 for no key update skip locked) u
    ), updated as (
        update users u set name = t.name, email = t.email,
            updated_at = least(greatest(now(), u.updated_at + interval '1 microsecond'),
                timestamptz '9999-12-31T23:59:59.999999Z')
        from target t where u.id = any (array(select id from target)) and t.id = u.id
        returning u.*
    )
    select coalesce(u.id, s.id) as id, coalesce(u.name, s.name) as name, coalesce(u.email, s.email) as email,
        coalesce(u.created_at, s.created_at) as created_at, coalesce(u.updated_at, s.updated_at) as updated_at,
        coalesce(u.version, s.version) as version, given.position,
        case when u.id is not null then 'done' when s.id is null then 'missing'
            when (given.if_any or s.version = given.if_version and s.updated_at = given.if_updated) is not true
                then 'precondition failed'
            when lower(s.email::text collate "C") <> lower(coalesce(given.new_email, s.email) collate "C") then 'by itself'
            when s.name::text = coalesce(given.new_name, s.name) and s.email::text = coalesce(given.new_email, s.email) then 'done'
            when given.asked = any (array(select id from target)) then 'by itself'  -- a trigger has left it out
            else 'locked' end as outcome
    from given left join updated u on u.id = given.asked
        left join lateral (select * from users where id = given.asked limit 1) s on true"#;

impl Update {
    /// Hashes the new password, after a look-up: fails if the user is missing or does not meet the precondition.
    pub(super) fn hash_password(&mut self, operations: &Operations) -> Result<Outcome, Failure> {
        operations.find_user(self.id, &self.condition)?;
        self.hash = operations.hash_password(self.changes.password.as_ref().and_then(Option::as_ref))?;
        Ok(Outcome::Continue)
    }

    /// Executes the update with a statement of its own. Returns the user.
    pub(super) fn apply(&self, operations: &Operations, deadline: Instant) -> Result<User, Failure> {
        let Update { id, changes: UserChanges { name, email, password }, condition, hash, .. } = self;
        let is_read_first = matches!(password, Some(None)) || !condition.fits_batch();
        let mut before = if is_read_first { Some(operations.find_user(*id, condition)?) } else { None };
        loop {
            let (is_any, version, updated_at) = etag_params(condition, before.as_ref());
            let hash = hash.as_ref().map(PasswordHash::as_text);
            let params: [Param; 7] = [
                (id, Type::INT8),
                (&is_any, Type::BOOL),
                (&version, Type::INT8),
                (&updated_at, Type::TIMESTAMPTZ),
                (name, Type::TEXT),
                (email, Type::TEXT),
                (&hash, Type::TEXT),
            ];
            let (sql, params) = match password {
                None => (UPDATE, &params[..6]),
                Some(_) => (UPDATE_PASSWORD, &params[..]),
            };
            if let [row] = &operations.pool.execute(sql, params, Some(deadline))?[..] {
                return Ok(operations.read_user(row)?);
            }
            // Answers an update that alters nothing with the committed record, even if another transaction has locked
            // the record.
            let user = operations.find_user(*id, condition)?;
            let has_all_values = has_all_values(&user, &self.changes);
            match before {
                _ if has_all_values && password.is_none() => return Ok(user),
                Some(before) if before.revision() != user.revision() => return Err(Failure::Contended),
                // There was no password to remove.
                Some(_) if has_all_values && matches!(password, Some(None)) => return Ok(user),
                Some(_) => return Err(super::refused_by_trigger(sql)),
                None => before = Some(user),
            }
        }
    }
}

/// Returns true if the user already has all values that the changes set, apart from the password.
fn has_all_values(user: &User, changes: &UserChanges) -> bool {
    // Names all fields, so that the compiler reports a new field that is not compared here.
    let UserChanges { name, email, password: _ } = changes;
    name.as_ref().is_none_or(|name| *name == user.name)
        && email.as_ref().is_none_or(|email| *email == user.email)
}

impl Change for Update {
    fn execute_batch(pool: &Pool, changes: &[&Self], deadline: Instant) -> Result<Vec<Row>, Failure> {
        let ids: Vec<i64> = changes.iter().map(|update| update.id).collect();
        let tags = changes.iter().map(|update| etag_params(&update.condition, None));
        let (any, versions, times): (Vec<_>, Vec<_>, Vec<_>) = tags.collect();
        let (names, emails): (Vec<_>, Vec<_>) =
            changes.iter().map(|update| (&update.changes.name, &update.changes.email)).unzip();
        let params: [Param; 6] = [
            (&ids, Type::INT8_ARRAY),
            (&any, Type::BOOL_ARRAY),
            (&versions, Type::INT8_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
            (&names, Type::TEXT_ARRAY),
            (&emails, Type::TEXT_ARRAY),
        ];
        pool.execute(UPDATE_MANY, &params, Some(deadline))
    }

    fn row_outcome(&mut self, operations: &Operations, row: Option<&Row>) -> Result<Outcome, Failure> {
        let row = changed_row(row)?;
        self.is_unbatched |= row.is_none();
        Ok(match row {
            Some(row) => answer_with(200, &operations.read_user(row)?).into(),
            None => Outcome::Continue,
        })
    }

    fn execute_unbatched(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure> {
        Ok(answer_with(200, &self.apply(operations, deadline)?).into())
    }
}
