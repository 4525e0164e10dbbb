//! `PUT /users/{id}` and `PATCH /users/{id}`: changes a user.
//!
//! A missing user is answered 404 even if the body is invalid. So the user is looked up before a body is refused or a
//! password is hashed; in all other cases the statement of the change finds out.

use super::{Command, Lane, Needs, Outcome, find::Find, one};
use crate::app::App;
use crate::input::{self, validation::BodySchema};
use crate::users::user::{User, UserChanges};
use crate::{db::Update, error::Error, http::Request};

impl Update {
    /// Reads a PUT, or a PATCH, whose body has a schema.
    pub(super) fn parse(
        request: &Request,
        id: Option<i64>,
        patch: Option<&BodySchema>,
    ) -> Result<Command, Error> {
        let condition = input::condition(request)?;
        let id = id.ok_or(Error::NotFound)?;
        let body = input::body(request, patch.is_some()).and_then(|body| match patch {
            Some(schema) => schema.check(body),
            None => Ok(body),
        });
        Ok(match body.and_then(UserChanges::from_body) {
            Err(refusal) => Command::Find(Find::refuse(id, refusal)),
            Ok(changes) => {
                let is_single = changes.password.is_some() || !condition.is_simple();
                Command::Update(Update { id, changes, condition, hash: None, is_single })
            }
        })
    }

    pub(super) fn needs(&self) -> Needs {
        match (&self.hash, &self.changes.password) {
            (None, Some(Some(_))) => Needs::of(Lane::Hash),
            _ if self.is_single => Needs::row(Lane::Single, self.id),
            _ => Needs::row(Lane::Change, self.id),
        }
    }

    pub(super) fn answer(&mut self, updated: Option<User>) -> Outcome {
        self.is_single |= updated.is_none();
        Ok(updated.map(|user| one(200, &user)))
    }

    /// Looks the user up and hashes the new password.
    pub(super) fn hash(&mut self, app: &App) -> Outcome {
        let user = app.users.find_many(&[self.id])?.pop().ok_or(Error::NotFound)?;
        if !self.condition.holds(user.revision()) {
            return Err(Error::PreconditionFailed);
        }
        self.hash = app.hash(self.changes.password.as_ref().and_then(Option::as_ref))?;
        Ok(None)
    }
}
