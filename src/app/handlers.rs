//! What a command does: one short function for each lane, from commands to their outcomes.
//!
//! Knows no HTTP but [`Response`], no queue and no thread. Every wait is for the database or for a hash.

use super::{
    App,
    command::{Command, CreateOnce, Earlier, Login, Progress, Step},
    lanes::Lane,
    preconditions::{Preconditions, Read, etag},
};
use crate::{
    db::{Delete, New, NewOnce, Once, PasswordChange, Update, Updated},
    error::Error,
    http::Response,
    users::{
        once::{Kept, Key},
        pagination::{List, ListBody, ListRequest, PageRequest, Range},
        password::{Password, PasswordHash},
        user::{User, UserChanges},
    },
};
use std::{collections::HashSet, time::Instant};

/// Executes the next step of commands of one lane; one outcome each, in their order.
pub(super) fn execute(app: &App, lane: Lane, commands: Vec<Command>, deadlines: &[Instant]) -> Vec<Step> {
    match lane {
        Lane::Find => find(app, commands),
        Lane::List => list(app, commands),
        Lane::Create => create(app, commands, deadlines),
        Lane::Change => change(app, commands, deadlines),
        Lane::Single => {
            let commands = commands.into_iter().zip(deadlines);
            commands.map(|(command, deadline)| single(app, command, *deadline)).collect()
        }
        Lane::Hash => commands.into_iter().map(|command| hash(app, command)).collect(),
    }
}

/// The end of a command, unless it is to be retried.
fn outcome(command: Command, result: Result<Response, Error>) -> Step {
    match result {
        Err(Error::Contended) => Step::Contended(command),
        Err(error) => Step::Failed(error),
        Ok(response) => Step::Done(response),
    }
}

/// Reads by id, with one statement; those by address, those of logins and those of keys, with one each; and the look-up that
/// comes before a change.
fn find(app: &App, commands: Vec<Command>) -> Vec<Step> {
    let (mut ids, mut emails, mut logins, mut keys) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for command in &commands {
        match command {
            Command::Find(id, _) | Command::RefuseUpdate(id, _) | Command::Update { id, .. } => ids.push(*id),
            Command::List(ListRequest::Email { email, .. }) => emails.push(email.as_str()),
            Command::Authenticate(login) => logins.push(login.email.as_str()),
            Command::CreateOnce(create) => keys.push(&create.key),
            other => unreachable!("{:?} is not a command of this lane", other.lane()),
        }
    }
    let shared = commands.len() > 1;
    let users = logged(app.users.find_many(&ids), shared);
    let mut emails = logged(app.users.find_by_email(&emails), shared).map(Vec::into_iter);
    let mut logins = logged(app.users.find_by_email_with_credential(&logins), shared).map(Vec::into_iter);
    let mut keys = logged(app.users.find_kept(&keys), shared).map(Vec::into_iter);
    let by_id = |id| match &users {
        Ok(users) => Ok(users.binary_search_by_key(&id, |user| user.id).ok().map(|at| &users[at])),
        Err(error) => Err(error.clone()),
    };
    let step = |command: Command| match command {
        Command::Find(id, _) | Command::RefuseUpdate(id, _) | Command::Update { id, .. } => match by_id(id) {
            Ok(Some(user)) => found(command, user),
            Ok(None) => Step::Failed(Error::NotFound),
            Err(error) => failed(command, &error, shared),
        },
        Command::List(ListRequest::Email { ref email, page }) => match next(&mut emails) {
            Ok(user) => {
                let list = list_of_one(email, page, user.as_ref());
                outcome(command, list)
            }
            Err(error) => failed(command, &error, shared),
        },
        Command::Authenticate(login) => match next(&mut logins) {
            Ok(user) => Step::Next(Command::Verify(login, user.map(Box::new))),
            Err(error) => failed(Command::Authenticate(login), &error, shared),
        },
        Command::CreateOnce(mut create) => match next(&mut keys) {
            Ok(Some(earlier)) => repeated(create, earlier),
            Ok(None) => {
                create.earlier = Earlier::Absent;
                Step::Next(Command::CreateOnce(create))
            }
            Err(error) => failed(Command::CreateOnce(create), &error, shared),
        },
        other => unreachable!("{:?} is not a command of this lane", other.lane()),
    };
    commands.into_iter().map(step).collect()
}

/// What a statement that several commands share has for the next of them.
fn next<T>(found: &mut Result<impl Iterator<Item = T>, Error>) -> Result<T, Error> {
    let found = found.as_mut().map_err(|error| error.clone())?;
    found.next().ok_or_else(|| Error::Internal("a command has no outcome".to_owned()))
}

