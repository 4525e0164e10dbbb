//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::Item;
use crate::app::{App, Lane, Needs, fields::Preconditions};
use crate::http::{Request, Response};
use crate::{db, error::Error, users::revision::Condition};
use std::time::Instant;

/// A user that is to be removed.
#[derive(Debug)]
pub(crate) struct DeleteUser {
    id: i64,
    condition: Condition,
}

impl DeleteUser {
    pub fn parse(request: &Request, id: Option<i64>) -> Result<DeleteUser, Error> {
        let condition = Preconditions::parse(request)?.into_condition();
        Ok(DeleteUser { id: id.ok_or(Error::NotFound)?, condition })
    }

    pub fn needs(&self) -> Needs {
        let lane = if self.condition.is_simple() { Lane::Change } else { Lane::Single };
        Needs::row(lane, self.id)
    }

    pub fn execute(app: &App, deletes: Vec<Item<DeleteUser>>) {
        let given: Vec<_> = deletes.iter().map(|delete| delete.command.statement(delete.deadline)).collect();
        let deleted = app.users.delete_many(&given);
        for (delete, deleted) in deletes.into_iter().zip(deleted) {
            *delete.outcome = deleted.map(|()| Some(Response::no_content()));
        }
    }

    fn statement(&self, deadline: Instant) -> db::Delete<'_> {
        db::Delete { id: self.id, condition: &self.condition, deadline }
    }
}
