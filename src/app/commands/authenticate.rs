//! `POST /users/authenticate`: whether a password is that of a user, whom it then answers with.
//!
//! An address without a user takes the same steps as one with a user, and the same time.

use super::{Command, Outcome, Progress, Rules, settle};
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

/// An address and a password.
#[derive(Debug)]
pub(crate) struct Authenticate {
    email: String,
    password: Secret,
    attempt: Attempt,
    outdated: Option<Outdated>,
}

/// A user whose password was right and whose hash is outdated.
#[derive(Debug)]
struct Outdated {
    user: Box<User>,
    old: PasswordHash,
    new: PasswordHash,
}

impl Authenticate {
    pub fn parse(request: &Request, rules: &Rules) -> Result<Authenticate, Error> {
        let body = rules.validation.authenticate(json(request)?)?;
        let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
        let (email, password) = (text("email").to_owned(), text("password").into());
        let attempt = rules.attempt(&email, request.peer)?;
        Ok(Authenticate { email, password, attempt, outdated: None })
    }

    pub fn needs(&self) -> Needs {
        Needs::of(if self.outdated.is_some() { Lane::Single } else { Lane::Hash })
    }

    pub fn execute(self, app: &App, deadline: Instant) -> Outcome {
        if let Some(Outdated { user, old, new }) = self.outdated {
            // The login has succeeded, whatever becomes of the new hash: the next one tries again.
            match app.users.replace_hash(user.id, &old, &new, deadline) {
                Ok(()) | Err(Error::Contended) => {}
                Err(error) => error.log(None),
            }
            return Ok(Progress::Done(Response::json(200, &user)));
        }
        let found = app.users.find_by_email_with_credential(&[&self.email]);
        settle(self, found, Command::Authenticate, |login, mut found| {
            login.verify(app, found.pop().flatten())
        })
    }

    fn verify(self, app: &App, user: Option<User>) -> Outcome {
        let credential = user.as_ref().map(|user| user.credential.get()).transpose()?.flatten();
        let hash = credential.map(|credential| credential.password_hash.clone());
        match (app.hashing.log_in(&self.password, hash.as_ref())?, user, hash) {
            (Verdict::Right, Some(user), _) => Ok(Progress::Done(Response::json(200, &user))),
            (Verdict::Outdated(new), Some(user), Some(old)) => {
                let outdated = Some(Outdated { user: Box::new(user), old, new });
                Ok(Progress::Next(Command::Authenticate(Authenticate { outdated, ..self })))
            }
            _ => {
                self.attempt.wrong();
                Err(Error::InvalidCredentials)
            }
        }
    }
}