/// A command of a user that there is.
fn found(command: Command, user: &User) -> Step {
    match command {
        Command::RefuseUpdate(_, refusal) => Step::Failed(refusal),
        Command::Update { ref condition, .. } if !condition.holds(user.revision()) => {
            Step::Failed(Error::PreconditionFailed)
        }
        Command::Update { id, changes, condition, .. } => {
            Step::Next(Command::Update { id, changes, condition, progress: Progress::Found })
        }
        Command::Find(_, preconditions) => read(user, &preconditions),
        other => unreachable!("{:?} is not of one user", other.lane()),
    }
}

/// The answer to a read.
fn read(user: &User, preconditions: &Preconditions) -> Step {
    match preconditions.read(user.revision()) {
        Read::Answered => Step::Done(one(200, user)),
        Read::NotModified => Step::Done(Response::not_modified().with("ETag", etag(user))),
        Read::Failed => Step::Failed(Error::PreconditionFailed),
    }
}

/// An answer with one user and the tag of its state.
fn one(status: u16, user: &User) -> Response {
    Response::json(status, user).with("ETag", etag(user))
}

/// Several lists: one statement for all pages, and one for all walks.
fn list(app: &App, commands: Vec<Command>) -> Vec<Step> {
    let range = |command: &Command| match command {
        Command::List(ListRequest::Range(range)) | Command::ListAgain(range) => *range,
        other => unreachable!("{:?} is not a command of this lane", other.lane()),
    };
    let asked = commands.iter().map(|command| (range(command), command.memory()));
    let (pages, walks): (Vec<_>, Vec<_>) = asked.partition(|(range, _)| matches!(range, Range::Page(_)));
    let shared = commands.len() > 1;
    let mut pages = logged(app.users.list_many(&pages), shared).map(Vec::into_iter);
    let mut walks = logged(app.users.list_many(&walks), shared).map(Vec::into_iter);
    let step = |command: Command| {
        let range = range(&command);
        let lists = match range {
            Range::Page(_) => &mut pages,
            Range::Walk { .. } => &mut walks,
        };
        match next(lists) {
            Ok(Some(list)) => Step::Done(listed(list)),
            Ok(None) if matches!(command, Command::List(_)) => Step::Next(Command::ListAgain(range)),
            Ok(None) => Step::Failed(Error::Internal("a user is larger than the table allows".into())),
            Err(error) => failed(command, &error, shared),
        }
    };
    commands.into_iter().map(step).collect()
}

fn listed(List { body, links }: List) -> Response {
    let response = Response::of_chunks(200, body);
    match links {
        Some(links) => response.with("Link", links),
        None => response,
    }
}

/// The page of the one user with an address, or of none.
fn list_of_one(email: &str, page: PageRequest, user: Option<&User>) -> Result<Response, Error> {
    let range = Range::Page(PageRequest { per_page: 1, ..page });
    let mut list = ListBody::new(Range::Page(page), range.most_memory());
    list.set_total(user.iter().len() as i64);
    if let Some(user) = user.filter(|_| page.page == 1) {
        list.push(user.as_row());
    }
    let list = list.finish(Some(email));
    list.map(listed).ok_or_else(|| Error::Internal("a user is larger than the table allows".into()))
}

/// Creates without a password: one statement and one commit for all without a key, and one for those with a key.
fn create(app: &App, commands: Vec<Command>, deadlines: &[Instant]) -> Vec<Step> {
    let (mut plain, mut once, mut keys) = (Vec::new(), Vec::new(), HashSet::new());
    // Of equal keys, the first: the others find what is kept of it.
    let mut is_new = |key: &Key| keys.insert(*key);
    let mut repeats = Vec::new();
    for (command, deadline) in commands.iter().zip(deadlines) {
        let deadline = *deadline;
        match command {
            Command::Create(new) => plain.push(New { values: new.values(), deadline }),
            Command::CreateOnce(create) => {
                let CreateOnce { key, fingerprint, new, .. } = &**create;
                let is_new = is_new(key);
                repeats.push(!is_new);
                let values = new.values();
                once.extend(is_new.then_some(NewOnce { key, fingerprint, values, deadline }));
            }
            other => unreachable!("{:?} is not a command of this lane", other.lane()),
        }
    }
    let plain = if plain.is_empty() { Vec::new() } else { app.users.create_many(&plain) };
    let once = if once.is_empty() { Vec::new() } else { app.users.create_many_once(&once) };
    let (mut plain, mut once, mut repeats) = (plain.into_iter(), once.into_iter(), repeats.into_iter());
    let step = |command| match command {
        Command::CreateOnce(mut create) if repeats.next() == Some(true) => {
            create.earlier = Earlier::Batched;
            Step::Next(Command::CreateOnce(create))
        }
        Command::CreateOnce(create) => created_once(create, once.next().unwrap_or_else(missing)),
        command => outcome(command, plain.next().unwrap_or_else(missing).map(|user| created(&user))),
    };
    commands.into_iter().map(step).collect()
}

