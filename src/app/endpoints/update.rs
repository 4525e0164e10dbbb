//! `PUT` and `PATCH /users/{id}`: change some fields of a user, in the states that the request allows.
//!
//! An unknown id is answered 404 even where the body is invalid. So the user is looked up before a body is refused or a
//! password hashed; in all other cases the statement of the change finds out.

use super::{Outcome, Progress, Step, Task, hand_back, one};
use crate::{
    app::{
        App,
        lanes::{Lane, Needs},
        preconditions::Preconditions,
    },
    config::Secret,
    db::{self, PasswordChange, Updated},
    error::Error,
    http::Request,
    users::{
        revision::Condition,
        user::{User, UserChanges},
    },
};
use serde_json::{Map, Value};
use std::time::Instant;

/// A change of a user that leaves its password as it is.
#[derive(Debug)]
pub(crate) struct Update {
    pub id: i64,
    pub changes: UserChanges,
    pub condition: Condition,
}

/// A change whose user is looked up: of a password, or one whose body is refused.
#[derive(Debug)]
pub(crate) struct FindChanged {
    pub id: i64,
    change: Result<(Update, Secret), Error>,
}

/// A change whose password is hashed.
#[derive(Debug)]
pub(crate) struct HashChange(Update, Secret);

/// A change that is never batched: of a password, of an address, or on several states.
#[derive(Debug)]
pub(crate) struct UpdateAlone(Update, PasswordChange);

pub(super) fn judge(
    request: &Request,
    id: Option<i64>,
    body: impl FnOnce(&Request) -> Result<Map<String, Value>, Error>,
) -> Result<Step, Error> {
    let condition = Preconditions::of(request)?.into_condition();
    let id = id.ok_or(Error::NotFound)?;
    let mut changes = match body(request).and_then(UserChanges::from_body) {
        Ok(changes) => changes,
        Err(refusal) => {
            let find = FindChanged { id, change: Err(refusal) };
            return Ok(Step { needs: Needs::of(Lane::Find), task: Task::FindChanged(find) });
        }
    };
    let password = changes.password.take();
    let update = Update { id, changes, condition };
    Ok(match password {
        None if update.condition.is_simple() => {
            Step { needs: Needs::row(Lane::Change, id), task: Task::Update(update) }
        }
        None => update.alone(PasswordChange::Keep),
        Some(None) => update.alone(PasswordChange::Remove),
        Some(Some(password)) => {
            let find = FindChanged { id, change: Ok((update, password)) };
            Step { needs: Needs::row(Lane::Find, id), task: Task::FindChanged(find) }
        }
    })
}

impl Update {
    fn alone(self, password: PasswordChange) -> Step {
        Step {
            needs: Needs::row(Lane::Single, self.id),
            task: Task::UpdateAlone(UpdateAlone(self, password)),
        }
    }

    pub fn updated(self, updated: Updated) -> Outcome {
        Ok(match updated {
            Updated::User(user) => Progress::Done(one(200, &user)),
            Updated::Unbatched => Progress::Next(self.alone(PasswordChange::Keep)),
        })
    }
}

impl FindChanged {
    pub fn found(self, user: Option<&User>) -> Outcome {
        let user = user.ok_or(Error::NotFound)?;
        let (update, password) = self.change?;
        if !update.condition.holds(user.revision()) {
            return Err(Error::PreconditionFailed);
        }
        let task = Task::HashChange(HashChange(update, password));
        Ok(Progress::Next(Step { needs: Needs::row(Lane::Hash, self.id), task }))
    }
}

impl HashChange {
    pub fn execute(self, app: &App) -> Outcome {
        let hash = app.hashing.hash(&self.1)?;
        Ok(Progress::Next(self.0.alone(PasswordChange::Set(hash))))
    }
}

impl UpdateAlone {
    pub fn execute(self, app: &App, deadline: Instant) -> Outcome {
        let UpdateAlone(Update { id, changes, condition }, password) = &self;
        let update = db::Update { id: *id, values: changes.values(), condition, deadline };
        let updated = app.users.update(&update, password);
        hand_back(self, updated, Task::UpdateAlone, |_, user| Ok(Progress::Done(one(200, &user))))
    }
}
