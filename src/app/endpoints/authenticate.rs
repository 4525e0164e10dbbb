//! `POST /users/authenticate`: whether a password is that of a user, whom it then answers with.
//!
//! An address without a user takes the same steps as one with a user, and the same time.

use super::{Outcome, Progress, Rules, Step, Task};
use crate::{
    app::{
        App,
        content::json,
        hashing::Verdict,
        lanes::{Lane, Needs},
        throttle::Attempt,
    },
    config::Secret,
    error::Error,
    http::{Request, Response},
    users::{password::PasswordHash, user::User},
};
use std::time::Instant;

/// An address and a password, whose user is looked up.
#[derive(Debug)]
pub(crate) struct Login {
    pub email: String,
    password: Secret,
    attempt: Attempt,
}

/// The same after the look-up: `None` where no user has that address.
#[derive(Debug)]
pub(crate) struct Verify(Login, Option<Box<User>>);

/// A user whose password was right and whose hash is outdated: that hash, and the one to store instead.
#[derive(Debug)]
pub(crate) struct Rehash(Box<User>, PasswordHash, PasswordHash);

pub(super) fn judge(request: &Request, rules: &Rules) -> Result<Step, Error> {
    let body = rules.validation.authenticate(json(request)?)?;
    let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
    let (email, password) = (text("email").to_owned(), text("password").into());
    let attempt = rules.attempt(&email, request.peer)?;
    Ok(Step { needs: Needs::of(Lane::Find), task: Task::Login(Login { email, password, attempt }) })
}

impl Login {
    pub fn found(self, user: Option<User>) -> Outcome {
        let needs = Needs::of(Lane::Hash);
        Ok(Progress::Next(Step { needs, task: Task::Verify(Verify(self, user.map(Box::new))) }))
    }
}

impl Verify {
    pub fn execute(self, app: &App) -> Outcome {
        let Verify(Login { password, attempt, .. }, user) = self;
        let credential = user.as_ref().map(|user| user.credential.get()).transpose()?.flatten();
        let hash = credential.map(|credential| credential.password_hash.clone());
        match (app.hashing.log_in(&password, hash.as_ref())?, user, hash) {
            (Verdict::Right, Some(user), _) => Ok(Progress::Done(Response::json(200, &user))),
            (Verdict::Outdated(new), Some(user), Some(old)) => {
                let task = Task::Rehash(Rehash(user, old, new));
                Ok(Progress::Next(Step { needs: Needs::of(Lane::Single), task }))
            }
            _ => {
                attempt.wrong();
                Err(Error::InvalidCredentials)
            }
        }
    }
}

impl Rehash {
    /// The login has succeeded, whatever becomes of this: the next one tries again.
    pub fn execute(self, app: &App, deadline: Instant) -> Outcome {
        let Rehash(user, old, new) = self;
        match app.users.replace_hash(user.id, &old, &new, deadline) {
            Ok(()) | Err(Error::Contended) => {}
            Err(error) => error.log(None),
        }
        Ok(Progress::Done(Response::json(200, &user)))
    }
}
