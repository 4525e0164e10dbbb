//! `GET /users/{id}`: finds a user; 304 if the client has it already.

use super::{Item, Outcome, one};
use crate::app::fields::{Preconditions, etag};
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
        let preconditions = Preconditions::parse(request)?;
        Ok(Find { id: id.ok_or(Error::NotFound)?, then: Ok(preconditions) })
    }

    /// Looks up the user of a change whose body is refused.
    pub fn refuse(id: i64, refusal: Error) -> Find {
        Find { id, then: Err(refusal) }
    }

    pub fn needs(&self) -> Needs {
        Needs::of(Lane::Find)
    }

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
        let preconditions = self.then.as_ref().map_err(Error::clone)?;
        Ok(Some(match preconditions.is_known(user.revision())? {
            true => Response::not_modified().with("ETag", etag(user)),
            false => one(200, user),
        }))
    }
}