fn missing<T>() -> Result<T, Error> {
    Err(Error::Internal("a command has no outcome".to_owned()))
}

/// Changes without a password: one statement and one commit for all updates, and one for all deletes.
fn change(app: &App, commands: Vec<Command>, deadlines: &[Instant]) -> Vec<Step> {
    let (mut updates, mut deletes) = (Vec::new(), Vec::new());
    for (command, deadline) in commands.iter().zip(deadlines) {
        let deadline = *deadline;
        match command {
            Command::Update { id, changes, condition, .. } => {
                updates.push(Update { id: *id, values: changes.values(), condition, deadline });
            }
            Command::Delete(id, condition) => deletes.push(Delete { id: *id, condition, deadline }),
            other => unreachable!("{:?} is not a command of this lane", other.lane()),
        }
    }
    let updated = if updates.is_empty() { Vec::new() } else { app.users.update_many(&updates) };
    let deleted = if deletes.is_empty() { Vec::new() } else { app.users.delete_many(&deletes) };
    let (mut updated, mut deleted) = (updated.into_iter(), deleted.into_iter());
    let step = |command| match command {
        Command::Update { id, changes, condition, progress } => {
            match updated.next().unwrap_or_else(missing) {
                Ok(Updated::Unbatched) => {
                    Step::Next(Command::Update { id, changes, condition, progress: Progress::Moves })
                }
                Ok(Updated::User(user)) => Step::Done(one(200, &user)),
                Err(error) => outcome(Command::Update { id, changes, condition, progress }, Err(error)),
            }
        }
        command => {
            let deleted = deleted.next().unwrap_or_else(missing);
            outcome(command, deleted.map(|()| Response::no_content()))
        }
    };
    commands.into_iter().map(step).collect()
}

/// A write that is not batched.
fn single(app: &App, command: Command, deadline: Instant) -> Step {
    if let Command::CreateOnce(create) = command {
        return create_once(app, create, deadline);
    }
    let result = match &command {
        Command::Rehash(user, old, new) => Ok(rehash(app, user, old, new, deadline)),
        Command::Create(new) => {
            let hash = new.password.as_ref().map(hashed);
            app.users.create(new.values(), hash, deadline).map(|user| created(&user))
        }
        Command::Update { id, changes, condition, .. } => {
            let password = match &changes.password {
                None => PasswordChange::Keep,
                Some(None) => PasswordChange::Remove,
                Some(Some(password)) => PasswordChange::Set(hashed(password).clone()),
            };
            let updated = app.users.update(*id, changes.values(), &password, condition, deadline);
            updated.map(|user| one(200, &user))
        }
        Command::Delete(id, condition) => {
            app.users.delete(*id, condition, deadline).map(|()| Response::no_content())
        }
        other => unreachable!("{:?} is not a command of this lane", other.lane()),
    };
    outcome(command, result)
}

/// A create with a key, whose password is hashed.
fn create_once(app: &App, create: Box<CreateOnce>, deadline: Instant) -> Step {
    let CreateOnce { key, fingerprint, new, .. } = &*create;
    let hash = new.password.as_ref().map(hashed);
    let result = app.users.create_once(key, fingerprint, new.values(), hash, deadline);
    created_once(create, result)
}

fn created_once(create: Box<CreateOnce>, result: Result<Once, Error>) -> Step {
    match result {
        Ok(Once::Created(user)) => Step::Done(created(&user)),
        Ok(Once::Kept(earlier)) => repeated(create, earlier),
        Err(error) => outcome(Command::CreateOnce(create), Err(error)),
    }
}

/// A create whose key was sent before: it has the answer of the earlier one, if it has the same body.
fn repeated(mut create: Box<CreateOnce>, earlier: Box<Kept>) -> Step {
    match &earlier.fingerprint {
        None => return Step::Failed(Error::Gone),
        Some(fingerprint) if *fingerprint != create.fingerprint => return Step::Failed(Error::KeyReused),
        Some(_) => {}
    }
    match earlier.password_hash {
        None => Step::Done(replayed(&earlier.user)),
        Some(_) => {
            create.earlier = Earlier::Kept(earlier);
            Step::Next(Command::CreateOnce(create))
        }
    }
}

