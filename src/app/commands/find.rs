//! `GET /users/{id}`: a user, or that the client has it already.

use super::{Command, Outcome, Progress, failed, one};
use crate::app::fields::{Preconditions, Read, etag};
use crate::app::{App, Lane, Needs};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::users::user::User;

/// A user that is looked up.
#[derive(Debug)]
pub(crate) struct Find {
    id: i64,
    /// The preconditions of a read; or the refusal of a PUT or a PATCH, before which a missing user is told.
    then: Result<Preconditions, Error>,
}

impl Find {
    pub fn parse(request: &Request, id: Option<i64>) -> Result<Find, Error> {
        let preconditions = Preconditions::of(request)?;
        Ok(Find { id: id.ok_or(Error::NotFound)?, then: Ok(preconditions) })
    }

    /// Looks up the user of a change whose body is refused.
    pub fn refuse(id: i64, refusal: Error) -> Find {
        Find { id, then: Err(refusal) }
    }

    pub fn needs(&self) -> Needs {
        Needs::of(Lane::Find)
    }

    pub fn execute(app: &App, finds: Vec<Find>) -> Vec<Outcome> {
        let ids: Vec<i64> = finds.iter().map(|find| find.id).collect();
        let users = match app.users.find_many(&ids) {
            Ok(users) => users,
            Err(error) => return failed(&error, finds, Command::Find),
        };
        let answer = |find: Find| {
            let at = users.binary_search_by_key(&find.id, |user| user.id);
            find.answer(at.ok().map(|at| &users[at]))
        };
        finds.into_iter().map(answer).collect()
    }

    fn answer(self, user: Option<&User>) -> Outcome {
        let user = user.ok_or(Error::NotFound)?;
        match self.then?.read(user.revision()) {
            Read::Answered => Ok(Progress::Done(one(200, user))),
            Read::NotModified => Ok(Progress::Done(Response::not_modified().with("ETag", etag(user)))),
            Read::Failed => Err(Error::PreconditionFailed),
        }
    }
}
