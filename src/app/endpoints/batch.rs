//! Executes the next steps of tasks that form a batch, with one statement for all that ask the same.

use super::{
    Outcome, Progress, Task,
    authenticate::Login,
    create::{Create, Repeatable},
    delete::Delete,
    find::Find,
    hand_back,
    list::{Address, Page},
    update::{FindChanged, Update},
};
use crate::{
    app::{App, list::ListBody},
    db::{self, New, NewOnce},
    error::Error,
    users::{idempotency::Key, pagination::Range},
};
use std::{time::Instant, vec};

/// What tasks ask, by the statement that answers it.
#[derive(Default)]
struct Asked<'a> {
    ids: Vec<i64>,
    addresses: Vec<&'a str>,
    logins: Vec<&'a str>,
    keys: Vec<&'a Key>,
    pages: Vec<(Range, usize)>,
    walks: Vec<(Range, usize)>,
    creates: Vec<New<'a>>,
    keyed: Vec<NewOnce<'a>>,
    updates: Vec<db::Update<'a>>,
    deletes: Vec<db::Delete<'a>>,
}

impl<'a> Asked<'a> {
    fn by(tasks: &'a [Task], deadlines: &[Instant]) -> Asked<'a> {
        let mut asked = Asked::default();
        for (task, deadline) in tasks.iter().zip(deadlines) {
            let deadline = *deadline;
            match task {
                Task::Find(task) => asked.ids.push(task.id),
                Task::FindChanged(task) => asked.ids.push(task.id),
                Task::FindAddress(task) => asked.addresses.push(&task.email),
                Task::Login(task) => asked.logins.push(&task.email),
                Task::FindKept(task) => asked.keys.push(&task.keyed.key),
                Task::Page(Page { range }) => match range {
                    Range::Page(_) => asked.pages.push((*range, range.most_memory())),
                    Range::Walk { .. } => asked.walks.push((*range, range.most_memory())),
                },
                Task::Create(Create { new, keyed: None }) => {
                    asked.creates.push(New { values: new.values(), deadline });
                }
                Task::Create(Create { new, keyed: Some(keyed) }) => {
                    // Of equal keys, the first: the others find what is kept of it.
                    if asked.keyed.iter().all(|earlier| *earlier.key != keyed.key) {
                        let (key, fingerprint) = (&keyed.key, &keyed.fingerprint);
                        asked.keyed.push(NewOnce { key, fingerprint, values: new.values(), deadline });
                    }
                }
                Task::Update(task) => {
                    let (values, condition) = (task.changes.values(), &task.condition);
                    asked.updates.push(db::Update { id: task.id, values, condition, deadline });
                }
                Task::Delete(task) => {
                    asked.deletes.push(db::Delete { id: task.id, condition: &task.condition, deadline });
                }
                Task::HashNew(_)
                | Task::CreateAlone(_)
                | Task::CheckKept(_)
                | Task::HashChange(_)
                | Task::UpdateAlone(_)
                | Task::DeleteAlone(_)
                | Task::Verify(_)
                | Task::Rehash(_) => {}
            }
        }
        asked
    }
}

impl App {
    /// Executes the next steps of tasks, with as few statements as they allow; one outcome each, in their order. None
    /// begins a change past its deadline.
    pub(crate) fn execute(&self, tasks: Vec<Task>, deadlines: &[Instant]) -> Vec<Outcome> {
        let is_shared = tasks.len() > 1;
        let asked = Asked::by(&tasks, deadlines);
        let users = logged(self.users.find_many(&asked.ids), is_shared);
        let mut addresses = logged(self.users.find_by_email(&asked.addresses), is_shared);
        let mut logins = logged(self.users.find_by_email_with_credential(&asked.logins), is_shared);
        let mut keys = logged(self.users.find_kept(&asked.keys), is_shared);
        let mut pages = logged(lists(self, &asked.pages), is_shared);
        let mut walks = logged(lists(self, &asked.walks), is_shared);
        let mut created = self.users.create_many(&asked.creates).into_iter();
        let once = self.users.create_many_once(&asked.keyed).into_iter();
        let mut once: Vec<_> = asked.keyed.iter().map(|new| *new.key).zip(once.map(Some)).collect();
        let mut updated = self.users.update_many(&asked.updates).into_iter();
        let mut deleted = self.users.delete_many(&asked.deletes).into_iter();
        let by_id = |id: i64| match &users {
            Ok(users) => {
                let users = users.as_slice();
                Ok(users.binary_search_by_key(&id, |user| user.id).ok().map(|at| &users[at]))
            }
            Err(error) => Err(error.clone()),
        };
        let outcome = |(task, deadline): (Task, &Instant)| match task {
            Task::Find(task) => {
                let user = by_id(task.id);
                shared(task, user, is_shared, Task::Find, Find::found)
            }
            Task::FindChanged(task) => {
                let user = by_id(task.id);
                shared(task, user, is_shared, Task::FindChanged, FindChanged::found)
            }
            Task::FindAddress(task) => {
                shared(task, next(&mut addresses), is_shared, Task::FindAddress, Address::found)
            }
            Task::Login(task) => shared(task, next(&mut logins), is_shared, Task::Login, Login::found),
            Task::FindKept(task) => {
                shared(task, next(&mut keys), is_shared, Task::FindKept, Repeatable::found)
            }
            Task::Page(task) => {
                let lists = match task.range {
                    Range::Page(_) => &mut pages,
                    Range::Walk { .. } => &mut walks,
                };
                shared(task, next(lists), is_shared, Task::Page, Page::listed)
            }
            Task::Create(Create { new, keyed: Some(keyed) }) => {
                let create = Repeatable { new, keyed };
                let mine = once.iter_mut().find(|(key, _)| *key == create.keyed.key);
                match mine.and_then(|(_, once)| once.take()) {
                    Some(once) => {
                        let again = |create: Repeatable| Task::Create(create.into_create());
                        hand_back(create, once, again, Repeatable::created)
                    }
                    None => Ok(Progress::Next(create.look_up())),
                }
            }
            Task::Create(task) => hand_back(task, one_of(&mut created), Task::Create, Create::created),
            Task::Update(task) => hand_back(task, one_of(&mut updated), Task::Update, Update::updated),
            Task::Delete(task) => hand_back(task, one_of(&mut deleted), Task::Delete, Delete::deleted),
            Task::HashNew(task) => task.execute(self),
            Task::CheckKept(task) => task.execute(self),
            Task::HashChange(task) => task.execute(self),
            Task::Verify(task) => task.execute(self),
            Task::CreateAlone(task) => task.execute(self, *deadline),
            Task::UpdateAlone(task) => task.execute(self, *deadline),
            Task::DeleteAlone(task) => {
                let (condition, deadline) = (&task.condition, *deadline);
                let deleted = self.users.delete(&db::Delete { id: task.id, condition, deadline });
                hand_back(task, deleted, Task::DeleteAlone, Delete::deleted)
            }
            Task::Rehash(task) => task.execute(self, *deadline),
        };
        tasks.into_iter().zip(deadlines).map(outcome).collect()
    }
}

/// Several lists of one kind.
fn lists(app: &App, asked: &[(Range, usize)]) -> Result<Vec<ListBody>, Error> {
    let mut lists: Vec<_> = asked.iter().map(|(range, memory)| ListBody::new(*range, *memory)).collect();
    app.users.list_many(asked, &mut lists)?;
    Ok(lists)
}

/// What a statement that several tasks share has for the next of them.
fn next<T>(found: &mut Result<vec::IntoIter<T>, Error>) -> Result<T, Error> {
    found.as_mut().map_err(|error| error.clone())?.next().ok_or_else(missing)
}

/// The same where each task has a result of its own.
fn one_of<T>(outcomes: &mut vec::IntoIter<Result<T, Error>>) -> Result<T, Error> {
    outcomes.next().unwrap_or_else(|| Err(missing()))
}

fn missing() -> Error {
    Error::Internal("a task has no outcome".to_owned())
}

/// Hands an outcome to the state that asked for it. What met a lock is the same task once more. An error of a statement
/// that tasks share is logged already.
pub(super) fn shared<S, T>(
    state: S,
    found: Result<T, Error>,
    is_shared: bool,
    again: impl FnOnce(S) -> Task,
    then: impl FnOnce(S, T) -> Outcome,
) -> Outcome {
    match found {
        Ok(value) => then(state, value),
        Err(Error::Contended) => Ok(Progress::Contended(again(state))),
        Err(error) if is_shared => Ok(Progress::Done(error.answer())),
        Err(error) => Err(error),
    }
}

/// Logs the error of a statement that tasks share, once. What is executed again is no error yet.
fn logged<T>(result: Result<Vec<T>, Error>, is_shared: bool) -> Result<vec::IntoIter<T>, Error> {
    if let Err(error) = &result
        && is_shared
        && !matches!(error, Error::Contended)
    {
        error.log(None);
    }
    result.map(Vec::into_iter)
}
