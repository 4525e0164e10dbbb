//! `GET /users/{id}`: finds a user; 304 if the client has it already.

use super::{Item, Outcome, one};
use crate::app::App;
use crate::error::Error;
use crate::http::{Request, Response};
use crate::input::{self, etag};
use crate::users::{revision::Condition, user::User};

/// A user that is looked up.
#[derive(Debug)]
pub(crate) struct Find {
    id: i64,
    /// The condition of a read; or the refusal of a PUT or a PATCH, which is answered only if the user exists.
    then: Result<Condition, Error>,
}

impl Find {
    pub fn parse(request: &Request, id: Option<i64>) -> Result<Find, Error> {
        let condition = input::condition(request)?;
        Ok(Find { id: id.ok_or(Error::NotFound)?, then: Ok(condition) })
    }

    /// Looks up the user of a change whose body is refused.
    pub fn refuse(id: i64, refusal: Error) -> Find {
        Find { id, then: Err(refusal) }
    }

    /// Executes finds with one statement.
    pub fn execute(app: &App, finds: Vec<Item<Find>>) {
        let ids: Vec<i64> = finds.iter().map(|find| find.command.id).collect();
        let users = app.users.find_many(&ids);
        for Item { command, outcome, .. } in finds {
            *outcome = users.as_ref().map_err(Error::clone).and_then(|users| {
                let found = users.iter().find(|user| user.id == command.id);
                command.answer(found.ok_or(Error::NotFound)?)
            });
        }
    }

    fn answer(&self, user: &User) -> Outcome {
        let (condition, revision) = (self.then.as_ref().map_err(Error::clone)?, user.revision());
        if condition.holds(revision) {
            Ok(Some(one(200, user)))
        } else if condition.allows(revision) {
            Ok(Some(Response::not_modified().with("ETag", etag(revision))))
        } else {
            Err(Error::PreconditionFailed)
        }
    }
}
