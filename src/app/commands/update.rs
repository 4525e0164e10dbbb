//! `PUT /users/{id}` and `PATCH /users/{id}`: changes a user.
//!
//! A missing user is answered 404 even if the body is invalid. So the user is looked up before a body is refused or a
//! password is hashed; in all other cases the statement of the change finds out.

use super::{Command, Outcome, Progress, find::Find, one, settle};
use crate::app::{App, Lane, Needs, fields::Preconditions};
use crate::db::{self, PasswordChange, Updated};
use crate::users::{password::PasswordHash, revision::Condition, user::UserChanges};
use crate::{error::Error, http::Request};
use serde_json::{Map, Value};
use std::time::Instant;

/// A change of a user.
#[derive(Debug)]
pub(crate) struct Update {
    id: i64,
    changes: UserChanges,
    condition: Condition,
    /// The hash of a new password, once it is made.
    hash: Option<PasswordHash>,
    /// It shares no statement: its address may be about to be taken by another transaction.
    is_single: bool,
}

impl Update {
    pub fn parse(
        request: &Request,
        id: Option<i64>,
        body: impl FnOnce(&Request) -> Result<Map<String, Value>, Error>,
    ) -> Result<Command, Error> {
        let condition = Preconditions::of(request)?.into_condition();
        let id = id.ok_or(Error::NotFound)?;
        Ok(match body(request).and_then(UserChanges::from_body) {
            Err(refusal) => Command::Find(Find::refuse(id, refusal)),
            Ok(changes) => {
                let is_single = changes.password.is_some() || !condition.is_simple();
                Command::Update(Update { id, changes, condition, hash: None, is_single })
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

    pub fn execute(app: &App, mut updates: Vec<(Update, Instant)>) -> Vec<Outcome> {
        if updates.len() == 1
            && let Some((update, deadline)) =
                updates.pop_if(|(update, _)| update.needs().lane != Lane::Change)
        {
            return vec![match update.needs().lane {
                Lane::Hash => update.hash(app),
                _ => update.store(app, deadline),
            }];
        }
        let given: Vec<_> = updates.iter().map(|(update, deadline)| update.statement(*deadline)).collect();
        let updated = app.users.update_many(&given);
        let settled = updates.into_iter().zip(updated);
        let answer = |update, updated| {
            Ok(match updated {
                Updated::User(user) => Progress::Done(one(200, &user)),
                Updated::Unbatched => Progress::Next(Command::Update(Update { is_single: true, ..update })),
            })
        };
        settled.map(|((update, _), updated)| settle(update, updated, Command::Update, answer)).collect()
    }

    /// Looks the user up and hashes the new password.
    fn hash(self, app: &App) -> Outcome {
        let users = app.users.find_many(&[self.id]);
        settle(self, users, Command::Update, |update, users| {
            let user = users.first().ok_or(Error::NotFound)?;
            if !update.condition.holds(user.revision()) {
                return Err(Error::PreconditionFailed);
            }
            let password = update.changes.password.as_ref().and_then(Option::as_ref);
            let hash = password.map(|password| app.hash(password)).transpose()?;
            Ok(Progress::Next(Command::Update(Update { hash, ..update })))
        })
    }

    fn store(self, app: &App, deadline: Instant) -> Outcome {
        let password = match (&self.hash, &self.changes.password) {
            (Some(hash), _) => PasswordChange::Set(hash.clone()),
            (None, Some(_)) => PasswordChange::Remove,
            (None, None) => PasswordChange::Keep,
        };
        let updated = app.users.update(&self.statement(deadline), &password);
        settle(self, updated, Command::Update, |_, user| Ok(Progress::Done(one(200, &user))))
    }

    fn statement(&self, deadline: Instant) -> db::Update<'_> {
        db::Update { id: self.id, values: self.changes.values(), condition: &self.condition, deadline }
    }
}
