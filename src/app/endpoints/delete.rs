//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::{Outcome, Progress, Step, Task};
use crate::{
    app::{
        lanes::{Lane, Needs},
        preconditions::Preconditions,
    },
    error::Error,
    http::{Request, Response},
    users::revision::Condition,
};

/// A user that is to be removed.
#[derive(Debug)]
pub(crate) struct Delete {
    pub id: i64,
    pub condition: Condition,
}

pub(super) fn judge(request: &Request, id: Option<i64>) -> Result<Step, Error> {
    let condition = Preconditions::of(request)?.into_condition();
    let id = id.ok_or(Error::NotFound)?;
    let is_simple = condition.is_simple();
    let delete = Delete { id, condition };
    Ok(match is_simple {
        true => Step { needs: Needs::row(Lane::Change, id), task: Task::Delete(delete) },
        false => Step { needs: Needs::row(Lane::Single, id), task: Task::DeleteAlone(delete) },
    })
}

impl Delete {
    pub fn deleted(self, (): ()) -> Outcome {
        Ok(Progress::Done(Response::no_content()))
    }
}
