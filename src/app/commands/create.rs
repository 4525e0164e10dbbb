//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! Without a password, one statement that several requests share looks at the keys and stores the users. With a password, a
//! thread that hashes looks the key up and hashes first.

use super::{Item, Outcome, RequestRules};
use crate::app::fields::{etag, idempotency_key, json};
use crate::app::{App, Lane, Needs};
use crate::db::{New, Once};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::users::idempotency::{Fingerprint, KeptCreate, Key};
use crate::users::password::PasswordHash;
use crate::users::user::{NewUser, User};
use std::{collections::HashSet, net::IpAddr, time::Instant};

/// A user that is to be stored.
#[derive(Debug)]
pub(crate) struct Create {
    new: NewUser,
    keyed: Option<Box<Keyed>>,
    /// The hash of the password, once it is made.
    hash: Option<PasswordHash>,
}

/// The parts that tell a repeat of a create from another create with its key.
#[derive(Debug)]
struct Keyed {
    key: Key,
    fingerprint: Fingerprint,
    /// The client, whose wrong passwords are counted.
    peer: Option<IpAddr>,
}

impl Create {
    pub fn parse(request: &Request, rules: &RequestRules) -> Result<Create, Error> {
        let key = idempotency_key(request)?;
        let new = NewUser::from_body(rules.schemas.create(json(request)?)?)?;
        let keyed = |key| Box::new(Keyed { key, fingerprint: Fingerprint::of(&new), peer: request.peer });
        Ok(Create { keyed: key.map(keyed), new, hash: None })
    }

    pub fn needs(&self) -> Needs {
        Needs::of(match (&self.new.password, &self.hash) {
            (None, _) => Lane::Create,
            (Some(_), None) => Lane::Hash,
            (Some(_), Some(_)) => Lane::Single,
        })
    }

    /// Executes creates with one statement for those with a key and one for the others; or one create with a password.
    pub fn execute(app: &App, creates: Vec<Item<Create>>) {
        let (keyed, plain) = creates.into_iter().partition(|create| create.command.keyed.is_some());
        Create::execute_alike(app, plain);
        Create::execute_alike(app, keyed);
    }

    fn execute_alike(app: &App, mut creates: Vec<Item<Create>>) {
        let mut keys = HashSet::new();
        // The first create of a key is stored; the others find it kept when they are retried.
        creates.retain_mut(|Item { command, outcome, .. }| {
            let is_first = command.keyed.as_ref().is_none_or(|keyed| keys.insert(keyed.key));
            **outcome = Err(Error::Contended);
            is_first
        });
        if let [Item { command, outcome, .. }] = &mut creates[..]
            && command.needs().lane == Lane::Hash
        {
            **outcome = command.hash(app);
            return;
        }
        let new: Vec<_> = creates.iter().map(|create| create.command.to_new(create.deadline)).collect();
        let created = app.users.create_many(&new);
        for (Item { command, outcome, .. }, once) in creates.into_iter().zip(created) {
            *outcome = once.and_then(|once| command.settle(app, once));
        }
    }

    /// Looks the key up, if there is one, and hashes the password.
    fn hash(&mut self, app: &App) -> Outcome {
        let kept = match &self.keyed {
            Some(keyed) => app.users.find_kept(&keyed.key)?,
            None => None,
        };
        match kept {
            Some(kept) => self.repeat(app, &kept),
            None => {
                self.hash = app.hash(self.new.password.as_ref())?;
                Ok(None)
            }
        }
    }

    fn to_new(&self, deadline: Instant) -> New<'_> {
        let key = self.keyed.as_ref().map(|keyed| (&keyed.key, &keyed.fingerprint));
        New { values: self.new.values(), password: self.hash.as_ref(), key, deadline }
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
        let keyed = self.keyed.as_ref().filter(|keyed| keyed.fingerprint == fingerprint);
        let keyed = keyed.ok_or(Error::KeyReused)?;
        // The answer tells whether the password is right, as a login's does. A create that waits for its hash does not
        // count, as many clients may repeat it at once.
        if let (hash @ Some(_), Some(password)) = (kept.password_hash.as_ref(), &self.new.password) {
            let mut attempt = app.rules.attempt(&self.new.email, keyed.peer)?;
            if !app.hashing(hash, |hasher| hasher.verify(password, hash))? {
                attempt.wrong();
                return Err(Error::KeyReused);
            }
        }
        Ok(Some(created(&kept.user).with("Idempotency-Replayed", "true")))
    }
}

fn created(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user))
}
