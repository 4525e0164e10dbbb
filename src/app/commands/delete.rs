//! `DELETE /users/{id}`: removes a user, in the states that the request allows.

use super::{Command, Outcome, Progress, settle};
use crate::app::{App, Lane, Needs, fields::Preconditions};
use crate::http::{Request, Response};
use crate::{db, error::Error, users::revision::Condition};
use std::time::Instant;

/// A user that is to be removed.
#[derive(Debug)]
pub(crate) struct Delete {
    id: i64,
    condition: Condition,
}

impl Delete {
    pub fn parse(request: &Request, id: Option<i64>) -> Result<Delete, Error> {
        let condition = Preconditions::of(request)?.into_condition();
        Ok(Delete { id: id.ok_or(Error::NotFound)?, condition })
    }

    pub fn needs(&self) -> Needs {
        let lane = if self.condition.is_simple() { Lane::Change } else { Lane::Single };
        Needs::row(lane, self.id)
    }

    pub fn execute(app: &App, deletes: Vec<(Delete, Instant)>) -> Vec<Outcome> {
        let given: Vec<_> = deletes
            .iter()
            .map(|(Delete { id, condition }, deadline)| db::Delete {
                id: *id,
                condition,
                deadline: *deadline,
            })
            .collect();
        let deleted = match &given[..] {
            [one] => vec![app.users.delete(one)],
            several => app.users.delete_many(several),
        };
        let answer = |_, ()| Ok(Progress::Done(Response::no_content()));
        let settled = deletes.into_iter().zip(deleted);
        settled.map(|((delete, _), deleted)| settle(delete, deleted, Command::Delete, answer)).collect()
    }
}
