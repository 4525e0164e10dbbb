//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! Without a password, one statement that several requests share looks at the keys and stores the users. With a password, a
//! thread that hashes looks the key up and hashes first.

use super::{Item, Outcome, change};
use super::{Lane, Needs};
use crate::app::App;
use crate::config::counted_as;
use crate::db::{Create, Created};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::input::{self, etag};
use crate::users::idempotency::Fingerprint;
use crate::users::password::Match;
use crate::users::user::{NewUser, User};
use std::collections::HashSet;

impl Create {
    pub(super) fn parse(request: &Request, app: &App) -> Result<Create, Error> {
        let key = input::idempotency_key(request)?;
        let user = NewUser::from_body(app.schemas.create.check(input::body(request, false)?)?)?;
        let key = key.map(|key| (key, Fingerprint::of(&user)));
        Ok(Create { user, key, hash: None, peer: request.peer })
    }

    pub(super) fn needs(&self) -> Needs {
        Needs::of(match (&self.user.password, &self.hash) {
            (None, _) => Lane::Create,
            (Some(_), None) => Lane::Hash,
            (Some(_), Some(_)) => Lane::Single,
        })
    }

    /// Executes creates with one statement for those with a key, and with one for the others.
    pub(super) fn execute(app: &App, mut creates: Vec<Item<Create>>) {
        let mut keys = HashSet::new();
        // The first create of a key is stored; the others find it kept when they are retried.
        creates.retain_mut(|Item { command, outcome, .. }| {
            let is_first = command.key.is_none_or(|(key, _)| keys.insert(key));
            **outcome = Err(Error::Contended);
            is_first
        });
        let (keyed, others): (Vec<_>, Vec<_>) =
            creates.into_iter().partition(|item| item.command.key.is_some());
        for creates in [keyed, others] {
            change(app, creates, |create, created| create.settle(app, &created));
        }
    }

    /// Looks the key up, if there is one, and hashes the password.
    pub(super) fn hash(&mut self, app: &App) -> Outcome {
        if let Some((key, _)) = &self.key
            && let Some(kept) = app.users.find_kept(key)?
        {
            return self.repeat(app, &kept);
        }
        self.hash = app.hash(self.user.password.as_ref())?;
        Ok(None)
    }

    fn settle(&mut self, app: &App, created: &Created) -> Outcome {
        if created.earlier.is_none() {
            Ok(Some(answer(&created.user)))
        } else if self.hash.take().is_some() {
            // A thread that hashes compares the password.
            Ok(None)
        } else {
            self.repeat(app, created)
        }
    }

    /// Answers as the earlier create with its key was answered, if it has the same body.
    fn repeat(&self, app: &App, kept: &Created) -> Outcome {
        if self.key.map(|(_, own)| own) != kept.earlier {
            return Err(Error::KeyReused);
        }
        // The answer tells whether the password is right, as a login's does.
        if let (hash @ Some(_), Some(password)) = (kept.password_hash.as_ref(), &self.user.password) {
            let attempt = app.throttle.admit(&self.user.email, self.peer.map(counted_as))?;
            if app.with_hash(hash, |hasher| hasher.check(password, hash))? == Match::None {
                attempt.wrong();
                return Err(Error::KeyReused);
            }
        }
        Ok(Some(answer(&kept.user).with("Idempotency-Replayed", "true")))
    }
}

fn answer(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user.revision()))
}
