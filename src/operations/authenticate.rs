//! `POST /users/authenticate`: checks the password of a user, and answers with the user if it is right.
//!
//! An address without a user takes the same steps as one with a user, and the same time.

use super::{Lane, Needs, Outcome};
use crate::app::App;
use crate::config::{PeerKey, Secret, counted_as};
use crate::http::{Request, Response};
use crate::users::password::{Match, PasswordHash};
use crate::{error::Error, input, users::user::User};
use std::time::Instant;

/// An address and a password.
#[derive(Debug)]
pub(crate) struct Authenticate {
    email: String,
    password: Secret,
    peer: PeerKey,
    /// A user whose password was right, with the outdated hash and the new one.
    outdated: Option<Box<(User, PasswordHash, PasswordHash)>>,
}

impl Authenticate {
    pub fn parse(request: &Request, app: &App) -> Result<Authenticate, Error> {
        let body = app.schemas.authenticate.check(input::body(request, false)?)?;
        let text = |key: &str| body.get(key).and_then(|value| value.as_str()).unwrap_or_default();
        let (email, password) = (text("email").to_owned(), text("password").into());
        let peer = request.peer.map(counted_as);
        app.throttle.check(&email, peer)?;
        Ok(Authenticate { email, password, peer, outdated: None })
    }

    pub fn needs(&self) -> Needs {
        Needs::of(if self.outdated.is_some() { Lane::Single } else { Lane::Hash })
    }

    pub fn execute(&mut self, app: &App, deadline: Instant) -> Outcome {
        if let Some(outdated) = self.outdated.take() {
            let (user, old, new) = *outdated;
            // The login has succeeded, even if the new hash is not stored: the next one tries again.
            match app.users.replace_hash(user.id, &old, &new, deadline) {
                Ok(()) | Err(Error::Contended) => {}
                Err(error) => error.log(None),
            }
            return Ok(Some(Response::json(200, &user)));
        }
        let attempt = app.throttle.admit(&self.email, self.peer)?;
        let user = app.users.find_by_email_with_credential(&self.email)?;
        let credential = user.as_ref().map(|user| user.credential.get()).transpose()?.flatten();
        let hash = credential.map(|credential| credential.password_hash.clone());
        let verdict = app.with_hash(hash.as_ref(), |hasher| {
            let found = hasher.check(&self.password, hash.as_ref());
            let new = (found == Match::Outdated).then(|| hasher.hash(&self.password).ok());
            (found, new.flatten())
        })?;
        match (verdict, user, hash) {
            ((Match::None, _), ..) | (_, None, _) => {
                attempt.wrong();
                Err(Error::InvalidCredentials)
            }
            ((_, Some(new)), Some(user), Some(old)) => {
                self.outdated = Some(Box::new((user, old, new)));
                Ok(None)
            }
            (_, Some(user), _) => Ok(Some(Response::json(200, &user))),
        }
    }
}