fn replayed(user: &User) -> Response {
    created(user).with("Idempotency-Replayed", "true")
}

/// The hash of a password that was hashed in an earlier step.
fn hashed(password: &Password) -> &PasswordHash {
    match password {
        Password::Hashed(hash) => hash,
        Password::Clear(_) => unreachable!("the lane of a clear password is Hash"),
    }
}

/// Hashes a password that is to be stored, or checks one.
fn hash(app: &App, mut command: Command) -> Step {
    let password = match &mut command {
        Command::Create(new) => &mut new.password,
        Command::CreateOnce(create) => match (&create.earlier, &create.password) {
            (Earlier::Kept(kept), Some(password)) => {
                // The answer tells whether the password is right, as a login's does. One that waits for its turn does not
                // count, as many clients may repeat a create at once.
                let attempt = match app.judge.attempt(&create.new.email, create.peer) {
                    Ok(attempt) => attempt,
                    Err(error) => return Step::Failed(error),
                };
                return match app.verify(password, kept.password_hash.as_ref()) {
                    Ok(true) => Step::Done(replayed(&kept.user)),
                    Ok(false) => {
                        attempt.wrong();
                        Step::Failed(Error::KeyReused)
                    }
                    Err(error) => Step::Failed(error),
                };
            }
            _ => &mut create.new.password,
        },
        Command::Update { changes: UserChanges { password: Some(password), .. }, .. } => password,
        Command::Verify(..) => return verify(app, command),
        other => unreachable!("{:?} is not a command of this lane", other.lane()),
    };
    if let Some(Password::Clear(clear)) = password {
        match app.hash(clear) {
            Ok(hash) => *password = Some(Password::Hashed(hash)),
            Err(error) => return Step::Failed(error),
        }
    }
    Step::Next(command)
}

fn verify(app: &App, command: Command) -> Step {
    let Command::Verify(login, user) = command else {
        unreachable!("{:?} is not a command of this lane", command.lane());
    };
    let Login { password, attempt, .. } = login;
    let verified = || {
        let credential = match &user {
            Some(user) => user.credential.get()?,
            None => None,
        };
        let hash = credential.map(|credential| &credential.password_hash);
        let outdated = hash.filter(|hash| app.hasher.is_outdated(hash, &password));
        // One after the other.
        let memory = app.hasher.memory(hash).max(app.hasher.memory(None));
        let work = || match app.hasher.verify(&password, hash) {
            true => Ok(outdated.and_then(|old| Some((old.clone(), app.hasher.hash(&password).ok()?)))),
            false => Err(Error::InvalidCredentials),
        };
        app.hashing.take(memory, app.request_timeout, work).flatten()
    };
    let verified = verified();
    match (verified, user) {
        (Ok(Some((old, new))), Some(user)) => Step::Next(Command::Rehash(user, old, new)),
        (Ok(_), Some(user)) => Step::Done(Response::json(200, &user)),
        (Ok(_), None) => unreachable!("no password is that of nobody"),
        (Err(error), _) => {
            if matches!(error, Error::InvalidCredentials) {
                attempt.wrong();
            }
            Step::Failed(error)
        }
    }
}

/// Replaces a hash. The login has succeeded, whatever becomes of that: the next one tries again.
fn rehash(app: &App, user: &User, old: &PasswordHash, new: &PasswordHash, deadline: Instant) -> Response {
    match app.users.replace_hash(user.id, old, new, deadline) {
        Ok(()) | Err(Error::Contended) => {}
        Err(error) => error.log(None),
    }
    Response::json(200, user)
}

fn created(user: &User) -> Response {
    let location = format!("/users/{}", user.id);
    Response::json(201, user).with("Location", location).with("ETag", etag(user))
}

/// Logs the error of a statement that several commands share, once. What is retried is no error yet.
fn logged<T>(result: Result<T, Error>, shared: bool) -> Result<T, Error> {
    if let Err(error) = &result
        && shared
        && !matches!(error, Error::Contended)
    {
        error.log(None);
    }
    result
}

/// The end of a command whose statement has failed, unless it is to be retried.
fn failed(command: Command, error: &Error, shared: bool) -> Step {
    match error {
        Error::Contended => Step::Contended(command),
        error if shared => Step::Done(Response::from(error)),
        error => Step::Failed(error.clone()),
    }
}
