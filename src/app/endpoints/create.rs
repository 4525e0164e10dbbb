//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! With a password the steps are: look the key up, if there is one; hash; store. Without one, a single statement, which
//! several requests share, looks at the key and stores the user.

use super::{Outcome, Progress, Rules, Step, Task, hand_back};
use crate::{
    app::{
        App,
        content::json,
        idempotency,
        lanes::{Lane, Needs},
        preconditions::etag,
    },
    config::Secret,
    db::{New, NewOnce, Once},
    error::Error,
    http::{Request, Response},
    users::{
        idempotency::{Fingerprint, KeptCreate, Key},
        password::PasswordHash,
        user::{NewUser, User},
    },
};
use std::{net::IpAddr, time::Instant};

/// A user that is to be stored without a password.
#[derive(Debug)]
pub(crate) struct Create {
    pub new: NewUser,
    pub keyed: Option<Box<Keyed>>,
}

/// What tells a create from others, and a repeat of it from another create with its key.
#[derive(Debug)]
pub(crate) struct Keyed {
    pub key: Key,
    pub fingerprint: Fingerprint,
    /// As it was sent, to be checked against that of an earlier create.
    password: Option<Secret>,
    /// The client, whose wrong passwords are counted.
    peer: Option<IpAddr>,
}

/// A create with a key, which is looked up.
#[derive(Debug)]
pub(crate) struct Repeatable {
    pub new: NewUser,
    pub keyed: Box<Keyed>,
}

/// A create whose password is hashed.
#[derive(Debug)]
pub(crate) struct HashNew(Create, Secret);

/// A user that is to be stored with its password.
#[derive(Debug)]
pub(crate) struct CreateAlone(Create, PasswordHash);

/// A repeat of an earlier create, if it has the same password.
#[derive(Debug)]
pub(crate) struct CheckKept {
    email: String,
    password: Secret,
    peer: Option<IpAddr>,
    kept: Box<KeptCreate>,
}

pub(super) fn judge(request: &Request, rules: &Rules) -> Result<Step, Error> {
    let key = idempotency::key(request)?;
    let mut new = NewUser::from_body(rules.validation.create(json(request)?)?)?;
    let keyed = key.map(|key| {
        let (fingerprint, password) = (Fingerprint::of(&new), new.password.clone());
        Box::new(Keyed { key, fingerprint, password, peer: request.peer })
    });
    Ok(match (keyed, new.password.take()) {
        (Some(keyed), Some(_)) => Repeatable { new, keyed }.look_up(),
        (keyed, password) => Create { new, keyed }.store(password),
    })
}

impl Create {
    fn store(self, password: Option<Secret>) -> Step {
        match password {
            None => Step { needs: Needs::of(Lane::Create), task: Task::Create(self) },
            Some(password) => {
                Step { needs: Needs::of(Lane::Hash), task: Task::HashNew(HashNew(self, password)) }
            }
        }
    }

    pub fn created(self, user: User) -> Outcome {
        Ok(Progress::Done(created(&user)))
    }
}

impl Repeatable {
    pub fn look_up(self) -> Step {
        Step { needs: Needs::of(Lane::Find), task: Task::FindKept(self) }
    }

    pub fn found(self, kept: Option<Box<KeptCreate>>) -> Outcome {
        match kept {
            Some(kept) => self.repeated(kept),
            None => {
                let password = self.keyed.password.clone();
                Ok(Progress::Next(self.into_create().store(password)))
            }
        }
    }

    pub fn created(self, once: Once) -> Outcome {
        match once {
            Once::Created(user) => Ok(Progress::Done(created(&user))),
            Once::Kept(kept) => self.repeated(kept),
        }
    }

    pub fn into_create(self) -> Create {
        Create { new: self.new, keyed: Some(self.keyed) }
    }

    /// Its key was sent before: it has the answer of the earlier create, if it has the same body.
    fn repeated(self, kept: Box<KeptCreate>) -> Outcome {
        match kept.fingerprint {
            None => return Err(Error::Gone),
            Some(fingerprint) if fingerprint != self.keyed.fingerprint => return Err(Error::KeyReused),
            Some(_) => {}
        }
        let Keyed { password, peer, .. } = *self.keyed;
        match (&kept.password_hash, password) {
            (None, _) => Ok(Progress::Done(replayed(&kept.user))),
            (Some(_), None) => Err(Error::KeyReused),
            (Some(_), Some(password)) => {
                let task = Task::CheckKept(CheckKept { email: self.new.email, password, peer, kept });
                Ok(Progress::Next(Step { needs: Needs::of(Lane::Hash), task }))
            }
        }
    }
}

impl HashNew {
    pub fn execute(self, app: &App) -> Outcome {
        let hash = app.hashing.hash(&self.1)?;
        let task = Task::CreateAlone(CreateAlone(self.0, hash));
        Ok(Progress::Next(Step { needs: Needs::of(Lane::Single), task }))
    }
}

impl CreateAlone {
    pub fn execute(self, app: &App, deadline: Instant) -> Outcome {
        let CreateAlone(Create { new, keyed }, hash) = self;
        match keyed {
            None => {
                let user = app.users.create(&New { values: new.values(), deadline }, Some(&hash));
                let again = |create| Task::CreateAlone(CreateAlone(create, hash));
                hand_back(Create { new, keyed }, user, again, Create::created)
            }
            Some(keyed) => {
                let Keyed { key, fingerprint, .. } = &*keyed;
                let once = NewOnce { key, fingerprint, values: new.values(), deadline };
                let once = app.users.create_once(&once, Some(&hash));
                let again = |create: Repeatable| Task::CreateAlone(CreateAlone(create.into_create(), hash));
                hand_back(Repeatable { new, keyed }, once, again, Repeatable::created)
            }
        }
    }
}

impl CheckKept {
    /// The answer tells whether the password is right, as a login's does. One that waits for its turn does not count,
    /// as many clients may repeat a create at once.
    pub fn execute(self, app: &App) -> Outcome {
        let attempt = app.rules.attempt(&self.email, self.peer)?;
        match app.hashing.verify(&self.password, self.kept.password_hash.as_ref())? {
            true => Ok(Progress::Done(replayed(&self.kept.user))),
            false => {
                attempt.wrong();
                Err(Error::KeyReused)
            }
        }
    }
}

fn created(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user))
}

fn replayed(user: &User) -> Response {
    created(user).with("Idempotency-Replayed", "true")
}
