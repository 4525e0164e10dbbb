//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::Item;
use crate::app::{App, Lane, Needs, fields};
use crate::http::{Request, Response};
use crate::{db, error::Error, users::revision::Condition};

/// A user that is to be removed.
#[derive(Debug)]
pub(crate) struct DeleteUser {
    id: i64,
    condition: Condition,
}

impl DeleteUser {
    pub fn parse(request: &Request, id: Option<i64>) -> Result<DeleteUser, Error> {
        let condition = fields::condition(request)?;
        Ok(DeleteUser { id: id.ok_or(Error::NotFound)?, condition })
    }

    pub fn needs(&self) -> Needs {
        let lane = if self.condition.is_simple() { Lane::Change } else { Lane::Single };
        Needs::row(lane, self.id)
    }

    pub fn execute(app: &App, deletes: Vec<Item<DeleteUser>>) {
        let given = deletes.iter().map(|Item { command: DeleteUser { id, condition }, deadline, .. }| {
            db::Delete { id: *id, condition, deadline: *deadline }
        });
        let deleted = app.users.delete_many(&given.collect::<Vec<_>>());
        for (delete, deleted) in deletes.into_iter().zip(deleted) {
            *delete.outcome = deleted.map(|()| Some(Response::no_content()));
        }
    }
}
