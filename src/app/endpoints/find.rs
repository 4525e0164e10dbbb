//! `GET /users/{id}`: a user, or that the client has it already.

use super::{Outcome, Progress, Step, Task, one};
use crate::{
    app::{
        lanes::{Lane, Needs},
        preconditions::{Preconditions, Read, etag},
    },
    error::Error,
    http::{Request, Response},
    users::user::User,
};

/// A user that is asked for.
#[derive(Debug)]
pub(crate) struct Find {
    pub id: i64,
    preconditions: Preconditions,
}

pub(super) fn judge(request: &Request, id: Option<i64>) -> Result<Step, Error> {
    let preconditions = Preconditions::of(request)?;
    let find = Find { id: id.ok_or(Error::NotFound)?, preconditions };
    Ok(Step { needs: Needs::of(Lane::Find), task: Task::Find(find) })
}

impl Find {
    pub fn found(self, user: Option<&User>) -> Outcome {
        let user = user.ok_or(Error::NotFound)?;
        match self.preconditions.read(user.revision()) {
            Read::Answered => Ok(Progress::Done(one(200, user))),
            Read::NotModified => Ok(Progress::Done(Response::not_modified().with("ETag", etag(user)))),
            Read::Failed => Err(Error::PreconditionFailed),
        }
    }
}
