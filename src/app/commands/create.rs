//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! Without a password, one statement that several requests share looks at the keys and stores the users. With a password, a
//! thread that hashes looks the key up and hashes first.

use super::{Item, Outcome};
use crate::app::fields::{self, etag};
use crate::app::{App, Lane, Needs};
use crate::config::counted_as;
use crate::db::{New, Once};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::users::idempotency::{Fingerprint, KeptCreate, Key};
use crate::users::password::{Match, PasswordHash};
use crate::users::user::{NewUser, User};
use std::{collections::HashSet, net::IpAddr, time::Instant};

/// A user that is to be stored.
#[derive(Debug)]
pub(crate) struct Create {
    new: NewUser,
    /// The key and the fingerprint, which tells a repeat from another create with its key.
    pub key: Option<(Key, Fingerprint)>,
    /// The client, whose wrong passwords are counted.
    peer: Option<IpAddr>,
    /// The hash of the password, once it is made.
    hash: Option<PasswordHash>,
}

impl Create {
    pub fn parse(request: &Request, app: &App) -> Result<Create, Error> {
        let key = fields::idempotency_key(request)?;
        let new = NewUser::from_body(app.schemas.create.check(fields::body(request, false)?)?)?;
        let key = key.map(|key| (key, Fingerprint::of(&new)));
        Ok(Create { new, key, peer: request.peer, hash: None })
    }

    pub fn needs(&self) -> Needs {
        Needs::of(match (&self.new.password, &self.hash) {
            (None, _) => Lane::Create,
            (Some(_), None) => Lane::Hash,
            (Some(_), Some(_)) => Lane::Single,
        })
    }

    /// Executes creates with one statement: all of them with a key, or none.
    pub fn execute(app: &App, mut creates: Vec<Item<Create>>) {
        let mut keys = HashSet::new();
        // The first create of a key is stored; the others find it kept when they are retried.
        creates.retain_mut(|Item { command, outcome, .. }| {
            let is_first = command.key.is_none_or(|(key, _)| keys.insert(key));
            **outcome = Err(Error::Contended);
            is_first
        });
        let new = creates.iter().map(|Item { command: Create { new, key, hash, .. }, deadline, .. }| New {
            name: &new.name,
            email: &new.email,
            password: hash.as_ref(),
            key: key.as_ref().map(|(key, fingerprint)| (key, fingerprint)),
            deadline: *deadline,
        });
        let created = app.users.create_many(&new.collect::<Vec<_>>());
        for (Item { command, outcome, .. }, once) in creates.into_iter().zip(created) {
            *outcome = once.and_then(|once| command.settle(app, once));
        }
    }

    /// Looks the key up, if there is one, and hashes the password.
    pub fn hash(&mut self, app: &App) -> Outcome {
        if let Some((key, _)) = &self.key
            && let Some(kept) = app.users.find_kept(key)?
        {
            return self.repeat(app, &kept);
        }
        self.hash = app.hash(self.new.password.as_ref())?;
        Ok(None)
    }

    fn settle(&mut self, app: &App, once: Once) -> Outcome {
        match once {
            Once::Created(user) => Ok(Some(created(&user))),
            // A thread that hashes compares the password.
            Once::Kept(_) if self.hash.take().is_some() => Ok(None),
            Once::Kept(kept) => self.repeat(app, &kept),
        }
    }

    /// Answers as the earlier create with its key was answered, if it has the same body.
    fn repeat(&self, app: &App, kept: &KeptCreate) -> Outcome {
        let fingerprint = kept.fingerprint.ok_or(Error::Gone)?;
        if self.key.is_none_or(|(_, own)| own != fingerprint) {
            return Err(Error::KeyReused);
        }
        // The answer tells whether the password is right, as a login's does. A create that waits for its hash does not
        // count, as many clients may repeat it at once.
        if let (hash @ Some(_), Some(password)) = (kept.password_hash.as_ref(), &self.new.password) {
            let mut attempt =
                app.throttle.admit(&self.new.email, self.peer.map(counted_as), Instant::now())?;
            if app.with_hash(hash, |hasher| hasher.check(password, hash))? == Match::None {
                attempt.wrong();
                return Err(Error::KeyReused);
            }
        }
        Ok(Some(created(&kept.user).with("Idempotency-Replayed", "true")))
    }
}

fn created(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user.revision()))
}
