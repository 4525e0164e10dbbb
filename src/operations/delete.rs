//! `DELETE /users/{id}`: deletes a user, if the user's revision meets the precondition.

use super::{Change, Lane, Operations, Outcome, Step, changed_row, etag_params, refused_by_trigger};
use crate::db::{Failure, Pool, session::Param};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::input::parse_condition;
use crate::users::revision::Condition;
use postgres::{Row, types::Type};
use std::time::Instant;

/// A request to delete a user.
#[derive(Debug)]
pub struct Delete {
    /// The id of the user to be deleted.
    pub id: i64,
    /// The precondition (`If-Match`). If the condition does not [fit a batch](Condition::fits_batch), the request is
    /// executed alone.
    pub condition: Condition,
}

impl Delete {
    pub(crate) fn parse(request: &Request, id: Option<i64>) -> Result<Delete, Error> {
        let condition = parse_condition(request)?;
        Ok(Delete { id: id.ok_or(Error::NotFound)?, condition })
    }

    pub(super) fn next_step(&self) -> Step {
        let lane = if self.condition.fits_batch() { Lane::Change } else { Lane::Single };
        Step::changing_user(lane, self.id)
    }
}

/// Deletes a user at an allowed revision. Returns no row if nothing was deleted.
pub(crate) const DELETE: &str = "
    delete from users where id = $1 and ($2::boolean or version = $3::bigint and updated_at = $4::timestamptz) returning id";

/// Deletes several users. Returns the outcome of each delete: `locked` for a user that another transaction has locked,
/// instead of waiting for the lock.
pub(crate) const DELETE_MANY: &str = "
    with given as materialized (
        select * from unnest($1::bigint[], $2::boolean[], $3::bigint[], $4::timestamptz[])
            with ordinality as given (asked, if_any, if_version, if_updated, position)
    ), target as materialized (
        select u.id from given, lateral (
            select id from users
            where id = given.asked and (given.if_any or version = given.if_version and updated_at = given.if_updated)
            limit 1 for update skip locked) u
    ), deleted as (
        delete from users where id = any (array(select id from target)) returning id
    )
    select given.position,
        case when d.id is not null then 'done' when s.id is null then 'missing'
            when (given.if_any or s.version = given.if_version and s.updated_at = given.if_updated) is not true
                then 'precondition failed'
            when given.asked = any (array(select id from target)) then 'refused'  -- a trigger has kept it
            else 'locked' end as outcome
    from given left join deleted d on d.id = given.asked
        left join lateral (select * from users where id = given.asked limit 1) s on true";

impl Change for Delete {
    fn execute_batch(pool: &Pool, changes: &[&Self], deadline: Instant) -> Result<Vec<Row>, Failure> {
        let ids: Vec<i64> = changes.iter().map(|delete| delete.id).collect();
        let tags = changes.iter().map(|delete| etag_params(&delete.condition, None));
        let (any, versions, times): (Vec<_>, Vec<_>, Vec<_>) = tags.collect();
        let params: [Param; 4] = [
            (&ids, Type::INT8_ARRAY),
            (&any, Type::BOOL_ARRAY),
            (&versions, Type::INT8_ARRAY),
            (&times, Type::TIMESTAMPTZ_ARRAY),
        ];
        pool.execute(DELETE_MANY, &params, Some(deadline))
    }

    fn row_outcome(&mut self, _: &Operations, row: Option<&Row>) -> Result<Outcome, Failure> {
        changed_row(row)?;
        Ok(Response::no_content().into())
    }

    fn execute_unbatched(&mut self, operations: &Operations, deadline: Instant) -> Result<Outcome, Failure> {
        let Delete { id, condition } = self;
        let before = if condition.fits_batch() { None } else { Some(operations.find_user(*id, condition)?) };
        let (is_any, version, updated_at) = etag_params(condition, before.as_ref());
        let params: [Param; 4] = [
            (id, Type::INT8),
            (&is_any, Type::BOOL),
            (&version, Type::INT8),
            (&updated_at, Type::TIMESTAMPTZ),
        ];
        if !operations.pool.execute(DELETE, &params, Some(deadline))?.is_empty() {
            return Ok(Response::no_content().into());
        }
        let user = operations.find_user(*id, condition)?;
        // If the user has changed since it was read, a retry may succeed.
        let has_changed = before.is_some_and(|before| before.revision() != user.revision());
        Err(if has_changed { Failure::Contended } else { refused_by_trigger(DELETE) })
    }
}
