//! `PUT /users/{id}` and `PATCH /users/{id}`: changes a user.
//!
//! A missing user is answered 404 even if the body is invalid. So the user is looked up before a body is refused or a
//! password is hashed; in all other cases the statement of the change finds out.

use super::{Command, Item, Outcome, find::Find, one};
use crate::app::{App, Lane, Needs, fields::Preconditions};
use crate::db;
use crate::users::{password::PasswordHash, revision::Condition, user::UserChanges};
use crate::{error::Error, http::Request};
use serde_json::{Map, Value};
use std::time::Instant;

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
    pub fn parse(
        request: &Request,
        id: Option<i64>,
        body: impl FnOnce(&Request) -> Result<Map<String, Value>, Error>,
    ) -> Result<Command, Error> {
        let condition = Preconditions::parse(request)?.into_condition();
        let id = id.ok_or(Error::NotFound)?;
        Ok(match body(request).and_then(UserChanges::from_body) {
            Err(refusal) => Command::Find(Find::refuse(id, refusal)),
            Ok(changes) => {
                let is_single = changes.password.is_some() || !condition.is_simple();
                Command::Update(UpdateUser { id, changes, condition, hash: None, is_single })
            }
        })
    }

    pub fn needs(&self) -> Needs {
        let lane = match (&self.hash, &self.changes.password) {
            (None, Some(Some(_))) => Lane::Hash,
            _ if self.is_single => Lane::Single,
            _ => Lane::Change,
        };
        Needs::row(lane, self.id)
    }

    pub fn execute(app: &App, mut updates: Vec<Item<UpdateUser>>) {
        if let [Item { command, outcome, .. }] = &mut updates[..]
            && command.needs().lane == Lane::Hash
        {
            **outcome = command.hash(app);
            return;
        }
        let given: Vec<_> = updates.iter().map(|update| update.command.statement(update.deadline)).collect();
        let updated = app.users.update_many(&given);
        for (Item { command, outcome, .. }, updated) in updates.into_iter().zip(updated) {
            command.is_single |= matches!(updated, Ok(None));
            *outcome = updated.map(|user| user.map(|user| one(200, &user)));
        }
    }

    /// Looks the user up and hashes the new password.
    fn hash(&mut self, app: &App) -> Outcome {
        let user = app.users.find_many(&[self.id])?.pop().ok_or(Error::NotFound)?;
        if !self.condition.holds(user.revision()) {
            return Err(Error::PreconditionFailed);
        }
        self.hash = app.hash(self.changes.password.as_ref().and_then(Option::as_ref))?;
        Ok(None)
    }

    fn statement(&self, deadline: Instant) -> db::Update<'_> {
        let (id, values, condition) = (self.id, self.changes.values(), &self.condition);
        let password = self.changes.password.as_ref().map(|_| self.hash.as_ref());
        db::Update { id, values, password, condition, deadline }
    }
}
