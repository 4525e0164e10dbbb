//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::{Outcome, Progress, Step, Task, hand_back};
use crate::{
    app::{
        lanes::{Lane, Needs},
        preconditions::Preconditions,
    },
    db,
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
        false => Step { needs: Needs::row(Lane::Single, id), task: delete.alone() },
    })
}

impl Delete {
    fn alone(self) -> Task {
        Task::alone(move |app, deadline| {
            let deleted = app.users.delete(&db::Delete { id: self.id, condition: &self.condition, deadline });
            hand_back(self, deleted, Delete::alone, Delete::deleted)
        })
    }

    pub fn deleted(self, (): ()) -> Outcome {
        Ok(Progress::Done(Response::no_content()))
    }
}
