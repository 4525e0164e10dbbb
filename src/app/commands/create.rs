//! `POST /users`: creates a user; with an `Idempotency-Key`, once for all requests with the same key.
//!
//! Without a password, one statement that several requests share looks at the keys and stores the users. With one, a
//! thread that hashes looks the key up and hashes first.

use super::{Command, Outcome, Progress, Rules, settle};
use crate::app::fields::{etag, idempotency_key, json};
use crate::app::{App, Lane, Needs};
use crate::db::{New, NewOnce, Once};
use crate::error::Error;
use crate::http::{Request, Response};
use crate::users::idempotency::{Fingerprint, KeptCreate, Key};
use crate::users::password::PasswordHash;
use crate::users::user::{NewUser, User};
use std::{net::IpAddr, time::Instant};

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
    pub fn parse(request: &Request, rules: &Rules) -> Result<Create, Error> {
        let key = idempotency_key(request)?;
        let new = NewUser::from_body(rules.validation.create(json(request)?)?)?;
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

    pub fn execute(app: &App, mut creates: Vec<(Create, Instant)>) -> Vec<Outcome> {
        if creates.len() == 1
            && let Some((create, deadline)) = creates.pop_if(|(create, _)| create.new.password.is_some())
        {
            return vec![match create.needs().lane {
                Lane::Hash => create.hash(app),
                _ => create.store(app, deadline),
            }];
        }
        let (mut plain, mut once) = (Vec::new(), Vec::<NewOnce>::new());
        for (create, deadline) in &creates {
            match &create.keyed {
                None => plain.push(New { values: create.new.values(), deadline: *deadline }),
                // The first create of a key is stored; the others find it kept when they are retried.
                Some(keyed) if once.iter().any(|new| *new.key == keyed.key) => {}
                Some(keyed) => once.push(keyed.statement(&create.new, *deadline)),
            }
        }
        let mut plain = app.users.create_many(&plain).into_iter();
        let keys: Vec<Key> = once.iter().map(|new| *new.key).collect();
        let mut once: Vec<_> = keys.into_iter().zip(app.users.create_many_once(&once)).collect();
        let outcome = |(create, _): (Create, Instant)| {
            let created = match &create.keyed {
                None => plain.next().map(|user| user.map(Once::Created)),
                Some(keyed) => match once.iter().position(|(key, _)| *key == keyed.key) {
                    Some(at) => Some(once.swap_remove(at).1),
                    None => Some(Err(Error::Contended)),
                },
            };
            let missing = || Err(Error::Internal("a create has no outcome".to_owned()));
            create.settle(app, created.unwrap_or_else(missing))
        };
        creates.into_iter().map(outcome).collect()
    }

    /// Looks the key up, if there is one, and hashes the password.
    fn hash(self, app: &App) -> Outcome {
        let kept = match &self.keyed {
            Some(keyed) => app.users.find_kept(&[&keyed.key]).map(|mut kept| kept.pop().flatten()),
            None => Ok(None),
        };
        settle(self, kept, Command::Create, |create, kept| match kept {
            Some(kept) => create.repeat(app, kept),
            None => {
                let password = create.new.password.as_ref();
                let hash = password.map(|password| app.hash(password)).transpose()?;
                Ok(Progress::Next(Command::Create(Create { hash, ..create })))
            }
        })
    }

    fn store(self, app: &App, deadline: Instant) -> Outcome {
        let (new, hash) = (&self.new, self.hash.as_ref());
        let created = match &self.keyed {
            Some(keyed) => app.users.create_once(&keyed.statement(new, deadline), hash),
            None => app.users.create(&New { values: new.values(), deadline }, hash).map(Once::Created),
        };
        self.settle(app, created)
    }

    fn settle(self, app: &App, created: Result<Once, Error>) -> Outcome {
        settle(self, created, Command::Create, |create, once| match once {
            Once::Created(user) => Ok(Progress::Done(created_answer(&user))),
            // A thread that hashes compares the password.
            Once::Kept(_) if create.hash.is_some() => {
                Ok(Progress::Next(Command::Create(Create { hash: None, ..create })))
            }
            Once::Kept(kept) => create.repeat(app, kept),
        })
    }

    /// Answers as the earlier create with its key was answered, if it has the same body.
    fn repeat(self, app: &App, kept: Box<KeptCreate>) -> Outcome {
        let keyed = self.keyed.ok_or_else(|| Error::Internal("a create without a key is kept".to_owned()))?;
        match kept.fingerprint {
            None => return Err(Error::Gone),
            Some(fingerprint) if fingerprint != keyed.fingerprint => return Err(Error::KeyReused),
            Some(_) => {}
        }
        match (&kept.password_hash, &self.new.password) {
            (None, _) => {}
            (Some(_), None) => return Err(Error::KeyReused),
            // The answer tells whether the password is right, as a login's does. A create that waits for its hash does
            // not count, as many clients may repeat it at once.
            (hash, Some(password)) => {
                let attempt = app.rules.attempt(&self.new.email, keyed.peer)?;
                if !app.hashing(hash.as_ref(), |hasher| hasher.verify(password, hash.as_ref()))? {
                    attempt.wrong();
                    return Err(Error::KeyReused);
                }
            }
        }
        Ok(Progress::Done(created_answer(&kept.user).with("Idempotency-Replayed", "true")))
    }
}

impl Keyed {
    fn statement<'a>(&'a self, new: &'a NewUser, deadline: Instant) -> NewOnce<'a> {
        NewOnce { key: &self.key, fingerprint: &self.fingerprint, values: new.values(), deadline }
    }
}

fn created_answer(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user))
}
