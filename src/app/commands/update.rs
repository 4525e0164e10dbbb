//! `PUT /users/{id}` and `PATCH /users/{id}`: changes a user.
//!
//! A missing user is answered 404 even if the body is invalid. So the user is looked up before a body is refused or a
//! password is hashed; in all other cases the statement of the change finds out.

use super::{Command, Item, Outcome, find::Find, one};
use crate::app::{App, Lane, Needs, fields, validation::BodySchema};
use crate::db;
use crate::users::{password::PasswordHash, revision::Condition, user::UserChanges};
use crate::{error::Error, http::Request};

/// A change of a user.
#[derive(Debug)]
pub(crate) struct UpdateUser {
    id: i64,
    changes: UserChanges,
    condition: Condition,
    /// The hash of a new password, once it is made.
    hash: Option<PasswordHash>,
    /// The change shares no statement: another transaction may be about to take its address.
    is_single: bool,
}

impl UpdateUser {
    /// Reads a PUT, or a PATCH, whose body has a schema.
    pub fn parse(request: &Request, id: Option<i64>, patch: Option<&BodySchema>) -> Result<Command, Error> {
        let condition = fields::condition(request)?;
        let id = id.ok_or(Error::NotFound)?;
        let body = fields::body(request, patch.is_some()).and_then(|body| match patch {
            Some(schema) => schema.check(body),
            None => Ok(body),
        });
        Ok(match body.and_then(UserChanges::from_body) {
            Err(refusal) => Command::Find(Find::refuse(id, refusal)),
            Ok(changes) => {
                let is_single = changes.password.is_some() || !condition.is_simple();
                Command::Update(UpdateUser { id, changes, condition, hash: None, is_single })
            }
        })
    }

    pub fn needs(&self) -> Needs {
        match (&self.hash, &self.changes.password) {
            (None, Some(Some(_))) => Needs::of(Lane::Hash),
            _ if self.is_single => Needs::row(Lane::Single, self.id),
            _ => Needs::row(Lane::Change, self.id),
        }
    }

    pub fn execute(app: &App, updates: Vec<Item<UpdateUser>>) {
        let given = updates.iter().map(|Item { command, deadline, .. }| {
            let UpdateUser { id, changes, condition, hash, .. } = &**command;
            let UserChanges { name, email, password } = changes;
            let (name, email) = (name.as_deref(), email.as_deref());
            let password = password.as_ref().map(|_| hash.as_ref());
            db::Update { id: *id, name, email, password, condition, deadline: *deadline }
        });
        let updated = app.users.update_many(&given.collect::<Vec<_>>());
        for (Item { command, outcome, .. }, updated) in updates.into_iter().zip(updated) {
            command.is_single |= matches!(updated, Ok(None));
            *outcome = updated.map(|user| user.map(|user| one(200, &user)));
        }
    }

    /// Looks the user up and hashes the new password.
    pub fn hash(&mut self, app: &App) -> Outcome {
        let user = app.users.find_many(&[self.id])?.pop().ok_or(Error::NotFound)?;
        if !self.condition.holds(user.revision()) {
            return Err(Error::PreconditionFailed);
        }
        self.hash = app.hash(self.changes.password.as_ref().and_then(Option::as_ref))?;
        Ok(None)
    }
}
